"""Rounds: one version from a stock into the replicas that take part, each to its own end.

A part ends by itself: done and committed, faulty, lost, or given up after its deadline.
None keeps the others waiting longer than that, and the bucket slots that a lost one
had not emptied are free again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic, perf_counter

from flyweight.errors import (
    DigestMismatch,
    FlyweightError,
    PeerFailed,
    TransferTimeout,
    error_named,
    listed,
)
from flyweight.live.messages import (
    Abort,
    Begin,
    Commit,
    Copied,
    Copy,
    Done,
    Emptied,
    Fault,
    Filled,
    Going,
    Message,
)
from flyweight.live.source import Packing, Region, Stock


@dataclass(eq=False)
class Part:
    """One replica's part in a round."""

    peer: bytes
    name: str
    pid: int
    copies: Sequence[Copy]
    regions: Sequence[Region]
    buckets: frozenset[int]
    """The buckets that it needs."""
    nbytes: int
    begin: Begin
    send: Callable[[Message], None]
    heard: float = 0.0
    is_begun: bool = False
    emptied: set[int] = field(default_factory=set)
    is_copied: bool = False
    done: Done | None = None
    error: FlyweightError | None = None
    is_touched: bool = False
    is_committed: bool = False
    seconds: float = 0.0

    @property
    def is_going(self) -> bool:
        return self.error is None and not self.is_committed


