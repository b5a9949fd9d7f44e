"""Offer: one version of a rank's blocks in memory that does not change while it is leased."""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from flyweight.cuda.pinned_memory import pinned
from flyweight.digest import DigestKind
from flyweight.errors import DigestMismatch, PlanError, listed
from flyweight.live.buckets import Bucket, pieces_of
from flyweight.live.plan import Plan, Stream
from flyweight.live.publish_id import PublishId
from flyweight.live.rows import RowCopies, RowDigests
from flyweight.memory import Buffer, Bytes
from flyweight.memory_table import HOST, BufferTable, Integers, aligned
from flyweight.transports.device_segments import places_on_devices
from flyweight.transports.segments import Placed, Segment, places_in_shared_memory

RECLAIM_SECONDS = 10.0
"""How long leases of a copy that is not offered any more run on."""
COPY_SECONDS = 20.0
"""How long the copy of one range may take, for instance from a device."""


class Served(ABC):
    """What a holder gives readers: an offer of the trainer, or staging of another reader."""

    id: PublishId
    memory: object
    """What its bytes lie in; the same for another version if nothing has moved."""

    @property
    def lease_seconds(self) -> float:
        """How long a lease that begins now runs, at least."""
        return RECLAIM_SECONDS

    def mappable(self, rank: int) -> tuple[Placed, BufferTable] | None:
        """Where readers on this host can map a rank's blocks; None if they must fetch them."""
        return None

    def segments(self, rank: int) -> Sequence[Segment]:
        """Return the shared memory that its bytes lie in, as far as they do."""
        found = self.mappable(rank)
        return [each for each in found[0].segments if isinstance(each, Segment)] if found else []

    @abstractmethod
    def digests(self, plan: Plan, rank: int, deadline: float) -> tuple[bytes, int]:
        """Return the digests of a stream, empty if the trainer does not verify, and overflows."""

    def arrived_bytes(
        self, plan: Plan, rank: int, start: int, stop: int, seconds: float
    ) -> int | None:
        """Wait until a range of a stream is there; return what else has arrived if it is not."""
        return None

    @abstractmethod
    def parts(self, plan: Plan, rank: int, start: int, stop: int) -> Sequence[Bytes]:
        """Return the bytes of a range of a stream, where they lie if that is possible."""

    def copies(self, plan: Plan, rank: int, sink: Bytes) -> RowCopies:
        """Return what copies a whole stream into memory that a reader shares."""
        raise PlanError("staging is read or mapped; only a trainer fills memory of others")

    def confirm(self, seconds: float) -> None:  # noqa: B027
        """Raise unless all that was given to readers is the version.

        Memory that does not change needs nothing: that a lease still runs is the proof.
        """


