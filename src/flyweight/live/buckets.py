"""Buckets: pieces of a stream that are packed together, as into a slot of a ring. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flyweight.memory import Buffer
from flyweight.memory_table import BufferTable, Integers, aligned
from flyweight.spec.box import boxes_of_range

SLOT_BYTES = 512 << 20
NUM_SLOTS = 3


@dataclass(frozen=True, eq=False)
class Bucket:
    """Pieces of rows, one after the other."""

    row: Integers
    """The row of the stream that each piece is of."""
    offset: Integers
    """Counted from the corner of the row."""
    shape: Integers
    item_bytes: Integers
    start: Integers
    """The byte at which each piece starts."""

    @property
    def nbytes(self) -> int:
        """Their end, if there are no gaps."""
        return int((self.shape.prod(axis=1, dtype=np.int64) * self.item_bytes).sum())

    def regions(self, rows: BufferTable) -> BufferTable:
        """Return where the pieces lie in memory that has the rows."""
        return rows.widened(self.shape.shape[1]).regions(self.row, self.offset, self.shape)

    def packed_at(self, memory: Buffer) -> BufferTable:
        """Return where the pieces lie in memory that they are packed into."""
        return BufferTable.packed(memory, self.start, self.shape, self.item_bytes)


def buckets_of(shape: Integers, item_bytes: Integers) -> list[Bucket]:
    """Cut rows of these shapes into buckets that fit into a slot, of pieces that are aligned.

    A row that is larger than a slot becomes several pieces.
    """
    num_items, most = shape.prod(axis=1, dtype=np.int64), SLOT_BYTES // item_bytes
    counts = np.maximum(-(-num_items // most), 1)
    row = np.repeat(np.arange(len(shape)), counts)
    first = (np.arange(len(row)) - (np.cumsum(counts) - counts)[row]) * most[row]
    all_ = pieces_of(shape, item_bytes, row, first, np.minimum(first + most[row], num_items[row]))
    starts, total = aligned(all_.shape.prod(axis=1, dtype=np.int64) * all_.item_bytes)
    ends, found, at = np.append(starts[1:], total), list[Bucket](), 0
    while at < len(starts):
        begin = int(starts[at])
        here = slice(at, int(np.searchsorted(ends, begin + SLOT_BYTES, side="right")))
        columns = (all_.row, all_.offset, all_.shape, all_.item_bytes, starts - begin)
        found.append(Bucket(*(column[here] for column in columns)))
        at = here.stop
    return found


def pieces_of(
    shape: Integers, item_bytes: Integers, row: Integers, first: Integers, end: Integers
) -> Bucket:
    """Return items `first` to `end`, without `end`, of some rows, in order and without gaps.

    shape, item_bytes: those of all rows.
    """
    shape, item_bytes = shape[row], item_bytes[row]
    is_whole = end - first == shape.prod(axis=1, dtype=np.int64)
    whole = np.flatnonzero(is_whole)
    of, offsets, shapes = [whole], [np.zeros_like(shape[whole])], [shape[whole]]
    for each in np.flatnonzero(~is_whole).tolist():
        start, length = int(first[each]), int(end[each] - first[each])
        boxes = list(boxes_of_range(shape[each].tolist(), start, length))
        of.append(np.full(len(boxes), each))
        offsets.append(np.array([box.offset for box in boxes]))
        shapes.append(np.array([box.shape for box in boxes]))
    order = np.argsort(np.concatenate(of), kind="stable")
    piece = np.concatenate(of)[order]
    sizes = np.concatenate(shapes)[order]
    ends = np.cumsum(sizes.prod(axis=1, dtype=np.int64) * item_bytes[piece])
    starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
    return Bucket(row[piece], np.concatenate(offsets)[order], sizes, item_bytes[piece], starts)
