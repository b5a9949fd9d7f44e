"""Machine: what may be asked of one rank's engine: pause, clear, restore, update, resume.

One operation at a time, each in its turn; in each the ranks hear of each other, so that none
stands still, or serves, alone. Who follows holds the source of weights while it waits, and
gives it up for who asks; it takes its turn only when a version is there. `rounds.py` has what
an update does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic, sleep

from flyweight.checks import check_seconds
from flyweight.errors import Busy, FlyweightError, LifecycleError
from flyweight.lifecycle.ranks import YIELD_SECONDS, Ranks, Verdict
from flyweight.lifecycle.states import ALL_TAGS, Signal, State, Tag, tags_named
from flyweight.lifecycle.steps import ROUND_SECONDS
from flyweight.lifecycle.update_rounds import Round, Rounds
from flyweight.ports import Engine, UpdateReport, Weights

_LEAST_SECONDS = 0.001
_PASSING = (State.PAUSING, State.CLEARING, State.UPDATING, State.VERIFYING)


class Machine(Rounds):
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
        ranks = Ranks() if ranks is None else ranks
        super().__init__(engine, weights, ranks, should_serve=should_serve, observe=observe)
        self.is_paused_by_hand = False
        self._turn, self._source = threading.Lock(), threading.Lock()
        self._turn_of = ""
        """The operation that has its turn, or had it last."""
        self._asks: set[object] = set()

    @property
    def may_follow(self) -> bool:
        """False while a version that nobody asked for would not be taken."""
        is_there = self.pinned is not None and self.pinned == self.version
        return self.has_weights_memory and not is_there

    # What is asked from outside.

    def pause(
        self,
        *,
        should_abort: bool = False,
        should_resume: bool = False,
        timeout_seconds: float = 60.0,
    ) -> None:
        """Stand still: no request runs and none starts, once this returns.

        With `should_resume` it then goes on as before, unless a rank was paused by hand: that
        is so for all ranks.
        """
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        with self._turn_for("pause", deadline):
            verdict = self._all_still("pause", deadline, should_abort=should_abort)
            if should_resume and not verdict.was_paused:
                self._resume_if_meant()
            else:
                self._is_meant_to_serve, self.is_paused_by_hand = False, True

    def resume(self, *, timeout_seconds: float = 60.0) -> None:
        """Serve, on all ranks or on none."""
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        with self._turn_for("resume", deadline):
            refusal = self._refusal(Signal.RESUME)
            verdict = self._ranks.agreed(self.version, "", refusal, deadline, what="resume")
            while verdict.is_mixed and not verdict.is_over:  # a rank that follows gives way
                sleep(YIELD_SECONDS)
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
        tags: Collection[str] = ALL_TAGS,
        *,
        may_drain: bool = True,
        timeout_seconds: float = 60.0,
    ) -> None:
        """Give memory back, of each tag that still has some. An engine that serves is paused."""
        tags = tags_named(tags)
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
            self._hear_all(None, deadline, "restore")
            error: FlyweightError | None = None
            try:
                if Tag.KV_CACHE in self._released:
                    self._call("restore_cache", self._engine.restore_cache)
                    self._released.discard(Tag.KV_CACHE)
                    self._signal(Signal.RESTORE, self.condition.absent - {Tag.KV_CACHE})
            except FlyweightError as failure:
                error = failure
            self._hear_all(error, deadline, "serve with what was restored")
            self._resume_if_meant()

    def update(
        self,
        version: int | None = None,
        *,
        may_drain: bool = True,
        must_verify: bool = False,
        is_restore: bool = False,
        timeout_seconds: float = 60.0,
        is_over: Callable[[], bool] = lambda: False,
    ) -> UpdateReport | None:
        """Take a version over, or one that is newer than what is held; on all ranks or on none.

        Without a version this waits for a newer one until its deadline, and raises
        TransferTimeout if none comes. Nothing is transferred if the version that is named is
        held, or if one came by following since the last update was answered, or if a whole one
        is held and not served; each time the source has to confirm it. With `is_restore` ranks
        that hold a version keep it. With `must_verify` a source without checksums is refused.
        `is_over`, and a `wake` of the source, end the wait early.

        A version that is asked for by its number stays until the newest is asked for again.
        The engine pauses requests only while it is copied, not while it is waited for.
        """
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        round_ = Round(
            version,
            may_drain,
            deadline,
            is_asked=True,
            must_verify=must_verify,
            is_restore=is_restore,
        )
        with self._asking(deadline), self._turn_for("update", deadline):
            return self._update(round_, is_over=is_over)

    def follow(self, *, timeout_seconds: float, is_over: Callable[[], bool]) -> bool:
        """Wait for the next version as one nobody asked for, and take it; False if none came.

        Others take their turns while this waits, and end the wait if they need the source.
        """
        deadline = monotonic() + timeout_seconds

        def stops() -> bool:
            return is_over() or bool(self._asks)

        while self._asks and not is_over():  # first those who asked
            sleep(YIELD_SECONDS)
        if not self._source.acquire(timeout=timeout_seconds):
            return False
        try:
            if not self.may_follow:
                return False
            with ExitStack() as turn:

                def enter() -> None:
                    turn.enter_context(self._turn_for("update", monotonic() + ROUND_SECONDS))

                round_ = Round(self.pinned, True, deadline, is_asked=False)
                report = self._update(round_, enter=enter, is_over=stops)
            return report is not None
        finally:
            self._source.release()

    def fail(self, error: FlyweightError, *, if_so: Callable[[], bool] = lambda: True) -> bool:
        """Serve nothing until a whole update succeeds: something happened that this did not see.

        Unless `if_so`, asked when nothing else runs, says otherwise; returns what it says.
        """
        with self._turn_for("fail", monotonic() + ROUND_SECONDS):
            is_so = if_so()
            if is_so:
                self._fail(error)
            return is_so

    def retire(self, error: FlyweightError) -> None:
        """Serve nothing any more, unless it is asked for: nobody else could stop this engine."""
        self._is_meant_to_serve = False
        self.fail(error)

    def _all_still(
        self,
        what: str,
        deadline: float,
        *,
        may_drain: bool = True,
        should_abort: bool = False,
        should_drop: bool = False,
    ) -> Verdict:
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
            return self._hear_all(error, deadline, what, was_paused=self.is_paused_by_hand)
        except FlyweightError:
            self._resume_if_meant()
            raise

    # Turns.

    @contextmanager
    def _turn_for(self, what: str, deadline: float) -> Iterator[None]:
        """Be the one operation that runs; waits for what runs until the deadline."""
        if not self._turn.acquire(timeout=max(deadline - monotonic(), _LEAST_SECONDS)):
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
        self._weights.wake()
        try:
            if not self._source.acquire(timeout=max(deadline - monotonic(), _LEAST_SECONDS)):
                raise Busy("another update is running; wait until it ends")
        finally:
            self._asks.discard(ask)
        try:
            yield
        finally:
            self._source.release()
