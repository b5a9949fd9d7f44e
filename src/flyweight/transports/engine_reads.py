"""Memory of another host, brought here by an engine such as NIXL instead of sockets.

The source serves memory that was made for this, from a process of its own (`read_server`). Readers
are kept for the next reads; one whose read failed is closed, so that no byte arrives later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Annotated

import msgspec

from flyweight.errors import TransportError
from flyweight.forks import call_in_child
from flyweight.memory import Buffer
from flyweight.spec.strict_json import Number
from flyweight.transports.mooncake_reads import MooncakeReader
from flyweight.transports.nixl_reads import NixlReader
from flyweight.transports.read_messages import MAX_TEXT_BYTES
from flyweight.transports.read_server import ReadServer

_Text = Annotated[bytes, msgspec.Meta(max_length=MAX_TEXT_BYTES)]
_Reader = NixlReader | MooncakeReader


class EngineHandle(
    msgspec.Struct, frozen=True, kw_only=True, tag="engine", forbid_unknown_fields=True
):
    """Names bytes that an engine's process serves; one that is restarted has others."""

    engine: Annotated[str, msgspec.Meta(pattern=r"\A(nixl|mooncake)\Z")]
    description: _Text
    """How to reach the process."""
    place: _Text
    """Where the bytes are in it."""
    nbytes: Number


class EngineReads:
    """Serves memory of this host by engines, and reads that of other hosts. Thread-safe.

    Args:
        address: the address of this host that other hosts use; "" for all, if it only serves.
    """

    def __init__(self, address: str = "") -> None:
        self._address = address
        self._servers: dict[str, ReadServer] = {}
        self._idle: list[tuple[bytes, _Reader]] = []
        """Readers, each with the description of the process that it reads from."""
        self._is_closed = False
        self._lock = threading.Lock()
        call_in_child(self._replace_lock)

    def _replace_lock(self) -> None:
        """Replace the lock after a fork: the thread that held it does not exist in the child."""
        self._lock = threading.Lock()

    # The side that serves.

    def allocate(self, engine: str, nbytes: int) -> Buffer:
        """Return memory that an engine can serve, until `free`."""
        with self._lock:
            if engine not in self._servers:
                self._servers[engine] = ReadServer(engine, address=self._address)
            server = self._servers[engine]
        return server.allocate(nbytes)

    def offer(self, engine: str, buffer: Buffer) -> EngineHandle:
        """Return what names memory of `allocate`: something else once the process was restarted."""
        server = self._servers[engine]
        description, place = server.describe(), server.place(buffer)
        return EngineHandle(
            engine=engine, description=description, place=place, nbytes=buffer.nbytes
        )

    def free(self, buffer: Buffer) -> None:
        """Serve memory of `allocate` no longer: no read of it succeeds afterwards."""
        for server in self._servers.values():
            server.forget(buffer)

    # The side that reads.

    def fetch(
        self,
        handle: EngineHandle,
        into: Buffer,
        *,
        timeout_seconds: float,
        on_progress: Callable[[int], None] = lambda nbytes: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Bring the bytes of a handle here.

        If this raises, no byte arrives later, unless it raises UnfencedRead.
        """
        reader = self._idle_reader(handle)
        if reader is None:
            kind = NixlReader if handle.engine == "nixl" else MooncakeReader
            reader = kind(handle.description, address=self._address)
        is_kept = False
        try:
            reader.read(
                handle.place,
                0,
                into,
                timeout_seconds=timeout_seconds,
                on_progress=on_progress,
                is_over=is_over,
            )
            with self._lock:
                is_kept = not self._is_closed
                if is_kept:
                    self._idle.append((handle.description, reader))
        finally:
            if not is_kept:
                reader.close()

    def _idle_reader(self, handle: EngineHandle) -> _Reader | None:
        with self._lock:
            if self._is_closed:
                raise TransportError("this transport is closed")
            for entry in self._idle:
                if entry[0] == handle.description:
                    self._idle.remove(entry)
                    return entry[1]
        return None

    def close_readers(self) -> None:
        """Close the readers that are idle: what they read from, or into, is replaced."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, reader in idle:
            reader.close()

    def close(self) -> None:
        """End the engines' processes, and close the readers. Safe to repeat."""
        with self._lock:
            self._is_closed = True
        self.close_readers()
        for server in self._servers.values():
            server.close()
