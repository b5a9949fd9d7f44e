"""Moves: bytes from where they can be read to where they are wanted, and the digest of both.

What moves is prepared once and run in every round: a round is a loop of plain copies.
On the host each piece is copied, then digested where it landed while it is still in
the cache; on a device all is copied over a few streams, then digested by
one kernel.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
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
_INLINE_BYTES = 8 << 20  # below this, to start threads costs more than they save


@dataclass(frozen=True)
class Move:
    """Items that go from `source` to `sink`, of one shape."""

    sink: Buffer
    source: Buffer
    region: int
    """The number of the region that they are all or a part of."""
    offset: int = 0
    """Where in the region's row-major bytes they stand, without a gap."""


@dataclass(frozen=True)
class _Chunk:
    """A piece of a move on the host, small enough to stay in a core's cache."""

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
    """Cut bytes where the rows of digests end, so that no row has to be put together again."""
    first = _CHUNK_BYTES - offset % _CHUNK_BYTES
    cuts = [0, *range(first, len(sink), _CHUNK_BYTES), len(sink)]
    return [
        _Chunk(sink[a:b], None if source is None else source[a:b], region, offset + a)
        for a, b in pairwise(cuts)
    ]


def _bytes(items: Items) -> Bytes:
    """Return items as row-major bytes, where they lie if they lie so."""
    return np.ascontiguousarray(items).reshape(-1).view(np.uint8)


def _num_threads(chunks: Sequence[_Chunk]) -> int:
    # No piece is larger than a chunk, so their number says how much there is at most.
    if len(chunks) * _CHUNK_BYTES <= _INLINE_BYTES:
        return 1
    if sum(chunk.sink.nbytes for chunk in chunks) <= _INLINE_BYTES:
        return 1
    return min(len(os.sched_getaffinity(0)), 4)


def _on_all(chunks: Sequence[_Chunk], work: Callable[[_Chunk], None], deadline: float) -> None:
    """Call `work` for each chunk, by a few threads if there is much to do."""
    queue, lock, stop = iter(chunks), threading.Lock(), threading.Event()

    def member() -> None:
        while not stop.is_set():
            if monotonic() > deadline:
                raise TransferTimeout(f"{len(chunks)} pieces of memory took longer than allowed")
            with lock:
                some = list(islice(queue, 4))
            if not some:
                return
            for chunk in some:
                work(chunk)

    num_threads = _num_threads(chunks)
    if num_threads == 1:
        member()
        return
    run_on_threads(member, num_threads, "flyweight-moves", stop)


