"""Steps: what one rank's engine is taken through, and how the failure of each step ends.

pause               the engine goes on serving as before
drop the cache      nothing was changed; it stays paused, or goes on as before
release, restore    FAILED: some of it may be gone; a cache that does not come back stays away
resume              it stays paused
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
"""What a round that nobody asked for is given: to drain requests, and to hear the other ranks."""
_STOP_SECONDS = 1.0
_log = getLogger("flyweight.lifecycle")


class Steps:
    """An engine, where its weights come from, and its condition. Not for two threads at once."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        *,
        should_serve: bool,
        observe: Callable[[], None],
    ) -> None:
        self._engine, self._weights = engine, weights
        self._is_meant_to_serve, self._observe = should_serve, observe
        self.condition = Condition()
        self.version: int | None = None
        """The version that was committed last and is whole on every rank."""
        self.failure: FlyweightError | None = None
        self.step = ""
        """What is being done, in a word."""
        self._released: set[Tag] = set()
        self._is_still = False
        """Whether the engine said that nothing runs, and was not told to go on since."""
        self._halt(monotonic() + ROUND_SECONDS)

    @property
    def state(self) -> State:
        return self.condition.state

    @property
    def has_weights_memory(self) -> bool:
        return Tag.WEIGHTS not in self._released

    def _stand_still(self, deadline: float, may_drain: bool = True) -> None:
        """Have nothing running, whatever the state says: a resume may have failed half-way."""
        if self.state is not State.SERVING:
            if not self._is_still:
                self._halt(deadline)
            return
        running = 0 if may_drain else self._call("num_running", lambda: self._engine.num_running)
        if running:
            raise LifecycleError(
                f"{running} requests are running and were not to be drained; send PAUSE first, or "
                f"allow to drain"
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
            self._halt(deadline)
        except FlyweightError:
            try:
                self._go_on()
            except FlyweightError as error:
                self._fail(error)
                raise
            self._signal(Signal.STUCK)
            raise
        self._signal(Signal.DRAINED)

    def _halt(self, deadline: float) -> None:
        self._call("pause", lambda: self._engine.pause(deadline))
        self._is_still = True

    def _go_on(self) -> None:
        self._is_still = False
        self._call("resume", lambda: self._engine.resume(self.version))

    def _resume(self) -> None:
        self.condition.after(Signal.RESUME)
        try:
            self._go_on()
        except FlyweightError:
            with suppress(
                FlyweightError
            ):  # it may have let requests in; the next update asks again
                self._halt(monotonic() + _STOP_SECONDS)
            raise
        self._signal(Signal.RESUME)

    def _resume_if_meant(self) -> None:
        if self._is_meant_to_serve and self.state is State.PAUSED:
            self._resume()

    def _release(self, tag: Tag) -> None:
        engine = self._engine
        self._released.add(tag)  # before: what fails half-way has to be restored all the same
        if tag is Tag.KV_CACHE:
            self._call("release_cache", engine.release_cache)
        else:
            self.version = None
            self._weights.forget("the memory of its weights was given back")
            self._call("release_experts", engine.release_experts)
            self._call("release_weights", engine.release_weights)
            self._call("release_groups", engine.release_groups)

    def _restore_memory(self) -> bool:
        """Have memory for the weights; True if there was none."""
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
        """Call the engine, and give what it raises a name."""
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
        except Exception:  # a listener is not ours, and a state is not to be left half-way for it
            _log.exception("a listener of state.changed failed")

    def _fail(self, error: FlyweightError) -> None:
        """From now on nothing is served, until a whole update succeeds."""
        if self.state in (State.SERVING, State.PAUSING) or not self._is_still:
            self._is_still = False
            with suppress(
                FlyweightError
            ):  # it is FAILED either way, and asked again before a write
                self._halt(monotonic() + _STOP_SECONDS)
        self.failure, self.version = error, None
        absent = self.condition.absent | self._released | {Tag.WEIGHTS}
        self._signal(Signal.FAULT, absent)


def named(name: str, method: Callable[[], ResultT]) -> ResultT:
    """Call something of an engine, and give whatever it raises a name."""
    try:
        return method()
    except FlyweightError:
        raise
    except Exception as cause:  # the engine is not ours: it may raise anything
        raise LifecycleError(
            f"the engine's {name} failed: {type(cause).__name__}: {cause}"
        ) from cause
