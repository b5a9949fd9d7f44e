"""Wire: a connected stream socket whose every wait has a deadline; `tls.py` has encrypted ones.

One thread at a time sends, and one receives. The socket never blocks, so that each side waits with
a deadline of its own. Any thread may call `shut`, which ends both directions at once.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

import numpy as np

from flyweight.errors import TransportError
from flyweight.memory import Bytes

_PARTS_AT_ONCE = 512
FILES_AT_ONCE, _FILE_BYTES = 200, 4
FOREVER = float("inf")


class DeadlinePassed(Exception):
    """A wait is over. Not a TimeoutError: the kernel raises that for a cut link."""


class Wire:
    """A plain socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self.is_local = connection.family == socket.AF_UNIX
        """True if both ends are on one host, so that open files can be sent."""

    def fileno(self) -> int:
        """Return the number of the open file; -1 once it is closed."""
        return self._socket.fileno()

    def send(
        self,
        parts: Sequence[bytes | memoryview | Bytes],
        deadline: float,
        *,
        files: Sequence[int] = (),
        stall_seconds: float = FOREVER,
    ) -> None:
        """Send bytes from where they lie; open files go with the first of them."""
        todo = [view for each in parts if (view := memoryview(each).cast("B"))]
        while todo:
            some = todo[:_PARTS_AT_ONCE]
            passed = [np.array(files, np.int32)] if files else []
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, each) for each in passed]
            try:
                sent = self._socket.sendmsg(some, ancillary, socket.MSG_NOSIGNAL)
                files = ()
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, stall_seconds)
                continue
            done = 0
            while done < len(some) and sent >= len(some[done]):
                sent -= len(some[done])
                done += 1
            del todo[:done]
            if sent:
                todo[0] = todo[0][sent:]

    def receive(
        self,
        into: bytearray | memoryview | Bytes,
        deadline: float,
        *,
        files: list[int] | None = None,
        stall_seconds: float = FOREVER,
    ) -> None:
        """Fill memory with the bytes that come; raise EOFError if the peer ends before.

        files: takes the open files that come with the bytes.
        """
        view = memoryview(into).cast("B")
        while view:
            try:
                received = self.receive_some(view, files)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline, stall_seconds)
                continue
            if not received:
                raise EOFError
            view = view[received:]

    def receive_some(self, view: memoryview, files: list[int] | None = None) -> int:
        """Take bytes that have come already, or raise BlockingIOError; return 0 at the end."""
        if files is None or not self.is_local:
            return self._socket.recv_into(view)
        received, passed, flags, _ = self._socket.recvmsg_into(
            [view], socket.CMSG_SPACE(_FILE_BYTES * FILES_AT_ONCE), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in passed:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) // _FILE_BYTES * _FILE_BYTES
                files += np.frombuffer(data[:whole], np.int32).tolist()
        if flags & socket.MSG_CTRUNC:
            raise TransportError("open files were lost on their way; raise the limit, ulimit -n")
        return received

    def has_input(self, *others: int, deadline: float) -> bool:
        """Wait until bytes or the end of the stream are there, or one of other files is readable.

        Returns False at the deadline, or if only other files are readable.
        """
        if self.fileno() < 0 or self._has_bytes():
            return True
        polled = select.poll()  # not select: it refuses files above 1024
        for file in (self.fileno(), *others):
            polled.register(file, select.POLLIN)
        ready = polled.poll(_milliseconds(deadline))
        return any(file == self.fileno() for file, _ in ready)

    def _has_bytes(self) -> bool:
        return False

    def _wait(self, event: int, deadline: float, stall_seconds: float) -> None:
        polled = select.poll()
        polled.register(self.fileno(), event)
        if not polled.poll(_milliseconds(min(deadline, monotonic() + stall_seconds))):
            raise DeadlinePassed

    def greet(self) -> bool:
        """Go on with what must come before the first byte; return True once it is done."""
        return True

    def shut(self) -> None:
        """End both directions; waits of any thread end now, and what was sent still arrives."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _milliseconds(deadline: float) -> float | None:
    return None if deadline == FOREVER else max(1000 * (deadline - monotonic()), 0)
