"""Open files passed from one process to another on the same host, through a Unix socket.

An `FdServer` offers files under keys; an `FdConnection` fetches them. An offered file has
no name in any file system, so a killed process leaves nothing behind. The kernel closes a
connection with the process that held it, so either side learns at once when the other dies.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import msgspec

from flyweight.errors import HandleGone, PeerLost, PeerRefused, TransferTimeout, TransportError
from flyweight.forks import call_in_child
from flyweight.host import has_room, raise_file_limit

MAX_PATH_BYTES = 107
"""How long the address of a Unix socket may be."""
MAX_CONNECTIONS = 4096
SPARE_FILES = 32
"""How many files must stay free: libzmq opens a dozen per connection, and aborts without them."""
ANSWER_SECONDS = 5.0
_MAX_MESSAGE_BYTES = 1024
_CHECK_SECONDS = 0.05
_FULL_SECONDS = 0.1


class Greeting(msgspec.Struct, frozen=True, tag="greeting", forbid_unknown_fields=True):
    """The first message of a connection: the token, and the connection's name."""

    token: str
    line: str


class Wanted(msgspec.Struct, frozen=True, tag="wanted", forbid_unknown_fields=True):
    """Every later message of a connection: the key of the file it wants."""

    key: str


_DECODER = msgspec.json.Decoder(Greeting | Wanted)
_REFUSALS: dict[bytes, tuple[type[TransportError], str]] = {
    b"": (PeerLost, "closed the connection"),
    b"full": (PeerLost, "has no files left for us; raise its limit, ulimit -n"),
}


