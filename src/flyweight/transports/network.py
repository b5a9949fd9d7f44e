"""Memory of another host, brought here through sockets.

A handle names bytes that a `DataServer` offers. They are read into memory of the reader, so they
have to be fetched again when they change. A fetch that fails is fenced: no byte arrives later.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from time import monotonic

import msgspec
import numpy as np

from flyweight.errors import HandleGone, PeerLost, TransferTimeout, TransportError
from flyweight.forks import call_in_child
from flyweight.memory import Buffer, Bytes, Items, available_bytes, bytes_of, page_memory
from flyweight.spec.strict_json import Number
from flyweight.transports.data_protocol import Name
from flyweight.transports.data_sockets import DataConnection, DataServer
from flyweight.transports.fd_passing import ANSWER_SECONDS
from flyweight.transports.tcp import CHECK_SECONDS, parse_place, place_of

MAX_STREAMS = 16
"""How many connections a transport reads from at once."""
_Place = tuple[str, int]


class NetworkHandle(
    msgspec.Struct, frozen=True, kw_only=True, tag="network", forbid_unknown_fields=True
):
    """Names bytes that a DataServer offers."""

    session: str
    """The transport that offers it: keys of another one mean nothing."""
    place: str
    """HOST:PORT of the server; without HOST, the host that the reader's first connection is to."""
    key: Name
    offset: Number
    nbytes: Number

    def __post_init__(self) -> None:
        parse_place(self.place)


