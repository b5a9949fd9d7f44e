"""Offer: one version of a rank's blocks in memory that does not change while it is leased."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from flyweight.casts import ITEM_BYTES, cast_range
from flyweight.cuda.copies import Copier
from flyweight.cuda.pinned_memory import pinned
from flyweight.digest import DigestKind
from flyweight.errors import DigestMismatch, PlanError, listed
from flyweight.live.plan import Plan, Stream
from flyweight.live.publish_id import PublishId
from flyweight.live.rows import RowCopies, RowDigests
from flyweight.memory import Buffer, Bytes
from flyweight.memory_table import HOST, BufferTable, Integers, row_major_strides
from flyweight.spec.box import boxes_of_range, strides_of
from flyweight.spec.manifest import Leaf
from flyweight.transports.device_segments import places_on_devices
from flyweight.transports.segments import Placed, Segment, places_in_shared_memory

RECLAIM_SECONDS = 10.0
"""How long leases of a copy that is not offered any more run on."""
ALIGN = 64
_DEVICE_SECONDS = 20.0
"""How long a device may take to copy one range to the host."""


@dataclass(frozen=True)
class About:
    """What readers learn of a version besides its bytes."""

    parent: int | None = None
    values: Mapping[str, Leaf] = field(default_factory=dict)


class Copies(Protocol):
    """What copies a whole stream, again for every version in the same memory."""

    def start(self, *, should_digest: bool) -> Callable[[float], object]:
        """Return what copies everything until a deadline."""

    def close(self) -> None: ...


class Served(Protocol):
    """What a holder gives readers: an offer of the trainer, or staging of another reader."""

    id: PublishId

    @property
    def memory(self) -> object:
        """What its bytes lie in; the same for another version if nothing has moved."""

    @property
    def lease_seconds(self) -> float:
        """How long a lease that begins now runs, at least."""

    def mappable(self, rank: int) -> tuple[Placed, BufferTable] | None:
        """Where readers on this host can map a rank's blocks; None if they must fetch them."""

    def segments(self, rank: int) -> Sequence[Segment]:
        """Return the shared memory that its bytes lie in, as far as they do."""

    def digests(self, plan: Plan, rank: int, deadline: float) -> tuple[bytes, int]:
        """Return the digests of a stream, empty if the trainer does not verify, and overflows."""

    def arrived_bytes(
        self, plan: Plan, rank: int, start: int, stop: int, seconds: float
    ) -> int | None:
        """Wait until a range of a stream is there; return what else has arrived if it is not."""

    def parts(self, plan: Plan, rank: int, start: int, stop: int) -> Sequence[Bytes]:
        """Return the bytes of a range of a stream, where they lie if that is possible."""

    def copies(self, plan: Plan, rank: int, sink: Bytes) -> Copies:
        """Return what copies a whole stream into memory that a reader shares."""

    def confirm(self, seconds: float) -> None:
        """Raise unless all that was given to readers is the version."""


class OfferMemory:
    """Memory for a rank's blocks, in which one version follows another."""

    def __init__(self, rank: int, table: BufferTable, placed: Placed | None) -> None:
        self.rank, self.table, self.placed = rank, table, placed
        self.id: PublishId | None = None
        """The version that was last in it."""
        self._rows: WeakKeyDictionary[Plan, tuple[BufferTable, RowDigests]] = WeakKeyDictionary()

    @classmethod
    def of_model(cls, rank: int, table: BufferTable) -> OfferMemory:
        """Return the model's own memory, which readers can map if it is shared memory."""
        if (table.device == HOST).all():
            return cls(rank, table, places_in_shared_memory(table))
        return cls(rank, table, places_on_devices(table))

    def rows(self, plan: Plan, rank: int) -> tuple[BufferTable, RowDigests]:
        if rank != self.rank:
            raise PlanError(f"this is rank {self.rank} of the trainer, not rank {rank}")
        if plan not in self._rows:
            stream = plan.streams[rank]
            rows = stream.in_source(self.table)
            self._rows[plan] = rows, RowDigests(rows, plan.digest, stream.cast)
        return self._rows[plan]


