"""The protocol of data connections: a greeting, then requests for bytes.

In the greeting both sides prove that they know the token, and none sends it. The connection sends a
nonce, the server answers with its own, the connection proves, then the server does. The proofs
cover both nonces, so none can be used again. Strangers may send anything: a message has at most
1 KiB, and the greeting has a deadline. A request has 32 bytes; its answer is a status byte and, if
that is SENT, the bytes.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Callable
from time import monotonic
from typing import Annotated, TypeVar

import msgspec

from flyweight.errors import HandleGone, PeerLost, PeerRefused, TransferTimeout, TransportError
from flyweight.host import reason
from flyweight.proofs import is_same, proof
from flyweight.transports.tcp import DeadlinePassed, receive

MAX_MESSAGE_BYTES = 1024
_LENGTH = struct.Struct("!H")
REQUEST = struct.Struct("!16sQQ")  # key, offset, number of bytes
SENT, GONE, BEYOND = b"+", b"-", b">"

Name = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Nonce = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
T = TypeVar("T")


class Greeting(msgspec.Struct, frozen=True, tag="greeting", forbid_unknown_fields=True):
    """The first message of a connection."""

    nonce: Nonce
    line: Name
    """The name of the process's first connection."""
    is_first: bool


class Challenge(msgspec.Struct, frozen=True, tag="challenge", forbid_unknown_fields=True):
    """The server's answer."""

    nonce: Nonce


class Answer(msgspec.Struct, frozen=True, tag="answer", forbid_unknown_fields=True):
    """The connection's proof."""

    proof: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """What a server tells connections that know the token."""

    control_port: int
    """Where the server's process listens for messages; 0 if it does not."""
    session: str
    host: str
    """The identity of the server's host."""
    local: str = ""
    """An address on that host where the process can be reached too, or ""."""


class Admission(msgspec.Struct, frozen=True, tag="admission", forbid_unknown_fields=True):
    """The server's proof, which covers the welcome."""

    welcome: Welcome
    proof: str


