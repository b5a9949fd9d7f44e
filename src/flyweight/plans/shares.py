"""Shares: which rank writes what, when several ranks hold a model together.

A box that several ranks hold is written by one of them, and the bytes are spread evenly over the
ranks that hold them. Together the shares are every element exactly once; otherwise an error names
what is missing, there twice, or different between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter

from flyweight.errors import DTypeMismatch, PlanError, ShapeMismatch, listed
from flyweight.spec.box import Box, overlapping_pair
from flyweight.spec.manifest import Leaf, TensorBox, TensorSpec, is_same_leaf

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


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
    tied = agreed_ties(
        [_ties(each) for each in holdings], lambda n, name: _holds(holdings[n], name)
    )
    agreed = agreed_specs([each.tensors for each in holdings])
    tensors = {name: spec for name, spec in agreed.items() if name not in tied}
    holders: dict[str, dict[Box, list[int]]] = {name: {} for name in tensors}
    for rank, holding in enumerate(holdings):
        for name, boxes in holding.boxes.items():
            for box in boxes if name in tensors else ():
                if box.num_elements:
                    holders[name].setdefault(box, []).append(rank)
    for name, spec in tensors.items():
        check_whole(name, spec, holders[name])
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
    return Sharing(
        tensors, tied, agreed_values([each.values for each in holdings]), shares, replicas
    )


def _ties(holding: Holding) -> dict[str, str]:
    """Return the ties of a rank between names that have the same boxes there."""
    boxes = holding.boxes
    return {
        name: target
        for name, target in holding.tied.items()
        if set(boxes.get(name, ())) == set(boxes.get(target, ()))
    }


def _holds(holding: Holding, name: str) -> bool:
    return any(box.num_elements for box in holding.boxes.get(name, ()))


def agreed_specs(held: Sequence[Mapping[str, TensorSpec]]) -> dict[str, TensorSpec]:
    """Return the spec of every name; raise if two ranks do not hold the same tensor by it."""
    found: dict[str, TensorSpec] = {}
    known_columns = None
    for rank, specs in enumerate(held):
        columns = [*specs], [*map(_dtype, specs.values())], [*map(_shape, specs.values())]
        if columns == known_columns:  # most often ranks hold parts of the same tensors
            continue
        known_columns = columns
        for name, spec in specs.items():
            known = found.setdefault(name, spec)
            if known is spec or (known.dtype == spec.dtype and known.shape == spec.shape):
                continue
            other = next(n for n, each in enumerate(held) if name in each)
            if known.dtype != spec.dtype:
                raise DTypeMismatch(
                    f"{name!r} is {known.dtype} on rank {other} and {spec.dtype} on rank {rank}; "
                    f"cast it on one of them, or give the two tensors two names"
                )
            raise ShapeMismatch(
                f"{name!r} is {known.shape} as a whole on rank {other} and {spec.shape} on "
                f"rank {rank}; parts of one tensor are DTensors or fw.Sharded, two tensors "
                f"have two names"
            )
    return found


def agreed_ties(
    ties: Sequence[Mapping[str, str]], holds: Callable[[int, str], bool]
) -> dict[str, str]:
    """Return the ties that exist on every rank that holds elements of either tensor.

    holds: whether a rank holds elements by a name; it is asked only for names in `ties`.
    """
    ranks = range(len(ties))
    names = {name: None for tied in ties for pair in tied.items() for name in pair}
    holders = {name: [rank for rank in ranks if holds(rank, name)] for name in names}
    targets = {name: {ties[rank].get(name, name) for rank in holders[name]} for name in names}
    agreed = {}
    for name in names:
        target = next(iter(targets[name])) if len(targets[name]) == 1 else name
        is_own = target != name and targets[target] == {target}
        if is_own and holders[name] == holders[target]:
            agreed[name] = target
    return agreed


def agreed_values(held: Sequence[Mapping[str, Leaf]]) -> dict[str, Leaf]:
    """Return every value; raise PlanError if two ranks have different ones by the same name."""
    first: dict[str, tuple[int, Leaf]] = {}
    for rank, values in enumerate(held):
        for name, value in values.items():
            other, known = first.setdefault(name, (rank, value))
            if not is_same_leaf(known, value):
                raise PlanError(
                    f"{name!r} is {known!r} on rank {other} and {value!r} on rank {rank}; a value "
                    f"is the same on every rank, or has a name of its own there"
                )
    return {name: value for name, (_, value) in first.items()}


def check_whole(name: str, spec: TensorSpec, holders: Mapping[Box, Sequence[int]]) -> None:
    """Raise PlanError unless the boxes, with the ranks of each, are every element once."""
    if pair := overlapping_pair(list(holders)):
        one, other = pair
        raise PlanError(
            f"{name!r} has elements twice: in {one.offset}..{one.end} of rank {holders[one][0]} "
            f"and in {other.offset}..{other.end} of rank {holders[other][0]}; boxes "
            f"of two ranks are equal or apart"
        )
    held = sum(box.num_elements for box in holders)
    if held != prod(spec.shape):
        boxes = listed(
            [f"{box.offset}..{box.end} on rank {ranks[0]}" for box, ranks in holders.items()]
        )
        raise PlanError(
            f"the ranks hold {held} of the {prod(spec.shape)} elements of {name!r} "
            f"{spec.shape}: {boxes or 'none'}"
        )
