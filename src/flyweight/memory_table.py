"""Buffer tables: where the blocks of a very large model lie, as arrays.

A row is what `flyweight.memory.Buffer` is for one block. All rows have the same number of dims:
blocks with fewer have leading dims of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyweight.memory import Buffer

Integers = NDArray[np.int64]
Sizes = tuple[int, ...]
HOST, NOWHERE = -1, -2
"""The `device` of memory of the host, and of a block that is not in memory."""
ALIGN = 64
"""Blocks that are packed begin at multiples of it, so that kernels copy 16 bytes at once."""

_NOTHING = Buffer(0, (), (), 1, None)


@dataclass(frozen=True, eq=False)
class BufferTable:
    """Blocks of memory; `strides` count bytes, `shape` items of `item_bytes`."""

    address: Integers
    shape: Integers
    strides: Integers
    """Two dimensions each: a row per block, a column per dim."""
    item_bytes: Integers
    device: Integers
    """The number of the CUDA device, or HOST, or NOWHERE."""
    owner: object
    """Keeps the memory alive."""
    is_writable: bool = True
    """False if one of the blocks is read-only."""

    @classmethod
    def of(cls, buffers: Sequence[Buffer | None], shape: Integers | None = None) -> BufferTable:
        """Return a table of buffers; None is a block that is not in memory.

        shape: the shape of each block, padded to the number of dims of the table; by default that
            of the buffers.
        """
        rows = [_NOTHING if each is None else each for each in buffers]
        kinds: dict[tuple[Sizes, Sizes], int] = {}  # models have very many tensors and few kinds
        kind = [kinds.setdefault((each.shape, each.strides), len(kinds)) for each in rows]
        num_dims = max((len(sizes) for sizes, _ in kinds), default=1) or 1
        if shape is None:
            shape = _padded([sizes for sizes, _ in kinds], num_dims, 1)[kind]
        # The strides of blocks without items may be absurd.
        steps = [() if 0 in sizes else strides for sizes, strides in kinds]
        strides = _padded(steps, shape.shape[1], 0)[kind]
        device = [HOST if each.device is None else each.device for each in rows]
        table = cls(
            np.array([each.address for each in rows], np.int64),
            shape,
            strides,
            np.array([each.item_bytes for each in rows], np.int64),
            np.array(device, np.int64),
            [each.owner for each in rows],
            all(each.is_writable for each in rows),
        )
        table.device[[n for n, each in enumerate(buffers) if each is None]] = NOWHERE
        return table

    def widened(self, num_dims: int) -> BufferTable:
        """Return the same blocks with leading dims of size 1 added, up to this number of dims."""
        extra = num_dims - self.shape.shape[1]
        if not extra:
            return self
        shape = np.pad(self.shape, ((0, 0), (extra, 0)), constant_values=1)
        return replace(self, shape=shape, strides=np.pad(self.strides, ((0, 0), (extra, 0))))

    @classmethod
    def joined(cls, tables: Sequence[BufferTable]) -> BufferTable:
        """Return the rows of all tables, which have the same number of dims."""
        return cls(
            np.concatenate([each.address for each in tables]),
            np.concatenate([each.shape for each in tables]),
            np.concatenate([each.strides for each in tables]),
            np.concatenate([each.item_bytes for each in tables]),
            np.concatenate([each.device for each in tables]),
            [each.owner for each in tables],
            all(each.is_writable for each in tables),
        )

    @classmethod
    def packed(
        cls, memory: Buffer, starts: Integers, shape: Integers, item_bytes: Integers
    ) -> BufferTable:
        """Return row-major blocks that start at these bytes of a buffer."""
        strides = row_major_strides(shape) * item_bytes[:, None]
        device = np.full(len(shape), HOST if memory.device is None else memory.device)
        address = memory.address + starts
        return cls(address, shape, strides, item_bytes, device, memory.owner, memory.is_writable)

    def __len__(self) -> int:
        return len(self.address)

    @property
    def devices(self) -> list[int]:
        """The devices that blocks are on, other than the host."""
        return [each for each in np.unique(self.device).tolist() if each >= 0]

    @cached_property
    def nbytes(self) -> Integers:
        found: Integers = self.shape.prod(axis=1, dtype=np.int64) * self.item_bytes
        return found

    @cached_property
    def is_contiguous(self) -> NDArray[np.bool_]:
        """Which blocks lie row-major without gaps; dims of size 1 have no stride to check."""
        wanted = row_major_strides(self.shape) * self.item_bytes[:, None]
        is_right = (self.shape == 1) | (self.strides == wanted)
        found: NDArray[np.bool_] = is_right.all(axis=1) | (self.nbytes == 0)
        return found

    @cached_property
    def spans(self) -> tuple[Integers, Integers]:
        """The addresses of the first byte of each block, and of the end of its last byte."""
        reach = self.strides * np.maximum(self.shape - 1, 0)
        low = self.address + np.minimum(reach, 0).sum(axis=1)
        high = self.address + np.maximum(reach, 0).sum(axis=1) + self.item_bytes
        is_empty = self.nbytes == 0
        return np.where(is_empty, self.address, low), np.where(is_empty, self.address, high)

    @cached_property
    def has_neighbour_inside(self) -> NDArray[np.bool_]:
        """Which blocks may share a byte with another one, by the spans of both."""
        low, high = self.spans
        found = np.zeros(len(self), bool)
        for device in np.unique(self.device).tolist():
            rows = np.flatnonzero((self.device == device) & (self.nbytes > 0))
            rows = rows[np.argsort(low[rows], kind="stable")]
            before = np.maximum.accumulate(high[rows])
            found[rows[1:]] |= low[rows[1:]] < before[:-1]
            # A block that one of the next starts in: the nearest one starts first.
            found[rows[:-1]] |= low[rows[1:]] < high[rows[:-1]]
        return found

    def take(self, rows: NDArray[Any]) -> BufferTable:
        """Return the blocks of these rows."""
        if rows.dtype == bool and rows.all():
            return self
        return BufferTable(
            self.address[rows],
            self.shape[rows],
            self.strides[rows],
            self.item_bytes[rows],
            self.device[rows],
            self.owner,
            self.is_writable,
        )

    def regions(self, rows: Integers, offset: Integers, shape: Integers) -> BufferTable:
        """Return a part of the block of each row; `offset` counts items from the block's corner."""
        of = self.take(rows)
        return replace(of, address=of.address + (offset * of.strides).sum(axis=1), shape=shape)

    def buffer(self, row: int) -> Buffer:
        """Return one block."""
        device = int(self.device[row])
        assert device != NOWHERE
        return Buffer(
            int(self.address[row]),
            tuple(self.shape[row].tolist()),
            tuple(self.strides[row].tolist()),
            int(self.item_bytes[row]),
            self.owner,
            self.is_writable,
            None if device == HOST else device,
        )


