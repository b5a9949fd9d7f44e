"""Layouts: how a tensor is cut over a mesh of ranks.

A mesh is named axes with their sizes, ranks counted row-major over them; a
layout says for each dim of the tensor which axes cut it. An axis that cuts no
dim replicates. A cut gives every rank ceil(size / pieces) elements, so the last
rank may be short and later ones empty, as torch and Paddle do it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from flyweight.errors import SpecError
from flyweight.spec.box import Box


@dataclass(frozen=True)
class Layout:
    """`axes`: name to size, in rank order. `cuts`: dim to the axes that cut it, outermost first."""

    axes: Mapping[str, int]
    cuts: Mapping[int, Sequence[str]]

    def __post_init__(self) -> None:
        used = [axis for names in self.cuts.values() for axis in names]
        unknown = [axis for axis in used if axis not in self.axes]
        if unknown:
            raise SpecError(f"axes {unknown} cut a dim, the mesh has {list(self.axes)}")
        if len(set(used)) != len(used):
            raise SpecError(f"axes {used} cut more than one dim; an axis cuts at most one")
        if min(self.axes.values(), default=1) < 1:
            raise SpecError(f"mesh axes {dict(self.axes)} need a size of at least 1 each")

    @property
    def num_ranks(self) -> int:
        return prod(self.axes.values())

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return where on each axis `rank` sits."""
        if not 0 <= rank < self.num_ranks:
            raise SpecError(f"rank {rank} of a mesh of {self.num_ranks} ranks")
        place = {}
        for axis in reversed(list(self.axes)):
            rank, place[axis] = divmod(rank, self.axes[axis])
        return place

    def box(self, rank: int, shape: Sequence[int]) -> Box:
        """Return the box of a tensor of `shape` that `rank` holds; it may be empty."""
        if any(not 0 <= dim < len(shape) for dim in self.cuts):
            raise SpecError(f"layout cuts dims {list(self.cuts)} of a tensor of {tuple(shape)}")
        place = self.coordinate(rank)
        offset, sizes = [0] * len(shape), list(shape)
        for dim, axes in self.cuts.items():
            for axis in axes:
                piece = -(-sizes[dim] // self.axes[axis])
                start = min(piece * place[axis], sizes[dim])
                sizes[dim] = min(piece, sizes[dim] - start)
                offset[dim] += start
        return Box(tuple(offset), tuple(sizes))

    def boxes(self, shape: Sequence[int]) -> list[Box]:
        """Return one box per rank."""
        return [self.box(rank, shape) for rank in range(self.num_ranks)]
