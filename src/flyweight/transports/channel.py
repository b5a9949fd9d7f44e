"""Channel: one connection for messages, open files and bytes, in one order.

A frame is `fw`, the protocol's number, a zero, the number of the request, the length, msgpack, and
a tag that only who has the token can make. Open files travel with a frame, bytes after one. An
answer repeats the number of its request; a message that nobody asked for has number 0. A channel on
which anything failed, a missed deadline or Ctrl-C included, is over: what was on its way is never
taken for something else. The end of the stream comes after the last message, so a peer that says
why it leaves is never reported as dead.

Which messages there are is an argument: rooms bring their own, besides the few in this file.
"""

from __future__ import annotations

import hmac
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import ETIMEDOUT
from hashlib import blake2b
from itertools import count
from time import monotonic
from typing import Any, NamedTuple, TypeVar, Union

import msgspec

from flyweight.errors import (
    FlyweightError,
    HandleGone,
    PeerLost,
    PeerRefused,
    TransferTimeout,
    TransportError,
    error_named,
)
from flyweight.forks import call_in_child
from flyweight.memory import Bytes
from flyweight.transports.wire import FILES_AT_ONCE, FOREVER, DeadlinePassed, Wire

PROTOCOL = 11
HEADER = struct.Struct("<2sBxII")
TAG_BYTES = 16
STRANGER_BYTES, FRAME_BYTES = 4 << 10, 256 << 20
"""The largest frame of a peer that has not proved the token yet, and of one that has."""
FRAME_SECONDS = 20.0
"""A peer that has begun a frame must end it in this time."""
_LAST_WORDS_SECONDS = 0.1


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """One frame. Tables of many rows are columns of numbers, as bytes."""


class Hello(Message, frozen=True):
    """Reader to holder, first."""

    nonce: bytes
    name: str


class Challenge(Message, frozen=True):
    """The holder proves first that it has the token: a stranger gets no proof of the reader's."""

    nonce: bytes
    proof: bytes


class Proof(Message, frozen=True):
    """Reader to holder. From here on every frame is authenticated."""

    proof: bytes


class Refused(Message, frozen=True):
    """Instead of an answer: the class and the text of an error."""

    kind: str
    text: str


class Ended(Message, frozen=True):
    """The last message: why the connection ends."""

    text: str


class Files(Message, frozen=True):
    """Carries open files that did not fit into one frame with others."""


M = TypeVar("M", bound=Message)
encode = msgspec.msgpack.Encoder().encode


class Messages:
    """The messages that a channel understands: those of this file, and those of a room."""

    def __init__(self, *kinds: type[Message]) -> None:
        known = Hello, Challenge, Proof, Refused, Ended, Files, *kinds
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Union[known])  # noqa: UP007

    def decoded(self, body: Bytes | bytes | bytearray, peer: str) -> Message:
        try:
            found: Message = self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as cause:
            raise TransportError(f"{peer} sent no message: {cause}") from cause
        return found


STRANGERS = Messages()
"""What is understood before the token is proved."""


class Frame(NamedTuple):
    """A message, the number of its request, and the open files that came with it."""

    number: int
    message: Message
    files: Sequence[int] = ()

    def close(self) -> None:
        for file in self.files:
            os.close(file)


