"""FannedOut: the members of a round that read over the network, from the source and each other.

`forwarding.py` decides who reads which bucket from whom. This sends its actions to the members and
feeds it what they say. A member that reads gets the handle of the holder's staging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from weakref import WeakMethod

from flyweight.errors import FlyweightError, PeerLost, error_named
from flyweight.live import messages
from flyweight.live.fetch import STAGING_SLOTS
from flyweight.live.forwarding import SOURCE, Action, Forwarding, Free, GiveUp, Read, SourceFree
from flyweight.live.member import MemberRound
from flyweight.plans.fanout import Node, fan_out
from flyweight.transports.network import NetworkHandle

_SLOW_SECONDS = 3.0
"""Nobody reads any more from a member that makes no progress for this long, and delays others."""
_AVOIDED_SECONDS = 600.0
"""Nobody reads in the next rounds from a member that others cannot reach, or that gave wrong bytes.
"""
_MAX_UNREACHABLE = 2
"""If no member can be read from, the others are not tried after so many: a firewall may be why."""


class FannedOut:
    """The fan-out of one round; the lock of the round guards it."""

    def __init__(
        self,
        round_: int,
        members: Sequence[MemberRound],
        *,
        send: Callable[[MemberRound, messages.Message], None],
        give_up: Callable[[MemberRound, FlyweightError], None],
    ) -> None:
        """Plan who reads from whom.

        members: all who read over the network.
        send: a method that sends a message to a member.
        give_up: a method that is called for a member that cannot get all its buckets. Both are
            weak: a cycle of references would keep tensors alive.
        """
        self._round = round_
        self._send_method, self._give_up_method = WeakMethod(send), WeakMethod(give_up)
        self.members = {each.member.id.hex(): each for each in members}
        nodes, buckets, packed, now = [], {}, set(), monotonic()
        for name, each in self.members.items():
            hello, memory = each.member.hello, each.offer.memory
            group = str(each.offer.lists)
            can_forward = hello.can_forward and now >= each.member.avoided_until
            nodes.append(Node(name, hello.host or name, group, can_forward, STAGING_SLOTS))
            buckets[group] = sorted(memory.bucket_slots)
            # What is gathered has no slot of the source, but a number below 0.
            packed |= {bucket for bucket, slot in memory.bucket_slots.items() if slot >= 0}
        self.buckets = frozenset(bucket for some in buckets.values() for bucket in some)
        self._forwarding = Forwarding(fan_out(nodes), buckets, packed=packed)
        self._free_at_source: set[int] = set()
        self._handles: dict[tuple[str, int], NetworkHandle] = {}
        """Where each member has a bucket for others to read."""
        self._holders: dict[tuple[str, int], tuple[str, str]] = {}
        """The holder that a member reads a bucket from, or has read it from, and its key."""
        self._errors: dict[str, FlyweightError] = {}
        self._slow: set[str] = set()
        self._idle_since: dict[str, float] = {}
        """Since when members wait for others."""
        self._givers: dict[str, set[str]] = {}
        """The members that each member has read buckets from."""
        self._unreachable: set[str] = set()
        self._early: list[int] | None = []
        """The buckets that were filled before the members knew of the round; then None."""

    def start(self) -> None:
        """Let the members read: they all know of the round, apart from those that are lost."""
        for name, each in self.members.items():
            if not each.is_running:
                self._carry_out(self._forwarding.lost(name))
        self._carry_out(self._forwarding.start())
        early, self._early = self._early or [], None
        for bucket in early:
            self.filled(bucket)

    def filled(self, bucket: int) -> None:
        """Let members read a bucket that the source has filled."""
        if self._early is not None:
            self._early.append(bucket)
        else:
            self._carry_out(self._forwarding.filled(bucket))

    def is_free(self, bucket: int) -> bool:
        """True if nobody reads a packed bucket from the source any more."""
        return bucket not in self.buckets or bucket in self._free_at_source

    def lost(self, member: MemberRound) -> None:
        """Let nobody read from a member that is gone or has failed."""
        if self._early is None:  # else `start` leaves it out: others do not know of the round yet
            self._carry_out(self._forwarding.lost(member.member.id.hex()))

    def on_message(
        self, member: MemberRound, message: messages.Has | messages.Emptied | messages.Unread
    ) -> None:
        """Handle what a member says of a bucket."""
        if self._early is not None:
            return  # nobody reads yet
        name, bucket = member.member.id.hex(), message.bucket
        match message:
            case messages.Has(handle=handle):
                self._has(name, bucket, handle)
            case messages.Emptied():
                self._carry_out(self._forwarding.emptied(name, bucket))
            case messages.Unread(key=key, kind=kind, text=text):
                holder, current = self._holders.get((name, bucket), ("", ""))
                if key != current:
                    return  # it reads from somebody else meanwhile
                self._errors[name] = error_named(kind, text)
                if holder != SOURCE:  # or each next bucket would be tried there first
                    self._avoid(holder)
                self._carry_out(self._forwarding.failed_read(name, bucket, holder))

    def _has(self, name: str, bucket: int, handle: NetworkHandle | None) -> None:
        if handle is None:
            self._carry_out(self._forwarding.unreachable(name))
        elif bucket in self.buckets:
            self._handles[name, bucket] = handle
        holder, _ = self._holders.get((name, bucket), (SOURCE, ""))
        if holder != SOURCE:
            self._givers.setdefault(name, set()).add(holder)
        self._carry_out(self._forwarding.has(name, bucket))

    def _avoid(self, holder: str) -> None:
        """Let nobody read from a member; nor in the next rounds if nobody ever could."""
        self._carry_out(self._forwarding.unreachable(holder))
        givers = {giver for some in self._givers.values() for giver in some}
        if holder in givers:
            return
        self._unreachable.add(holder)
        avoided = {holder}
        if not givers and len(self._unreachable) >= _MAX_UNREACHABLE:
            avoided.update(self.members)
        for name in avoided:
            self.members[name].member.avoided_until = monotonic() + _AVOIDED_SECONDS
            self._carry_out(self._forwarding.unreachable(name))

    def blame(self, member: MemberRound) -> str:
        """Return whom a member with wrong bytes has read from; avoid those in the next rounds."""
        givers = [self.members[each] for each in self._givers.get(member.member.id.hex(), ())]
        for each in givers:
            each.member.avoided_until = monotonic() + _AVOIDED_SECONDS
        names = sorted(each.member.label for each in givers)
        return f"; it read from {', '.join(names)}" if names else ""

    def check_slow(self) -> None:
        """Let nobody read from members that make no progress.

        An engine that drains unpacks nothing, and others can read its staging meanwhile. So it is
        slow only once another one has waited for it as long.
        """
        now, idle = monotonic(), self._forwarding.idle()
        self._idle_since = {name: self._idle_since.get(name, now) for name in idle}
        for name in self._forwarding.waiting_for():
            if name in self._slow or now - self.members[name].last_progress <= _SLOW_SECONDS:
                continue
            since = [
                self._idle_since.get(each, now) for each in self._forwarding.kept_waiting(name)
            ]
            if self._forwarding.is_reading(name) or now - min(since, default=now) > _SLOW_SECONDS:
                self._slow.add(name)
                self._carry_out(self._forwarding.slow(name))

    @property
    def is_busy(self) -> bool:
        """True if some member has something to do."""
        return bool(self._forwarding.waiting_for())

    def idle(self) -> list[MemberRound]:
        """Return the members that lack a bucket which nobody can give them yet."""
        return [self.members[name] for name in self._forwarding.idle()]

    def _carry_out(self, actions: Sequence[Action]) -> None:
        send, give_up = self._send_method(), self._give_up_method()
        if send is None or give_up is None:
            return  # the round is over
        for action in actions:
            match action:
                case Read(name, bucket, holder):
                    handle = None if holder == SOURCE else self._handles[holder, bucket]
                    key = "" if handle is None else handle.key
                    self._holders[name, bucket] = holder, key
                    member = self.members[name]
                    member.last_progress = monotonic()  # only now it has something to do
                    self._idle_since.pop(name, None)
                    send(member, messages.Filled(self._round, bucket, handle))
                case Free(name, bucket):
                    self._handles.pop((name, bucket), None)
                    send(self.members[name], messages.Free(self._round, bucket))
                case SourceFree(bucket):
                    self._free_at_source.add(bucket)
                case GiveUp(name, reason):
                    error = self._errors.get(name)
                    found = PeerLost(reason) if error is None else type(error)(f"{reason}: {error}")
                    give_up(self.members[name], found)
