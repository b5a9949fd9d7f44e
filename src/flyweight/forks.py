"""What a forked child must close or replace: its parent's connections, files and locks.

A socket that a forked child inherits outlives its parent, and hides the parent's death
from the peers that would notice it. A lock may be held by a thread that does not exist
in the child.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import MethodType
from weakref import WeakKeyDictionary

fork_lock = threading.RLock()
"""While a thread holds this lock, the process does not fork."""
_functions: WeakKeyDictionary[object, Callable[[object], None]] = WeakKeyDictionary()
"""What to call in a child, for each object that still lives."""


def call_in_child(method: Callable[[], None]) -> None:
    """Call a bound method in every child that this process forks, as long as its object lives.

    An object has one such method: a second one replaces it.
    """
    assert isinstance(method, MethodType)
    _functions[method.__self__] = method.__func__


def _after_fork_in_child() -> None:
    fork_lock.release()
    for owner, function in list(_functions.items()):
        function(owner)


os.register_at_fork(
    before=fork_lock.acquire,
    after_in_parent=fork_lock.release,
    after_in_child=_after_fork_in_child,
)
