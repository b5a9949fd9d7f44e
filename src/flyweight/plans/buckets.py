"""Buckets: the bytes of many blocks, packed to be moved as one.

This file counts bytes, not elements. A bucket is never larger than its limit; a larger block is cut
into boxes, so that a replica that wants another box of it can find its part in each piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flyweight.errors import SpecError
from flyweight.spec.box import Box, blocks

_PIECES = 8  # small enough that a bucket without space for the next piece is nearly full


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the items of block `index`, row-major at byte `at` of the bucket."""

    index: int
    box: Box
    at: int


def pack(
    shapes: Sequence[tuple[tuple[int, ...], int]], *, bucket_bytes: int, align_bytes: int = 64
) -> Iterator[list[Piece]]:
    """Yield buckets whose pieces, in order, are every item of every block exactly once.

    `shapes` has the shape of each block and the bytes of one item. Each piece starts at a multiple
    of `align_bytes`. A block without bytes is in no bucket.
    """
    widest = max((width for _, width in shapes), default=1)
    if align_bytes < 1 or bucket_bytes < max(align_bytes, widest):
        raise SpecError(
            f"buckets of {bucket_bytes} bytes cannot hold {align_bytes}-byte pieces of items of "
            f"{widest} bytes"
        )
    bucket: list[Piece] = []
    at = 0
    for index, (shape, width) in enumerate(shapes):
        for box in blocks(shape, max(bucket_bytes // _PIECES // width, 1)):
            nbytes = box.num_elements * width
            if bucket and at + nbytes > bucket_bytes:
                yield bucket
                bucket, at = [], 0
            bucket.append(Piece(index, box, at))
            at += -(-nbytes // align_bytes) * align_bytes
    if bucket:
        yield bucket
