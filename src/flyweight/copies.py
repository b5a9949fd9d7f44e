"""Copies between buffers, and the digests of buffers, prepared once and run in every round.

On the host each chunk is copied, then digested at its destination while it is still in the
cache; small blocks go in batches, without an object for each. On a device everything is copied
over a few streams, then digested by one kernel.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from flyweight.cuda import driver
from flyweight.cuda.copies import Copier, tensor_at
from flyweight.cuda.copy_tasks import run_bytes
from flyweight.cuda.digest_kernel import DeviceDigests
from flyweight.digest import SMALL_BYTES, Digest, DigestKind, Words, short_digests, small_digests
from flyweight.errors import TransferTimeout
from flyweight.memory import Buffer, Bytes, Items
from flyweight.memory_table import HOST, BufferTable, Integers
from flyweight.spec.box import blocks, strides_of
from flyweight.worker_threads import run_on_threads

_BATCH_BYTES = 1 << 20  # copied, then digested in a core's own cache
_CHUNK_BYTES = 4 << 20  # several of them fit in the cache that cores share
_RUN_BYTES = 512
_INLINE_BYTES = 8 << 20  # below this, starting threads costs more than they save


def check_time(deadline: float, num_chunks: int) -> None:
    if monotonic() > deadline:
        raise TransferTimeout(f"{num_chunks} chunks of memory were not done in time")


class SmallBlocks:
    """Blocks that are copied and hashed by C, batch after batch."""

    def __init__(self, sink: BufferTable, source: BufferTable | None = None) -> None:
        self._address, self._nbytes = sink.address, sink.nbytes
        self._source = None if source is None else source.address
        self._owners = sink.owner, None if source is None else source.owner
        batch = np.cumsum(sink.nbytes) // _BATCH_BYTES
        cuts = (np.flatnonzero(np.diff(batch)) + 1).tolist() if len(sink) else []
        self._batches = list(pairwise([0, *cuts, len(sink)])) if len(sink) else []
        self._view_at = {
            size: (ctypes.c_char * size).from_address for size in np.unique(self._nbytes).tolist()
        }

    def __len__(self) -> int:
        return len(self._address)

    def run(self, deadline: float, *, should_hash: bool) -> Words:
        """Copy the blocks; return the hash of each if it should.

        Blocks without a source are only hashed.
        """
        hashes: Words = np.zeros(len(self), np.uint64)
        for first, end in self._batches:
            check_time(deadline, len(self))
            # Objects for one batch, not for all blocks: those would take megabytes all the time.
            sinks, sizes = self._address[first:end].tolist(), self._nbytes[first:end].tolist()
            if self._source is not None:
                deque(map(ctypes.memmove, sinks, self._source[first:end].tolist(), sizes), maxlen=0)
            if should_hash:
                found = map(xxhash.xxh3_64_intdigest, self._views(sinks, sizes))
                hashes[first:end] = np.fromiter(found, np.uint64, end - first)
        return hashes

    def _views(self, addresses: list[int], sizes: list[int]) -> list[Any]:
        view_at = self._view_at
        return [view_at[size](at) for at, size in zip(addresses, sizes, strict=True)]

    def bytes(self) -> list[Bytes]:
        """Return each block's bytes, in place."""
        views = self._views(self._address.tolist(), self._nbytes.tolist())
        return [np.frombuffer(view, np.uint8) for view in views]


@dataclass(frozen=True, eq=False)
class BufferCopies:
    """Copies of items from `source` to `sink`, which have the same shapes, row by row."""

    sink: BufferTable
    source: BufferTable
    number: Integers
    """The number of the digest of each row's bytes."""

    def take(self, rows: NDArray[Any]) -> BufferCopies:
        return BufferCopies(self.sink.take(rows), self.source.take(rows), self.number[rows])


@dataclass(frozen=True)
class _Chunk:
    """Some items of a copy on the host, few enough to stay in a core's cache."""

    sink: Items
    source: Items | None
    number: int
    """Of the digest that its bytes belong to."""
    offset: int
    """Where they start there, in row-major order."""


