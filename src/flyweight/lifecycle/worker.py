"""Worker: runs the requests of a status cell on one rank's engine, and writes the rank's record.

It has three threads: one waits for requests, one writes the progress of an update, and one
waits for the next version, if the engine follows its trainer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic

from flyweight.errors import FlyweightError, LifecycleError, PeerLost, SpecError, TransferTimeout
from flyweight.events import announce
from flyweight.lifecycle.cell import Cell, RankRecord, Request
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import ALL_TAGS, Signal, State, Tag
from flyweight.ports import Engine, Weights
from flyweight.ranks.agreement import RankAgreement
from flyweight.ranks.process_group import rendezvous_of
from flyweight.ranks.rendezvous import Rendezvous

_LOOK_SECONDS = 1.0
"""How often a waiting worker checks that its cell was not replaced."""
_PROGRESS_SECONDS = 0.1
_FOLLOW_SECONDS = 30.0
_RETRY_SECONDS = 0.5
_CLOSE_SECONDS = 10.0


class Worker:
    """Controls one rank's engine through a status cell, and follows its source of weights."""

    def __init__(
        self,
        engine: Engine,
        weights: Weights,
        cell: str | os.PathLike[str],
        *,
        rank: int = 0,
        num_ranks: int = 1,
        process_group: object = None,
        should_follow: bool = True,
        should_serve: bool = True,
        is_serving: bool = False,
        carry_out: Callable[[Request, Callable[[Request], None]], None] | None = None,
    ) -> None:
        """Attach to the cell; `start`, or a `with` block, starts the threads.

        Args:
            engine: the engine of this rank.
            weights: the source of its weights, such as a Replica.
            cell: the path of the status cell; created if it does not exist.
            rank: this rank of the replica.
            num_ranks: the number of ranks of the replica.
            process_group: how several ranks find each other: a group of torch or Paddle, None for
                the default group.
            should_follow: load each new version of the source without a request.
            should_serve: resume the engine after its first update.
            is_serving: the engine answers requests already, with weights of its own, and goes on
                until its first update.
            carry_out: called with each request and the function that runs it, for engines whose
                own loop must run it; None runs it in the worker's thread.
        """
        self._carry_out = carry_out
        rendezvous = self._rendezvous(rank, num_ranks, process_group)
        self._engine, self._rank, self._should_follow = engine, rank, should_follow
        self._pid = os.getpid()
        self._telling = threading.Lock()
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._ranks, self._weights = RankAgreement(rendezvous), weights
        self.failure: FlyweightError | None = None
        """Why the worker ended without `close`, if it did."""
        self._cell = Cell(cell, num_ranks)
        try:
            self._cell.claim(rank)
            self._taken = self._done = 0
            self._error = self._answer = self._last_problem = ""
            last = self._cell.record(rank)
            self._continue_after_restart(last)
            self.operations = Operations(
                engine,
                weights,
                self._ranks,
                # A pause, and a version requested by number, survive a crash.
                should_serve=should_serve and not (last and last.is_paused_by_hand),
                is_serving=is_serving,
                observe=self.write_record,
            )
            if last is not None:
                self.operations.pinned = last.pinned
                self.operations.last_version = last.version
                self.operations.is_paused_by_hand = last.is_paused_by_hand
            self.write_record()
        except BaseException:
            self._cell.close()
            raise

    def _continue_after_restart(self, last: RankRecord | None) -> None:
        """Continue with the record of this rank's previous process, if there was one."""
        request = self._cell.last_request()
        if request is None:
            self._taken = self._done = 0 if last is None else last.taken
            return
        self._taken = self._done = request.number
        if last is not None and last.done == request.number:
            self._error, self._answer = last.error, last.answer
        else:  # the previous process did not finish it, and this one does not start it
            self._error = "PeerLost"
            self._answer = f"rank {self._rank} was restarted before it answered"

    @staticmethod
    def _rendezvous(rank: int, num_ranks: int, process_group: object) -> Rendezvous:
        if num_ranks == 1:
            return Rendezvous()
        rendezvous = rendezvous_of(process_group)
        if (rendezvous.rank, rendezvous.num_ranks) != (rank, num_ranks):
            raise SpecError(
                f"rank {rank} of {num_ranks} is rank {rendezvous.rank} of "
                f"{rendezvous.num_ranks} in its process group"
            )
        return rendezvous

    def start(self) -> None:
        """Start the threads."""
        work = [(self.run, "flyweight-worker"), (self._report_progress, "flyweight-beat")]
        if self._should_follow:
            work.append((self._follow, "flyweight-follow"))
        for target, name in work:
            thread = threading.Thread(target=self._guarded, args=(target,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _guarded(self, target: Callable[[], None]) -> None:
        failure: FlyweightError = LifecycleError(
            f"the worker of rank {self._rank} ended because of an internal error"
        )
        try:
            target()
        except FlyweightError as error:  # the cell was removed or is damaged
            failure = error
        finally:
            if not self._is_over.is_set():
                self._is_over.set()
                self.failure = failure
                announce("worker.ended", rank=self._rank, error=str(failure))
                self._weights.wake()
                self.operations.retire(failure)
                self.write_record()

    def run(self) -> None:
        """Answer requests until `close`."""
        while not self._is_over.is_set():
            try:
                request = self._cell.next_request(self._taken, _LOOK_SECONDS)
            except LifecycleError as error:  # unreadable; the next request may be readable
                self._last_problem, request = str(error), None
                self.write_record()
                self._is_over.wait(_LOOK_SECONDS)
            if request is None:
                self._cell.check_current()
                continue
            self._answer_request(request)

    def _answer_request(self, request: Request) -> None:
        self._taken, self._error, self._answer = request.number, "", ""
        self.write_record()
        try:
            if self._carry_out is None:
                self._do(request)
            else:
                self._carry_out(request, self._do)
        except FlyweightError as error:
            self._error, self._answer = type(error).__name__, str(error)
        self._done = request.number
        self.write_record()

    def _do(self, request: Request) -> None:
        operations, tags = self.operations, frozenset(request.tags) or ALL_TAGS
        match request.signal:
            case Signal.PAUSE:
                operations.pause(
                    should_abort=request.should_abort,
                    should_resume=request.should_resume,
                    timeout_seconds=_left(request),
                )
            case Signal.RESUME:
                operations.resume(timeout_seconds=_left(request))
            case Signal.CLEAR:
                operations.clear(tags, may_drain=request.may_drain, timeout_seconds=_left(request))
            case Signal.UPDATE:
                operations.update(
                    request.version,
                    may_drain=request.may_drain,
                    verify=request.verify,
                    timeout_seconds=_left(request),
                    is_over=self._is_over.is_set,
                )
                self._last_problem = ""
            case Signal.RESTORE:
                # Ranks that hold their weights take part in the update of those that do not.
                is_shared = self._ranks.num_ranks > 1
                if Tag.WEIGHTS in tags and (
                    is_shared or Tag.WEIGHTS in operations.condition.absent
                ):
                    wanted = operations.pinned if request.version is None else request.version
                    operations.update(
                        wanted,
                        is_restore=True,
                        timeout_seconds=_left(request),
                        is_over=self._is_over.is_set,
                    )
                if Tag.KV_CACHE in tags:
                    operations.restore(timeout_seconds=_left(request))
            case _:
                raise LifecycleError(f"signal {request.signal} cannot be requested")
        if request.should_resume and request.signal is not Signal.PAUSE:
            operations.resume(timeout_seconds=_left(request))

    def _follow(self) -> None:
        rest_seconds = _RETRY_SECONDS
        while not self._is_over.is_set():
            try:
                came = self.operations.follow(
                    timeout_seconds=_FOLLOW_SECONDS, is_over=self._is_over.is_set
                )
                rest_seconds = _RETRY_SECONDS
                if came or self._last_problem:
                    self._last_problem = ""
                    self.write_record()
                if not came and not self.operations.may_follow:
                    self._is_over.wait(_RETRY_SECONDS)
            except FlyweightError as error:
                self._last_problem = str(error)
                self.write_record()
                # Do not pause a serving engine again and again; a lost source pauses nothing.
                if self.operations.state is State.SERVING and not isinstance(error, PeerLost):
                    rest_seconds = min(2 * rest_seconds, _FOLLOW_SECONDS)
                self._is_over.wait(rest_seconds)

    def _report_progress(self) -> None:
        """Write the progress of an update and the number of running requests as they change."""
        seen = 0
        while not self._is_over.wait(_PROGRESS_SECONDS):
            running = self._num_running()
            if self.operations.state is State.UPDATING or running != seen:
                seen = running
                self.write_record()

    def _num_running(self) -> int:
        try:
            return int(self._engine.num_running)
        except Exception:  # the engine is the user's, and this number is only shown
            return -1

    def write_record(self) -> None:
        """Write this rank's record into the cell."""
        operations = self.operations
        with self._telling:
            failure = operations.failure
            report = operations.report
            self._cell.write_record(
                self._rank,
                RankRecord(
                    pid=self._pid,
                    state=operations.state,
                    absent=tuple(sorted(operations.condition.absent)),
                    version=operations.version,
                    pinned=operations.pinned,
                    is_paused_by_hand=operations.is_paused_by_hand,
                    taken=self._taken,
                    done=self._done,
                    error=self._error,
                    answer=self._answer,
                    reason=self._last_problem if failure is None else str(failure),
                    is_listening=not self._is_over.is_set(),
                    step=operations.step,
                    percent=operations.percent,
                    num_running=self._num_running(),
                    nbytes=0 if report is None else report.nbytes,
                    round_seconds=0.0 if report is None else report.seconds,
                    pause_seconds=operations.pause_seconds,
                    num_rounds=operations.num_rounds,
                    went_back_from=operations.went_back_from,
                    num_went_back=operations.num_went_back,
                ),
            )

    def close(self) -> None:
        """Stop the threads; the engine keeps its state. Safe to repeat."""
        if self._pid != os.getpid():
            return  # the worker belongs to the parent process
        if self._is_over.is_set() and not self._threads:
            return
        self._is_over.set()
        self._cell.end_waits()
        self._weights.wake()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        self._threads = []
        self.write_record()
        self._ranks.close()
        self._cell.close()

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _left(request: Request) -> float:
    """Return the seconds until a request's deadline; raise TransferTimeout if it has passed."""
    left = min(request.deadline - monotonic(), request.timeout_seconds)
    if left <= 0:
        raise TransferTimeout(
            f"{request.signal} was not done within its {request.timeout_seconds:g} s; no further "
            f"step was begun"
        )
    return left
