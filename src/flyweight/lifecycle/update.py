"""Update: one rank's side of an update, from the announcement of a version to its commit.

The source of weights joins the ranks: they all commit, all keep the old version, or all fail.
`engine_steps.py` has the calls to the engine. What a failure between them means:

    before the first write   all ranks serve the old version
    after it                 FAILED on every rank, until a complete update succeeds
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, perf_counter
from typing import Any

from flyweight.errors import FlyweightError, LifecycleError, TransferTimeout, VersionError
from flyweight.lifecycle.engine_steps import ROUND_SECONDS, EngineSteps, named
from flyweight.lifecycle.states import Signal, State, Tag
from flyweight.ports import RankExchange, UpdateOptions, UpdateReport, Weights
from flyweight.spec.manifest import Json

_LEAST_SECONDS = 0.001


@dataclass(kw_only=True)
class Update:
    """One update of one rank. `run` runs it once."""

    steps: EngineSteps
    weights: Weights
    options: UpdateOptions
    """What is requested; the update adds the exchange with the other ranks."""
    deadline: float
    before: Callable[[], object]
    """Called when a version is available; if it raises, nothing changes."""
    on_commit: Callable[[Update, int, UpdateReport | None], None]
    """Called with the version and the report before the engine may serve it."""
    may_drain: bool = True
    is_restore: bool = False
    """True if ranks that hold a version keep it, and only the others load one."""
    has_started: bool = False
    """True once all ranks work on the request."""
    is_begun: bool = False
    """True once the version was announced to this rank."""
    paused_at: float = 0.0
    """When the engine was paused for it."""

    @property
    def purpose(self) -> str:
        """The request in words; equal on all ranks that work on the same request."""
        wanted, is_requested = self.options.version, self.options.is_requested
        version = "the newest" if wanted is None else f"version {wanted}"
        verb = "restore" if self.is_restore else "update to" if is_requested else "follow"
        return f"{verb} {version}"

    @property
    def is_running(self) -> bool:
        """True once this is the operation that runs; until then it only waits for a version."""
        return self.options.is_requested or self.is_begun

    def run(self) -> UpdateReport | None:
        """Run to the end; return None if nobody requested a version and none arrived."""
        steps, report = self.steps, None
        was_away = self.options.is_requested and not steps.has_weights_memory
        try:
            is_held = self.options.is_requested and self._start()
            if not is_held:
                options = replace(self.options, before=self._begin, exchange=self._exchange())
                report = named("update", partial(self.weights.take, options))
            self._commit(report)
        except FlyweightError as failure:
            if not self.is_running:
                if isinstance(failure, TransferTimeout):
                    return None
                raise
            if not self._is_as_before and (steps.version is not None or steps.is_in_pieces):
                steps.fail(failure)
            elif steps.is_in_pieces:
                steps.signal(Signal.KEPT)
            raise
        finally:
            if self.is_running:
                steps.step = ""
                is_cleared = steps.state is State.CLEARED and Tag.WEIGHTS in steps.condition.absent
                if was_away and is_cleared:  # no version arrived: it uses no memory again
                    steps.release(Tag.WEIGHTS)
                steps.resume_if_wanted()
        return report

    def _exchange(self) -> RankExchange | None:
        ranks = self.steps.ranks

        def exchange(
            step: str, error: BaseException | None = None, **facts: Json
        ) -> list[dict[str, Any]]:
            return ranks.exchange(f"{self.purpose}: {step}", self.deadline, error, **facts)

        return None if ranks.num_ranks == 1 else exchange

    def _start(self) -> bool:
        """Begin a request on all ranks; return True if nothing has to be loaded for it."""
        error: FlyweightError | None = None
        try:
            self.steps.restore_memory()
        except FlyweightError as failure:
            error = failure
        version, session = self.weights.version, self.weights.session
        facts: dict[str, Json] = {"version": version, "session": session}
        said = self.steps.agree(
            self.purpose, self.deadline, error, may_keep=self.options.may_keep, **facts
        )
        self.has_started = True
        may_keep = self.is_restore or any(each["may_keep"] for each in said)
        left = max(self.deadline - monotonic(), _LEAST_SECONDS)
        self.options = replace(self.options, may_keep=may_keep, timeout_seconds=left)
        is_alike = all(each["version"] == version and each["session"] == session for each in said)
        return self.is_restore and is_alike and version is not None

    def _begin(self, found: int) -> None:
        """Pause this rank for version `found`, before the first byte is written on any rank."""
        if not self.options.is_requested:
            self.deadline = monotonic() + ROUND_SECONDS
        elif monotonic() > self.deadline:  # its caller was told that it has failed
            raise TransferTimeout(f"version {found} arrived after the deadline of the request")
        self.before()
        self.is_begun = True
        if not self.steps.has_weights_memory:
            raise LifecycleError("the memory of the weights was released meanwhile")
        self._stop()
        self.steps.step = "update"
        self.steps.signal(Signal.UPDATE)

    def _stop(self) -> None:
        self.paused_at = perf_counter()
        self.steps.ensure_idle(self.deadline, self.may_drain)
        self.steps.drop_cache()

    def _commit(self, report: UpdateReport | None) -> None:
        """Commit the version that all ranks hold."""
        steps, version = self.steps, self.weights.version
        if version is None:
            raise VersionError("tensors were replaced after they were filled; update again")
        if steps.state is not State.SERVING or not self._is_as_before:
            if steps.state is not State.UPDATING:  # held already, but not committed
                self._stop()
                steps.signal(Signal.UPDATE)
            steps.signal(Signal.FILLED)
            steps.version, steps.session, steps.failure = version, self.weights.session, None
            self.on_commit(self, version, report)
            steps.signal(Signal.COMMITTED, steps.condition.absent - {Tag.WEIGHTS})
        else:
            self.on_commit(self, version, None)

    @property
    def _is_as_before(self) -> bool:
        """True if the weights are those of the last commit."""
        committed = self.steps.version, self.steps.session
        held = self.weights.version, self.weights.session
        return committed[0] is not None and held == committed