class Round:
    """Runs in the thread of whoever publishes; what replicas say comes in by `hear`."""

    def __init__(
        self,
        number: int,
        stock: Stock,
        parts: Sequence[Part],
        *,
        packings: Sequence[Packing],
        should_verify: bool,
        digests: Mapping[Region, int] | None,
        has_readers: bool,
        admit: Callable[[Round], bool],
        on_release: Callable[[], None],
        spin: Callable[[Callable[[], bool]], object],
        timeout_seconds: float,
    ) -> None:
        """Begin by `admit`, which may refuse; call `on_release` once nothing reads the stock.

        `spin` is called before a wait. Digests are made first: what changes afterwards and before
        it was copied is found out, and the replicas do not stand still meanwhile.
        """
        self.number, self.stock, self.parts = number, stock, list(parts)
        self._packings, self._should_verify, self._admit = packings, should_verify, admit
        self._known, self._timeout_seconds = digests, timeout_seconds
        self._has_readers = has_readers
        self._by_peer = {part.peer: part for part in parts}
        self._changed = threading.Condition()
        self._on_release, self._spin = on_release, spin
        self._expected: Mapping[Region, int] | None = None
        self._started, self._told = perf_counter(), 0.0
        self.digest_seconds = 0.0

    # What comes from the wire.

    def hear(self, peer: bytes, message: Emptied | Copied | Done | Fault) -> None:
        with self._changed:
            part = self._by_peer.get(peer)
            if part is None or not part.is_going or message.round != self.number:
                return
            part.heard = monotonic()
            match message:
                case Emptied(bucket=bucket):
                    part.emptied.add(bucket)
                case Copied():
                    part.is_copied = True
                case Done():
                    part.is_copied, part.done = True, message
                case Fault(kind=kind, text=text, is_touched=is_touched):
                    part.is_touched = is_touched
                    part.error = error_named(kind, text)
            self._changed.notify_all()

    def part_of(self, peer: bytes) -> Part:
        return self._by_peer[peer]

    def lose(self, peer: bytes, error: FlyweightError) -> None:
        """End the part of a replica that is gone."""
        with self._changed:
            part = self._by_peer.get(peer)
            if part is not None and part.is_going:
                part.error, part.is_touched = error, True
                self._changed.notify_all()

    def cut(self, error: FlyweightError) -> None:
        """End all parts that are still going."""
        for part in self._going():
            self._give_up(part, error)

    # What the publisher does.

    def run(self) -> None:
        """Bring every part to its end, each by itself."""
        self._started = perf_counter()
        try:
            self._expected = self._digests()
            if not self._admit(self):
                return
            self._pour()
            if not self._has_readers:
                self._on_release()
            self._wait(lambda part: part.is_copied, "copied the weights")
            self._on_release()
            self._wait(lambda part: not part.is_going, "told its digests")
        except BaseException as error:
            kind = type(error).__name__
            self.cut(
                error
                if isinstance(error, FlyweightError)
                else PeerFailed(f"the publisher stopped: {kind}: {error}")
            )
            raise
        finally:
            self._on_release()

    def begin(self) -> None:
        """Tell all parts that it starts."""
        now = self._told = monotonic()
        for part in self._going():
            part.heard, part.is_begun = now, True
            part.send(part.begin)

    def _going(self) -> list[Part]:
        return [part for part in self.parts if part.is_going]

    def _pour(self) -> None:
        """Fill the buckets, each as soon as its slot is free, one while the one before is told."""
        last: dict[int, int] = {}
        packing: Packing | None = None
        for each in self._packings:
            bucket = each.bucket
            before = last.get(bucket.slot)
            is_same_slot = packing is not None and packing.bucket.slot == bucket.slot
            if packing is not None and (is_same_slot or not self._is_free(before)):
                self._tell(packing)
                packing = None
            self._wait_free(before)
            if not any(bucket.number in part.buckets for part in self._going()):
                continue
            last[bucket.slot] = bucket.number
            each.start()
            if packing is not None:
                self._tell(packing)
            packing = each
        if packing is not None:
            self._tell(packing)

    def _tell(self, packing: Packing) -> None:
        """Finish a bucket, and hand it to those who need it."""
        packing.run(monotonic() + self._timeout_seconds)
        number = packing.bucket.number
        for part in self._going():
            if number in part.buckets:
                part.heard = monotonic()  # from now on it has something to do
                part.send(Filled(self.number, number))

    def _is_free(self, before: int | None) -> bool:
        return before is None or all(
            before not in part.buckets or before in part.emptied for part in self._going()
        )

    def _wait_free(self, before: int | None) -> None:
        """Return when the bucket that was in a slot before is out of it."""
        if before is not None:
            self._wait(
                lambda part: before not in part.buckets or before in part.emptied,
                f"emptied bucket {before}",
            )

    def _digests(self) -> Mapping[Region, int]:
        if not self._should_verify:
            return {}
        if self._known is not None:
            return self._known
        started = perf_counter()
        wanted = dict.fromkeys(region for part in self._going() for region in part.regions)
        found = self.stock.digests(list(wanted), monotonic() + self._timeout_seconds)
        self.digest_seconds = perf_counter() - started
        return found

    def _wait(self, is_there: Callable[[Part], bool], what: str) -> None:
        """Return when `is_there` holds of every part that is still going.

        Meanwhile whoever is done is committed, and the others are told that it goes on.
        """

        def is_over() -> bool:
            self._commit_done()
            return all(map(is_there, self._going()))

        self._spin(is_over)
        while True:
            self._commit_done()
            with self._changed:
                waiting = [part for part in self._going() if not is_there(part)]
                if not waiting:
                    return
                now = monotonic()
                overdue = [p for p in waiting if now - p.heard > self._timeout_seconds]
                if not overdue and not self._has_done():
                    first = min(part.heard for part in waiting) + self._timeout_seconds
                    self._changed.wait(max(min(first - now, self._pause_seconds), 0.001))
            for part in overdue:
                error = TransferTimeout(
                    f"replica {part.name!r} has not {what} in {self._timeout_seconds:g} s"
                )
                part.is_touched = True
                self._give_up(part, error)
            if monotonic() - self._told > self._pause_seconds:
                self._told = monotonic()
                for part in self._going():
                    part.send(Going(self.number))

    @property
    def _pause_seconds(self) -> float:
        return min(self._timeout_seconds / 8, 1.0)

    def _give_up(self, part: Part, error: FlyweightError) -> None:
        with self._changed:
            if not part.is_going:
                return
            part.error = error
            self._changed.notify_all()
        if part.is_begun:
            part.send(Abort(self.number, type(error).__name__, str(error)))

    def _has_done(self) -> bool:
        """True if some part only waits to be committed."""
        return self._expected is not None and any(p.done is not None for p in self._going())

    def _commit_done(self) -> None:
        """Commit the parts that hold the right bytes, and end those that do not."""
        if not self._has_done():
            return
        assert self._expected is not None
        for part in self._going():
            if part.done is None:
                continue
            expected: tuple[int, ...] = ()
            if self._should_verify:
                expected = tuple(self._expected[each] for each in part.regions)
            if part.done.digests != expected:
                wrong = self._differing(part, expected)
                error = DigestMismatch(
                    f"replica {part.name!r} holds other bytes than were published in {len(wrong)} "
                    f"tensors: {listed(wrong)}"
                )
                part.is_touched = True
                self._give_up(part, error)
                continue
            with self._changed:  # either committed or ended, whoever comes first
                if not part.is_going:
                    continue
                part.is_committed = True
            part.send(Commit(self.number, expected))
            part.seconds = perf_counter() - self._started

    def _differing(self, part: Part, expected: tuple[int, ...]) -> list[str]:
        assert part.done is not None
        found = part.done.digests
        if len(found) != len(expected):
            return [f"{len(found)} digests, {len(expected)} expected"]
        pairs = zip(part.copies, found, expected, strict=True)
        return sorted({self.stock.blocks[c.source].name for c, a, b in pairs if a != b})
