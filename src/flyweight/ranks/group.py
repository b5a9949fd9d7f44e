"""The ranks that do something together: they exchange messages, and hear of each other's end.

Every rank holds one connection to the coordinator. A rank whose connection closes is lost; a rank
that fails sends the reason; a rank that is silent while it is waited for is given up. The
coordinator forwards the first fault to all ranks, so that each of them raises an error that names
the rank at fault. No thread listens: a rank hears what has come when it exchanges or ticks.
`rendezvous.py` connects the ranks.
"""

from __future__ import annotations

import errno
import json
import select
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TypeVar

import msgspec

from flyweight.errors import (
    FlyweightError,
    HandleGone,
    PeerFailed,
    PeerLost,
    StoreError,
    TransferTimeout,
    TransportError,
)
from flyweight.forks import call_in_child
from flyweight.spec.strict_json import Json, convert, parse_json
from flyweight.transports.channel import Channel, Ended, Message, Messages, Refused
from flyweight.transports.wire import FOREVER

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
"""How long a rank tries to tell another that it works, fails or leaves."""


class Step(Message, frozen=True):
    """What a rank says in a step."""

    number: int
    what: str
    body: bytes
    """JSON: a state to be saved may contain larger integers than msgpack can."""


class Tick(Message, frozen=True):
    """The work of a rank goes on."""


MESSAGES = Messages(Step, Tick)
_ENDED = Ended("this rank leaves")


