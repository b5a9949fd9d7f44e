"""The buckets of one round on their way through a fan-out, without I/O: events in, actions out.

The leader feeds it what members and sources report, and sends its actions on. Like `round.py` it
waits for nothing and reads no clock, so the tests try every order of events and losses.

Every member reads its buckets in order, each from the nearest ancestor that has it in staging. A
slot is free again once its bucket is unpacked and all children and grandchildren have it too, so
the loss of one member loses no bytes: those that read from it read from its parent. Packed slots of
the source follow the same rule. Memory that is gathered in place is there for the whole round.

Nothing can wait for ever. Take the first bucket that some live member lacks, and of those members
one whose parent has it. Its slots hold earlier buckets only, which all have, so they become free.
Then the nearest holder gives it the bucket; without any holder it is given up, by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import islice

from msgspec import Struct

from flyweight.plans.fanout import TRAINER, FanOut

SOURCE = TRAINER
"""The holder that is no member."""


class Read(Struct, frozen=True):
    """A member reads a bucket from a holder; any other read of this bucket ends.

    A member that has the bucket already ignores it: its report was on the way.
    """

    member: str
    bucket: int
    holder: str
    """A member, or SOURCE."""


class Free(Struct, frozen=True):
    """A member may reuse the slot of a bucket.

    It first ends reads that others still do there. They now read it from somebody else.
    """

    member: str
    bucket: int


class SourceFree(Struct, frozen=True):
    """Nobody reads a packed bucket from the source any more; its slot can be filled again."""

    bucket: int


class GiveUp(Struct, frozen=True):
    """A member cannot get all its buckets. It is out of the fan-out, as if it were lost."""

    member: str
    reason: str


Action = Read | Free | SourceFree | GiveUp


@dataclass
class Holding:
    """What a member, or the source, has of its buckets."""

    order: Sequence[int] = ()
    """The buckets that it reads, in order."""
    num_slots: int = 0
    missing: set[int] = field(default_factory=set)
    """Buckets that have not arrived."""
    staged: dict[int, bool] = field(default_factory=dict)
    """Buckets in slots, and whether they are unpacked. Gathered memory never counts as unpacked."""
    reads: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Buckets that it reads now: the holders that were asked, the last of which counts."""
    num_begun: int = 0
    """It has begun to read the first so many of `order`."""

    def copy(self) -> Holding:
        return Holding(
            self.order,
            self.num_slots,
            {*self.missing},
            {**self.staged},
            {**self.reads},
            self.num_begun,
        )


