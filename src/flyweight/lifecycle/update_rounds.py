"""Rounds: one rank's part in an update, from the first it hears of a version to its commit.

Steps of the engine are in `steps.py`; how what is in between fails:

    prepare             no rank was touched: the old version is served as before, on all
    update, untouched   the old version is whole on every rank: it is served as before
    update, touched     FAILED on every rank, until a whole update succeeds
    a rank is lost      FAILED on every rank that heard no verdict, whatever it holds
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter, sleep

from flyweight.errors import Busy, FlyweightError, LifecycleError, TransferTimeout, VersionError
from flyweight.lifecycle.ranks import YIELD_SECONDS, Ranks, Verdict
from flyweight.lifecycle.states import Signal, State, Tag
from flyweight.lifecycle.steps import ROUND_SECONDS, Steps, named
from flyweight.ports import Engine, UpdateReport, Weights

_CATCH_UPS = 4


@dataclass
class Round:
    """One update on its way."""

    wanted: int | None
    may_drain: bool
    deadline: float
    is_asked: bool
    must_verify: bool = False
    is_restore: bool = False
    """Whether a rank that holds a version keeps it: only those that hold none take one."""
    is_begun: bool = False
    """Whether the other ranks have heard of it from this one."""
    is_prepared: bool = False
    is_written: bool = False
    """Whether this rank holds something by it that it did not hold before."""
    held: int | None = None
    """The version that this rank held when it said so last."""
    stood: float = 0.0
    """Since when requests stand still for it."""

    @property
    def purpose(self) -> str:
        """What it is for, in words that are the same on all ranks."""
        version = "the newest" if self.wanted is None else f"version {self.wanted}"
        verb = "restore" if self.is_restore else "update to" if self.is_asked else "follow"
        return f"{verb} {version}"


class Rounds(Steps):
    """An engine's steps, and the updates that all ranks agree on. Not for two threads at once."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        ranks: Ranks,
        *,
        should_serve: bool,
        observe: Callable[[], None],
    ) -> None:
        super().__init__(engine, weights, should_serve=should_serve, observe=observe)
        self._ranks = ranks
        self.report: UpdateReport | None = None
        self.pause_seconds = 0.0
        """How long requests stood still for the last update."""
        self.num_rounds = 0
        self._session = ""
        """Of which publisher the version is that was committed."""
        self.last_version: int | None = None
        """The version that was committed last, whatever became of it."""
        self.went_back_from: int | None = None
        """The version before the one committed last, if that one is older."""
        self.num_went_back = 0
        self._answered: tuple[int | None, str] = None, ""
        """The version that was committed when the last update was answered, and whose it was."""
        self.pinned: int | None = None
        """The version that was asked for by its number, and is not left for a newer one."""

    @property
    def percent(self) -> float:
        """How far an update is."""
        if self.state is State.UPDATING:
            return 100 * self._weights.progress
        return 100.0 if self.state is State.VERIFYING else 0.0

    @property
    def is_in_pieces(self) -> bool:
        return self.state in (State.UPDATING, State.VERIFYING)

    def _update(
        self,
        round_: Round,
        *,
        enter: Callable[[], object] = lambda: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> UpdateReport | None:
        """Take part in a round, to its end; `enter` is called when a version is there."""

        def before(found: int) -> None:
            if round_.is_begun:
                raise LifecycleError(f"version {found} was begun after another attempt had ended")
            if not round_.is_asked:
                round_.deadline = monotonic() + ROUND_SECONDS
            try:
                enter()
            except Busy as busy:
                self._ranks.excuse(busy, round_.deadline, what=round_.purpose)
                raise
            self._prepare(round_, None)
            self.step = "update"
            self._signal(Signal.UPDATE)

        error: FlyweightError | None = None
        report: UpdateReport | None = None
        was_away = False
        may_keep = self._may_all_keep(round_)
        try:
            was_away = round_.is_asked and self._restore_memory()
            if not round_.is_restore or self._weights.version is None:
                report = named(
                    "update",
                    lambda: self._weights.update(
                        round_.wanted,
                        timeout_seconds=max(round_.deadline - monotonic(), 0.001),
                        before=before,
                        is_over=is_over,
                        may_keep=may_keep,
                        must_verify=round_.must_verify,
                    ),
                )
            round_.is_written = round_.is_begun
        except FlyweightError as failure:
            error = failure
        if not round_.is_asked and not round_.is_begun:
            if error is None or isinstance(error, TransferTimeout):
                return None  # none came
            raise error
        try:
            if not round_.is_begun:  # it was held already, or never came: the others wait to hear
                self._prepare(round_, error, should_stop=error is None and not self._is_served)
            if round_.is_prepared:
                self._end(round_, report, error)
            elif error is not None:
                raise error
        except FlyweightError as failure:
            if self.version is not None and self._weights.version is None:
                self._fail(failure)  # its tensors were replaced, as was found in looking
            raise
        finally:
            self.step = ""
            if round_.is_asked and not round_.is_restore:
                self._answered = self.version, self._session
            if was_away and self.state is State.CLEARED and Tag.WEIGHTS in self.condition.absent:
                self._release(Tag.WEIGHTS)  # nothing came: what is cleared takes no memory
            self._resume_if_meant()
        if round_.stood:  # told together, to whoever looks at rounds
            self.pause_seconds = perf_counter() - round_.stood
            self.num_rounds += 1
        return report

    def _prepare(
        self, round_: Round, error: FlyweightError | None, *, should_stop: bool = True
    ) -> None:
        """Stand still, and hear that all ranks do; raise if one cannot, before any is touched."""
        round_.is_begun = True
        if error is None and should_stop:
            try:
                if not self.has_weights_memory:
                    raise LifecycleError("the memory of the weights was given back meanwhile")
                if not round_.is_asked and self.pinned != round_.wanted:
                    raise LifecycleError(f"version {self.pinned} was asked for meanwhile")
                round_.stood = perf_counter()
                self._stand_still(round_.deadline, round_.may_drain)
                self._call("drop_cache", self._engine.drop_cache)
            except FlyweightError as failure:
                error = failure
        self._hear_all(error, round_.deadline, round_.purpose, is_asked=round_.is_asked)
        round_.is_prepared = True

    def _end(
        self, round_: Round, report: UpdateReport | None, error: FlyweightError | None
    ) -> None:
        """Hear what the other ranks hold, and commit, keep the old version, or fail: all alike."""
        if error is None and not self._is_served and self.state is not State.UPDATING:
            self._signal(Signal.UPDATE)  # it was held already, and not committed
        if error is None and self.state is State.UPDATING:
            self._signal(Signal.FILLED)
        verdict = self._agree(round_, error)
        if verdict.is_agreed:
            if round_.is_asked:
                self.pinned = round_.wanted
            if self.state is not State.SERVING:
                self.version, self.failure = round_.held, None
                self._session = self._weights.session
                self._note_step_back(round_.held)
                self.report = report if report is not None else self.report
                self._signal(Signal.COMMITTED, self.condition.absent - {Tag.WEIGHTS})
            return
        failure = error if error is not None else LifecycleError(verdict.text)
        if not verdict.is_kept or round_.is_written or not self._is_as_before:
            self._fail(failure)
        elif self.state in (State.UPDATING, State.VERIFYING):
            self._signal(Signal.KEPT)
        raise failure

    def _note_step_back(self, version: int | None) -> None:
        """Remember for status and metrics whether the version is older than the one before."""
        last, self.last_version = self.last_version, version
        is_older = last is not None and version is not None and version < last
        self.went_back_from = last if is_older else None
        self.num_went_back += is_older

    def _agree(self, round_: Round, error: FlyweightError | None) -> Verdict:
        """Compare versions with the other ranks; those that are behind catch up."""

        def before(found: int) -> None:
            if self.state is State.SERVING:
                round_.stood = perf_counter()
                self._stand_still(round_.deadline)
                self._call("drop_cache", self._engine.drop_cache)
                self._signal(Signal.UPDATE)

        for attempt in range(_CATCH_UPS):
            round_.held = self._weights.version
            verdict = self._ranks.agreed(
                round_.held,
                self._weights.session,
                error,
                round_.deadline,
                is_as_before=not round_.is_written and self._is_as_before,
            )
            if verdict.catch_up is None or error is not None:
                return verdict
            # First those behind take what the others have; if it is gone, all take what comes next.
            wanted = verdict.catch_up if attempt == 0 else None
            if wanted is None or self._weights.version != wanted:
                try:
                    named("update", partial(self._catch_up, wanted, round_, before))
                except FlyweightError as failure:
                    is_gone = isinstance(failure, VersionError) and wanted is not None
                    if not is_gone or self._weights.version is None:
                        error = failure
                if self.state is State.UPDATING and error is None:
                    self._signal(Signal.FILLED)
        return Verdict(text="the ranks were given different versions again and again")

    def _catch_up(
        self, version: int | None, round_: Round, before: Callable[[int], None]
    ) -> UpdateReport:
        return self._weights.update(
            version,
            timeout_seconds=max(round_.deadline - monotonic(), 0.001),
            before=before,
            is_over=lambda: False,
            must_verify=round_.must_verify,
        )

    def _hear_all(
        self,
        error: FlyweightError | None,
        deadline: float,
        what: str,
        *,
        is_asked: bool = True,
        was_paused: bool = False,
        may_keep: bool = False,
    ) -> Verdict:
        """Return once all ranks are ready for the same thing; raise if one is not."""
        say = partial(
            self._ranks.prepared,
            error,
            deadline,
            what=what,
            is_asked=is_asked,
            was_paused=was_paused,
            may_keep=may_keep,
        )
        verdict = say()
        while verdict.is_mixed and is_asked and not verdict.is_over:
            # Another rank follows, and gives way; then it is asked for the same.
            sleep(YIELD_SECONDS)
            verdict = say()
        if verdict.is_lost:
            self._fail(LifecycleError(verdict.text))
        if error is not None:
            raise error
        if not verdict.is_agreed:
            raise LifecycleError(verdict.text)
        return verdict

    def _may_all_keep(self, round_: Round) -> bool:
        """True if the version that is held may answer this update, on this rank or on another.

        It may if none is committed, or no update was answered with it: else an update that brings
        nothing would report a version that its caller has had. A rank that was started again
        takes the version that the others serve, and they keep it.
        """
        if not round_.is_asked:
            return False
        may_keep = self.version is None or (self.version, self._session) != self._answered
        if round_.wanted is not None or round_.is_restore:
            return may_keep
        what = f"look for {round_.purpose}"
        verdict = self._hear_all(None, round_.deadline, what, may_keep=may_keep)
        self.pinned = None  # on all ranks: the newest is asked for, whether or not it comes in time
        return verdict.may_keep

    @property
    def _is_as_before(self) -> bool:
        """True if the weights are those that were committed last."""
        held = self._weights.version, self._weights.session
        return self.version is not None and held == (self.version, self._session)

    @property
    def _is_served(self) -> bool:
        return self.state is State.SERVING and self._is_as_before
