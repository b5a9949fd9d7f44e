"""The reader: copies extents of files into memory, by worker threads, and checks them.

Threads read windows: ranges of a file with the chunks that some target wants, and small gaps
between them. Bytes that are in the page cache in the order the target wants are read
directly into it and hashed there; all others are hashed before they are copied. An error
says whether anything had been written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat

import numpy as np

from flyweight.checks import check_threads
from flyweight.digest import Checksum, checksum
from flyweight.errors import (
    ChecksumMismatch,
    FlyweightError,
    FormatError,
    SpecError,
    StoreError,
    listed,
)
from flyweight.memory import STAGING, Bytes, Items, Staging, block_of, items_of
from flyweight.ports import WINDOW_SLACK, Store
from flyweight.spec.box import Box
from flyweight.spec.manifest import Extent, Manifest
from flyweight.worker_threads import run_jobs

WINDOW_BYTES = 8 << 20
_HOT_BYTES = 1 << 20  # what was just read is hashed from the core's own cache, not from memory
_GAP_BYTES = 64 << 10  # reading past a hole this small is cheaper than a second window


@dataclass(frozen=True)
class Target:
    """A box of a tensor, in items, that wants bytes: memory, or a function that copies them."""

    box: Box
    items: Items | Callable[[Box, Bytes], None]
    staging: Staging
    may_map: bool = True
    """False if bytes should come by way of `staging` even from the page cache: it is pinned."""

    settle: Callable[[], None] | None = None
    """Waits until the copies that `items` started are done; their bytes must not change before."""

    @cached_property
    def flat(self) -> Bytes | None:
        """The target's bytes in row-major order, if they lie so."""
        if callable(self.items) or not self.items.flags.c_contiguous:
            return None
        return self.items.reshape(-1).view(np.uint8)


@dataclass(slots=True)
class _Chunk:
    """A chunk of an extent that some targets want."""

    offset: int
    nbytes: int
    extent: Extent
    box: Box
    """In items, counted from the corner of the whole tensor."""
    index: int | None
    """Which checksum of the extent is this chunk's; None if it is not checked."""
    item_bytes: int
    targets: list[Target] = field(default_factory=list)
    goal: Bytes | None = None
    """Where the bytes go as they are, if one target wants them all and has them in this order."""


@dataclass(slots=True)
class _Window:
    file: str
    start: int
    end: int
    chunks: list[_Chunk]

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def is_plain(self) -> bool:
        """True if every byte goes to one place: no gap, and no chunk that two targets want."""
        at = self.start
        for chunk in self.chunks:
            if chunk.goal is None or chunk.offset != at:
                return False
            at += chunk.nbytes
        return True


