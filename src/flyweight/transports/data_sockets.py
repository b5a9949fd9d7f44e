"""Bytes read from a process on another host, through plain TCP sockets.

A `DataServer` offers memory under keys; a `DataConnection` reads it. Both prove that they know
the token without sending it. Nothing is encrypted. The kernel closes a connection with the
process that held it, and keepalive finds a cut link, so either side learns when the other is gone.
A closed socket is a fence: nothing arrives through it, and nothing is sent from offered memory.
"""

from __future__ import annotations

import errno
import secrets
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic, sleep

from flyweight.errors import PeerLost, TransferTimeout, TransportError
from flyweight.forks import call_in_child, fork_lock
from flyweight.host import has_room, raise_file_limit
from flyweight.memory import Bytes, Items
from flyweight.transports.data_protocol import (
    BEYOND,
    GARBAGE,
    GONE,
    REQUEST,
    SENT,
    GreetedPeer,
    Welcome,
    checked_welcome,
    greet_server,
    read_offer,
)
from flyweight.transports.fd_passing import ANSWER_SECONDS, SPARE_FILES, check_files
from flyweight.transports.tcp import (
    DeadlinePassed,
    Rows,
    connect,
    give_up_after,
    listening,
    place_of,
    prepare,
    receive,
    return_after,
    shut_down,
)

__all__ = ["DataConnection", "DataServer", "Welcome"]

MAX_CONNECTIONS = 1024
MAX_GREETING = 256
"""How many connections may be without a proof; one more replaces the oldest of them."""
GREETING_SECONDS = 5.0
UNREAD_SECONDS = 30.0
"""A reader that takes no byte for so long is given up; it may only be busy."""
_FINISH_SECONDS = 0.1
_RELEASE_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_FULL_SECONDS = 0.1


@dataclass(eq=False)
class _Offer:
    rows: Rows
    owner: object
    readers: set[socket.socket] = field(default_factory=set)
    """The connections that it is being sent to."""


