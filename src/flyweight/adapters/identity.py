"""Whether a model in memory is still the one that was adapted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain
from operator import attrgetter, getitem, is_, itemgetter
from typing import Any

import numpy as np

from flyweight.adapters import torch_module
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
        self._modules: dict[attrgetter[tuple[Any, ...]], tuple[list[object], list[object]]] = {}
        """The modules of each framework, and the containers of all of them, one after the other."""
        self._containers: list[Any] = []
        self._sizes: list[int] = []
        self._partly_saved: list[tuple[Any, int, Collection[str]]] = []
        """Containers some of whose entries do not count; which ones may change."""
        self._large: list[tuple[Any, itemgetter[tuple[Any, ...]], list[Any], list[Any]]] = []
        """Containers of many leaves, with what returns all of them, their keys, and the leaves."""
        self._holders: list[Any] = []
        self._keys: list[Any] = []
        self._leaves: list[Any] = []
        """Each leaf of the other containers, with its container and its key there."""
        self._others: list[tuple[Callable[[Any], object], object, object]] = []
        self._plain_types = torch_module.plain_types()
        plain: list[Any] = []
        reshard(thing)  # as adapting does: whole tensors that stand in for shards do not count
        self._add(thing, 0, None, plain)
        self._tensors = torch_module.PlainTensors(plain)

    def _add(
        self, thing: Any, depth: int, unsaved: Collection[str] | None, plain: list[Any]
    ) -> None:
        if depth > MAX_NESTING:
            raise SpecError(f"the model nests more than {MAX_NESTING} deep, or holds itself")
        parts_of = next((each.PARTS for each in FRAMEWORKS if each.is_module(thing)), None)
        if parts_of is not None:  # a module is its dicts of parameters, buffers and modules
            parameters, buffers, modules, names = parts = parts_of(thing)
            known, containers = self._modules.setdefault(parts_of, ([], []))
            known.append(thing)
            containers.extend(parts)
            self._add(parameters, depth, None, plain)
            self._add(buffers, depth, names, plain)
            self._add(modules, depth, None, plain)
            return
        # A scripted module has something else than a dict, which is not a Mapping by its type.
        items = enumerate(thing) if isinstance(thing, (list, tuple)) else thing.items()
        saved = dict(items)
        if unsaved is None:
            self._containers.append(thing)
            self._sizes.append(len(saved))
        else:
            saved = {key: leaf for key, leaf in saved.items() if key not in unsaved}
            self._partly_saved.append((thing, len(saved), unsaved))
        keys, leaves = list(saved), list(saved.values())
        if len(saved) > 8:
            self._large.append((thing, itemgetter(*keys), keys, leaves))
        else:
            self._holders += [thing] * len(keys)
            self._keys += keys
            self._leaves += leaves
        for leaf in leaves:
            if type(leaf) in self._plain_types:
                plain.append(leaf)
            elif is_model(leaf):
                self._add(leaf, depth + 1, None, plain)
            elif (memory_of := _memory_function(leaf)) is not None:
                self._others.append((memory_of, leaf, memory_of(leaf)))

    def is_same(self) -> bool:
        """True if nothing was replaced, and no tensor's memory has moved."""
        return self.is_in_place() and self._tensors.have_same_layouts()

    def is_in_place(self) -> bool:
        """True if nothing was replaced, and every tensor starts at the same address.

        Then its memory can be written without harm. It may be seen by other strides.
        """
        return (
            self._has_same_leaves()
            and self._tensors.have_same_addresses()
            and all(memory_of(leaf) == memory for memory_of, leaf, memory in self._others)
        )

    def _has_same_leaves(self) -> bool:
        # If the number is the same, the check of the leaves finds a new one.
        if list(map(len, self._containers)) != self._sizes:
            return False
        for container, size, unsaved in self._partly_saved:
            if len(container) != size and _num_saved(container, unsaved) != size:
                return False
        try:
            for parts_of, (modules, containers) in self._modules.items():
                found = chain.from_iterable(map(parts_of, modules))
                if not all(map(is_, found, containers)):
                    return False
            for container, leaves_of, _, leaves in self._large:
                if not all(map(is_, leaves_of(container), leaves)):
                    return False
            return all(map(is_, map(getitem, self._holders, self._keys), self._leaves))
        except (AttributeError, KeyError, IndexError):  # gone, and something else was added
            return False

    def has_tensors_of(self, other: Identity) -> bool:
        """True if both have the same tensors at the same addresses; other values may differ."""
        return self._places() == other._places()

    def _places(self) -> list[object]:
        large = [pair for _, _, *both in self._large for pair in zip(*both, strict=True)]
        leaves = [
            (key, id(leaf))
            for key, leaf in (*large, *zip(self._keys, self._leaves, strict=True))
            if not isinstance(leaf, _VALUES) and not is_model(leaf)
        ]
        return [leaves, [memory for _, _, memory in self._others], self._tensors.places]


def _num_saved(container: Any, unsaved: Collection[str]) -> int:
    # As a list: a request in another thread may add a key meanwhile.
    return sum(key not in unsaved for key in list(container.keys()))


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
