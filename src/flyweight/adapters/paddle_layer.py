"""Paddle layers and tensors, in host memory, by address.

paddle is never imported here: who passes a tensor has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from flyweight.adapters.numpy_dict import HostTensor, check_live
from flyweight.errors import SpecError
from flyweight.memory import Buffer
from flyweight.spec.dtype import BY_PADDLE
from flyweight.spec.manifest import TensorSpec


def _paddle() -> Any:
    paddle = sys.modules.get("paddle")
    return paddle if paddle is not None and hasattr(paddle, "Tensor") else None


def state_of(thing: object) -> Mapping[str, object] | None:
    """Return a layer's parameters and persistable buffers, the live ones."""
    paddle = _paddle()
    if paddle is None or not isinstance(thing, paddle.nn.Layer):
        return None
    state: dict[str, object] = thing.state_dict()
    check_live(state, {id(t) for t in (*thing.parameters(), *thing.buffers())})
    return state


def tensor_of(leaf: object) -> HostTensor | None:
    paddle = _paddle()
    if paddle is None or not isinstance(leaf, paddle.Tensor):
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
    if spec.nbytes and not tensor.place.is_cpu_place():
        raise SpecError(f"paddle tensor on {tensor.place}; only tensors in host memory are moved")
    width = spec.item_bytes
    strides = tuple(width * stride for stride in tensor.strides)
    address = tensor.data_ptr() if spec.nbytes else 0
    return HostTensor(spec, Buffer(address, spec.shape, strides, width, tensor))
