"""Trees: modules, layers, dicts and lists, as far as their leaves and where those hang.

A leaf's full name is the join of the keys that lead to it. Values are set again where
they hang; tensors never are, they are filled.
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
class Hook:
    """Where something hangs: in a container, which hangs somewhere itself unless it is the root."""

    container: Any
    key: Any
    above: Hook | None

    @property
    def is_settable(self) -> bool:
        """True for dicts and lists, and for tuples in them: those are replaced as a whole."""
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
        """Return what hangs here by now: a tuple that was there may have been replaced."""
        if not isinstance(self.container, tuple):
            return self.container[self.key]
        assert self.above is not None
        return self.above.current()[self.key]


@dataclass(frozen=True)
class Slot:
    """A leaf that is no tensor, and where it hangs, to be set again."""

    hook: Hook
    value: Leaf


def is_model(thing: object) -> bool:
    """True for modules, layers and containers of tensors, False for anything else."""
    return isinstance(thing, (Mapping, list, tuple)) or any(
        is_one(thing) for is_one in (torch_module.is_module, paddle_layer.is_layer)
    )


def walk(
    name: str, thing: object, hook: Hook | None, depth: int = 0
) -> Iterator[tuple[str, object, Hook | None]]:
    """Yield every leaf under `thing` with its full name and where it hangs; None for the root."""
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
        yield name, thing, hook
        return
    for each, value in items:
        if not isinstance(each, (str, int)):
            raise SpecError(f"key {each!r} under {name!r} is a {type(each).__name__}, not text")
        path = f"{name}.{each}" if name else str(each)
        yield from walk(path, value, Hook(thing, each, hook), depth + 1)


def plain_value(name: str, leaf: object) -> Leaf:
    """Return a leaf that is no tensor as a plain value; raise if it is something else."""
    if isinstance(leaf, np.generic):
        leaf = leaf.item()
    if isinstance(leaf, _PLAIN):
        return check_leaf(name, leaf)
    raise SpecError(
        f"{name!r} is a {type(leaf).__module__}.{type(leaf).__qualname__}: neither a tensor nor "
        f"a plain value"
    )
