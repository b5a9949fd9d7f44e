"""Group: the ranks of one save or load, who hear of each other's end at once.

Every rank holds one connection to the coordinator, a `Link`. A rank whose connection
closes is lost, one that fails says why, and one that is silent for `timeout_seconds`
while it is waited for is given up. Whichever happens first, the coordinator tells all
ranks, so that each raises an error that names the rank. `meeting.py` brings the ranks
together.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from types import TracebackType

from flyweight.errors import (
    FlyweightError,
    PeerFailed,
    PeerLost,
    StoreError,
    TransferTimeout,
    TransportError,
)
from flyweight.forks import call_in_child
from flyweight.ranks.link import DONE, TICK, Link, fault_frame, fault_of, step_frame
from flyweight.spec.manifest import Json

TIMEOUT_SECONDS = 120.0
PATIENCE = 0.75
"""How long the coordinator waits, of the time that others wait for it."""
_LINGER_SECONDS = 2.0
_WORKING_TIMES = 10
_LOOK, _STOP = b"?", b"."
"""What wakes the thread that listens: to look whether it is over, or to end."""


class Group:
    """The ranks of one piece of work. Alone, nothing goes over any wire."""

    def __init__(
        self,
        rank: int = 0,
        num_ranks: int = 1,
        coordinator: int = 0,
        *,
        links: dict[int, socket.socket] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.rank, self.num_ranks, self.coordinator = rank, num_ranks, coordinator
        # The coordinator gives a silent rank up before others give the coordinator up for it.
        self.allow(timeout_seconds)
        self._links = {peer: Link(peer, link) for peer, link in (links or {}).items()}
        self._changed = threading.Condition()
        self._fault: TransportError | None = None
        self._is_failing = False
        self._step = "meet"
        self._is_over = False
        self._last_tick = monotonic()
        self._post: threading.Thread | None = None
        if self._links:
            self._selector = selectors.DefaultSelector()
            self._wake, self._woken = socket.socketpair()
            self._selector.register(self._woken, selectors.EVENT_READ)
            for each in self._links.values():
                each.socket.setblocking(False)
                self._selector.register(each.socket, selectors.EVENT_READ, each)
            self._post = threading.Thread(target=self._listen, name="flyweight-group", daemon=True)
            self._post.start()
            call_in_child(self._close_sockets)

    def allow(self, timeout_seconds: float) -> None:
        """Give each wait so much time from now on; every rank must allow about the same."""
        self._timeout_seconds = timeout_seconds * (PATIENCE if self.is_coordinator else 1)

    @property
    def has_parted(self) -> bool:
        """True once another rank left on purpose or gave one up: it lives, and can be met again."""
        is_given_up = isinstance(self._fault, TransferTimeout)
        return is_given_up or any(link.is_done for link in self._links.values())

    def part(self) -> None:
        """Leave on purpose: the others hear that this rank lives on."""
        for link in self._links.values():
            with suppress(OSError):
                link.send(DONE, 1.0)
        self.close()

    @property
    def is_coordinator(self) -> bool:
        return self.rank == self.coordinator

    def gather(self, step: str, message: Json) -> list[Json]:
        """Return every rank's message, by rank, at the coordinator; elsewhere an empty list."""
        self._enter(step)
        if not self.is_coordinator:
            self._send(self._links[self.coordinator], message)
            return []
        found = self._receive(self._links)
        found[self.rank] = message
        return [found[rank] for rank in range(self.num_ranks)]

    def scatter(self, step: str, messages: Sequence[Json]) -> Json:
        """Return this rank's of the messages that the coordinator has, one for each rank."""
        self._enter(step)
        if not self.is_coordinator:
            return self._receive(self._links)[self.coordinator]
        for peer, link in self._links.items():
            self._send(link, messages[peer])
        return messages[self.rank]

    def broadcast(self, step: str, message: Json) -> Json:
        """Return the coordinator's message."""
        return self.scatter(step, [message] * self.num_ranks)

    def tick(self) -> None:
        """Tell the others that work goes on; raise if one of them is known to have ended.

        Cheap enough to be called for every few megabytes, from any thread.
        """
        self._raise_fault()
        self._pass_on()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Tell the others that work goes on, all through a block that cannot tell itself.

        Not for ever: a disk that hangs must be noticed some day.
        """
        if not self._links:
            yield
            return
        done, until = threading.Event(), monotonic() + _WORKING_TIMES * self._timeout_seconds

        def tell() -> None:
            while not done.wait(self._timeout_seconds / 20) and monotonic() < until:
                self._pass_on()

        teller = threading.Thread(target=tell, name="flyweight-working", daemon=True)
        teller.start()
        try:
            yield
        finally:
            done.set()
            teller.join(_LINGER_SECONDS)

    def _pass_on(self) -> None:
        now = monotonic()
        if now - self._last_tick < self._timeout_seconds / 20:
            return
        self._last_tick = now
        for link in self._links.values():
            with suppress(OSError):  # who is gone is noticed by the one who waits for it
                link.send(TICK, min(self._timeout_seconds, 1.0))

    def _enter(self, step: str) -> None:
        self._step = step
        self._raise_fault()

    def _await_fault(self) -> None:
        """Raise the fault that is there, or that another thread is telling of just now."""
        with self._changed:
            self._changed.wait_for(lambda: self._fault is not None, self._timeout_seconds)
        self._raise_fault()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    # Frames.

    def _send(self, link: Link, body: Json) -> None:
        try:
            link.send(step_frame(self._step, body), self._timeout_seconds)
        except TimeoutError:
            self._fail(self._silent(link))
            self._await_fault()
        except OSError as cause:
            # Why it closed the connection may have arrived before: the listener knows.
            with self._changed:
                self._changed.wait_for(lambda: self._fault is not None, _LINGER_SECONDS)
            self._fail(self._lost(link, cause))
            self._await_fault()
        self._raise_fault()

    def _receive(self, links: Mapping[int, Link]) -> dict[int, Json]:
        """Return one message of each link, once all are there."""
        started = monotonic()
        found: dict[int, tuple[str, Json]] = {}
        has_grace = True
        while len(found) < len(links):
            with self._changed:
                self._raise_fault()
                for peer, link in links.items():
                    if peer not in found and link.inbox:
                        found[peer] = link.inbox.popleft()
                waiting = [link for peer, link in links.items() if peer not in found]
                now = monotonic()
                overdue = [
                    link
                    for link in waiting
                    if now - max(started, link.heard) > self._timeout_seconds
                ]
                if waiting and not (overdue and not has_grace):
                    # If we were stopped ourselves, what came meanwhile has still to be read.
                    has_grace = has_grace and not overdue
                    self._changed.wait(self._timeout_seconds / 20)
                    overdue = []
            if overdue:
                self._fail(self._silent(overdue[0]))
                self._await_fault()
            if self.is_coordinator:
                self._pass_on()  # who waits for us waits for those we wait for
        for peer, (step, _) in found.items():
            if step != self._step:
                raise TransportError(
                    f"rank {peer} is at step {step!r}, this rank {self.rank} at {self._step!r}; "
                    f"all ranks must make the same call"
                )
        return {peer: body for peer, (_, body) in found.items()}

    def _silent(self, link: Link) -> TransferTimeout:
        return TransferTimeout(
            f"{self._called(link)} was silent for {self._timeout_seconds:g} s in step "
            f"{self._step!r}"
        )

    def _lost(self, link: Link, cause: OSError | None = None) -> PeerLost:
        why = f": {cause}" if cause else ", as a process that dies does"
        return PeerLost(f"{self._called(link)} closed its connection in step {self._step!r}{why}")

    def _called(self, link: Link) -> str:
        return f"{'coordinator ' if link.peer == self.coordinator else ''}rank {link.peer}"

    def _fail(self, fault: TransportError, *, except_for: int | None = None) -> None:
        """Remember the first fault, after those connected here have been told of it."""
        with self._changed:
            if self._is_failing:
                return
            self._is_failing = True
        # A rank tells the coordinator why it gives up, the coordinator tells all others.
        for peer, link in self._links.items():
            if peer != except_for:
                self._tell(link, fault)
        with self._changed:  # who waits may close connections as soon as it knows
            self._fault = fault
            self._changed.notify_all()

    def _tell(self, link: Link, fault: TransportError) -> None:
        with suppress(OSError):
            link.send(fault_frame(fault), min(self._timeout_seconds, 1.0))

    # The thread that listens.

    def _listen(self) -> None:
        num_open = len(self._links)
        while num_open or not self._is_over:
            for key, _ in self._selector.select():
                link: Link | None = key.data
                if link is None:  # woken to look whether it is over
                    if self._woken.recv(1) == _STOP:
                        return
                    continue
                try:
                    is_open = link.take_in()
                    frames = list(link.frames())
                    for frame in frames:
                        self._handle(link, frame)
                    if is_open:
                        continue
                    fault = None if link.is_done else self._lost(link)
                except OSError as cause:
                    fault = self._lost(link, cause)
                except FlyweightError as error:
                    fault = PeerLost(f"{self._called(link)} sent no message: {error}")
                self._selector.unregister(link.socket)
                num_open -= 1
                if fault is not None and not self._is_over:
                    self._fail(fault)

    def _handle(self, link: Link, frame: Json) -> None:
        match frame:
            case {"kind": "tick"}:
                with self._changed:
                    link.heard = monotonic()
                    self._changed.notify_all()
            case {"kind": "step", "step": str() as step, "body": body}:
                with self._changed:
                    link.heard = monotonic()
                    link.inbox.append((step, body))
                    self._changed.notify_all()
            case {"kind": "done"}:
                link.is_done = True
            case {"kind": "fault", "body": {"type": str() as kind, "text": str() as text}}:
                self._fail(fault_of(kind, text), except_for=link.peer)
            case _:
                self._fail(PeerLost(f"{self._called(link)} sent {str(frame)[:80]}"))

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell the others how it ended here, then let go of every connection.

        A file that is gone because another rank gave up is not the reason: that rank's is raised.
        """
        try:
            is_gone = isinstance(error, StoreError) and error.errno == errno.ENOENT
            if is_gone and self._links:
                with self._changed:
                    self._changed.wait_for(lambda: self._fault is not None, _LINGER_SECONDS)
                if self._fault is not None:
                    raise self._fault from error
            if error is not None and error is not self._fault:
                self._tell_of(error)
        finally:
            if error is None:
                self.part()
            self.close()

    def _tell_of(self, error: BaseException) -> None:
        what = f"{type(error).__name__}: {error}"
        self._fail(PeerFailed(f"rank {self.rank} failed in step {self._step!r}: {what}"))

    def _close_sockets(self) -> None:
        for link in self._links.values():
            link.socket.close()

    def close(self) -> None:
        if self._post is None:
            return
        self._is_over = True
        for link in self._links.values():
            with suppress(OSError):
                link.socket.shutdown(socket.SHUT_WR)
        # A connection that is closed over unread bytes takes back what was sent by it: listen on
        # until the others have closed too, but not for ever.
        self._wake.send(_LOOK)
        self._post.join(_LINGER_SECONDS)
        if self._post.is_alive():
            self._wake.send(_STOP)
            self._post.join(_LINGER_SECONDS)
        self._post = None
        for link in self._links.values():
            link.socket.close()
        for each in (self._wake, self._woken, self._selector):
            each.close()