class Reader:
    """Collects which boxes of a store's files are wanted, then reads them in file order."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        *,
        should_verify: bool = True,
        on_damage: Callable[[Extent, ChecksumMismatch], None] | None = None,
    ) -> None:
        self._store, self._manifest, self._should_verify = store, manifest, should_verify
        self._on_damage = on_damage
        self._chunks: dict[str, dict[tuple[int, Box, int], _Chunk]] = {}
        self._staging: Staging | None = None
        self._may_map = True
        self._settle: Callable[[], None] | None = None
        self.read_bytes = self.checked_bytes = 0
        self._written_bytes = 0
        self._lock = threading.Lock()

    def add(self, extent: Extent, box: Box, target: Target) -> None:
        """Copy `box`, in elements, of an extent to a target when `run` is called."""
        spec = self._manifest.tensors[extent.name]
        wanted, held = spec.stored(box), spec.stored(extent.box)
        self._staging = target.staging
        self._may_map = self._may_map and target.may_map
        self._settle = self._settle or target.settle
        chunks = self._chunks.setdefault(extent.file, {})
        is_checked = self._should_verify and extent.checksums is not None
        is_all, chunk_bytes = wanted == held, self._manifest.chunk_bytes
        flat = target.flat if is_all and wanted == target.box else None
        boxes: Iterable[Box] = repeat(held)  # the chunks of a flat target are plain bytes
        if flat is None:
            boxes = spec.chunks(extent.box, chunk_bytes)
            if any(held.offset):
                boxes = (each.moved(held.offset) for each in boxes)
        sizes, start = spec.chunk_sizes(extent.box, chunk_bytes), 0
        for index, (nbytes, items) in enumerate(zip(sizes, boxes, strict=False)):
            if is_all or items.overlap(wanted) is not None:
                at, number = extent.offset + start, index if is_checked else None
                key = (at, items, spec.item_bytes if flat is None else id(target))
                if key not in chunks:
                    chunks[key] = _Chunk(at, nbytes, extent, items, number, spec.item_bytes)
                chunks[key].targets.append(target)
                chunks[key].goal = None if flat is None else flat[start : start + nbytes]
            start += nbytes

    @property
    def wanted_bytes(self) -> int:
        """How many bytes of the files would be read, gaps aside."""
        return sum(each.nbytes for chunks in self._chunks.values() for each in chunks.values())

    def run(
        self,
        *,
        num_threads: int,
        memory_bytes: int | None = None,
        verb: str | None = None,
        tick: Callable[[], None] | None = None,
        starting_at: float = 0.0,
    ) -> None:
        """Read everything that was added; afterwards every target holds its bytes.

        `tick` is called before each window, and may raise to stop. `starting_at`, a fraction from
        0 to 1, says which window comes first: several readers of the same files that start at
        different places find in the page cache what the others have read.
        """
        check_threads(num_threads)
        window_bytes = WINDOW_BYTES
        if memory_bytes is not None:
            window_bytes = min(WINDOW_BYTES, memory_bytes // num_threads - WINDOW_SLACK)
        windows = list(self._windows(window_bytes))
        if not windows:
            return
        first = int(starting_at * len(windows))
        windows = windows[first:] + windows[:first]
        block_bytes = max(window.nbytes for window in windows) + WINDOW_SLACK
        if memory_bytes is not None:
            if memory_bytes < block_bytes:
                raise SpecError(
                    f"memory_bytes is {memory_bytes}, chunks of this size need {block_bytes}"
                )
            num_threads = min(num_threads, memory_bytes // block_bytes)

        def work(window: _Window, staging: Bytes) -> int:
            if tick is not None:
                tick()
            try:
                return self._read(window, staging)
            except (FormatError, StoreError) as error:
                if not isinstance(error, ChecksumMismatch):  # which names its tensor itself
                    error.note(f"reading {listed({each.extent.name for each in window.chunks})}")
                raise

        try:
            run_jobs(
                windows,
                work,
                num_threads=num_threads,
                staging=self._staging or STAGING,
                staging_bytes=block_bytes,
                verb=verb,
                total_bytes=sum(window.nbytes for window in windows),
            )
        except FlyweightError as error:
            if verb:
                error.note(
                    f"{self._written_bytes} bytes had been written: the target holds a mix and "
                    f"must not be used before a whole load"
                    if self._written_bytes
                    else "the target was not touched"
                )
            raise

    def _windows(self, window_bytes: int) -> Iterator[_Window]:
        """Yield windows of neighbouring chunks; a chunk larger than a window has its own."""
        for file, chunks in self._chunks.items():
            window: _Window | None = None
            for chunk in sorted(map(self._narrowed, chunks.values()), key=lambda each: each.offset):
                reach = chunk.offset + chunk.nbytes
                if window is not None and (
                    chunk.offset - window.end > _GAP_BYTES or reach - window.start > window_bytes
                ):
                    yield window
                    window = None
                if window is None:
                    window = _Window(file, chunk.offset, reach, [])
                window.chunks.append(chunk)
                window.end = max(window.end, reach)
            if window is not None:
                yield window

    def _narrowed(self, chunk: _Chunk) -> _Chunk:
        """Cut an unchecked chunk down to the rows that are wanted, if those are one run."""
        if chunk.goal is not None or chunk.index is not None or len(chunk.targets) != 1:
            return chunk
        meet = chunk.box.overlap(chunk.targets[0].box)
        if meet is None or meet == chunk.box:
            return chunk
        runs = list(meet.within(chunk.box).runs(chunk.box.shape))
        if len(runs) != 1:
            return chunk
        start, length = (each * chunk.item_bytes for each in runs[0])
        return replace(chunk, offset=chunk.offset + start, nbytes=length, box=meet)

    def _read(self, window: _Window, staging: Bytes) -> int:
        file, start, nbytes = window.file, window.start, window.nbytes
        if window.is_plain and self._store.is_cached(file, start, nbytes):
            self._read_in_place(file, window.chunks)
        else:
            may_map = self._may_map
            with self._store.window(file, start, nbytes, staging, may_map=may_map) as shown:
                try:
                    for chunk in window.chunks:
                        data = shown[chunk.offset - start : chunk.offset - start + chunk.nbytes]
                        if chunk.index is None or self._is_right(chunk, checksum(data)):
                            self._count(written=chunk.nbytes)
                            self._copy(chunk, data)
                finally:
                    if self._settle is not None:
                        self._settle()
                    del data, shown  # or the mapping cannot be closed
        self._count(read=nbytes)
        return nbytes

    def _read_in_place(self, file: str, chunks: list[_Chunk]) -> None:
        """Read chunks directly to where they go, and hash them while the CPU's cache has them."""
        self._count(written=sum(chunk.nbytes for chunk in chunks))
        batch: list[tuple[_Chunk, Bytes]] = []
        held_bytes = 0
        for chunk in chunks:
            assert chunk.goal is not None
            is_large = chunk.index is not None and chunk.nbytes > _HOT_BYTES
            is_full = chunk.index is not None and held_bytes + chunk.nbytes > _HOT_BYTES
            if batch and (is_large or is_full):
                self._read_batch(file, batch)
                batch, held_bytes = [], 0
            if is_large:
                running = Checksum()
                for at in range(0, chunk.nbytes, _HOT_BYTES):
                    some = chunk.goal[at : at + _HOT_BYTES]
                    self._store.read_into(file, chunk.offset + at, [some])
                    running.update(some)
                self._is_right(chunk, running.intdigest())
            else:
                batch.append((chunk, chunk.goal))
                held_bytes += chunk.nbytes
        if batch:
            self._read_batch(file, batch)

    def _read_batch(self, file: str, batch: list[tuple[_Chunk, Bytes]]) -> None:
        self._store.read_into(file, batch[0][0].offset, [goal for _, goal in batch])
        for chunk, goal in batch:
            if chunk.index is not None:
                self._is_right(chunk, checksum(goal))

    def _count(self, *, read: int = 0, written: int = 0, checked: int = 0) -> None:
        with self._lock:
            self.read_bytes += read
            self._written_bytes += written
            self.checked_bytes += checked

    def _is_right(self, chunk: _Chunk, found: int) -> bool:
        """True if the checksum is right; else call `on_damage` and return False, or raise."""
        assert chunk.extent.checksums is not None
        assert chunk.index is not None
        expected = chunk.extent.checksums[chunk.index]
        self._count(checked=chunk.nbytes)
        if found == expected:
            return True
        error = ChecksumMismatch(
            f"{chunk.extent.name!r}: bytes {chunk.offset}..{chunk.offset + chunk.nbytes} of "
            f"{chunk.extent.file!r} in {self._store.place!r} have checksum {found:016x}, "
            f"{expected:016x} was written"
        )
        if self._on_damage is None:
            raise error
        self._on_damage(chunk.extent, error)
        return False

    def _copy(self, chunk: _Chunk, data: Bytes) -> None:
        if chunk.goal is not None:
            np.copyto(chunk.goal, data)
            return
        source = items_of(data, chunk.item_bytes, chunk.box.shape)
        for target in chunk.targets:
            meet = chunk.box.overlap(target.box)
            if meet is None:
                continue
            block = block_of(source, meet.within(chunk.box))
            place = meet.within(target.box)
            if callable(target.items):
                target.items(place, np.ascontiguousarray(block).reshape(-1).view(np.uint8))
                continue
            goal = block_of(target.items, place)
            if block.flags.c_contiguous and goal.flags.c_contiguous:
                # As bytes: items of a file may stand at odd addresses, which numpy copies singly.
                block, goal = block.reshape(-1).view(np.uint8), goal.reshape(-1).view(np.uint8)
            np.copyto(goal, block, casting="no")
