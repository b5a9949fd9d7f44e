"""The tree of a model: modules, layers, dicts and lists, and their leaves.

A leaf's full name joins the keys that lead to it. A load sets plain values again in
their containers; it fills tensors, and never replaces them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any

import numpy as np

from flyweight.adapters import paddle_layer, torch_module
from flyweight.errors import SpecError, listed
from flyweight.spec.manifest import Leaf, check_leaf

Path = tuple[Any, ...]
"""The keys that lead to a leaf."""
MAX_NESTING = 64
FRAMEWORKS = (torch_module, paddle_layer)
"""Those with modules, by the same functions in each."""
_PLAIN = (bool, int, float, str, type(None))


def is_model(thing: object) -> bool:
    """True for modules, layers and containers."""
    return isinstance(thing, (Mapping, list, tuple)) or any(
        framework.is_module(thing) for framework in FRAMEWORKS
    )


def state_of(thing: Any) -> Mapping[str, object] | None:
    """Return the tensors that a module or a layer saves; None for anything else.

    Raises SpecError if a hook puts copies there: filling them is useless.
    """
    for framework in FRAMEWORKS:
        if framework.is_module(thing):
            state: Mapping[str, object] = framework.state_of(thing)
            live = {id(tensor) for tensor in (*thing.parameters(), *thing.buffers())}
            if copies := [name for name, tensor in state.items() if id(tensor) not in live]:
                raise SpecError(
                    f"{len(copies)} entries of the module's state are not its own tensors but a "
                    f"hook's copies: {listed(copies)}; pass a dict of the tensors themselves"
                )
            return state
    return None


def reshard(thing: object, depth: int = 0) -> None:
    """Put the shards of FSDP2 modules back where whole tensors are since a forward."""
    if depth > MAX_NESTING or not torch_module.has_fsdp():
        return
    if torch_module.is_module(thing):
        torch_module.reshard(thing)
    elif isinstance(thing, (Mapping, list, tuple)):
        for each in thing.values() if isinstance(thing, Mapping) else thing:
            reshard(each, depth + 1)


def walk(thing: object, name: str = "", path: Path = ()) -> Iterator[tuple[str, object, Path]]:
    """Yield every leaf under `thing`, with its full name and its path."""
    if len(path) > MAX_NESTING:
        raise SpecError(f"{name[:80]!r} nests more than {MAX_NESTING} deep, or holds itself")
    if (state := state_of(thing)) is not None:
        thing = state
    items: Iterator[tuple[object, object]]
    if isinstance(thing, Mapping):
        items = iter(thing.items())
    elif isinstance(thing, (list, tuple)):
        items = iter(enumerate(thing))
    else:
        yield name, thing, path
        return
    plain = torch_module.plain_types()
    for key, value in items:
        if not isinstance(key, (str, int)):
            raise SpecError(f"key {key!r} under {name!r} is a {type(key).__name__}, not text")
        full_name = f"{name}.{key}" if name else str(key)
        if type(value) in plain:  # without a step into it: a model has many of them
            yield full_name, value, (*path, key)
        else:
            yield from walk(value, full_name, (*path, key))


def is_settable(thing: Any, path: Path) -> bool:
    """True for a value in a dict or a list, or in tuples there, which are replaced as a whole."""
    containers = [thing]
    for key in path[:-1]:
        containers.append(containers[-1][key])
    while containers and type(containers[-1]) is tuple:
        containers.pop()
    return bool(containers) and isinstance(containers[-1], (MutableMapping, MutableSequence))


def set_value(container: Any, path: Path, value: Leaf) -> object:
    """Set the value at a path and return the container, or a new one in place of a tuple."""
    key, rest = path[0], path[1:]
    new = set_value(container[key], rest, value) if rest else value
    if type(container) is tuple:
        return (*container[:key], new, *container[key + 1 :])
    if not rest or new is not container[key]:
        container[key] = new
    return container


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
