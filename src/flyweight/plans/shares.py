"""Shares: which rank writes what, when several ranks hold a model together.

A box that several ranks hold is written by one of them, and the bytes are spread evenly over the
ranks that hold them. Together the shares are every element exactly once; otherwise an error names
what is missing, there twice, or different between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from flyweight.errors import DTypeMismatch, PlanError, ShapeMismatch, listed
from flyweight.spec.box import Box, overlapping_pair
from flyweight.spec.manifest import Leaf, TensorBox, TensorSpec, is_same_leaf


@dataclass(frozen=True)
class Holding:
    """What one rank holds: for each tensor its whole spec, and the boxes on this rank."""

    tensors: Mapping[str, TensorSpec]
    boxes: Mapping[str, Sequence[Box]]
    tied: Mapping[str, str]
    """Maps names that share another's memory on this rank to that name. They have boxes too."""
    values: Mapping[str, Leaf]


@dataclass(frozen=True)
class Sharing:
    """All tensors of a group of ranks, and the boxes that each rank writes."""

    tensors: Mapping[str, TensorSpec]
    tied: Mapping[str, str]
    values: Mapping[str, Leaf]
    shares: Sequence[Sequence[TensorBox]]
    replicas: Sequence[Sequence[TensorBox]]
    """The boxes of each rank that other ranks hold too."""


def share_out(holdings: Sequence[Holding]) -> Sharing:
    """Return which rank writes what; raise PlanError if the ranks do not have whole tensors."""
    tied = _agreed_ties(holdings)
    agreed = _agreed_tensors(holdings)
    tensors = {name: spec for name, spec in agreed.items() if name not in tied}
    holders: dict[str, dict[Box, list[int]]] = {name: {} for name in tensors}
    for rank, holding in enumerate(holdings):
        for name, boxes in holding.boxes.items():
            for box in boxes if name in tensors else ():
                if box.num_elements:
                    holders[name].setdefault(box, []).append(rank)
    for name, spec in tensors.items():
        _check_whole(name, spec, holders[name])
    tensor_boxes = [
        (TensorBox(name, spec, box), ranks)
        for name, spec in tensors.items()
        for box, ranks in holders[name].items()
    ]
    load_bytes = [0] * len(holdings)
    writers = [0] * len(tensor_boxes)
    # Boxes of one rank first, then the largest, each to the rank with the fewest bytes so far.
    order = sorted(
        range(len(tensor_boxes)),
        key=lambda n: (len(tensor_boxes[n][1]) > 1, -tensor_boxes[n][0].nbytes),
    )
    for number in order:
        tensor_box, ranks = tensor_boxes[number]
        writers[number] = min(ranks, key=lambda rank: (load_bytes[rank], rank))
        load_bytes[writers[number]] += tensor_box.nbytes
    shares: list[list[TensorBox]] = [[] for _ in holdings]
    replicas: list[list[TensorBox]] = [[] for _ in holdings]
    for (tensor_box, ranks), writer in zip(tensor_boxes, writers, strict=True):
        shares[writer].append(tensor_box)
        for rank in ranks if len(ranks) > 1 else ():
            replicas[rank].append(tensor_box)
    return Sharing(tensors, tied, _agreed_values(holdings), shares, replicas)


def _agreed_tensors(holdings: Sequence[Holding]) -> dict[str, TensorSpec]:
    first: dict[str, tuple[int, TensorSpec]] = {}
    for rank, holding in enumerate(holdings):
        for name, spec in holding.tensors.items():
            other, known = first.setdefault(name, (rank, spec))
            if known.dtype != spec.dtype:
                raise DTypeMismatch(
                    f"{name!r} is {known.dtype} on rank {other} and {spec.dtype} on rank {rank}"
                )
            if known.shape != spec.shape:
                raise ShapeMismatch(
                    f"{name!r} is {known.shape} as a whole on rank {other} and {spec.shape} on "
                    f"rank {rank}"
                )
    return {name: spec for name, (_, spec) in first.items()}


def _agreed_ties(holdings: Sequence[Holding]) -> dict[str, str]:
    """Return the ties that exist on every rank that holds a box of either tensor."""
    targets: dict[str, set[str]] = {}
    held: dict[str, set[tuple[int, Box]]] = {}
    for rank, holding in enumerate(holdings):
        for name, boxes in holding.boxes.items():
            for box in boxes:
                if box.num_elements:
                    targets.setdefault(name, set()).add(holding.tied.get(name, name))
                    held.setdefault(name, set()).add((rank, box))
    tied = {name: next(iter(found)) for name, found in targets.items() if len(found) == 1}
    return {
        name: target
        for name, target in tied.items()
        if target != name and tied.get(target) == target and held[name] == held[target]
    }


def _agreed_values(holdings: Sequence[Holding]) -> dict[str, Leaf]:
    first: dict[str, tuple[int, Leaf]] = {}
    for rank, holding in enumerate(holdings):
        for name, value in holding.values.items():
            other, known = first.setdefault(name, (rank, value))
            if not is_same_leaf(known, value):
                raise PlanError(
                    f"{name!r} is {known!r} on rank {other} and {value!r} on rank {rank}; a value "
                    f"is the same on every rank, or has a name of its own there"
                )
    return {name: value for name, (_, value) in first.items()}


def _check_whole(name: str, spec: TensorSpec, holders: Mapping[Box, Sequence[int]]) -> None:
    if pair := overlapping_pair(list(holders)):
        one, other = pair
        raise PlanError(
            f"{name!r} has elements twice: in {one.offset}..{one.end} of rank {holders[one][0]} "
            f"and in {other.offset}..{other.end} of rank {holders[other][0]}"
        )
    held = sum(box.num_elements for box in holders)
    if held != prod(spec.shape):
        boxes = listed([f"{box.offset}..{box.end}" for box in holders])
        raise PlanError(
            f"the ranks hold {held} of the {prod(spec.shape)} elements of {name!r} "
            f"{spec.shape}: {boxes or 'none'}"
        )
