"""Fleet: the replicas of one server, what is asked of them, and a journal of what happened.

How things stand is read from the status cells. Only the journal is kept here, and only so
much of it as fits: a server that was killed and started again tells the same states.
One thread per replica sleeps on its cell's bell.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any

import msgspec

import flyweight
from flyweight.errors import Busy, FlyweightError, SpecError, listed
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.replica_status import Operation, ReplicaStatus
from flyweight.lifecycle.states import State
from flyweight.server.course import Answer, Course, Errand
from flyweight.server.standing import standing

MAX_ROUNDS, MAX_OPERATIONS, MAX_FAULTS = 100, 50, 50
_LOOK_SECONDS = 0.25  # the dead ring no bell
_REST_SECONDS = 0.01  # a round that tells every percent rings thousands of times a second
_CLOSE_SECONDS = 5.0
_SPARE_SECONDS = 10.0
"""What an operation gets beyond its time before it is no longer waited for."""


class Round(msgspec.Struct, kw_only=True):
    """A round that a replica's ranks have finished."""

    replica: str
    version: int | None
    num_ranks: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    pause_seconds: float = 0.0
    gb_per_second: float = 0.0
    time: float | None
    """When it was seen to end, in seconds since 1970; None if that was before this server."""


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Something that went wrong, in words."""

    time: float
    replica: str
    operation: str
    error: str
    reason: str


@dataclass
class _Seen:
    """What was last seen of one replica, to tell what has changed since."""

    told: dict[str, Any] = field(default_factory=dict)
    operation: Operation | None = None
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each rank the process and how many rounds it had finished."""
    round: Round | None = None
    parts: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    """Of each rank that has finished this round: bytes, seconds, seconds of pause."""


