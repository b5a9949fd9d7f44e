"""Doorway: open files handed from one process to another on the same host.

A `FdServer` is a Unix socket where its owner puts files under keys; a `FdConnection` is a
connection to it that fetches them. Nothing offered has a name in a file system, so
nothing is left behind by whoever is killed. The kernel closes a line with the
process that held it, which is how either side learns of the other's death at once.
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
"""What a Unix socket's address can hold."""
MAX_CONNECTIONS = 4096
SPARE_FILES = 32
"""What must be left: libzmq takes a dozen for a connection, and without ends the whole process."""
ANSWER_SECONDS = 5.0
_MAX_MESSAGE_BYTES = 1024
_LOOK_SECONDS = 0.05
_FULL_SECONDS = 0.1


class Greeting(msgspec.Struct, frozen=True, tag="greeting", forbid_unknown_fields=True):
    """What a line says first: that it may, and who it is."""

    token: str
    line: str


class Wanted(msgspec.Struct, frozen=True, tag="wanted", forbid_unknown_fields=True):
    """What a line says next: which file it wants."""

    key: str


_DECODER = msgspec.json.Decoder(Greeting | Wanted)


def check_socket_path(path: Path) -> Path:
    """Return a path that a Unix socket can have."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise TransportError(
            f"socket path {str(path)!r} has {length} bytes, at most {MAX_PATH_BYTES} fit in the "
            f"address of a Unix socket; choose a shorter directory"
        )
    return path


def check_files() -> None:
    """Raise unless this process has files left for a connection."""
    if not has_room(SPARE_FILES):
        raise TransportError(
            f"fewer than {SPARE_FILES} files are left to this process, which a connection needs; "
            f"raise the limit, ulimit -n"
        )


def _credentials(peer: socket.socket) -> tuple[int, int, int]:
    """Return the process, user and group at the other end, as the kernel knows them."""
    pid, uid, gid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


class FdServer:
    """Hands files to lines that know the token and are of the same user."""

    def __init__(
        self, path: Path, *, token: str, on_hangup: Callable[[str], None] = lambda line: None
    ) -> None:
        self._path, self._token, self._on_hangup = check_socket_path(path), token, on_hangup
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self._lines: dict[socket.socket, str | None] = {}
        self._newcomers: deque[float] = deque()
        self._is_over = False
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
        self._keeper = threading.Thread(target=self._keep, name="flyweight-door", daemon=True)
        self._keeper.start()
        call_in_child(self._close_in_child)

    def offer(self, fd: int) -> str:
        """Take a file over, and return the key under which lines get duplicates of it."""
        key = secrets.token_hex(8)
        with self._lock:
            self._files[key] = fd
        return key

    def release(self, key: str) -> None:
        """Close a file; who has fetched it before keeps it. Safe to repeat."""
        with self._lock:
            fd = self._files.pop(key, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Hang up on all lines and close every file. Safe to repeat."""
        if self._is_over:
            return
        self._is_over = True
        self._wake.send(b".")
        self._keeper.join(ANSWER_SECONDS)
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:  # and not another door by now
                self._path.unlink()
        self._shut()
        for each in (self._wake, self._woken):
            each.close()

    def _close_in_child(self) -> None:
        """Close all files and connections in a forked child, whose parent keeps its own."""
        self._lock = threading.Lock()  # who held it did not come along
        self._shut()

    def _shut(self) -> None:
        for each in (*self._lines, self._listener):
            each.close()
        self._selector.close()
        for key in list(self._files):
            self.release(key)

    def _keep(self) -> None:
        while not self._is_over:
            for selected, _ in self._selector.select():
                peer = selected.fileobj
                assert isinstance(peer, socket.socket)
                if peer is self._listener:
                    self._accept()
                elif peer is not self._woken and not self._answer(peer):
                    self._hang_up(peer)

    def _accept(self) -> None:
        with suppress(ConnectionError):  # it went away again
            try:
                peer, _ = self._listener.accept()
            except OSError as cause:
                is_full = cause.errno in (errno.EMFILE, errno.ENFILE)
                if is_full and not raise_file_limit():
                    sleep(_FULL_SECONDS)  # it stays at the door until a file is free
                return
            _, uid, _ = _credentials(peer)
            if uid not in (0, os.geteuid()) or len(self._lines) >= MAX_CONNECTIONS:
                peer.close()
                return
            peer.setblocking(False)
            self._lines[peer] = None
            self._selector.register(peer, selectors.EVENT_READ)

    def _answer(self, peer: socket.socket) -> bool:
        """Answer one message; False if this line is over."""
        try:
            data = peer.recv(_MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        try:
            message = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        try:
            match message:
                case Greeting(token, line):
                    if not secrets.compare_digest(token.encode(), self._token.encode()):
                        peer.send(b"token")
                        return False
                    if not self._has_room():
                        peer.send(b"full")
                        return False
                    self._lines[peer] = line
                    peer.send(b"welcome")
                case Wanted(key) if self._lines[peer] is not None:
                    self._hand_over(peer, key)
                case _:
                    return False
        except OSError:  # gone, or it takes no answers
            return False
        return True

    def _has_room(self) -> bool:
        """True if a newcomer, and each that came just now, may take another file elsewhere."""
        now = monotonic()
        while self._newcomers and now - self._newcomers[0] > ANSWER_SECONDS:
            self._newcomers.popleft()
        if not has_room(SPARE_FILES + len(self._newcomers)):
            return False
        self._newcomers.append(now)
        return True

    def _hand_over(self, peer: socket.socket, key: str) -> None:
        with self._lock:  # while it is sent, nobody may close it and reuse its number
            fd = self._files.get(key)
            if fd is not None:
                socket.send_fds(peer, [b"file"], [fd])
                return
        peer.send(b"gone")

    def _hang_up(self, peer: socket.socket) -> None:
        line = self._lines.pop(peer)
        self._selector.unregister(peer)
        peer.close()
        if line is not None:
            self._on_hangup(line)


class FdConnection:
    """A connection to a door, open as long as both processes live."""

    def __init__(
        self,
        path: Path,
        *,
        token: str,
        timeout_seconds: float = ANSWER_SECONDS,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect, or raise TransferTimeout in time, and soon once `is_over`."""
        self.name = secrets.token_hex(8)
        self._path, self._lock = check_socket_path(path), threading.Lock()
        started = monotonic()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self._socket.connect(os.fspath(path))
            self._socket.send(msgspec.json.encode(Greeting(token, self.name)))
            self._await_answer(started + timeout_seconds, is_over)
            answer = self._socket.recv(_MAX_MESSAGE_BYTES)
        except TimeoutError as cause:
            self._socket.close()
            raise TransferTimeout(
                f"the door at {str(path)!r} did not answer in {monotonic() - started:.3g} s"
            ) from cause
        except OSError as cause:
            self._socket.close()
            raise PeerLost(f"nobody is at the door {str(path)!r}: {cause.strerror}") from cause
        if not answer:
            self._socket.close()
            raise PeerLost(f"who was at the door {str(path)!r} has gone")
        if answer == b"full":
            self._socket.close()
            raise PeerLost(
                f"who is at the door {str(path)!r} has no files left for us; raise its limit, "
                f"ulimit -n"
            )
        if answer != b"welcome":
            self._socket.close()
            raise PeerRefused(f"the door at {str(path)!r} does not know our token")
        self.pid, _, _ = _credentials(self._socket)
        """The process at the door, by its number here; 0 if it cannot be seen from here."""
        call_in_child(self._close_in_child)

    def _await_answer(self, deadline: float, is_over: Callable[[], bool]) -> None:
        looker = select.poll()
        looker.register(self._socket, select.POLLIN)
        while not looker.poll(1000 * max(min(deadline - monotonic(), _LOOK_SECONDS), 0)):
            if monotonic() >= deadline or is_over():
                raise TimeoutError

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        """False once the other side is gone; between fetches nothing else ever arrives."""
        with self._lock:
            if self._socket.fileno() < 0:
                return False
            looker = select.poll()
            looker.register(self._socket, select.POLLIN)
            return not looker.poll(0)

    def fetch(self, key: str, *, timeout_seconds: float = ANSWER_SECONDS) -> int:
        """Return a file of this process's own; raise HandleGone if nothing has that key."""
        deadline = monotonic() + timeout_seconds
        with self._lock:
            try:
                self._socket.settimeout(max(deadline - monotonic(), 0.001))
                self._socket.send(msgspec.json.encode(Wanted(key)))
                answer, fds, flags, _ = socket.recv_fds(self._socket, _MAX_MESSAGE_BYTES, 1)
            except TimeoutError as cause:
                # A late answer would be taken for that of the next question.
                self._socket.close()
                raise TransferTimeout(
                    f"the door at {str(self._path)!r} did not answer in {timeout_seconds:g} s"
                ) from cause
            except OSError as cause:
                raise HandleGone(
                    f"file {key!r} is gone with the process at {str(self._path)!r}"
                ) from cause
        if len(fds) == 1 and answer == b"file":
            return int(fds[0])
        if flags & socket.MSG_CTRUNC:
            raise TransportError("no file is left for memory of another process; see ulimit -n")
        raise HandleGone(
            f"file {key!r} is no longer offered at {str(self._path)!r}"
            if answer
            else f"file {key!r} is gone with the process at {str(self._path)!r}"
        )

    def close(self) -> None:
        self._socket.close()

    def _close_in_child(self) -> None:
        self._lock = threading.Lock()  # who held it did not come along
        self._socket.close()
