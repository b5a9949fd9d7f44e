"""Paddle layers and tensors, in host memory or on a GPU, by address.

This does not import paddle to move tensors: a caller that has one has imported it.
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, TypeGuard

from flyweight.adapters.sharded import Cut, cut_blocks
from flyweight.adapters.tensor import Tensor
from flyweight.cuda import driver
from flyweight.cuda.copies import Copier
from flyweight.errors import SpecError
from flyweight.memory import Buffer, Bytes, Staging
from flyweight.spec.box import strides_of
from flyweight.spec.dtype import BY_PADDLE
from flyweight.spec.layout import coordinate
from flyweight.spec.manifest import TensorSpec

_COPY_SECONDS = 60.0


def _paddle() -> Any:
    """Return paddle, or None if it is not imported, or still being imported by another thread."""
    paddle = sys.modules.get("paddle")
    return paddle if hasattr(paddle, "Tensor") and hasattr(paddle, "nn") else None


def is_module(thing: object) -> TypeGuard[Any]:
    paddle = _paddle()
    return paddle is not None and isinstance(thing, paddle.nn.Layer)


def is_tensor(thing: object) -> TypeGuard[Any]:
    paddle = _paddle()
    return paddle is not None and isinstance(thing, paddle.Tensor)


PARTS = attrgetter("_parameters", "_buffers", "_sub_layers", "_non_persistable_buffer_names_set")
"""Returns a layer's dicts of parameters, buffers and layers, and the buffers it does not save."""


def state_of(layer: Any) -> Mapping[str, object]:
    """Return a layer's own parameters and persistable buffers."""
    state: dict[str, object] = layer.state_dict()
    return state


def cut_of(leaf: object) -> Cut | None:
    """Return the boxes of the whole that a dist tensor's local value holds."""
    if not is_tensor(leaf) or not leaf.is_dist():
        return None
    paddle, tensor = _paddle(), leaf
    mesh, shape = tensor.process_mesh, tuple(tensor.shape)
    sizes, ranks = list(mesh.shape), list(mesh.process_ids)
    rank = paddle.distributed.get_rank()
    if rank not in ranks:
        return Cut(None, shape, ())
    place = coordinate(ranks.index(rank), sizes)
    cuts = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise SpecError(
                f"dist tensor with placements {tensor.placements} over {sizes[axis]} ranks: its "
                f"values are not summed yet; call paddle.distributed.reshard with Replicate() or "
                f"Shard(dim) in place of {placement}"
            )
        if placement.is_shard():
            dim = next(dim for dim in range(len(shape)) if placement.is_shard(dim))
            # If two axes cut one dim, only the placement's text says which cut is first.
            order = re.search(r"shard_order=(\d+)", repr(placement))
            turns = getattr(placement, "get_split_factor", lambda: 1)()
            cuts.append((int(order[1]) if order else 0, (dim, sizes[axis], place[axis], turns)))
    ordered = [cut for _, cut in sorted(cuts, key=lambda each: each[0])]
    blocks = cut_blocks(shape, ordered)
    if tensor._is_initialized():
        return Cut(tensor._local_value(), shape, blocks)
    if held := sum(box.num_elements for box, _ in blocks):
        raise SpecError(
            f"paddle dist tensor has no memory for its {held} elements; initialise the layer, or "
            f"shard the tensor again"
        )
    return Cut(None, shape, ())  # nothing of it is here: Paddle never initialises an empty tensor


