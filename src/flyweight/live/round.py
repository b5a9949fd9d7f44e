"""One round: a version goes from a source to the members that take part.

A member is a connected replica. Each one ends on its own: it commits, reports a fault, is lost,
or is given up at its deadline. No member delays the others for longer than that, and the bucket
slots that a lost member had not emptied are free again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter
from weakref import WeakMethod

import numpy as np

from flyweight.errors import (
    DigestMismatch,
    FlyweightError,
    PeerFailed,
    TransferTimeout,
    error_named,
    listed,
)
from flyweight.live import messages
from flyweight.live.connection import Connection, spin_seconds
from flyweight.live.published_model import PublishedVersion
from flyweight.live.rank_messages import Released
from flyweight.live.report import ReplicaReport
from flyweight.live.source import BucketFill
from flyweight.live.source_blocks import Agreement
from flyweight.live.source_part import fill_in_turn


@dataclass(eq=False)
class Member:
    """A connected replica."""

    id: bytes
    hello: messages.Hello
    last_seen: float
    """When its last message arrived."""
    agreement: Agreement | None = None
    request: messages.Ask | None = None
    """The version that it waits for."""
    round: MemberRound | None = None
    """Its progress in the round that it is in."""
    searched_request: int = 0
    """The number of the last request for which the store was searched."""
    is_busy: bool = False
    """True while it is in a round, or about to be."""
    request_in_round: int = 0
    """The number of the request that the round answers, even if it was withdrawn since."""
    lists_sent: int | None = None
    """The number of the memory that it was told of last, so that it is not told again."""
    version: int | None = None
    state: str = "joined"
    error: str = ""
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.hello.name


@dataclass(eq=False)
class MemberRound:
    """The progress of one member in a round."""

    changed: threading.Condition
    """The lock of the round: the round itself would be a cycle, and keep tensors alive."""
    connection: Connection
    member: Member
    agreement: Agreement
    begin: messages.Begin
    expected: bytes
    """The digests of what it must hold in the end; empty if nothing is verified."""
    buckets: frozenset[int]
    """The buckets that it needs."""
    is_mapped: bool
    """True if it reads the memory of this process's model itself."""
    on_emptied: WeakMethod[Callable[[], None]]
    """Called when it needs less than before."""
    last_progress: float = 0.0
    """When it last sent something, or got something to do."""
    has_begun: bool = False
    emptied: set[int] = field(default_factory=set)
    is_copied: bool = False
    done: messages.Done | None = None
    error: FlyweightError | None = None
    is_touched: bool = False
    is_committed: bool = False
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def is_running(self) -> bool:
        return self.error is None and not self.is_committed

    @property
    def report(self) -> ReplicaReport:
        done = self.done
        return ReplicaReport(
            self.name,
            self.member.hello.pid,
            self.agreement.nbytes if self.is_committed else 0,
            self.seconds,
            0.0 if done is None else done.copy_seconds,
            0.0 if done is None else done.verify_seconds,
            self.begin.strategy,
            self.error,
            self.error is not None and self.is_touched,
        )

    def has_emptied(self, bucket: int) -> bool:
        return bucket not in self.buckets or bucket in self.emptied

    def send(self, message: messages.Message) -> None:
        self.connection.send(message, self.member.id)

    # Called by the connection's thread.

    def receive(
        self, message: messages.Emptied | messages.Copied | messages.Done | messages.Fault
    ) -> None:
        """Record what the member says, unless it is of another round or over for the member."""
        with self.changed:
            if not self.is_running or message.round != self.begin.round:
                return
            self.last_progress = monotonic()
            match message:
                case messages.Emptied(bucket=bucket):
                    self.emptied.add(bucket)
                case messages.Copied():
                    self.is_copied = True
                case messages.Done():
                    self.is_copied, self.done = True, message
                case messages.Fault(kind=kind, text=text, is_touched=is_touched):
                    self.is_touched = is_touched
                    self.error = error_named(kind, text)
            self.changed.notify_all()
        self._relay()

    def lose(self, error: FlyweightError) -> None:
        """End the round for a member that is gone."""
        with self.changed:
            if self.is_running:
                self.error, self.is_touched = error, True
                self.changed.notify_all()
        self._relay()

    def _relay(self) -> None:
        if (on_emptied := self.on_emptied()) is not None:
            on_emptied()


