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


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of a tensor, and where it lies in the tensor that a rank has."""

    name: str
    """Of the tensor that the box is cut from; the same on every rank."""
    box: Box
    """In that tensor."""
    place: Box
    """In the rank's own: the same shape, but for leading dims of 1 that one of them lacks."""


def coordinate(rank: int, sizes: Sequence[int]) -> list[int]:
    """Return the index of a rank on each axis of these sizes, counted row-major."""
    place = []
    for size in reversed(sizes):
        rank, index = divmod(rank, size)
        place.append(index)
    return place[::-1]


@dataclass(frozen=True)
class Layout:
    """`axes`: name to size, in rank order. `cuts`: dim to its axes, outermost first."""

    axes: Mapping[str, int]
    cuts: Mapping[int, Sequence[str]]

    def __post_init__(self) -> None:
        used = [self._cut(text)[0] for names in self.cuts.values() for text in names]
        unknown = [axis for axis in used if axis not in self.axes]
        if unknown:
            raise SpecError(f"axes {unknown} cut a dim, the mesh has {list(self.axes)}")
        if len(set(used)) != len(used):
            raise SpecError(f"axes {used} cut more than one dim; an axis cuts at most one")
        if min(self.axes.values(), default=1) < 1:
            raise SpecError(f"mesh axes {dict(self.axes)} need a size of at least 1 each")

    def _cut(self, text: str) -> tuple[str, int]:
        """Return a cut's axis and its number of pieces: that of ranks for "tp", two for "tp/2"."""
        axis, slash, pieces = text.partition("/")
        size = self.axes.get(axis, 1)
        if not slash:
            return axis, size
        if not pieces.isdecimal() or not 0 < int(pieces) <= size or size % int(pieces):
            raise SpecError(f"cut {text!r}: {axis!r} has {size} ranks, the pieces must divide them")
        return axis, int(pieces)

    def num_pieces(self, dim: int) -> int:
        """Return into how many pieces `dim` is cut."""
        return prod(self._cut(text)[1] for text in self.cuts.get(dim, ()))

    @property
    def num_ranks(self) -> int:
        return prod(self.axes.values())

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of `rank` on each axis."""
        if not 0 <= rank < self.num_ranks:
            raise SpecError(f"rank {rank} of a mesh of {self.num_ranks} ranks")
        return dict(zip(self.axes, coordinate(rank, list(self.axes.values())), strict=True))

    def box(self, rank: int, shape: Sequence[int]) -> Box:
        """Return the box of a tensor of `shape` that `rank` holds; it may be empty."""
        if any(not 0 <= dim < len(shape) for dim in self.cuts):
            raise SpecError(f"layout cuts dims {list(self.cuts)} of a tensor of {tuple(shape)}")
        place = self.coordinate(rank)
        offset, sizes = [0] * len(shape), list(shape)
        for dim, axes in self.cuts.items():
            for text in axes:
                axis, num_pieces = self._cut(text)
                piece = -(-sizes[dim] // num_pieces)
                start = min(piece * (place[axis] * num_pieces // self.axes[axis]), sizes[dim])
                sizes[dim] = min(piece, sizes[dim] - start)
                offset[dim] += start
        return Box(tuple(offset), tuple(sizes))

    def boxes(self, shape: Sequence[int]) -> list[Box]:
        """Return one box per rank."""
        return [self.box(rank, shape) for rank in range(self.num_ranks)]
