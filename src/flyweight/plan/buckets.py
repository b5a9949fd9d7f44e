"""Buckets: many tensors' bytes packed to be moved as one.

Here bytes are counted, not elements. Order is kept, a bucket is never larger than
it may be, and what is larger than a bucket is split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flyweight.errors import SpecError


@dataclass(frozen=True, slots=True)
class Piece:
    """`nbytes` of item `index` from its byte `start`, at byte `at` of the bucket."""

    index: int
    start: int
    nbytes: int
    at: int


def pack(
    sizes_bytes: Iterable[int], *, bucket_bytes: int, align_bytes: int = 64
) -> Iterator[list[Piece]]:
    """Yield buckets whose pieces, in order, are every byte of every item exactly once.

    Each piece starts on `align_bytes`. An item of no bytes is in no bucket.
    """
    if align_bytes < 1 or bucket_bytes < align_bytes:
        raise SpecError(f"buckets of {bucket_bytes} bytes cannot hold {align_bytes}-byte pieces")
    bucket: list[Piece] = []
    at = 0
    for index, nbytes in enumerate(sizes_bytes):
        start = 0
        while start < nbytes:
            if bucket and (
                at >= bucket_bytes or at + min(nbytes - start, align_bytes) > bucket_bytes
            ):
                yield bucket
                bucket, at = [], 0
            taken = min(nbytes - start, bucket_bytes - at)
            bucket.append(Piece(index, start, taken, at))
            start += taken
            at += -(-taken // align_bytes) * align_bytes
    if bucket:
        yield bucket
