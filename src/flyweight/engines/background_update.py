"""BackgroundUpdate: an update that stages a version in a thread, and loads it in the engine's own.

An engine's worker has one thread that runs its model; nothing else may touch the model. So the
thread of an update asks that one (`MainThread`) to load, and waits.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from flyweight.errors import FlyweightError, LifecycleError, TransferTimeout
from flyweight.live import Replica
from flyweight.ports import UpdateOptions, UpdateReport

_LOOK_SECONDS = 1.0
"""How often a thread that waits for another looks whether that one is still there."""


_FREE_SECONDS = 0.5
_NICE = 10


class MainThread:
    """Runs functions for the thread of an update, whenever the engine's own thread lets it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Call] = []

    def call(
        self,
        function: Callable[[], None],
        deadline: float,
        is_cancelled: Callable[[], bool],
        *,
        is_load: bool = False,
    ) -> None:
        """Have the engine's thread call a function, and return or raise what that does.

        deadline: when it is given up if it was not begun.
        is_cancelled: gives it up when `wake` is called.
        is_load: it writes to the model, so it waits for `run_until`.
        """
        call = _Call(function, is_load)
        with self._changed:
            self._waiting.append(call)
            self._changed.notify_all()
            left = max(deadline - monotonic(), 0)
            self._changed.wait_for(lambda: call.is_begun or is_cancelled(), left)
            if not call.is_begun:
                self._waiting.remove(call)
                raise TransferTimeout("the engine's thread did nothing for the update in time")
            while not call.is_over:
                self._changed.wait(_LOOK_SECONDS)
        if call.error is not None:
            raise call.error

    def run_waiting(self, *, may_load: bool = False) -> None:
        """Run what was called for; in the engine's thread."""
        while True:
            with self._changed:
                found = [each for each in self._waiting if may_load or not each.is_load]
                if not found:
                    return
                self._waiting.remove(found[0])
                found[0].is_begun = True
            self._run(found[0])

    def _run(self, call: _Call) -> None:
        try:
            call.function()
        except BaseException as error:
            call.error = error
        with self._changed:
            call.is_over = True
            self._changed.notify_all()

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Run what is called for, loads too, until it is over."""
        while not is_over():
            self.run_waiting(may_load=True)
            with self._changed:
                self._changed.wait_for(lambda: is_over() or bool(self._waiting), _LOOK_SECONDS)

    def wake(self) -> None:
        """Have waiting threads look again whether what they wait for is there."""
        with self._changed:
            self._changed.notify_all()


class _Call:
    def __init__(self, function: Callable[[], None], is_load: bool) -> None:
        self.function, self.is_load = function, is_load
        self.is_begun = self.is_over = False
        self.error: BaseException | None = None


class BackgroundUpdate:
    """One update of a replica: begun in a thread, completed by the engine's own thread."""

    def __init__(
        self,
        id: str,
        replica: Callable[[], Replica],
        main: MainThread,
        *,
        last: BackgroundUpdate | None,
        free: Callable[[], None] = lambda: None,
        version: int | None,
        may_keep: bool,
        verify: bool,
        timeout_seconds: float,
    ) -> None:
        """Prepare; `start` joins the publisher, waits for the version, and stages it.

        replica: returns the replica to update, in the thread of the update.
        last: the update before, which ends first.
        free: called some time after the end, when the engine serves again: freeing memory takes
            time that requests should not wait for.
        timeout_seconds: the time for all of that.
        """
        self.id, self._made, self._main, self._last = id, replica, main, last
        self._free, self._may_free = free, threading.Event()
        self._deadline = monotonic() + timeout_seconds
        self._replica: Replica | None = None
        self._options = UpdateOptions(
            version=version,
            timeout_seconds=timeout_seconds,
            before=self._wait_for_pause,
            is_over=lambda: self._is_cancelled,
            may_keep=may_keep,
            verify=verify,
        )
        self._state, self._version = "waiting", version
        self._report: UpdateReport | None = None
        self._error: BaseException | None = None
        self._may_load = threading.Event()
        self._is_cancelled = False
        self._thread = threading.Thread(target=self._run, name="flyweight-update", daemon=True)

    def start(self) -> None:
        """Begin, in a thread; once the version is staged it waits for `complete`."""
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return the state of the update as JSON: 'waiting', 'staged', 'loading', or how it ended.

        It ends as 'done', 'kept' (the engine holds the version already) or 'failed'.
        """
        error, report, replica = self._error, self._report, self._replica
        return {
            "update": self.id,
            "state": self._state,
            "version": self._version,
            "error": "" if error is None else type(error).__name__,
            "text": "" if error is None else str(error),
            "progress": 0.0 if replica is None else replica.progress,
            "session": "" if replica is None else replica.session,
            "report": None if report is None else vars(report),
        }

    def _run(self) -> None:
        # Of this thread only: requests that the engine answers meanwhile go first.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            if self._last is not None:
                self._last.join(max(self._deadline - monotonic(), 0))
                self._last = None
            self._replica = self._made()
            self._report = self._replica.take(self._options)
            self._version = self._report.version
            self._state = "done" if self._state == "loading" else "kept"
        except BaseException as error:  # the loader is the engine's: it may raise anything
            self._error, self._state = error, "failed"
        finally:
            self._main.wake()
            self._may_free.wait(_FREE_SECONDS)
            self._free()

    def _wait_for_pause(self, version: int) -> None:
        """Say that the version is staged, and return once the engine is paused."""
        self._version, self._state = version, "staged"
        self._main.wake()
        is_paused = self._may_load.wait(max(self._deadline - monotonic(), 0))
        if self._is_cancelled:
            raise LifecycleError(f"update {self.id} was cancelled before version {version} loaded")
        if not is_paused:
            raise TransferTimeout(f"version {version} was staged, and the engine was not paused")
        self._state = "loading"

    def complete(self) -> None:
        """Load the staged version in this thread; raise what ended the update.

        The engine must be paused. If the version is not staged yet, wait for it until the deadline.
        """
        self._may_load.set()
        self._main.run_until(lambda: self._state in _ENDS or not self._thread.is_alive())
        error = self._error
        if error is None:
            return
        if isinstance(error, FlyweightError):
            raise error
        raise LifecycleError(f"{type(error).__name__}: {error}") from error

    def call(self, function: Callable[[], None], *, is_load: bool = False) -> None:
        """Have the engine's thread call a function for this update."""
        self._main.call(function, self._deadline, lambda: self._is_cancelled, is_load=is_load)

    def cancel(self) -> None:
        """End the update soon, unless it is loading; the engine keeps its version."""
        self._is_cancelled = True
        self._may_load.set()
        self._may_free.set()
        if self._replica is not None:
            self._replica.wake()
        self._main.wake()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of the update, if it was started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TransferTimeout(f"update {self.id} did not end in {timeout_seconds:.3g} s")


_ENDS = ("done", "kept", "failed")
