"""Which tensors of a model are only in part on this rank, so that other ranks publish with it."""

from __future__ import annotations

from math import prod

from flyweight.adapters.model import Model
from flyweight.adapters.tree import walk


def partial_names(model: Model) -> list[str]:
    """Return the names of tensors of which this rank holds a part, or nothing."""
    found = [
        name
        for name, spec in model.manifest.tensors.items()
        if not model.is_whole(name)
        and sum(block.box.num_elements for block in model.blocks(name)) < prod(spec.shape)
    ]
    return [*found, *model.absent]


def undeclared_shards(thing: object) -> list[str]:
    """Return the names of tensors that are marked as one rank's part, and do not say which part.

    Tensor parallel layers of Paddle's fleet and of Megatron mark their plain tensors so. Of
    several ranks that hold such a tensor, each seems to hold a replica of it.
    """
    return [
        name
        for name, leaf, _ in walk(thing)
        # torch has a function of this name
        if getattr(leaf, "is_distributed", False) is True
        or getattr(leaf, "tensor_model_parallel", False) is True
    ]


def emptied_names(model: Model, thing: object) -> list[str]:
    """Return the names of parameters whose elements DeepSpeed's ZeRO-3 keeps elsewhere."""
    if not any(0 in spec.shape for spec in model.manifest.tensors.values()):
        return []
    return [
        name
        for name, leaf, _ in walk(thing)
        if tuple(getattr(leaf, "ds_shape", ())) not in ((), tuple(getattr(leaf, "shape", ())))
    ]
