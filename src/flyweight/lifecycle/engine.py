"""ModelEngine: a plain model as an engine. A pause closes the gate that requests enter by.

A request does not belong to a thread: its block may begin in one thread, task or context and
end in another. So the engine counts requests, and a context variable finds the outer request of
a nested one.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from contextvars import ContextVar
from time import monotonic

from flyweight.adapters.memory_release import ModelMemory
from flyweight.checks import check_seconds
from flyweight.errors import LifecycleError, TransferTimeout
from flyweight.forks import call_in_child
from flyweight.ports import Engine, EngineHooks

_innermost: ContextVar[EngineRequest | None] = ContextVar("flyweight_request", default=None)
"""The last request that began in this context. It is never reset, since a block may end in another
context: readers skip requests that have ended."""


class EngineRequest:
    """One request to a ModelEngine: use it in one `with` or `async with` block.

    The request runs from the start of the block to its end. A request inside the block of
    another has the same version and does not wait at the gate: a pause waits for both.
    """

    __slots__ = ("_engine", "_has_begun", "_is_open", "_outer", "_timeout_seconds", "_version")

    def __init__(self, engine: ModelEngine, timeout_seconds: float) -> None:
        self._engine: ModelEngine | None = engine
        self._timeout_seconds = timeout_seconds
        self._has_begun = self._is_open = False
        self._outer: EngineRequest | None = None
        self._version: int | None = None

    def __enter__(self) -> int | None:
        engine = self._begin()
        with engine._changed:
            if not self._pass(engine):
                _check_no_event_loop()
                if not engine._changed.wait_for(lambda: self._pass(engine), self._timeout_seconds):
                    raise self._refusal()
        return self._version

    def __exit__(self, *raised: object) -> None:
        self._end()

    async def __aenter__(self) -> int | None:
        engine, deadline = self._begin(), monotonic() + self._timeout_seconds
        while True:
            with engine._changed:
                if self._pass(engine):
                    return self._version
                left = deadline - monotonic()
                if left <= 0:
                    raise self._refusal()
                opened = asyncio.get_running_loop().create_future()
                engine._waiting.add(opened)
            try:
                await asyncio.wait((opened,), timeout=left)
            finally:
                with engine._changed:
                    engine._waiting.discard(opened)

    async def __aexit__(self, *raised: object) -> None:
        self._end()

    def _begin(self) -> ModelEngine:
        engine = self._engine
        if engine is not None:
            with engine._changed:
                if not self._has_begun:
                    self._has_begun = True
                    return engine
        raise LifecycleError(
            "this request was entered before, and serves one block only; call engine.request() for "
            "another"
        )

    def _pass(self, engine: ModelEngine) -> bool:
        """Start the request if the gate is open, or if it is nested in a running request."""
        around = outer = _nearest_open(_innermost.get())
        while outer is not None and outer._engine is not engine:
            outer = _nearest_open(outer._outer)
        if outer is None and not engine._is_open:
            return False
        self._version = engine.version if outer is None else outer._version
        self._outer, self._is_open = around, True
        engine._num_running += 1
        _innermost.set(self)
        return True

    def _end(self) -> None:
        engine = self._engine
        if engine is None or not self._is_open:
            return
        with engine._changed:
            self._is_open = False
            engine._num_running -= 1
            if not engine._num_running:
                engine._changed.notify_all()
        # The context in which it began keeps a reference that no other context can remove. So
        # drop the references to the model and to outer requests that have ended.
        self._engine, self._outer = None, _nearest_open(self._outer)

    def _refusal(self) -> LifecycleError:
        return LifecycleError(f"the engine accepted no requests for {self._timeout_seconds:g} s")


class ModelEngine(EngineHooks):
    """A plain model as an engine; also a base class for engines that do more.

    Args:
        model: a torch module, a Paddle layer or a dict of arrays; its memory is what
            `release_weights` releases.
    """

    def __init__(self, model: object) -> None:
        self._memory = ModelMemory(model)
        self._changed = threading.Condition()
        self._is_open = False
        self._num_running = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self.version: int | None = None
        """The version of the weights that requests use."""
        call_in_child(self._replace_lock)

    def request(self, timeout_seconds: float = 60.0) -> EngineRequest:
        """Return a request for a `with` or `async with` block, which yields the version.

        Entering the block waits while the engine is paused, for at most `timeout_seconds`, then
        raises LifecycleError. `async with` does not block the event loop; `with` in an event loop
        raises at once if it would have to wait.
        """
        return EngineRequest(self, check_seconds("timeout_seconds", timeout_seconds))

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
            for opened in self._waiting:
                with suppress(RuntimeError):  # its event loop is closed
                    opened.get_loop().call_soon_threadsafe(_wake, opened)

    def drop_cache(self) -> None:
        """Do nothing: a plain model caches nothing."""

    def release_weights(self) -> None:
        self._memory.release()

    def restore_weights(self) -> None:
        self._memory.restore()

    def _replace_lock(self) -> None:
        """Replace the lock after a fork: the thread that held it does not exist in the child.

        Running requests stay counted, since one of them may continue in the child.
        """
        self._changed, self._waiting = threading.Condition(), set()


def _nearest_open(request: EngineRequest | None) -> EngineRequest | None:
    while request is not None and not request._is_open:
        request = request._outer
    return request


def _wake(opened: asyncio.Future[None]) -> None:
    if not opened.done():
        opened.set_result(None)


def _check_no_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise LifecycleError(
        "the engine is paused, and `with engine.request()` would block this "
        "thread's event loop while it waits; use `async with engine.request()`"
    )


_ENGINE: type[Engine] = ModelEngine  # mypy checks the port
