"""Door: accepts connections and admits those that prove the token.

Strangers have a fixed number of places, bytes and seconds, and share one thread: whatever they do,
they cost no member anything. When all places are taken, the next one ends the oldest: a reader that
was ended so comes again, and silent strangers cannot keep it out.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from time import monotonic

from flyweight.errors import (
    FlyweightError,
    PeerLost,
    PeerRefused,
    TransferTimeout,
    TransportError,
)
from flyweight.forks import call_in_child
from flyweight.host import make_room, raise_file_limit
from flyweight.transports.address import keep_alive, peer_user
from flyweight.transports.channel import (
    HEADER,
    STRANGER_BYTES,
    STRANGERS,
    Challenge,
    Channel,
    Hello,
    Message,
    Messages,
    Proof,
    Refused,
    check_proof,
    frame_of,
    proof_of,
    sizes_in,
)
from flyweight.transports.tls import Tls, TlsWire
from flyweight.transports.wire import DeadlinePassed, Wire

PLACES = 64
ADMIT_SECONDS = 5.0
"""A stranger must prove the token in this time, all together."""
_PAUSE_SECONDS = 0.1
"""How long to wait when accepting fails, as it does without a free file descriptor."""
_ACCEPTED_AT_ONCE = 16


class Door:
    """Listens at sockets until it is closed, and calls `admit` with each new member."""

    def __init__(
        self, servers: Sequence[socket.socket], token: str, messages: Messages, tls: Tls | None
    ) -> None:
        """tls: for connections of other hosts; Unix sockets are never encrypted."""
        self._servers, self._token, self._messages = list(servers), token, messages
        self._tls = None if tls is None else tls.holder
        self._strangers: dict[int, _Stranger] = {}
        """By the number of the open file, the oldest first."""
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._is_closed, self._paused_until = False, 0.0
        call_in_child(self._close_files)

    def open(self, admit: Callable[[Channel], None]) -> None:
        self._admit = admit
        for each in self._servers:
            each.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="flyweight-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End once and for all; strangers are sent away."""
        self._is_closed = True
        if self._thread is not None:
            os.eventfd_write(self._bell, 1)
            self._thread.join()
            self._thread = None
        self._close_files()

    def _close_files(self) -> None:
        for server in self._servers:
            server.close()
        for stranger in self._strangers.values():
            stranger.wire.close()
        if self._bell >= 0:
            os.close(self._bell)
        self._servers, self._strangers, self._bell, self._thread = [], {}, -1, None

    def _run(self) -> None:
        while not self._is_closed:
            polled, accepting = select.poll(), self._accepting()
            for file in (self._bell, *accepting, *self._strangers):
                polled.register(file, select.POLLIN)
            ready = [file for file, _ in polled.poll(1000 * self._patience())]
            for file in ready:  # those that are here already first: accepting may end the oldest
                if file in self._strangers:
                    self._hear(self._strangers[file])
            for file in ready:
                if file in accepting:
                    self._accept(accepting[file])
            for each in list(self._strangers.values()):
                if monotonic() >= each.deadline:
                    late = TransferTimeout(f"no proof of the token in {ADMIT_SECONDS:g} s")
                    self._send_away(each, late)

    def _accepting(self) -> dict[int, socket.socket]:
        if monotonic() < self._paused_until:
            return {}
        return {each.fileno(): each for each in self._servers}

    def _patience(self) -> float:
        ends = [each.deadline for each in self._strangers.values()]
        if monotonic() < self._paused_until:
            ends.append(self._paused_until)
        return max(min(ends, default=monotonic() + 60) - monotonic(), 0.001)

    def _accept(self, server: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, peer = server.accept()
            except BlockingIOError:
                return
            except OSError as cause:  # no file is free, or the peer has left again
                if cause.errno == errno.EMFILE and raise_file_limit():
                    continue
                self._paused_until = monotonic() + _PAUSE_SECONDS
                return
            make_room(connection.fileno())  # a member needs more than one
            if len(self._strangers) >= PLACES:
                oldest = next(iter(self._strangers.values()))
                self._send_away(oldest, PeerLost("too many come at once; come again"))
            try:
                stranger = self._stranger(connection, peer)
            except (OSError, FlyweightError):  # another user's, or it has left again
                connection.close()
            else:
                self._strangers[stranger.wire.fileno()] = stranger

    def _stranger(self, connection: socket.socket, peer: object) -> _Stranger:
        if connection.family == socket.AF_UNIX:
            user = peer_user(connection)
            if user not in (os.geteuid(), 0):
                raise PeerRefused(f"user {user} is not the user of this holder")
            return _Stranger(Wire(connection), "reader on this host", self._token)
        keep_alive(connection)
        wire = Wire(connection) if self._tls is None else TlsWire(connection, self._tls)
        return _Stranger(wire, f"reader at {peer}", self._token)

    def _hear(self, stranger: _Stranger) -> None:
        """Read what has come from a stranger; a proof makes it a member."""
        try:
            key = stranger.hear()
        except BlockingIOError:
            return
        except (OSError, EOFError, DeadlinePassed):
            self._leave(stranger)
            stranger.wire.close()
        except FlyweightError as error:
            self._send_away(stranger, error)
        else:
            self._leave(stranger)
            channel = Channel(stranger.wire, stranger.peer, self._messages)
            channel.authenticate(key, is_reader=False)
            self._admit(channel)

    def _send_away(self, stranger: _Stranger, error: FlyweightError) -> None:
        self._leave(stranger)
        refused = Refused(type(error).__name__, str(error))
        with suppress(OSError, DeadlinePassed, FlyweightError):
            stranger.wire.send([frame_of(refused, stranger.number)], monotonic())
        stranger.wire.close()

    def _leave(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.wire.fileno()]


class _Stranger:
    """A connection that has proved nothing yet."""

    def __init__(self, wire: Wire, peer: str, token: str) -> None:
        self.wire, self.peer = wire, peer
        self.deadline, self.number = monotonic() + ADMIT_SECONDS, 0
        self._has_greeted = False
        self._left_bytes = STRANGER_BYTES
        self._frame, self._filled = memoryview(bytearray(HEADER.size)), 0
        """What is read now, and how much of it has come: never more than the frame, because what
        follows the proof is the member's."""
        self._handshake = self._greet(token)
        next(self._handshake)

    def hear(self) -> bytes:
        """Take what has come, and answer it; return the key of a connection that was proved.

        Raises BlockingIOError if there is more to come.
        """
        self._has_greeted = self._has_greeted or self.wire.greet()
        while True:
            header = self._read(HEADER.size, 0)
            self.number, nbytes = sizes_in(header, self._left_bytes, self.peer)
            body = self._read(HEADER.size + nbytes, HEADER.size)
            message = STRANGERS.decoded(body, self.peer)
            self._left_bytes -= HEADER.size + nbytes
            self._frame, self._filled = memoryview(bytearray(HEADER.size)), 0
            try:
                answer = self._handshake.send(message)
            except StopIteration as over:
                key: bytes = over.value
                return key
            self.wire.send([frame_of(answer, self.number)], monotonic())

    def _read(self, end: int, start: int) -> bytes:
        """Return bytes of the frame, once it has come up to `end`."""
        if len(self._frame) < end:
            longer = memoryview(bytearray(end))
            longer[: len(self._frame)] = self._frame
            self._frame = longer
        while self._filled < end:
            received = self.wire.receive_some(self._frame[self._filled : end])
            if not received:
                raise EOFError
            self._filled += received
        return bytes(self._frame[start:end])

    def _greet(self, token: str) -> Generator[Message, Message, bytes]:
        """Take messages and yield their answers; return the connection's key."""
        hello = yield Challenge(b"", b"")  # not sent: it only starts the generator
        if not isinstance(hello, Hello):
            raise TransportError(f"{self.peer} sent {type(hello).__name__}, not Hello")
        if not hello.name.isprintable():
            raise PeerRefused(f"{self.peer} has a name that cannot be printed")
        self.peer = f"reader {hello.name!r}"
        nonce = secrets.token_bytes(32)
        proof = yield Challenge(nonce, proof_of(token, "holder", hello, nonce))
        if not isinstance(proof, Proof):
            raise TransportError(f"{self.peer} sent {type(proof).__name__}, not Proof")
        check_proof(proof.proof, proof_of(token, "reader", hello, nonce), self.peer)
        return proof_of(token, "key", hello, nonce)
