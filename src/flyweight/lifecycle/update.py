"""Updates: one rank's side of an update, from the announcement of a version to its commit.

The source of weights joins the ranks: they all commit, all keep the old version, or all fail.
`engine_steps.py` has the calls to the engine. What a failure between them means:

    before the first write   all ranks serve the old version
    after it                 FAILED on every rank, until a complete update succeeds
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter
from typing import Any

from flyweight.errors import (
    FlyweightError,
    LifecycleError,
    PeerLost,
    TransferTimeout,
    VersionError,
)
from flyweight.lifecycle.engine_steps import ROUND_SECONDS, EngineSteps, named
from flyweight.lifecycle.states import Signal, State, Tag
from flyweight.ports import Engine, RankExchange, UpdateOptions, UpdateReport, Weights
from flyweight.ranks.agreement import RankAgreement
from flyweight.spec.manifest import Json


@dataclass
class UpdateAttempt:
    """One update that is running."""

    wanted: int | None
    may_drain: bool
    deadline: float
    is_requested: bool
    must_verify: bool = False
    is_restore: bool = False
    """True if ranks that hold a version keep it, and only the others load one."""
    is_held: bool = False
    """True if all ranks hold a version, and this update only has to commit it."""
    is_begun: bool = False
    """True once the version was announced to this rank."""
    paused_at: float = 0.0
    """When the engine was paused for it."""

    @property
    def purpose(self) -> str:
        """The request in words; equal on all ranks that work on the same request."""
        version = "the newest" if self.wanted is None else f"version {self.wanted}"
        verb = "restore" if self.is_restore else "update to" if self.is_requested else "follow"
        return f"{verb} {version}"


class Updates(EngineSteps):
    """The engine's steps, and updates that all ranks commit together. One thread at a time."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        ranks: RankAgreement,
        *,
        should_serve: bool,
        observe: Callable[[], None],
    ) -> None:
        super().__init__(engine, weights, should_serve=should_serve, observe=observe)
        self._ranks = ranks
        self.report: UpdateReport | None = None
        self.pause_seconds = 0.0
        """How long the last update paused requests."""
        self.num_rounds = 0
        self._session = ""
        """The source of the committed version."""
        self.last_version: int | None = None
        """The last committed version, even if it is no longer held."""
        self.went_back_from: int | None = None
        """The version before `last_version` if that was newer, else None."""
        self.num_went_back = 0
        self._answered: tuple[int | None, str] = None, ""
        """The version and source with which the last update request was answered."""
        self.pinned: int | None = None
        """The version that a user requested by number; the engine does not follow newer ones."""

    @property
    def percent(self) -> float:
        """Progress of the running update."""
        if self.state is State.UPDATING:
            return 100 * self._weights.progress
        return 100.0 if self.state is State.VERIFYING else 0.0

    @property
    def is_in_pieces(self) -> bool:
        return self.state in (State.UPDATING, State.VERIFYING)

    def _update(
        self,
        attempt: UpdateAttempt,
        *,
        enter: Callable[[], object] = lambda: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> UpdateReport | None:
        """Run an update to its end; `enter` is called once a version is available."""
        report: UpdateReport | None = None
        was_away = attempt.is_requested and not self.has_weights_memory
        try:
            may_keep = attempt.is_requested and self._start(attempt)
            if not attempt.is_held:
                options = UpdateOptions(
                    version=attempt.wanted,
                    timeout_seconds=max(attempt.deadline - monotonic(), 0.001),
                    before=partial(self._begin, attempt, enter),
                    is_over=is_over,
                    may_keep=may_keep,
                    must_verify=attempt.must_verify,
                    is_requested=attempt.is_requested,
                    exchange=None if self._ranks.num_ranks == 1 else self._exchange(attempt),
                )
                report = named("update", partial(self._weights.take, options))
            self._commit(attempt, report)
        except FlyweightError as failure:
            if not attempt.is_requested and not attempt.is_begun:
                if isinstance(failure, TransferTimeout):
                    return None  # no version arrived
                raise
            if not self._is_as_before and (self.version is not None or self.is_in_pieces):
                self._fail(failure)
            elif self.is_in_pieces:
                self._signal(Signal.KEPT)
            raise
        finally:
            if attempt.is_requested or attempt.is_begun:  # else another operation may be running
                self._settle(attempt, was_away)
        if attempt.paused_at:
            self.pause_seconds = perf_counter() - attempt.paused_at
            self.num_rounds += 1
        return report

    def _settle(self, attempt: UpdateAttempt, was_away: bool) -> None:
        self.step = ""
        if attempt.is_requested and not attempt.is_restore:
            self._answered = self.version, self._session
        if was_away and self.state is State.CLEARED and Tag.WEIGHTS in self.condition.absent:
            self._release(Tag.WEIGHTS)  # no version arrived: a cleared engine uses no memory
        self._resume_if_wanted()

    def _start(self, attempt: UpdateAttempt) -> bool:
        """Begin a request on all ranks; return whether the version that is held may answer it.

        It may if it is not committed yet, or if no update request was answered with it. Otherwise
        an update that transfers nothing would report a version that its caller knows.
        """
        error: FlyweightError | None = None
        try:
            self._restore_memory()
        except FlyweightError as failure:
            error = failure
        held = self._weights.version, self._weights.session
        may_keep = self.version is None or (self.version, self._session) != self._answered
        said = self._agree(
            attempt.purpose,
            attempt.deadline,
            error,
            may_keep=may_keep,
            version=held[0],
            session=held[1],
        )
        if attempt.wanted is None and not attempt.is_restore:
            self.pinned = None  # on all ranks: the newest is requested, whether or not it arrives
        alike = len({(each["version"], each["session"]) for each in said}) == 1
        attempt.is_held = attempt.is_restore and alike and held[0] is not None
        return attempt.is_restore or any(each["may_keep"] for each in said)

    def _exchange(self, attempt: UpdateAttempt) -> RankExchange:
        def exchange(
            step: str, error: BaseException | None = None, **facts: Json
        ) -> list[dict[str, Any]]:
            what = f"{attempt.purpose}: {step}"
            return self._ranks.exchange(what, attempt.deadline, error, **facts)

        return exchange

    def _begin(self, attempt: UpdateAttempt, enter: Callable[[], object], found: int) -> None:
        """Pause this rank for version `found`, before the first byte is written on any rank."""
        if attempt.is_begun:
            raise LifecycleError(f"version {found} was begun after another attempt had ended")
        if not attempt.is_requested:
            attempt.deadline = monotonic() + ROUND_SECONDS
        enter()
        attempt.is_begun = True
        if not self.has_weights_memory:
            raise LifecycleError("the memory of the weights was released meanwhile")
        if not attempt.is_requested and self.pinned != attempt.wanted:
            raise LifecycleError(f"version {self.pinned} was requested meanwhile")
        self._stop(attempt)
        self.step = "update"
        self._signal(Signal.UPDATE)

    def _stop(self, attempt: UpdateAttempt) -> None:
        attempt.paused_at = perf_counter()
        self._ensure_idle(attempt.deadline, attempt.may_drain)
        self._call("drop_cache", self._engine.drop_cache)

    def _commit(self, attempt: UpdateAttempt, report: UpdateReport | None) -> None:
        """Commit the version that all ranks hold."""
        version = self._weights.version
        if version is None:
            raise VersionError("tensors were replaced after they were filled; update again")
        if attempt.is_requested:
            self.pinned = attempt.wanted
        if self._is_served:
            return
        if self.state is not State.UPDATING:  # held already, but not committed
            self._stop(attempt)
            self._signal(Signal.UPDATE)
        self._signal(Signal.FILLED)
        self.version, self.failure = version, None
        self._session = self._weights.session
        self._note_step_back(version)
        self.report = report if report is not None else self.report
        self._signal(Signal.COMMITTED, self.condition.absent - {Tag.WEIGHTS})

    def _note_step_back(self, version: int | None) -> None:
        """Record for status and metrics whether the version is older than the last one."""
        last, self.last_version = self.last_version, version
        is_older = last is not None and version is not None and version < last
        self.went_back_from = last if is_older else None
        self.num_went_back += is_older

    def _agree(
        self, what: str, deadline: float, error: FlyweightError | None = None, **facts: Json
    ) -> list[dict[str, Any]]:
        """Return the facts of all ranks once all are ready for an operation; raise if one is not.

        If a rank is lost, the engine has failed.
        """
        try:
            return self._ranks.agree(what, deadline, error, **facts)
        except PeerLost as lost:
            self._fail(lost)
            if error is not None:
                raise error from lost
            raise LifecycleError(str(lost)) from lost

    @property
    def _is_as_before(self) -> bool:
        """True if the weights are those of the last commit."""
        held = self._weights.version, self._weights.session
        return self.version is not None and held == (self.version, self._session)

    @property
    def _is_served(self) -> bool:
        return self.state is State.SERVING and self._is_as_before
