"""Tensors that are a box of a larger tensor, and how cuts over several ranks make such boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from operator import index
from typing import Any

from flyweight.errors import SpecError
from flyweight.spec.box import Box


@dataclass(frozen=True)
class Sharded:
    """A rank's own tensor, and its place in the whole tensor.

    For trainers whose tensors do not carry their layout: put it into the model in place of the
    tensor.

    Args:
        tensor: this rank's tensor, of torch, Paddle or numpy.
        shape: the shape of the whole tensor.
        offset: the corner of this rank's tensor in the whole one, in elements of each dim.
    """

    tensor: object
    shape: Sequence[int]
    offset: Sequence[int]


@dataclass(frozen=True)
class Cut:
    """The blocks of a whole tensor that a local one holds: (box of the whole, place in the local).

    Without blocks, nothing of the tensor is on this rank.
    """

    local: object
    shape: tuple[int, ...]
    blocks: tuple[tuple[Box, Box], ...]


Range = tuple[int, int]


def cut_blocks(
    shape: tuple[int, ...], cuts: Sequence[tuple[int, int, int, int]]
) -> tuple[tuple[Box, Box], ...]:
    """Return the blocks of a rank after cuts of (dim, pieces, its piece, turns), one by one.

    A cut in turns first divides what is there into `turns` parts and takes its piece of each, so
    a cut that is made first has the effect of one that is made last.
    """
    ranges: list[list[Range]] = [[(0, size)] for size in shape]
    for dim, pieces, piece, turns in cuts:
        held = ranges[dim]
        ranges[dim] = [
            taken
            for turn in range(turns)
            for taken in _piece(_piece(held, turns, turn), pieces, piece)
        ]
    blocks = []
    for spots in product(*map(_spots, ranges)):
        shape = tuple(length for _, length, _ in spots)
        start, at = tuple(spot[0] for spot in spots), tuple(spot[2] for spot in spots)
        blocks.append((Box(start, shape), Box(at, shape)))
    return tuple(blocks)


def _piece(held: Sequence[Range], pieces: int, piece: int) -> list[Range]:
    """Return one of `pieces` equal pieces of some ranges; the last pieces may be short."""
    total = sum(length for _, length in held)
    size = -(-total // pieces)
    low, high, at = size * piece, min(size * (piece + 1), total), 0
    found = []
    for start, length in held:
        first, last = max(low, at), min(high, at + length)
        if first < last:
            found.append((start + first - at, last - first))
        at += length
    return found


def _spots(held: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Return (start in the whole, length, start in the local tensor), adjacent ranges joined."""
    spots: list[tuple[int, int, int]] = []
    at = 0
    for start, length in held:
        if spots and spots[-1][0] + spots[-1][1] == start:
            spots[-1] = spots[-1][0], spots[-1][1] + length, spots[-1][2]
        else:
            spots.append((start, length, at))
        at += length
    return spots or [(0, 0, 0)]


def local_of(leaf: Any) -> Any:
    """Return the part of a sharded tensor that is on this rank; any other leaf as it is."""
    if isinstance(leaf, Sharded):
        return leaf.tensor
    if hasattr(leaf, "to_local"):  # torch's DTensor
        return leaf._local_tensor
    return leaf._local_value() if hasattr(leaf, "is_dist") and leaf.is_dist() else leaf


def cut_of(leaf: object) -> Cut | None:
    if not isinstance(leaf, Sharded):
        return None
    local = tuple(getattr(leaf.tensor, "shape", ()))
    try:
        shape, offset = tuple(map(index, leaf.shape)), tuple(map(index, leaf.offset))
    except TypeError as cause:
        raise SpecError(
            f"shape {leaf.shape} and offset {leaf.offset} are no whole numbers"
        ) from cause
    box = Box(offset, local)
    if len(shape) != len(local) or not Box.whole(shape).contains(box):
        raise SpecError(
            f"a shard of {local} at {tuple(leaf.offset)} does not lie in a tensor of {shape}"
        )
    return Cut(leaf.tensor, shape, ((box, Box.whole(local)),))