def aligned(nbytes: Integers) -> tuple[Integers, int]:
    """Return where blocks start that lie one after the other, each aligned, and where all end."""
    sizes = -(-nbytes // ALIGN) * ALIGN
    ends = np.cumsum(sizes)
    return ends - sizes, int(ends[-1]) if len(ends) else 0


def runs_of(*keys: NDArray[Any]) -> list[tuple[int, int]]:
    """Return the first row and the end of each run of rows whose keys are all equal."""
    if not len(keys[0]):
        return []
    is_cut = np.any([np.diff(key) != 0 for key in keys], axis=0)
    return list(pairwise([0, *(np.flatnonzero(is_cut) + 1).tolist(), len(keys[0])]))


def row_major_strides(shape: Integers) -> Integers:
    """Return the strides, in items, of blocks that lie row-major without gaps."""
    inner = np.cumprod(shape[:, :0:-1], axis=1, dtype=np.int64)[:, ::-1]
    return np.concatenate([inner, np.ones((len(shape), 1), np.int64)], axis=1)


def _padded(rows: Sequence[Sizes], num_dims: int, filler: int) -> Integers:
    """Return rows of numbers with leading fillers, up to this number of columns."""
    fillers = (filler,) * num_dims
    padded = [(*fillers[len(each) :], *each) for each in rows]
    return np.array(padded, np.int64).reshape(-1, num_dims)
