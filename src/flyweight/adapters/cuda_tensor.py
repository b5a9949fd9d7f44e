"""A tensor in the memory of a CUDA device, by its address, whatever framework it is of.

The driver copies, and waits for the whole device where a framework's streams are not known.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache

from flyweight.cuda import driver
from flyweight.cuda.copies import Copier
from flyweight.memory import Buffer, Bytes, Staging
from flyweight.spec.box import Box, strides_of
from flyweight.spec.manifest import TensorSpec

_SECONDS = 60.0


@dataclass(frozen=True)
class CudaTensor:
    """A tensor of which only the address and the strides are known. Copies are made at once."""

    spec: TensorSpec
    buffer: Buffer

    @property
    def memory(self) -> Buffer:
        return self.buffer

    @property
    def host(self) -> Buffer | None:
        return None

    @property
    def staging(self) -> Staging | None:
        return None

    @property
    def memory_key(self) -> tuple[object, ...]:
        buffer = self.buffer
        place = f"cuda:{buffer.device}", buffer.address
        return (*place, buffer.shape, buffer.strides, self.spec.dtype.name)

    def read(self, items: Box, into: Bytes, *, should_wait: bool = True) -> None:
        self.settle()
        self._copy(_host(into, items.shape, self.spec.item_bytes), self.buffer.block(items))

    def write(self, items: Box, data: Bytes) -> None:
        self._copy(self.buffer.block(items), _host(data, items.shape, self.spec.item_bytes))

    def settle(self) -> None:
        assert self.buffer.device is not None
        driver.synchronize(self.buffer.device, _SECONDS)

    @property
    def versioned(self) -> object:
        return None

    def _copy(self, sink: Buffer, source: Buffer) -> None:
        assert self.buffer.device is not None
        copier, lock = _copier(self.buffer.device)
        with lock:
            copier.copy(sink, source)
            copier.wait(_SECONDS)


@cache
def _copier(device: int) -> tuple[Copier, threading.Lock]:
    return Copier(device), threading.Lock()


def _host(data: Bytes, shape: tuple[int, ...], width: int) -> Buffer:
    strides = tuple(width * stride for stride in strides_of(shape))
    return Buffer(data.ctypes.data, shape, strides, width, data)
