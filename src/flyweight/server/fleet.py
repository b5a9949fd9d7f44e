"""Fleet: the replicas of one server, and the operations that it runs on them.

The state of a replica is always read from its status cell. Only the journal is kept here, so a
server that was killed and started again reports the same states. One thread per replica sleeps
until its cell changes.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, time
from typing import Any

import msgspec
from msgspec.structs import replace

import flyweight
from flyweight.errors import Busy, FlyweightError, PeerLost, SpecError, listed
from flyweight.lifecycle.cell import Request
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.replica_status import Operation, ReplicaStatus
from flyweight.lifecycle.states import State
from flyweight.server.journal import Journal
from flyweight.server.requests import Answer

CLOSE_SECONDS = 5.0
_POLL_SECONDS = 0.25  # a process that dies does not wake anyone, so poll
_REST_SECONDS = 0.01  # a round that reports every percent changes thousands of times a second
_SPARE_SECONDS = 10.0
"""How long to wait for an operation after its timeout, by which it should have ended."""


class Fleet:
    """Controls several replicas and closes their controls. Safe to use from any thread."""

    def __init__(self, controls: Sequence[Control]) -> None:
        names = [control.name for control in controls]
        if not names:
            raise SpecError("a fleet needs a replica")
        if twice := {name for name in names if names.count(name) > 1}:
            raise SpecError(f"replicas need names of their own, several are {listed(twice)}")
        self._controls = {control.name: control for control in controls}
        self._started = time()
        self._start_lock = threading.Lock()
        """Held from the check that all replicas are idle until their operations have started."""
        self._lock = threading.Lock()
        """Guards everything below."""
        self._num_changes = 0
        self._encoded = (-1, b"")
        self._journal = Journal(names)
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._closing = threading.Event()
        for control in controls:
            self._refresh(control)
        self._watchers = [
            threading.Thread(target=self._watch, args=(each,), name="flyweight-fleet", daemon=True)
            for each in controls
        ]
        for watcher in self._watchers:
            watcher.start()

    # Status.

    @property
    def names(self) -> list[str]:
        return list(self._controls)

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    @property
    def endings(self) -> Counter[tuple[str, str, str]]:
        """How many operations have ended, by replica, signal and ending."""
        with self._lock:
            return Counter(self._journal.endings)

    def replicas(self, name: str | None = None) -> list[ReplicaStatus]:
        """Return the status of the named replica at this moment, or of all."""
        return [_status(control) for control in self._chosen(name)]

    def status(self) -> dict[str, Any]:
        """Return the status of all replicas at this moment, and the journal, newest last."""
        for control in self._controls.values():
            self._refresh(control)
        with self._lock:
            return self._snapshot()

    def latest_status(self) -> tuple[int, bytes]:
        """Return the number of the last change, and the status after it as JSON."""
        with self._lock:
            if self._encoded[0] != self._num_changes:
                self._encoded = (self._num_changes, msgspec.json.encode(self._snapshot()))
            return self._encoded

    def _snapshot(self) -> dict[str, Any]:
        server = {"version": flyweight.__version__, "pid": os.getpid(), "started": self._started}
        return {"server": server, **self._journal.snapshot()}

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

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    # Operations.

    def _chosen(self, name: str | None) -> list[Control]:
        if name is None:
            return list(self._controls.values())
        if name not in self._controls:
            raise SpecError(f"there is no replica {name!r}; there is {listed(self._controls)}")
        return [self._controls[name]]

    def carry_out(
        self, name: str | None, request: Request, if_cleared: Request | None = None
    ) -> list[Answer]:
        """Send a request to a replica, or to all for None, and wait until they have answered.

        A replica whose weights or KV cache are cleared gets `if_cleared` instead, if that is given.
        If a replica is busy, nothing is sent to any, and this returns at once.
        """
        controls = self._chosen(name)
        with self._start_lock:
            busy = [(each, error) for each in controls if (error := _busy(each)) is not None]
            if busy:
                return [_answer(each, _refused(each, error)) for each, error in busy]
            started = []
            for control in controls:
                is_cleared = any(rank.absent for rank in _status(control).ranks)
                chosen = if_cleared if if_cleared is not None and is_cleared else request
                started.append(_start(control, chosen))
        deadline = monotonic() + request.timeout_seconds + _SPARE_SECONDS
        return [
            self._answered(control, operation, deadline)
            for control, operation in zip(controls, started, strict=True)
        ]

    def _answered(self, control: Control, operation: Operation, deadline: float) -> Answer:
        """Wait until an operation has ended, or this fleet closes, and return the answer."""
        while operation.ending == "running" and not self.is_closing and monotonic() < deadline:
            control.wait(operation, _POLL_SECONDS)
        self._refresh(control, operation)
        if operation.ending == "running":
            reason = f"the server is closing; operation {operation.id} goes on without it"
            operation = replace(operation, error=PeerLost.__name__, reason=reason)
        return _answer(control, operation)

    # Changes.

    def _watch(self, control: Control) -> None:
        seen = 0
        while not self.is_closing:
            self._refresh(control)
            self._closing.wait(_REST_SECONDS)
            seen = control.cell.wait_change(seen, _POLL_SECONDS)

    def _refresh(self, control: Control, operation: Operation | None = None) -> None:
        """Record a replica's status, and an operation if it has ended; notify of changes."""
        with self._lock:
            has_changed = self._journal.record_status(_status(control))
            if operation is not None:
                has_changed |= self._journal.record_operation(operation)
        if has_changed:
            self._notify()

    def _notify(self) -> None:
        with self._lock:
            self._num_changes += 1
            listeners = self._listeners
        for listener in listeners:
            listener()

    def end_waits(self) -> None:
        """Wake listeners and everyone who waits for an operation: the fleet is closing."""
        self._closing.set()
        self._notify()

    def close(self) -> None:
        """Close the control of every replica; the replicas go on. Safe to repeat.

        A watcher that does not end in time keeps its cell open until the process ends.
        """
        if not self._watchers:
            return
        self.end_waits()
        for control in self._controls.values():
            control.cell.end_waits()
        deadline = monotonic() + CLOSE_SECONDS
        for watcher, control in zip(self._watchers, self._controls.values(), strict=True):
            watcher.join(max(deadline - monotonic(), 0.0))
            if not watcher.is_alive():
                control.close()
        self._watchers = []


