"""Layouts: how a tensor is cut over a mesh of ranks.

A mesh has named axes with sizes, and its ranks are counted row-major over them. A layout names, for
each dim of the tensor, the axes that cut it. An axis that cuts no dim replicates. A cut gives every
rank ceil(size / pieces) elements, so the last rank may have fewer and later ones none, as in torch
and Paddle. An axis written "tp/2" cuts into two pieces only, and neighbours on it hold the same
one, as ranks do that outnumber key and value heads. `model_layout.py` cuts a whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from flyweight.errors import SpecError
from flyweight.spec.box import Box


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a tensor and the rank that holds it."""

    rank: int
    box: Box


def coordinate(rank: int, sizes: Sequence[int]) -> list[int]:
    """Return the index of a rank on each axis of these sizes, counted row-major."""
    place = []
    for size in reversed(sizes):
        rank, index = divmod(rank, size)
        place.append(index)
    return place[::-1]


class Layout:
    """`axes`: name to size, in rank order. `cuts`: dim to its axes, outermost first."""

    def __init__(self, axes: Mapping[str, int], cuts: Mapping[int, Sequence[str]]) -> None:
        self._axes, self.num_ranks = axes, prod(axes.values())
        self._cuts = {dim: [_cut(text, axes) for text in texts] for dim, texts in cuts.items()}
        used = [axis for cut in self._cuts.values() for axis, _ in cut]
        unknown = [axis for axis in used if axis not in axes]
        if unknown:
            raise SpecError(f"axes {unknown} cut a dim, the mesh has {list(axes)}")
        if len(set(used)) != len(used):
            raise SpecError(f"axes {used} cut more than one dim; an axis cuts at most one")
        if min(axes.values(), default=1) < 1:
            raise SpecError(f"mesh axes {dict(axes)} need a size of at least 1 each")

    def num_pieces(self, dim: int) -> int:
        """Return into how many pieces `dim` is cut."""
        return prod(num_pieces for _, num_pieces in self._cuts.get(dim, ()))

    def box(self, rank: int, shape: Sequence[int]) -> Box:
        """Return the box of a tensor of `shape` that `rank` holds; it may be empty."""
        if any(not 0 <= dim < len(shape) for dim in self._cuts):
            raise SpecError(f"layout cuts dims {list(self._cuts)} of a tensor of {tuple(shape)}")
        if not 0 <= rank < self.num_ranks:
            raise SpecError(f"rank {rank} of a mesh of {self.num_ranks} ranks")
        sizes = list(self._axes.values())
        place = dict(zip(self._axes, coordinate(rank, sizes), strict=True))
        offset, lengths = [0] * len(shape), list(shape)
        for dim, cut in self._cuts.items():
            for axis, num_pieces in cut:
                piece = -(-lengths[dim] // num_pieces)
                start = min(piece * (place[axis] * num_pieces // self._axes[axis]), lengths[dim])
                lengths[dim] = min(piece, lengths[dim] - start)
                offset[dim] += start
        return Box(tuple(offset), tuple(lengths))


def _cut(text: str, axes: Mapping[str, int]) -> tuple[str, int]:
    """Return a cut's axis and its number of pieces: that of ranks for "tp", two for "tp/2"."""
    axis, slash, pieces = text.partition("/")
    size = axes.get(axis, 1)
    if not slash:
        return axis, size
    if not pieces.isdecimal() or not 0 < int(pieces) <= size or size % int(pieces):
        raise SpecError(f"cut {text!r}: {axis!r} has {size} ranks, the pieces must divide them")
    return axis, int(pieces)