class Refusal(msgspec.Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    why: str


_FROM_CLIENT = msgspec.json.Decoder(Greeting | Answer)
_FROM_SERVER = msgspec.json.Decoder(Challenge | Admission | Refusal)
GARBAGE = (msgspec.DecodeError, ValueError, RecursionError)
"""What is raised for a message that is none."""
_REFUSALS: dict[str, tuple[type[TransportError], str]] = {
    "token": (PeerRefused, "does not know our token"),
    "full": (PeerLost, "has no files left for us; raise its limit, ulimit -n"),
    "crowded": (PeerLost, "has too many connections already; close some of them"),
    "": (
        PeerRefused,
        "does not greet as a publisher does; check the address, and both versions of flyweight",
    ),
}


def checked_welcome(welcome: Welcome) -> Welcome:
    """Return the welcome; raise TransportError if it is too long for a message."""
    nbytes = len(_frame(Admission(welcome, "0" * 64))) - _LENGTH.size
    if nbytes > MAX_MESSAGE_BYTES:
        raise TransportError(f"a welcome of {nbytes} bytes is too long, {MAX_MESSAGE_BYTES} fit")
    return welcome


def _frame(message: msgspec.Struct) -> bytes:
    data = msgspec.json.encode(message)
    return _LENGTH.pack(len(data)) + data


def _message(
    peer: socket.socket,
    decoder: msgspec.json.Decoder[T],
    deadline: float,
    is_over: Callable[[], bool] = lambda: False,
) -> T:
    """Return the next message; raise one of GARBAGE if it is none."""
    length = bytearray(_LENGTH.size)
    receive(peer, memoryview(length), deadline - monotonic(), is_over=is_over)
    (nbytes,) = _LENGTH.unpack(length)
    if nbytes > MAX_MESSAGE_BYTES:
        raise ValueError(f"{nbytes} bytes are no greeting")
    data = bytearray(nbytes)
    receive(peer, memoryview(data), deadline - monotonic(), is_over=is_over)
    return decoder.decode(data)


def _client_proof(token: str, greeting: Greeting, nonce: str) -> str:
    kind = "first" if greeting.is_first else "further"
    return proof(token, "data client", greeting.nonce, nonce, greeting.line, kind)


def _server_proof(token: str, greeting: Greeting, nonce: str, welcome: Welcome) -> str:
    said = msgspec.json.encode(welcome).decode()
    return proof(token, "data server", greeting.nonce, nonce, greeting.line, said)


def greet_server(
    peer: socket.socket,
    where: str,
    line: str,
    *,
    is_first: bool,
    token: str,
    deadline: float,
    is_over: Callable[[], bool],
) -> Welcome:
    """Return the welcome of a server that knows the token.

    Raise PeerRefused, PeerLost if it has no room, or what `receive` raises.
    """
    greeting, why = Greeting(secrets.token_hex(16), line, is_first), ""
    peer.sendall(_frame(greeting))
    try:
        challenge = _message(peer, _FROM_SERVER, deadline, is_over)
        if isinstance(challenge, Challenge):
            peer.sendall(_frame(Answer(_client_proof(token, greeting, challenge.nonce))))
            match _message(peer, _FROM_SERVER, deadline, is_over):
                case Admission(welcome, shown):
                    if is_same(shown, _server_proof(token, greeting, challenge.nonce, welcome)):
                        return welcome
                    why = "token"
                case Refusal(said) if said in _REFUSALS:
                    why = said
    except GARBAGE:
        pass  # another kind of server
    kind, text = _REFUSALS[why]
    raise kind(f"the process at {where} {text}")


class GreetedPeer:
    """A connection at the server that has proved the token, and waits for its welcome."""

    def __init__(self, peer: socket.socket, token: str, deadline: float) -> None:
        """Wait for the proof; raise one of GARBAGE without one, or what `receive` raises."""
        self._peer, self._token, self._nonce = peer, token, secrets.token_hex(16)
        greeting = _message(peer, _FROM_CLIENT, deadline)
        if not isinstance(greeting, Greeting):
            raise ValueError
        self.greeting = greeting
        peer.sendall(_frame(Challenge(self._nonce)))
        answer = _message(peer, _FROM_CLIENT, deadline)
        expected = _client_proof(token, greeting, self._nonce)
        if not isinstance(answer, Answer) or not is_same(answer.proof, expected):
            self.refuse("token")
            raise ValueError

    def refuse(self, why: str) -> None:
        self._peer.sendall(_frame(Refusal(why)))

    def welcome(self, welcome: Welcome) -> None:
        shown = _server_proof(self._token, self.greeting, self._nonce, welcome)
        self._peer.sendall(_frame(Admission(welcome, shown)))


def read_offer(
    peer: socket.socket,
    where: str,
    start: tuple[str, int],
    into: memoryview,
    *,
    timeout_seconds: float,
    on_progress: Callable[[int], None],
    is_over: Callable[[], bool],
) -> None:
    """Fill `into` from an offer; `start` is its key and the offset of the first byte.

    Raise HandleGone, PeerLost, or TransferTimeout if no byte arrives for `timeout_seconds`.
    """
    (key, offset), arrived, status = start, 0, bytearray(1)

    def progress(nbytes: int) -> None:
        nonlocal arrived
        arrived += nbytes
        on_progress(nbytes)

    what = f"bytes {offset}..{offset + len(into)} of {key!r:.40}"
    if len(key) != 16 or not key.isascii() or not 0 <= offset < 2**63:
        raise HandleGone(f"{what} are not offered at {where}")
    try:
        peer.sendall(REQUEST.pack(key.encode(), offset, len(into)))
        receive(peer, memoryview(status), timeout_seconds, is_over=is_over)
        if status == SENT:
            receive(
                peer,
                into,
                timeout_seconds,
                is_renewed=True,
                on_progress=progress,
                is_over=is_over,
            )
            return
    except DeadlinePassed as cause:
        raise TransferTimeout(
            f"the process at {where} sent {arrived} of {len(into)} bytes, then none for "
            f"{timeout_seconds:g} s"
        ) from cause
    except (OSError, EOFError) as cause:
        why = f": {reason(cause)}" if isinstance(cause, OSError) else ""
        raise PeerLost(
            f"the connection to {where} ended after {arrived} of {len(into)} bytes{why}"
        ) from cause
    how = "lie beyond what is" if status == BEYOND else "are no longer"
    raise HandleGone(f"{what} {how} offered at {where}")
