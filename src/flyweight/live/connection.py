"""Connection: the ZeroMQ socket that messages go over. Weights never go over it.

Any thread may send. A thread of the connection calls `on_frame` for each frame that arrives,
and `on_heartbeat` at a steady rate. One lock guards the socket.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep

import zmq

from flyweight.errors import TransportError
from flyweight.forks import call_in_child
from flyweight.live.frames import MAX_MESSAGE_BYTES, encode
from flyweight.live.messages import Message
from flyweight.transports.data_sockets import DataConnection
from flyweight.transports.fd_passing import FdConnection, check_files

HEARTBEATS = 5
"""How many heartbeats a side sends in the time after which silence counts as death."""
_MIN_HEARTBEAT_SECONDS = 0.01
_CLOSE_SECONDS = 5.0
_LINGER_MILLISECONDS = 1000
_LAST_MESSAGES_SECONDS = 1.0


def spin_seconds(has_devices: bool) -> float:
    """Return how long to busy-wait for a message; on the host that takes a core from copies."""
    return 0.05 if has_devices else 0.0


class Connection:
    """Sends and receives frames, with a thread of its own."""

    def __init__(
        self,
        endpoint: str,
        *,
        is_publisher: bool,
        on_frame: Callable[[bytes, memoryview], None],
        on_heartbeat: Callable[[float], None],
        heartbeat_seconds: float,
        on_unreachable: Callable[[bytes], None] = lambda member: None,
        files: FdConnection | DataConnection | None = None,
        on_peer_gone: Callable[[], None] = lambda: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Bind (publisher) or connect (replica) a socket; `start` begins to receive.

        endpoint: the ZeroMQ address.
        on_frame: takes the id of the sender (empty at a replica, which has one peer) and a frame.
        on_heartbeat: takes the time up to which silence counts. It is read before the heartbeat,
            so a process that is stopped right afterwards does not blame its peer.
        on_unreachable: takes the id of a peer that accepts no messages. The connection's thread
            calls it, not the one that sends, which may hold locks.
        files: a replica's connection for files, which the kernel closes with the publisher's
            process; `on_peer_gone` is called then.
        on_failure: called if the thread ends by an error; nothing is received afterwards.
        """
        self._on_frame, self._on_heartbeat = on_frame, on_heartbeat
        self._heartbeat_seconds = max(heartbeat_seconds, _MIN_HEARTBEAT_SECONDS)
        self.awake_since = monotonic()
        """Since when this process runs without a pause: silence before it does not count."""
        self._on_unreachable, self._is_publisher = on_unreachable, is_publisher
        self._unreachable: deque[bytes] = deque()
        self._files, self._on_peer_gone, self._on_failure = files, on_peer_gone, on_failure
        self._lock, self._receiving = threading.Lock(), threading.Lock()
        self._is_over = self._is_freed = False
        check_files()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if is_publisher else zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MILLISECONDS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._monitor: zmq.Socket[bytes] | None = None
        if not is_publisher:
            self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
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
            raise TransportError(f"cannot open a socket at {endpoint!r}: {cause}") from cause
        self._thread = threading.Thread(target=self._run, name="flyweight-connection", daemon=True)
        call_in_child(self._abandon_in_child)

    def listen(self, endpoint: str) -> int:
        """Bind another endpoint, before `start`; return its port."""
        try:
            self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            self._socket.bind(endpoint)
        except zmq.ZMQError as cause:
            raise TransportError(f"cannot listen at {endpoint!r}: {cause}") from cause
        last = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(last, bytes)
        return int(last.rstrip(b"\0").rpartition(b":")[2])

    def start(self) -> None:
        """Begin to receive: `on_frame` may be called from now on."""
        self._thread.start()

    def set_heartbeat(self, seconds: float) -> None:
        """Send heartbeats at this interval from now on."""
        self._heartbeat_seconds = max(seconds, _MIN_HEARTBEAT_SECONDS)
        self.wake()

    def send(self, message: Message, to: bytes = b"") -> None:
        """Send a message from any thread, without blocking."""
        frame = encode(message)
        parts: list[bytes | bytearray] = [to, frame] if self._is_publisher else [frame]
        with self._lock:
            if self._is_freed:
                return
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
                is_sent = True
            except zmq.ZMQError:  # no peer has this id, or its queue is full
                is_sent = False
            has_arrived = bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        if has_arrived and threading.current_thread() is not self._thread:
            self.wake()  # the send may have consumed the signal that a frame has arrived
        if not is_sent:
            self._unreachable.append(to)
            self.wake()

    def spin(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Receive in the caller's thread until `is_done`; return False after `seconds`.

        A sleeping thread wakes some tenths of a millisecond late, which is long in a round.
        """
        until = monotonic() + seconds
        while not is_done():
            if monotonic() >= until or self._is_over:
                return False
            self._receive(should_wait=False)
            sleep(0)
        return True

    def wake(self) -> None:
        """Wake the thread, so that it looks at its state now."""
        with suppress(BlockingIOError, OSError):  # full: it is about to wake anyway
            self._wake.send(b".")

    def close(self) -> None:
        """End the thread; messages sent before still go out. Safe to repeat.

        Must not be called in the connection's own thread.
        """
        self._is_over = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._free()

    def _free(self) -> None:
        with self._lock:
            if not self._is_freed:
                self._is_freed = True
                if self._monitor is not None:
                    self._socket.disable_monitor()
                    self._monitor.close(0)
                self._socket.close()
                self._context.term()
                self._wake.close()
                self._woken.close()

    def _abandon_in_child(self) -> None:
        """Do nothing more in a forked child: to close the socket there would block forever."""
        self._is_over = self._is_freed = True
        self._lock, self._receiving = threading.Lock(), threading.Lock()

    def _run(self) -> None:
        try:
            self._listen()
        finally:
            if not self._is_over:  # an error in our own code, which must not go unnoticed
                self._is_over = True
                self._on_failure()

    def _listen(self) -> None:
        # Poll the socket's file: to poll the socket itself would need the lock.
        poller = select.poll()
        poller.register(int(self._socket.getsockopt(zmq.FD)), select.POLLIN)
        poller.register(self._woken, select.POLLIN)
        files = -1 if self._files is None else self._files.fileno()
        if files >= 0:
            poller.register(files, select.POLLIN)
        last = monotonic()
        while not self._is_over:
            self._receive()
            while self._unreachable:
                self._on_unreachable(self._unreachable.popleft())
            wait_seconds = last + self._heartbeat_seconds - monotonic()
            ready = dict(poller.poll(max(1000 * wait_seconds, 0)))
            if self._woken.fileno() in ready:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            if files in ready and self._files is not None and not self._files.is_open:
                poller.unregister(files)
                files = -1
                self._receive_last_messages()
                self._on_peer_gone()
            now = monotonic()
            if now >= last + self._heartbeat_seconds:
                if now > last + 2 * self._heartbeat_seconds:  # this process was stopped, or busy
                    self.awake_since = now
                last = now
                self._receive()  # frames that have arrived are not silence
                self._on_heartbeat(now)

    def _receive_last_messages(self) -> None:
        """Receive what the peer sent before it died; its files tell of the death sooner."""
        assert self._monitor is not None  # only a replica has a connection for files
        until, is_ended = monotonic() + _LAST_MESSAGES_SECONDS, False
        while not is_ended and not self._is_over and monotonic() < until:
            is_ended = bool(self._monitor.poll(20))
            self._receive()  # everything sent before the disconnect is there by now

    def _receive(self, *, should_wait: bool = True) -> None:
        """Handle the frames that have arrived in order; only one thread does so at a time."""
        if not self._receiving.acquire(blocking=should_wait):
            return
        try:
            while (parts := self._next_frame()) is not None:
                *envelope, frame = parts
                self._on_frame(envelope[0].bytes if envelope else b"", frame.buffer)
        finally:
            self._receiving.release()

    def _next_frame(self) -> list[zmq.Frame] | None:
        with self._lock:
            if self._is_freed:
                return None
            try:
                return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:  # nothing has arrived
                return None