class OfferMemory:
    """Memory for a rank's blocks, in which one version follows another."""

    def __init__(self, rank: int, table: BufferTable, placed: Placed | None) -> None:
        self.rank, self.table, self.placed = rank, table, placed
        self._rows: WeakKeyDictionary[Plan, tuple[BufferTable, RowDigests]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @classmethod
    def of_model(cls, rank: int, table: BufferTable) -> OfferMemory:
        """Return the model's own memory, which readers can map if it is shared memory."""
        if (table.device == HOST).all():
            return cls(rank, table, places_in_shared_memory(table))
        return cls(rank, table, places_on_devices(table))

    def rows(self, plan: Plan, rank: int) -> tuple[BufferTable, RowDigests]:
        """Return where the rows of a stream lie, and what digests them; prepared once."""
        if rank != self.rank:
            raise PlanError(f"this is rank {self.rank} of the trainer, not rank {rank}")
        with self._lock:
            if plan not in self._rows:
                stream = plan.streams[rank]
                rows = stream.in_source(self.table)
                self._rows[plan] = rows, RowDigests(rows, plan.digest, stream.cast)
            return self._rows[plan]


def packed_memory(
    shape: Integers, item_bytes: Integers, devices: Sequence[int] = ()
) -> tuple[BufferTable, Placed]:
    """Allocate shared memory for blocks, one after the other; pin it for devices that copy."""
    starts, total = aligned(shape.prod(axis=1, dtype=np.int64) * item_bytes)
    segment = Segment.allocate(total)
    memory = Buffer.flat_at(segment.start, segment.nbytes, segment)
    owner = [pinned(each, memory) for each in devices] or segment
    memory = Buffer.flat_at(segment.start, segment.nbytes, owner)
    table = BufferTable.packed(memory, starts, shape, item_bytes)
    return table, Placed((segment,), np.zeros(len(shape), np.int64), starts)


class CopyMemory(OfferMemory):
    """A copy of a rank's blocks in shared memory, compared with the model when it is made."""

    def __init__(self, rank: int, model: BufferTable, names: Sequence[str]) -> None:
        """names: of which tensor each block is."""
        table, placed = packed_memory(model.shape, model.item_bytes, model.devices)
        super().__init__(rank, table, placed)
        kind: DigestKind = "words" if model.devices else "xxh3"
        self._copies = RowCopies(table, model, kind)
        self._model, self._names = RowDigests(model, kind), names

    def refresh(self, deadline: float, *, should_verify: bool) -> None:
        """Copy the model again; raise DigestMismatch if it changed meanwhile."""
        before = self._model.run(deadline)[0] if should_verify else None
        after = self._copies.start(should_digest=should_verify)(deadline)
        if before is None or after is None:
            return
        changed = sorted({self._names[row] for row in np.flatnonzero(before != after).tolist()})
        if changed:
            raise DigestMismatch(
                f"{len(changed)} tensors changed while they were copied: {listed(changed)}; a "
                f"trainer steps after publish, or after wait_copied"
            )


class Offer(Served):
    """A version in an `OfferMemory`. Digests of a kind are computed when they are first needed."""

    memory: OfferMemory

    def __init__(
        self,
        id: PublishId,
        memory: OfferMemory,
        *,
        until: float | None = None,
        should_verify: bool,
        least_seconds: float = RECLAIM_SECONDS,
    ) -> None:
        """until: when its leases end at the latest; None if each has `least_seconds` at least."""
        self.id, self.memory = id, memory
        self._until, self._should_verify = until, should_verify
        self._least_seconds = least_seconds
        self._digests: WeakKeyDictionary[Plan, tuple[bytes, int]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @property
    def lease_seconds(self) -> float:
        left = self._least_seconds if self._until is None else self._until - monotonic()
        return max(left, 0.0)

    def mappable(self, rank: int) -> tuple[Placed, BufferTable] | None:
        placed = self.memory.placed
        return None if placed is None or rank != self.memory.rank else (placed, self.memory.table)

    def digests(self, plan: Plan, rank: int, deadline: float) -> tuple[bytes, int]:
        with self._lock:
            rows = self.memory.rows(plan, rank)[1]
            if not self._should_verify:
                return b"", 0
            if plan not in self._digests:
                found, overflows = rows.run(deadline)
                self._digests[plan] = found.astype("<u8").tobytes(), overflows
            return self._digests[plan]

    def digest(self, plans: Iterable[Plan], deadline: float) -> None:
        """Compute what readers that are connected need, before they ask for it."""
        for plan in plans:
            if self.memory.rank in plan.streams:
                self.digests(plan, self.memory.rank, deadline)

    def parts(self, plan: Plan, rank: int, start: int, stop: int) -> Sequence[Bytes]:
        """Return a view of each run of host memory that has the bytes; a copy if any has not."""
        rows, stream = self.memory.rows(plan, rank)[0], plan.streams[rank]
        row, low, high = stream.range(start, stop)
        is_view = rows.is_contiguous[row] & (rows.device[row] == HOST) & (stream.cast[row, 0] < 0)
        if not is_view.all():
            return [_copied(rows, stream, row, low, high)]
        address, nbytes = rows.address[row] + low, high - low
        cuts = np.flatnonzero(address[1:] != address[:-1] + nbytes[:-1]) + 1
        return [
            _view(int(address[first]), int(nbytes[first:end].sum()))
            for first, end in pairwise([0, *cuts.tolist(), len(row)])
        ]

    def copies(self, plan: Plan, rank: int, sink: Bytes) -> RowCopies:
        rows, stream = self.memory.rows(plan, rank)[0], plan.streams[rank]
        packed = stream.packed_at(Buffer.of(sink).address, sink)
        return RowCopies(packed, rows, cast=stream.cast)

    def bucket(self, plan: Plan, rank: int, bucket: int, slot: Buffer) -> RowCopies:
        """Return what copies a bucket of a stream into a slot on the device of its rows."""
        rows, stream = self.memory.rows(plan, rank)[0], plan.streams[rank]
        return _packing(rows, stream, stream.buckets[bucket], slot)


def _packing(rows: BufferTable, stream: Stream, pieces: Bucket, memory: Buffer) -> RowCopies:
    """Return what packs pieces of rows into memory, in the dtypes of the stream."""
    cast = stream.cast[pieces.row]
    return RowCopies(pieces.packed_at(memory), pieces.regions(rows), cast=cast)


def _copied(
    rows: BufferTable, stream: Stream, row: Integers, low: Integers, high: Integers
) -> Bytes:
    """Return a copy of bytes `low` to `high` of some rows, of which only the ends may be cut."""
    width = stream.item_bytes[row]
    pieces = pieces_of(stream.shape, stream.item_bytes, row, low // width, -(-high // width))
    found = np.empty(pieces.nbytes, np.uint8)
    copies = _packing(rows, stream, pieces, Buffer.of(found))
    try:
        copies.start(should_digest=False)(monotonic() + COPY_SECONDS)
    finally:
        copies.close()
    skipped = int(low[0] % width[0])
    return found[skipped : skipped + int((high - low).sum())]


def _view(address: int, nbytes: int) -> Bytes:
    found: Callable[[int], Any] = (ctypes.c_uint8 * nbytes).from_address
    return np.frombuffer(found(address), np.uint8)