class DataServer:
    """Sends offered memory to connections that know the token.

    Args:
        host: the address to listen at; "" for all.
        port: 0 for a free one.
        token: what a connection must prove to know.
        welcome: what such connections are told.
        on_hangup: called with the name of each first connection that ends, from its thread.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        token: str,
        welcome: Welcome,
        on_hangup: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._token, self.welcome = token, checked_welcome(welcome)
        self._on_hangup = on_hangup
        self._lock = threading.Lock()
        self._sent = threading.Condition(self._lock)
        self._offers: dict[str, _Offer] = {}
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._greeting: dict[socket.socket, None] = {}
        """The connections without a proof, the oldest first."""
        self._lines: set[str] = set()
        self._greeted_at: deque[float] = deque()
        self._is_closed = False
        check_files()
        with fork_lock:
            self._listener = listening(host, port)
            self._listener.setblocking(False)
            call_in_child(self._close_in_child)
        self.host: str = self._listener.getsockname()[0]
        self.port: int = self._listener.getsockname()[1]
        self._thread = _thread_of(self._listen)
        self._thread.start()

    def offer(self, rows: Sequence[memoryview | Items], owner: object = None) -> str:
        """Return a key under which connections read the rows, where they lie, as one run of bytes.

        The rows and the owner are kept until `release`.
        """
        key, offer = secrets.token_hex(8), _Offer(Rows(rows), owner)
        with self._lock:
            self._offers[key] = offer
        return key

    def release(self, key: str) -> None:
        """End an offer; when this returns, no thread reads the memory. Safe to repeat.

        A connection that still reads it is shut down: it must not see what the memory has next.
        """
        with self._lock:
            offer = self._offers.pop(key, None)
            # A thread that has sent the last byte may not have said so yet: its reader stays.
            if offer and not self._sent.wait_for(lambda: not offer.readers, _FINISH_SECONDS):
                for peer in offer.readers:
                    shut_down(peer)  # from here on the kernel takes nothing more from the memory
                self._sent.wait_for(lambda: not offer.readers, _RELEASE_SECONDS)

    def knows(self, line: str) -> bool:
        """True while a first connection of this name is open."""
        with self._lock:
            return line in self._lines

    def close(self) -> None:
        """Close every connection and end every thread. Safe to repeat."""
        with self._lock:
            self._is_closed = True
            shut_down(self._listener)
            for peer in self._threads:
                shut_down(peer)
            threads = [self._thread, *self._threads.values()]
        deadline = monotonic() + _CLOSE_SECONDS
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(deadline - monotonic(), 0))
        self._listener.close()
        with self._lock:
            self._offers.clear()

    def _close_in_child(self) -> None:
        """Close a forked child's copies; the parent keeps its own."""
        self._lock = threading.Lock()  # the thread that held it does not exist in the child
        self._sent = threading.Condition(self._lock)
        self._is_closed = True
        for each in (self._listener, *self._threads):
            each.close()
        for known in (self._threads, self._offers, self._lines):
            known.clear()

    def _listen(self) -> None:
        pending = select.poll()
        pending.register(self._listener, select.POLLIN)
        while not self._is_closed:
            pending.poll()
            try:
                self._accept()
            except OSError as cause:
                is_full = cause.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
                if is_full and not raise_file_limit():
                    sleep(_FULL_SECONDS)  # the connection stays pending until a file is free

    def _accept(self) -> None:
        with fork_lock, self._lock:  # a child must not inherit what it does not know of
            peer, _ = self._listener.accept()
            thread = _thread_of(self._serve, peer)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left
                peer.close()
                return
            self._threads[peer], self._greeting[peer] = thread, None
            if self._is_closed:
                shut_down(peer)
            if len(self._greeting) > MAX_GREETING:
                oldest = next(iter(self._greeting))
                del self._greeting[oldest]
                shut_down(oldest)

    def _serve(self, peer: socket.socket) -> None:
        """Greet a connection and answer its requests until it ends."""
        line = ""
        try:
            prepare(peer)
            line = self._greet(peer)
            request = bytearray(REQUEST.size)
            while True:
                receive(peer, memoryview(request), inf)
                key, offset, nbytes = REQUEST.unpack(request)
                self._answer(peer, key.decode("latin-1"), offset, nbytes)
        except (OSError, EOFError, DeadlinePassed, *GARBAGE):
            pass  # the peer is gone, is silent, or sent no message; or the memory is gone (EFAULT)
        finally:
            self._remove(peer, line)

    def _greet(self, peer: socket.socket) -> str:
        """Return the name of a first connection, "" for another one."""
        greeted = GreetedPeer(peer, self._token, monotonic() + GREETING_SECONDS)
        line = greeted.greeting.line if greeted.greeting.is_first else ""
        if not line:
            give_up_after(peer, UNREAD_SECONDS)
        return_after(peer, 0)
        with self._lock:
            why = self._refusal(line)
            if not why:
                self._greeting.pop(peer, None)
                self._lines |= {line} - {""}
        if why:
            greeted.refuse(why)
            raise EOFError
        with suppress(OSError):  # then it has ended, and its next request says so
            greeted.welcome(self.welcome)
        return line

    def _refusal(self, line: str) -> str:
        """Return "" if a connection may stay: each recent first one needs a file elsewhere too."""
        now = monotonic()
        while self._greeted_at and now - self._greeted_at[0] > ANSWER_SECONDS:
            self._greeted_at.popleft()
        if len(self._threads) - len(self._greeting) >= MAX_CONNECTIONS or line in self._lines:
            return "crowded"
        if not has_room(SPARE_FILES + len(self._greeted_at)):
            return "full"
        if line:
            self._greeted_at.append(now)
        return ""

    def _answer(self, peer: socket.socket, key: str, offset: int, nbytes: int) -> None:
        with self._lock:
            offer = self._offers.get(key)
            if offer is not None:
                offer.readers.add(peer)  # `release` waits from here on
        if offer is None:
            peer.sendall(GONE)
            return
        try:
            if offset + nbytes > offer.rows.nbytes:
                peer.sendall(BEYOND)
            else:
                offer.rows.send(peer, SENT, offset, nbytes)
        finally:
            with self._lock:
                offer.readers.discard(peer)
                self._sent.notify_all()

    def _remove(self, peer: socket.socket, line: str) -> None:
        with self._lock:
            peer.close()
            self._threads.pop(peer, None)
            self._greeting.pop(peer, None)
            self._lines.discard(line)
            is_hangup = bool(line) and not self._is_closed
        if is_hangup:
            self._on_hangup(line)