def _chunks(number: int, sink: Buffer, source: Buffer | None) -> list[_Chunk]:
    width, shape = sink.item_bytes, sink.shape
    if not sink.nbytes:
        return []
    flat, flat_source = sink.flat(), None if source is None else source.flat()
    if flat is not None and (source is None or flat_source is not None):
        return _flat_chunks(number, flat, flat_source)
    strides = [width * each for each in strides_of(shape)]
    found = []
    for box in blocks(shape, max(_CHUNK_BYTES // width, 1)):
        at = sum(a * b for a, b in zip(box.offset, strides, strict=True))
        found.append(
            _Chunk(
                sink.block(box).items(),
                None if source is None else source.block(box).items(),
                number,
                at,
            )
        )
    return found


def _flat_chunks(number: int, sink: Bytes, source: Bytes | None) -> list[_Chunk]:
    """Cut bytes where the rows of digests end, so that each row is in one chunk."""
    cuts = [*range(0, len(sink), _CHUNK_BYTES), len(sink)]
    return [
        _Chunk(sink[a:b], None if source is None else source[a:b], number, a)
        for a, b in pairwise(cuts)
    ]


def _bytes(items: Items) -> Bytes:
    """Return items as row-major bytes: a view if they are contiguous, else a copy."""
    return np.ascontiguousarray(items).reshape(-1).view(np.uint8)


def _num_threads(chunks: Sequence[_Chunk]) -> int:
    # The number of chunks bounds the bytes, so most calls need not sum them up.
    if len(chunks) * _CHUNK_BYTES <= _INLINE_BYTES:
        return 1
    if sum(chunk.sink.nbytes for chunk in chunks) <= _INLINE_BYTES:
        return 1
    return min(len(os.sched_getaffinity(0)), 4)


def _run_chunks(chunks: Sequence[_Chunk], work: Callable[[_Chunk], None], deadline: float) -> None:
    """Call `work` for each chunk, in several threads if there are many bytes."""

    def run(batches: Iterator[Sequence[_Chunk]]) -> None:
        for batch in batches:
            check_time(deadline, len(chunks))
            for chunk in batch:
                work(chunk)

    batches = [chunks[at : at + 4] for at in range(0, len(chunks), 4)]
    run_on_threads(batches, run, _num_threads(chunks), "flyweight-copies")


class PreparedCopies:
    """Copies that run again in every round."""

    def __init__(self, copies: BufferCopies, copiers: Copiers) -> None:
        sink, source = copies.sink, copies.source
        is_host = (sink.device == HOST) & (source.device == HOST)
        is_small = is_host & sink.is_contiguous & source.is_contiguous
        is_small &= sink.nbytes <= SMALL_BYTES
        small = copies.take(is_small)
        self.small = small.number
        """The numbers of what is small and contiguous."""
        self._small = SmallBlocks(small.sink, small.source)
        self._chunks = [
            chunk
            for row in np.flatnonzero(is_host & ~is_small).tolist()
            for chunk in _chunks(int(copies.number[row]), sink.buffer(row), source.buffer(row))
        ]
        self._on_devices = copiers.prepare(copies.take(~is_host))
        self._is_started = False
        self._kept: BufferCopies | None = copies  # chunks do not own their memory, tables do

    @property
    def is_ordered(self) -> bool:
        """True if work queued on a device's default stream later runs after all copies."""
        return not any(each.strided for each in self._on_devices)

    def start(self) -> None:
        """Queue the copies of devices without waiting; `run` does so if it was not called."""
        for each in self._on_devices:
            each.start()
        self._is_started = True

    def run(
        self,
        deadline: float,
        *,
        hashes: Words | None = None,
        running: Mapping[int, Digest] | None = None,
    ) -> None:
        """Copy everything, and digest what arrived on the host where it was written.

        `hashes` takes the XXH3 of each of `small`; other bytes are added to their digest in
        `running`, if there is one.
        """

        def work(chunk: _Chunk) -> None:
            assert chunk.source is not None
            np.copyto(chunk.sink, chunk.source)
            digest = None if running is None else running.get(chunk.number)
            if digest is not None:
                digest.add(chunk.offset, _bytes(chunk.sink))

        if not self._is_started:
            self.start()
        self._is_started = False
        if self._chunks:
            _run_chunks(self._chunks, work, deadline)
        found = self._small.run(deadline, should_hash=hashes is not None)
        if hashes is not None:
            hashes[self.small] = found
        for each in self._on_devices:
            each.wait(deadline)

    def close(self) -> None:
        """Free what was prepared; an error's traceback that still has it keeps no memory alive."""
        for each in self._on_devices:
            each.close()
        self._chunks, self._on_devices, self._kept = [], [], None
        self._small = SmallBlocks(BufferTable.of([]))


class PreparedDeviceCopies:
    """Prepared copies from or to one device."""

    def __init__(self, device: int, copier: Copier, copies: BufferCopies) -> None:
        self._device, self._copier = device, copier
        sink, source = copies.sink, copies.source
        is_strided = (sink.device == source.device) & (sink.nbytes > _RUN_BYTES)
        is_strided &= run_bytes(sink, source) < _RUN_BYTES
        rows = np.flatnonzero(is_strided).tolist()
        self.strided = [(tensor_at(sink.buffer(n)), tensor_at(source.buffer(n))) for n in rows]
        """Copies by torch: the driver would split them into tiny runs."""
        plain = copies.take(~is_strided)
        self._table = copier.table(plain.sink, plain.source)

    def start(self) -> None:
        self._copier.run(self._table)
        for sink, source in self.strided:
            sink.copy_(source)

    def wait(self, deadline: float) -> None:
        self._copier.wait(max(deadline - monotonic(), 0.001))
        if self.strided:  # they run on the framework's own stream
            driver.synchronize(self._device, max(deadline - monotonic(), 0.001))

    def close(self) -> None:
        self._copier.free_table(self._table)


class Copiers:
    """The copiers of each device, made when they are first needed."""

    def __init__(self) -> None:
        self._copiers: dict[int, Copier] = {}

    def prepare(self, copies: BufferCopies) -> list[PreparedDeviceCopies]:
        """Group copies by the device that runs them: the sink's device if it has one."""
        sink, source = copies.sink.device, copies.source.device
        on = np.where(sink == HOST, source, sink)
        found = []
        for device in np.unique(on).tolist():
            if device not in self._copiers:
                self._copiers[device] = Copier(device)
            some = copies.take(on == device)
            found.append(PreparedDeviceCopies(device, self._copiers[device], some))
        return found

    def close(self) -> None:
        for copier in self._copiers.values():
            copier.close()
        self._copiers.clear()


class PreparedDigests:
    """Digests of blocks of memory that are computed again in every round."""

    def __init__(self, memory: BufferTable) -> None:
        self._nbytes, self._owner = memory.nbytes, memory.owner
        is_host, is_small = memory.device == HOST, memory.nbytes <= SMALL_BYTES
        is_flat = is_host & is_small & memory.is_contiguous
        self._flat = np.flatnonzero(is_flat)
        self._hashed = SmallBlocks(memory.take(is_flat))
        self._small = np.flatnonzero(is_host & is_small & ~memory.is_contiguous)
        self._strided = [memory.buffer(row).items() for row in self._small.tolist()]
        self._large = np.flatnonzero(is_host & ~is_small)
        self._chunks = [
            chunk
            for row in self._large.tolist()
            for chunk in _chunks(row, memory.buffer(row), None)
        ]
        self._on_devices: list[tuple[Integers, DeviceDigests]] = []
        for device in np.unique(memory.device[~is_host]).tolist():
            rows = np.flatnonzero(memory.device == device)
            self._on_devices.append((rows, DeviceDigests(memory.take(rows))))

    def start(self) -> None:
        """Queue the work of devices, behind copies that were queued before."""
        for _, on_device in self._on_devices:
            on_device.start()

    def digests(self, kind: DigestKind, deadline: float) -> Words:
        """Return the digest of each block's bytes in row-major order.

        Memory of a device has digests of kind 'words' only.
        """
        assert kind == "words" or not self._on_devices
        found: Words = np.zeros(len(self._nbytes), np.uint64)
        sizes = self._nbytes
        running = {row: Digest(int(sizes[row]), kind) for row in self._large.tolist()}
        if self._chunks:
            _run_chunks(
                self._chunks,
                lambda chunk: running[chunk.number].add(chunk.offset, _bytes(chunk.sink)),
                deadline,
            )
        for row, each in running.items():
            found[row] = each.value()
        if kind == "xxh3":
            hashes = self._hashed.run(deadline, should_hash=True)
            found[self._flat] = short_digests(sizes[self._flat], hashes)
        else:
            found[self._flat] = small_digests(self._hashed.bytes(), kind)
        if self._strided:
            found[self._small] = small_digests(list(map(_bytes, self._strided)), kind)
        for rows, on_device in self._on_devices:
            found[rows] = on_device.values(max(deadline - monotonic(), 0.001))
        return found