class Forwarding:
    """The state of a fan-out in one round. Each method is an event and returns the actions.

    `start` is the first event. Events that come late, twice, or of members and buckets that nobody
    knows change nothing.
    """

    def __init__(
        self,
        fan_out: FanOut,
        buckets: Mapping[str, Sequence[int]],
        *,
        packed: Collection[int] = (),
    ) -> None:
        """Begin a round.

        Args:
            fan_out: Who reads from whom.
            buckets: The buckets of each group in the order in which the source fills them.
            packed: The buckets that the source fills into slots, in turn. The others are gathered
                from memory that does not change during the round.
        """
        self.fan_out = fan_out
        gathered = {each for some in buckets.values() for each in some}.difference(packed)
        staged = dict.fromkeys(sorted(gathered), False)
        self.holdings = {SOURCE: Holding(missing={*packed}, staged=staged)}
        """By name. Members that are lost or given up have none."""
        for name, node in fan_out.nodes.items():
            order = buckets[node.group]
            self.holdings[name] = Holding(order, node.num_slots, {*order})
        self._num_readers: Counter[tuple[str, int]] = Counter()
        """How many members read a bucket from a holder."""
        self._actions: list[Action] = []
        self._is_relinked = False

    def copy(self) -> Forwarding:
        """Return the same state again, which changes by itself."""
        made = copy(self)
        made.holdings = {name: each.copy() for name, each in self.holdings.items()}
        made._num_readers = self._num_readers.copy()
        made._actions = []
        return made

    def start(self) -> list[Action]:
        """Tell members to read what is gathered."""
        self._tell(self.fan_out.children(SOURCE))
        return self._settled()

    def filled(self, bucket: int) -> list[Action]:
        """The source has filled a packed bucket into a slot."""
        source = self.holdings[SOURCE]
        if bucket in source.missing:
            source.missing.remove(bucket)
            source.staged[bucket] = True
            self._tell(self.fan_out.children(SOURCE))
            self._free(SOURCE, bucket)
        return self._settled()

    def has(self, member: str, bucket: int) -> list[Action]:
        """A bucket has arrived in a member's staging."""
        holding = self.holdings.get(member)
        if holding is None or bucket not in holding.reads:
            return []
        *_, holder = holding.reads.pop(bucket)
        self._num_readers[holder, bucket] -= 1
        holding.missing.remove(bucket)
        holding.staged[bucket] = False
        self._tell(self.fan_out.children(member))
        above = islice(self.fan_out.ancestors(member), 2)
        for each in dict.fromkeys((*above, holder)):
            self._free(each, bucket)
        return self._settled()

    def emptied(self, member: str, bucket: int) -> list[Action]:
        """A member has unpacked a bucket into its weights."""
        holding = self.holdings.get(member)
        if member != SOURCE and holding is not None and bucket in holding.staged:
            holding.staged[bucket] = True
            self._free(member, bucket)
        return self._settled()

    def failed_read(self, member: str, bucket: int, holder: str) -> list[Action]:
        """A holder could not give a bucket to a member: the next ancestor is asked."""
        holding = self.holdings.get(member)
        if holding is not None and holding.reads.get(bucket, ("no holder",))[-1] == holder:
            self._read(member, bucket)
            self._free(holder, bucket)
        return self._settled()

    def lost(self, member: str) -> list[Action]:
        """A member is dead, late or has failed: nobody reads from it any more."""
        if member != SOURCE and member in self.holdings:
            self._remove(member)
        return self._settled()

    def slow(self, member: str) -> list[Action]:
        """A member makes no progress: nobody reads from it, or waits for it where possible."""
        if member != SOURCE and member in self.holdings:
            # A packed bucket may be gone at the source, so somebody has to wait for this member.
            source = self.holdings[SOURCE].staged
            is_gathered = all(source.get(each) is False for each in self.holdings[member].missing)
            self.fan_out = self.fan_out.as_leaf(member, at_trainer=is_gathered)
            self._is_relinked = True
        return self._settled()

    def unreachable(self, member: str) -> list[Action]:
        """Others cannot read from a member, which may read on: its parent gives instead."""
        if member != SOURCE and member in self.holdings and self.fan_out.children(member):
            self.fan_out = self.fan_out.as_leaf(member)
            self._is_relinked = True
        return self._settled()

    def waiting_for(self) -> dict[str, str]:
        """Return the members that have something to do, and what comes first.

        The others wait for these or for the source; they are not slow.
        """
        found = {}
        for name, each in self.holdings.items():
            staged = [bucket for bucket, is_empty in each.staged.items() if not is_empty]
            if name != SOURCE and staged:
                found[name] = f"unpack bucket {staged[0]}"
            for bucket, (*_, holder) in each.reads.items():
                whom = repr(holder) if holder else "the trainer"
                found.setdefault(name, f"read bucket {bucket} from {whom}")
        return found

    def idle(self) -> set[str]:
        """Return the members that lack a bucket and have nothing to do: they wait for others."""
        return {
            name
            for name, each in self.holdings.items()
            if name != SOURCE and each.missing and not each.reads and all(each.staged.values())
        }

    def is_reading(self, member: str) -> bool:
        """True if a member reads a bucket now."""
        return member in self.holdings and bool(self.holdings[member].reads)

    def kept_waiting(self, member: str) -> set[str]:
        """Return the idle members that a member with something to do may keep waiting.

        They wait for buckets that it lacks, or for slots whose buckets it lacks. If it lacks none,
        or if all others have something to do as well, nobody waits for it.
        """
        if member not in self.holdings or not self.holdings[member].missing:
            return set()
        nodes = self.fan_out.nodes
        return {each for each in self.idle() if nodes[each].group == nodes[member].group}

    def _tell(self, members: Iterable[str]) -> None:
        """Tell members to read the next buckets for which they have slots."""
        for name in members:
            each = self.holdings.get(name)
            while (
                each is not None
                and each.num_begun < len(each.order)
                and len(each.reads) + len(each.staged) < each.num_slots
                and self._read(name, each.order[each.num_begun])
            ):
                each.num_begun += 1

    def _read(self, member: str, bucket: int) -> bool:
        """Tell a member where to read a bucket; return False if nobody has it yet, or any more."""
        reads = self.holdings[member].reads
        asked = reads.get(bucket, ())
        for holder in self.fan_out.ancestors(member):
            above = self.holdings[holder]
            if bucket in above.missing:
                return False
            if bucket in above.staged and holder not in asked:
                break
        else:
            self._give_up(member, bucket, asked)
            return False
        if asked:
            self._num_readers[asked[-1], bucket] -= 1
        reads[bucket] = (*asked, holder)
        self._num_readers[holder, bucket] += 1
        self._actions.append(Read(member, bucket, holder))
        return True

    def _free(self, holder: str, bucket: int) -> None:
        """Free the slot of a bucket if it is unpacked and nobody may need it there."""
        holding = self.holdings.get(holder)
        if holding is None or not holding.staged.get(bucket) or self._num_readers[holder, bucket]:
            return
        for child in self.fan_out.children(holder):
            for each in (child, *self.fan_out.children(child)):
                if bucket in self.holdings[each].missing:
                    return
        del holding.staged[bucket], self._num_readers[holder, bucket]
        self._actions.append(SourceFree(bucket) if holder == SOURCE else Free(holder, bucket))
        self._tell([holder])

    def _give_up(self, member: str, bucket: int, asked: Sequence[str]) -> None:
        source = "could not give it" if SOURCE in asked else "has refilled its slot"
        reason = f"bucket {bucket}: no member above can give it, and the source {source}"
        self._remove(member)
        self._actions.append(GiveUp(member, reason))

    def _remove(self, member: str) -> None:
        for bucket, asked in self.holdings.pop(member).reads.items():
            self._num_readers[asked[-1], bucket] -= 1
        self.fan_out = self.fan_out.without(member)
        self._is_relinked = True

    def _settled(self) -> list[Action]:
        """Return the actions of an event, after those that follow from changed ancestors."""
        while self._is_relinked:
            self._is_relinked = False
            for name in [*self.holdings]:
                reads = self.holdings[name].reads if name in self.holdings else {}
                for bucket, asked in [*reads.items()]:
                    if name in self.holdings and asked[-1] not in self.fan_out.ancestors(name):
                        self._read(name, bucket)
            self._tell([*self.holdings])
            for name, holding in [*self.holdings.items()]:
                for bucket in [*holding.staged]:
                    self._free(name, bucket)
        actions, self._actions = self._actions, []
        return actions
