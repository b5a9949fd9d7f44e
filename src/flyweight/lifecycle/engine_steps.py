"""EngineSteps: the calls that change one rank's engine, and what a failure of each one means.

pause               the engine keeps serving
drop the cache      nothing changed; the engine stays paused, or serves again
release, restore    FAILED: memory may be half released; a cache that fails to restore is absent
resume              the engine stays paused
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

from flyweight.errors import FlyweightError, LifecycleError, PeerLost
from flyweight.events import announce
from flyweight.lifecycle.states import Condition, Signal, State, Tag
from flyweight.ports import Engine, Weights
from flyweight.ranks.agreement import RankAgreement
from flyweight.spec.manifest import Json

ResultT = TypeVar("ResultT")
ROUND_SECONDS = 60.0
"""Time to drain requests and reach the other ranks in an update that no request started."""
_STOP_SECONDS = 1.0


class EngineSteps:
    """One engine, its source of weights and its condition. Use it from one thread at a time."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        ranks: RankAgreement,
        *,
        should_serve: bool,
        is_serving: bool,
        observe: Callable[[], None],
    ) -> None:
        self._engine, self._weights, self.ranks = engine, weights, ranks
        self._observe = observe
        self.should_serve = should_serve
        """Whether the engine resumes once it can."""
        self.condition = Condition()
        self.version: int | None = None
        """The last committed version, complete on every rank."""
        self.session = ""
        """The source of the committed version."""
        self.failure: FlyweightError | None = None
        self.step = ""
        """The engine call that is running, or ""."""
        self.released: set[Tag] = set()
        self._is_idle = False
        """True after the engine has paused and before it is resumed."""
        if is_serving:
            self.version, self.session = weights.version, weights.session
            self.condition = Condition(State.SERVING, frozenset())
        else:
            self._pause_engine(monotonic() + ROUND_SECONDS)

    @property
    def state(self) -> State:
        return self.condition.state

    @property
    def is_in_pieces(self) -> bool:
        """True while the weights are being written."""
        return self.state in (State.UPDATING, State.VERIFYING)

    @property
    def has_weights_memory(self) -> bool:
        return Tag.WEIGHTS not in self.released

    def has_lost_weights(self) -> bool:
        """True if the committed version is gone: the engine was restarted, or tensors replaced."""
        return self.version is not None and self._weights.version is None

    def agree(
        self, what: str, deadline: float, error: FlyweightError | None = None, **facts: Json
    ) -> list[dict[str, Any]]:
        """Return the facts of all ranks once all are ready for an operation; raise if one is not.

        If a rank is lost, the engine has failed.
        """
        try:
            return self.ranks.agree(what, deadline, error, **facts)
        except PeerLost as lost:
            self.fail(lost)
            if error is not None:
                raise error from lost
            raise LifecycleError(str(lost)) from lost

    def ensure_idle(self, deadline: float, may_drain: bool = True) -> None:
        """Pause the engine unless it is idle. The state is not enough: a resume may have failed."""
        if self.state is not State.SERVING:
            if not self._is_idle:
                self._pause_engine(deadline)
            return
        running = 0 if may_drain else self.call("num_running", lambda: self._engine.num_running)
        if running:
            raise LifecycleError(
                f"{running} requests are running and the caller does not allow to drain them; send "
                f"PAUSE first, or allow to drain"
            )
        self.pause(deadline if may_drain else monotonic())

    def pause(self, deadline: float, *, should_abort: bool = False) -> None:
        """Pause an engine that serves; it serves again if it cannot pause."""
        self.signal(Signal.PAUSE)
        try:
            if should_abort:
                self.call("abort_requests", self._engine.abort_requests)
            self._pause_engine(deadline)
        except FlyweightError:
            try:
                self._resume_engine()
            except FlyweightError as error:
                self.fail(error)
                raise
            self.signal(Signal.STUCK)
            raise
        self.signal(Signal.DRAINED)

    def _pause_engine(self, deadline: float) -> None:
        self.call("pause", lambda: self._engine.pause(deadline))
        self._is_idle = True

    def _resume_engine(self) -> None:
        self._is_idle = False
        self.call("resume", lambda: self._engine.resume(self.version))

    def resume(self) -> None:
        self.condition.after(Signal.RESUME)
        try:
            self._resume_engine()
        except FlyweightError:
            # The engine may accept requests. If this pause fails, the next update pauses again.
            with suppress(FlyweightError):
                self._pause_engine(monotonic() + _STOP_SECONDS)
            raise
        self.signal(Signal.RESUME)

    def resume_if_wanted(self) -> None:
        if self.should_serve and self.state is State.PAUSED:
            self.resume()

    def drop_cache(self) -> None:
        """Drop what the engine has computed with the old weights."""
        self.call("drop_cache", self._engine.drop_cache)

    def restore_cache(self) -> None:
        """Allocate the memory of the cache if it was released."""
        if Tag.KV_CACHE in self.released:
            self.call("restore_cache", self._engine.restore_cache)
            self.released.discard(Tag.KV_CACHE)
            self.signal(Signal.RESTORE, self.condition.absent - {Tag.KV_CACHE})

    def release(self, tag: Tag) -> None:
        engine = self._engine
        self.released.add(tag)  # first: a release that fails half-way needs a restore too
        if tag is Tag.KV_CACHE:
            self.call("release_cache", engine.release_cache)
        else:
            self.version = None
            self._weights.forget("the memory of its weights was released")
            self.call("release_experts", engine.release_experts)
            self.call("release_weights", engine.release_weights)
            self.call("release_groups", engine.release_groups)

    def restore_memory(self) -> bool:
        """Allocate memory for the weights if it was released; return True if it was."""
        if self.has_weights_memory:
            return False
        engine = self._engine
        try:
            self.call("restore_groups", engine.restore_groups)
            self.call("restore_weights", engine.restore_weights)
            self.call("restore_experts", engine.restore_experts)
        except FlyweightError as error:
            self.fail(error)
            raise
        self.released.discard(Tag.WEIGHTS)
        return True

    def call(self, name: str, method: Callable[[], ResultT]) -> ResultT:
        """Call a method of the engine and show its name in `step` meanwhile."""
        self.step = name
        try:
            return named(name, method)
        finally:
            self.step = ""

    def refusal(self, signal: Signal) -> LifecycleError | None:
        try:
            self.condition.after(signal)
        except LifecycleError as refusal:
            return refusal
        return None

    def signal(self, signal: Signal, absent: Collection[Tag] | None = None) -> None:
        before = self.condition
        self.condition = before.after(signal, absent)
        if self.condition == before:
            return
        self._observe()
        announce("state.changed", state=self.state, before=before.state, signal=signal)

    def fail(self, error: FlyweightError) -> None:
        """Enter FAILED: the engine serves nothing until a complete update succeeds."""
        if self.state in (State.SERVING, State.PAUSING) or not self._is_idle:
            self._is_idle = False
            # The state is FAILED either way, and an update pauses again before it writes.
            with suppress(FlyweightError):
                self._pause_engine(monotonic() + _STOP_SECONDS)
        self.failure, self.version = error, None
        absent = self.condition.absent | self.released | {Tag.WEIGHTS}
        self.signal(Signal.FAULT, absent)


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
