"""The reader: pours extents into memory, in windows, by threads, checked as they pass.

A piece is a chunk of an extent that some target wants: its place in the file, its
checksum, and where its items go. Pieces near each other in a file are read as one
window. Bytes that lie in the page cache as the target wants them are read straight
into it and hashed there; all others are hashed before they are copied. An error says
whether anything had been written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

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
    """A box of a tensor, in items, that wants bytes: host items, or a function that takes them."""

    box: Box
    items: Items | Callable[[Box, Bytes], None]
    staging: Staging
    may_map: bool = True
    """False if bytes should come by way of `staging` even from the page cache: it is pinned."""

    settle: Callable[[], None] | None = None
    """Waits until what `items` took has arrived; until then its bytes stay as they are."""

    @cached_property
    def flat(self) -> Bytes | None:
        """The target's bytes in row-major order, if they lie so."""
        if callable(self.items) or not self.items.flags.c_contiguous:
            return None
        return self.items.reshape(-1).view(np.uint8)


@dataclass(slots=True)
class _Piece:
    offset: int
    nbytes: int
    extent: Extent
    chunk: Box
    """The chunk in items, counted from the corner of the whole tensor."""
    index: int | None
    """Which checksum of the extent is this piece's; None if it is not checked."""
    item_bytes: int
    targets: list[Target] = field(default_factory=list)
    goal: Bytes | None = None
    """Where the bytes go as they are, if one target wants them all and has them in this order."""


@dataclass(slots=True)
class _Window:
    file: str
    start: int
    end: int
    pieces: list[_Piece]

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def is_plain(self) -> bool:
        """True if every byte has one place to go to: no gap, and no piece wanted twice."""
        at = self.start
        for piece in self.pieces:
            if piece.goal is None or piece.offset != at:
                return False
            at += piece.nbytes
        return True


