"""Courses: what is asked of a replica, and how it answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from flyweight.errors import Busy, FlyweightError, PeerLost
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.replica_status import Operation, ReplicaStatus
from flyweight.lifecycle.states import Signal, Tag
from flyweight.server.standing import standing


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to ask of a replica."""

    signal: Signal
    version: int | None = None
    version_text: str | None = None
    """How the version was asked for, if it was asked for by a text."""
    tags: tuple[Tag, ...] = ()
    may_drain: bool = True
    must_verify: bool = False
    should_abort: bool = False
    should_resume: bool = False
    timeout_seconds: float = 60.0


Course = Callable[[ReplicaStatus], Order]
"""What to ask of a replica, by how it stands before."""

Wait = Callable[[Control, Operation, float], bool]
"""Waits for an operation, so many seconds, and returns whether it was seen to end."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """How a replica answered: with the operation that ended, or with the one that runs."""

    replica: str
    ending: Literal["done", "busy", "failed"]
    operation: str | None
    signal: str
    error: str
    """The error's name; nothing if it is done."""
    reason: str
    state: str
    version: int | str | None
    """What the replica holds; the text by which it was asked for, if that is what it holds."""
    seconds: float


class Errand:
    """An order for one replica, and what came of it."""

    def __init__(self, control: Control, order: Order, wait: Wait) -> None:
        self._control, self._order, self._wait = control, order, wait
        self._operation: Operation | None = None
        self._error: FlyweightError | None = None

    def ask(self) -> None:
        """Ask, without waiting."""
        order = self._order
        try:
            self._operation = self._control.start(
                order.signal,
                version=order.version,
                tags=order.tags,
                may_drain=order.may_drain,
                must_verify=order.must_verify,
                should_abort=order.should_abort,
                should_resume=order.should_resume,
                timeout_seconds=order.timeout_seconds,
            )
        except FlyweightError as error:
            self._error = error

    def answer(self) -> Answer:
        """Wait for what was asked, and return how it ended."""
        error, reason = self._outcome()
        operation, now = self._operation, standing(self._control)
        number = None if operation is None else operation.id
        if isinstance(self._error, Busy):
            number = self._error.operation
        return Answer(
            replica=self._control.name,
            ending="busy" if error == Busy.__name__ else "failed" if error else "done",
            operation=number,
            signal=self._order.signal,
            error=error,
            reason=reason,
            state=now.state,
            version=self._version(now.version),
            seconds=0.0 if operation is None else operation.seconds,
        )

    def _version(self, held: int | None) -> int | str | None:
        order = self._order
        is_it = order.version_text is not None and held == order.version
        return order.version_text if is_it else held

    def _outcome(self) -> tuple[str, str]:
        if self._error is not None:
            return type(self._error).__name__, str(self._error)
        assert self._operation is not None
        operation = self._operation
        if not self._wait(self._control, operation, self._order.timeout_seconds):
            return PeerLost.__name__, f"the server ends, operation {operation.id} goes on"
        return operation.error, operation.reason
