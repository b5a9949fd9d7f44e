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
from time import monotonic, perf_counter, sleep

from flyweight.checks import check_seconds
from flyweight.errors import Busy, FlyweightError, LifecycleError, PeerLost, SpecError
from flyweight.lifecycle.engine_steps import ROUND_SECONDS, EngineSteps
from flyweight.lifecycle.states import ALL_TAGS, Condition, Signal, State, Tag, tags_named
from flyweight.lifecycle.update import Update
from flyweight.ports import Engine, UpdateOptions, UpdateReport, Weights
from flyweight.ranks.agreement import YIELD_SECONDS, RankAgreement

_LEAST_SECONDS = 0.001
_TURN_SECONDS = 2.0
"""How long a version that was not requested waits for its turn, if there are several ranks."""
_BEGIN_SECONDS = 600.0
"""How long a version that was not requested may take to arrive, and the engine to drain."""
_PASSING = (State.PAUSING, State.CLEARING, State.UPDATING, State.VERIFYING)


class Operations:
    """The operations of one rank of a replica, on its engine and its weights."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        ranks: RankAgreement | None = None,
        *,
        should_serve: bool = True,
        is_serving: bool = False,
        observe: Callable[[], None] = lambda: None,
    ) -> None:
        """Start CLEARED: paused, without weights; or SERVING.

        Args:
            engine: the engine of this rank.
            weights: the source of its weights.
            ranks: how it agrees with the other ranks; None for a replica of one rank.
            should_serve: whether the engine resumes after its first update.
            is_serving: the engine serves weights of its own already, until its first update.
            observe: called after each change of state, in the thread that made it.
        """
        ranks = RankAgreement() if ranks is None else ranks
        if weights.num_ranks not in (None, ranks.num_ranks):
            raise SpecError(
                f"the engine has {ranks.num_ranks} ranks and its weights come for "
                f"{weights.num_ranks}; give the replicas of all ranks one name: "
                f"Replica(..., name=, rank=, world_size={ranks.num_ranks})"
            )
        self._weights, self._observe = weights, observe
        wants = {"should_serve": should_serve, "is_serving": is_serving}
        self._steps = EngineSteps(engine, weights, ranks, observe=observe, **wants)
        self.report: UpdateReport | None = None
        self.pause_seconds = 0.0
        """How long the last update paused requests."""
        self.num_rounds = self.num_went_back = 0
        self.last_version: int | None = None
        """The last committed version, even if it is no longer held."""
        self.went_back_from: int | None = None
        """The version before `last_version` if that was newer, else None."""
        self._answered: tuple[int | None, str] = None, ""
        """The version and source with which the last update request was answered."""
        self.pinned: int | None = None
        """The version that a user requested by number; the engine does not follow newer ones."""
        self.is_paused_by_hand = False
        self._turn, self._source = threading.Lock(), threading.Lock()
        self._turn_of = ""
        """The operation that is running, or ran last."""
        self._waiting_requests: set[object] = set()

    @property
    def state(self) -> State:
        return self._steps.state

    @property
    def condition(self) -> Condition:
        """The state, and what is absent."""
        return self._steps.condition

    @property
    def version(self) -> int | None:
        """The committed version, complete on every rank; None while weights are being written."""
        return None if self._steps.is_in_pieces else self._steps.version

    @property
    def failure(self) -> FlyweightError | None:
        """Why there is no complete version, if an operation failed."""
        return self._steps.failure

    @property
    def step(self) -> str:
        """The engine call that is running, or ""."""
        return self._steps.step

    @property
    def percent(self) -> float:
        """Progress of the running update."""
        if self.state is State.UPDATING:
            return 100 * self._weights.progress
        return 100.0 if self.state is State.VERIFYING else 0.0

    @property
    def may_follow(self) -> bool:
        """False while `follow` would not load a new version."""
        is_there = self.pinned is not None and self.pinned == self.version
        return self._steps.has_weights_memory and not is_there

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
                self._steps.resume_if_wanted()
            else:
                self._steps.should_serve, self.is_paused_by_hand = False, True

    def resume(self, *, timeout_seconds: float = 60.0) -> None:
        """Serve again, on all ranks or on none."""
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        with self._exclusively("resume", deadline):
            refusal = self._steps.refusal(Signal.RESUME)
            try:
                said = self._steps.ranks.agree(
                    "resume", deadline, refusal, version=self._steps.version
                )
            except PeerLost as lost:
                raise LifecycleError(str(lost)) from lost
            versions = [each["version"] for each in said]
            if len(set(versions)) > 1:
                raise LifecycleError(f"the ranks hold versions {versions}")
            self._steps.should_serve, self.is_paused_by_hand = True, False
            if self.state is not State.SERVING:
                self._steps.resume()

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
            todo = [tag for tag in Tag if tag in tags and tag not in self._steps.released]
            self._pause_all_ranks("clear", deadline, may_drain=may_drain, should_drop=bool(todo))
            if not todo:
                return
            self._steps.signal(Signal.CLEAR)
            try:
                for tag in todo:
                    self._steps.release(tag)
            except FlyweightError as error:
                self._steps.fail(error)
                raise
            self._steps.failure = None
            self._steps.signal(Signal.EMPTIED, self.condition.absent | set(todo))

    def restore(self, *, timeout_seconds: float = 60.0) -> None:
        """Allocate the memory of the cache again. An update restores the weights."""
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        with self._exclusively("restore", deadline):
            self._steps.agree("restore", deadline)
            error: FlyweightError | None = None
            try:
                self._steps.restore_cache()
            except FlyweightError as failure:
                error = failure
            self._steps.agree("serve with what was restored", deadline, error)
            self._steps.resume_if_wanted()

    def update(
        self,
        version: int | None = None,
        *,
        may_drain: bool = True,
        verify: bool = False,
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
            verify: refuse a version without checksums.
            is_restore: ranks that hold a version keep it.
            timeout_seconds: for the whole operation.
            is_over: checked while waiting; True ends the wait early, after the source's `wake`.
        """
        deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
        with self._source_for_request(deadline), self._exclusively("update", deadline):
            # What no request was answered with yet, nobody knows. Nor what is not committed.
            committed = self._steps.version, self._steps.session
            update = Update(
                steps=self._steps,
                weights=self._weights,
                options=UpdateOptions(
                    version=version,
                    timeout_seconds=timeout_seconds,
                    is_over=is_over,
                    may_keep=committed[0] is None or committed != self._answered,
                    verify=verify,
                ),
                deadline=deadline,
                before=lambda: None,
                on_commit=self._on_commit,
                may_drain=may_drain,
                is_restore=is_restore,
            )
            try:
                return update.run()
            finally:
                if not is_restore:
                    self._answered = self._steps.version, self._steps.session
                    if version is None and update.has_started:
                        self.pinned = None  # on all ranks, whether or not a version has arrived
                self._count(update)

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
                wanted = self.pinned

                def enter() -> None:
                    # Another rank may wait for what runs here, and this one holds up its round.
                    is_alone = self._steps.ranks.num_ranks == 1
                    seconds = ROUND_SECONDS if is_alone else min(ROUND_SECONDS, _TURN_SECONDS)
                    turn.enter_context(self._exclusively("update", monotonic() + seconds))
                    if self.pinned != wanted:
                        raise LifecycleError(f"version {self.pinned} was requested meanwhile")

                update = Update(
                    steps=self._steps,
                    weights=self._weights,
                    options=UpdateOptions(
                        version=wanted,
                        timeout_seconds=max(deadline - monotonic(), _LEAST_SECONDS),
                        begin_seconds=_BEGIN_SECONDS,
                        is_over=stops,
                        is_requested=False,
                    ),
                    deadline=deadline,
                    before=enter,
                    on_commit=self._on_commit,
                )
                try:
                    report = update.run()
                except FlyweightError as error:
                    if not update.is_running and self._steps.has_lost_weights():
                        self.fail(error, if_so=self._steps.has_lost_weights)
                    raise
                self._count(update)
            return report is not None
        finally:
            self._source.release()

    def _on_commit(self, update: Update, version: int, report: UpdateReport | None) -> None:
        if update.options.is_requested:
            self.pinned = update.options.version
        if report is not None:
            self.report = report
        last, self.last_version = self.last_version, version
        if last != version or report is not None:
            is_older = last is not None and version < last
            self.went_back_from = last if is_older else None
            self.num_went_back += is_older

    def _count(self, update: Update) -> None:
        if update.paused_at:
            self.pause_seconds = perf_counter() - update.paused_at
            self.num_rounds += 1

    def fail(self, error: FlyweightError, *, if_so: Callable[[], bool] = lambda: True) -> bool:
        """Enter FAILED because of something that happened outside of any operation.

        `if_so` is called when no operation runs; False cancels. Returns its result.
        """
        with self._exclusively("fail", monotonic() + ROUND_SECONDS):
            is_so = if_so()
            if is_so:
                self._steps.fail(error)
            return is_so

    def retire(self, error: FlyweightError) -> None:
        """Enter FAILED and do not serve again unless requested: nobody can control this engine."""
        self._steps.should_serve = False
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
                self._steps.pause(deadline, should_abort=True)
            self._steps.ensure_idle(deadline, may_drain)
            if should_drop:
                self._steps.drop_cache()
        except FlyweightError as failure:
            error = failure
        try:
            said = self._steps.agree(what, deadline, error, was_paused=self.is_paused_by_hand)
            return any(each["was_paused"] for each in said)
        except FlyweightError:
            self._steps.resume_if_wanted()
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
                    self._steps.fail(LifecycleError(f"{what} was ended in state {self.state}"))
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
