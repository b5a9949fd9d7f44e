"""Merged source: what several ranks hold together, as one table of source boxes.

Every rank has its own tensors, ties, values and boxes. Together they must be whole tensors: an
error names the ranks and what is missing, there twice, or different between them. Equal boxes on
several ranks are replicas. Tensors that are cut alike are checked once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from flyweight.errors import PlanError
from flyweight.plans.copy_table import BoxTable, Integers, groups_cut_alike
from flyweight.plans.shares import agreed_specs, agreed_ties, agreed_values, check_whole
from flyweight.spec.box import Box
from flyweight.spec.manifest import Leaf, TensorSpec


@dataclass(frozen=True, eq=False)
class HeldTable:
    """What one rank holds."""

    tensors: Mapping[str, TensorSpec]
    """Of the whole tensors."""
    tied: Mapping[str, str]
    """Maps names that share another tensor's memory on this rank to that tensor's name."""
    values: Mapping[str, Leaf]
    boxes: BoxTable
    """In items; a tensor's number is its position in `tensors`."""

    def __post_init__(self) -> None:
        tensor = self.boxes.tensor
        if len(tensor) and not 0 <= tensor.min() <= tensor.max() < len(self.tensors):
            raise PlanError(
                f"boxes are of tensors {tensor.min()} to {tensor.max()}, and there are "
                f"{len(self.tensors)}"
            )
        if self.boxes.offset.min(initial=0) < 0 or self.boxes.shape.min(initial=0) < 0:
            raise PlanError("a box has a negative offset or shape")
        for name, target in self.tied.items():
            if name in self.tensors or target not in self.tensors:
                raise PlanError(
                    f"{name!r} is tied to {target!r}; a tie is a second name of a tensor, and no "
                    f"tensor itself"
                )

    @cached_property
    def number(self) -> Mapping[str, int]:
        """The number of each name, also of names that are tied."""
        own = {name: n for n, name in enumerate(self.tensors)}
        return own | {name: own[target] for name, target in self.tied.items()}

    @cached_property
    def has_items(self) -> NDArray[np.bool_]:
        """Whether this rank holds some items of each of its tensors."""
        held = np.bincount(self.boxes.tensor, self.boxes.num_items > 0, len(self.tensors))
        return held.astype(np.bool_)

    def specs(self) -> Mapping[str, TensorSpec]:
        """Return the spec of each name, also of names that are tied."""
        tied = {name: self.tensors[target] for name, target in self.tied.items()}
        return {**self.tensors, **tied} if tied else self.tensors

    def holds(self, name: str) -> bool:
        """True if some elements of a tensor are here."""
        return name in self.number and bool(self.has_items[self.number[name]])


@dataclass(frozen=True, eq=False)
class MergedSource:
    """What all ranks hold: the rows of rank 0, then those of rank 1 and so on."""

    tensors: Mapping[str, TensorSpec]
    tied: Mapping[str, str]
    values: Mapping[str, Leaf]
    boxes: BoxTable
    """In items; a tensor's number is its position in `tensors`."""
    rank: Integers
    """The rank that holds each box."""
    block: Integers
    """The row of each box in the table of its rank.

    A row may occur twice: once for its tensor, and once for a name that is tied to it on its rank
    and is a tensor of its own on another rank.
    """


def merge_held(held: Sequence[HeldTable]) -> MergedSource:
    """Return what the ranks hold together; raise PlanError unless that is whole tensors."""
    specs = agreed_specs([each.specs() for each in held])
    tied = agreed_ties([each.tied for each in held], lambda rank, name: held[rank].holds(name))
    tensors = {name: spec for name, spec in specs.items() if name not in tied}
    number = {name: n for n, name in enumerate(tensors)}
    num_dims = max((each.boxes.num_dims for each in held), default=1)
    rows = [_rows(each, number) for each in held]
    tables = [each.boxes.widened(num_dims) for each in held]
    boxes = BoxTable(
        _joined([tensor for tensor, _ in rows]),
        _joined(
            [each.offset[block] for each, (_, block) in zip(tables, rows, strict=True)], num_dims
        ),
        _joined(
            [each.shape[block] for each, (_, block) in zip(tables, rows, strict=True)], num_dims
        ),
    )
    rank = np.repeat(np.arange(len(held)), [len(block) for _, block in rows])
    _check_covered(tensors, boxes, rank)
    values = agreed_values([each.values for each in held])
    return MergedSource(tensors, tied, values, boxes, rank, _joined([block for _, block in rows]))


def _rows(held: HeldTable, number: Mapping[str, int]) -> tuple[Integers, Integers]:
    """Return the merged number of the tensor of each row of a rank, and its row on that rank.

    Rows without elements of names that are tied on all other ranks are left out.
    """
    numbers = np.fromiter(map(number.get, held.tensors, repeat(-1)), np.int64, len(held.tensors))
    tensor = numbers[held.boxes.tensor]
    block = np.flatnonzero(tensor >= 0)
    alone = [(number[name], held.number[name]) for name in held.tied if name in number]
    if not alone:
        return tensor[block], block
    order, first, counts = held.boxes.rows_of(len(held.tensors))
    also = [order[first[own] : first[own] + counts[own]] for _, own in alone]
    merged = np.repeat([each for each, _ in alone], [len(each) for each in also])
    return np.concatenate([tensor[block], merged]), np.concatenate([block, *also])


def _joined(parts: Sequence[Integers], num_dims: int | None = None) -> Integers:
    none: Integers = np.empty(0 if num_dims is None else (0, num_dims), np.int64)
    return np.concatenate([none, *parts])


def _check_covered(tensors: Mapping[str, TensorSpec], boxes: BoxTable, rank: Integers) -> None:
    """Raise PlanError unless the boxes of every tensor are each of its elements."""
    specs, names = list(tensors.values()), list(tensors)
    wholes = BoxTable.whole(specs)
    num_dims = max(boxes.num_dims, wholes.num_dims)
    boxes, wholes = boxes.widened(num_dims), wholes.widened(num_dims)

    def box_of(row: int) -> Box:
        found, extra = boxes.box(row), num_dims - len(specs[int(boxes.tensor[row])].shape)
        return specs[int(boxes.tensor[row])].elements(
            Box(found.offset[extra:], found.shape[extra:])
        )

    is_outside = (np.minimum(boxes.offset, boxes.shape) < 0) | (
        boxes.offset + boxes.shape > wholes.shape[boxes.tensor]
    )
    for row in np.flatnonzero(is_outside.any(axis=1)).tolist()[:1]:
        name, box = names[int(boxes.tensor[row])], box_of(row)
        raise PlanError(
            f"rank {rank[row]} holds {box.offset}..{box.end} of {name!r}, which is "
            f"{tensors[name].shape} as a whole"
        )
    for group, rows, _ in groups_cut_alike(boxes, wholes, len(names)):
        holders: dict[Box, list[int]] = {}
        for row in rows[0].tolist():
            if boxes.num_items[row]:
                holders.setdefault(box_of(row), []).append(int(rank[row]))
        check_whole(names[int(group[0])], specs[int(group[0])], holders)
