"""The ranks that do something together: they exchange messages, and hear of each other's end.

Every rank holds one connection to the coordinator. A rank whose connection closes is lost; a rank
that fails sends the reason; a rank that is silent while it is waited for is given up. The
coordinator forwards the first fault to all ranks, so that each of them raises an error that names
the rank at fault. No thread listens: a rank hears what has come when it exchanges or ticks.
`rendezvous.py` connects the ranks.
"""

from __future__ import annotations

import errno
import select
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TypeVar

import msgspec

from flyweight.errors import PeerFailed, PeerLost, StoreError, TransferTimeout, TransportError
from flyweight.forks import call_in_child
from flyweight.ranks.connection import ENDED, TICK, Connection
from flyweight.spec.strict_json import Json, convert
from flyweight.transports.channel import Channel

T = TypeVar("T")
TIMEOUT_SECONDS = 120.0
PATIENCE = 0.75
"""The coordinator waits for this share of the time that others wait for the coordinator."""
VERDICT_SECONDS = 1.0
"""In a step with a deadline, others wait so much longer than the coordinator: for its verdict."""
WORKING_TIMES = 10
"""How many timeouts long `Group.working` vouches for a rank."""
_TICKS = 20
"""Ticks per timeout."""
_LOOK_SECONDS = 0.25
"""How often `Group.working` looks for faults."""
_LINGER_SECONDS = 2.0
_NOTICE_SECONDS = 1.0
"""How long a rank tries to tell another that it works, or leaves."""


class RankLeft(PeerLost):
    """A rank has left on purpose before the step, so nobody has decided anything in it."""