class Fleet:
    """Controls several replicas, which are its own to close. Safe to use from any thread."""

    def __init__(self, controls: Sequence[Control]) -> None:
        names = [control.name for control in controls]
        twice = {name for name in names if names.count(name) > 1}
        if twice or not names:
            raise SpecError(
                f"replicas need names of their own, several are {listed(twice)}"
                if twice
                else "a fleet needs a replica"
            )
        self._controls = {control.name: control for control in controls}
        self._started = time()
        self._lock = threading.Lock()
        self._number = 0
        self._news = (-1, b"")
        self._seen = {name: _Seen() for name in names}
        self._rounds: deque[Round] = deque(maxlen=MAX_ROUNDS)
        self._operations: deque[Operation] = deque(maxlen=MAX_OPERATIONS)
        self._faults: deque[Trouble] = deque(maxlen=MAX_FAULTS)
        self._endings: Counter[tuple[str, str, str]] = Counter()
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._asking = threading.Lock()
        self._is_over = threading.Event()
        self._watchers = [
            threading.Thread(target=self._watch, args=(control,), name="flyweight-fleet")
            for control in controls
        ]
        for control in controls:
            self._look(control)
        for watcher in self._watchers:
            watcher.daemon = True
            watcher.start()

    # How it stands.

    @property
    def names(self) -> list[str]:
        return list(self._controls)

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    @property
    def endings(self) -> Counter[tuple[str, str, str]]:
        """How many operations ended, by replica, signal and ending."""
        with self._lock:
            return Counter(self._endings)

    def replicas(self, name: str | None = None) -> list[ReplicaStatus]:
        """Return how each replica stands at this moment, or the one that is named."""
        return [standing(control) for control in self._chosen(name)]

    def status(self) -> dict[str, Any]:
        """Return how everything stands at this moment, and the journal, newest last."""
        for control in self._controls.values():
            self._look(control)
        with self._lock:
            return self._told()

    def news(self) -> tuple[int, bytes]:
        """Return the number of the last change, and how things stood then, as JSON."""
        with self._lock:
            if self._news[0] != self._number:
                self._news = (self._number, msgspec.json.encode(self._told()))
            return self._news

    def _told(self) -> dict[str, Any]:
        return {
            "server": {
                "version": flyweight.__version__,
                "pid": os.getpid(),
                "started": self._started,
            },
            "replicas": [seen.told for seen in self._seen.values()],
            "rounds": msgspec.to_builtins(list(self._rounds)),
            "operations": msgspec.to_builtins(list(self._operations)),
            "faults": msgspec.to_builtins(list(self._faults)),
        }

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` after each change inside the block, from any thread; it must be quick."""
        with self._lock:
            self._listeners = (*self._listeners, listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners = tuple(each for each in self._listeners if each is not listener)

    # What is asked.

    def _chosen(self, name: str | None) -> list[Control]:
        if name is None:
            return list(self._controls.values())
        if name not in self._controls:
            raise SpecError(f"there is no replica {name!r}; there is {listed(self._controls)}")
        return [self._controls[name]]

    def carry_out(self, name: str | None, course: Course) -> list[Answer]:
        """Ask for something and wait until it has ended; of all replicas for None.

        If one of them is busy, nothing is asked of any, and this returns at once.
        """
        controls = self._chosen(name)
        with self._asking:
            busy = [each for each in map(self._busy, controls) if each is not None]
            if busy:
                return busy
            errands = [Errand(each, course(standing(each)), self.wait) for each in controls]
            for each in errands:
                each.ask()
        if len(errands) == 1:
            return [errands[0].answer()]
        with ThreadPoolExecutor(len(errands), "flyweight-errand") as pool:
            return list(pool.map(Errand.answer, errands))

    def _busy(self, control: Control) -> Answer | None:
        """Return who is in the way, if anybody is."""
        try:
            control.check_idle()
            return None
        except Busy as error:
            busy = error
        except FlyweightError:  # told by the replica's own answer, once it is asked
            return None
        now = standing(control)
        return Answer(
            replica=control.name,
            ending="busy",
            operation=busy.operation,
            signal=busy.operation.partition("-")[0].upper(),  # an id is the signal and a number
            error=Busy.__name__,
            reason=str(busy),
            state=now.state,
            version=now.version,
            seconds=0.0,
        )

    def wait(self, control: Control, operation: Operation, timeout_seconds: float) -> bool:
        """Wait until an operation has ended, the fleet is over, or time is; then look again."""
        deadline = monotonic() + timeout_seconds + _SPARE_SECONDS
        while operation.ending == "running" and not self.is_over and monotonic() < deadline:
            control.wait(operation, _LOOK_SECONDS)
        if self.is_over:
            return False
        self._look(control)
        self._enter(operation)
        return operation.ending != "running"

    # What happens.

    def _watch(self, control: Control) -> None:
        bell = 0
        while not self.is_over:
            self._look(control)
            self._is_over.wait(_REST_SECONDS)
            bell = control.cell.wait_change(bell, _LOOK_SECONDS)

    def _look(self, control: Control) -> None:
        """Compare how a replica stands with what was last seen of it, and tell listeners."""
        with self._lock:
            seen = self._seen[control.name]
            status = standing(control)
            told = msgspec.to_builtins(status)
            if told == seen.told:
                return
            self._note_rounds(seen, status, is_first=not seen.told)
            before, ended = seen.told.get("reason"), seen.operation
            seen.told, seen.operation = told, status.operation
            if status.state == State.FAILED and status.reason != before:
                self._note_fault(control.name, "", str(State.FAILED), status.reason)
        if ended is not None and ended.ending != "running":
            self._enter(ended)
        self._tell()

    def _note_rounds(self, seen: _Seen, status: ReplicaStatus, *, is_first: bool) -> None:
        """Enter rounds that ranks have finished. Ranks that end one apart are in one entry."""
        for each in status.ranks:
            life, count = seen.counts.get(each.rank, (each.life, 0))
            part = (each.nbytes, each.round_seconds, each.pause_seconds)
            has_grown = each.num_rounds > (count if life == each.life else 0)
            if not each.is_alive:
                continue
            seen.counts[each.rank] = (each.life, each.num_rounds)
            if not has_grown and each.rank not in seen.parts:
                continue
            other = seen.round is None or seen.round.version != each.version
            if has_grown and (other or each.rank in seen.parts):
                seen.round = Round(
                    replica=status.name, version=each.version, time=None if is_first else time()
                )
                self._rounds.append(seen.round)
                seen.parts = {}
            elif other:
                continue
            seen.parts[each.rank] = part
        if seen.round is not None and seen.parts:
            nbytes, seconds, pauses = zip(*seen.parts.values(), strict=True)
            seen.round.num_ranks = len(seen.parts)
            seen.round.nbytes = sum(nbytes)
            seen.round.seconds, seen.round.pause_seconds = max(seconds), max(pauses)
            seen.round.gb_per_second = sum(nbytes) / 1e9 / max(*seconds, 1e-9)

    def _enter(self, operation: Operation) -> None:
        """Put an operation that has ended into the journal, once."""
        with self._lock:
            if operation.ending == "running" or any(each is operation for each in self._operations):
                return
            self._operations.append(operation)
            self._endings[operation.replica, operation.signal, operation.ending] += 1
            if operation.error:
                self._note_fault(operation.replica, operation.id, operation.error, operation.reason)
        self._tell()

    def _note_fault(self, replica: str, operation: str, error: str, reason: str) -> None:
        last = next((each for each in reversed(self._faults) if each.replica == replica), None)
        # A step that fails is told twice: by its operation, and by the state it left.
        if last is not None and time() - last.time < 1 and (reason in last.reason):
            return
        self._faults.append(
            Trouble(time=time(), replica=replica, operation=operation, error=error, reason=reason)
        )

    def _tell(self) -> None:
        with self._lock:
            self._number += 1
            listeners = self._listeners
        for listener in listeners:
            listener()

    def end_waits(self) -> None:
        """Have listeners and whoever waits for an operation hear that it is over."""
        self._is_over.set()
        self._tell()

    def close(self) -> None:
        """Let go of all replicas, which go on by themselves. Safe to repeat.

        Whoever watches one and does not come back in time keeps its cell, until the process ends.
        """
        if not self._watchers:
            return
        self.end_waits()
        for control in self._controls.values():
            control.cell.end_waits()
        deadline = monotonic() + _CLOSE_SECONDS
        for watcher, control in zip(self._watchers, self._controls.values(), strict=True):
            watcher.join(max(deadline - monotonic(), 0.0))
            if not watcher.is_alive():
                control.close()
        self._watchers = []