def _status(control: Control) -> ReplicaStatus:
    """Return the status of a replica, which is FAILED if its cell cannot be read."""
    try:
        control.cell.check_current()
        return control.status()
    except FlyweightError as error:
        return ReplicaStatus(
            name=control.name,
            state=State.FAILED,
            version=None,
            percent=0.0,
            reason=str(error),
            ranks=(),
            operation=None,
        )


def _busy(control: Control) -> Busy | None:
    try:
        control.check_idle()
    except Busy as error:
        return error
    except FlyweightError:
        pass  # starting the operation raises it again
    return None


def _start(control: Control, request: Request) -> Operation:
    """Start an operation; return one that has failed if the replica refuses it."""
    try:
        return control.start(request)
    except FlyweightError as error:
        return _refused(control, error, request.signal)


def _refused(control: Control, error: FlyweightError, signal: str = "") -> Operation:
    """Return an operation that was not started, with the id of the one that is in its way."""
    busy = error.operation if isinstance(error, Busy) else ""
    return Operation(
        id=busy,
        replica=control.name,
        signal=busy.partition("-")[0].upper() or signal,  # an id is the signal and a number
        ending="failed",
        error=type(error).__name__,
        reason=str(error),
    )


def _answer(control: Control, operation: Operation) -> Answer:
    status, error = _status(control), operation.error
    return Answer(
        replica=control.name,
        ending="busy" if error == Busy.__name__ else "failed" if error else "done",
        operation=operation.id or None,
        signal=operation.signal,
        error=error,
        reason=operation.reason,
        state=status.state,
        version=status.version,
        seconds=operation.seconds,
    )
