"""Events: one stream that log lines, progress bars, metrics and status pages listen to.

Listeners run in the thread that emits, so they must be quick. An exception in a listener reaches
the caller of `emit`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import getLogger


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened: a dotted `kind` and its facts."""

    kind: str
    fields: Mapping[str, int | float | str | None] = field(default_factory=dict)


Listener = Callable[[Event], None]
_listeners: tuple[Listener, ...] = ()
_lock = threading.Lock()


def emit(kind: str, **fields: int | float | str | None) -> None:
    """Call every listener with an event; almost free when there are none."""
    for listener in _listeners:
        listener(Event(kind, fields))


def announce(kind: str, **fields: int | float | str | None) -> None:
    """Do as `emit`, but log what a listener raises: it must not stop a change of state half-way."""
    try:
        emit(kind, **fields)
    except Exception:
        getLogger("flyweight.events").exception("a listener of %s failed", kind)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` for each event emitted inside the block, by any thread."""
    global _listeners  # noqa: PLW0603
    with _lock:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _lock:
            _listeners = tuple(each for each in _listeners if each is not listener)
