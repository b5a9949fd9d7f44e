"""Wire: the control channel. One thread owns the socket; others hand it what to send.

Only small messages go over it, never weights. What arrives is given to `hear`, and
`beat` is called again and again, both in the wire's own thread.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

import zmq

from flyweight.errors import TransportError
from flyweight.sync.messages import MAX_MESSAGE_BYTES, Message, encode
from flyweight.transports.doorway import Line

_CLOSE_SECONDS = 5.0
_LINGER_MILLISECONDS = 200

Hear = Callable[[bytes, bytes], None]
"""Takes the peer a frame is from (empty at a replica: there is only one) and the frame."""


class Wire:
    """Sends and hears frames in a thread of its own."""

    def __init__(
        self,
        endpoint: str,
        *,
        is_publisher: bool,
        hear: Hear,
        beat: Callable[[], None],
        beat_seconds: float,
        unreachable: Callable[[bytes], None] = lambda peer: None,
        line: Line | None = None,
        hung_up: Callable[[], None] = lambda: None,
    ) -> None:
        self._hear, self._beat, self._beat_seconds = hear, beat, beat_seconds
        self._unreachable, self._is_publisher = unreachable, is_publisher
        self._line, self._hung_up = line, hung_up
        self._outbox: deque[tuple[bytes, bytes]] = deque()
        self._is_over = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if is_publisher else zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        try:
            if is_publisher:
                self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._socket.bind(endpoint)
            else:
                self._socket.connect(endpoint)
        except zmq.ZMQError as cause:
            self._free()
            raise TransportError(f"cannot speak at {endpoint!r}: {cause}") from cause
        self._thread = threading.Thread(target=self._run, name="flyweight-wire", daemon=True)
        self._thread.start()

    def send(self, message: Message, to: bytes = b"") -> None:
        """Queue a message; from any thread, never blocks."""
        self.send_frame(encode(message), to)

    def send_frame(self, frame: bytes, to: bytes = b"") -> None:
        self._outbox.append((to, frame))
        if threading.current_thread() is not self._thread:
            self.nudge()

    def nudge(self) -> None:
        """Make the thread look around now."""
        with suppress(BlockingIOError, OSError):  # full: it is about to look anyway
            self._wake.send(b".")

    def close(self) -> None:
        """Send what is queued, then end the thread. Safe to repeat, but not from the thread."""
        if self._is_over:
            return
        self._is_over = True
        self.nudge()
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._free()

    def _free(self) -> None:
        self._socket.close()
        self._context.term()
        self._wake.close()
        self._woken.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken.fileno(), zmq.POLLIN)
        line = -1 if self._line is None else self._line.fileno()
        if line >= 0:
            poller.register(line, zmq.POLLIN)
        next_beat = monotonic() + self._beat_seconds
        while True:
            is_last = self._is_over
            self._send_queued()
            if is_last and not self._outbox:
                return
            pause = max(next_beat - monotonic(), 0.0)
            ready = dict(poller.poll(int(1000 * pause) + 1))
            if self._woken.fileno() in ready:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            if self._socket in ready:
                self._receive()
            if line in ready and self._line is not None and not self._line.is_open:
                poller.unregister(line)
                line = -1
                self._hung_up()
            if monotonic() >= next_beat:
                next_beat = monotonic() + self._beat_seconds
                self._beat()

    def _send_queued(self) -> None:
        while self._outbox:
            peer, frame = self._outbox.popleft()
            parts = [peer, frame] if self._is_publisher else [frame]
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
            except zmq.ZMQError:  # nobody there by that name, or it takes nothing in any more
                self._unreachable(peer)

    def _receive(self) -> None:
        while True:
            try:
                *envelope, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._hear(envelope[0] if envelope else b"", frame)
