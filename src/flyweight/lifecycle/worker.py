"""Worker: one rank's end of the status cell. Does what is asked, and says how it stands.

Three threads beside the engine's own: one sleeps on the cell's request, one says how far an
update is, and one waits for the next version, if the engine is to follow its trainer by itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic

from flyweight.errors import FlyweightError, LifecycleError, SpecError, TransferTimeout
from flyweight.events import emit
from flyweight.lifecycle.cell import Cell, Request, Slot
from flyweight.lifecycle.operations import Machine
from flyweight.lifecycle.ranks import Ranks
from flyweight.lifecycle.states import ALL_TAGS, Signal, State, Tag
from flyweight.ports import Engine, Weights
from flyweight.ranks.process_group import rendezvous_of
from flyweight.ranks.rendezvous import Rendezvous

_LOOK_SECONDS = 1.0
"""How often a worker that waits sees whether its cell is still the one."""
_BEAT_SECONDS = 0.1
_FOLLOW_SECONDS = 30.0
_REST_SECONDS = 0.5
_CLOSE_SECONDS = 10.0


class Worker:
    """Drives one rank's engine as a status cell says, and follows its source of weights."""

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
        carry_out: Callable[[Request, Callable[[Request], None]], None] | None = None,
    ) -> None:
        """Attach to the cell, which is made if it is not there.

        With several ranks, `process_group` (torch's or Paddle's; the default group if None) is
        how they find each other. `carry_out` is given each request, and what would do it here.
        """
        self._carry_out = carry_out
        rendezvous = self._rendezvous(rank, num_ranks, process_group)
        self._engine, self._rank, self._should_follow = engine, rank, should_follow
        self._pid = os.getpid()
        self._telling = threading.Lock()
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._ranks, self._weights = Ranks(rendezvous), weights
        self.failure: FlyweightError | None = None
        """Why the worker ended by itself, if it did."""
        self._cell = Cell(cell, num_ranks)
        try:
            self._cell.claim(rank)
            self._taken = self._done = 0
            self._error = self._answer = self._trouble = ""
            self._take_over()
            last = self._cell.slot(rank)
            self.machine = Machine(
                engine,
                weights,
                self._ranks,
                # Who was paused or rolled to a version by hand stays so over a crash.
                should_serve=should_serve and not (last and last.is_paused_by_hand),
                observe=self.tell,
            )
            if last is not None:
                self.machine.pinned = last.pinned
                self.machine.last_version = last.version
                self.machine.is_paused_by_hand = last.is_paused_by_hand
            self.tell()
        except BaseException:
            self._cell.close()
            raise

    def _take_over(self) -> None:
        """Begin where the process before this one has ended, if there was one."""
        request, last = self._cell.last_request(), self._cell.slot(self._rank)
        if request is None:
            self._taken = self._done = 0 if last is None else last.taken
            return
        self._taken = self._done = request.number
        if last is not None and last.done == request.number:
            self._error, self._answer = last.error, last.answer
        else:  # not done by the process that was asked, nor by this one: nobody may think so
            self._error = "PeerLost"
            self._answer = f"rank {self._rank} was started again before it answered"

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
        """Begin to listen, and to follow, in threads of their own."""
        work = [(self.run, "flyweight-worker"), (self._beat, "flyweight-beat")]
        if self._should_follow:
            work.append((self._follow, "flyweight-follow"))
        for target, name in work:
            thread = threading.Thread(target=self._guarded, args=(target,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _guarded(self, target: Callable[[], None]) -> None:
        failure: FlyweightError = LifecycleError(
            f"the worker of rank {self._rank} ended by an error of its own"
        )
        try:
            target()
        except FlyweightError as error:  # the cell is gone, or damaged
            failure = error
        finally:
            if not self._is_over.is_set():
                self._is_over.set()
                self.failure = failure
                emit("worker.ended", rank=self._rank, error=str(failure))
                self._weights.wake()
                self.machine.retire(failure)
                self.tell()

    def run(self) -> None:
        """Do what the cell asks for, until `close`."""
        while not self._is_over.is_set():
            try:
                request = self._cell.next_request(self._taken, _LOOK_SECONDS)
            except LifecycleError as error:  # it cannot be read; the next one may be
                self._trouble, request = str(error), None
                self.tell()
                self._is_over.wait(_LOOK_SECONDS)
            if request is None:
                self._cell.check_current()
                continue
            self._obey(request)

    def _obey(self, request: Request) -> None:
        self._taken, self._error, self._answer = request.number, "", ""
        self.tell()
        try:
            if self._carry_out is None:
                self._do(request)
            else:
                self._carry_out(request, self._do)
        except FlyweightError as error:
            self._error, self._answer = type(error).__name__, str(error)
        self._done = request.number
        self.tell()

    def _do(self, request: Request) -> None:
        machine, tags = self.machine, frozenset(request.tags) or ALL_TAGS
        match request.signal:
            case Signal.PAUSE:
                machine.pause(
                    should_abort=request.should_abort,
                    should_resume=request.should_resume,
                    timeout_seconds=_left(request),
                )
            case Signal.RESUME:
                machine.resume(timeout_seconds=_left(request))
            case Signal.CLEAR:
                machine.clear(tags, may_drain=request.may_drain, timeout_seconds=_left(request))
            case Signal.UPDATE:
                machine.update(
                    request.version,
                    may_drain=request.may_drain,
                    must_verify=request.must_verify,
                    timeout_seconds=_left(request),
                    is_over=self._is_over.is_set,
                )
                self._trouble = ""
            case Signal.RESTORE:
                # Ranks that have theirs say so in the update of those that do not.
                is_shared = self._ranks.rendezvous.num_ranks > 1
                if Tag.WEIGHTS in tags and (is_shared or Tag.WEIGHTS in machine.condition.absent):
                    wanted = machine.pinned if request.version is None else request.version
                    machine.update(
                        wanted,
                        is_restore=True,
                        timeout_seconds=_left(request),
                        is_over=self._is_over.is_set,
                    )
                if Tag.KV_CACHE in tags:
                    machine.restore(timeout_seconds=_left(request))
            case _:
                raise LifecycleError(f"signal {request.signal} is not asked from outside")
        if request.should_resume and request.signal is not Signal.PAUSE:
            machine.resume(timeout_seconds=_left(request))

    def _follow(self) -> None:
        rest_seconds = _REST_SECONDS
        while not self._is_over.is_set():
            try:
                came = self.machine.follow(
                    timeout_seconds=_FOLLOW_SECONDS, is_over=self._is_over.is_set
                )
                rest_seconds = _REST_SECONDS
                if came or self._trouble:
                    self._trouble = ""
                    self.tell()
                if not came and not self.machine.may_follow:
                    self._is_over.wait(_REST_SECONDS)
            except FlyweightError as error:
                self._trouble = str(error)
                self.tell()
                if self.machine.state is State.SERVING:  # to pause again and again serves nobody
                    rest_seconds = min(2 * rest_seconds, _FOLLOW_SECONDS)
                self._is_over.wait(rest_seconds)

    def _beat(self) -> None:
        """Say how far an update is, and how many requests run, as that changes."""
        seen = 0
        while not self._is_over.wait(_BEAT_SECONDS):
            running = self._num_running()
            if self.machine.state is State.UPDATING or running != seen:
                seen = running
                self.tell()

    def _num_running(self) -> int:
        try:
            return int(self._engine.num_running)
        except Exception:  # the engine is not ours; a number to look at is not worth an end
            return -1

    def tell(self) -> None:
        """Show how this rank stands."""
        machine = self.machine
        with self._telling:
            failure = machine.failure
            report = machine.report
            self._cell.tell(
                self._rank,
                Slot(
                    pid=self._pid,
                    state=machine.state,
                    absent=tuple(sorted(machine.condition.absent)),
                    # While it is written there is none.
                    version=None if machine.is_in_pieces else machine.version,
                    pinned=machine.pinned,
                    is_paused_by_hand=machine.is_paused_by_hand,
                    taken=self._taken,
                    done=self._done,
                    error=self._error,
                    answer=self._answer,
                    reason=self._trouble if failure is None else str(failure),
                    is_listening=not self._is_over.is_set(),
                    step=machine.step,
                    percent=machine.percent,
                    num_running=self._num_running(),
                    nbytes=0 if report is None else report.nbytes,
                    round_seconds=0.0 if report is None else report.seconds,
                    pause_seconds=machine.pause_seconds,
                    num_rounds=machine.num_rounds,
                    went_back_from=machine.went_back_from,
                    num_went_back=machine.num_went_back,
                ),
            )

    def close(self) -> None:
        """Stop listening and following; the engine stays as it is. Safe to repeat."""
        if self._pid != os.getpid():
            return  # a forked child has nothing of it
        if self._is_over.is_set() and not self._threads:
            return
        self._is_over.set()
        self._cell.end_waits()
        self._weights.wake()
        for thread in self._threads:
            thread.join(_CLOSE_SECONDS)
        self._threads = []
        self.tell()
        self._ranks.close()
        self._cell.close()

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _left(request: Request) -> float:
    """Return the seconds that are left of a request's time; raise if none are."""
    left = min(request.deadline - monotonic(), request.timeout_seconds)
    if left <= 0:
        raise TransferTimeout(
            f"{request.signal} was not done within its {request.timeout_seconds:g} s; nothing more "
            f"was begun"
        )
    return left
