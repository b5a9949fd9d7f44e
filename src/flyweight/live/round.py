"""One round: a version goes from a source to the members that take part.

Each member ends on its own: it commits, reports a fault, is lost, or is given up at its
deadline. No member delays the others for longer than that, and the bucket slots that a lost
member had not emptied are free again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter

from flyweight.errors import (
    DigestMismatch,
    FlyweightError,
    PeerFailed,
    TransferTimeout,
    error_named,
    listed,
)
from flyweight.live import messages
from flyweight.live.report import ReplicaReport
from flyweight.live.source import BucketFill, PublishedSource, Region


@dataclass(eq=False)
class MemberRound:
    """The progress of one member in a round."""

    name: str
    pid: int
    copies: Sequence[messages.Copy]
    regions: Sequence[Region]
    """The region that each copy reads."""
    buckets: frozenset[int]
    """The buckets that it needs."""
    nbytes: int
    begin: messages.Begin
    send: Callable[[messages.Message], None]
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
    def is_running(self) -> bool:
        return self.error is None and not self.is_committed

    @property
    def report(self) -> ReplicaReport:
        done = self.done
        return ReplicaReport(
            self.name,
            self.pid,
            self.nbytes if self.is_committed else 0,
            self.seconds,
            0.0 if done is None else done.copy_seconds,
            0.0 if done is None else done.verify_seconds,
            self.begin.strategy,
            self.error,
            self.error is not None and self.is_touched,
        )


class Round:
    """Runs in the thread that publishes; the connection's thread calls `receive` and `lose`."""

    def __init__(
        self,
        number: int,
        source: PublishedSource,
        members: Sequence[MemberRound],
        *,
        fills: Sequence[BucketFill],
        should_verify: bool,
        digests: Mapping[Region, int] | None,
        has_mapped: bool,
        start: Callable[[Round], bool],
        on_release: Callable[[], None],
        spin: Callable[[Callable[[], bool]], object],
        timeout_seconds: float,
    ) -> None:
        """Prepare a round; `run` runs it.

        digests: the digests of the source, if they are known; else the round computes them first.
            Digests come before the copies, so that a write between them is detected.
        has_mapped: True if some member reads the source's own memory.
        start: calls `begin`, or returns False if the round must not start.
        on_release: called once nothing reads the source's memory, maybe more than once.
        spin: busy-waits for a condition for a short time, before the thread sleeps.
        timeout_seconds: a member without progress for this long is given up.
        """
        self.number, self.source, self.members = number, source, list(members)
        self._fills, self._should_verify, self._start = fills, should_verify, start
        self._known, self._timeout_seconds = digests, timeout_seconds
        self._has_mapped = has_mapped
        self._changed = threading.Condition()
        self._on_release, self._spin = on_release, spin
        self._expected: Mapping[Region, int] | None = None
        self._started, self._last_going = perf_counter(), 0.0
        self.digest_seconds = 0.0

    # Called by the connection's thread.

    def receive(
        self,
        member: MemberRound,
        message: messages.Emptied | messages.Copied | messages.Done | messages.Fault,
    ) -> None:
        """Record what a member says, unless it is of another round or over for the member."""
        with self._changed:
            if not member.is_running or message.round != self.number:
                return
            member.last_progress = monotonic()
            match message:
                case messages.Emptied(bucket=bucket):
                    member.emptied.add(bucket)
                case messages.Copied():
                    member.is_copied = True
                case messages.Done():
                    member.is_copied, member.done = True, message
                case messages.Fault(kind=kind, text=text, is_touched=is_touched):
                    member.is_touched = is_touched
                    member.error = error_named(kind, text)
            self._changed.notify_all()

    def lose(self, member: MemberRound, error: FlyweightError) -> None:
        """End the round for a member that is gone."""
        with self._changed:
            if member.is_running:
                member.error, member.is_touched = error, True
                self._changed.notify_all()

    def abort(self, error: FlyweightError) -> None:
        """End the round for all members that are still running."""
        for member in self._running():
            self._give_up(member, error)

    # Called by the thread that publishes.

    def run(self) -> None:
        """Run the round until every member has committed or failed."""
        self._started = perf_counter()
        try:
            self._expected = self._digests()
            if not self._start(self):
                return
            self._fill_buckets()
            if not self._has_mapped:
                self._on_release()
            self._wait(lambda member: member.is_copied, "copied the weights")
            self._on_release()
            self._wait(lambda member: not member.is_running, "sent its digests")
        except BaseException as error:
            kind = type(error).__name__
            self.abort(
                error
                if isinstance(error, FlyweightError)
                else PeerFailed(f"the publisher stopped: {kind}: {error}")
            )
            raise
        finally:
            self._on_release()

    def begin(self) -> None:
        """Tell all members that the round starts."""
        now = self._last_going = monotonic()
        for member in self._running():
            member.last_progress, member.has_begun = now, True
            member.send(member.begin)

    def _running(self) -> list[MemberRound]:
        return [member for member in self.members if member.is_running]

    def _fill_buckets(self) -> None:
        """Fill each bucket once its slot is free; devices fill one while the last is finished."""
        in_slot: dict[int, int] = {}
        started: BucketFill | None = None
        for fill in self._fills:
            bucket = fill.bucket
            before = in_slot.get(bucket.slot)
            is_same_slot = started is not None and started.bucket.slot == bucket.slot
            if started is not None and (is_same_slot or not self._is_empty(before)):
                self._finish(started)
                started = None
            if before is not None:
                self._wait(partial(_has_emptied, bucket=before), f"emptied bucket {before}")
            if not any(bucket.number in member.buckets for member in self._running()):
                continue
            in_slot[bucket.slot] = bucket.number
            fill.start()
            if started is not None:
                self._finish(started)
            started = fill
        if started is not None:
            self._finish(started)

    def _finish(self, fill: BucketFill) -> None:
        """Wait until a bucket is full, and tell the members that need it."""
        fill.run(monotonic() + self._timeout_seconds)
        number = fill.bucket.number
        for member in self._running():
            if number in member.buckets:
                member.last_progress = monotonic()  # only now it has something to do
                member.send(messages.Filled(self.number, number))

    def _is_empty(self, bucket: int | None) -> bool:
        return bucket is None or all(_has_emptied(each, bucket) for each in self._running())

    def _digests(self) -> Mapping[Region, int]:
        if not self._should_verify:
            return {}
        if self._known is not None:
            return self._known
        started = perf_counter()
        regions = dict.fromkeys(region for each in self._running() for region in each.regions)
        found = self.source.digests(list(regions), monotonic() + self._timeout_seconds)
        self.digest_seconds = perf_counter() - started
        return found

    def _wait(self, is_reached: Callable[[MemberRound], bool], step: str) -> None:
        """Return when every running member has reached a step; give up those that are overdue.

        Meanwhile members that are done are committed, and the others are told to wait on.
        """

        def is_over() -> bool:
            self._commit_done()
            return all(map(is_reached, self._running()))

        self._spin(is_over)
        while True:
            self._commit_done()
            with self._changed:
                waiting = [member for member in self._running() if not is_reached(member)]
                if not waiting:
                    return
                now = monotonic()
                overdue = [m for m in waiting if now - m.last_progress > self._timeout_seconds]
                if not overdue and not self._has_done():
                    first = min(each.last_progress for each in waiting) + self._timeout_seconds
                    self._changed.wait(max(min(first - now, self._going_seconds), 0.001))
            for member in overdue:
                member.is_touched = True
                text = f"replica {member.name!r} has not {step} in {self._timeout_seconds:g} s"
                self._give_up(member, TransferTimeout(text))
            if monotonic() - self._last_going > self._going_seconds:
                self._last_going = monotonic()
                for member in self._running():
                    member.send(messages.Going(self.number))

    @property
    def _going_seconds(self) -> float:
        return min(self._timeout_seconds / 8, 1.0)

    def _give_up(self, member: MemberRound, error: FlyweightError) -> None:
        with self._changed:
            if not member.is_running:
                return
            member.error = error
            self._changed.notify_all()
        if member.has_begun:
            member.send(messages.Abort(self.number, type(error).__name__, str(error)))

    def _has_done(self) -> bool:
        """True if some member waits for its commit."""
        return self._expected is not None and any(m.done is not None for m in self._running())

    def _commit_done(self) -> None:
        """Commit the members that hold the right bytes, and fail those that do not."""
        if not self._has_done():
            return
        assert self._expected is not None
        for member in self._running():
            if member.done is None:
                continue
            expected: tuple[int, ...] = ()
            if self._should_verify:
                expected = tuple(self._expected[each] for each in member.regions)
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
            with self._changed:  # a member that is lost at the same time is not committed
                if not member.is_running:
                    continue
                member.is_committed = True
            member.send(messages.Commit(self.number, expected))
            member.seconds = perf_counter() - self._started

    def _differing(
        self, member: MemberRound, found: tuple[int, ...], expected: tuple[int, ...]
    ) -> list[str]:
        if len(found) != len(expected):
            return [f"{len(found)} digests, {len(expected)} expected"]
        pairs = zip(member.copies, found, expected, strict=True)
        return sorted({self.source.blocks[c.source].name for c, a, b in pairs if a != b})


def _has_emptied(member: MemberRound, bucket: int) -> bool:
    return bucket not in member.buckets or bucket in member.emptied