def tensor_of(leaf: object) -> Tensor | None:
    if not is_tensor(leaf):
        return None
    tensor: Any = leaf
    name = str(tensor.dtype).removeprefix("paddle.")
    if not tensor.is_dense():
        raise SpecError("paddle tensor that is not dense")
    if name not in BY_PADDLE:
        raise SpecError(f"paddle tensor of dtype {tensor.dtype}")
    spec = TensorSpec(BY_PADDLE[name], tuple(tensor.shape))
    if spec.nbytes and not tensor._is_initialized():
        raise SpecError("paddle tensor has no memory; initialise the layer first")
    if tensor.is_dist():
        raise SpecError("paddle dist tensor; pass its local tensor")
    device = device_of(tensor.place) if spec.nbytes else None
    width = spec.item_bytes
    strides = tuple(width * stride for stride in tensor.strides)
    address = tensor.data_ptr() if spec.nbytes else 0
    if device is None:
        return Tensor(spec, Buffer(address, spec.shape, strides, width, memory_of(tensor)))
    # Keep the tensor, not its memory: clearing a tensor must free memory on a GPU.
    memory = Buffer(address, spec.shape, strides, width, tensor, device=device)
    return Tensor(spec, memory, CudaDevice(device))


def empty(spec: TensorSpec, device: str) -> Any:
    """Return a new tensor with any content. Imports paddle."""
    paddle = importlib.import_module("paddle")
    if spec.dtype.paddle is None:
        raise SpecError(f"paddle has no dtype for {spec.dtype}")
    tensor = paddle.empty(list(spec.shape), spec.dtype.paddle)
    return tensor if paddle.get_device() == device else tensor.to(device)


def device_of(place: Any) -> int | None:
    """Return the CUDA device of a Paddle place; None for memory that the CPU can reach."""
    if place.is_gpu_place():
        return int(place.gpu_device_id())
    if place.is_cpu_place() or place.is_cuda_pinned_place():
        return None
    raise SpecError(f"paddle tensor on {place}; tensors in host memory and on CUDA GPUs are moved")


def has_memory(tensor: Any) -> bool:
    """False for a tensor that has elements and no memory for them."""
    # A dist tensor counts as if it had memory: sharing a buffer with one crashes the process. One
    # without memory is refused by name when it is filled.
    return bool(tensor._is_initialized()) or not tensor.size or tensor.is_dist()


def give_memory(tensors: Sequence[Any]) -> int:
    """Give the same memory to those of equal tensors that have none, and return how many.

    Its content is arbitrary. Strides must be those of a new tensor.
    """
    bare = [tensor for tensor in tensors if not has_memory(tensor)]
    if bare:
        fresh = sys.modules["paddle"].empty(bare[0].shape, bare[0].dtype)
        for tensor in bare:
            fresh._share_buffer_to(tensor)  # the tensor keeps it alive
    return len(bare)


def memory_of(tensor: Any) -> object:
    """Return an object that keeps a tensor's memory alive.

    The tensor itself, or what `detach` returned, does not do so once it is cleared or given other
    memory.
    """
    if not tensor._is_initialized():
        return tensor
    dense = (tensor._local_value() if tensor.is_dist() else tensor).get_tensor()
    memory = type(dense)()
    memory._share_data_with(dense)
    return memory


@dataclass(frozen=True)
class CudaDevice:
    """A CUDA device by its number alone. The driver copies at once.

    It does not know Paddle's streams, so a read waits for the whole device first.
    """

    number: int

    @property
    def name(self) -> str:
        return f"cuda:{self.number}"

    @property
    def staging(self) -> Staging | None:
        return None

    def read(self, block: Buffer, into: Bytes, *, should_wait: bool) -> None:
        self.settle()
        self._copy(_host(into, block), block)

    def write(self, block: Buffer, data: Bytes) -> None:
        self._copy(block, _host(data, block))

    def settle(self) -> None:
        driver.synchronize(self.number, _COPY_SECONDS)

    def _copy(self, sink: Buffer, source: Buffer) -> None:
        copier, lock = _copier(self.number)
        with lock:
            copier.copy(sink, source)
            copier.wait(_COPY_SECONDS)


@cache
def _copier(device: int) -> tuple[Copier, threading.Lock]:
    return Copier(device), threading.Lock()


def _host(data: Bytes, block: Buffer) -> Buffer:
    """Return row-major bytes in the shape of a block."""
    strides = tuple(block.item_bytes * stride for stride in strides_of(block.shape))
    return Buffer(data.ctypes.data, block.shape, strides, block.item_bytes, data)
