"""Rows: where boxes of a trainer's tensors lie in live memory, box by box.

An engine that fuses, cuts or transposes what it loads has other tensors than the trainer. Its rows
say the same by boxes, so that its memory can be written in place, and compared where it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from flyweight.adapters.model import Model, tensor_of
from flyweight.adapters.model_block import ModelBlock
from flyweight.adapters.tensor import Tensor
from flyweight.errors import DTypeMismatch, PlanError, ShapeMismatch, SpecError
from flyweight.spec.box import Box
from flyweight.spec.manifest import TensorSpec


class Row(NamedTuple):
    """A box of a tensor of the trainer, and the memory that holds it."""

    name: str
    box: Box
    """In elements of the trainer's tensor."""
    tensor: object
    """A view of the box's shape: of a part of a parameter, or of one whose dims are permuted."""


class Rows:
    """All rows of an engine's memory."""

    def __init__(
        self, thing: object, find: Callable[[Mapping[str, TensorSpec]], Iterable[Row]]
    ) -> None:
        """Remember how rows are found.

        thing: the model that the memory is of; once its tensors are replaced, rows are found again.
        find: returns the rows for a trainer's tensors, by name.
        """
        self.thing, self._find = thing, find

    def model(self, tensors: Mapping[str, TensorSpec]) -> Model:
        """Return the memory as a model that holds boxes of a trainer's tensors.

        Raises PlanError, which names the tensor, for a row that does not fit.
        """
        memory: dict[str, Tensor] = {}
        held: dict[str, list[ModelBlock]] = {}
        for number, (name, box, leaf) in enumerate(self._find(tensors)):
            tensor, label = tensor_of(leaf), f"{name} (row {number})"
            if tensor is None:
                raise SpecError(f"row {number} of {name!r} is a {type(leaf).__name__}, no tensor")
            if name not in tensors:
                raise PlanError(f"row {number} is of {name!r}, which the trainer lacks")
            spec = TensorSpec(tensor.spec.dtype, tensors[name].shape)
            if min(spec.dtype.bits, tensors[name].dtype.bits) < 8:
                raise SpecError(f"row {number} of {name!r} is of packed {spec.dtype}")
            if len(box.shape) != len(spec.shape) or not Box.whole(spec.shape).contains(box):
                raise PlanError(
                    f"row {number} is {box.offset}..{box.end} of {name!r}, which is {spec.shape}"
                )
            if tensor.spec.shape != box.shape:
                raise ShapeMismatch(
                    f"row {number} of {name!r} is a box of {box.shape}, its memory is "
                    f"{tensor.spec.shape}; give a view of the box's shape"
                )
            blocks = held.setdefault(name, [])
            if blocks and blocks[0].spec.dtype != spec.dtype:
                raise DTypeMismatch(
                    f"rows of {name!r} are {blocks[0].spec.dtype} and {spec.dtype}; they must be "
                    f"of one dtype"
                )
            memory[label] = tensor
            blocks.append(ModelBlock(spec, box, tensor, Box.whole(box.shape)))
        return Model(memory, dict(held), {}, {}, self.thing, has_layout=True)
