"""Operations: pause, resume, clear, restore, update and follow, on one rank's engine.

One operation runs at a time, and the ranks of a replica run it together, so that none pauses
or serves alone. `follow` holds the source of weights while it waits for a version, gives it up
when an update is requested, and becomes the running operation only when a version is there.
`update.py` has the steps of an update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic, sleep

from flyweight.checks import check_seconds
from flyweight.errors import Busy, FlyweightError, LifecycleError, PeerLost, SpecError
from flyweight.lifecycle.engine_steps import ROUND_SECONDS
from flyweight.lifecycle.states import ALL_TAGS, Signal, State, Tag, tags_named
from flyweight.lifecycle.update import UpdateAttempt, Updates
from flyweight.ports import Engine, UpdateReport, Weights
from flyweight.ranks.agreement import YIELD_SECONDS, RankAgreement

_LEAST_SECONDS = 0.001
_TURN_SECONDS = 2.0
"""How long a version that was not requested waits for its turn, if there are several ranks."""
_PASSING = (State.PAUSING, State.CLEARING, State.UPDATING, State.VERIFYING)


class Operations(Updates):
    """The operations of one rank of a replica, on its engine and its weights."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        ranks: RankAgreement | None = None,
        *,
        should_serve: bool = True,
        observe: Callable[[], None] = lambda: None,
    ) -> None:
        """Start CLEARED: paused, without weights.

        Args:
            engine: the engine of this rank.
            weights: the source of its weights.
            ranks: how it agrees with the other ranks; None for a replica of one rank.
            should_serve: whether the engine resumes after its first update.
            observe: called after each change of state, in the thread that made it.
        """
        ranks = RankAgreement() if ranks is None else ranks
        if weights.num_ranks not in (None, ranks.num_ranks):
            raise SpecError(
                f"the engine has {ranks.num_ranks} ranks and its weights come for "
                f"{weights.num_ranks}; give the replicas of all ranks one name: "
                f"Replica(..., name=, rank=, num_ranks={ranks.num_ranks})"
            )
        super().__init__(engine, weights, ranks, should_serve=should_serve, observe=observe)
        self.is_paused_by_hand = False
        self._turn, self._source = threading.Lock(), threading.Lock()
        self._turn_of = ""
        """The operation that is running, or ran last."""
        self._waiting_requests: set[object] = set()

    @property
    def may_follow(self) -> bool:
        """False while `follow` would not load a new version."""
        is_there = self.pinned is not None and self.pinned == self.version
        return self.has_weights_memory and not is_there

    # Operations.

    def pause(
        self,
        *,
        should_abort: bool = False,
        should_resume: bool = False,
        timeout_seconds: float = 60.0,
    ) -> None:
        """Pause: once this returns, no request runs and none starts.

        With `should_abort` running requests are aborted, otherwise they finish. With
        `should_resume` the engine then serves again, unless a user paused one of the ranks before.
        """
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        with self._exclusively("pause", deadline):
            was_paused = self._pause_all_ranks("pause", deadline, should_abort=should_abort)
            if should_resume and not was_paused:
                self._resume_if_wanted()
            else:
                self._should_serve, self.is_paused_by_hand = False, True

    def resume(self, *, timeout_seconds: float = 60.0) -> None:
        """Serve again, on all ranks or on none."""
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        with self._exclusively("resume", deadline):
            refusal = self._refusal(Signal.RESUME)
            try:
                said = self._ranks.agree("resume", deadline, refusal, version=self.version)
            except PeerLost as lost:
                raise LifecycleError(str(lost)) from lost
            versions = [each["version"] for each in said]
            if len(set(versions)) > 1:
                raise LifecycleError(f"the ranks hold versions {versions}")
            self._should_serve, self.is_paused_by_hand = True, False
            if self.state is not State.SERVING:
                self._resume()

    def clear(
        self,
        tags: Collection[str] = ALL_TAGS,
        *,
        may_drain: bool = True,
        timeout_seconds: float = 60.0,
    ) -> None:
        """Release the memory of these tags. An engine that serves is paused first."""
        tags = tags_named(tags)
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        with self._exclusively("clear", deadline):
            if not tags:
                return
            todo = [tag for tag in Tag if tag in tags and tag not in self._released]
            self._pause_all_ranks("clear", deadline, may_drain=may_drain, should_drop=bool(todo))
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
        """Allocate the memory of the cache again. An update restores the weights."""
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        with self._exclusively("restore", deadline):
            self._agree("restore", deadline)
            error: FlyweightError | None = None
            try:
                if Tag.KV_CACHE in self._released:
                    self._call("restore_cache", self._engine.restore_cache)
                    self._released.discard(Tag.KV_CACHE)
                    self._signal(Signal.RESTORE, self.condition.absent - {Tag.KV_CACHE})
            except FlyweightError as failure:
                error = failure
            self._agree("serve with what was restored", deadline, error)
            self._resume_if_wanted()

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
        """Load a version, or one that is newer than the current one; on all ranks or on none.

        Without `version` this waits for a newer one until the deadline, and raises
        TransferTimeout if none arrives. Nothing is transferred if the engine already holds
        `version`, if `follow` loaded one since the last update request, or if a complete version
        is held and not served; each time the source has to confirm it.

        A version that was requested by number stays until the newest is requested again.
        Requests are paused only during the copy, not while this waits for a version.

        Args:
            version: the version to load; None for the next newer one.
            may_drain: whether running requests are drained; otherwise they refuse the update.
            must_verify: refuse a source without checksums.
            is_restore: ranks that hold a version keep it.
            timeout_seconds: for the whole operation.
            is_over: checked while waiting; True ends the wait early, after the source's `wake`.
        """
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        attempt = UpdateAttempt(
            version,
            may_drain,
            deadline,
            is_requested=True,
            must_verify=must_verify,
            is_restore=is_restore,
        )
        with self._source_for_request(deadline), self._exclusively("update", deadline):
            return self._update(attempt, is_over=is_over)

    def follow(self, *, timeout_seconds: float, is_over: Callable[[], bool]) -> bool:
        """Wait for the next version and load it; return False if none arrived.

        Other operations run while this waits; an update request ends the wait.
        """
        deadline = monotonic() + timeout_seconds

        def stops() -> bool:
            return is_over() or bool(self._waiting_requests)

        while self._waiting_requests and not is_over():  # requests go first
            sleep(YIELD_SECONDS)
        if not self._source.acquire(timeout=timeout_seconds):
            return False
        try:
            if not self.may_follow:
                return False
            with ExitStack() as turn:

                def enter() -> None:
                    # Another rank may wait for what runs here, and this one holds up its round.
                    is_alone = self._ranks.num_ranks == 1
                    seconds = ROUND_SECONDS if is_alone else min(ROUND_SECONDS, _TURN_SECONDS)
                    turn.enter_context(self._exclusively("update", monotonic() + seconds))

                attempt = UpdateAttempt(self.pinned, True, deadline, is_requested=False)
                report = self._update(attempt, enter=enter, is_over=stops)
            return report is not None
        finally:
            self._source.release()

    def fail(self, error: FlyweightError, *, if_so: Callable[[], bool] = lambda: True) -> bool:
        """Enter FAILED because of something that happened outside of any operation.

        `if_so` is called when no operation runs; False cancels. Returns its result.
        """
        with self._exclusively("fail", monotonic() + ROUND_SECONDS):
            is_so = if_so()
            if is_so:
                self._fail(error)
            return is_so

    def retire(self, error: FlyweightError) -> None:
        """Enter FAILED and do not serve again unless requested: nobody can control this engine."""
        self._should_serve = False
        self.fail(error)

    def _pause_all_ranks(
        self,
        what: str,
        deadline: float,
        *,
        may_drain: bool = True,
        should_abort: bool = False,
        should_drop: bool = False,
    ) -> bool:
        """Pause all ranks or none; return True if a user had paused one of them before.

        An engine that served resumes if one rank cannot pause.
        """
        error: FlyweightError | None = None
        try:
            if should_abort and self.state is State.SERVING:
                self._pause(deadline, should_abort=True)
            self._ensure_idle(deadline, may_drain)
            if should_drop:
                self._call("drop_cache", self._engine.drop_cache)
        except FlyweightError as failure:
            error = failure
        try:
            said = self._agree(what, deadline, error, was_paused=self.is_paused_by_hand)
            return any(each["was_paused"] for each in said)
        except FlyweightError:
            self._resume_if_wanted()
            raise

    # One operation at a time.

    @contextmanager
    def _exclusively(self, what: str, deadline: float) -> Iterator[None]:
        """Run as the only operation; wait for the running one until the deadline."""
        if not self._turn.acquire(timeout=max(deadline - monotonic(), _LEAST_SECONDS)):
            raise Busy(f"{self._turn_of} is running, {what} was not begun; wait until it ends")
        try:
            self._turn_of = what
            yield
        finally:
            try:
                if self.state in _PASSING:  # interrupted half-way
                    self._fail(LifecycleError(f"{what} was ended in state {self.state}"))
            finally:
                self._turn.release()
                self._observe()

    @contextmanager
    def _source_for_request(self, deadline: float) -> Iterator[None]:
        """Hold the source of weights for a request; `follow` gives it up."""
        ask = object()
        self._waiting_requests.add(ask)
        self._weights.wake()
        try:
            if not self._source.acquire(timeout=max(deadline - monotonic(), _LEAST_SECONDS)):
                raise Busy("another update is running; wait until it ends")
        finally:
            self._waiting_requests.discard(ask)
        try:
            yield
        finally:
            self._source.release()
