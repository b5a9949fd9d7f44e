"""Buckets: a stream cut into pieces that fit into a slot of a ring. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flyweight.memory import Buffer
from flyweight.memory_table import BufferTable, Integers, row_major_strides
from flyweight.spec.box import boxes_of_range

SLOT_BYTES = 256 << 20
NUM_SLOTS = 3
_ALIGN = 64


@dataclass(frozen=True, eq=False)
class Bucket:
    """Pieces of rows, one after the other in a slot."""

    row: Integers
    """The row of the stream that each piece is of."""
    offset: Integers
    """Counted from the corner of the row."""
    shape: Integers
    item_bytes: Integers
    start: Integers
    """The byte of the slot at which each piece starts."""

    def regions(self, rows: BufferTable) -> BufferTable:
        """Return where the pieces lie in memory that has the rows."""
        return rows.widened(self.shape.shape[1]).regions(self.row, self.offset, self.shape)

    def packed_at(self, slot: Buffer) -> BufferTable:
        """Return where the pieces lie in a slot."""
        strides = row_major_strides(self.shape) * self.item_bytes[:, None]
        device = np.full(len(self.row), slot.device)
        return BufferTable(
            slot.address + self.start, self.shape, strides, self.item_bytes, device, slot.owner
        )


def buckets_of(shape: Integers, item_bytes: Integers) -> list[Bucket]:
    """Cut rows of these shapes; a row that is larger than a slot becomes several pieces."""
    row, offset, pieces = _pieces(shape, item_bytes)
    width = item_bytes[row]
    sizes = -(-pieces.prod(axis=1, dtype=np.int64) * width // _ALIGN) * _ALIGN
    ends, found, first = np.cumsum(sizes), list[Bucket](), 0
    while first < len(row):
        begin = int(ends[first] - sizes[first])
        end = int(np.searchsorted(ends, begin + SLOT_BYTES, side="right"))
        here = slice(first, end)
        starts = ends[here] - sizes[here] - begin
        found.append(Bucket(row[here], offset[here], pieces[here], width[here], starts))
        first = end
    return found


def _pieces(shape: Integers, item_bytes: Integers) -> tuple[Integers, Integers, Integers]:
    """Return the row, offset and shape of each piece."""
    nbytes = shape.prod(axis=1, dtype=np.int64) * item_bytes
    large = np.flatnonzero(nbytes > SLOT_BYTES)
    rows, offsets, shapes = [np.arange(len(shape))], [np.zeros_like(shape)], [shape]
    for each in large.tolist():
        items, most = int(shape[each].prod()), SLOT_BYTES // int(item_bytes[each])
        boxes = [
            box
            for at in range(0, items, most)
            for box in boxes_of_range(shape[each].tolist(), at, min(most, items - at))
        ]
        rows.append(np.full(len(boxes), each))
        offsets.append(np.array([box.offset for box in boxes]))
        shapes.append(np.array([box.shape for box in boxes]))
    row = np.concatenate(rows)
    keep = np.ones(len(row), bool)
    keep[large] = False  # their pieces stand in for them
    order = np.flatnonzero(keep)[np.argsort(row[keep], kind="stable")]
    return row[order], np.concatenate(offsets)[order], np.concatenate(shapes)[order]