class Group:
    """The ranks that work together. A group of one rank has no connections.

    Args:
        rank, num_ranks, coordinator: this rank, the size of the group, and the rank that the
            others are connected to.
        connections: the coordinator's to all other ranks, another rank's to the coordinator. The
            group closes them.
        timeout_seconds: how long a rank may be silent while it is waited for.
    """

    def __init__(
        self,
        rank: int = 0,
        num_ranks: int = 1,
        coordinator: int = 0,
        *,
        connections: Mapping[int, Channel] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.rank, self.num_ranks, self.coordinator = rank, num_ranks, coordinator
        self.set_timeout(timeout_seconds)
        self._connections = {
            peer: Connection(channel) for peer, channel in (connections or {}).items()
        }
        self._lock = threading.Lock()
        """Of the thread that sends or hears. A tick in another thread finds nothing left to do."""
        self._fault: TransportError | None = None
        self._is_idle = False
        self._step, self._number = "join", 0
        self._last_tick = monotonic()
        call_in_child(self._replace_lock)

    def _replace_lock(self) -> None:
        self._lock = threading.Lock()

    @property
    def is_coordinator(self) -> bool:
        return self.rank == self.coordinator

    def set_timeout(self, timeout_seconds: float) -> None:
        """Change the timeout of every wait from now on; all ranks must set about the same."""
        # The coordinator gives a silent rank up before others give the coordinator up for it.
        self._timeout_seconds = timeout_seconds * (PATIENCE if self.is_coordinator else 1)

    # Exchanges, which every rank must make together.

    def gather(self, step: str, message: Json) -> list[Json]:
        """Return every rank's message, by rank, at the coordinator; elsewhere an empty list."""
        with self._entered(step):
            if not self.is_coordinator:
                self._say(self.coordinator, message, None)
                return []
            found = self._hear_step(None)
        return [message if rank == self.rank else found[rank] for rank in range(self.num_ranks)]

    def gather_typed(self, step: str, message: T) -> list[T]:
        """Do as `gather` for messages of a type that msgspec knows; other ranks' are checked."""
        answers = enumerate(self.gather(step, msgspec.to_builtins(message)))
        kind = type(message)
        return [convert(each, kind, f"the message of rank {rank}") for rank, each in answers]

    def scatter(self, step: str, messages: Sequence[Json]) -> Json:
        """Return this rank's message out of the coordinator's list, which has one for each rank."""
        with self._entered(step):
            if not self.is_coordinator:
                return self._hear_step(None)[self.coordinator]
            for peer in self._connections:
                self._say(peer, messages[peer], None)
            return messages[self.rank]

    def broadcast(self, step: str, message: Json) -> Json:
        """Return the coordinator's message."""
        return self.scatter(step, [message] * self.num_ranks)

    def exchange(self, step: str, message: Json, deadline: float) -> list[Json]:
        """Return every rank's message, by rank, on every rank; ranks may be at different steps.

        The coordinator gives up a rank at the deadline, and others the coordinator a fixed time
        later. Nothing that a rank says meanwhile extends it.
        """
        late = deadline + VERDICT_SECONDS
        end = deadline if self.is_coordinator else late
        with self._entered(step):
            said = conversation(
                (self.rank, self.coordinator),
                message,
                say=lambda peer, body: self._say(peer, body, late),
                hear=lambda: self._hear_step(end),
            )
        if not isinstance(said, list) or len(said) != self.num_ranks:
            raise TransportError(f"the coordinator sent {str(said)[:80]}, not the ranks' answers")
        return said

    @contextmanager
    def _entered(self, step: str) -> Iterator[None]:
        """Begin the next step; in the block no other thread sends or hears."""
        with self._lock:
            self._step, self._number = step, self._number + 1
            self._hear_all()
            self._raise_fault()
            yield

    def _say(self, peer: int, body: Json, deadline: float | None) -> None:
        end = monotonic() + self._timeout_seconds if deadline is None else deadline
        connection = self._connections[peer]
        try:
            connection.say(self._number, self._step, body, end)
        except TransportError as error:
            if not isinstance(error, TransferTimeout):
                self._hear_all()  # the reason why the peer ended may have come before
            if self.is_coordinator or not connection.has_left:  # else the next hearing raises
                self._fail(error)
            self._raise_fault()

    def _hear_step(self, deadline: float | None) -> dict[int, Json]:
        """Return what each connected rank says in this step, once all have.

        Without a deadline a rank may be silent until the timeout, and the coordinator tells the
        others meanwhile that work goes on: they wait for those that it waits for.
        """
        started = monotonic()
        while waiting := [each for each in self._connections.values() if not each.inbox]:
            self._raise_fault()
            if left := [each.channel.peer for each in waiting if each.has_left]:
                raise RankLeft(f"{left[0]} left the group before step {self._step!r}")
            if not all(each.is_usable for each in waiting):
                raise PeerLost("this process, or its parent, has closed the group")
            last = min(waiting, key=lambda each: each.heard)
            since = max(started, last.heard)
            end = since + self._timeout_seconds if deadline is None else deadline
            until = end
            if deadline is None and self.is_coordinator:
                self._send_ticks()
                until = min(end, monotonic() + self._timeout_seconds / _TICKS)
            # Messages that came while this process was stopped are heard before it gives up.
            if not self._hear_next(until) and until == end <= monotonic():
                silence = f"was silent for {monotonic() - since:.3g} s in step {self._step!r}"
                self._fail(TransferTimeout(f"{last.channel.peer} {silence}"))
        self._raise_fault()
        found = {peer: each.inbox.popleft() for peer, each in self._connections.items()}
        for peer, (number, step, _) in found.items():
            if number != self._number or (deadline is None and step != self._step):
                raise TransportError(
                    f"rank {peer} is at step {step!r}, its number {number}, this rank "
                    f"{self.rank} at {self._step!r}, its number {self._number}; all ranks must "
                    f"make the same call"
                )
        return {peer: body for peer, (_, _, body) in found.items()}

    # Work between exchanges.

    def tick(self) -> None:
        """Tell the others that work goes on; raise if one of them is known to have ended.

        Waits for nothing: cheap enough to call for every few megabytes, from any thread.
        """
        self._look()
        self._raise_fault()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Tell the others that work goes on, during a block that cannot call `tick` itself.

        Not for ever: the others must notice a disk that hangs.
        """
        if not self._connections:
            yield
            return
        done, until = threading.Event(), monotonic() + WORKING_TIMES * self._timeout_seconds
        seconds = min(self._timeout_seconds / _TICKS, _LOOK_SECONDS)

        def look() -> None:
            while not done.wait(seconds) and monotonic() < until:
                self._look()

        thread = threading.Thread(target=look, name="flyweight-working", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(_LINGER_SECONDS)

    @property
    def is_over(self) -> bool:
        """True if a rank left, was given up or died; the others hear that they can meet anew."""
        self._look(is_idle=True)
        return self._fault is not None or any(each.has_left for each in self._connections.values())

    @property
    def files(self) -> list[int]:
        """The open files that become readable when another rank says something, or ends."""
        return [e.channel.wire.fileno() for e in self._connections.values() if e.is_usable]

    def wait_for_fault(self, seconds: float) -> None:
        """Raise the group's fault, if there is one or one comes in time."""
        deadline = monotonic() + seconds
        with self._lock:
            while self._fault is None and self._hear_next(deadline):
                pass
        self._raise_fault()

    def _look(self, *, is_idle: bool = False) -> None:
        """Hear what has come, and tell the others that work goes on, unless a thread is at it."""
        if self._lock.acquire(blocking=False):
            self._is_idle = is_idle
            try:
                self._hear_all()
                if not is_idle:
                    self._send_ticks()
            finally:
                self._is_idle = False
                self._lock.release()

    def _send_ticks(self) -> None:
        """Tell the others that work goes on, where that can be sent at once."""
        now = monotonic()
        if now - self._last_tick < self._timeout_seconds / _TICKS:
            return
        self._last_tick = now
        for each in self._ready(select.POLLOUT, now):
            with suppress(TransportError):  # a rank that is gone is heard of
                each.channel.send(TICK, monotonic() + _NOTICE_SECONDS)

    def _hear_all(self) -> None:
        while self._hear_next(monotonic()):
            pass

    def _hear_next(self, deadline: float) -> bool:
        """Take a message of each rank of which one has come; False if none has at the deadline."""
        ready = self._ready(select.POLLIN, deadline)
        for each in ready:
            fault = each.hear()
            each.heard = monotonic()
            if fault is not None:
                self._fail(fault)
        return bool(ready)

    def _ready(self, event: int, deadline: float) -> list[Connection]:
        """Wait until one of the connections can be read, or written; return those."""
        polled, found = select.poll(), {}
        for each in self._connections.values():
            if each.is_usable:
                polled.register(each.channel.wire.fileno(), event)
                found[each.channel.wire.fileno()] = each
        if not found:
            return []
        ready = polled.poll(1000 * max(deadline - monotonic(), 0))
        # A connection that has failed can be read, for the reason, and not written.
        return [found[file] for file, which in ready if event in (select.POLLIN, which)]

    # Faults, and the end.

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _fail(self, fault: TransportError) -> None:
        """Keep the first fault, and tell the others: the coordinator connects all."""
        if self._fault is None:
            self._fault = fault
            for each in self._connections.values():
                if not self._is_idle:
                    each.channel.refuse(self._fault, 0)
                elif each.is_usable:
                    with suppress(TransportError):
                        each.channel.send(ENDED, monotonic() + _NOTICE_SECONDS)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Tell the others how the work ended here, then leave.

        A file may be gone because another rank gave up; then that rank's fault is raised.
        """
        try:
            if isinstance(error, StoreError) and error.errno == errno.ENOENT:
                try:
                    self.wait_for_fault(_LINGER_SECONDS)
                except TransportError as fault:
                    raise fault from error
        finally:
            self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Close once the others have left too, or soon after; tell them why if it is an error."""
        with self._lock:
            if error is not None:
                why = f"{type(error).__name__}: {error}"
                self._fail(PeerFailed(f"rank {self.rank} failed in step {self._step!r}: {why}"))
            for each in self._ready(select.POLLOUT, monotonic()):
                with suppress(TransportError):
                    each.channel.send(ENDED, monotonic() + _NOTICE_SECONDS)
            deadline, peers = monotonic() + _LINGER_SECONDS, self._connections.values()
            while any(each.is_usable and not each.has_left for each in peers):
                if not self._hear_next(deadline):
                    break
        self.close()

    def close(self, fault: TransportError | None = None) -> bool:
        """End now, in any thread or signal handler; the others hear of the fault.

        If another thread is in an exchange, that raises PeerLost; this returns False, and the
        group must be closed once more.
        """
        if not self._lock.acquire(blocking=False):
            for each in self._connections.values():
                each.channel.shut()
            return False
        try:
            if fault is not None:
                self._fail(fault)
                self._hear_all()  # closing a socket with unread bytes might discard what was sent
        finally:
            for each in self._connections.values():
                each.channel.end(ENDED.text)
            self._lock.release()
        return True


def conversation(
    ranks: tuple[int, int],
    mine: Json,
    *,
    say: Callable[[int, Json], None],
    hear: Callable[[], Mapping[int, Json]],
) -> Json:
    """Take this rank's part in an exchange, and return what all ranks say, by rank.

    A test explores it in every order in which ranks send, give up and die.

    Args:
        ranks: this one, and the coordinator.
        hear: returns what each rank says that this one is connected to.
    """
    rank, coordinator = ranks
    if rank != coordinator:
        say(coordinator, mine)
        return hear()[coordinator]
    heard = {**hear(), rank: mine}
    said = [heard[each] for each in sorted(heard)]
    for peer in heard:
        if peer != rank:
            say(peer, said)
    return said
