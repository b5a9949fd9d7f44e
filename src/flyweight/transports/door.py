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
from time import monotonic, sleep

from flyweight.errors import (
    FlyweightError,
    PeerLost,
    PeerRefused,
    TransferTimeout,
    TransportError,
)
from flyweight.forks import call_in_child
from flyweight.host import make_room, raise_file_limit
from flyweight.transports.address import check_peer, keep_alive
from flyweight.transports.channel import (
    HEADER,
    STRANGER_BYTES,
    STRANGERS,
    Challenge,
    Channel,
    Hello,
    M,
    Messages,
    Proof,
    Refused,
    check_proof,
    proof_of,
    sizes_in,
)
from flyweight.transports.tls import Tls, TlsWire
from flyweight.transports.wire import Wire

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
        self._is_closed = False
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
            stranger.channel.close()
        if self._bell >= 0:
            os.close(self._bell)
        self._servers, self._strangers, self._bell, self._thread = [], {}, -1, None

    def _run(self) -> None:
        while not self._is_closed:
            polled = select.poll()
            for file in (self._bell, *(each.fileno() for each in self._servers), *self._strangers):
                polled.register(file, select.POLLIN)
            ends = [each.deadline for each in self._strangers.values()]
            patience = max(min(ends, default=monotonic() + 60) - monotonic(), 0.001)
            ready = {file for file, _ in polled.poll(1000 * patience)}
            known = ready & self._strangers.keys()
            for file in known:  # before accepting, which may end the oldest
                self._hear(self._strangers[file])
            for each in self._servers:
                if each.fileno() in ready:
                    self._accept(each)
            for stranger in list(self._strangers.values()):
                if monotonic() >= stranger.deadline:
                    late = TransferTimeout(f"no proof of the token in {ADMIT_SECONDS:g} s")
                    self._send_away(stranger, late)

    def _accept(self, server: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, peer = server.accept()
            except BlockingIOError:
                return
            except OSError as cause:  # no file is free, or the peer has left again
                if cause.errno == errno.EMFILE and raise_file_limit():
                    continue
                sleep(_PAUSE_SECONDS)
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
                self._strangers[connection.fileno()] = stranger

    def _stranger(self, connection: socket.socket, peer: object) -> _Stranger:
        if connection.family == socket.AF_UNIX:
            check_peer(connection, "the other end")
            channel = Channel(Wire(connection), "reader on this host", self._messages)
        else:
            keep_alive(connection)
            wire = Wire(connection) if self._tls is None else TlsWire(connection, self._tls)
            channel = Channel(wire, f"reader at {peer}", self._messages)
        return _Stranger(channel, self._token)

    def _hear(self, stranger: _Stranger) -> None:
        """Read what has come from a stranger; a proof makes it a member."""
        try:
            key = stranger.hear()
        except BlockingIOError:
            return
        except (OSError, EOFError):
            self._send_away(stranger, None)
        except FlyweightError as error:
            self._send_away(stranger, error)
        else:
            del self._strangers[stranger.channel.wire.fileno()]
            stranger.channel.authenticate(key, is_reader=False)
            self._admit(stranger.channel)

    def _send_away(self, stranger: _Stranger, error: FlyweightError | None) -> None:
        channel = stranger.channel
        del self._strangers[channel.wire.fileno()]
        if error is not None:
            with suppress(FlyweightError):
                refused = Refused(type(error).__name__, str(error))
                channel.send(refused, monotonic(), number=stranger.number)
        channel.close()


class _Stranger:
    """A connection that has proved nothing yet."""

    def __init__(self, channel: Channel, token: str) -> None:
        self.channel = channel
        self.deadline, self.number = monotonic() + ADMIT_SECONDS, 0
        self._has_greeted, self._left_bytes = False, STRANGER_BYTES
        self._missing, self._handshake = memoryview(b""), self._shake_hands(token)
        """What must come next: never more than a frame, because what follows is the member's."""

    def hear(self) -> bytes:
        """Take what has come, and answer it; return the key of a connection that was proved.

        Raises BlockingIOError if there is more to come.
        """
        self._has_greeted = self._has_greeted or self.channel.wire.greet()
        while True:
            while self._missing:
                received = self.channel.wire.receive_some(self._missing)
                if not received:
                    raise EOFError
                self._missing = self._missing[received:]
            try:
                self._missing = memoryview(next(self._handshake))
            except StopIteration as over:
                key: bytes = over.value
                return key

    def _shake_hands(self, token: str) -> Generator[bytearray, None, bytes]:
        """Yield memory to be filled with what comes; return the connection's key."""
        hello = yield from self._message(Hello)
        if not hello.name.isprintable():
            raise PeerRefused(f"{self.channel.peer} has a name that cannot be printed")
        self.channel.name = hello.name
        self.channel.peer = peer = f"reader {hello.name!r}"
        nonce = secrets.token_bytes(32)
        challenge = Challenge(nonce, proof_of(token, "holder", hello, nonce))
        self.channel.send(challenge, monotonic(), number=self.number)
        proof = yield from self._message(Proof)
        check_proof(proof.proof, proof_of(token, "reader", hello, nonce), peer)
        return proof_of(token, "key", hello, nonce)

    def _message(self, kind: type[M]) -> Generator[bytearray, None, M]:
        yield (header := bytearray(HEADER.size))
        peer = self.channel.peer
        self.number, nbytes = sizes_in(header, self._left_bytes, peer)
        yield (body := bytearray(nbytes))
        self._left_bytes -= HEADER.size + nbytes
        message = STRANGERS.decoded(body, peer)
        if not isinstance(message, kind):
            raise TransportError(f"{peer} sent {type(message).__name__}, not {kind.__name__}")
        return message
