"""Control: a replica from outside. Asks its ranks for something, and tells how they stand.

What is told is put together from the ranks' own slots and from whether their processes
live, which the kernel says; nothing of it is kept here, so a controller that is killed and
started again tells the same.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, time
from typing import Literal

import msgspec

from flyweight.checks import check_seconds, check_version
from flyweight.errors import Busy, FlyweightError, PeerLost, TransferTimeout
from flyweight.events import emit
from flyweight.lifecycle.cell import Cell, Request, Slot
from flyweight.lifecycle.states import Signal, State, tags_named

ABSENT = "ABSENT"
"""The state of a replica none of whose ranks has come yet."""
ANSWER_SECONDS = 0.5
"""How long after its timeout an operation ends at the latest; ranks answer in that time."""
_GRACE_SECONDS, _GRACE_SHARE = 3.5, 0.1
"""What several ranks need after their deadline, to tell each other how it ended.

They listen 1.5 s for the last words of others, are a tenth of their time late in noticing that
there are none, tell each other so for 1 s at most, and stop an engine that is FAILED within 1 s.
Their deadline is so much before the operation's, but never more than a quarter of its time.
"""
_CLOSE_SECONDS = 4.0
_WORST_FIRST = (
    State.FAILED,
    State.CLEARED,
    State.CLEARING,
    State.UPDATING,
    State.VERIFYING,
    State.PAUSING,
    State.PAUSED,
    State.SERVING,
)

_IN_A_ROUND = (State.UPDATING, State.VERIFYING)

Ending = Literal["running", "done", "failed"]
Slots = Sequence[Slot | None]


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, as it says itself; `is_alive` is looked up."""

    rank: int
    pid: int
    life: int
    """Another number for each start of the rank, whatever its pid is."""
    is_alive: bool
    state: str
    absent: tuple[str, ...]
    version: int | None
    pinned: int | None
    step: str
    percent: float
    num_running: int
    reason: str
    nbytes: int
    round_seconds: float
    pause_seconds: float
    num_rounds: int
    went_back_from: int | None = None
    """The version before this one, if it was newer."""
    num_went_back: int = 0