class NetworkTransport:
    """Offers memory of the host through a DataServer, and reads that of others.

    A process that only offers needs no connection, and one that only reads no server.

    Args:
        connection: the reader's first connection. Nothing is read through it: its end would be
            taken for the end of this process.
        token: what the servers that are read from expect.
        place_host: the host in the handles of what is offered; "" for the one that a reader's
            first connection is to.
    """

    def __init__(
        self,
        *,
        server: DataServer | None = None,
        connection: DataConnection | None = None,
        token: str = "",
        place_host: str = "",
    ) -> None:
        self._server, self._connection, self._token = server, connection, token
        self._place_host = place_host
        self._line = secrets.token_hex(8) if connection is None else connection.name
        self._session = secrets.token_hex(8)
        self._offered: dict[str, Sequence[memoryview | Items]] = {}
        self._opened: dict[NetworkHandle, Bytes] = {}
        self._idle: list[tuple[_Place, DataConnection]] = []
        """Connections to read from, each with its place; the last one was used last."""
        self._used: set[DataConnection] = set()
        self._num_connecting = 0
        self._num_interrupts = 0
        self._is_closed = False
        self._changed = threading.Condition()
        call_in_child(self._forget_in_child)

    def _forget_in_child(self) -> None:
        """Forget the parent's connections; those close themselves in a forked child."""
        self._changed = threading.Condition()  # a thread that held it does not exist in the child
        self._num_connecting = 0
        self._idle.clear()
        self._used.clear()

    # The side that offers.

    @property
    def can_offer(self) -> bool:
        """True if this process has a server that others can read from."""
        return self._server is not None

    def offer(self, buffer: Buffer) -> NetworkHandle:
        flat = _on_host(buffer).flat()
        if flat is None:
            flat = np.ascontiguousarray(buffer.items()).reshape(-1).view(np.uint8)
        return self.offer_rows([flat], buffer.owner)

    def offer_rows(self, rows: Sequence[memoryview | Items], owner: object) -> NetworkHandle:
        """Offer rows of memory, where they lie, as one run of bytes; keep the owner meanwhile."""
        assert self._server is not None, "a transport offers through a DataServer"
        key = self._server.offer(rows, owner)
        with self._changed:
            self._offered[key] = rows
        return NetworkHandle(
            session=self._session,
            place=place_of(self._place_host, self._server.port),
            key=key,
            offset=0,
            nbytes=sum(row.nbytes for row in rows),
        )

    def release(self, handle: NetworkHandle) -> None:
        """End an offer; when this returns, no thread reads the memory. Safe to repeat."""
        with self._changed:
            is_ours = self._offered.pop(handle.key, None) is not None
            if is_ours:
                self._opened.pop(handle, None)
        if is_ours and self._server is not None:
            self._server.release(handle.key)

    # The side that reads.

    def open(self, handle: NetworkHandle) -> Buffer:
        with self._changed:
            if handle in self._opened:
                return Buffer.of(self._opened[handle])
        # Without this check, the kernel may kill a process when memory runs out.
        if handle.nbytes > (left := available_bytes()):
            raise TransportError(
                f"no {handle.nbytes} bytes for what is read from {handle.place}: {left} bytes of "
                f"memory are available"
            )
        staging = page_memory(handle.nbytes)
        self.fetch(handle, Buffer.of(staging), timeout_seconds=ANSWER_SECONDS)
        with self._changed:
            return Buffer.of(self._opened.setdefault(handle, staging))

    def fetch(
        self,
        handle: NetworkHandle,
        into: Buffer,
        *,
        timeout_seconds: float,
        on_progress: Callable[[int], None] = lambda nbytes: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Bring the bytes of a handle here; if this raises, none arrives later. Thread-safe.

        Raise HandleGone, PeerLost, or TransferTimeout if nothing arrives for `timeout_seconds`.
        """
        goal = _on_host(into).flat()
        if goal is None or len(goal) != handle.nbytes:
            raise TransportError(
                f"{handle.nbytes} bytes are read, there are {into.nbytes} contiguous bytes for them"
            )
        if handle.session == self._session:
            self._copy_own(handle, goal)
            return
        place, interrupts, arrived = self._place_of(handle), self._num_interrupts, 0

        def is_ended() -> bool:
            return is_over() or self._num_interrupts != interrupts

        def progress(nbytes: int) -> None:
            nonlocal arrived
            arrived += nbytes
            on_progress(nbytes)

        while True:
            stream, is_new = None, True
            try:
                stream, is_new = self._take(place, timeout_seconds, is_ended)
                stream.read(
                    handle.key,
                    handle.offset,
                    goal,
                    timeout_seconds=timeout_seconds,
                    on_progress=progress,
                    is_over=is_ended,
                )
                return
            except (PeerLost, TransferTimeout) as cause:
                if self._num_interrupts != interrupts:
                    raise PeerLost(f"a read from {place_of(*place)} was interrupted") from cause
                # The server may close an idle connection just before it is used again.
                if is_new or arrived or isinstance(cause, TransferTimeout):
                    raise
            finally:
                if stream is not None:
                    self._give_back(place, stream)

    def _place_of(self, handle: NetworkHandle) -> _Place:
        host, port = parse_place(handle.place)
        if not host and self._connection is not None:
            host = self._connection.host
        if not host:
            raise TransportError(f"place {handle.place!r} has no host, nor is there a connection")
        return host, port

    def _copy_own(self, handle: NetworkHandle, goal: Bytes) -> None:
        with self._changed:
            rows = self._offered.get(handle.key)
        if rows is None:
            raise HandleGone(f"bytes {handle.key!r} were released")
        flat = [bytes_of(memoryview(np.ascontiguousarray(row)).cast("B")) for row in rows]
        data = np.concatenate(flat or [goal[:0]])
        end = handle.offset + handle.nbytes
        if end > len(data):
            raise HandleGone(f"bytes {handle.offset}..{end} lie beyond the {len(data)} offered")
        goal[:] = data[handle.offset : end]

    def _take(
        self, place: _Place, timeout_seconds: float, is_over: Callable[[], bool]
    ) -> tuple[DataConnection, bool]:
        """Return a connection for this thread's use alone, and whether it is new, or was idle."""
        deadline = monotonic() + timeout_seconds
        with self._changed:
            while not self._is_closed:
                for entry in reversed(self._idle):
                    if entry[0] == place:
                        self._idle.remove(entry)
                        if entry[1].is_open:
                            self._used.add(entry[1])
                            return entry[1], False
                        entry[1].close()
                if len(self._used) + self._num_connecting < MAX_STREAMS:
                    break
                if monotonic() >= deadline or is_over():
                    raise TransferTimeout(
                        f"{MAX_STREAMS} connections are in use, none was free to read from "
                        f"{place_of(*place)} in {timeout_seconds:g} s"
                    )
                self._changed.wait(CHECK_SECONDS)
            if self._is_closed:
                raise TransportError("this transport is closed")
            while len(self._used) + len(self._idle) + self._num_connecting >= MAX_STREAMS:
                self._idle.pop(0)[1].close()
            self._num_connecting += 1
        stream = None
        try:
            stream = DataConnection(
                *place,
                token=self._token,
                timeout_seconds=max(deadline - monotonic(), 0),
                is_over=is_over,
                line=self._line,
            )
            return stream, True
        finally:
            with self._changed:
                self._num_connecting -= 1
                if stream is not None:
                    self._used.add(stream)
                self._changed.notify_all()

    def _give_back(self, place: _Place, stream: DataConnection) -> None:
        with self._changed:
            self._used.discard(stream)
            if stream.is_open and not self._is_closed:
                self._idle.append((place, stream))
            else:
                stream.close()
            self._changed.notify_all()

    def interrupt(self) -> None:
        """End the fetches that run in other threads; each raises PeerLost."""
        with self._changed:
            self._num_interrupts += 1
            for stream in self._used:
                stream.close()
            self._changed.notify_all()

    def close_handle(self, handle: NetworkHandle) -> None:
        with self._changed:
            self._opened.pop(handle, None)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            keys, self._offered = list(self._offered), {}
            for _, stream in self._idle:
                stream.close()
            self._idle.clear()
            self._opened.clear()
        self.interrupt()
        if self._server is not None:
            for key in keys:
                self._server.release(key)


def _on_host(buffer: Buffer) -> Buffer:
    if buffer.device is not None:
        raise TransportError(f"buffer is memory of device {buffer.device}; sockets send the host's")
    return buffer
