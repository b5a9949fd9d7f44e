"""Wire: the control channel. Only small messages go over it, never weights.

Any thread sends; what arrives is given to `hear`, and `beat` is called again and
again, both in the wire's own thread. One lock guards the socket.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep

import zmq

from flyweight.errors import TransportError
from flyweight.forks import call_in_child
from flyweight.live.messages import MAX_MESSAGE_BYTES, Message, encode
from flyweight.transports.fd_passing import FdConnection, check_files

BEATS = 5
"""How often a side tells that it lives before the other would give it up."""
_MIN_BEAT_SECONDS = 0.01
_CLOSE_SECONDS = 5.0
_LINGER_MILLISECONDS = 1000
_LAST_WORDS_SECONDS = 1.0

Hear = Callable[[bytes, bytes], None]
"""Takes the peer a frame is from (empty at a replica: there is only one) and the frame."""


def spin_of(has_devices: bool) -> float:
    """Return how long to wait awake: on the host that takes a core from those who copy."""
    return 0.05 if has_devices else 0.0


class Wire:
    """Sends and hears frames in a thread of its own."""

    def __init__(
        self,
        endpoint: str,
        *,
        is_publisher: bool,
        hear: Hear,
        beat: Callable[[float], None],
        beat_seconds: float,
        unreachable: Callable[[bytes], None] = lambda peer: None,
        line: FdConnection | None = None,
        hung_up: Callable[[], None] = lambda: None,
        broken: Callable[[], None] = lambda: None,
    ) -> None:
        """`broken` is called when the thread ends by an error, after which nothing is heard.

        `beat` is told the time up to which silence counts: a stop right after is not the peer's.
        """
        self._hear, self._beat = hear, beat
        self._beat_seconds = max(beat_seconds, _MIN_BEAT_SECONDS)
        self.awake_since = monotonic()
        """Since when nothing has kept this process from listening: no silence is older."""
        self._unreachable, self._is_publisher = unreachable, is_publisher
        self._line, self._hung_up, self._broken = line, hung_up, broken
        self._lock, self._hearing = threading.Lock(), threading.Lock()
        self._is_over = self._is_freed = False
        check_files()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if is_publisher else zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._ended: zmq.Socket[bytes] | None = None
        if not is_publisher:
            self._ended = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
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
        call_in_child(self._abandon_in_child)

    def start(self) -> None:
        """Begin to hear; whoever made the wire is ready for it now."""
        self._thread.start()

    def beat_every(self, seconds: float) -> None:
        """Beat so often from now on."""
        self._beat_seconds = max(seconds, _MIN_BEAT_SECONDS)
        self.nudge()

    def send(self, message: Message, to: bytes = b"") -> None:
        """Send a message at once, from any thread; never blocks."""
        frame = encode(message)
        parts = [to, frame] if self._is_publisher else [frame]
        with self._lock:
            if self._is_freed:
                return
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
                is_sent = True
            except zmq.ZMQError:  # nobody there by that name, or it takes nothing in any more
                is_sent = False
            has_arrived = bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        if has_arrived and threading.current_thread() is not self._thread:
            self.nudge()  # the send may have swallowed the sign of it
        if not is_sent:
            self._unreachable(to)

    def spin(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Hear messages in the caller's thread until something is so; False if it takes longer.

        A thread that sleeps wakes some tenth of a millisecond late, which is long in a round.
        """
        until = monotonic() + seconds
        while not is_done():
            if monotonic() >= until or self._is_over:
                return False
            self._receive(should_wait=False)
            sleep(0)
        return True

    def nudge(self) -> None:
        """Make the thread look around now."""
        with suppress(BlockingIOError, OSError):  # full: it is about to look anyway
            self._wake.send(b".")

    def close(self) -> None:
        """End the thread; what was sent still goes out. Safe to repeat, but not in the thread."""
        self._is_over = True
        self.nudge()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._free()

    def _free(self) -> None:
        with self._lock:
            if not self._is_freed:
                self._is_freed = True
                if self._ended is not None:
                    self._socket.disable_monitor()
                    self._ended.close(0)
                self._socket.close()
                self._context.term()
                self._wake.close()
                self._woken.close()

    def _abandon_in_child(self) -> None:
        """Leave it to its process: in a child it would be waited for without an end."""
        self._is_over = self._is_freed = True
        self._lock, self._hearing = threading.Lock(), threading.Lock()

    def _run(self) -> None:
        try:
            self._listen()
        finally:
            if not self._is_over:  # an error of ours, which must not go unnoticed
                self._is_over = True
                self._broken()

    def _listen(self) -> None:
        # The socket's own file tells of arrivals; to poll the socket itself would need the lock.
        poller = select.poll()
        poller.register(int(self._socket.getsockopt(zmq.FD)), select.POLLIN)
        poller.register(self._woken, select.POLLIN)
        line = -1 if self._line is None else self._line.fileno()
        if line >= 0:
            poller.register(line, select.POLLIN)
        last_beat = monotonic()
        while not self._is_over:
            self._receive()
            until_beat = last_beat + self._beat_seconds - monotonic()
            ready = dict(poller.poll(max(1000 * until_beat, 0)))
            if self._woken.fileno() in ready:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            if line in ready and self._line is not None and not self._line.is_open:
                poller.unregister(line)
                line = -1
                self._hear_out()
                self._hung_up()
            now = monotonic()
            if now >= last_beat + self._beat_seconds:
                if now > last_beat + 2 * self._beat_seconds:  # stopped, or with much else to do
                    self.awake_since = now
                last_beat = now
                self._receive()  # what has come is no silence
                self._beat(now)

    def _hear_out(self) -> None:
        """Hear what the other side said before it went, of which its door tells sooner."""
        assert self._ended is not None  # who has a line is no publisher
        until, is_ended = monotonic() + _LAST_WORDS_SECONDS, False
        while not is_ended and not self._is_over and monotonic() < until:
            is_ended = bool(self._ended.poll(20))
            self._receive()  # all that came before the end is there with it

    def _receive(self, *, should_wait: bool = True) -> None:
        """Hear what has come, one frame after the other, whichever thread it is that does."""
        if not self._hearing.acquire(blocking=should_wait):
            return  # another thread is at it
        try:
            while (parts := self._received()) is not None:
                *envelope, frame = parts
                self._hear(envelope[0] if envelope else b"", frame)
        finally:
            self._hearing.release()

    def _received(self) -> list[bytes] | None:
        with self._lock:
            if self._is_freed:
                return None
            try:
                return self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:  # nothing more by now
                return None
