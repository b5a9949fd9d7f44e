"""Turns: what one operation has at a time, and how long another waits for it.

A round that nobody asked for ends, or gives way, and is waited for. Something that was asked
for may itself be waiting for other ranks, who wait for the one that waits here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

_LEAST_SECONDS = 0.001
_LOOK_SECONDS = 0.05
"""What an operation that is about to end is given, however little it should be waited for."""


class Turn:
    """A lock that says what has it. Given back by whichever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.what = ""
        """The operation that has it, or had it last."""
        self._is_asked = False

    def take(
        self,
        what: str,
        deadline: float,
        *,
        is_asked: bool,
        gives_up: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Have the turn by the deadline; False if it is not to be had.

        Where both this and what runs were asked for, `gives_up` may say so before the deadline.
        """
        left = max(deadline - monotonic(), _LEAST_SECONDS)
        while not self._lock.acquire(timeout=min(left, _LOOK_SECONDS)):
            left = deadline - monotonic()
            if left <= 0 or (is_asked and self._is_asked and gives_up()):
                return False
        self.what, self._is_asked = what, is_asked
        return True

    def give(self) -> None:
        """Leave the turn to the next."""
        self._lock.release()
