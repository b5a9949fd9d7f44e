"""Numpy arrays, also of the dtypes that ml_dtypes adds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from flyweight.errors import SpecError, listed
from flyweight.memory import Buffer, Bytes, Staging, block_of, items_of
from flyweight.spec.box import Box
from flyweight.spec.dtype import BY_NUMPY
from flyweight.spec.manifest import TensorSpec


@dataclass(frozen=True)
class HostTensor:
    """A tensor in memory that the CPU can reach, of any framework."""

    spec: TensorSpec
    host: Buffer
    staging: Staging | None = None

    @property
    def buffer(self) -> Buffer:
        return self.host

    @property
    def memory(self) -> Buffer:
        return self.host

    @property
    def memory_key(self) -> tuple[object, ...]:
        return (self.host.address, self.host.shape, self.host.strides, self.spec.dtype.name)

    def read(self, items: Box, into: Bytes, *, should_wait: bool = True) -> None:
        goal = items_of(into, self.spec.item_bytes, items.shape)
        np.copyto(goal, block_of(self.host.items(), items))

    def write(self, items: Box, data: Bytes) -> None:
        block = items_of(data, self.spec.item_bytes, items.shape)
        np.copyto(block_of(self.host.items(), items), block)

    def settle(self) -> None:
        """Nothing to wait for: a write has arrived when it returns."""

    @property
    def versioned(self) -> object:
        return None


def check_live(state: Mapping[str, object], live: Collection[int]) -> None:
    """Raise SpecError if a module's state has copies, which hooks make: filling them is useless."""
    copies = [name for name, tensor in state.items() if id(tensor) not in live]
    if copies:
        raise SpecError(
            f"{len(copies)} entries of the module's state are not its own tensors but a hook's "
            f"copies: {listed(copies)}; pass a dict of the tensors themselves"
        )


def tensor_of(leaf: object) -> HostTensor | None:
    if not isinstance(leaf, np.ndarray):
        return None
    if isinstance(leaf, np.ma.MaskedArray):
        raise SpecError(
            "a masked array, whose mask has no place beside its values; pass .filled(value), or "
            ".data and np.ma.getmaskarray() as two tensors"
        )
    dtype = BY_NUMPY.get(leaf.dtype.name)
    if dtype is None or leaf.dtype.byteorder == ">":
        raise SpecError(f"numpy dtype {leaf.dtype!r} has no place in a snapshot")
    buffer = Buffer(
        leaf.__array_interface__["data"][0],
        leaf.shape,
        leaf.strides,
        leaf.dtype.itemsize,
        leaf,
        bool(leaf.flags.writeable),
    )
    return HostTensor(TensorSpec(dtype, leaf.shape), buffer)
