"""Device memory as a torch tensor, by its address: what Triton kernels and strided copies need."""

from __future__ import annotations

import importlib
from typing import Any

from flyweight.errors import MissingDependency
from flyweight.memory import Buffer


class _Shown:
    """What torch needs to see memory as a tensor, without owning it."""

    def __init__(self, interface: dict[str, object]) -> None:
        self.__cuda_array_interface__ = interface


def tensor_at(buffer: Buffer) -> Any:
    """Return a device's memory as a tensor of integers; what matters is only how wide they are."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as cause:
        raise MissingDependency(
            "strided copies inside a GPU need torch; pip install torch"
        ) from cause
    numbers = (buffer.address, buffer.item_bytes, *buffer.strides)
    width = next(width for width in (8, 4, 2, 1) if all(n % width == 0 for n in numbers))
    shape, strides = buffer.shape, buffer.strides
    if width != buffer.item_bytes:
        shape, strides = (*shape, buffer.item_bytes // width), (*strides, width)
    interface = {
        "shape": shape,
        "strides": strides,
        "typestr": "|u1" if width == 1 else f"<i{width}",
        "data": (buffer.address, False),
        "version": 2,
    }
    return torch.as_tensor(_Shown(interface), device=f"cuda:{buffer.device}")


def copy_strided(sink: Buffer, source: Buffer) -> None:
    """Queue a copy item by item, for strides of which the driver can do only little at a time."""
    tensor_at(sink).copy_(tensor_at(source))
