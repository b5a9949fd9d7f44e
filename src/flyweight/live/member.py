"""Member: a connected replica, or one rank of it, as the publisher knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, KeysView, Sequence
from dataclasses import dataclass, field
from time import monotonic
from weakref import WeakMethod

from flyweight.checks import MAX_RANKS
from flyweight.errors import (
    FlyweightError,
    PeerRefused,
    VersionError,
    error_named,
    listed_by_value,
    ranks_listed,
)
from flyweight.live import messages
from flyweight.live.joined_offer import RoundOffer
from flyweight.live.report import ReplicaReport
from flyweight.live.round import Event, Failed, Reported
from flyweight.live.source_blocks import Agreement
from flyweight.ranks.run_directory import VARIABLE


@dataclass(eq=False)
class Member:
    """A connected replica, or one rank of it."""

    id: bytes
    hello: messages.Hello
    last_seen: float
    """When its last message arrived."""
    agreement: Agreement | None = None
    checks_digests: bool = False
    """True if it gets the digests with `Begin`, to check each tensor itself."""
    request: messages.Ask | None = None
    """The version that it waits for."""
    round: MemberRound | None = None
    """Its progress in the round that it is in."""
    is_searched: bool = False
    """True if the store was searched for that version."""
    request_in_round: int | None = None
    """The number of the request that a round answers, even if it was withdrawn since.

    None if it is in no round, and not about to be.
    """
    lists_sent: int | None = None
    """The number of the memory whose list it got last, so that it is not sent again."""
    avoided_until: float = 0.0
    """Before this time, by the monotonic clock, no other replica reads from it."""
    version: int | None = None
    state: str = "joined"
    error: str = ""
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def replica(self) -> str:
        """The key of its replica: its name, if it has several ranks.

        Replicas of one rank may have any names, also equal ones.
        """
        return self.name if self.hello.num_ranks > 1 else self.id.hex()

    @property
    def shown_name(self) -> str:
        """Its name in events and news, with its rank if there are several."""
        return self.name if self.hello.num_ranks == 1 else f"{self.name}/{self.hello.rank}"

    @property
    def is_waiting(self) -> bool:
        """True if it waits for a version and is in no round."""
        return self.request is not None and self.request_in_round is None

    def refused(self, error: FlyweightError) -> ReplicaReport:
        """Return the report of a replica that a publish cannot serve."""
        return ReplicaReport(self.name, self.hello.pid, error=error)

    @property
    def long_label(self) -> str:
        """Its name and its process, for people."""
        return f"replica {self.label}, process {self.hello.pid}"

    @property
    def label(self) -> str:
        """Its name for people, with its rank if there are several."""
        rank = f", rank {self.hello.rank}" if self.hello.num_ranks > 1 else ""
        return f"{self.name!r}{rank}"


RoundEvent = Event | messages.Has | messages.Emptied | messages.Unread


@dataclass(eq=False)
class MemberRound:
    """One member in a round."""

    member: Member
    agreement: Agreement
    offer: RoundOffer
    begin: messages.Begin
    feed: WeakMethod[Callable[[MemberRound, RoundEvent | None, FlyweightError | None], None]] = (
        field(init=False)
    )
    """The round that takes events. Weak: a cycle of references would keep tensors alive."""
    last_progress: float = 0.0
    """When it last did something, or got something to do."""
    copied_bytes: int = 0
    """How much it has copied, as it says with its heartbeats."""
    has_begun: bool = False
    is_gone: bool = False
    """True if nothing is sent to it any more: it is lost, or has said that it failed."""
    emptied: set[int] = field(default_factory=set)
    done: messages.Done | None = None
    error: FlyweightError | None = None
    is_touched: bool = False
    is_committed: bool = False
    seconds: float = 0.0

    @property
    def is_running(self) -> bool:
        return self.error is None and not self.is_committed

    @property
    def rank(self) -> int:
        return self.member.hello.rank

    @property
    def is_remote(self) -> bool:
        """True if it reads over the network."""
        return self.agreement.whole.is_remote

    @property
    def report(self) -> ReplicaReport:
        done = self.done
        return ReplicaReport(
            self.member.name,
            self.member.hello.pid,
            self.agreement.nbytes if self.is_committed else 0,
            self.seconds,
            0.0 if done is None else done.copy_seconds,
            0.0 if done is None else done.verify_seconds,
            self.begin.strategy,
            self.error,
            self.error is not None and self.is_touched,
        )

    @property
    def buckets(self) -> KeysView[int]:
        """The buckets that it needs."""
        return self.offer.memory.bucket_slots.keys()

    def has_emptied(self, bucket: int) -> bool:
        return bucket not in self.buckets or bucket in self.emptied

    # Called by the threads of connections.

    def receive(self, message: messages.InRound) -> None:
        """Handle what the member says, unless it is of another round."""
        if isinstance(message, messages.Tick):
            if message.copied_bytes != self.copied_bytes:
                self.copied_bytes, self.last_progress = message.copied_bytes, monotonic()
            return
        if message.round != self.begin.round:
            return
        if self.is_committed and isinstance(message, messages.Fault):
            self._fail_alone(message)
        if not self.is_running:
            return
        self.last_progress = monotonic()
        name, rank = self.member.replica, self.rank
        match message:
            case messages.Emptied(bucket=bucket):
                self.emptied.add(bucket)
                self._feed(message)
            case messages.Has() | messages.Unread():
                self._feed(message)
            case messages.Drained():
                self._feed(Reported(name, rank, "drained"))
            case messages.Copied():
                self._feed(Reported(name, rank, "copied"))
            case messages.Done() if self.done is None:
                self.done = message
                self._feed(Reported(name, rank, "done"))
            case messages.Committed():
                self._feed(Reported(name, rank, "committed"))
            case messages.Fault(kind=kind, text=text, is_touched=is_touched):
                self.is_gone = True
                failed = Failed(name, rank, text, is_touched, is_alive=True)
                self._feed(failed, error_named(kind, text))
            case _:
                pass

    def _fail_alone(self, fault: messages.Fault) -> None:
        """Report that a member cannot serve a version after all, though its replica committed."""
        self.error, self.is_touched = error_named(fault.kind, fault.text), fault.is_touched
        self.is_committed = False

    def lose(self, error: FlyweightError) -> None:
        """End the round for a member that is gone."""
        self.is_gone = True
        failed = Failed(self.member.replica, self.rank, str(error))
        self._feed(failed if self.is_running else None, error)

    def _feed(self, event: RoundEvent | None, error: FlyweightError | None = None) -> None:
        if (feed := self.feed()) is not None:
            feed(self, event, error)


def by_replica(members: Iterable[Member]) -> list[list[Member]]:
    """Return members in groups, those of each replica together, in the order of ranks."""
    found: dict[str, list[Member]] = {}
    for member in members:
        found.setdefault(member.replica, []).append(member)
    return [sorted(each, key=lambda member: member.hello.rank) for each in found.values()]


def whole_replicas(members: Iterable[Member]) -> list[list[Member]]:
    """Return the groups of `by_replica` that have all ranks of their replica."""
    return [each for each in by_replica(members) if len(each) == each[0].hello.num_ranks]


def joined_request(ranks: Sequence[Member]) -> messages.Ask | None:
    """Return the one request of all ranks of a replica; None if they request different versions.

    Ranks that hold different versions count as if they held none: all of them take the next one.
    """
    requests = [each.request for each in ranks if each.request is not None]
    versions = {each.version for each in requests} - {None}
    if len(requests) < len(ranks) or len(versions) > 1:
        return None
    have, held = {each.have for each in requests}, {each.held for each in requests}
    return messages.Ask(
        requests[0].ask,
        versions.pop() if versions else None,
        have.pop() if len(have) == 1 else None,
        held.pop() if len(held) == 1 else None,
        all(each.may_keep for each in requests),
    )


def different_requests(ranks: Sequence[Member]) -> VersionError:
    """Return why the ranks of a replica, which request different versions, get none."""
    versions = {each.hello.rank: each.request.version for each in ranks if each.request}
    return VersionError(
        f"the ranks of replica {ranks[0].name!r} must request the same version, not "
        f"{listed_by_value(versions)}"
    )


def late_ranks(members: Iterable[Member]) -> list[str]:
    """Return the replicas of which only some ranks wait for a version, with the missing ranks."""
    found = []
    for ranks in by_replica(members):
        num_ranks = ranks[0].hello.num_ranks
        late = set(range(num_ranks)) - {each.hello.rank for each in ranks if each.request}
        if 0 < len(late) < num_ranks:
            found.append(f"{ranks_listed(late)} of {ranks[0].name!r}")
    return found


def too_late(request: messages.Ask, version: int) -> VersionError:
    """Return why a request for an old version is denied."""
    return VersionError(
        f"version {request.version} was requested, the publisher is at {version} and does not hold "
        f"it any more"
    )


def refusal_of(member: Member, siblings: Iterable[Member]) -> PeerRefused | None:
    """Return why a replica, or a rank of one, cannot join the members of the same replica."""
    hello = member.hello
    if not 1 <= hello.num_ranks <= MAX_RANKS or not 0 <= hello.rank < hello.num_ranks:
        return PeerRefused(f"rank {hello.rank} of {hello.num_ranks} is no rank of a replica")
    if hello.num_ranks > 1 and not hello.decisions:
        return PeerRefused(f"rank {hello.rank} of replica {hello.name!r} names no directory")
    for other in siblings:
        if other.hello.num_ranks != hello.num_ranks:
            return PeerRefused(
                f"rank {hello.rank} of replica {hello.name!r} has num_ranks={hello.num_ranks}, its "
                f"rank {other.hello.rank} has {other.hello.num_ranks}; all ranks need the same"
            )
        if other.hello.decisions != hello.decisions:
            return PeerRefused(
                f"rank {hello.rank} of replica {hello.name!r} stores decisions in directory "
                f"{hello.decisions!r}, its rank {other.hello.rank} in {other.hello.decisions!r} "
                f"(DEVICE:INODE@BOOT); all ranks of an engine run on one host and need the same "
                f"directory, set {VARIABLE} for each of them"
            )
        if other.hello.rank == hello.rank and other.hello.pid != hello.pid:
            return PeerRefused(
                f"replica {member.label} is connected already, as process {other.hello.pid}; stop "
                f"that process, or give each engine a name of its own"
            )
    return None
