"""A tensor of any framework: where its elements lie, and how bytes get there and back."""

from __future__ import annotations

from typing import Protocol

import msgspec

from flyweight.memory import Buffer, Bytes, Staging
from flyweight.spec.manifest import TensorSpec


class Device(Protocol):
    """Memory that the CPU cannot reach, by the functions of a framework."""

    @property
    def name(self) -> str:
        """As in "cuda:0"."""

    @property
    def staging(self) -> Staging | None:
        """Memory for bytes on their way; None if any memory will do."""

    def read(self, block: Buffer, into: Bytes, *, should_wait: bool) -> None:
        """Copy a block's items; unless it waits, they are there only after `settle`."""

    def write(self, block: Buffer, data: Bytes) -> None: ...

    def settle(self) -> None:
        """Wait until everything that this thread wrote to the device has arrived."""


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor's spec, and where its elements lie."""

    spec: TensorSpec
    memory: Buffer
    """On any device. Its owner keeps it alive; for torch that is a tensor."""
    device: Device | None = None
    """None if the CPU can reach the memory."""

    @property
    def buffer(self) -> Buffer | None:
        """Its memory, on the host or on a CUDA device; None on other devices."""
        return self.memory if self.is_addressable else None

    @property
    def is_addressable(self) -> bool:
        """True if the host or a CUDA device can copy by the address."""
        return self.device is None or self.device.name.startswith("cuda")

    @property
    def memory_key(self) -> tuple[object, ...]:
        """Equal for two tensors that are the same elements of the same memory."""
        memory, place = self.memory, "" if self.device is None else self.device.name
        return (place, memory.address, memory.shape, memory.strides, self.spec.dtype.name)
