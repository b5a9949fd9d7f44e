"""Buckets: the bytes of many blocks, packed to be moved as one.

This file counts bytes, not elements. A bucket is never larger than its limit; a larger block is cut
into boxes, so that a replica that wants another box of it can find its part in each piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyweight.errors import SpecError
from flyweight.plans.copy_table import Integers
from flyweight.spec.box import Box, blocks

_PIECES = 8  # small enough that a bucket without space for the next piece is nearly full


@dataclass(frozen=True, eq=False)
class PieceTable:
    """Pieces of one bucket: items of blocks, row-major from byte `at` of the bucket."""

    block: Integers
    offset: Integers
    shape: Integers
    at: Integers

    def __len__(self) -> int:
        return len(self.block)

    def take(self, rows: NDArray[Any]) -> PieceTable:
        return PieceTable(self.block[rows], self.offset[rows], self.shape[rows], self.at[rows])

    def box(self, row: int) -> Box:
        return Box(tuple(self.offset[row].tolist()), tuple(self.shape[row].tolist()))


def pack(
    block: Integers,
    shape: Integers,
    item_bytes: Integers,
    *,
    bucket_bytes: int,
    align_bytes: int = 64,
) -> Iterator[PieceTable]:
    """Yield buckets whose pieces, in order, are every item of every block exactly once.

    Rows have the number of each block, its shape and the bytes of one item. Each piece starts at a
    multiple of `align_bytes`. A block without bytes is in no bucket.
    """
    widest = int(item_bytes.max(initial=1))
    if align_bytes < 1 or bucket_bytes < max(align_bytes, widest):
        raise SpecError(
            f"buckets of {bucket_bytes} bytes cannot hold {align_bytes}-byte pieces of items of "
            f"{widest} bytes"
        )
    rows, offset, sizes = _pieces(shape, np.maximum(bucket_bytes // _PIECES // item_bytes, 1))
    nbytes = sizes.prod(axis=1, dtype=np.int64) * item_bytes[rows]
    aligned = -(-nbytes // align_bytes) * align_bytes
    start = np.cumsum(aligned) - aligned
    end, first = start + nbytes, 0
    while first < len(rows):
        last = int(np.searchsorted(end, start[first] + bucket_bytes, side="right"))
        some = slice(first, last)
        yield PieceTable(block[rows[some]], offset[some], sizes[some], start[some] - start[first])
        first = last


def _pieces(shape: Integers, most_items: Integers) -> tuple[Integers, Integers, Integers]:
    """Cut blocks of more than so many items; return each piece's row, offset and shape."""
    num_items = shape.prod(axis=1, dtype=np.int64)
    is_large = num_items > most_items
    rows = np.flatnonzero((num_items > 0) & ~is_large)
    parts = [(rows, np.zeros_like(shape[rows]), shape[rows])]
    for row in np.flatnonzero(is_large).tolist():
        boxes = list(blocks(tuple(shape[row].tolist()), int(most_items[row])))
        parts.append(
            (
                np.full(len(boxes), row),
                np.array([box.offset for box in boxes], np.int64),
                np.array([box.shape for box in boxes], np.int64),
            )
        )
    rows, offset, sizes = (np.concatenate([part[n] for part in parts]) for n in range(3))
    order = np.argsort(rows, kind="stable")
    return rows[order], offset[order], sizes[order]
