"""Whether a model in memory is still the one that was adapted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any

import numpy as np

from flyweight.adapters.sharded import Sharded, local_of
from flyweight.adapters.tree import FRAMEWORKS, MAX_NESTING, is_model, reshard
from flyweight.errors import SpecError

_VALUES = (bool, int, float, str, type(None), np.generic)


class Identity:
    """Checks whether a model is still the one that was adapted, fast enough for every round.

    It is, as long as every module has the same containers, every container the same leaves, and
    every tensor its elements at the same address. Buffers that a module does not save do not
    count. Keeps the leaves alive, so that no other object can get the address of one.
    """

    def __init__(self, thing: object) -> None:
        self._modules: list[tuple[attrgetter[tuple[Any, ...]], object, tuple[Any, ...]]] = []
        self._containers: list[tuple[Any, int, Collection[str]]] = []
        self._leaves: list[tuple[Any, Any, Any]] = []
        self._tensors: list[tuple[Callable[[Any], object], object, object]] = []
        reshard(thing)  # as adapting does: whole tensors that stand in for shards do not count
        self._add(thing, 0)

    def _add(self, thing: Any, depth: int, unsaved: Collection[str] = ()) -> None:
        if depth > MAX_NESTING:
            raise SpecError(f"the model nests more than {MAX_NESTING} deep, or holds itself")
        parts_of = next((each.PARTS for each in FRAMEWORKS if each.is_module(thing)), None)
        if parts_of is not None:  # a module is its dicts of parameters, buffers and modules
            parameters, buffers, modules, names = parts = parts_of(thing)
            self._modules.append((parts_of, thing, parts))
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
            elif (memory_of := _memory_function(leaf)) is not None:
                self._tensors.append((memory_of, leaf, memory_of(leaf)))

    def is_same(self) -> bool:
        """True if nothing was replaced, and no tensor's memory has moved."""
        try:
            for parts_of, module, (parameters, buffers, modules, names) in self._modules:
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
        return all(memory_of(leaf) == memory for memory_of, leaf, memory in self._tensors)

    def has_tensors_of(self, other: Identity) -> bool:
        """True if both have the same tensors at the same addresses; other values may differ."""
        return self._places() == other._places()

    def _places(self) -> list[object]:
        leaves = [
            (key, id(leaf))
            for _, key, leaf in self._leaves
            if not isinstance(leaf, _VALUES) and not is_model(leaf)
        ]
        return [leaves, [memory for _, _, memory in self._tensors]]


def _num_saved(container: Any, unsaved: Collection[str]) -> int:
    # As a list: a request in another thread may add a key meanwhile.
    return sum(key not in unsaved for key in list(container.keys())) if unsaved else len(container)


def _memory_function(leaf: Any) -> Callable[[Any], object] | None:
    """Return a function that tells where a tensor like this one lies; None for other leaves."""
    if isinstance(leaf, np.ndarray):
        return attrgetter("__array_interface__")
    if isinstance(leaf, Sharded) or hasattr(leaf, "to_local"):
        memory_of = _memory_function(local_of(leaf))
        return None if memory_of is None else lambda leaf: memory_of(local_of(leaf))
    if hasattr(leaf, "stride"):
        return lambda leaf: (leaf.data_ptr(), leaf.shape, leaf.dtype, leaf.stride())
    if hasattr(leaf, "data_ptr"):  # of a framework that does not tell strides
        return lambda leaf: (leaf.data_ptr(), leaf.shape, leaf.dtype)
    return None
