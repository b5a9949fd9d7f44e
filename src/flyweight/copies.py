"""Copies between blocks of memory, and the digests of blocks, prepared once and run in every round.

On the host each chunk is copied, then digested at its destination while it is still in the
cache; small blocks go in batches, without an object for each. On a device everything is copied
over a few streams, then digested by one kernel.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic

import numpy as np
import xxhash

from flyweight.cuda import driver
from flyweight.cuda.copies import Copier, tensor_at
from flyweight.cuda.copy_tasks import run_bytes
from flyweight.cuda.digest_kernel import DeviceDigests
from flyweight.digest import SMALL_BYTES, Digest, DigestKind, Words, short_digests, small_digests
from flyweight.errors import TransferTimeout
from flyweight.memory import Buffer, Bytes, Items
from flyweight.memory_table import HOST, BufferTable, runs_of
from flyweight.spec.box import blocks, strides_of
from flyweight.worker_threads import run_on_threads

_BATCH_BYTES = 1 << 20  # copied, then digested in a core's own cache
_CHUNK_BYTES = 4 << 20  # several of them fit in the cache that cores share
_RUN_BYTES = 512
_INLINE_BYTES = 8 << 20  # below this, starting threads costs more than they save


def seconds_left(deadline: float) -> float:
    """Return the time until a deadline, a little if it has passed: what is done is not too late."""
    return max(deadline - monotonic(), 0.001)


def _check_time(deadline: float, num_chunks: int) -> None:
    if monotonic() > deadline:
        raise TransferTimeout(f"{num_chunks} chunks of memory were not done in time")


class HostBlocks:
    """Blocks of the host's memory that are copied, and digested where they were written."""

    def __init__(self, sink: BufferTable, source: BufferTable | None = None) -> None:
        """Prepare copies; without a source, blocks are only digested."""
        self._nbytes = sink.nbytes
        is_flat, is_small = sink.is_contiguous, sink.nbytes <= SMALL_BYTES
        if source is not None:
            is_flat = is_flat & source.is_contiguous
        self._flat = np.flatnonzero(is_small & is_flat)
        self._blocks = _FlatBlocks(
            sink.take(self._flat), None if source is None else source.take(self._flat)
        )
        self._small = np.flatnonzero(is_small & ~is_flat)
        self._large = np.flatnonzero(~is_small)
        self._chunks: list[_Chunk] = []
        """Those of the small rows first, one each."""
        for row in [*self._small.tolist(), *self._large.tolist()]:
            of = None if source is None else source.buffer(row)
            self._chunks += _chunks(row, sink.buffer(row), of)
        self._owners = sink.owner, None if source is None else source.owner

    def run(self, deadline: float, kind: DigestKind | None) -> Words:
        """Copy everything; return the digest of each block's row-major bytes if it has a kind."""
        found: Words = np.zeros(len(self._nbytes), np.uint64)
        running: dict[int, Digest] = {}
        if kind is not None:
            running = {row: Digest(int(self._nbytes[row]), kind) for row in self._large.tolist()}

        def work(chunk: _Chunk) -> None:
            if chunk.source is not None:
                np.copyto(chunk.sink, chunk.source)
            if (digest := running.get(chunk.row)) is not None:
                digest.add(chunk.offset, _bytes(chunk.sink))

        if self._chunks:
            _run_chunks(self._chunks, work, deadline)
        digests = self._blocks.run(deadline, kind)
        if kind is None:
            return found
        found[self._flat] = digests
        if num_small := len(self._small):
            small = [_bytes(chunk.sink) for chunk in self._chunks[:num_small]]
            found[self._small] = small_digests(small, kind)
        for row, each in running.items():
            found[row] = each.value()
        return found


