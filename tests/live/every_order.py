"""Explores what a small world does in every order of steps."""

from types import MethodType


def frozen(value):
    """Return a hashable copy of all that an object is made of; dicts keep their order."""
    if isinstance(value, dict):
        return tuple([(key, frozen(each)) for key, each in value.items()])
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    if isinstance(value, set):
        return frozenset(value)
    if isinstance(value, Exception | MethodType):
        return type(value), getattr(value, "args", ())
    if value is not None and type(value).__hash__ in (None, object.__hash__):
        return frozen(vars(value))
    return value


class NotPossible(Exception):
    """The world cannot do this step now; it has not changed."""


def explore(make, steps, depth):
    """Do every sequence of up to `depth` steps, once per state, and check the world after each.

    make: makes a world with a method `check`, whose fields are all its state. A step is the name
    of one of its methods, and arguments. Return the number of states.
    """
    seen, paths = set(), [()]
    for _ in range(depth):
        longer = []
        for path in paths:
            world = None
            for step in steps:
                if world is None:
                    world = make()
                    for name, *arguments in path:
                        getattr(world, name)(*arguments)
                name, *arguments = step
                try:
                    getattr(world, name)(*arguments)
                    world.check()
                except NotPossible:
                    continue
                except Exception as error:
                    raise AssertionError(f"after {(*path, step)}: {error!r}") from error
                state = hash(frozen(vars(world)))
                if state not in seen:
                    seen.add(state)
                    longer.append((*path, step))
                world = None
        paths = longer
    return len(seen)
