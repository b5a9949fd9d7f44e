"""EngineSteps: the calls that change one rank's engine, and what a failure of each one means.

pause               the engine keeps serving
drop the cache      nothing changed; the engine stays paused, or serves again
release, restore    FAILED: memory may be half released; a cache that fails to restore is absent
resume              the engine stays paused
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from logging import getLogger
from time import monotonic
from typing import TypeVar

from flyweight.errors import FlyweightError, LifecycleError
from flyweight.events import emit
from flyweight.lifecycle.states import Condition, Signal, State, Tag
from flyweight.ports import Engine, Weights

ResultT = TypeVar("ResultT")
ROUND_SECONDS = 60.0
"""Time to drain requests and reach the other ranks in an update that no request started."""
_STOP_SECONDS = 1.0
_log = getLogger("flyweight.lifecycle")


class EngineSteps:
    """One engine, its source of weights and its condition. Use it from one thread at a time."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        *,
        should_serve: bool,
        observe: Callable[[], None],
    ) -> None:
        self._engine, self._weights = engine, weights
        self._should_serve, self._observe = should_serve, observe
        self.condition = Condition()
        self.version: int | None = None
        """The last committed version, complete on every rank."""
        self.failure: FlyweightError | None = None
        self.step = ""
        """The engine call that is running, or ""."""
        self._released: set[Tag] = set()
        self._is_idle = False
        """True after the engine has paused and before it is resumed."""
        self._pause_engine(monotonic() + ROUND_SECONDS)

    @property
    def state(self) -> State:
        return self.condition.state

    @property
    def has_weights_memory(self) -> bool:
        return Tag.WEIGHTS not in self._released

    def _ensure_idle(self, deadline: float, may_drain: bool = True) -> None:
        """Pause the engine unless it is idle. The state is not enough: a resume may have failed."""
        if self.state is not State.SERVING:
            if not self._is_idle:
                self._pause_engine(deadline)
            return
        running = 0 if may_drain else self._call("num_running", lambda: self._engine.num_running)
        if running:
            raise LifecycleError(
                f"{running} requests are running and the caller does not allow to drain them; send "
                f"PAUSE first, or allow to drain"
            )
        self._pause(deadline if may_drain else monotonic())

    def _pause(self, deadline: float, *, should_abort: bool = False) -> None:
        after = self.condition.after(Signal.PAUSE)
        if after.state is not State.PAUSING:
            return
        self._signal(Signal.PAUSE)
        try:
            if should_abort:
                self._call("abort_requests", self._engine.abort_requests)
            self._pause_engine(deadline)
        except FlyweightError:
            try:
                self._resume_engine()
            except FlyweightError as error:
                self._fail(error)
                raise
            self._signal(Signal.STUCK)
            raise
        self._signal(Signal.DRAINED)

    def _pause_engine(self, deadline: float) -> None:
        self._call("pause", lambda: self._engine.pause(deadline))
        self._is_idle = True

    def _resume_engine(self) -> None:
        self._is_idle = False
        self._call("resume", lambda: self._engine.resume(self.version))

    def _resume(self) -> None:
        self.condition.after(Signal.RESUME)
        try:
            self._resume_engine()
        except FlyweightError:
            # The engine may accept requests. If this pause fails, the next update pauses again.
            with suppress(FlyweightError):
                self._pause_engine(monotonic() + _STOP_SECONDS)
            raise
        self._signal(Signal.RESUME)

    def _resume_if_wanted(self) -> None:
        if self._should_serve and self.state is State.PAUSED:
            self._resume()

    def _release(self, tag: Tag) -> None:
        engine = self._engine
        self._released.add(tag)  # first: a release that fails half-way needs a restore too
        if tag is Tag.KV_CACHE:
            self._call("release_cache", engine.release_cache)
        else:
            self.version = None
            self._weights.forget("the memory of its weights was released")
            self._call("release_experts", engine.release_experts)
            self._call("release_weights", engine.release_weights)
            self._call("release_groups", engine.release_groups)

    def _restore_memory(self) -> bool:
        """Allocate memory for the weights if it was released; return True if it was."""
        if self.has_weights_memory:
            return False
        engine = self._engine
        try:
            self._call("restore_groups", engine.restore_groups)
            self._call("restore_weights", engine.restore_weights)
            self._call("restore_experts", engine.restore_experts)
        except FlyweightError as error:
            self._fail(error)
            raise
        self._released.discard(Tag.WEIGHTS)
        return True

    def _call(self, name: str, method: Callable[[], ResultT]) -> ResultT:
        """Call a method of the engine and show its name in `step` meanwhile."""
        self.step = name
        try:
            return named(name, method)
        finally:
            self.step = ""

    def _refusal(self, signal: Signal) -> LifecycleError | None:
        try:
            self.condition.after(signal)
        except LifecycleError as refusal:
            return refusal
        return None

    def _signal(self, signal: Signal, absent: Collection[Tag] | None = None) -> None:
        before = self.condition
        self.condition = before.after(signal, absent)
        if self.condition == before:
            return
        self._observe()
        try:
            emit("state.changed", state=self.state, before=before.state, signal=signal)
        except Exception:  # a user's listener must not stop a change of state
            _log.exception("a listener of state.changed failed")

    def _fail(self, error: FlyweightError) -> None:
        """Enter FAILED: the engine serves nothing until a complete update succeeds."""
        if self.state in (State.SERVING, State.PAUSING) or not self._is_idle:
            self._is_idle = False
            # The state is FAILED either way, and an update pauses again before it writes.
            with suppress(FlyweightError):
                self._pause_engine(monotonic() + _STOP_SECONDS)
        self.failure, self.version = error, None
        absent = self.condition.absent | self._released | {Tag.WEIGHTS}
        self._signal(Signal.FAULT, absent)


def named(name: str, method: Callable[[], ResultT]) -> ResultT:
    """Call a method of the user's engine; raise LifecycleError for what it raises."""
    try:
        return method()
    except FlyweightError:
        raise
    except Exception as cause:  # the engine is the user's: it may raise anything
        raise LifecycleError(
            f"the engine's {name} failed: {type(cause).__name__}: {cause}"
        ) from cause
