"""Courses: what is asked of a replica, one order after the other, and how it answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from flyweight.errors import Busy, FlyweightError, PeerLost
from flyweight.lifecycle.control import Control, Operation, ReplicaStatus
from flyweight.lifecycle.states import Signal, Tag
from flyweight.server.standing import standing


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to ask of a replica."""

    signal: Signal
    version: int | None = None
    tags: tuple[Tag, ...] = ()
    may_drain: bool = True
    should_abort: bool = False
    should_resume: bool = False
    timeout_seconds: float = 60.0


Course = Callable[[ReplicaStatus], Sequence[Order]]
"""What to ask of a replica, one after the other, by how it stands before."""

Hold = Callable[[Control, Operation], None]
"""Keeps others out until the errand that an operation is of has ended."""

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
    version: int | None
    seconds: float


class Errand:
    """A course's orders for one replica, and how far they have come."""

    def __init__(self, control: Control, orders: Sequence[Order], hold: Hold, wait: Wait) -> None:
        self.control = control
        self._left, self._hold, self._wait = deque(orders), hold, wait
        self._order: Order | None = None
        self._operation: Operation | None = None
        self._error: FlyweightError | None = None
        self.is_begun = False
        """Whether anything was asked, so that others are kept out."""

    def ask(self) -> None:
        """Ask for the next order, without waiting."""
        self._order = order = self._left.popleft()
        self._operation = None
        try:
            self._operation = self.control.start(
                order.signal,
                version=order.version,
                tags=order.tags,
                may_drain=order.may_drain,
                should_abort=order.should_abort,
                should_resume=order.should_resume,
                timeout_seconds=order.timeout_seconds,
            )
        except FlyweightError as error:
            self._error = error
        else:
            self.is_begun = True
            self._hold(self.control, self._operation)

    def follow(self) -> Answer:
        """Wait for what was asked, and ask on until all is done or something went wrong."""
        seconds = 0.0
        while True:
            error, reason = self._outcome()
            if self._operation is not None:
                seconds += self._operation.seconds
            if error or not self._left:
                break
            self.ask()
        now = standing(self.control)
        assert self._order is not None
        is_busy = error == Busy.__name__
        number = None if self._operation is None else self._operation.id
        if isinstance(self._error, Busy):
            number = self._error.operation
        return Answer(
            replica=self.control.name,
            ending="busy" if is_busy else "failed" if error else "done",
            operation=number,
            signal=self._order.signal,
            error=error,
            reason=reason,
            state=now.state,
            version=now.version,
            seconds=seconds,
        )

    def _outcome(self) -> tuple[str, str]:
        if self._error is not None:
            return type(self._error).__name__, str(self._error)
        assert self._order is not None
        assert self._operation is not None
        operation = self._operation
        if not self._wait(self.control, operation, self._order.timeout_seconds):
            return PeerLost.__name__, f"the server ends, operation {operation.id} goes on"
        return operation.error, operation.reason