class Moves:
    """Copies that are made again in every round."""

    def __init__(self, moves: Sequence[Move], copiers: Copiers, *, is_bucket: bool = False) -> None:
        on_host = [m for m in moves if m.sink.device is None and m.source.device is None]
        self._chunks = [
            chunk for m in on_host for chunk in _chunks(m.region, m.offset, m.sink, m.source)
        ]
        self._is_started = False
        self._kept = moves  # views do not keep their memory, buffers do
        self._on_devices = copiers.prepare(
            [
                (m.sink, m.source)
                for m in moves
                if m.sink.device is not None or m.source.device is not None
            ],
            is_bucket=is_bucket,
        )

    @property
    def is_ordered(self) -> bool:
        """True if what is queued on a device's default stream afterwards comes after all copies."""
        return not any(each.has_strided for each in self._on_devices)

    def start(self) -> None:
        """Queue what goes by a device; `run` does so too, and waits."""
        for each in self._on_devices:
            each.start()
        self._is_started = True

    def run(
        self,
        digests: Sequence[Digest | None],
        deadline: float,
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> float:
        """Copy all; return the seconds that digests took of it, in all threads together.

        What has a digest is added to it, read back from where it landed. `advance` hears of bytes
        that the host has copied, piece by piece.
        """
        spent: list[float] = []

        def work(chunk: _Chunk) -> None:
            assert chunk.source is not None
            np.copyto(chunk.sink, chunk.source)
            advance(chunk.sink.nbytes)
            running = digests[chunk.region]
            if running is not None:
                started = perf_counter()
                running.add(chunk.offset, _bytes(chunk.sink))
                spent.append(perf_counter() - started)

        if not self._is_started:
            self.start()
        self._is_started = False
        if self._chunks:
            _on_all(self._chunks, work, deadline)
        for each in self._on_devices:
            each.wait(deadline)
        return sum(spent) / (_num_threads(self._chunks) if spent else 1)

    def close(self) -> None:
        for each in self._on_devices:
            each.close()


class DeviceCopies:
    """Copies from or to one device, prepared."""

    def __init__(
        self,
        device: int,
        copier: Copier,
        pairs: Sequence[tuple[Buffer, Buffer]],
        *,
        is_bucket: bool,
    ) -> None:
        self._device, self._copier = device, copier
        self._strided = [each for each in pairs if _is_strided(*each)]
        plain = [each for each in pairs if not _is_strided(*each)]
        # A bucket is short: to queue each of its pieces takes longer than to copy them.
        self._table = (
            copier.table(plain, launch_bytes=1 << 62) if is_bucket else copier.table(plain)
        )

    @property
    def has_strided(self) -> bool:
        return bool(self._strided)

    def start(self) -> None:
        self._copier.run(self._table)
        for sink, source in self._strided:
            copy_strided(sink, source)

    def wait(self, deadline: float) -> None:
        self._copier.wait(max(deadline - monotonic(), 0.001))
        if self._strided:  # they are on the framework's own stream
            driver.synchronize(self._device, max(deadline - monotonic(), 0.001))

    def close(self) -> None:
        self._copier.free_table(self._table)


def _is_strided(sink: Buffer, source: Buffer) -> bool:
    """True for copies inside one device that the driver would do in tiny runs."""
    return (
        sink.device == source.device
        and sink.nbytes > _RUN_BYTES
        and run_bytes(sink, source) < _RUN_BYTES
    )


class Copiers:
    """Copiers for each device, made when they are first needed.

    Buckets take turns with two of them, so that one can be waited for while the next is copied.
    """

    def __init__(self) -> None:
        self._copiers: dict[tuple[int, int], Copier] = {}
        self._turn = 0

    def prepare(
        self, pairs: Sequence[tuple[Buffer, Buffer]], *, is_bucket: bool
    ) -> list[DeviceCopies]:
        """Return the copies by the device that makes them: the sink's, if that is one."""
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
            found.append(DeviceCopies(device, self._copiers[key], each, is_bucket=is_bucket))
        return found

    def close(self) -> None:
        for copier in self._copiers.values():
            copier.close()
        self._copiers.clear()


class Regions:
    """Memory whose digests are wanted in every round."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._nbytes = [buffer.nbytes for buffer in buffers]
        self._kept = buffers
        self._small = SmallRegions(
            {n: b for n, b in enumerate(buffers) if b.device is None and is_small(b)}
        )
        self._on_host = [n for n, b in enumerate(buffers) if b.device is None and not is_small(b)]
        self._chunks = [chunk for n in self._on_host for chunk in _chunks(n, 0, buffers[n], None)]
        self._on_devices: list[tuple[list[int], DeviceDigests]] = []
        for device in sorted({b.device for b in buffers if b.device is not None}):
            numbers = [n for n, buffer in enumerate(buffers) if buffer.device == device]
            self._on_devices.append((numbers, DeviceDigests([buffers[n] for n in numbers])))

    def start(self) -> None:
        """Queue what a device does, behind copies that were queued before."""
        for _, on_device in self._on_devices:
            on_device.start()

    def digests(self, kind: DigestKind, deadline: float) -> list[int]:
        """Return the digest of each region's bytes in row-major order; of devices only words."""
        assert kind == "words" or not self._on_devices
        found = [0] * len(self._nbytes)
        running = {n: Digest(self._nbytes[n], kind) for n in self._on_host}
        if self._chunks:
            _on_all(
                self._chunks,
                lambda chunk: running[chunk.region].add(chunk.offset, _bytes(chunk.sink)),
                deadline,
            )
        for number, each in running.items():
            found[number] = each.value()
        for number, value in self._small.digests(kind):
            found[number] = value
        for numbers, on_device in self._on_devices:
            values = on_device.values(max(deadline - monotonic(), 0.001))
            for number, value in zip(numbers, values, strict=True):
                found[number] = value
        return found


def is_small(buffer: Buffer) -> bool:
    """True if a region is better digested together with others, after all is copied."""
    return buffer.nbytes <= SMALL_BYTES


class SmallRegions:
    """Memory on the host in pieces so small that each call for one would cost more than it."""

    def __init__(self, buffers: Mapping[int, Buffer]) -> None:
        self._numbers = list(buffers)
        self._items = [buffer.items() for buffer in buffers.values()]

    def digests(self, kind: DigestKind) -> Iterator[tuple[int, int]]:
        return zip(self._numbers, small_digests(list(map(_bytes, self._items)), kind), strict=True)