class Channel:
    """Sends and receives in one thread at a time. Any thread may call `shut`."""

    def __init__(self, wire: Wire, peer: str, messages: Messages) -> None:
        self.wire, self.peer = wire, peer
        """`peer` says who is at the other end, in errors."""
        self.on_push: Callable[[Message], None] = lambda message: None
        """Called with a message that nobody asked for."""
        self.name = ""
        """What a reader has called itself, with its proof of the token."""
        self.sent_bytes, self.has_failed = 0, False
        self._messages, self._numbers = messages, count(1)
        self._max_frame_bytes = STRANGER_BYTES
        self._tags: tuple[Tags, Tags] | None = None
        call_in_child(self.close)

    @property
    def is_broken(self) -> bool:
        """Hear what nobody asked for; True if anything failed here, or the peer has ended."""
        with suppress(FlyweightError):
            while not self.has_failed and self.wire.has_input(deadline=0.0):
                self.hear(monotonic() + _LAST_WORDS_SECONDS)
        return self.has_failed

    def authenticate(self, key: bytes, *, is_reader: bool) -> None:
        """From here on, accept and send only frames whose tags were made with this key."""
        mine, theirs = (b"reader", b"holder") if is_reader else (b"holder", b"reader")
        self._tags = Tags(key, mine), Tags(key, theirs)
        self._max_frame_bytes = FRAME_BYTES

    # Requests and answers.

    def ask(self, message: Message, deadline: float, files: Sequence[int] = ()) -> int:
        """Send a request and return its number. Several may be on their way."""
        number = next(self._numbers)
        self.send(message, deadline, files, number=number)
        return number

    def answer(self, number: int, kinds: type[M] | tuple[type[M], ...], deadline: float) -> Frame:
        """Return the answer to a request; raise what the peer says instead of it."""
        with self._failing("sent nothing"):
            while (frame := self._frame(deadline)).number == 0:
                self._take_push(frame)
            message = frame.message
            expected: tuple[type[Message], ...] = kinds if isinstance(kinds, tuple) else (kinds,)
            if frame.number != number or not isinstance(message, (*expected, Refused)):
                frame.close()
                raise TransportError(
                    f"{self.peer} sent {type(message).__name__} for request {frame.number}, not an "
                    f"answer to request {number}"
                )
        if isinstance(message, Refused):
            frame.close()
            error = error_named(message.kind, message.text)
            error.note(f"said by {self.peer}")
            raise error
        return frame

    def call(
        self, message: Message, kind: type[M], deadline: float, files: Sequence[int] = ()
    ) -> M:
        """Send a request and return its answer, which comes without files."""
        frame = self.answer(self.ask(message, deadline, files), kind, deadline)
        frame.close()
        assert isinstance(frame.message, kind)
        return frame.message

    def hear(self, deadline: float) -> None:
        """Take one message that nobody asked for; raise HandleGone if it is the last."""
        with self._failing("sent nothing"):
            frame = self._frame(deadline)
            if frame.number:
                frame.close()
                raise TransportError(f"{self.peer} answers request {frame.number}, which is over")
            self._take_push(frame)

    def _take_push(self, frame: Frame) -> None:
        frame.close()
        message = frame.message
        if isinstance(message, Refused):
            raise error_named(message.kind, message.text)
        if isinstance(message, Ended):
            raise HandleGone(f"{self.peer} ended the connection: {message.text}")
        self.on_push(message)

    # Frames and bytes.

    def send(
        self,
        message: Message,
        deadline: float,
        files: Sequence[int] = (),
        *,
        number: int = 0,
        parts: Sequence[Bytes] = (),
        stall_seconds: float = FOREVER,
    ) -> None:
        """Send a message with open files, and then bytes, from where they lie."""
        with self._failing("took no message"):
            try:
                while len(files) > FILES_AT_ONCE:
                    some, files = files[:FILES_AT_ONCE], files[FILES_AT_ONCE:]
                    self.wire.send([self._sealed(Files(), number)], deadline, files=some)
                frame = self._sealed(message, number)
                self.wire.send([frame, *parts], deadline, files=files, stall_seconds=stall_seconds)
                self.sent_bytes += sum(map(len, parts))
            except ConnectionError as error:
                raise self._last_words() or error from error

    def _sealed(self, message: Message, number: int) -> bytes:
        frame = frame_of(message, number)
        return frame if self._tags is None else frame + self._tags[0].next(frame)

    def _last_words(self) -> FlyweightError | None:
        """Return why the peer has closed the connection, if it said so."""
        with suppress(FlyweightError, OSError, EOFError, DeadlinePassed):
            while True:
                message = self._frame(monotonic() + _LAST_WORDS_SECONDS).message
                if isinstance(message, Ended):
                    return HandleGone(f"{self.peer} ended the connection: {message.text}")
                if isinstance(message, Refused):
                    return error_named(message.kind, message.text)
        return None

    def next_frame(self, deadline: float = FOREVER) -> Frame:
        """Return the next frame, whatever it is."""
        with self._failing("sent nothing"):
            return self._frame(deadline)

    def _frame(self, deadline: float) -> Frame:
        files: list[int] = []
        try:
            while True:
                header, tag = bytearray(HEADER.size), bytearray(TAG_BYTES)
                if not self.wire.has_input(deadline=deadline):
                    raise DeadlinePassed
                end = monotonic() + FRAME_SECONDS
                self.wire.receive(header, end, files=files)
                number, nbytes = sizes_in(header, self._max_frame_bytes, self.peer)
                body = bytearray(nbytes)
                self.wire.receive(body, end)
                if self._tags is not None:
                    self.wire.receive(tag, end)
                    if not hmac.compare_digest(self._tags[1].next(header, body), tag):
                        raise PeerRefused(
                            f"a frame was not sent by {self.peer}, or has been changed on its way"
                        )
                message = self._messages.decoded(body, self.peer)
                if not isinstance(message, Files):
                    return Frame(number, message, files)
        except BaseException:
            Frame(0, Files(), files).close()
            raise

    def receive_bytes(self, into: Bytes, deadline: float, stall_seconds: float) -> None:
        """Receive bytes; give up at the deadline, or if none come for so long."""
        with self._failing("sent no bytes"):
            self.wire.receive(into, deadline, stall_seconds=stall_seconds)

    # The end.

    def end(self, text: str) -> None:
        """Say why this side leaves, if the peer takes it at once, and close."""
        with suppress(FlyweightError):
            self.send(Ended(text), monotonic() + _LAST_WORDS_SECONDS)
        self.close()

    def refuse(self, error: FlyweightError, number: int) -> None:
        with suppress(FlyweightError):
            answer = Refused(type(error).__name__, str(error))
            self.send(answer, monotonic() + _LAST_WORDS_SECONDS, number=number)

    def shut(self) -> None:
        """End what any thread does here, now."""
        self.has_failed = True
        self.wire.shut()

    def close(self) -> None:
        self.has_failed = True
        self.wire.close()

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """End the channel on any error; name the peer in errors of the socket."""
        started = monotonic()
        try:
            yield
        except BaseException as error:
            self.shut()
            if isinstance(error, FlyweightError):
                raise
            if isinstance(error, DeadlinePassed):
                raise TransferTimeout(
                    f"{self.peer} {what} for {monotonic() - started:.2g} s; it hangs, or needs a "
                    f"longer timeout_seconds"
                ) from error
            if isinstance(error, (OSError, EOFError, ValueError)):
                why = f": {error}" if str(error) else ", as a process that dies does"
                if getattr(error, "errno", 0) == ETIMEDOUT:
                    why = ": its host, or the link to it, is gone"
                raise PeerLost(f"{self.peer} closed its connection{why}") from error
            raise


