"""The ranks of one save, load or update: they exchange messages and learn at once when one ends.

Every rank holds one connection to the coordinator. A rank whose connection closes is lost;
a rank that fails sends the reason; a rank that is silent for `timeout_seconds` while it is
waited for is given up. The coordinator forwards the first fault to all ranks, so that each
of them raises an error that names the rank at fault. `rendezvous.py` connects the ranks.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import NoReturn, TypeVar

import msgspec

from flyweight.errors import (
    FlyweightError,
    PeerFailed,
    PeerLost,
    StoreError,
    TransferTimeout,
    TransportError,
)
from flyweight.forks import call_in_child
from flyweight.ranks.connection import DONE, TICK, Connection, fault_frame, fault_named, frame_of
from flyweight.spec.strict_json import Json, convert

T = TypeVar("T")
TIMEOUT_SECONDS = 120.0
PATIENCE = 0.75
"""The coordinator waits for this share of the time that others wait for the coordinator."""
WORKING_TIMES = 10
"""How many timeouts long `Group.working` vouches for a rank."""
_LINGER_SECONDS = 2.0
NOTICE_SECONDS = 1.0
"""How long a rank tries to tell another that the work has ended."""


class Group:
    """The ranks that work together. A group of one rank has no connections.

    Args:
        rank, num_ranks, coordinator: this rank, the size of the group, and the rank that the
            others are connected to.
        connections: sockets to the other ranks: the coordinator's to all, another rank's to
            the coordinator. The group closes them.
        timeout_seconds: how long a rank may be silent while it is waited for.
    """

    def __init__(
        self,
        rank: int = 0,
        num_ranks: int = 1,
        coordinator: int = 0,
        *,
        connections: Mapping[int, socket.socket] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.rank, self.num_ranks, self.coordinator = rank, num_ranks, coordinator
        self.set_timeout(timeout_seconds)
        self._connections = {
            peer: Connection(f"{'coordinator ' * (peer == coordinator)}rank {peer}", each)
            for peer, each in (connections or {}).items()
        }
        self._changed = threading.Condition()
        self._fault: TransportError | None = None
        self._is_failing = self._is_closed = False
        self._step = "join"
        self._last_tick = monotonic()
        self._listener: threading.Thread | None = None
        for each in self._connections.values():
            each.socket.setblocking(False)
        if self._connections:
            self._listener = threading.Thread(
                target=self._listen, name="flyweight-group", daemon=True
            )
            self._listener.start()
            call_in_child(self._close_sockets)

    @property
    def is_coordinator(self) -> bool:
        return self.rank == self.coordinator

    def set_timeout(self, timeout_seconds: float) -> None:
        """Change the timeout of every wait from now on; all ranks must set about the same."""
        # The coordinator gives a silent rank up before others give the coordinator up for it.
        self._timeout_seconds = timeout_seconds * (PATIENCE if self.is_coordinator else 1)

    def gather(self, step: str, message: Json) -> list[Json]:
        """Return every rank's message, by rank, at the coordinator; elsewhere an empty list."""
        self._enter(step)
        if not self.is_coordinator:
            self._send(self._connections[self.coordinator], message)
            return []
        found = self._receive()
        found[self.rank] = message
        return [found[rank] for rank in range(self.num_ranks)]

    def gather_typed(self, step: str, message: T) -> list[T]:
        """Do as `gather` for messages of a type that msgspec knows; other ranks' are checked."""
        answers = self.gather(step, msgspec.to_builtins(message))
        return [
            convert(each, type(message), f"the message of rank {rank}")
            for rank, each in enumerate(answers)
        ]

    def scatter(self, step: str, messages: Sequence[Json]) -> Json:
        """Return this rank's message out of the coordinator's list, which has one for each rank."""
        self._enter(step)
        if not self.is_coordinator:
            return self._receive()[self.coordinator]
        for peer, connection in self._connections.items():
            self._send(connection, messages[peer])
        return messages[self.rank]

    def broadcast(self, step: str, message: Json) -> Json:
        """Return the coordinator's message."""
        return self.scatter(step, [message] * self.num_ranks)

    def tick(self) -> None:
        """Tell the others that work goes on; raise if one of them is known to have ended.

        Cheap enough to call for every few megabytes, from any thread.
        """
        self._raise_fault()
        self._send_tick()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Tell the others that work goes on, during a block that cannot call `tick` itself.

        Not for ever: the others must notice a disk that hangs.
        """
        if not self._connections:
            yield
            return
        done, until = threading.Event(), monotonic() + WORKING_TIMES * self._timeout_seconds

        def send_ticks() -> None:
            while not done.wait(self._timeout_seconds / 20) and monotonic() < until:
                self._send_tick()

        thread = threading.Thread(target=send_ticks, name="flyweight-working", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(_LINGER_SECONDS)

    def _send_tick(self) -> None:
        now = monotonic()
        if now - self._last_tick >= self._timeout_seconds / 20:
            self._last_tick = now
            self._send_all(TICK)

    def _enter(self, step: str) -> None:
        self._step = step
        self._raise_fault()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def wait_for_fault(self, seconds: float) -> None:
        """Raise the group's fault, if there is one or another thread sets one in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._fault is not None, seconds)
        self._raise_fault()

    # Messages.

    def _send(self, connection: Connection, body: Json) -> None:
        try:
            connection.send(frame_of("step", step=self._step, body=body), self._timeout_seconds)
        except TimeoutError:
            self._give_up(self._silent(connection))
        except OSError as cause:
            # The reason why the peer closed may have arrived before: the listener knows it.
            self.wait_for_fault(_LINGER_SECONDS)
            self._give_up(self._lost(connection, cause))
        self._raise_fault()

    def _receive(self) -> dict[int, Json]:
        """Return one message from each connection, once all have arrived."""
        started, was_overdue = monotonic(), False

        def awaited() -> list[Connection]:
            return [each for each in self._connections.values() if not each.inbox]

        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._fault or not awaited(), self._timeout_seconds / 20
                )
            self._raise_fault()
            oldest = monotonic() - self._timeout_seconds
            if not (waiting := awaited()):
                break
            overdue = [each for each in waiting if max(started, each.heard) < oldest]
            if overdue and was_overdue:
                self._give_up(self._silent(overdue[0]))
            # If this process was stopped, frames that came meanwhile are still unread.
            was_overdue = bool(overdue)
            if self.is_coordinator:
                self._send_tick()  # ranks that wait for us wait for those that we wait for
        found = {peer: each.inbox.popleft() for peer, each in self._connections.items()}
        for peer, (step, _) in found.items():
            if step != self._step:
                raise TransportError(
                    f"rank {peer} is at step {step!r}, this rank {self.rank} at {self._step!r}; "
                    f"all ranks must make the same call"
                )
        return {peer: body for peer, (_, body) in found.items()}

    # Faults.

    def _silent(self, connection: Connection) -> TransferTimeout:
        return TransferTimeout(
            f"{connection.name} was silent for {self._timeout_seconds:g} s in step {self._step!r}"
        )

    def _lost(self, connection: Connection, cause: OSError | None = None) -> PeerLost:
        why = f": {cause}" if cause else ", as a process that dies does"
        return PeerLost(f"{connection.name} closed its connection in step {self._step!r}{why}")

    def _give_up(self, fault: TransportError) -> NoReturn:
        """Raise the group's fault: this one, unless another came first."""
        self._fail(fault)
        self.wait_for_fault(self._timeout_seconds)
        raise fault

    def _fail(self, fault: TransportError) -> None:
        """Keep the first fault, after telling the connected ranks of it."""
        with self._changed:
            if self._is_failing:
                return
            self._is_failing = True
        # A rank tells the coordinator why it gives up, the coordinator tells all others.
        self._send_all(fault_frame(fault))
        with self._changed:  # a thread that waits may close connections as soon as it knows
            self._fault = fault
            self._changed.notify_all()

    def _send_all(self, frame: bytes) -> None:
        seconds = min(self._timeout_seconds, NOTICE_SECONDS)
        for connection in self._connections.values():
            with suppress(OSError):  # the listener notices a rank that is gone
                connection.send(frame, seconds)

    # The listening thread.

    def _listen(self) -> None:
        """Handle what arrives, until every connection is closed."""
        with selectors.DefaultSelector() as selector:
            for each in self._connections.values():
                selector.register(each.socket, selectors.EVENT_READ, each)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._is_open_after_read(key.data):
                        selector.unregister(key.fileobj)

    def _is_open_after_read(self, connection: Connection) -> bool:
        try:
            messages, is_open = connection.receive()
            for message in messages:
                self._handle(connection, message)
            if is_open:
                return True
            fault = None if connection.is_done else self._lost(connection)
        except OSError as cause:
            fault = self._lost(connection, cause)
        except FlyweightError as error:
            fault = PeerLost(f"{connection.name} sent no message: {error}")
        if fault is not None and not self._is_closed:
            self._fail(fault)
        return False

    def _handle(self, connection: Connection, message: Json) -> None:
        match message:
            case {"kind": "tick"}:
                pass
            case {"kind": "step", "step": str() as step, "body": body}:
                connection.inbox.append((step, body))
            case {"kind": "done"}:
                connection.is_done = True
            case {"kind": "fault", "body": {"type": str() as kind, "text": str() as text}}:
                self._fail(fault_named(kind, text))
            case _:
                self._fail(PeerLost(f"{connection.name} sent {str(message)[:80]}"))
        with self._changed:
            connection.heard = monotonic()
            self._changed.notify_all()

    # The end.

    @property
    def is_over(self) -> bool:
        """True if a rank left, was given up or died; one that was started again may join anew."""
        return self._fault is not None or any(each.is_done for each in self._connections.values())

    def leave(self) -> None:
        """Close after telling the others that this rank leaves on purpose."""
        self._send_all(DONE)
        self.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Tell the others how the work ended here, then close.

        A file may be gone because another rank gave up; then that rank's fault is raised.
        """
        try:
            if self._connections and isinstance(error, StoreError) and error.errno == errno.ENOENT:
                try:
                    self.wait_for_fault(_LINGER_SECONDS)
                except TransportError as fault:
                    raise fault from error
            if error is not None and error is not self._fault:
                what = f"{type(error).__name__}: {error}"
                self._fail(PeerFailed(f"rank {self.rank} failed in step {self._step!r}: {what}"))
        finally:
            if error is None:
                self.leave()
            else:
                self.close()

    def close(self) -> None:
        """Close every connection. Safe to repeat."""
        if self._listener is None:
            return
        self._is_closed = True
        # Closing a socket with unread bytes discards what was sent through it: listen until the
        # others have closed too, but not for ever.
        for how in (socket.SHUT_WR, socket.SHUT_RDWR):
            for each in self._connections.values():
                with suppress(OSError):
                    each.socket.shutdown(how)
            self._listener.join(_LINGER_SECONDS)
        self._listener = None
        self._close_sockets()

    def _close_sockets(self) -> None:
        for each in self._connections.values():
            each.socket.close()
