"""ModelEngine: a plain model as an engine. Requests pass a gate that a pause closes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from flyweight.adapters.residence import Residence
from flyweight.errors import LifecycleError, TransferTimeout
from flyweight.ports import EngineHooks


class ModelEngine(EngineHooks):
    """Counts requests in and out; a base for engines that know more of their own."""

    def __init__(self, model: object) -> None:
        self._residence = Residence(model)
        self._changed = threading.Condition()
        self._is_open = False
        self._num_running = 0
        self._own = threading.local()
        self.version: int | None = None
        """The version that requests are answered with."""

    @contextmanager
    def request(self, timeout_seconds: float = 60.0) -> Iterator[int | None]:
        """Answer a request inside the block, with the version that is yielded.

        Waits while the engine stands still; raises LifecycleError if that takes longer. One
        inside another of the same thread is part of that one.
        """
        if getattr(self._own, "is_answering", False):
            yield self.version
            return
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_open, timeout_seconds):
                raise LifecycleError(f"the engine took no requests for {timeout_seconds:g} s")
            self._num_running += 1
            version = self.version
        self._own.is_answering = True
        try:
            yield version
        finally:
            self._own.is_answering = False
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    @property
    def num_running(self) -> int:
        return self._num_running

    def pause(self, deadline: float) -> None:
        with self._changed:
            self._is_open = False
            seconds = max(deadline - monotonic(), 0)
            if not self._changed.wait_for(lambda: not self._num_running, seconds):
                raise TransferTimeout(
                    f"{self._num_running} requests were still running at the deadline"
                )

    def resume(self, version: int | None) -> None:
        with self._changed:
            self._is_open, self.version = True, version
            self._changed.notify_all()

    def drop_cache(self) -> None:
        """Nothing to forget: a plain model keeps nothing between requests."""

    def release_weights(self) -> None:
        self._residence.release()

    def restore_weights(self) -> None:
        self._residence.restore()
