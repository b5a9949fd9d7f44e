"""Identity: whether a model in memory still is the one that was looked at before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyweight.adapters import paddle_layer, sharded, torch_module
from flyweight.adapters.tree import MAX_NESTING, is_model
from flyweight.errors import SpecError

_PARTS: tuple[Callable[[object], Sequence[Mapping[str, object]] | None], ...] = (
    torch_module.parts_of,
    paddle_layer.parts_of,
)


class Identity:
    """What tells whether a model still is the one that was adapted, quickly enough for each round.

    It is, as long as every container has the same leaves and every tensor its elements at the
    same place. Holds the leaves, so that no other object can take the place of one in memory.
    """

    def __init__(self, thing: object) -> None:
        self._containers: list[tuple[Any, int]] = []
        self._leaves: list[tuple[Any, Any, Any]] = []
        self._tensors: list[tuple[Any, int, object, object]] = []
        self._strides: list[tuple[Callable[[], object], object]] = []
        self._arrays: list[tuple[NDArray[Any], dict[str, Any]]] = []
        self._wrapped: list[tuple[Any, tuple[object, ...]]] = []
        self._add(thing, 0)

    def _add(self, thing: Any, depth: int) -> None:
        if depth > MAX_NESTING:
            raise SpecError(f"the model nests more than {MAX_NESTING} deep, or holds itself")
        parts = next((p for of in _PARTS if (p := of(thing)) is not None), None)
        if parts is not None:  # a module is its dicts of parameters, buffers and modules
            for part in parts:
                self._add(part, depth)
            return
        items = thing.items() if isinstance(thing, Mapping) else enumerate(thing)
        self._containers.append((thing, len(thing)))
        for key, leaf in items:
            self._leaves.append((thing, key, leaf))
            if is_model(leaf):
                self._add(leaf, depth + 1)
            elif isinstance(leaf, sharded.Sharded) or hasattr(leaf, "to_local"):
                self._wrapped.append((leaf, _local_memory(leaf)))
            elif hasattr(leaf, "data_ptr"):
                self._tensors.append((leaf, leaf.data_ptr(), leaf.shape, leaf.dtype))
                self._strides.append((getattr(leaf, "stride", _no_stride), _strides(leaf)))
            elif isinstance(leaf, np.ndarray):
                self._arrays.append((leaf, leaf.__array_interface__))

    def is_same(self) -> bool:
        """True if nothing was put in the place of anything else, and nothing has moved."""
        for container, size in self._containers:
            if len(container) != size:
                return False
        try:
            for container, key, leaf in self._leaves:
                if container[key] is not leaf:
                    return False
        except (KeyError, IndexError):  # it is gone, and another has come
            return False
        for leaf, address, shape, dtype in self._tensors:
            if leaf.data_ptr() != address or leaf.shape != shape or leaf.dtype != dtype:
                return False
        return (
            all(stride() == strides for stride, strides in self._strides)
            and all(array.__array_interface__ == told for array, told in self._arrays)
            and all(_local_memory(leaf) == memory for leaf, memory in self._wrapped)
        )


def _no_stride() -> None:
    """Paddle's tensors are contiguous, or told as such."""


def _strides(leaf: Any) -> object:
    return leaf.stride() if hasattr(leaf, "stride") else None


def _local_memory(leaf: Any) -> tuple[object, ...]:
    """Return where the elements of a wrapped tensor lie, and how."""
    local: Any = leaf.tensor if isinstance(leaf, sharded.Sharded) else leaf.to_local()
    where = getattr(local, "data_ptr", lambda: id(local))()
    return where, tuple(local.shape), local.dtype, _strides(local)