class Reader:
    """Collects what is wanted of a store's files, then reads it in the order of the files."""

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
        self._pieces: dict[str, dict[tuple[int, Box, int], _Piece]] = {}
        self._staging: Staging | None = None
        self._may_map = True
        self._settle: Callable[[], None] | None = None
        self.read_bytes = self.checked_bytes = 0
        self._landed_bytes = 0
        self._lock = threading.Lock()

    def add(self, extent: Extent, box: Box, target: Target) -> None:
        """Want `box`, in elements, of what the extent holds."""
        spec = self._manifest.tensors[extent.name]
        wanted, held = spec.stored(box), spec.stored(extent.box)
        self._staging = target.staging
        self._may_map = self._may_map and target.may_map
        self._settle = self._settle or target.settle
        pieces = self._pieces.setdefault(extent.file, {})
        is_checked = self._should_verify and extent.checksums is not None
        is_all = wanted == held
        if is_all and wanted == target.box and target.flat is not None:
            self._add_flat(extent, held, target, is_checked)
            return
        at, is_corner = extent.offset, not any(held.offset)
        for index, chunk in enumerate(spec.chunks(extent.box, self._manifest.chunk_bytes)):
            nbytes = prod(chunk.shape) * spec.item_bytes
            block = chunk if is_corner else chunk.moved(held.offset)
            if is_all or block.overlap(wanted) is not None:
                number = index if is_checked else None
                key = (at, block, spec.item_bytes)
                if key not in pieces:
                    pieces[key] = _Piece(at, nbytes, extent, block, number, spec.item_bytes)
                pieces[key].targets.append(target)
            at += nbytes

    def _add_flat(self, extent: Extent, held: Box, target: Target, is_checked: bool) -> None:
        """Want all of an extent just as it rests: its pieces are bytes, nobody looks inside."""
        assert target.flat is not None
        spec, start = self._manifest.tensors[extent.name], 0
        sizes = spec.chunk_sizes(extent.box, self._manifest.chunk_bytes)
        for index, nbytes in enumerate(sizes):
            goal = target.flat[start : start + nbytes]
            number = index if is_checked else None
            at = extent.offset + start
            piece = _Piece(at, nbytes, extent, held, number, spec.item_bytes, [target], goal)
            self._pieces[extent.file][at, held, id(target)] = piece
            start += nbytes

    @property
    def wanted_bytes(self) -> int:
        """How many bytes of the files would be read, gaps aside."""
        return sum(p.nbytes for pieces in self._pieces.values() for p in pieces.values())

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

        `tick` is called now and then, and may raise to stop. Readers of the same files that start
        at different places, told as a part of the whole, find read what others read first.
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
                    error.note(f"reading {listed({each.extent.name for each in window.pieces})}")
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
                error.note(self._aftermath())
            raise

    def _aftermath(self) -> str:
        if not self._landed_bytes:
            return "the target was not touched"
        return (
            f"{self._landed_bytes} bytes had been written: the target holds a mix and must not be "
            f"used before a whole load"
        )

    def _windows(self, window_bytes: int) -> Iterator[_Window]:
        """Gather neighbours up to the size of a window; a piece too large for one is alone."""
        for file, pieces in self._pieces.items():
            window: _Window | None = None
            for piece in sorted(map(self._narrowed, pieces.values()), key=lambda p: p.offset):
                reach = piece.offset + piece.nbytes
                if window is not None and (
                    piece.offset - window.end > _GAP_BYTES or reach - window.start > window_bytes
                ):
                    yield window
                    window = None
                if window is None:
                    window = _Window(file, piece.offset, reach, [])
                window.pieces.append(piece)
                window.end = max(window.end, reach)
            if window is not None:
                yield window

    def _narrowed(self, piece: _Piece) -> _Piece:
        """Cut an unchecked piece down to the rows that are wanted, if they are one stretch."""
        if piece.goal is not None or piece.index is not None or len(piece.targets) != 1:
            return piece
        meet = piece.chunk.overlap(piece.targets[0].box)
        if meet is None or meet == piece.chunk:
            return piece
        runs = list(meet.within(piece.chunk).runs(piece.chunk.shape))
        if len(runs) != 1:
            return piece
        start, length = runs[0]
        return _Piece(
            piece.offset + start * piece.item_bytes,
            length * piece.item_bytes,
            piece.extent,
            meet,
            None,
            piece.item_bytes,
            piece.targets,
        )

    def _read(self, window: _Window, staging: Bytes) -> int:
        file, start, pieces = window.file, window.start, window.pieces
        if window.is_plain and self._store.is_cached(file, start, window.nbytes):
            self._read_in_place(file, pieces)
            return self._read_done(window)
        with self._store.window(
            file, start, window.nbytes, staging, may_map=self._may_map
        ) as shown:
            try:
                for piece in pieces:
                    data = shown[piece.offset - start : piece.offset - start + piece.nbytes]
                    if piece.index is None or self._is_right(piece, checksum(data)):
                        self._count(landed=piece.nbytes)
                        self._land(piece, data)
            finally:
                if self._settle is not None:
                    self._settle()
                del data, shown  # or the mapping cannot be closed
        return self._read_done(window)

    def _read_done(self, window: _Window) -> int:
        self._count(read=window.nbytes)
        return window.nbytes

    def _read_in_place(self, file: str, pieces: list[_Piece]) -> None:
        """Read neighbours straight to where they go, and hash them there while they are hot."""
        self._count(landed=sum(piece.nbytes for piece in pieces))
        batch: list[tuple[_Piece, Bytes]] = []
        held_bytes = 0
        for piece in pieces:
            assert piece.goal is not None
            is_large = piece.index is not None and piece.nbytes > _HOT_BYTES
            is_full = piece.index is not None and held_bytes + piece.nbytes > _HOT_BYTES
            if batch and (is_large or is_full):
                self._read_batch(file, batch)
                batch, held_bytes = [], 0
            if is_large:
                running = Checksum()
                for at in range(0, piece.nbytes, _HOT_BYTES):
                    some = piece.goal[at : at + _HOT_BYTES]
                    self._store.read_into(file, piece.offset + at, [some])
                    running.add(some)
                self._is_right(piece, running.value())
            else:
                batch.append((piece, piece.goal))
                held_bytes += piece.nbytes
        if batch:
            self._read_batch(file, batch)

    def _read_batch(self, file: str, batch: list[tuple[_Piece, Bytes]]) -> None:
        self._store.read_into(file, batch[0][0].offset, [goal for _, goal in batch])
        for piece, goal in batch:
            if piece.index is not None:
                self._is_right(piece, checksum(goal))

    def _count(self, *, read: int = 0, landed: int = 0, checked: int = 0) -> None:
        with self._lock:
            self.read_bytes += read
            self._landed_bytes += landed
            self.checked_bytes += checked

    def _is_right(self, piece: _Piece, found: int) -> bool:
        """Compare the checksum; raises, or tells who asked to be told and returns False."""
        assert piece.extent.checksums is not None
        assert piece.index is not None
        expected = piece.extent.checksums[piece.index]
        self._count(checked=piece.nbytes)
        if found == expected:
            return True
        error = ChecksumMismatch(
            f"{piece.extent.name!r}: bytes {piece.offset}..{piece.offset + piece.nbytes} of "
            f"{piece.extent.file!r} in {self._store.place!r} have checksum {found:016x}, "
            f"{expected:016x} was written"
        )
        if self._on_damage is None:
            raise error
        self._on_damage(piece.extent, error)
        return False

    def _land(self, piece: _Piece, data: Bytes) -> None:
        if piece.goal is not None:
            np.copyto(piece.goal, data)
            return
        source = items_of(data, piece.item_bytes, piece.chunk.shape)
        for target in piece.targets:
            meet = piece.chunk.overlap(target.box)
            if meet is None:
                continue
            block = block_of(source, meet.within(piece.chunk))
            place = meet.within(target.box)
            if callable(target.items):
                target.items(place, np.ascontiguousarray(block).reshape(-1).view(np.uint8))
                continue
            goal = block_of(target.items, place)
            if block.flags.c_contiguous and goal.flags.c_contiguous:
                # As bytes: items of a file may stand at odd addresses, which numpy copies singly.
                block, goal = block.reshape(-1).view(np.uint8), goal.reshape(-1).view(np.uint8)
            np.copyto(goal, block, casting="no")
