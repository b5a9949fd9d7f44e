"""A replica's connection to its publisher: joins, requests versions, and receives messages.

Messages of the publisher wait in an inbox for the thread that runs the update; heartbeats are
handled by the connection's own thread. Watchers and the other ranks of a publisher have such a
connection too, and do not join.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from time import monotonic
from typing import Literal, TypeVar

import msgspec

from flyweight.errors import (
    FlyweightError,
    PeerLost,
    PeerRefused,
    TransferTimeout,
    TransportError,
    error_named,
)
from flyweight.forks import call_in_child
from flyweight.host import identity
from flyweight.live import frames, messages
from flyweight.live.connection import HEARTBEATS, Connection
from flyweight.live.fetch import Fetches, FetchEvent
from flyweight.live.line import Line
from flyweight.live.remote_source import RemoteSource
from flyweight.ports import UpdateOptions
from flyweight.ranks.decision import RoundDecisions
from flyweight.ranks.run_directory import directory_id
from flyweight.spec.manifest import TensorSpec
from flyweight.transports.network_engines import Engines, engines_here

HEARTBEAT_SECONDS = 1.0

MessageT = TypeVar("MessageT", bound=frames.FromPublisher)
ChooseTensors = Callable[[Mapping[str, TensorSpec], Mapping[str, str]], messages.Want]


def _never() -> bool:
    return False


class ReplicaConnection:
    """One connection; when it is lost, its owner makes another."""

    source: RemoteSource
    """The publisher's blocks; set by `join`."""
    session: str
    """The session of the publisher, or of the one that it follows; set by `join`."""
    newest: int | None
    """The newest version that the publisher had then; set by `join`."""
    unused: tuple[str, ...]
    """The publisher's tensors that the replica does not want; set by `join`."""
    decisions: RoundDecisions | None = None
    """The verdicts for this replica, if it has several ranks."""

    def __init__(
        self,
        line: Line,
        name: str,
        *,
        role: Literal["replica", "watcher", "source"] = "replica",
        rank: int = 0,
        num_ranks: int = 1,
        serves_at: str = "",
    ) -> None:
        """Say hello to the publisher at the other end of a line, which is closed with this."""
        self._line, address = line, line.address
        self.address, self.name = address, name
        self.rank, self.num_ranks = rank, num_ranks
        self.copied_bytes: Callable[[], int] = lambda: 0
        """How much is copied in the round under way; heartbeats report it."""
        self._changed = threading.Condition()
        self._inbox: deque[frames.FromPublisher | FetchEvent] = deque()
        self._fetches: Fetches | None = None
        self._error: FlyweightError | None = None
        self._last_seen = monotonic()
        self._silence_seconds = float("inf")
        self.has_ended = False
        """True once the publisher has said goodbye."""
        self._num_requests = 0
        self._open_request = 0
        """The request that is waited for; a round that answers another one is declined."""
        with ExitStack() as stack:
            stack.callback(line.close)
            self._connection = Connection(
                line.endpoint,
                is_publisher=False,
                on_frame=self._on_frame,
                on_heartbeat=self._on_heartbeat,
                heartbeat_seconds=HEARTBEAT_SECONDS,
                on_unreachable=lambda *_: self._lose(PeerLost(f"{address} accepts no messages")),
                curve=line.curve,
                on_refused=lambda text: self._lose(
                    PeerRefused(f"the publisher at {address} {text}")
                ),
                files=line.files,
                on_peer_gone=lambda: self._lose(PeerLost(f"the publisher at {address} is gone")),
                on_failure=lambda: self._lose(PeerLost("the connection has ended by an error")),
            )
            stack.callback(self._connection.close)
            self._connection.start()
            decisions = directory_id(line.directory) if num_ranks > 1 else ""
            who = (line.secret, name, os.getpid(), line.files.name, role, rank, num_ranks)
            # A rank of the publisher may be read from other hosts, wherever rank 0 is.
            engines = engines_here() if line.is_remote or role == "source" else Engines()
            has = (line.can_forward, serves_at, engines)
            self.send(messages.Hello(*who, decisions, identity(), *has))
            self._closing = stack.pop_all()
        call_in_child(self._replace_lock)

    def _replace_lock(self) -> None:
        """Replace the lock after a fork: the thread that held it does not exist in the child."""
        self._changed = threading.Condition()

    def join(self, choose: ChooseTensors, deadline: float, is_over: Callable[[], bool]) -> None:
        """Agree with the publisher on a plan.

        choose: takes the publisher's tensors and the names that are tied to others, and returns
            which boxes the replica wants.
        """
        welcome = self.welcomed(deadline, is_over)
        tensors = welcome.tensors.specs()
        self.session, self.newest = welcome.follows or welcome.session, welcome.version
        want = choose(tensors, welcome.tied)
        if self._line.is_remote:
            want = msgspec.structs.replace(want, is_remote=True)
        self.send(want)
        agreed = self.expect(messages.Agreed, deadline, "an agreement", is_over=is_over)
        transports = self._line.transports()
        self.source = RemoteSource(agreed, tensors, welcome.tied, want, transports)
        used = {welcome.tied.get(each, each) for each in want.tensors.names}
        self.unused = tuple(name for name in tensors if name not in used)
        if self.num_ranks > 1:
            # Opened now: a rank that loses its publisher still finds what was decided.
            self.decisions = RoundDecisions(self._line.directory, welcome.session, self.name)

    def welcomed(self, deadline: float, is_over: Callable[[], bool] = _never) -> messages.Welcome:
        """Return the publisher's answer to the hello, and send heartbeats as it expects."""
        welcome = self.expect(messages.Welcome, deadline, "a welcome", is_over=is_over)
        self._line.check_same(welcome)
        self._silence_seconds = welcome.silence_seconds
        self._connection.set_heartbeat(min(HEARTBEAT_SECONDS, welcome.silence_seconds / HEARTBEATS))
        return welcome

    def request(
        self,
        options: UpdateOptions,
        held: int | None,
        session: str,
        deadline: float,
        *,
        may_be_elsewhere: bool = False,
    ) -> messages.Begin | messages.Elsewhere | None:
        """Request a version; return the start of its round, or None if the replica has it.

        held, session: the version that the replica holds, and the publisher that it is of.
        may_be_elsewhere: whether to return where else the version is, if that is nearer.
        """
        have = held if session == self.session else None
        may_keep = have is not None and (options.may_keep or have == options.version)
        self._num_requests += 1
        number, version = self._num_requests, options.version
        ask = messages.Ask(number, version, have, held, may_keep, may_be_elsewhere)
        self._open_request = ask.ask
        self.send(ask)
        newer = "a version" if ask.have is None else f"a version after {ask.have}"
        what = newer if ask.version is None else f"version {ask.version}"
        try:
            while True:
                message = self.next(deadline, what, is_over=options.is_over)
                match message:
                    case messages.Begin(ask=number) if number == ask.ask:
                        return message
                    case messages.Elsewhere(ask=number) if number == ask.ask and may_be_elsewhere:
                        return message
                    case messages.Kept(ask=number) if number == ask.ask and ask.may_keep:
                        return None
                    case messages.Denied(ask=number, kind=kind, text=text) if number == ask.ask:
                        raise error_named(kind, text)
                    case _:
                        continue  # the end of an earlier round
        except BaseException as error:
            if isinstance(error, TransferTimeout) and self.num_ranks > 1 and not self.is_lost:
                error.note(f"all {self.num_ranks} ranks of the engine must request a version")
            self._withdraw(ask.ask)
            raise

    def _withdraw(self, number: int) -> None:
        """Stop waiting for a request; a round that has begun meanwhile is declined."""
        with self._changed:
            self._open_request = 0
            begun = [each for each in self._inbox if isinstance(each, messages.Begin)]
            self._inbox.clear()
        self.send(messages.Withdraw(number))
        for each in begun:
            self._decline(each)

    def _decline(self, begin: messages.Begin) -> None:
        text = f"request {begin.ask} was withdrawn"
        self.send(messages.Fault(begin.round, "TransferTimeout", text, False))

    def send(self, message: messages.Message) -> None:
        self._connection.send(message)

    def attach(self, fetches: Fetches | None) -> None:
        """Pass on what the publisher says of buckets, as it arrives; None ends that."""
        with self._changed:
            self._fetches = fetches
            if fetches is not None:
                self._inbox = deque(each for each in self._inbox if not fetches.take(each))

    def post(self, event: FetchEvent) -> None:
        """Let the thread that waits for messages know of an event on this side."""
        with self._changed:
            self._inbox.append(event)
            self._changed.notify_all()

    @property
    def is_lost(self) -> bool:
        return self._error is not None

    def expect(
        self,
        kind: type[MessageT],
        deadline: float,
        what: str,
        *,
        is_over: Callable[[], bool] = _never,
    ) -> MessageT:
        """Return the next message, which must be of this kind; `what` names it in errors."""
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
        is_over: Callable[[], bool] = _never,
    ) -> frames.FromPublisher | FetchEvent:
        """Return the next message; raise what ended the connection, or TransferTimeout.

        spin_seconds: busy-wait for this long first, for a message that is due soon.
        is_over: ends the wait if it returns True when `wake` is called.
        """
        if spin_seconds:
            self._connection.spin(lambda: bool(self._inbox) or self.is_lost, spin_seconds)
        with self._changed:
            self._changed.wait_for(
                lambda: self._inbox or self._error or is_over(), max(deadline - monotonic(), 0)
            )
            if self._inbox:
                return self._inbox.popleft()
            if self._error is not None:
                raise self._error
        raise TransferTimeout(f"{what} from {self.address} did not come in time")

    def check_open(self, round_: int) -> None:
        """Raise what ended the connection, or the round."""
        with self._changed:
            if self._error is not None:
                raise self._error
            for each in self._inbox:
                if isinstance(each, messages.Abort) and each.round == round_:
                    raise error_named(each.kind, each.text)

    def wake(self) -> None:
        """Make a thread that waits for a message call its `is_over`."""
        with self._changed:
            self._changed.notify_all()

    def wait_read(self, seconds: float) -> None:
        """Wait until no other replica reads the last version from here, or for so long."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.is_lost or self._fetches is None or not self._fetches.is_needed,
                seconds,
            )

    def disconnect(self, text: str = "closed") -> None:
        """Say goodbye; memory stays mapped until `close`. Safe to repeat."""
        if not self.is_lost:
            self.send(messages.Bye(text))
        self._lose(PeerLost(f"the connection to {self.address} was closed"))
        self._closing.close()

    def close(self) -> None:
        """Unmap the publisher's memory and disconnect. Safe to repeat."""
        self.source.close()
        self.disconnect()
        if self.decisions is not None:
            self.decisions.close()

    # Called by the connection's thread.

    def _on_frame(self, _: bytes, frame: memoryview) -> None:
        try:
            message = frames.decode_from_publisher(frame)
        except FlyweightError as error:
            self._lose(error)
            return
        with self._changed:
            self._last_seen = monotonic()
            match message:
                case messages.Tick():
                    return
                case messages.Bye(text=text):
                    self.has_ended = True
                    self._lose(PeerLost(f"the publisher at {self.address} disconnected: {text}"))
                case messages.Refusal(kind=kind, text=text):
                    # If the files are closed, this is another publisher, which does not know us.
                    is_same = self._line.files.is_open
                    gone = PeerLost(f"the publisher at {self.address} is gone")
                    self._lose(error_named(kind, text) if is_same else gone)
                case messages.Filled() | messages.Free() if self._fetches is not None:
                    if not self._fetches.take(message):
                        self._inbox.append(message)
                case messages.Begin(ask=number) if number != self._open_request:
                    self._decline(message)
                case messages.Going():
                    self.send(messages.Tick(self.copied_bytes()))  # it asks for progress
                    self._inbox.append(message)
                case messages.News():
                    self._inbox.clear()  # only the newest state matters
                    self._inbox.append(message)
                case _:
                    self._inbox.append(message)
            self._changed.notify_all()

    def _on_heartbeat(self, now: float) -> None:
        self.send(messages.Tick(self.copied_bytes()))
        if now - max(self._last_seen, self._connection.awake_since) > self._silence_seconds:
            self._lose(
                TransferTimeout(
                    f"the publisher at {self.address} was silent for {self._silence_seconds:g} s"
                )
            )

    def _lose(self, error: FlyweightError) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()