class Connection:
    """A connection to one rank, and what it said that nobody has asked for yet."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        channel.on_push = self._take
        self.inbox: deque[tuple[int, str, Json]] = deque()
        """The number of a step, its name, and what the rank said in it."""
        self.heard, self.has_left = 0.0, False
        """When the last message came; whether the rank has said that it leaves."""

    @property
    def is_usable(self) -> bool:
        """False once it is closed: its end was heard, or this process is a forked child."""
        return self.channel.wire.fileno() >= 0

    def hear(self) -> TransportError | None:
        """Take the message that comes; return the fault that it means, or its absence."""
        self.heard = monotonic()
        try:
            self.channel.hear(FOREVER)  # it has begun to come
        except FlyweightError as error:
            self.channel.close()
            if isinstance(error, HandleGone):
                self.has_left = True
            elif isinstance(error, TransportError):
                return error
            else:
                return PeerLost(f"{self.channel.peer} sent no message: {error}")
        return None

    def _take(self, message: Message) -> None:
        if isinstance(message, Step):
            said = parse_json(message.body, "message")
            self.inbox.append((message.number, message.what, said))


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
        self.timeout_seconds = timeout_seconds
        self._connections = {
            peer: Connection(channel) for peer, channel in (connections or {}).items()
        }
        self._lock = threading.Lock()
        """Of the thread that sends or hears. A tick in another thread finds nothing left to do."""
        self._fault: TransportError | None = None
        self._is_told = False
        """Whether the others have heard of the fault."""
        self._step, self._number = "join", 0
        self._last_tick = monotonic()
        call_in_child(self._replace_lock)

    def _replace_lock(self) -> None:
        self._lock = threading.Lock()

    @property
    def is_coordinator(self) -> bool:
        return self.rank == self.coordinator

    @property
    def _patience(self) -> float:
        """The coordinator gives a silent rank up before others give the coordinator up for it."""
        return self.timeout_seconds * (PATIENCE if self.is_coordinator else 1)

    # Exchanges, which every rank must make together.

    def gather(self, step: str, message: Json) -> list[Json]:
        """Return every rank's message, by rank, at the coordinator; elsewhere an empty list."""
        with self._entered(step):
            if not self.is_coordinator:
                self.say(self.coordinator, message)
                return []
            return self._by_rank(message, self.hear())

    def gather_typed(self, step: str, message: T) -> list[T]:
        """Do as `gather` for messages of a type that msgspec knows; other ranks' are checked."""
        answers = enumerate(self.gather(step, msgspec.to_builtins(message)))
        kind = type(message)
        return [convert(each, kind, f"the message of rank {rank}") for rank, each in answers]

    def scatter(self, step: str, messages: Sequence[Json]) -> Json:
        """Return this rank's message out of the coordinator's list, which has one for each rank."""
        with self._entered(step):
            if not self.is_coordinator:
                return self.hear()[self.coordinator]
            for peer in self._connections:
                self.say(peer, messages[peer])
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
        with self._entered(step):
            if not self.is_coordinator:
                self.say(self.coordinator, message, late)
                said = self.hear(late)[self.coordinator]
            else:
                heard = self.hear(deadline)
                said = self._by_rank(message, heard)
                for peer in heard:
                    self.say(peer, said, late)
        if not isinstance(said, list) or len(said) != self.num_ranks:
            raise TransportError(f"the coordinator sent {str(said)[:80]}, not the ranks' answers")
        return said

    def _by_rank(self, mine: Json, heard: Mapping[int, Json]) -> list[Json]:
        return [mine if rank == self.rank else heard[rank] for rank in range(self.num_ranks)]

    @contextmanager
    def _entered(self, step: str) -> Iterator[None]:
        """Begin the next step; in the block no other thread sends or hears."""
        with self._lock:
            self._step, self._number = step, self._number + 1
            self._hear_all()
            self._raise_fault()
            yield

    # A test runs `exchange` with a `say` and a `hear` of its own, in every order of events.

    def say(self, peer: int, body: Json, deadline: float | None = None) -> None:
        """Send one rank what this one says in the step."""
        end = monotonic() + self._patience if deadline is None else deadline
        data, connection = json.dumps(body, separators=(",", ":")), self._connections[peer]
        try:
            connection.channel.send(Step(self._number, self._step, data.encode()), end)
        except TransportError as error:
            if isinstance(error, HandleGone):
                connection.has_left, error = True, PeerLost(str(error))
            elif not isinstance(error, TransferTimeout):
                self._hear_all()  # the reason why the peer ended may have come before
            if self.is_coordinator or not connection.has_left:  # else the next hearing raises
                self._fail(error)
            self._raise_fault()

    def hear(self, deadline: float | None = None) -> dict[int, Json]:
        """Return what each connected rank says in this step, once all have.

        Without a deadline the coordinator tells the others meanwhile that work goes on: they wait
        for those that it waits for.
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
            end = since + self._patience if deadline is None else deadline
            until = end
            if deadline is None and self.is_coordinator:
                self._send_ticks()
                until = min(end, monotonic() + self._patience / _TICKS)
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
        if self._lock.acquire(blocking=False):  # else another thread is at it
            try:
                self._hear_all()
                self._send_ticks()
                self._raise_fault()
            finally:
                self._lock.release()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Tell the others that work goes on, during a block that cannot call `tick` itself.

        Not for ever: the others must notice a disk that hangs.
        """
        if not self._connections:
            yield
            return
        done, until = threading.Event(), monotonic() + WORKING_TIMES * self._patience
        seconds = min(self._patience / _TICKS, _LOOK_SECONDS)

        def look() -> None:
            with suppress(TransportError):  # it is raised in the next exchange
                while not done.wait(seconds) and monotonic() < until:
                    self.tick()

        thread = threading.Thread(target=look, name="flyweight-working", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(_LINGER_SECONDS)

    @property
    def is_over(self) -> bool:
        """True if a rank left, was given up or died. The others do not hear of that here."""
        with self._lock:
            self._hear_all()
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

    def _send_ticks(self) -> None:
        """Tell the others from time to time that work goes on."""
        if (now := monotonic()) - self._last_tick >= self._patience / _TICKS:
            self._last_tick = now
            self._tell(Tick())

    def _tell(self, message: Message) -> None:
        """Send a message to the ranks that can take it at once."""
        for each in self._ready(select.POLLOUT, monotonic()):
            with suppress(TransportError):  # a rank that is gone is heard of
                each.channel.send(message, monotonic() + _NOTICE_SECONDS)

    def _hear_all(self) -> None:
        while self._hear_next(monotonic()):
            pass

    def _hear_next(self, deadline: float) -> bool:
        """Take a message of each rank of which one has come; False if none has at the deadline."""
        ready = self._ready(select.POLLIN, deadline)
        for each in ready:
            fault = each.hear()
            self._fault = self._fault or fault
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
            self._fail(self._fault)
            raise self._fault

    def _fail(self, fault: TransportError) -> None:
        """Keep the first fault, and tell the others: the coordinator connects all."""
        self._fault = self._fault or fault
        if not self._is_told:
            self._is_told = True
            self._tell(Refused(type(self._fault).__name__, str(self._fault)))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Tell the others how the work ended here; close once they have left too, or soon after.

        A file may be gone because another rank gave up; then that rank's fault is raised.
        """
        try:
            if isinstance(error, StoreError) and error.errno == errno.ENOENT:
                try:
                    self.wait_for_fault(_LINGER_SECONDS)
                except TransportError as fault:
                    raise fault from error
        finally:
            with self._lock:
                if error is not None:
                    why = f"{type(error).__name__}: {error}"
                    self._fail(PeerFailed(f"rank {self.rank} failed in step {self._step!r}: {why}"))
                self._tell(_ENDED)
                deadline = monotonic() + _LINGER_SECONDS
                while self._hear_next(deadline):  # until all are closed
                    pass
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
                each.channel.end(_ENDED.text)
            self._lock.release()
        return True
