"""Links: a rank's connection to another, and the frames that go over it.

A frame is four bytes of length and a JSON message, never a pickle, of one of four kinds:
step (a message of one's work), tick (work goes on), done (left on purpose) and fault.
What follows from each, and who is given up when, `group.py` decides.
"""

from __future__ import annotations

import errno
import json
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from flyweight.errors import PeerFailed, PeerLost, TransferTimeout, TransportError
from flyweight.spec.manifest import Json
from flyweight.spec.manifest_json import parse_json

_MAX_FRAME_BYTES = 1 << 30
_FAULTS: dict[str, type[TransportError]] = {
    each.__name__: each for each in (PeerLost, PeerFailed, TransferTimeout)
}


def _frame(message: Json) -> bytes:
    data = json.dumps(message, separators=(",", ":")).encode()
    return struct.pack("<I", len(data)) + data


TICK, DONE = _frame({"kind": "tick"}), _frame({"kind": "done"})


def step_frame(step: str, body: Json) -> bytes:
    """Return the frame that carries a message of a step."""
    return _frame({"kind": "step", "step": step, "body": body})


def fault_frame(fault: TransportError) -> bytes:
    """Return the frame that tells a peer of a fault."""
    return _frame({"kind": "fault", "body": {"type": type(fault).__name__, "text": str(fault)}})


def fault_of(kind: str, text: str) -> TransportError:
    """Return the fault that a peer tells of."""
    return _FAULTS.get(kind, PeerFailed)(text)


@dataclass
class Link:
    """A connection to one peer, and what came by it and was not taken yet."""

    peer: int
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
                raise OSError(errno.EPIPE, "half of a frame was sent before")
            writable.register(self.socket, selectors.EVENT_WRITE)
            while view:
                if not writable.select(max(deadline - monotonic(), 0)):
                    self._is_torn = len(view) < len(frame)
                    raise TimeoutError
                with suppress(BlockingIOError):
                    view = view[self.socket.send(view) :]

    def take_in(self) -> bool:
        """Read what has come; False at the end of the connection."""
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return True
        self._data += data
        return bool(data)

    def frames(self) -> Sequence[Json]:
        found = []
        while len(self._data) >= 4:
            (length,) = struct.unpack_from("<I", self._data)
            if length > _MAX_FRAME_BYTES:
                raise TransportError(f"a frame of {length} bytes, at most {_MAX_FRAME_BYTES}")
            if len(self._data) < 4 + length:
                break
            found.append(parse_json(bytes(self._data[4 : 4 + length]), "message"))
            del self._data[: 4 + length]
        return found