def packed_memory(
    shape: Integers, item_bytes: Integers, devices: Sequence[int] = ()
) -> tuple[BufferTable, Placed]:
    """Allocate shared memory for blocks, one after the other; pin it for devices that copy."""
    sizes = -(-shape.prod(axis=1, dtype=np.int64) * item_bytes // ALIGN) * ALIGN
    starts = np.cumsum(sizes) - sizes
    segment = Segment.allocate(int(sizes.sum()))
    memory = Buffer.flat_at(segment.start, segment.nbytes, segment)
    owner = [pinned(each, memory) for each in devices] or segment
    strides = row_major_strides(shape) * item_bytes[:, None]
    device = np.full(len(shape), HOST)
    table = BufferTable(segment.start + starts, shape, strides, item_bytes, device, owner)
    return table, Placed((segment,), np.zeros(len(shape), np.int64), starts)


class CopyMemory(OfferMemory):
    """A copy of a rank's blocks in shared memory, compared with the model when it is made."""

    def __init__(self, rank: int, model: BufferTable) -> None:
        devices = [each for each in np.unique(model.device).tolist() if each >= 0]
        table, placed = packed_memory(model.shape, model.item_bytes, devices)
        super().__init__(rank, table, placed)
        kind: DigestKind = "words" if devices else "xxh3"
        self._copies = RowCopies(table, model, kind)
        self._model = RowDigests(model, kind)

    def refresh(self, deadline: float, names: Sequence[str], *, should_verify: bool) -> None:
        """Copy the model again; raise DigestMismatch if it changed meanwhile."""
        before = self._model.run(deadline)[0] if should_verify else None
        after = self._copies.start(should_digest=should_verify)(deadline)
        if before is None or after is None:
            return
        changed = sorted({names[row] for row in np.flatnonzero(before != after).tolist()})
        if changed:
            raise DigestMismatch(
                f"{len(changed)} tensors changed while they were copied: {listed(changed)}; a "
                f"trainer steps after publish, or after wait_copied"
            )


class Offer:
    """A version in an `OfferMemory`. Digests of a kind are computed when they are first needed."""

    def __init__(
        self,
        id: PublishId,
        memory: OfferMemory,
        *,
        until: float | None,
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

    def segments(self, rank: int) -> Sequence[Segment]:
        placed = self.memory.placed
        return [each for each in placed.segments if isinstance(each, Segment)] if placed else []

    def digests(self, plan: Plan, rank: int, deadline: float) -> tuple[bytes, int]:
        with self._lock:
            rows = self.memory.rows(plan, rank)[1]
            if not self._should_verify:
                return b"", 0
            if plan not in self._digests:
                found, overflows = rows.run(deadline)
                self._digests[plan] = found.astype("<u8").tobytes(), overflows
            return self._digests[plan]

    def arrived_bytes(
        self, plan: Plan, rank: int, start: int, stop: int, seconds: float
    ) -> int | None:
        return None

    def parts(self, plan: Plan, rank: int, start: int, stop: int) -> Sequence[Bytes]:
        with self._lock:
            rows, _ = self.memory.rows(plan, rank)
        return list(packed_parts(rows, plan.streams[rank], start, stop))

    def copies(self, plan: Plan, rank: int, sink: Bytes) -> RowCopies:
        with self._lock:
            rows, _ = self.memory.rows(plan, rank)
        stream = plan.streams[rank]
        packed = stream.packed_at(Buffer.of(sink).address, sink)
        return RowCopies(packed, rows, plan.digest, stream.cast)

    def bucket(self, plan: Plan, rank: int, bucket: int, slot: Buffer) -> RowCopies:
        """Return what copies a bucket of a stream into a slot on the device of its rows."""
        with self._lock:
            rows, _ = self.memory.rows(plan, rank)
        stream = plan.streams[rank]
        found = stream.buckets[bucket]
        return RowCopies(
            found.packed_at(slot), found.regions(rows), plan.digest, stream.cast[found.row]
        )

    def confirm(self, seconds: float) -> None:
        """A lease that still runs is the proof: the memory did not change."""


def packed_parts(rows: BufferTable, stream: Stream, start: int, stop: int) -> Iterator[Bytes]:
    """Yield a range of the stream that rows make: a view of each run of memory, or else a copy."""
    starts, cast = stream.starts, stream.cast
    first = int(np.searchsorted(starts, start, side="right")) - 1
    last = int(np.searchsorted(starts, stop, side="left"))
    here = slice(first, last)
    low = np.maximum(start - starts[here], 0)
    high = np.minimum(stop, starts[first + 1 : last + 1]) - starts[here]
    is_plain = cast[here, 0] < 0
    address, is_flat = rows.address[here], rows.is_contiguous[here] & is_plain
    on_host = rows.device[here] == HOST
    # Rows that follow each other in the memory of the host are one part.
    joins = (is_flat & on_host)[1:] & (is_flat & on_host)[:-1]
    joins &= address[1:] == address[:-1] + rows.nbytes[here][:-1]
    cuts = [0, *(np.flatnonzero(~joins) + 1).tolist(), last - first]
    for begin, end in pairwise(cuts):
        row, a, b = first + begin, int(low[begin]), int(high[end - 1])
        if not is_plain[begin]:
            yield _cast(rows.buffer(row), (int(cast[row, 0]), int(cast[row, 1])), a, b)
        elif not on_host[begin]:
            yield _from_device(rows.buffer(row), a, b)
        elif is_flat[begin]:
            at = int(address[begin]) + a
            yield _view(at, int(address[end - 1]) + b - at)
        else:
            yield from _gathered(rows.buffer(row), a, b)


def _view(address: int, nbytes: int) -> Bytes:
    found: Callable[[int], Any] = (ctypes.c_uint8 * nbytes).from_address
    return np.frombuffer(found(address), np.uint8)


def _gathered(buffer: Buffer, low: int, high: int) -> Iterator[Bytes]:
    """Yield bytes `low` to `high` of a row that does not lie in order, as copies of its items."""
    width = buffer.item_bytes
    first, last = low // width, -(-high // width)
    skipped, left = low - first * width, high - low
    for box in boxes_of_range(buffer.shape, first, last - first):
        data = np.ascontiguousarray(buffer.block(box).items()).reshape(-1).view(np.uint8)
        part = data[skipped : skipped + left]
        skipped, left = max(skipped - len(data), 0), left - len(part)
        yield part


def _cast(buffer: Buffer, pair: tuple[int, int], low: int, high: int) -> Bytes:
    """Return bytes `low` to `high` of a row as it is cast."""
    if buffer.device is None:
        return cast_range(buffer, pair, low, high)
    before, after = (ITEM_BYTES[each] for each in pair)
    first, last = low // after, -(-high // after)
    found = _from_device(buffer, first * before, last * before)
    flat = Buffer(Buffer.of(found).address, (last - first,), (before,), before, found)
    return cast_range(flat, pair, low - first * after, high - first * after)


def _from_device(buffer: Buffer, low: int, high: int) -> Bytes:
    """Return bytes `low` to `high` of a row on a device, as a copy on the host."""
    width = buffer.item_bytes
    first, last = low // width, -(-high // width)
    found = np.empty((last - first) * width, np.uint8)
    pairs, at = [], 0
    for box in boxes_of_range(buffer.shape, first, last - first):
        source = buffer.block(box)
        strides = tuple(width * each for each in strides_of(source.shape))
        into = Buffer(Buffer.of(found).address + at, source.shape, strides, width, found)
        pairs.append((into, source))
        at += source.nbytes
    assert buffer.device is not None
    copier = Copier(buffer.device)
    try:
        for into, source in pairs:
            copier.copy(into, source)
        copier.wait(_DEVICE_SECONDS)
    finally:
        copier.close()
    return found[low - first * width : high - first * width]
