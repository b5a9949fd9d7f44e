"""Copies between buffers, and the digests of buffers, prepared once and run in every round.

On the host each chunk is copied, then digested at its destination while it is still in the
cache. On a device everything is copied over a few streams, then digested by one kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic, perf_counter

import numpy as np

from flyweight.cuda import driver
from flyweight.cuda.copies import Copier, copy_strided, run_bytes
from flyweight.cuda.digest_kernel import DeviceDigests
from flyweight.digest import SMALL_BYTES, Digest, DigestKind, small_digests
from flyweight.errors import TransferTimeout
from flyweight.memory import Buffer, Bytes, Items
from flyweight.spec.box import blocks, strides_of
from flyweight.worker_threads import run_on_threads

_CHUNK_BYTES = 4 << 20  # several of them fit in the cache that cores share
_RUN_BYTES = 512
_INLINE_BYTES = 8 << 20  # below this, starting threads costs more than they save


@dataclass(frozen=True)
class BufferCopy:
    """A copy of items from `source` to `sink`, which have the same shape."""

    sink: Buffer
    source: Buffer
    region: int
    """The index of the digest that the bytes belong to."""
    offset: int = 0
    """Where the bytes start in what is digested, in row-major order and without a gap."""


@dataclass(frozen=True)
class _Chunk:
    """Some items of a copy on the host, few enough to stay in a core's cache."""

    sink: Items
    source: Items | None
    region: int
    offset: int


