"""A tensor of any framework, for moving its bytes. Boxes count items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flyweight.memory import Buffer, Bytes, Staging, block_of, items_of
from flyweight.spec.box import Box
from flyweight.spec.manifest import TensorSpec


class Device(Protocol):
    """Memory that the CPU cannot reach: how a framework moves bytes there and back."""

    @property
    def name(self) -> str:
        """As in "cuda:0"."""

    @property
    def staging(self) -> Staging | None:
        """Memory for bytes on their way; None if any memory will do."""

    def read(self, memory: Buffer, items: Box, into: Bytes, *, should_wait: bool) -> None:
        """Copy a box; unless it waits, the bytes are there only after `settle`."""

    def write(self, memory: Buffer, items: Box, data: Bytes) -> None: ...

    def settle(self) -> None:
        """Wait until everything that this thread wrote to the device has arrived."""


@dataclass(frozen=True)
class Tensor:
    """A tensor's spec, and where its elements lie."""

    spec: TensorSpec
    memory: Buffer
    """On any device: to compare addresses, not to read. Its owner is the framework's object."""
    device: Device | None = None
    """None if the CPU can reach the memory."""

    @property
    def host(self) -> Buffer | None:
        """Its memory if the CPU can reach it, else None."""
        return self.memory if self.device is None else None

    @property
    def buffer(self) -> Buffer | None:
        """Its memory, on the host or on a CUDA device; None on other devices."""
        is_known = self.device is None or self.device.name.startswith("cuda")
        return self.memory if is_known else None

    @property
    def memory_key(self) -> tuple[object, ...]:
        """Equal for two tensors that are the same elements of the same memory."""
        memory, place = self.memory, "" if self.device is None else self.device.name
        return (place, memory.address, memory.shape, memory.strides, self.spec.dtype.name)

    def read(self, items: Box, into: Bytes, *, should_wait: bool = True) -> None:
        if self.device is None:
            goal = items_of(into, self.spec.item_bytes, items.shape)
            np.copyto(goal, block_of(self.memory.items(), items))
        else:
            self.device.read(self.memory, items, into, should_wait=should_wait)

    def write(self, items: Box, data: Bytes) -> None:
        if self.device is None:
            block = items_of(data, self.spec.item_bytes, items.shape)
            np.copyto(block_of(self.memory.items(), items), block)
        else:
            self.device.write(self.memory, items, data)
