"""Connection: the ZeroMQ socket that messages go over. Weights never go over it.

Any thread may send. A thread of the connection calls `on_frame` for each frame that arrives,
and `on_heartbeat` at a steady rate. One lock guards the socket. With CURVE keys the messages are
encrypted, and a handshake that fails for its keys is reported at once: to ZeroMQ it is silence.
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
from zmq.utils.monitor import recv_monitor_message

from flyweight.errors import SpecError, TransportError
from flyweight.forks import call_in_child
from flyweight.live.curve_keys import CurveClient, CurveServer, Handshakes
from flyweight.live.frames import MAX_MESSAGE_BYTES, encode
from flyweight.live.messages import Message, Tick
from flyweight.transports.data_sockets import DataConnection
from flyweight.transports.fd_passing import FdConnection, check_files

HEARTBEATS = 5
"""How many heartbeats a side sends in the time after which silence counts as death."""
_MIN_HEARTBEAT_SECONDS = 0.01
_CLOSE_SECONDS = 5.0
_LINGER_MILLISECONDS = 1000
_LAST_MESSAGES_SECONDS = 1.0
_LEAVING_SECONDS = 0.005  # how often to look whether ZeroMQ has noticed that a peer is gone
_HANDSHAKE_MILLISECONDS = 2000
# Longer, so that a publisher too busy to answer is a timeout at the replica, and not a refusal.
_PUBLISHER_HANDSHAKE_MILLISECONDS = 5000
_MONITORED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_TCP_OPTIONS = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 1,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 15_000,  # milliseconds; keepalive waits while messages are not acknowledged
}
_ADMISSIONS = "inproc://zeromq.zap.01"  # where libzmq asks whether a client may connect


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
        on_unreachable: Callable[[bytes, bool], None] = lambda member, is_gone: None,
        curve: CurveServer | CurveClient | None = None,
        on_refused: Callable[[str], None] = lambda text: None,
        files: FdConnection | DataConnection | None = None,
        on_peer_gone: Callable[[], None] = lambda: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Bind (publisher) or connect (replica) a socket; `start` begins to receive.

        endpoint: the ZeroMQ address.
        on_frame: takes the id of the sender (empty at a replica, which has one peer) and a frame.
        on_heartbeat: takes the time up to which silence counts. It is read before the heartbeat,
            so a process that is stopped right afterwards does not blame its peer.
        on_unreachable: takes the id of a peer that accepts no messages, and True if it is gone. The
            connection's thread calls it: the one that sends may hold locks.
        curve: encrypts; a publisher needs a CurveServer, a replica a CurveClient.
        on_refused: at a replica, takes the reason why the publisher ends the handshake, as the end
            of a sentence: a wrong key, or only one side encrypts.
        files: a replica's connection for files, which the kernel closes with the publisher's
            process; `on_peer_gone` is called then.
        on_failure: called if the thread ends by an error; nothing is received afterwards.
        """
        expected = CurveServer if is_publisher else CurveClient
        if not (curve is None or isinstance(curve, expected)):
            raise SpecError(f"curve is {type(curve).__name__}, expected {expected.__name__}")
        self._on_frame, self._on_heartbeat = on_frame, on_heartbeat
        self._heartbeat_seconds = max(heartbeat_seconds, _MIN_HEARTBEAT_SECONDS)
        self.awake_since = monotonic()
        """Since when this process runs without a pause: silence before it does not count."""
        self._on_unreachable, self._is_publisher = on_unreachable, is_publisher
        self._unreachable: deque[tuple[bytes, bool]] = deque()
        self._leaving: list[tuple[bytes, float, Callable[[], None]]] = []
        self._files, self._on_peer_gone, self._on_failure = files, on_peer_gone, on_failure
        self._curve, self._on_refused = curve, on_refused
        self._handshakes = Handshakes(curve if isinstance(curve, CurveClient) else None)
        self._is_tcp = endpoint.startswith("tcp:")
        self._has_connected = self._has_disconnected = self._is_refused = False
        self._lock, self._receiving = threading.Lock(), threading.Lock()
        self._is_over = self._is_freed = False
        check_files()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if is_publisher else zmq.DEALER)
        self._monitor: zmq.Socket[bytes] | None = None
        self._admissions: zmq.Socket[bytes] | None = None
        self._set_options(endpoint)
        self._set_curve()
        self.port = 0
        """The port of a publisher that is reached over tcp."""
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        try:
            if is_publisher:
                self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.port = self._bound(endpoint)
            else:
                self._socket.connect(endpoint)
        except zmq.ZMQError as cause:
            self._free()
            raise TransportError(f"cannot open a socket at {endpoint!r}: {cause}") from cause
        self._thread = threading.Thread(target=self._run, name="flyweight-connection", daemon=True)
        call_in_child(self._abandon_in_child)

    def _bound(self, endpoint: str) -> int:
        """Bind the socket to an endpoint; return its port, 0 if it has none."""
        self._socket.bind(endpoint)
        bound = bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        return int(bound.rpartition(":")[2]) if endpoint.startswith("tcp:") else 0

    def listen(self, endpoint: str, curve: CurveServer | None) -> None:
        """Listen at another endpoint too, before `start`; `port` is its port then.

        curve: encrypts what goes over this endpoint, and not over the first one.
        """
        if not (curve is None or isinstance(curve, CurveServer)):
            raise SpecError(f"curve is {type(curve).__name__}, expected CurveServer")
        self._curve = curve
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._set_curve()
        try:
            self.port = self._bound(endpoint)
        except zmq.ZMQError as cause:
            raise TransportError(f"cannot listen at {endpoint!r}: {cause}") from cause

    def _set_options(self, endpoint: str) -> None:
        patience = (
            _PUBLISHER_HANDSHAKE_MILLISECONDS if self._is_publisher else _HANDSHAKE_MILLISECONDS
        )
        options = {
            zmq.LINGER: _LINGER_MILLISECONDS,
            zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            zmq.HANDSHAKE_IVL: patience,
            zmq.IPV6: int("[" in endpoint),
            **_TCP_OPTIONS,
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        if not self._is_publisher:
            self._monitor = self._socket.get_monitor_socket(_MONITORED)

    def _set_curve(self) -> None:
        """Give the socket its keys, before it is bound or connected."""
        if self._curve is None:
            return
        self._socket.curve_publickey = self._curve.keys.public.encode("ascii")
        self._socket.curve_secretkey = self._curve.keys.secret.encode("ascii")
        if isinstance(self._curve, CurveClient):
            self._socket.curve_serverkey = self._curve.server_key.encode("ascii")
            return
        self._socket.curve_server = 1
        if self._curve.clients is not None:
            self._admissions = self._context.socket(zmq.REP)
            self._admissions.setsockopt(zmq.LINGER, 0)
            self._admissions.bind(_ADMISSIONS)
            self._socket.setsockopt(zmq.ZAP_DOMAIN, b"flyweight")
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody enters unasked

    def start(self) -> None:
        """Begin to receive: `on_frame` may be called from now on."""
        self._thread.start()

    def set_heartbeat(self, seconds: float) -> None:
        """Send heartbeats at this interval from now on."""
        self._heartbeat_seconds = max(seconds, _MIN_HEARTBEAT_SECONDS)
        self.wake()

    def send(self, message: Message, to: bytes = b"") -> None:
        """Send a message from any thread, without blocking."""
        if error := self._send_error(message, to):
            self._unreachable.append((to, error == zmq.EHOSTUNREACH))
            self.wake()

    def _send_error(self, message: Message, to: bytes) -> int:
        """Send a message; return 0, or why not: EHOSTUNREACH, or EAGAIN if the queue is full."""
        frame = encode(message)
        parts: list[bytes | bytearray] = [to, frame] if self._is_publisher else [frame]
        with self._lock:
            if self._is_freed:
                return 0
            error = 0
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
            except zmq.ZMQError as cause:
                error = cause.errno or zmq.EAGAIN
            has_arrived = bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        if has_arrived and threading.current_thread() is not self._thread:
            self.wake()  # the send may have consumed the signal that a frame has arrived
        return error

    def after_last_message(self, member: bytes, call: Callable[[], None]) -> None:
        """Make a call, in the connection's thread, after all messages of a peer that is gone."""
        self._leaving.append((member, monotonic() + _LAST_MESSAGES_SECONDS, call))
        self.wake()

    def _call_for_those_gone(self) -> None:
        for each in list(self._leaving):
            member, until, call = each
            if self._send_error(Tick(), member) or monotonic() >= until:
                self._leaving.remove(each)
                self._receive()  # everything sent before the disconnect is there by now
                call()

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
                # Nobody takes the messages of one who is refused.
                self._socket.close(0 if self._is_refused else _LINGER_MILLISECONDS)
                if self._admissions is not None:
                    self._admissions.close()
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
        for each in filter(None, (self._monitor, self._admissions)):
            poller.register(int(each.getsockopt(zmq.FD)), select.POLLIN)
        files = -1 if self._files is None else self._files.fileno()
        if files >= 0:
            poller.register(files, select.POLLIN)
        last = monotonic()
        while not self._is_over:
            self._receive()
            self._admit()
            self._read_monitor()
            while self._unreachable:
                self._receive()  # why it left may have arrived
                self._on_unreachable(*self._unreachable.popleft())
            self._call_for_those_gone()
            wait_seconds = last + self._heartbeat_seconds - monotonic()
            longest = _LEAVING_SECONDS if self._leaving else wait_seconds
            ready = dict(poller.poll(max(1000 * min(wait_seconds, longest), 0)))
            if self._woken.fileno() in ready:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            is_closed = files in ready and self._files is not None and not self._files.is_open
            if is_closed:
                poller.unregister(files)
                files = -1
            if is_closed or self._has_lost_tcp():
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
            self._monitor.poll(0 if self._has_disconnected else 20)
            self._read_monitor()
            is_ended = self._has_disconnected
            self._receive()  # everything sent before the disconnect is there by now

    def _has_lost_tcp(self) -> bool:
        """True once, if a connection over tcp has ended that had begun.

        ZeroMQ connects again, under an id that the publisher does not know. So the old
        connection is over for both sides, and the replica must say hello in a new one.
        """
        is_lost = self._is_tcp and self._has_connected and self._has_disconnected
        self._has_connected = self._has_connected and not is_lost
        return is_lost

    def _read_monitor(self) -> None:
        """Learn, at a replica, of disconnects and of handshakes that failed."""
        while self._monitor is not None:
            try:
                message = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.ZMQError:  # nothing has happened
                return
            event, value = int(message["event"]), int(message["value"])
            self._has_disconnected |= event == zmq.EVENT_DISCONNECTED
            self._has_connected |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            refusal = self._handshakes.refusal(event, value)
            # If the files are closed, this is another publisher, and ours is gone.
            is_same = self._files is None or self._files.is_open
            if refusal is not None and is_same and not self._is_refused:
                self._is_refused = True
                self._on_refused(refusal)

    def _admit(self) -> None:
        """Answer libzmq's questions which replicas may connect; RFC 27 of ZeroMQ has the frames."""
        while self._admissions is not None:
            try:
                version, request, *_, key = self._admissions.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:  # nobody asks
                return
            assert isinstance(self._curve, CurveServer)
            status = b"200" if self._curve.admits(key) else b"400"
            self._admissions.send_multipart([version, request, status, b"", b"", b""])

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