def frame_of(message: Message, number: int) -> bytes:
    """Return a frame without a tag."""
    body = encode(message)
    return HEADER.pack(b"fw", PROTOCOL, number, len(body)) + body


def sizes_in(header: bytes | bytearray, most: int, peer: str) -> tuple[int, int]:
    """Return the request's number and the bytes of a frame's message."""
    mark, protocol, number, nbytes = HEADER.unpack(header)
    if mark != b"fw" or protocol != PROTOCOL:
        raise PeerRefused(
            f"{peer} speaks protocol {protocol if mark == b'fw' else 'unknown'}, this process "
            f"{PROTOCOL}; install the same version of flyweight, and give both sides tls= or none"
        )
    if nbytes > most:
        raise PeerRefused(
            f"{peer} announces a frame of {nbytes} bytes, at most {most} are accepted"
        )
    return number, nbytes


# Each side proves that it has the token, which is never sent; the holder first. A key of its own
# authenticates every frame of the connection, so that nobody can relay a proof and then speak.


def proof_of(token: str, role: str, hello: Hello, holder_nonce: bytes) -> bytes:
    """Return what only who has the token can say about this connection; for 'key', its key."""
    text = b"flyweight/" + role.encode() + b"/" + holder_nonce + encode(hello)
    return hmac.digest(token.encode(), text, "sha256")


def check_proof(found: bytes, wanted: bytes, peer: str) -> None:
    if not hmac.compare_digest(found, wanted):
        raise PeerRefused(f"{peer} has another token; give both sides the same token=")


def introduce(channel: Channel, name: str, token: str, deadline: float) -> int:
    """Prove the token to a holder, which proves it first; return the number of the proof.

    The holder answers nothing to a proof that is right, so the first request may follow at once.
    """
    hello = Hello(secrets.token_bytes(32), name)
    theirs = channel.call(hello, Challenge, deadline)
    check_proof(theirs.proof, proof_of(token, "holder", hello, theirs.nonce), channel.peer)
    number = channel.ask(Proof(proof_of(token, "reader", hello, theirs.nonce)), deadline)
    channel.authenticate(proof_of(token, "key", hello, theirs.nonce), is_reader=True)
    return number


class Tags:
    """The tags of the frames in one direction, in order: none can be left out or repeated."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._key, self._count = hmac.digest(key, direction, "sha256"), 0

    def next(self, *parts: bytes | bytearray) -> bytes:
        found = blake2b(self._count.to_bytes(8, "little"), key=self._key, digest_size=TAG_BYTES)
        self._count += 1
        for part in parts:
            found.update(part)
        return found.digest()
