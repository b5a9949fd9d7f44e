"""Rounds: one version from a stock into the replicas that take part, each to its own end.

A part ends by itself: done and committed, faulty, lost, or given up after its deadline.
None keeps the others waiting longer than that, and the bucket slots that a lost one
had not emptied are free again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic, perf_counter

from flyweight.errors import (
    DigestMismatch,
    FlyweightError,
    PeerFailed,
    TransferTimeout,
    listed,
)
from flyweight.memory import Buffer
from flyweight.sync.messages import (
    Abort,
    Begin,
    Bucket,
    Commit,
    Copied,
    Copy,
    Done,
    Emptied,
    Fault,
    Filled,
    Message,
    error_named,
)
from flyweight.sync.stock import Region, Stock

_LONG_BYTES = 32 << 20


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
        buckets: Sequence[Bucket],
        slots: Mapping[int, Buffer],
        should_verify: bool,
        digests: Mapping[Region, int] | None,
        has_readers: bool,
        is_digest_first: bool,
        on_release: Callable[[], None],
        spin: Callable[[Callable[[], bool]], object],
        timeout_seconds: float,
    ) -> None:
        """Call `on_release` once nothing reads the stock any more, and `spin` before a wait.

        Digests are first where both sides share a device: they would only take turns on it, and
        the replica, which stands still, would wait for both.
        """
        self.number, self.stock, self.parts = number, stock, list(parts)
        self._buckets, self._slots, self._should_verify = buckets, slots, should_verify
        self._known, self._timeout_seconds = digests, timeout_seconds
        self._has_readers, self._is_digest_first = has_readers, is_digest_first
        self._by_peer = {part.peer: part for part in parts}
        self._changed = threading.Condition()
        self.on_release, self._spin = on_release, spin
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
        with self._changed:
            self._changed.notify_all()

    # What the publisher does.

    def run(self) -> None:
        """Bring every part to its end."""
        started = perf_counter()
        try:
            digests = self._digests() if self._is_digest_first else None
            self._begin()
            if digests is None and self._is_long:
                digests = self._pour_and_digest()
            else:
                self._pour()
                digests = self._digests() if digests is None else digests
            if not self._has_readers:
                self.on_release()
            self._wait(lambda part: part.is_copied, "copied the weights")
            self.on_release()
            self._wait(lambda part: part.done is not None, "told its digests")
            self._end(digests, started)
        except BaseException as error:
            kind = type(error).__name__
            for part in self._going():
                self._give_up(
                    part,
                    error
                    if isinstance(error, FlyweightError)
                    else PeerFailed(f"the publisher stopped: {kind}: {error}"),
                )
            raise
        finally:
            self.on_release()

    def _begin(self) -> None:
        now = monotonic()
        for part in self.parts:
            part.heard = now
            part.send(part.begin)

    def _going(self) -> list[Part]:
        return [part for part in self.parts if part.is_going]

    def _pour(self) -> None:
        """Fill the buckets, each as soon as its slot is free, one while the one before is told."""
        last: dict[int, int] = {}
        packing: Bucket | None = None
        for bucket in self._buckets:
            if packing is not None and not self._is_free(last.get(bucket.slot)):
                self._tell(packing)
                packing = None
            self._wait_free(last.get(bucket.slot))
            if not any(bucket.number in part.buckets for part in self._going()):
                continue
            last[bucket.slot] = bucket.number
            self.stock.start_pack(bucket.pieces, self._slots[bucket.slot])
            if packing is not None:
                self._tell(packing)
            packing = bucket
        if packing is not None:
            self._tell(packing)

    def _tell(self, bucket: Bucket) -> None:
        """Finish a bucket, and hand it to those who need it."""
        deadline = monotonic() + self._timeout_seconds
        self.stock.pack(bucket.pieces, self._slots[bucket.slot], deadline)
        for part in self._going():
            if bucket.number in part.buckets:
                part.heard = monotonic()  # from now on it has something to do
                part.send(Filled(self.number, bucket.number))

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

    @property
    def _is_long(self) -> bool:
        """True if it is worth a thread to digest while buckets are poured."""
        return bool(self._buckets) and sum(part.nbytes for part in self.parts) > _LONG_BYTES

    def _pour_and_digest(self) -> Mapping[Region, int]:
        with ThreadPoolExecutor(1, "flyweight-digest") as pool:
            digests = pool.submit(self._digests)
            self._pour()
            return digests.result()

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
        """Return when `is_there` holds of every part that is still going."""
        self._spin(lambda: all(is_there(part) for part in self._going()))
        while True:
            with self._changed:
                waiting = [part for part in self._going() if not is_there(part)]
                if not waiting:
                    return
                now = monotonic()
                overdue = [p for p in waiting if now - p.heard > self._timeout_seconds]
                if not overdue:
                    first = min(part.heard for part in waiting) + self._timeout_seconds
                    self._changed.wait(max(first - now, 0.001))
                    continue
            for part in overdue:
                error = TransferTimeout(
                    f"replica {part.name!r} has not {what} in {self._timeout_seconds:g} s"
                )
                part.is_touched = True
                self._give_up(part, error)

    def _give_up(self, part: Part, error: FlyweightError) -> None:
        with self._changed:
            if not part.is_going:
                return
            part.error = error
        part.send(Abort(self.number, type(error).__name__, str(error)))

    def _end(self, digests: Mapping[Region, int], started: float) -> None:
        """Commit the parts that hold the right bytes."""
        for part in self._going():
            assert part.done is not None
            expected = tuple(digests[each] for each in part.regions) if self._should_verify else ()
            if part.done.digests != expected:
                wrong = self._differing(part, expected)
                error = DigestMismatch(
                    f"replica {part.name!r} holds other bytes than were published in {len(wrong)} "
                    f"tensors: {listed(wrong)}"
                )
                part.is_touched = True
                self._give_up(part, error)
                continue
            part.send(Commit(self.number, expected))
            with self._changed:
                part.is_committed = part.error is None
            part.seconds = perf_counter() - started

    def _differing(self, part: Part, expected: tuple[int, ...]) -> list[str]:
        assert part.done is not None
        found = part.done.digests
        if len(found) != len(expected):
            return [f"{len(found)} digests, {len(expected)} expected"]
        pairs = zip(part.copies, found, expected, strict=True)
        return sorted({self.stock.blocks[c.source].name for c, a, b in pairs if a != b})