def _chunks(region: int, offset: int, sink: Buffer, source: Buffer | None) -> list[_Chunk]:
    width, shape = sink.item_bytes, sink.shape
    if not sink.nbytes:
        return []
    flat, flat_source = sink.flat(), None if source is None else source.flat()
    if flat is not None and (source is None or flat_source is not None):
        return _flat_chunks(region, offset, flat, flat_source)
    strides = [width * each for each in strides_of(shape)]
    found = []
    for box in blocks(shape, max(_CHUNK_BYTES // width, 1)):
        at = sum(a * b for a, b in zip(box.offset, strides, strict=True))
        found.append(
            _Chunk(
                sink.block(box).items(),
                None if source is None else source.block(box).items(),
                region,
                offset + at,
            )
        )
    return found


def _flat_chunks(region: int, offset: int, sink: Bytes, source: Bytes | None) -> list[_Chunk]:
    """Cut bytes where the rows of digests end, so that each row is in one chunk."""
    first = _CHUNK_BYTES - offset % _CHUNK_BYTES
    cuts = [0, *range(first, len(sink), _CHUNK_BYTES), len(sink)]
    return [
        _Chunk(sink[a:b], None if source is None else source[a:b], region, offset + a)
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
            if monotonic() > deadline:
                raise TransferTimeout(f"{len(chunks)} chunks of memory were not done in time")
            for chunk in batch:
                work(chunk)

    batches = [chunks[at : at + 4] for at in range(0, len(chunks), 4)]
    run_on_threads(batches, run, _num_threads(chunks), "flyweight-copies")


class PreparedCopies:
    """Copies that run again in every round."""

    def __init__(
        self, copies: Sequence[BufferCopy], copiers: Copiers, *, is_bucket: bool = False
    ) -> None:
        self._chunks: list[_Chunk] = []
        on_devices: list[tuple[Buffer, Buffer]] = []
        for each in copies:
            if each.sink.device is None and each.source.device is None:
                self._chunks += _chunks(each.region, each.offset, each.sink, each.source)
            else:
                on_devices.append((each.sink, each.source))
        self._on_devices = copiers.prepare(on_devices, is_bucket=is_bucket)
        self._is_started = False
        self._kept: Sequence[BufferCopy] = copies  # chunks do not own their memory, buffers do

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
        digests: Sequence[Digest | None],
        deadline: float,
        on_progress: Callable[[int], None] = lambda nbytes: None,
    ) -> float:
        """Copy everything; return the seconds of it that went into digests.

        `digests` has an entry for each region: copied bytes are read back from the destination
        and added to it, unless it is None. `on_progress` is called with the bytes of each chunk
        that the host has copied.
        """
        spent: list[float] = []

        def work(chunk: _Chunk) -> None:
            assert chunk.source is not None
            np.copyto(chunk.sink, chunk.source)
            on_progress(chunk.sink.nbytes)
            running = digests[chunk.region]
            if running is not None:
                started = perf_counter()
                running.add(chunk.offset, _bytes(chunk.sink))
                spent.append(perf_counter() - started)

        if not self._is_started:
            self.start()
        self._is_started = False
        if self._chunks:
            _run_chunks(self._chunks, work, deadline)
        for each in self._on_devices:
            each.wait(deadline)
        return sum(spent) / (_num_threads(self._chunks) if spent else 1)

    def close(self) -> None:
        """Free what was prepared; an error's traceback that still has it keeps no memory alive."""
        for each in self._on_devices:
            each.close()
        self._chunks, self._on_devices, self._kept = [], [], ()


class PreparedDeviceCopies:
    """Prepared copies from or to one device."""

    def __init__(
        self,
        device: int,
        copier: Copier,
        pairs: Sequence[tuple[Buffer, Buffer]],
        *,
        is_bucket: bool,
    ) -> None:
        self._device, self._copier = device, copier
        self.strided = [each for each in pairs if _is_strided(*each)]
        plain = [each for each in pairs if not _is_strided(*each)]
        # A bucket is small: to queue each of its copies takes longer than to run one kernel.
        self._table = (
            copier.table(plain, launch_bytes=1 << 62) if is_bucket else copier.table(plain)
        )

    def start(self) -> None:
        self._copier.run(self._table)
        for sink, source in self.strided:
            copy_strided(sink, source)

    def wait(self, deadline: float) -> None:
        self._copier.wait(max(deadline - monotonic(), 0.001))
        if self.strided:  # they run on the framework's own stream
            driver.synchronize(self._device, max(deadline - monotonic(), 0.001))

    def close(self) -> None:
        self._copier.free_table(self._table)


def _is_strided(sink: Buffer, source: Buffer) -> bool:
    """True for copies inside one device that the driver would split into tiny runs."""
    return (
        sink.device == source.device
        and sink.nbytes > _RUN_BYTES
        and run_bytes(sink, source) < _RUN_BYTES
    )


class Copiers:
    """The copiers of each device, made when they are first needed.

    Buckets alternate between two, so that one can be waited for while the next is copied.
    """

    def __init__(self) -> None:
        self._copiers: dict[tuple[int, int], Copier] = {}
        self._turn = 0

    def prepare(
        self, pairs: Sequence[tuple[Buffer, Buffer]], *, is_bucket: bool
    ) -> list[PreparedDeviceCopies]:
        """Group copies by the device that runs them: the sink's device if it has one."""
        self._turn ^= 1
        by_device: dict[int, list[tuple[Buffer, Buffer]]] = {}
        for sink, source in pairs:
            device = sink.device if sink.device is not None else source.device
            assert device is not None
            by_device.setdefault(device, []).append((sink, source))
        found = []
        for device, each in sorted(by_device.items()):
            key = device, self._turn if is_bucket else 0
            if key not in self._copiers:
                self._copiers[key] = Copier(device)
            found.append(
                PreparedDeviceCopies(device, self._copiers[key], each, is_bucket=is_bucket)
            )
        return found

    def close(self) -> None:
        for copier in self._copiers.values():
            copier.close()
        self._copiers.clear()


def is_small(buffer: Buffer) -> bool:
    """True if a buffer is better digested together with others, after everything is copied."""
    return buffer.nbytes <= SMALL_BYTES


class PreparedDigests:
    """Digests of buffers that are computed again in every round."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._nbytes = [buffer.nbytes for buffer in buffers]
        self._kept = buffers
        on_host = [n for n, buffer in enumerate(buffers) if buffer.device is None]
        self._small = {n: buffers[n].items() for n in on_host if is_small(buffers[n])}
        self._on_host = [n for n in on_host if n not in self._small]
        self._chunks = [chunk for n in self._on_host for chunk in _chunks(n, 0, buffers[n], None)]
        self._on_devices: list[tuple[list[int], DeviceDigests]] = []
        for device in sorted({b.device for b in buffers if b.device is not None}):
            numbers = [n for n, buffer in enumerate(buffers) if buffer.device == device]
            self._on_devices.append((numbers, DeviceDigests([buffers[n] for n in numbers])))

    def start(self) -> None:
        """Queue the work of devices, behind copies that were queued before."""
        for _, on_device in self._on_devices:
            on_device.start()

    def digests(self, kind: DigestKind, deadline: float) -> list[int]:
        """Return the digest of each buffer's bytes in row-major order.

        Memory of a device has digests of kind 'words' only.
        """
        assert kind == "words" or not self._on_devices
        found = [0] * len(self._nbytes)
        running = {n: Digest(self._nbytes[n], kind) for n in self._on_host}
        if self._chunks:
            _run_chunks(
                self._chunks,
                lambda chunk: running[chunk.region].add(chunk.offset, _bytes(chunk.sink)),
                deadline,
            )
        for number, each in running.items():
            found[number] = each.value()
        small = small_digests(list(map(_bytes, self._small.values())), kind)
        for number, value in zip(self._small, small, strict=True):
            found[number] = value
        for numbers, on_device in self._on_devices:
            values = on_device.values(max(deadline - monotonic(), 0.001))
            for number, value in zip(numbers, values, strict=True):
                found[number] = value
        return found
