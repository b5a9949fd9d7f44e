"""Updates: one rank's side of an update, from the announcement of a version to its commit.

`engine_steps.py` has the calls to the engine. What a failure between them means:

    prepare             no rank has written: all ranks serve the old version
    update, unwritten   the old version is complete on every rank: all ranks serve it
    update, written     FAILED on every rank, until a complete update succeeds
    a rank is lost      FAILED on every rank that received no verdict
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter, sleep

from flyweight.errors import Busy, FlyweightError, LifecycleError, TransferTimeout, VersionError
from flyweight.lifecycle.agreement import YIELD_SECONDS, RankAgreement, Verdict
from flyweight.lifecycle.engine_steps import ROUND_SECONDS, EngineSteps, named
from flyweight.lifecycle.states import Signal, State, Tag
from flyweight.ports import Engine, UpdateReport, Weights

_CATCH_UPS = 4


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
    is_begun: bool = False
    """True once this rank has announced the update to the others."""
    is_prepared: bool = False
    is_written: bool = False
    """True once this update has changed the weights of this rank."""
    held: int | None = None
    """The version in this rank's last statement to the others."""
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

        error: FlyweightError | None = None
        report: UpdateReport | None = None
        was_away = False
        may_keep = self._may_all_keep(attempt)
        try:
            was_away = attempt.is_requested and self._restore_memory()
            if not attempt.is_restore or self._weights.version is None:
                report = named(
                    "update",
                    lambda: self._weights.update(
                        attempt.wanted,
                        timeout_seconds=max(attempt.deadline - monotonic(), 0.001),
                        before=partial(self._begin, attempt, enter),
                        is_over=is_over,
                        may_keep=may_keep,
                        must_verify=attempt.must_verify,
                    ),
                )
            attempt.is_written = attempt.is_begun
        except FlyweightError as failure:
            error = failure
        if not attempt.is_requested and not attempt.is_begun:
            if error is None or isinstance(error, TransferTimeout):
                return None  # no version arrived
            raise error
        try:
            if (
                not attempt.is_begun
            ):  # already held, or none arrived: the other ranks wait for the statement
                self._prepare(attempt, error, should_stop=error is None and not self._is_served)
            if attempt.is_prepared:
                self._end(attempt, report, error)
            elif error is not None:
                raise error
        except FlyweightError as failure:
            if self.version is not None and self._weights.version is None:
                self._fail(failure)  # its tensors were replaced
            raise
        finally:
            self.step = ""
            if attempt.is_requested and not attempt.is_restore:
                self._answered = self.version, self._session
            if was_away and self.state is State.CLEARED and Tag.WEIGHTS in self.condition.absent:
                self._release(Tag.WEIGHTS)  # no version arrived: a cleared engine uses no memory
            self._resume_if_wanted()
        if attempt.paused_at:
            self.pause_seconds = perf_counter() - attempt.paused_at
            self.num_rounds += 1
        return report

    def _begin(self, attempt: UpdateAttempt, enter: Callable[[], object], found: int) -> None:
        """Pause all ranks for version `found`, before the first byte is written."""
        if attempt.is_begun:
            raise LifecycleError(f"version {found} was begun after another attempt had ended")
        if not attempt.is_requested:
            attempt.deadline = monotonic() + ROUND_SECONDS
        try:
            enter()
        except Busy as busy:
            self._ranks.report_busy(busy, attempt.deadline, what=attempt.purpose)
            raise
        self._prepare(attempt, None)
        self.step = "update"
        self._signal(Signal.UPDATE)

    def _prepare(
        self, attempt: UpdateAttempt, error: FlyweightError | None, *, should_stop: bool = True
    ) -> None:
        """Pause this rank and wait until all ranks have paused; raise if one cannot."""
        attempt.is_begun = True
        if error is None and should_stop:
            try:
                if not self.has_weights_memory:
                    raise LifecycleError("the memory of the weights was released meanwhile")
                if not attempt.is_requested and self.pinned != attempt.wanted:
                    raise LifecycleError(f"version {self.pinned} was requested meanwhile")
                attempt.paused_at = perf_counter()
                self._ensure_idle(attempt.deadline, attempt.may_drain)
                self._call("drop_cache", self._engine.drop_cache)
            except FlyweightError as failure:
                error = failure
        self._wait_for_ranks(
            error, attempt.deadline, attempt.purpose, is_requested=attempt.is_requested
        )
        attempt.is_prepared = True

    def _end(
        self, attempt: UpdateAttempt, report: UpdateReport | None, error: FlyweightError | None
    ) -> None:
        """Compare with the other ranks; then all commit, all keep the old version, or all fail."""
        if error is None and not self._is_served and self.state is not State.UPDATING:
            self._signal(Signal.UPDATE)  # held already, but not committed
        if error is None and self.state is State.UPDATING:
            self._signal(Signal.FILLED)
        verdict = self._agree(attempt, error)
        if verdict.is_agreed:
            if attempt.is_requested:
                self.pinned = attempt.wanted
            if self.state is not State.SERVING:
                self.version, self.failure = attempt.held, None
                self._session = self._weights.session
                self._note_step_back(attempt.held)
                self.report = report if report is not None else self.report
                self._signal(Signal.COMMITTED, self.condition.absent - {Tag.WEIGHTS})
            return
        failure = error if error is not None else LifecycleError(verdict.text)
        if not verdict.is_kept or attempt.is_written or not self._is_as_before:
            self._fail(failure)
        elif self.state in (State.UPDATING, State.VERIFYING):
            self._signal(Signal.KEPT)
        raise failure

    def _note_step_back(self, version: int | None) -> None:
        """Record for status and metrics whether the version is older than the last one."""
        last, self.last_version = self.last_version, version
        is_older = last is not None and version is not None and version < last
        self.went_back_from = last if is_older else None
        self.num_went_back += is_older

    def _agree(self, attempt: UpdateAttempt, error: FlyweightError | None) -> Verdict:
        """Compare versions with the other ranks; ranks with an older version catch up."""

        def before(found: int) -> None:
            if self.state is State.SERVING:
                attempt.paused_at = perf_counter()
                self._ensure_idle(attempt.deadline)
                self._call("drop_cache", self._engine.drop_cache)
                self._signal(Signal.UPDATE)

        for count in range(_CATCH_UPS):
            attempt.held = self._weights.version
            verdict = self._ranks.agreed(
                attempt.held,
                self._weights.session,
                error,
                attempt.deadline,
                is_as_before=not attempt.is_written and self._is_as_before,
            )
            if verdict.catch_up is None or error is not None:
                return verdict
            # First, older ranks load the newest version. If it is gone, all load the next one.
            wanted = verdict.catch_up if count == 0 else None
            if wanted is None or self._weights.version != wanted:
                try:
                    named("update", partial(self._catch_up, wanted, attempt, before))
                except FlyweightError as failure:
                    is_gone = isinstance(failure, VersionError) and wanted is not None
                    if not is_gone or self._weights.version is None:
                        error = failure
                if self.state is State.UPDATING and error is None:
                    self._signal(Signal.FILLED)
        return Verdict(text="the ranks were given different versions again and again")

    def _catch_up(
        self, version: int | None, attempt: UpdateAttempt, before: Callable[[int], None]
    ) -> UpdateReport:
        return self._weights.update(
            version,
            timeout_seconds=max(attempt.deadline - monotonic(), 0.001),
            before=before,
            is_over=lambda: False,
            must_verify=attempt.must_verify,
        )

    def _wait_for_ranks(
        self,
        error: FlyweightError | None,
        deadline: float,
        what: str,
        *,
        is_requested: bool = True,
        was_paused: bool = False,
        may_keep: bool = False,
    ) -> Verdict:
        """Return once all ranks are ready for the same operation; raise if one is not."""
        say = partial(
            self._ranks.prepared,
            error,
            deadline,
            what=what,
            is_requested=is_requested,
            was_paused=was_paused,
            may_keep=may_keep,
        )
        verdict = say()
        while verdict.is_mixed and is_requested and not verdict.is_over:
            # Another rank is following. It gives way, and then gets the same request.
            sleep(YIELD_SECONDS)
            verdict = say()
        if verdict.is_lost:
            self._fail(LifecycleError(verdict.text))
        if error is not None:
            raise error
        if not verdict.is_agreed:
            raise LifecycleError(verdict.text)
        return verdict

    def _may_all_keep(self, attempt: UpdateAttempt) -> bool:
        """True if the version that is held may answer this update, on this rank or another.

        It may if it is not committed yet, or if no update request was answered with it. Otherwise
        an update that transfers nothing would report a version that its caller knows. A restarted
        rank loads the version that the others serve, and they keep it.
        """
        if not attempt.is_requested:
            return False
        may_keep = self.version is None or (self.version, self._session) != self._answered
        if attempt.wanted is not None or attempt.is_restore:
            return may_keep
        what = f"look for {attempt.purpose}"
        verdict = self._wait_for_ranks(None, attempt.deadline, what, may_keep=may_keep)
        self.pinned = None  # on all ranks: the newest is requested, whether or not it arrives
        return verdict.may_keep

    @property
    def _is_as_before(self) -> bool:
        """True if the weights are those of the last commit."""
        held = self._weights.version, self._weights.session
        return self.version is not None and held == (self.version, self._session)

    @property
    def _is_served(self) -> bool:
        return self.state is State.SERVING and self._is_as_before
