"""ModelBlock: a box of a whole tensor that is in one of a model's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from msgspec.structs import replace

from flyweight.adapters.tensor import Tensor
from flyweight.memory import Buffer, Bytes, Items, bytes_for, items_of
from flyweight.spec.box import Box
from flyweight.spec.manifest import TensorSpec


@dataclass(frozen=True)
class ModelBlock:
    """A box of a whole tensor, and the place of that box in one of the model's tensors."""

    spec: TensorSpec
    """Of the whole tensor."""
    box: Box
    """In elements of the whole tensor."""
    tensor: Tensor
    place: Box
    """In elements of `tensor`."""

    @cached_property
    def memory(self) -> Buffer:
        """The box's items where they lie, on any device."""
        memory, shape = self.tensor.memory, self.spec.stored(self.box).shape
        if memory.shape == shape:  # most blocks are whole tensors
            return memory
        block = memory.block(self.tensor.spec.stored(self.place))
        extra = len(block.shape) - len(shape)
        strides = block.strides[extra:] if extra >= 0 else (0,) * -extra + block.strides
        return replace(block, shape=shape, strides=strides)

    def items(self) -> Items | None:
        """View the box's items where they lie, or None if the CPU cannot reach them."""
        return self.memory.items() if self.tensor.device is None else None

    def read(self, items: Box, into: Bytes | None, *, should_wait: bool = True) -> Bytes:
        """Return the bytes of items counted from this block's corner; see `Model.read`."""
        block, device = self.memory.block(items), self.tensor.device
        if device is None and (flat := block.flat()) is not None:
            return flat
        data = bytes_for(block.nbytes, into)
        if device is not None and len(data):
            device.read(block, data, should_wait=should_wait)
        elif len(data):
            np.copyto(items_of(data, block.item_bytes, block.shape), block.items())
        return data

    def write(self, items: Box, data: Bytes) -> None:
        block, device = self.memory.block(items), self.tensor.device
        if device is not None and len(data):
            device.write(block, data)
        elif len(data):
            np.copyto(block.items(), items_of(data, block.item_bytes, block.shape))