def check_socket_path(path: Path) -> Path:
    """Return the path; raise TransportError if it is too long for a Unix socket."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise TransportError(
            f"socket path {str(path)!r} has {length} bytes, at most {MAX_PATH_BYTES} fit in the "
            f"address of a Unix socket; choose a shorter directory"
        )
    return path


def check_files() -> None:
    """Raise TransportError unless this process can open enough files for a connection."""
    if not has_room(SPARE_FILES):
        raise TransportError(
            f"fewer than {SPARE_FILES} files are left to this process, which a connection needs; "
            f"raise the limit, ulimit -n"
        )


def _peer_ids(peer: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class FdServer:
    """Passes files to connections of the same user that know the token.

    Args:
        path: where the socket is made.
        token: what a connection must send first.
        on_hangup: called with the name of each connection that closes, from the server's thread.
    """

    def __init__(
        self, path: Path, *, token: str, on_hangup: Callable[[str], None] = lambda name: None
    ) -> None:
        self._path, self._token, self._on_hangup = check_socket_path(path), token, on_hangup
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, str | None] = {}
        """The name of each connection, once it has sent the token."""
        self._greeted_at: deque[float] = deque()
        self._is_closed = False
        check_files()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(os.fspath(path))
            path.chmod(0o600)
            self._inode = path.stat().st_ino
            self._listener.listen(64)
        except OSError as cause:
            self._listener.close()
            raise TransportError(f"cannot listen at {str(path)!r}: {cause.strerror}") from cause
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="flyweight-fds", daemon=True)
        self._thread.start()
        call_in_child(self._close_in_child)

    def offer(self, fd: int, key: str = "") -> str:
        """Take a file over, and return the key under which connections get duplicates of it.

        key: the key that another server offers the file under; by default a new one.
        """
        key = key or secrets.token_hex(8)
        with self._lock:
            self._files[key] = fd
        return key

    def release(self, key: str) -> None:
        """Close a file; processes that fetched it keep theirs. Safe to repeat."""
        with self._lock:
            fd = self._files.pop(key, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Close every connection and file. Safe to repeat."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake.send(b".")
        self._thread.join(ANSWER_SECONDS)
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:  # another server may have replaced it
                self._path.unlink()
        self._close_files()
        for each in (self._wake, self._woken):
            each.close()

    def _close_in_child(self) -> None:
        """Close a forked child's copies; the parent keeps its own."""
        self._lock = threading.Lock()  # the thread that held it does not exist in the child
        self._close_files()

    def _close_files(self) -> None:
        for each in (*self._connections, self._listener):
            each.close()
        self._selector.close()
        for key in list(self._files):
            self.release(key)

    def _serve(self) -> None:
        while not self._is_closed:
            for selected, _ in self._selector.select():
                peer = selected.fileobj
                assert isinstance(peer, socket.socket)
                if peer is self._listener:
                    self._accept()
                elif peer is not self._woken and not self._answer(peer):
                    name = self._connections.pop(peer)
                    self._selector.unregister(peer)
                    peer.close()
                    if name is not None:
                        self._on_hangup(name)

    def _accept(self) -> None:
        with suppress(ConnectionError):  # the peer closed already
            try:
                peer, _ = self._listener.accept()
            except OSError as cause:
                is_full = cause.errno in (errno.EMFILE, errno.ENFILE)
                if is_full and not raise_file_limit():
                    sleep(_FULL_SECONDS)  # the connection stays pending until a file is free
                return
            _, uid = _peer_ids(peer)
            if uid not in (0, os.geteuid()) or len(self._connections) >= MAX_CONNECTIONS:
                peer.close()
                return
            peer.setblocking(False)
            self._connections[peer] = None
            self._selector.register(peer, selectors.EVENT_READ)

    def _answer(self, peer: socket.socket) -> bool:
        """Answer one message; return False to close the connection."""
        try:
            data = peer.recv(_MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        try:
            match _DECODER.decode(data):
                case Greeting(token, name):
                    if not secrets.compare_digest(token.encode(), self._token.encode()):
                        peer.send(b"token")
                        return False
                    if not self._has_room():
                        peer.send(b"full")
                        return False
                    self._connections[peer] = name
                    peer.send(b"welcome")
                case Wanted(key) if self._connections[peer] is not None:
                    self._send_file(peer, key)
                case _:
                    return False
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return False  # the peer is gone, does not read its answers, or sent no message
        return True

    def _has_room(self) -> bool:
        """True if this connection, and each recent one, can have another file elsewhere."""
        now = monotonic()
        while self._greeted_at and now - self._greeted_at[0] > ANSWER_SECONDS:
            self._greeted_at.popleft()
        if not has_room(SPARE_FILES + len(self._greeted_at)):
            return False
        self._greeted_at.append(now)
        return True

    def _send_file(self, peer: socket.socket, key: str) -> None:
        with self._lock:  # until it is sent, no thread may close it and reuse its number
            fd = self._files.get(key)
            if fd is not None:
                socket.send_fds(peer, [b"file"], [fd])
                return
        peer.send(b"gone")


class FdConnection:
    """A connection to an FdServer, open as long as both processes live.

    Args:
        path: the server's socket.
        token: what the server expects.
        timeout_seconds: how long to wait for the server's answer.
        is_over: checked while waiting; once it returns True, the wait ends early.
    """

    def __init__(
        self,
        path: Path,
        *,
        token: str,
        timeout_seconds: float = ANSWER_SECONDS,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect; raise PeerLost, PeerRefused or TransferTimeout if that fails."""
        self.name = secrets.token_hex(8)
        self._path, self._lock = check_socket_path(path), threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            answer = self._greet(token, timeout_seconds, is_over)
            if answer != b"welcome":
                kind, what = _REFUSALS.get(answer, (PeerRefused, "does not know our token"))
                raise kind(f"the process at {str(path)!r} {what}")
            self.pid, _ = _peer_ids(self._socket)
            """The server's process id; 0 if it is not visible from here."""
        except BaseException:
            self._socket.close()
            raise
        call_in_child(self._close_in_child)

    def _greet(self, token: str, timeout_seconds: float, is_over: Callable[[], bool]) -> bytes:
        started, where = monotonic(), str(self._path)
        self._socket.setblocking(False)
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        try:
            self._socket.connect(where)
            self._socket.send(msgspec.json.encode(Greeting(token, self.name)))
            deadline = started + timeout_seconds
            while not readable.poll(1000 * max(min(deadline - monotonic(), _CHECK_SECONDS), 0)):
                if monotonic() >= deadline or is_over():
                    raise TimeoutError
            return self._socket.recv(_MAX_MESSAGE_BYTES)
        except TimeoutError as cause:
            raise TransferTimeout(
                f"the process at {where!r} did not answer in {monotonic() - started:.3g} s"
            ) from cause
        except OSError as cause:
            raise PeerLost(f"no process listens at {where!r}: {cause.strerror}") from cause

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        """False once either side has closed, or the other process has died."""
        if self._socket.fileno() < 0:
            return False
        closing = select.poll()
        closing.register(self._socket, select.POLLRDHUP)
        return not closing.poll(0)

    def fetch(self, key: str, *, timeout_seconds: float = ANSWER_SECONDS) -> int:
        """Return a new file descriptor; raise HandleGone if no file is offered under the key."""
        where, deadline = str(self._path), monotonic() + timeout_seconds
        with self._lock:
            try:
                self._socket.settimeout(max(deadline - monotonic(), 0.001))
                self._socket.send(msgspec.json.encode(Wanted(key)))
                answer, fds, flags, _ = socket.recv_fds(self._socket, _MAX_MESSAGE_BYTES, 1)
            except TimeoutError as cause:
                # A late answer would be taken for the answer to the next message.
                self._socket.close()
                raise TransferTimeout(
                    f"the process at {where!r} did not answer in {timeout_seconds:g} s"
                ) from cause
            except OSError:
                answer, fds, flags = b"", [], 0
        if len(fds) == 1 and answer == b"file":
            return int(fds[0])
        if flags & socket.MSG_CTRUNC:
            raise TransportError("no file is left for memory of another process; see ulimit -n")
        what = "no longer offered" if answer else "gone with the process"
        raise HandleGone(f"file {key!r} is {what} at {where!r}")

    def close(self) -> None:
        self._socket.close()

    def _close_in_child(self) -> None:
        self._lock = threading.Lock()  # the thread that held it does not exist in the child
        self._socket.close()
