"""Forks: what a child must not keep of its parent's connections, locks and threads.

A socket or a lock that a forked child inherits outlives its parent, and hides the parent's
death from everybody who would notice it; threads do not come along at all.
"""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet


class Inherited(Protocol):
    """Something of a process that its forked children have no use for."""

    def let_go(self) -> None:
        """Close this process's end of it, or forget it, without a word to anybody else."""


unforked = threading.RLock()
"""Held, no child is forked: for what is open already, and not yet known to be left behind."""
_inherited: WeakSet[Inherited] = WeakSet()


def leave_behind(thing: Inherited) -> None:
    """Have a forked child let go of a thing, as long as it lives."""
    _inherited.add(thing)


def _let_go() -> None:
    unforked.release()
    for thing in list(_inherited):
        thing.let_go()


os.register_at_fork(
    before=unforked.acquire, after_in_parent=unforked.release, after_in_child=_let_go
)