class _FlatBlocks:
    """Small contiguous blocks, which are copied and hashed by C, batch after batch."""

    def __init__(self, sink: BufferTable, source: BufferTable | None) -> None:
        self._address, self._nbytes = sink.address, sink.nbytes
        self._source = None if source is None else source.address
        self._batches = runs_of(np.cumsum(sink.nbytes) // _BATCH_BYTES)
        self._view_at = {
            size: (ctypes.c_char * size).from_address for size in np.unique(self._nbytes).tolist()
        }

    def run(self, deadline: float, kind: DigestKind | None) -> Words:
        """Copy the blocks; return the digest of each if it has a kind."""
        found: Words = np.zeros(len(self._address), np.uint64)
        for first, end in self._batches:
            _check_time(deadline, len(self._address))
            # Objects for one batch, not for all blocks: those would take megabytes all the time.
            sinks, sizes = self._address[first:end].tolist(), self._nbytes[first:end].tolist()
            if self._source is not None:
                deque(map(ctypes.memmove, sinks, self._source[first:end].tolist(), sizes), maxlen=0)
            if kind is None:
                continue
            views = [self._view_at[size](at) for at, size in zip(sinks, sizes, strict=True)]
            if kind == "xxh3":
                hashes = map(xxhash.xxh3_64_intdigest, views)
                found[first:end] = np.fromiter(hashes, np.uint64, end - first)
            else:
                data = [np.frombuffer(each, np.uint8) for each in views]
                found[first:end] = small_digests(data, kind)
        return short_digests(self._nbytes, found) if kind == "xxh3" else found


@dataclass(frozen=True)
class _Chunk:
    """Some items of a block on the host, few enough to stay in a core's cache."""

    sink: Items
    source: Items | None
    row: int
    offset: int
    """The byte at which they start in the block, in row-major order."""


def _chunks(row: int, sink: Buffer, source: Buffer | None) -> list[_Chunk]:
    width, shape = sink.item_bytes, sink.shape
    if sink.nbytes <= _CHUNK_BYTES:
        return [_Chunk(sink.items(), None if source is None else source.items(), row, 0)]
    flat, flat_source = sink.flat(), None if source is None else source.flat()
    if flat is not None and (source is None or flat_source is not None):
        # Cut where the rows of digests end, so that each row is in one chunk.
        cuts = pairwise([*range(0, len(flat), _CHUNK_BYTES), len(flat)])
        return [
            _Chunk(flat[a:b], None if flat_source is None else flat_source[a:b], row, a)
            for a, b in cuts
        ]
    strides = [width * each for each in strides_of(shape)]
    found = []
    for box in blocks(shape, max(_CHUNK_BYTES // width, 1)):
        at = sum(a * b for a, b in zip(box.offset, strides, strict=True))
        of = None if source is None else source.block(box).items()
        found.append(_Chunk(sink.block(box).items(), of, row, at))
    return found


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
            _check_time(deadline, len(chunks))
            for chunk in batch:
                work(chunk)

    batches = [chunks[at : at + 4] for at in range(0, len(chunks), 4)]
    run_on_threads(batches, run, _num_threads(chunks), "flyweight-copies")


class DeviceCopies:
    """Copies from or to one device."""

    def __init__(self, device: int, sink: BufferTable, source: BufferTable) -> None:
        self._device = device
        is_strided = (sink.device == source.device) & (sink.nbytes > _RUN_BYTES)
        is_strided &= run_bytes(sink, source) < _RUN_BYTES
        rows = np.flatnonzero(is_strided).tolist()
        self._strided = [(tensor_at(sink.buffer(n)), tensor_at(source.buffer(n))) for n in rows]
        """Copies by torch: the driver would split them into tiny runs."""
        self._copier = Copier(device)
        try:
            self._table = self._copier.table(sink.take(~is_strided), source.take(~is_strided))
        except BaseException:
            self._copier.close()
            raise

    @classmethod
    def on_each(cls, sink: BufferTable, source: BufferTable) -> list[DeviceCopies]:
        """Prepare copies on the device that makes each: the sink's device if it has one."""
        on = np.where(sink.device == HOST, source.device, sink.device)
        return [
            cls(device, sink.take(on == device), source.take(on == device))
            for device in np.unique(on).tolist()
        ]

    @property
    def is_ordered(self) -> bool:
        """True if work queued on the device's default stream later runs after all copies."""
        return not self._strided

    def start(self) -> None:
        """Queue all copies without waiting."""
        self._copier.run(self._table)
        for sink, source in self._strided:
            sink.copy_(source)

    def wait(self, deadline: float) -> None:
        self._copier.wait(seconds_left(deadline))
        if self._strided:  # they run on the framework's own stream
            driver.synchronize(self._device, seconds_left(deadline))

    def close(self) -> None:
        """Free what was prepared, and let go of the memory."""
        self._copier.close()
        self._strided = []


class PreparedDigests:
    """Digests of blocks of any memory."""

    def __init__(self, memory: BufferTable) -> None:
        self._num_rows, is_host = len(memory), memory.device == HOST
        self._on_host = np.flatnonzero(is_host)
        self._blocks = HostBlocks(memory.take(is_host))
        self._on_devices = []
        for device in np.unique(memory.device[~is_host]).tolist():
            rows = np.flatnonzero(memory.device == device)
            self._on_devices.append((rows, DeviceDigests(memory.take(rows))))

    def start(self) -> None:
        """Queue the work of devices, behind copies that were queued before."""
        for _, on_device in self._on_devices:
            on_device.start()

    def run(self, deadline: float, kind: DigestKind) -> Words:
        """Return the digest of each block's bytes in row-major order.

        Memory of a device has digests of kind 'words' only.
        """
        assert kind == "words" or not self._on_devices
        found: Words = np.zeros(self._num_rows, np.uint64)
        found[self._on_host] = self._blocks.run(deadline, kind)
        for rows, on_device in self._on_devices:
            found[rows] = on_device.values(seconds_left(deadline))
        return found