class Operation(msgspec.Struct, kw_only=True):
    """Something that was asked of a replica, and how it ended."""

    id: str
    replica: str
    signal: str
    version: int | None = None
    ending: Ending = "running"
    error: str = ""
    reason: str = ""
    started: float = 0.0
    """When, in seconds since 1970."""
    seconds: float = 0.0


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A replica: its ranks together."""

    name: str
    state: str
    version: int | None
    percent: float
    reason: str
    ranks: tuple[RankStatus, ...]
    operation: Operation | None
    """What runs at this moment."""

    @property
    def is_serving(self) -> bool:
        return self.state == State.SERVING


class Control:
    """The one controller of a replica."""

    def __init__(
        self, path: str | os.PathLike[str], num_ranks: int = 1, *, name: str | None = None
    ) -> None:
        self.name = Path(path).stem if name is None else name
        self.cell = Cell(path, num_ranks)
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._running: Operation | None = None
        self._waiting: threading.Thread | None = None
        self._pid = os.getpid()
        try:
            self.cell.claim(None)
            self._adopt()
        except BaseException:
            self.cell.close()
            raise

    def _adopt(self) -> None:
        """Wait for what an earlier controller asked for, if ranks are still at it."""
        request = self.cell.last_request()
        slots = self.cell.slots()
        if request is not None and any(_has_to_answer(slot, request) for slot in slots):
            self._running = self._operation(request)
            left = max(min(request.deadline - monotonic(), request.timeout_seconds), 0.0)
            self._await(self._running, request, slots, left + _grace(left))

    # How it stands.

    def status(self) -> ReplicaStatus:
        """Return how the replica stands; never waits."""
        ranks = _statuses(self.cell.slots())
        state, reason = _together(ranks)
        versions = {each.version for each in ranks}
        with self._lock:
            operation = self._running
        return ReplicaStatus(
            name=self.name,
            state=state,
            version=versions.pop() if len(versions) == 1 and state != State.FAILED else None,
            percent=min((each.percent for each in ranks if each.state in _IN_A_ROUND), default=0.0),
            reason=reason,
            ranks=ranks,
            operation=operation,
        )

    # What is asked.

    def start(
        self,
        signal: Signal,
        *,
        version: int | None = None,
        tags: Sequence[str] = (),
        may_drain: bool = True,
        must_verify: bool = False,
        should_abort: bool = False,
        should_resume: bool = False,
        timeout_seconds: float = 60.0,
    ) -> Operation:
        """Ask all ranks for something and return at once; raise Busy while something else runs.

        It ends within `timeout_seconds` and ANSWER_SECONDS, whatever the ranks do; several
        ranks get less of it, since they have to tell each other how it ended.
        """
        if version is not None:
            check_version(version)
        check_seconds("timeout_seconds", timeout_seconds)
        with self._lock:
            self._check_idle()
            self.cell.check_current()
            slots = self.cell.slots()
            gone = [n for n, slot in enumerate(slots) if slot is None or not slot.is_alive]
            if gone:
                raise PeerLost(f"{_together(_statuses(slots))[1]}; start the engine's ranks")
            last = self.cell.last_request()
            reserve = min(_grace(timeout_seconds), timeout_seconds / 4) if len(slots) > 1 else 0.0
            taken = [0 if slot is None else slot.taken for slot in slots]
            request = Request(
                number=1 + max(0 if last is None else last.number, *taken),
                signal=signal,
                version=version,
                tags=tags_named(tags),
                may_drain=may_drain,
                must_verify=must_verify,
                should_abort=should_abort,
                should_resume=should_resume,
                timeout_seconds=timeout_seconds - reserve,
                deadline=monotonic() + timeout_seconds - reserve,
            )
            operation = self._operation(request)
            self.cell.ask(request)
            self._running = operation
            self._await(operation, request, slots, timeout_seconds)
        emit("operation.started", id=operation.id, name=self.name)
        return operation

    def check_idle(self) -> None:
        """Raise Busy if something runs, or a rank is still at what was given up already."""
        with self._lock:
            self._check_idle()

    def _check_idle(self) -> None:
        if self._running is not None:
            raise Busy(
                f"operation {self._running.id} of replica {self.name!r} is running; wait until it "
                f"ends",
                operation=self._running.id,
            )
        last = self.cell.last_request()
        for rank, slot in enumerate(self.cell.slots()):
            if last is not None and _has_to_answer(slot, last):
                # It would never see that request if another were written over it.
                raise Busy(
                    f"rank {rank} of replica {self.name!r} is still at operation {_id(last)}; "
                    f"wait until it ends, or restart that rank",
                    operation=_id(last),
                )

    def wait(self, operation: Operation, timeout_seconds: float) -> Operation:
        """Wait until an operation has ended, and return it; it may still be running then.

        It ends by itself, ANSWER_SECONDS after its timeout at the latest.
        """
        with self._ended:
            self._ended.wait_for(lambda: operation.ending != "running", timeout_seconds)
        return operation

    def _operation(self, request: Request) -> Operation:
        return Operation(
            id=_id(request),
            replica=self.name,
            signal=request.signal,
            version=request.version,
            started=time(),
        )

    def _await(
        self, operation: Operation, request: Request, before: Slots, timeout_seconds: float
    ) -> None:
        thread = threading.Thread(
            target=self._watch,
            args=(operation, request, before, timeout_seconds),
            name="flyweight-operation",
            daemon=True,
        )
        self._waiting = thread
        thread.start()

    def _watch(
        self, operation: Operation, request: Request, before: Slots, timeout_seconds: float
    ) -> None:
        """See an operation to its end: answered by all, a rank that died, or time over."""
        began = monotonic()
        lives = [None if slot is None else slot.started for slot in before]
        error, reason, version = "", "", None
        try:
            slots = self._answered(request, lives, timeout_seconds)
            for rank, (slot, life) in enumerate(zip(slots, lives, strict=True)):
                if _has_gone(slot, life):
                    told = "it never came" if slot is None or life is None else _end_of(slot, life)
                    raise PeerLost(f"rank {rank} of replica {self.name!r} is gone: {told}")
            answers = [slot for slot in slots if slot is not None]
            version = answers[0].version
            for rank, slot in enumerate(answers):
                if slot.error and not error:
                    error, reason = slot.error, f"rank {rank}: {slot.answer}"
        except FlyweightError as failure:
            error, reason = type(failure).__name__, str(failure)
        with self._ended:
            operation.error, operation.reason = error, reason
            operation.version = operation.version if version is None else version
            operation.seconds = monotonic() - began
            operation.ending = "failed" if error else "done"
            self._running = None
            self._ended.notify_all()
        emit(
            "operation.ended", id=operation.id, name=self.name, ending=operation.ending,
            seconds=operation.seconds, reason=reason, version=operation.version,
        )  # fmt: skip

    def _answered(
        self, request: Request, lives: Sequence[int | None], timeout_seconds: float
    ) -> list[Slot | None]:
        """Return the slots once all ranks answered, or one has gone; raise TransferTimeout."""

        def is_over(slots: Slots) -> bool:
            return any(_has_gone(*each) for each in zip(slots, lives, strict=True)) or all(
                slot is not None and slot.done == request.number for slot in slots
            )

        try:
            return self.cell.wait(is_over, timeout_seconds + ANSWER_SECONDS)
        except TransferTimeout as cause:
            slots = self.cell.slots()
            if is_over(slots):
                return slots
            silent = [
                f"rank {rank} (process {slot.pid})"
                for rank, slot in enumerate(slots)
                if slot is not None and slot.done != request.number
            ]
            raise TransferTimeout(
                f"{' and '.join(silent)} of replica {self.name!r} did not answer {_id(request)} "
                f"within {timeout_seconds:g} s; see whether it is stopped, or still at work"
            ) from cause

    def close(self) -> None:
        """Let go of the replica, which goes on by itself. Safe to repeat."""
        if self._pid != os.getpid():
            return  # a forked child has nothing of it
        thread = self._waiting
        if thread is not None:
            self.cell.end_waits()
            thread.join(_CLOSE_SECONDS)
        self.cell.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _grace(seconds: float) -> float:
    return _GRACE_SECONDS + _GRACE_SHARE * seconds


def _id(request: Request) -> str:
    return f"{request.signal.lower()}-{request.number}"


def _has_to_answer(slot: Slot | None, request: Request) -> bool:
    """True if a rank that lives has not answered; one that came later counts itself out."""
    return slot is not None and slot.done != request.number and slot.is_alive


def _has_gone(slot: Slot | None, life: int | None) -> bool:
    """True if a process that was to answer is not there any more, or another came in its place."""
    return slot is None or slot.started != life or not slot.is_alive


def _statuses(slots: Slots) -> tuple[RankStatus, ...]:
    return tuple(_rank_status(rank, slot) for rank, slot in enumerate(slots))


def _rank_status(rank: int, slot: Slot | None) -> RankStatus:
    told = Slot() if slot is None else slot
    is_alive = told.is_alive
    return RankStatus(
        rank=rank,
        pid=told.pid,
        life=told.started,
        is_alive=is_alive,
        state=ABSENT if slot is None else told.state if is_alive else State.FAILED,
        absent=told.absent,
        version=told.version if is_alive else None,
        pinned=told.pinned,
        step=told.step,
        percent=told.percent,
        num_running=told.num_running,
        reason=told.reason if is_alive or slot is None else _end_of(told),
        nbytes=told.nbytes,
        round_seconds=told.round_seconds,
        pause_seconds=told.pause_seconds,
        num_rounds=told.num_rounds,
        went_back_from=told.went_back_from if is_alive else None,
        num_went_back=told.num_went_back,
    )


def _end_of(slot: Slot, life: int | None = None) -> str:
    """Return how a rank that is there no more has ended; `life` is the one that was to answer."""
    if life is not None and slot.started != life:
        return f"process {slot.pid} came in its place"
    if slot.is_listening:
        return f"process {slot.pid} died"
    return f"its worker in process {slot.pid} was closed{': ' if slot.reason else ''}{slot.reason}"


def _together(ranks: Sequence[RankStatus]) -> tuple[str, str]:
    """Return the state of the whole, and why, if it is not well."""
    if all(each.state == ABSENT for each in ranks):
        return ABSENT, f"none of its {len(ranks)} ranks has come yet"
    for each in ranks:
        if not each.is_alive:
            what = " has not come yet" if each.state == ABSENT else f": {each.reason}"
            return State.FAILED, f"rank {each.rank}{what}"
    state = next(state for state in _WORST_FIRST if any(each.state == state for each in ranks))
    versions = sorted({-1 if each.version is None else each.version for each in ranks})
    if state is State.SERVING and len(versions) > 1:
        return State.FAILED, f"its ranks hold versions {versions}"
    reasons = (f"rank {each.rank}: {each.reason}" for each in ranks if each.reason)
    return state, next(reasons, "")
