"""Whether a model in memory is still the one that was adapted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyweight.adapters import paddle_layer, sharded, torch_module
from flyweight.adapters.tree import MAX_NESTING, is_model
from flyweight.errors import SpecError

_PARTS: tuple[tuple[Callable[[object], bool], attrgetter[tuple[Any, ...]]], ...] = (
    (torch_module.is_module, torch_module.PARTS),
    (paddle_layer.is_layer, paddle_layer.PARTS),
)
_VALUES = (bool, int, float, str, type(None), np.generic)


class Identity:
    """Checks whether a model is still the one that was adapted, fast enough for every round.

    It is, as long as every module has the same containers, every container the same leaves, and
    every tensor its elements at the same address. Buffers that a module does not save do not
    count. Keeps the leaves alive, so that no other object can get the address of one.
    """

    def __init__(self, thing: object) -> None:
        self._modules: list[tuple[attrgetter[tuple[Any, ...]], object, Any, Any, Any, Any]] = []
        self._containers: list[tuple[Any, int, Collection[str]]] = []
        self._leaves: list[tuple[Any, Any, Any]] = []
        self._tensors: list[tuple[Any, int, object, object]] = []
        self._strides: list[tuple[Callable[[], object], object]] = []
        self._arrays: list[tuple[NDArray[Any], dict[str, Any]]] = []
        self._wrapped: list[tuple[Any, tuple[object, ...]]] = []
        self._add(thing, 0)

    def _add(self, thing: Any, depth: int, unsaved: Collection[str] = ()) -> None:
        if depth > MAX_NESTING:
            raise SpecError(f"the model nests more than {MAX_NESTING} deep, or holds itself")
        parts_of = next((parts_of for is_one, parts_of in _PARTS if is_one(thing)), None)
        if parts_of is not None:  # a module is its dicts of parameters, buffers and modules
            parameters, buffers, modules, names = parts_of(thing)
            self._modules.append((parts_of, thing, parameters, buffers, modules, names))
            self._add(parameters, depth)
            self._add(buffers, depth, names)
            self._add(modules, depth)
            return
        # A scripted module has something else than a dict, which is not a Mapping by its type.
        items = enumerate(thing) if isinstance(thing, (list, tuple)) else thing.items()
        self._containers.append((thing, _num_saved(thing, unsaved), unsaved))
        for key, leaf in items:
            if key in unsaved:
                continue
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
        """True if nothing was replaced, and no tensor's memory has moved."""
        try:
            for parts_of, module, parameters, buffers, modules, names in self._modules:
                a, b, c, d = parts_of(module)
                if a is not parameters or b is not buffers or c is not modules or d is not names:
                    return False
        except AttributeError:  # one of them is gone
            return False
        for container, size, unsaved in self._containers:
            # If the number is the same, the check of the leaves finds a new one.
            if len(container) != size and _num_saved(container, unsaved) != size:
                return False
        try:
            for container, key, leaf in self._leaves:
                if container[key] is not leaf:
                    return False
        except (KeyError, IndexError):  # a leaf is gone, and another was added
            return False
        for leaf, address, shape, dtype in self._tensors:
            if leaf.data_ptr() != address or leaf.shape != shape or leaf.dtype != dtype:
                return False
        return (
            all(stride() == strides for stride, strides in self._strides)
            and all(array.__array_interface__ == interface for array, interface in self._arrays)
            and all(_local_memory(leaf) == memory for leaf, memory in self._wrapped)
        )

    def has_tensors_of(self, other: Identity) -> bool:
        """True if both have the same tensors at the same addresses; other values may differ."""
        return self._places() == other._places()

    def _places(self) -> list[object]:
        return [
            [
                (key, id(leaf))
                for _, key, leaf in self._leaves
                if not isinstance(leaf, _VALUES) and not is_model(leaf)
            ],
            [each[1:] for each in self._tensors],
            [strides for _, strides in self._strides],
            [interface for _, interface in self._arrays],
            [memory for _, memory in self._wrapped],
        ]


def _num_saved(container: Any, unsaved: Collection[str]) -> int:
    # As a list: a request in another thread may add a key meanwhile.
    return sum(key not in unsaved for key in list(container.keys())) if unsaved else len(container)


def _no_stride() -> None:
    """Paddle's tensors are contiguous, or their strides are not known."""


def _strides(leaf: Any) -> object:
    return leaf.stride() if hasattr(leaf, "stride") else None


def _local_memory(leaf: Any) -> tuple[object, ...]:
    """Return the address, shape, dtype and strides of a wrapped tensor's own part."""
    local: Any = leaf.tensor if isinstance(leaf, sharded.Sharded) else leaf.to_local()
    where = getattr(local, "data_ptr", lambda: id(local))()
    return where, tuple(local.shape), local.dtype, _strides(local)
