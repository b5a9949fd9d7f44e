"""The channel: how an engine of the demo is asked for answers, over a Unix socket of the user's.

One message at a time: its length, then msgpack. A connection ends with its process, so who
waits for an engine that is killed hears of it at once.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from flyweight.errors import (
    FlyweightError,
    LifecycleError,
    PeerFailed,
    PeerLost,
    TransferTimeout,
    TransportError,
)

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 16 << 20


class Generate(msgspec.Struct, frozen=True, tag=True):
    """A request for one answer to each prompt."""

    prompts: bytes
    """Digits, a byte each, prompt after prompt."""
    seed: int


class Tell(msgspec.Struct, frozen=True, tag=True):
    """A request to tell what is held."""


class Generated(msgspec.Struct, frozen=True, tag=True):
    version: int | None
    """The version that answered, from the first digit to the last."""
    answers: bytes


class Held(msgspec.Struct, frozen=True, tag=True):
    version: int | None
    digests: dict[str, int]


class Fault(msgspec.Struct, frozen=True, tag=True):
    kind: str
    text: str


Question = Generate | Tell
Answer = Generated | Held | Fault
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class Desk:
    """Answers questions at a path until the process ends, each connection in its own thread."""

    def __init__(self, path: Path, answer: Callable[[Question], Answer]) -> None:
        self._answer = answer
        path.unlink(missing_ok=True)  # of the process before this one, which was killed
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._accept, name="demo-desk", daemon=True).start()

    def _accept(self) -> None:
        while True:
            line, _ = self._socket.accept()
            threading.Thread(
                target=self._talk, args=(line,), name="demo-answers", daemon=True
            ).start()

    def _talk(self, line: socket.socket) -> None:
        with line, suppress(OSError, PeerLost):  # who asked has gone
            while True:
                try:
                    answer = self._answer(_questions.decode(_received(line)))
                except msgspec.DecodeError as error:
                    answer = Fault("TransportError", str(error))
                except LifecycleError as error:
                    answer = Fault(type(error).__name__, str(error))
                _send(line, msgspec.msgpack.encode(answer))


class Line:
    """A connection to one engine, made again whenever there is none. For one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None

    def generate(self, question: Generate, timeout_seconds: float) -> Generated:
        answer = self._asked(question, timeout_seconds)
        if not isinstance(answer, Generated):
            raise TransportError(f"{self._path.name} answered with {type(answer).__name__}")
        return answer

    def held(self, timeout_seconds: float) -> Held:
        answer = self._asked(Tell(), timeout_seconds)
        if not isinstance(answer, Held):
            raise TransportError(f"{self._path.name} answered with {type(answer).__name__}")
        return answer

    def _asked(self, question: Question, timeout_seconds: float) -> Answer:
        """Return the answer; raise PeerLost or TransferTimeout, or PeerFailed with what it says."""
        try:
            line = self._linked(timeout_seconds)
            _send(line, msgspec.msgpack.encode(question))
            answer = _answers.decode(_received(line))
        except TimeoutError as cause:
            self.close()  # an answer that comes late must not be taken for the next one
            raise TransferTimeout(
                f"{self._path.name} did not answer in {timeout_seconds:g} s"
            ) from cause
        except OSError as cause:
            self.close()
            raise PeerLost(f"{self._path.name} is not there: {cause.strerror}") from cause
        except FlyweightError:
            self.close()
            raise
        if isinstance(answer, Fault):
            raise PeerFailed(f"{self._path.name}: {answer.kind}: {answer.text}")
        return answer

    def _linked(self, timeout_seconds: float) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(timeout_seconds)
            self._socket.connect(str(self._path))
        self._socket.settimeout(timeout_seconds)
        return self._socket

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _send(line: socket.socket, data: bytes) -> None:
    line.sendall(_LENGTH.pack(len(data)) + data)


def _received(line: socket.socket) -> bytes:
    (nbytes,) = _LENGTH.unpack(_read(line, _LENGTH.size))
    if nbytes > _MAX_BYTES:
        raise PeerLost(f"a message of {nbytes} bytes, at most {_MAX_BYTES} are read")
    return _read(line, nbytes)


def _read(line: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        piece = line.recv(nbytes - len(data))
        if not piece:
            raise PeerLost("the connection was closed")
        data += piece
    return bytes(data)
