"""The tree of a model: modules, layers, dicts and lists, their leaves, and where each leaf is.

A leaf's full name joins the keys that lead to it. A load sets plain values again in their
containers; it fills tensors, and never replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flyweight.adapters import paddle_layer, torch_module
from flyweight.errors import SpecError
from flyweight.spec.manifest import Leaf, check_leaf

MAX_NESTING = 64
_PLAIN = (bool, int, float, str, type(None))
_STATES: tuple[Callable[[object], Mapping[str, object] | None], ...] = (
    torch_module.state_of,
    paddle_layer.state_of,
)


@dataclass(frozen=True)
class Location:
    """Where a leaf is: a key of a container, and the location of that container below the root."""

    container: Any
    key: Any
    above: Location | None

    @property
    def is_settable(self) -> bool:
        """True for dicts and lists, and for tuples in them, which are replaced as a whole."""
        if isinstance(self.container, (MutableMapping, MutableSequence)):
            return True
        return type(self.container) is tuple and self.above is not None and self.above.is_settable

    def set(self, value: object) -> None:
        if not isinstance(self.container, tuple):
            self.container[self.key] = value
            return
        assert self.above is not None
        current = self.above.current()
        self.above.set((*current[: self.key], value, *current[self.key + 1 :]))

    def current(self) -> Any:
        """Return what is here now: a tuple that was here may have been replaced."""
        if not isinstance(self.container, tuple):
            return self.container[self.key]
        assert self.above is not None
        return self.above.current()[self.key]


@dataclass(frozen=True)
class PlainLeaf:
    """A leaf that is not a tensor, and its location, to set it again."""

    location: Location
    value: Leaf


def is_model(thing: object) -> bool:
    """True for modules, layers and containers."""
    return isinstance(thing, (Mapping, list, tuple)) or any(
        is_one(thing) for is_one in (torch_module.is_module, paddle_layer.is_layer)
    )


def walk(
    name: str, thing: object, location: Location | None, depth: int = 0
) -> Iterator[tuple[str, object, Location | None]]:
    """Yield every leaf under `thing` with its full name and location; None for the root."""
    if depth > MAX_NESTING:
        raise SpecError(f"{name[:80]!r} nests more than {MAX_NESTING} deep, or holds itself")
    for state_of in _STATES:
        state = state_of(thing)
        if state is not None:
            thing = state
            break
    items: Iterator[tuple[object, object]]
    if isinstance(thing, Mapping):
        items = iter(thing.items())
    elif isinstance(thing, (list, tuple)):
        items = iter(enumerate(thing))
    else:
        yield name, thing, location
        return
    for each, value in items:
        if not isinstance(each, (str, int)):
            raise SpecError(f"key {each!r} under {name!r} is a {type(each).__name__}, not text")
        path = f"{name}.{each}" if name else str(each)
        yield from walk(path, value, Location(thing, each, location), depth + 1)


def plain_value(name: str, leaf: object) -> Leaf:
    """Return a leaf that is not a tensor as a plain value; raise SpecError if it is none."""
    if isinstance(leaf, np.generic):
        leaf = leaf.item()
    if isinstance(leaf, _PLAIN):
        return check_leaf(name, leaf)
    raise SpecError(
        f"{name!r} is a {type(leaf).__module__}.{type(leaf).__qualname__}: neither a tensor nor "
        f"a plain value"
    )
