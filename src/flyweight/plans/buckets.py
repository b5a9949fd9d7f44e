"""Buckets: many blocks' bytes packed to be moved as one.

Here bytes are counted, not elements. Order is kept, a bucket is never larger than it
may be, and what is larger is cut into boxes that are contiguous in their block, so
that whoever wants another box of it can tell what of a piece is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flyweight.errors import SpecError
from flyweight.spec.box import Box, blocks

_PIECES = 8  # so a bucket that the next piece does not fit into is nearly full


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of items of block `index`, row-major at byte `at` of the bucket."""

    index: int
    box: Box
    at: int


def pack(
    shapes: Sequence[tuple[tuple[int, ...], int]], *, bucket_bytes: int, align_bytes: int = 64
) -> Iterator[list[Piece]]:
    """Yield buckets whose pieces, in order, are every item of every block exactly once.

    Blocks are told by shape and bytes of an item. Each piece starts on `align_bytes`. A block of
    no bytes is in no bucket.
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