class Round:
    """Runs in the thread that publishes."""

    def __init__(
        self,
        number: int,
        version: PublishedVersion,
        connection: Connection,
        *,
        fills: Sequence[BucketFill],
        num_ranks: int,
        tell_rank: Callable[[int, messages.Message], None],
        name_of: Callable[[int], str],
        beginning: threading.Condition,
        on_release: Callable[[], None],
        timeout_seconds: float,
    ) -> None:
        """Prepare a round; add its `members`, then `run` it.

        fills: the buckets of this process. Those of all ranks together are numbered in turn.
        num_ranks, tell_rank: the number of source ranks, and how to send one of them a message.
        name_of: returns the name of a block's tensor.
        beginning: a lock that is held while the round begins; a version is marked as replaced only
            under it, and a round whose version is replaced does not begin.
        on_release: called once nothing reads the source's memory, maybe more than once.
        timeout_seconds: a member without progress for this long is given up.
        """
        self.number, self.version, self.connection = number, version, connection
        self._fills, self._num_ranks, self._tell_rank = fills, num_ranks, tell_rank
        self._name_of, self._beginning = name_of, beginning
        self._on_release, self._timeout_seconds = on_release, timeout_seconds
        self._spin_seconds = spin_seconds(bool(version.source.devices))
        self.members: list[MemberRound] = []
        self.refused: list[ReplicaReport] = []
        """The members that the round cannot serve."""
        self.changed = threading.Condition()
        self._has_begun = False
        self._early: list[int] = []
        """The buckets of other ranks that were full before the round began."""
        self._filled_elsewhere: set[int] = set()
        """The buckets of other ranks that are full, and that some member has not emptied."""
        self._started, self._last_going = perf_counter(), 0.0
        self.digest_seconds = 0.0

    def abort(self, error: FlyweightError) -> None:
        """End the round for all members that are still running."""
        for member in self._running():
            self._give_up(member, error)

    def run(self) -> None:
        """Run the round until every member has committed or failed."""
        self._started = perf_counter()
        try:
            with self._beginning:
                if self.version.is_replaced:
                    return
                self.begin()
            self._fill_buckets()
            if not any(member.is_mapped for member in self.members):
                self._on_release()
            self._wait(lambda member: member.is_copied, "copied the weights")
            self._on_release()
            self._tell_ranks(Released(self.version.version))
            self._wait(lambda member: not member.is_running, "sent its digests")
        except BaseException as error:
            stopped = PeerFailed(f"the publisher stopped: {type(error).__name__}: {error}")
            self.abort(error if isinstance(error, FlyweightError) else stopped)
            raise
        finally:
            self._on_release()

    def begin(self) -> None:
        """Tell all members that the round starts."""
        now = self._last_going = monotonic()
        for member in self._running():
            member.last_progress, member.has_begun = now, True
            member.send(member.begin)
        with self.changed:
            self._has_begun, early = True, self._early
        for bucket in early:
            self.on_filled(bucket)

    def _running(self) -> list[MemberRound]:
        return [member for member in self.members if member.is_running]

    def _fill_buckets(self) -> None:
        """Fill the buckets of this process, in turn with the members that empty them."""
        fill_in_turn(
            self._fills,
            is_needed=lambda n: any(self._numbered(n) in m.buckets for m in self._running()),
            is_empty=lambda n: self._is_empty(self._numbered(n)),
            wait_empty=lambda n: self._wait(
                partial(MemberRound.has_emptied, bucket=self._numbered(n)), f"emptied bucket {n}"
            ),
            on_filled=lambda n: self.on_filled(self._numbered(n)),
            timeout_seconds=self._timeout_seconds,
        )

    def _numbered(self, fill: int) -> int:
        """Return the number that members know a bucket of this process by."""
        return fill * self._num_ranks

    def on_filled(self, bucket: int) -> None:
        """Tell the members that need a bucket that it is full."""
        with self.changed:
            if not self._has_begun:
                self._early.append(bucket)
                return
        for member in self._running():
            if bucket in member.buckets:
                member.last_progress = monotonic()  # only now it has something to do
                member.send(messages.Filled(self.number, bucket))
        if bucket % self._num_ranks:
            with self.changed:
                self._filled_elsewhere.add(bucket)
            self.relay_emptied()

    def relay_emptied(self) -> None:
        """Tell other ranks which of their buckets all members have emptied."""
        if not self._filled_elsewhere:
            return
        with self.changed:
            empty = [each for each in self._filled_elsewhere if self._is_empty(each)]
            self._filled_elsewhere.difference_update(empty)
        for bucket in empty:
            number, rank = divmod(bucket, self._num_ranks)
            self._tell_rank(rank, messages.Emptied(self.number, number))

    def _tell_ranks(self, message: messages.Message) -> None:
        for rank in range(1, self._num_ranks if self.version.is_shared else 1):
            self._tell_rank(rank, message)

    def _is_empty(self, bucket: int) -> bool:
        return all(each.has_emptied(bucket) for each in self._running())

    def _wait(self, is_reached: Callable[[MemberRound], bool], step: str) -> None:
        """Return when every running member has reached a step; give up those that are overdue.

        Meanwhile members that are done are committed, and the others get the message to wait on.
        """

        def is_over() -> bool:
            self._commit_done()
            return all(map(is_reached, self._running()))

        self.connection.spin(is_over, self._spin_seconds)
        while True:
            self._commit_done()
            with self.changed:
                waiting = [member for member in self._running() if not is_reached(member)]
                if not waiting:
                    return
                now = monotonic()
                overdue = [m for m in waiting if now - m.last_progress > self._timeout_seconds]
                if not overdue and not self._has_done():
                    first = min(each.last_progress for each in waiting) + self._timeout_seconds
                    self.changed.wait(max(min(first - now, self._going_seconds), 0.001))
            for member in overdue:
                member.is_touched = True
                text = f"replica {member.name!r} has not {step} in {self._timeout_seconds:g} s"
                self._give_up(member, TransferTimeout(text))
            if monotonic() - self._last_going > self._going_seconds:
                self._last_going = monotonic()
                self._tell_ranks(messages.Going(self.number))
                for member in self._running():
                    member.send(messages.Going(self.number))

    @property
    def _going_seconds(self) -> float:
        return min(self._timeout_seconds / 8, 1.0)

    def _give_up(self, member: MemberRound, error: FlyweightError) -> None:
        with self.changed:
            if not member.is_running:
                return
            member.error = error
            self.changed.notify_all()
        self.relay_emptied()
        if member.has_begun:
            member.send(messages.Abort(self.number, type(error).__name__, str(error)))

    def _has_done(self) -> bool:
        """True if some member waits for its commit."""
        return any(member.done is not None for member in self._running())

    def _commit_done(self) -> None:
        """Commit the members that hold the right bytes, and fail those that do not."""
        for member in self._running():
            if member.done is None:
                continue
            expected = member.expected
            if member.done.digests != expected:
                wrong = self._differing(member, member.done.digests, expected)
                member.is_touched = True
                self._give_up(
                    member,
                    DigestMismatch(
                        f"replica {member.name!r} holds other bytes than were published in "
                        f"{len(wrong)} tensors: {listed(wrong)}"
                    ),
                )
                continue
            with self.changed:  # a member that is lost at the same time is not committed
                if not member.is_running:
                    continue
                member.is_committed = True
            member.send(messages.Commit(self.number, expected))
            member.seconds = perf_counter() - self._started

    def _differing(self, member: MemberRound, found: bytes, expected: bytes) -> list[str]:
        if len(found) != len(expected):
            return [f"{len(found) // 8} digests, {len(expected) // 8} expected"]
        differs = np.frombuffer(found, np.uint64) != np.frombuffer(expected, np.uint64)
        blocks = np.unique(member.agreement.copies.source[differs])
        return sorted({self._name_of(block) for block in blocks.tolist()})