def _thread_of(function: Callable[..., None], *args: object) -> threading.Thread:
    return threading.Thread(target=function, args=args, name="flyweight-data", daemon=True)


class DataConnection:
    """A connection to a DataServer, open as long as both processes live.

    Args:
        host: the server's host: a name, or an address of IPv4 or IPv6.
        token: what both sides must know.
        timeout_seconds: how long the greeting may take.
        is_over: checked while waiting; once it returns True, the wait ends early.
        line: the name of this process's first connection; "" for that one, whose end is reported.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str,
        timeout_seconds: float = ANSWER_SECONDS,
        is_over: Callable[[], bool] = lambda: False,
        line: str = "",
    ) -> None:
        """Connect; raise PeerLost, PeerRefused or TransferTimeout if that fails."""
        self.host, self.port = host, port
        self.name = line or secrets.token_hex(8)
        self._place, self._lock = place_of(host, port), threading.Lock()
        self._is_reading = self._is_closed = False
        check_files()
        with fork_lock:
            self._socket = socket.socket()
            call_in_child(self._close_in_child)
        started = monotonic()
        deadline = started + timeout_seconds
        try:
            connect(host, port, deadline, is_over, self._made)
            self.welcome = greet_server(
                self._socket, self._place, self.name,
                is_first=not line, token=token, deadline=deadline, is_over=is_over,
            )  # fmt: skip
        except DeadlinePassed as cause:
            raise TransferTimeout(
                f"the process at {self._place} did not answer in {monotonic() - started:.3g} s"
            ) from cause
        except (OSError, EOFError) as cause:
            raise PeerLost(f"the process at {self._place} closed the connection") from cause
        finally:
            if not hasattr(self, "welcome"):
                self.close()

    def _made(self, family: int) -> socket.socket:
        self._socket.close()
        with fork_lock:
            self._socket = socket.socket(family, socket.SOCK_STREAM)
        return self._socket

    @property
    def local_host(self) -> str:
        """The address of this side, by which the other one reaches it."""
        return str(self._socket.getsockname()[0])

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        """False once either side has closed, the other process has died, or the link is cut."""
        if self._is_closed or (number := self._socket.fileno()) < 0:
            return False
        closing = select.poll()
        closing.register(number, select.POLLRDHUP)
        return not closing.poll(0)

    def read(
        self,
        key: str,
        offset: int,
        into: memoryview | Bytes,
        *,
        timeout_seconds: float,
        on_progress: Callable[[int], None] = lambda nbytes: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Fill `into` with bytes of an offer, from `offset` on. For one thread at a time.

        Raise HandleGone if they are not offered, PeerLost, or TransferTimeout if no byte arrives
        for `timeout_seconds`. After an exception the connection is closed: no byte arrives later.

        on_progress: called with the number of bytes of each arrival.
        """
        is_mine = is_complete = False
        try:
            with self._lock:
                if self._is_reading:
                    raise TransportError(f"another thread reads from {self._place} already")
                self._is_reading = is_mine = True
            view = memoryview(into).cast("B") if len(into) else memoryview(b"")
            read_offer(
                self._socket, self._place, (key, offset), view,
                timeout_seconds=timeout_seconds, on_progress=on_progress, is_over=is_over,
            )  # fmt: skip
            is_complete = True
        finally:
            if is_mine:
                with self._lock:
                    self._is_reading = False
                    self._is_closed |= not is_complete
                    if self._is_closed:
                        self._socket.close()

    def close(self) -> None:
        """Close the connection; a thread that reads from it ends with PeerLost. Safe to repeat."""
        with self._lock:
            self._is_closed = True
            shut_down(self._socket)
            if not self._is_reading:  # else the thread that reads closes it: its number stays
                self._socket.close()

    def _close_in_child(self) -> None:
        """Close a forked child's copy; the parent keeps its own."""
        self._lock = threading.Lock()  # the thread that held it does not exist in the child
        self._is_closed = True
        self._socket.close()
