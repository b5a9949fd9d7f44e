"""A connection between two ranks, and the frames that are sent through it.

A frame is four bytes of length and a JSON message, never a pickle. Its kind is step (a
message), tick (work goes on), done (the rank leaves on purpose) or fault. `group.py`
decides what follows from each.
"""

from __future__ import annotations

import errno
import json
import selectors
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from flyweight.errors import PeerFailed, TransportError, error_named
from flyweight.spec.manifest import Json
from flyweight.spec.strict_json import parse_json

_MAX_FRAME_BYTES = 1 << 30


def frame_of(kind: str, **fields: Json) -> bytes:
    data = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()
    return struct.pack("<I", len(data)) + data


TICK, DONE = frame_of("tick"), frame_of("done")


def fault_frame(fault: TransportError) -> bytes:
    """Return the frame that tells a peer of a fault."""
    return frame_of("fault", body={"type": type(fault).__name__, "text": str(fault)})


def fault_named(kind: str, text: str) -> TransportError:
    """Return the fault that a peer tells of."""
    fault = error_named(kind, text)
    return fault if isinstance(fault, TransportError) else PeerFailed(text)


@dataclass(eq=False)
class Connection:
    """A connection to one rank, and the messages that arrived and were not read yet."""

    name: str
    """How messages name the rank."""
    socket: socket.socket
    inbox: deque[tuple[str, Json]] = field(default_factory=deque)
    heard: float = 0.0
    is_done: bool = False
    _is_torn: bool = False
    _data: bytearray = field(default_factory=bytearray)
    _sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, frame: bytes, timeout_seconds: float) -> None:
        view, deadline = memoryview(frame), monotonic() + timeout_seconds
        with self._sending, selectors.DefaultSelector() as writable:
            if self._is_torn:
                raise OSError(errno.EPIPE, "an earlier frame was sent only in part")
            writable.register(self.socket, selectors.EVENT_WRITE)
            while view:
                if not writable.select(max(deadline - monotonic(), 0)):
                    self._is_torn = len(view) < len(frame)
                    raise TimeoutError
                with suppress(BlockingIOError):
                    view = view[self.socket.send(view) :]

    def receive(self) -> tuple[list[Json], bool]:
        """Return the messages that have arrived, and whether the connection is still open."""
        is_open, messages = True, []
        with suppress(BlockingIOError):
            data = self.socket.recv(1 << 20)
            self._data += data
            is_open = bool(data)
        while len(self._data) >= 4:
            (length,) = struct.unpack_from("<I", self._data)
            if length > _MAX_FRAME_BYTES:
                raise TransportError(f"a frame of {length} bytes, at most {_MAX_FRAME_BYTES}")
            if len(self._data) < 4 + length:
                break
            messages.append(parse_json(bytes(self._data[4 : 4 + length]), "message"))
            del self._data[: 4 + length]
        return messages, is_open
