"""Subscriber: a replica's connection to its publisher, from hello to goodbye.

What the publisher says waits in an inbox for whoever runs the round; that it lives,
and that we do, is told by the wire's own thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic
from typing import TypeVar

from flyweight.errors import (
    FlyweightError,
    PeerLost,
    PeerRefused,
    TransferTimeout,
    TransportError,
    error_named,
)
from flyweight.forks import call_in_child
from flyweight.host import birth_of
from flyweight.live.address import Address
from flyweight.live.connection import BEATS, Wire
from flyweight.live.messages import (
    Abort,
    Agreed,
    Begin,
    Bye,
    Fault,
    FromPublisher,
    Hello,
    Message,
    News,
    Refusal,
    Tick,
    Want,
    Welcome,
    Withdraw,
    decode_from_publisher,
)
from flyweight.transports.fd_passing import ANSWER_SECONDS, FdConnection, check_files

BEAT_SECONDS = 1.0
_MIN_ANSWER_SECONDS = 0.1

MessageT = TypeVar("MessageT", bound=FromPublisher)


class Subscriber:
    """One connection; when it is lost, its owner makes another."""

    def __init__(
        self,
        address: Address,
        token: str | None,
        name: str,
        *,
        is_watcher: bool = False,
        deadline: float = float("inf"),
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect to the publisher that is there by now, or raise PeerLost.

        One that does not answer is waited for until the deadline, some seconds at most.
        """
        check_files()
        self.address = address
        self._changed = threading.Condition()
        self._inbox: deque[FromPublisher] = deque()
        self._fault: FlyweightError | None = None
        self._heard = monotonic()
        self._silence_seconds = float("inf")
        self.has_parted = False
        """True once the publisher has said goodbye."""
        self.open_ask = 0
        """The ask that is waited for; a round that answers another one is declined."""
        known = address.token() if token is None else token
        with ExitStack() as stack:
            try:
                seconds = max(min(ANSWER_SECONDS, deadline - monotonic()), _MIN_ANSWER_SECONDS)
                self.line = FdConnection(
                    address.door, token=known, timeout_seconds=seconds, is_over=is_over
                )
            except PeerRefused as refused:
                if token is None and address.token() != known:
                    raise PeerLost(f"another publisher came to {address} just now") from refused
                raise
            stack.callback(self.line.close)
            self._wire = Wire(
                address.endpoint,
                is_publisher=False,
                hear=self._hear,
                beat=self._beat,
                beat_seconds=BEAT_SECONDS,
                unreachable=lambda peer: self._lose(PeerLost(f"{address} takes no messages")),
                line=self.line,
                hung_up=lambda: self._lose(PeerLost(f"the publisher at {address} is gone")),
                broken=lambda: self._lose(PeerLost("the wire has ended by an error of ours")),
            )
            stack.callback(self._wire.close)
            self._wire.start()
            self.send(Hello(known, name, os.getpid(), self.line.name, is_watcher))
            self._closing = stack.pop_all()
        call_in_child(self._replace_lock)

    def _replace_lock(self) -> None:
        """Have no lock, in a forked child, of whose holder did not come along."""
        self._changed = threading.Condition()

    def welcomed(self, deadline: float, is_over: Callable[[], bool]) -> Welcome:
        """Return what the publisher has; raise PeerLost if it is not the process at the door.

        Its memory is fetched there: where a publisher was restarted meanwhile, old memory.
        """
        welcome = self.take(Welcome, deadline, "a welcome", is_over=is_over)
        seen = birth_of(self.line.pid)
        if seen is not None and (welcome.pid, welcome.started) != seen:
            raise PeerLost(
                f"the publisher at {self.address} says it is process {welcome.pid}, started at "
                f"{welcome.started} ticks; at its door is process {seen[0]}, started at {seen[1]}"
            )
        self._silence_seconds = welcome.silence_seconds
        self._wire.beat_every(min(BEAT_SECONDS, welcome.silence_seconds / BEATS))
        return welcome

    def agree(self, want: Want, deadline: float, is_over: Callable[[], bool]) -> Agreed:
        self.send(want)
        return self.take(Agreed, deadline, "an agreement", is_over=is_over)

    def withdraw(self, ask: int) -> None:
        """Wait no longer; a round that has begun meanwhile is declined."""
        with self._changed:
            self.open_ask = 0
            begun = [each for each in self._inbox if isinstance(each, Begin)]
            self._inbox.clear()
        self.send(Withdraw(ask))
        for each in begun:
            self._decline(each)

    def _decline(self, begin: Begin) -> None:
        text = f"ask {begin.ask} was withdrawn"
        self.send(Fault(begin.round, "TransferTimeout", text, False))

    def send(self, message: Message) -> None:
        self._wire.send(message)

    @property
    def is_lost(self) -> bool:
        return self._fault is not None

    def take(
        self,
        kind: type[MessageT],
        deadline: float,
        what: str,
        *,
        is_over: Callable[[], bool] = lambda: False,
    ) -> MessageT:
        """Return the next message, which must be of that kind."""
        message = self.next(deadline, what, is_over=is_over)
        if isinstance(message, kind):
            return message
        raise TransportError(
            f"the publisher at {self.address} sent {type(message).__name__}, not {what}"
        )

    def next(
        self,
        deadline: float,
        what: str,
        *,
        spin_seconds: float = 0.0,
        is_over: Callable[[], bool] = lambda: False,
    ) -> FromPublisher:
        """Return the next message; raise what ended the connection, or TransferTimeout.

        One that is due soon is best waited for awake, for `spin_seconds`. Once `is_over`, and
        `wake` was called, it is waited for no longer.
        """
        if spin_seconds:
            self._wire.spin(lambda: bool(self._inbox) or self.is_lost, spin_seconds)
        with self._changed:
            self._changed.wait_for(
                lambda: self._inbox or self._fault or is_over(), max(deadline - monotonic(), 0)
            )
            if self._inbox:
                return self._inbox.popleft()
            if self._fault is not None:
                raise self._fault
        raise TransferTimeout(f"{what} from {self.address} did not come in time")

    def check_open(self, round_: int) -> None:
        """Raise what ended the connection, or the round."""
        with self._changed:
            if self._fault is not None:
                raise self._fault
            for each in self._inbox:
                if isinstance(each, Abort) and each.round == round_:
                    raise error_named(each.kind, each.text)

    def wake(self) -> None:
        """Have who waits look whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def close(self, text: str = "closed") -> None:
        """Say goodbye. Safe to repeat."""
        if not self.is_lost:
            self.send(Bye(text))
        self._lose(PeerLost(f"the connection to {self.address} was closed"))
        self._closing.close()

    # In the wire's thread.

    def _hear(self, _: bytes, frame: bytes) -> None:
        try:
            message = decode_from_publisher(frame)
        except FlyweightError as error:
            self._lose(error)
            return
        with self._changed:
            self._heard = monotonic()
            match message:
                case Tick():
                    return
                case Bye(text=text):
                    self.has_parted = True
                    self._lose(PeerLost(f"the publisher at {self.address} went: {text}"))
                case Refusal(kind=kind, text=text):
                    # If who let us in is gone, it was another one that does not know us.
                    is_same = self.line.is_open
                    gone = PeerLost(f"the publisher at {self.address} is gone")
                    self._lose(error_named(kind, text) if is_same else gone)
                case Begin(ask=ask) if ask != self.open_ask:
                    self._decline(message)
                case News():
                    self._inbox.clear()  # only the newest is news
                    self._inbox.append(message)
                case _:
                    self._inbox.append(message)
            self._changed.notify_all()

    def _beat(self, now: float) -> None:
        self.send(Tick())
        if now - max(self._heard, self._wire.awake_since) > self._silence_seconds:
            self._lose(
                TransferTimeout(
                    f"the publisher at {self.address} was silent for {self._silence_seconds:g} s"
                )
            )

    def _lose(self, error: FlyweightError) -> None:
        with self._changed:
            if self._fault is None:
                self._fault = error
            self._changed.notify_all()
