"""Staging: the streams of one version, in shared memory of the reader that fetches them.

Staging is an offer of the reader's kind: others may fetch ranges from it as soon as they have
arrived, until the reader's next update. Its memory has one owner: the session that may
write it, or the staging that is on the shelf.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from flyweight.cuda.pinned_memory import pinned
from flyweight.errors import FlyweightError, PeerFailed, PlanError, TransferTimeout, TransportError
from flyweight.live.offer import Served
from flyweight.live.plan import Plan
from flyweight.live.publish_id import PublishId
from flyweight.live.rows import RowDigests
from flyweight.memory import Buffer, Bytes
from flyweight.memory_table import BufferTable
from flyweight.transports.address import Endpoint
from flyweight.transports.segments import Segment

RANGE_BYTES = 4 << 20
"""Readers ask for so many bytes at once."""
WITHDRAW_SECONDS = 5.0
"""How long leases of staging run on after the next update has begun."""


@dataclass(frozen=True)
class Range:
    """Bytes of the stream of a source rank."""

    rank: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class StreamMemory:
    """Memory for the stream of a source rank."""

    segment: Segment
    rows: BufferTable
    digests: RowDigests


def staging_memory(
    plan: Plan, ranks: Sequence[int], room: int, devices: Sequence[int], *, is_writable: bool
) -> dict[int, StreamMemory]:
    """Allocate memory for streams; raise TransportError, with both values, if there is no room.

    devices: those that copy from it, for which it is pinned.
    is_writable: whether other processes write the memory: holders, or that of NIXL.
    """
    total = sum(plan.streams[rank].total for rank in ranks)
    if total > room:
        raise TransportError(
            f"staging needs {total} bytes and may take {room}; give the replica a larger "
            f"staging_bytes, or run it where the trainer's memory can be mapped"
        )
    found = {}
    for rank in ranks:
        stream = plan.streams[rank]
        segment = Segment.allocate(stream.total, is_writable_by_readers=is_writable)
        memory = Buffer.flat_at(segment.start, segment.nbytes, segment)
        owner = [segment, *(pinned(device, memory) for device in devices)]
        rows = stream.packed_at(segment.start, owner)
        found[rank] = StreamMemory(segment, rows, RowDigests(rows, plan.digest))
    return found


class Staging(Served):
    """One version that arrives. Threads that fetch, and threads that serve, use it together."""

    memory: dict[int, StreamMemory]

    def __init__(self, id: PublishId, plan: Plan, memory: dict[int, StreamMemory]) -> None:
        """memory: that of each source rank, in which one version follows another."""
        self.id, self.plan, self.memory = id, plan, memory
        self._from: dict[Range, tuple[Endpoint, str]] = {}
        """Where each range that has arrived came from, and how."""
        self._digests: dict[int, tuple[bytes, int]] = {}
        self._failure: FlyweightError | None = None
        self._is_complete = False
        self._changed = threading.Condition()

    # The side that fetches.

    @property
    def nbytes(self) -> int:
        return sum(each.segment.nbytes for each in self.memory.values())

    @property
    def progress(self) -> float:
        return self._arrived_bytes / max(self.nbytes, 1)

    @property
    def _arrived_bytes(self) -> int:
        with self._changed:
            return sum(each.nbytes for each in self._from)

    def _ranges(self, rank: int, start: int, stop: int) -> list[Range]:
        """Return the ranges that have bytes `start` to `stop` of a stream."""
        total = self.plan.streams[rank].total
        starts = range(start - start % RANGE_BYTES, stop, RANGE_BYTES)
        return [Range(rank, at, min(at + RANGE_BYTES, total)) for at in starts]

    def missing(self, rank: int) -> list[Range]:
        """Return the ranges that have not arrived, in the order in which all readers ask."""
        ranges = self._ranges(rank, 0, self.plan.streams[rank].total)
        return [each for each in ranges if each not in self._from]

    def space(self, each: Range) -> Bytes:
        return self.memory[each.rank].segment.bytes[each.start : each.stop]

    def ways(self, rank: int) -> set[str]:
        """Return how a stream has come."""
        return {way for each, (_, way) in list(self._from.items()) if each.rank == rank}

    def arrived(self, each: Range, holder: Endpoint, way: str) -> None:
        with self._changed:
            self._from[each] = holder, way
            self._changed.notify_all()

    def spoiled(self, rank: int, rows: Sequence[int]) -> set[Endpoint]:
        """Count the ranges of some rows as missing again; return the holders they came from."""
        starts, found = self.plan.streams[rank].starts, set()
        with self._changed:
            for each, (holder, _) in list(self._from.items()):
                if each.rank == rank and any(
                    starts[row] < each.stop and each.start < starts[row + 1] for row in rows
                ):
                    found.add(holder)
                    del self._from[each]
        return found

    def is_unproven(self, rank: int) -> bool:
        """True if some of a stream has arrived, and there are no digests to compare it with."""
        digests, _ = self._digests.get(rank, (b"", 0))
        return not digests and any(each.rank == rank for each in list(self._from))

    def set_digests(self, rank: int, digests: bytes, overflows: int) -> None:
        """Keep what the first holder says; all have it from the trainer."""
        with self._changed:
            known, _ = self._digests.setdefault(rank, (digests, overflows))
            if known != digests:
                raise TransportError(f"holders say different digests for {self.id}")
            self._changed.notify_all()

    def end(self, failure: FlyweightError | None = None) -> None:
        """Note that all has arrived and is right, or why what others wait for will not come."""
        with self._changed:
            self._is_complete, self._failure = failure is None, failure
            self._changed.notify_all()

    # The side that serves.

    @property
    def lease_seconds(self) -> float:
        return WITHDRAW_SECONDS

    def segments(self, rank: int) -> Sequence[Segment]:
        self._check(rank)
        return [self.memory[rank].segment]

    def digests(self, plan: Plan, rank: int, deadline: float) -> tuple[bytes, int]:
        self._check(rank)
        if not self._wait(lambda: rank in self._digests, deadline - monotonic()):
            raise TransferTimeout(f"no digests of {self.id} have arrived here yet")
        return self._digests[rank]

    def arrived_bytes(
        self, plan: Plan, rank: int, start: int, stop: int, seconds: float
    ) -> int | None:
        self._check(rank)
        needed = self._ranges(rank, start, stop)
        is_here = self._wait(lambda: all(each in self._from for each in needed), seconds)
        return None if is_here else self._arrived_bytes

    def parts(self, plan: Plan, rank: int, start: int, stop: int) -> Sequence[Bytes]:
        return [self.memory[rank].segment.bytes[start:stop]]

    def confirm(self, seconds: float) -> None:
        if not self._wait(lambda: self._is_complete, seconds):
            raise TransferTimeout(f"{self.id} is not complete here yet")

    def _check(self, rank: int) -> None:
        if rank not in self.memory:
            raise PlanError(f"what rank {rank} of the trainer has is not staged here")

    def _wait(self, is_true: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._failure or is_true(), max(seconds, 0))
            if self._failure is not None and not is_true():
                raise PeerFailed(f"it could not fetch the version itself: {self._failure}")
            return is_true()
