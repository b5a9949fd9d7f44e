"""Machine: takes one rank's engine through pause, clear, update, verify and resume.

One operation at a time. The steps themselves are in `steps.py`; how what is in between fails:

    prepare             no rank was touched: the old version is served as before, on all
    update, untouched   the old version is whole on every rank: it is served as before
    update, touched     FAILED on every rank, until a whole update succeeds
    a rank is lost      FAILED on every rank that heard no verdict, whatever it holds
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic, perf_counter, sleep

from flyweight.errors import (
    Busy,
    FlyweightError,
    LifecycleError,
    TransferTimeout,
    VersionError,
)
from flyweight.lifecycle.ranks import Ranks, Verdict
from flyweight.lifecycle.states import ALL_TAGS, Signal, State, Tag
from flyweight.lifecycle.steps import ROUND_SECONDS, Steps, Weights, named
from flyweight.ports import Engine
from flyweight.sync.report import UpdateReport, check_seconds

_CATCH_UPS = 4
_YIELD_SECONDS = 0.001
_NEWER_SECONDS = 0.5
"""How long to ask for something newer than what is held, when the newest is asked for."""
_PASSING = (State.PAUSING, State.CLEARING, State.UPDATING, State.VERIFYING)


@dataclass
class _Round:
    """One update on its way."""

    wanted: int | None
    may_drain: bool
    deadline: float
    is_asked: bool
    is_begun: bool = False
    """Whether the other ranks have heard of it from this one."""
    is_prepared: bool = False
    is_written: bool = False
    """Whether this rank holds something by it that it did not hold before."""
    stood: float = 0.0
    """Since when requests stand still for it."""

    @property
    def purpose(self) -> str:
        """What it is for, in words that are the same on all ranks."""
        version = "the newest" if self.wanted is None else f"version {self.wanted}"
        return f"{'update to' if self.is_asked else 'follow'} {version}"


class Machine(Steps):
    """One rank of a replica: its engine, its weights, its state."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        ranks: Ranks | None = None,
        *,
        should_serve: bool = True,
        observe: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin without weights, standing still; `should_serve` says whether to serve with them.

        `observe` is called after each change of state, in the thread that made it.
        """
        super().__init__(engine, weights, should_serve=should_serve, observe=observe)
        self._ranks = Ranks() if ranks is None else ranks
        self.report: UpdateReport | None = None
        self.pause_seconds = 0.0
        """How long requests stood still for the last update."""
        self.num_rounds = 0
        self._session = ""
        """Of which publisher the version is that was committed."""
        self.is_paused_by_hand = False
        self.pinned: int | None = None
        """The version that was asked for by its number, and is not left for a newer one."""
        self._turn = threading.Lock()
        self._turn_of = ""
        self._source = threading.Lock()
        self._asks: set[object] = set()

    @property
    def percent(self) -> float:
        """How far an update is."""
        if self.state is State.UPDATING:
            return 100 * self._weights.progress
        return 100.0 if self.state is State.VERIFYING else 0.0

    @property
    def is_in_pieces(self) -> bool:
        return self.state in (State.UPDATING, State.VERIFYING)

    @property
    def may_follow(self) -> bool:
        """False while a version that nobody asked for would not be taken."""
        is_there = self.pinned is not None and self.pinned == self.version
        return self.has_weights_memory and not is_there

    # What is asked from outside.

    def pause(self, *, should_abort: bool = False, timeout_seconds: float = 60.0) -> None:
        """Stand still: no request runs and none starts, once this returns."""
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        with self._turn_for("pause", deadline):
            self._all_still("pause", deadline, should_abort=should_abort)
            self._is_meant_to_serve, self.is_paused_by_hand = False, True

    def resume(self, *, timeout_seconds: float = 60.0) -> None:
        """Serve, on all ranks or on none."""
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        with self._turn_for("resume", deadline):
            refusal = self._refusal(Signal.RESUME)
            verdict = self._ranks.agreed(self.version, "", refusal, deadline, what="resume")
            while verdict.is_mixed and monotonic() < deadline:  # a rank that follows gives way
                verdict = self._ranks.agreed(self.version, "", refusal, deadline, what="resume")
            if refusal is not None:
                raise refusal
            if not verdict.is_agreed:
                raise LifecycleError(verdict.text)
            self._is_meant_to_serve, self.is_paused_by_hand = True, False
            if self.state is not State.SERVING:
                self._resume()

    def clear(
        self,
        tags: Collection[Tag] = ALL_TAGS,
        *,
        may_drain: bool = True,
        timeout_seconds: float = 60.0,
    ) -> None:
        """Give memory back, of each tag that still has some. An engine that serves is paused."""
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        with self._turn_for("clear", deadline):
            if not tags:
                return
            todo = [tag for tag in Tag if tag in tags and tag not in self._released]
            self._all_still("clear", deadline, may_drain=may_drain, should_drop=bool(todo))
            if not todo:
                return
            self._signal(Signal.CLEAR)
            try:
                for tag in todo:
                    self._release(tag)
            except FlyweightError as error:
                self._fail(error)
                raise
            self.failure = None
            self._signal(Signal.EMPTIED, self.condition.absent | set(todo))

    def restore(self, *, timeout_seconds: float = 60.0) -> None:
        """Have the cache's memory again. Weights come back by an update."""
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        with self._turn_for("restore", deadline):
            error: FlyweightError | None = None
            try:
                if Tag.KV_CACHE in self._released:
                    self._call("restore_cache", self._engine.restore_cache)
                    self._released.discard(Tag.KV_CACHE)
                    self._signal(Signal.RESTORE, self.condition.absent - {Tag.KV_CACHE})
            except FlyweightError as failure:
                error = failure
            self._hear_all(error, deadline, "restore")
            self._resume_if_meant()

    def update(
        self,
        version: int | None = None,
        *,
        may_drain: bool = True,
        timeout_seconds: float = 60.0,
    ) -> UpdateReport | None:
        """Take a version over, or the newest; on all ranks or on none.

        One that is asked for by its number stays until the newest is asked for again.
        Requests stand still only while it is copied, not while it is waited for. None if the
        version was held already and is being served.
        """
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        with ExitStack() as stack:
            stack.enter_context(self._asking(deadline))
            stack.enter_context(self._turn_for("update", deadline))
            return self._update(_Round(version, may_drain, deadline, is_asked=True))

    def follow(self, *, timeout_seconds: float, is_over: Callable[[], bool]) -> bool:
        """Wait for the next version as one nobody asked for, and take it; False if none came.

        Others take their turns while this waits, and end the wait if they need the source.
        """
        deadline = monotonic() + timeout_seconds

        def stops() -> bool:
            return is_over() or bool(self._asks)

        while self._asks and not is_over():  # first those who asked
            sleep(_YIELD_SECONDS)
        if not self._source.acquire(timeout=timeout_seconds):
            return False
        try:
            if not self.may_follow:
                return False
            with ExitStack() as turn:

                def enter() -> None:
                    turn.enter_context(self._turn_for("update", monotonic() + ROUND_SECONDS))

                round_ = _Round(self.pinned, True, deadline, is_asked=False)
                report = self._update(round_, enter=enter, is_over=stops)
            return report is not None
        finally:
            self._source.release()

    # Rounds.

    def _update(
        self,
        round_: _Round,
        *,
        enter: Callable[[], object] = lambda: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> UpdateReport | None:
        def before(found: int) -> None:
            if round_.is_begun:
                raise LifecycleError(f"version {found} was begun after another attempt had ended")
            if not round_.is_asked:
                round_.deadline = monotonic() + ROUND_SECONDS
            try:
                enter()
            except FlyweightError as busy:
                self._prepare(round_, busy)
            self._prepare(round_, None)
            self.step = "update"
            self._signal(Signal.UPDATE)

        # The newest there is may be the one that is held.
        is_enough = round_.is_asked and round_.wanted is None and self._weights.version is not None
        until = min(round_.deadline, monotonic() + _NEWER_SECONDS if is_enough else inf)
        error: FlyweightError | None = None
        report: UpdateReport | None = None
        was_away = False
        try:
            was_away = round_.is_asked and self._restore_memory()
            report = named(
                "update",
                lambda: self._weights.update(
                    round_.wanted,
                    timeout_seconds=max(until - monotonic(), 0.001),
                    before=before,
                    is_over=is_over,
                ),
            )
            round_.is_written = round_.is_begun
        except TransferTimeout as failure:
            error = None if is_enough and not round_.is_begun else failure
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
        finally:
            self.step = ""
            if was_away and self.state is State.CLEARED and Tag.WEIGHTS in self.condition.absent:
                self._release(Tag.WEIGHTS)  # nothing came: what is cleared takes no memory
            self._resume_if_meant()
        if round_.stood:  # told together, to whoever looks at rounds
            self.pause_seconds = perf_counter() - round_.stood
            self.num_rounds += 1
        return report

    def _all_still(
        self,
        what: str,
        deadline: float,
        *,
        may_drain: bool = True,
        should_abort: bool = False,
        should_drop: bool = False,
    ) -> None:
        """Stand still, on all ranks or on none; an engine that served goes on if one cannot."""
        error: FlyweightError | None = None
        try:
            if should_abort and self.state is State.SERVING:
                self._pause(deadline, should_abort=True)
            self._stand_still(deadline, may_drain)
            if should_drop:
                self._call("drop_cache", self._engine.drop_cache)
        except FlyweightError as failure:
            error = failure
        try:
            self._hear_all(error, deadline, what)
        except FlyweightError:
            self._resume_if_meant()
            raise

    def _hear_all(
        self, error: FlyweightError | None, deadline: float, what: str, *, is_asked: bool = True
    ) -> None:
        """Return once all ranks are ready for the same thing; raise if one is not."""
        verdict = self._ranks.prepared(error, deadline, what=what)
        while verdict.is_mixed and is_asked and monotonic() < deadline:
            # Another rank follows, and gives way; then it is asked for the same.
            sleep(_YIELD_SECONDS)
            verdict = self._ranks.prepared(error, deadline, what=what)
        if verdict.is_lost:
            self._fail(LifecycleError(verdict.text))
        if error is not None:
            raise error
        if not verdict.is_agreed:
            raise LifecycleError(verdict.text)

    @property
    def _is_as_before(self) -> bool:
        """True if the weights are those that were committed last."""
        held = self._weights.version, self._weights.session
        return self.version is not None and held == (self.version, self._session)

    @property
    def _is_served(self) -> bool:
        return self.state is State.SERVING and self.version == self._weights.version

    def _prepare(
        self, round_: _Round, error: FlyweightError | None, *, should_stop: bool = True
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
        self, round_: _Round, report: UpdateReport | None, error: FlyweightError | None
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
                self.version, self.failure = self._weights.version, None
                self._session = self._weights.session
                self.report = report if report is not None else self.report
                self._signal(Signal.COMMITTED, self.condition.absent - {Tag.WEIGHTS})
            return
        failure = error if error is not None else LifecycleError(verdict.text)
        if not verdict.is_kept or round_.is_written or not self._is_as_before:
            self._fail(failure)
        elif self.state in (State.UPDATING, State.VERIFYING):
            self._signal(Signal.KEPT)
        raise failure

    def _agree(self, round_: _Round, error: FlyweightError | None) -> Verdict:
        """Compare versions with the other ranks; those that are behind catch up."""

        def before(found: int) -> None:
            if self.state is State.SERVING:
                round_.stood = perf_counter()
                self._stand_still(round_.deadline)
                self._call("drop_cache", self._engine.drop_cache)
                self._signal(Signal.UPDATE)

        for attempt in range(_CATCH_UPS):
            verdict = self._ranks.agreed(
                self._weights.version,
                self._weights.session,
                error,
                round_.deadline,
                is_as_before=self._is_as_before and not round_.is_written,
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
        self, version: int | None, round_: _Round, before: Callable[[int], None]
    ) -> UpdateReport:
        return self._weights.update(
            version,
            timeout_seconds=max(round_.deadline - monotonic(), 0.001),
            before=before,
            is_over=lambda: False,
        )

    # States and turns.

    def fail(self, error: FlyweightError) -> None:
        """Serve nothing until a whole update succeeds: something happened that this did not see."""
        with self._turn_for("fail", monotonic() + ROUND_SECONDS):
            self._fail(error)

    def retire(self, error: FlyweightError) -> None:
        """Serve nothing any more, unless it is asked for: nobody else could stop this engine."""
        self._is_meant_to_serve = False
        self.fail(error)

    @contextmanager
    def _turn_for(self, what: str, deadline: float) -> Iterator[None]:
        """Be the one operation that runs; waits for a round that nobody asked for."""
        if not self._turn.acquire(timeout=max(deadline - monotonic(), 0.001)):
            raise Busy(f"{self._turn_of} is running, {what} was not begun; wait until it ends")
        try:
            self._turn_of = what
            yield
        finally:
            try:
                if self.state in _PASSING:  # interrupted: nothing may stay so for ever
                    self._fail(LifecycleError(f"{what} was ended in state {self.state}"))
            finally:
                self._turn.release()
                self._observe()

    @contextmanager
    def _asking(self, deadline: float) -> Iterator[None]:
        """Have the source of weights, which who follows gives up for whoever asks."""
        ask = object()
        self._asks.add(ask)
        self._weights.rouse()
        try:
            if not self._source.acquire(timeout=max(deadline - monotonic(), 0.001)):
                raise Busy("another update is running; wait until it ends")
        finally:
            self._asks.discard(ask)
        try:
            yield
        finally:
            self._source.release()
