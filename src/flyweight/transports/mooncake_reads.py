"""Mooncake behind the network port: its part of a process that serves, and the readers.

No call of it is known to stop a transfer. So a reader reads into staging of its own, and copies
from there what has arrived whole. Staging of a read that failed is never used again: it is kept
until this process ends. Mooncake listens without authentication, and everybody who reaches its
ports can read all memory that is registered in its process.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from functools import cache
from time import monotonic
from typing import Any

import numpy as np

from flyweight.checks import check_seconds
from flyweight.errors import (
    HandleGone,
    MissingDependency,
    PeerLost,
    TransferTimeout,
    TransportError,
)
from flyweight.forks import fork_lock
from flyweight.memory import Buffer, Bytes, page_memory
from flyweight.transports.network_engines import (
    MOONCAKE_INSTALL,
    engines_here,
    rdma_devices,
    variables,
)
from flyweight.transports.read_messages import Description, Place, checked_place, decoded

STAGING_BYTES = 32 << 20
MAX_KEPT_BYTES = 1 << 30
"""How much staging of failed reads this process keeps before it refuses to read any more."""
_MAX_ENTRIES = 512
"""How many entries one call may have: it refuses 8,192."""
_ENTRY_BYTES = 1 << 20
_WORD_BYTES = 8
_CHECK_SECONDS = 0.05
_LOCK = threading.Lock()
_kept: list[Bytes] = []
"""Staging of failed reads, which may still be written."""


def _engine(address: str, protocol: str) -> Any:
    """Return this process's engine, which is made once and never ended."""
    with fork_lock:  # a cache alone would let two threads make one each
        return _new_engine(address, protocol)


@cache
def _new_engine(address: str, protocol: str) -> Any:
    if not engines_here().mooncake:
        raise MissingDependency(f"network engine 'mooncake' needs Mooncake; {MOONCAKE_INSTALL}")
    if protocol == "rdma" and not rdma_devices():
        raise TransportError("Mooncake was asked for RDMA, and this host has no RDMA device")
    with variables({"MC_LOG_LEVEL": "ERROR", "MC_TCP_BIND_ADDRESS": address}):
        try:
            engine = importlib.import_module("mooncake.engine").TransferEngine()
        except ImportError as cause:
            text = f"Mooncake cannot be imported: {cause}; {MOONCAKE_INSTALL}"
            raise MissingDependency(text) from cause
        code = engine.initialize(address, "P2PHANDSHAKE", protocol, "")
    if code != 0:
        raise TransportError(f"Mooncake does not start at {address!r}: code {code}")
    return engine


class MooncakeSource:
    """Mooncake in a process that serves reads."""

    def __init__(self, address: str) -> None:
        if not address:
            raise TransportError("Mooncake needs the address of this host that readers use")
        protocol = "rdma" if rdma_devices() else "tcp"
        self._engine = _engine(address, protocol)
        self.connection = f"{protocol} {address}:{self._engine.get_rpc_port()}".encode()

    def register(self, address: int, nbytes: int) -> tuple[object, bytes]:
        """Register memory; return what `forget` takes, and what a reader needs to read it."""
        _register(self._engine, address, nbytes)
        return address, b""

    def forget(self, registered: object) -> None:
        self._engine.unregister_memory(registered)

    def pump(self) -> None:
        """Mooncake has threads of its own."""

    def close(self) -> None:
        """The end of the process is the end of its engine."""


def _register(engine: Any, address: int, nbytes: int) -> None:
    code = engine.register_memory(address, nbytes)
    if code != 0:
        raise TransportError(f"Mooncake registers no {nbytes} bytes: code {code}")


class MooncakeReader:
    """Reads memory of another host into memory here, one read at a time.

    Args:
        description: what the other host's `ReadServer.describe` returned; only from a peer that has
            proved the token.
        address: the address of this host that the other one knows.
    """

    def __init__(self, description: bytes, *, address: str) -> None:
        self._source = decoded(Description, description)
        if self._source.engine != "mooncake":
            raise TransportError(
                f"description is of engine {self._source.engine!r}, not of 'mooncake'"
            )
        protocol, _, self._peer = self._source.connection.decode(errors="replace").partition(" ")
        if protocol not in ("tcp", "rdma"):
            raise TransportError(f"Mooncake's protocol is {protocol!r}, expected 'tcp' or 'rdma'")
        if (kept := sum(each.nbytes for each in _kept)) >= MAX_KEPT_BYTES:
            raise TransportError(
                f"{kept} bytes of staging may still be written by reads that failed; restart this "
                f"process, or use another network engine"
            )
        self._lock, self._is_closed = threading.Lock(), False
        self._engine = _engine(address, protocol)
        self._staging = page_memory(STAGING_BYTES)
        self._address = Buffer.of(self._staging).address
        _register(self._engine, self._address, STAGING_BYTES)

    def read(
        self,
        place: bytes,
        offset: int,
        into: Buffer,
        *,
        timeout_seconds: float,
        on_progress: Callable[[int], None] = lambda nbytes: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Fill `into` with a place's bytes from an offset on.

        If this raises, the reader is closed, and no byte arrives in `into` afterwards.

        timeout_seconds: how long to wait for the next 32 MiB.
        on_progress: called with the number of bytes of each part that is here.
        is_over: checked while waiting; once it returns True, the read ends with TransferTimeout.
        """
        check_seconds("timeout_seconds", timeout_seconds)
        data = into.flat() if into.device is None and into.is_writable else None
        if data is None:
            raise TransportError("only contiguous memory of the host can be read into")
        with self._lock:
            if self._is_closed:
                raise PeerLost("the reader was closed")
            found = checked_place(place, self._source.session, offset, into.nbytes)
            try:
                self._check_word(found, timeout_seconds, is_over)  # its reads fail without a name
                for at in range(0, len(data), STAGING_BYTES):
                    size = min(STAGING_BYTES, len(data) - at)
                    self._bring(found.address + offset + at, size, timeout_seconds, is_over)
                    data[at : at + size] = self._staging[:size]
                    on_progress(size)
                self._check_word(found, timeout_seconds, is_over)
            except HandleGone:
                self._close()
                raise
            except BaseException:
                self._keep()
                raise

    def _check_word(
        self, place: Place, timeout_seconds: float, is_over: Callable[[], bool]
    ) -> None:
        """Raise HandleGone if the place was forgotten before the last of its bytes was read."""
        remote = self._source.register + _WORD_BYTES * place.slot
        self._bring(remote, _WORD_BYTES, timeout_seconds, is_over)
        if int(self._staging[:_WORD_BYTES].view(np.uint64)[0]) != place.word:
            raise HandleGone("the memory is no longer served")

    def _bring(
        self, remote: int, size: int, timeout_seconds: float, is_over: Callable[[], bool]
    ) -> None:
        """Read to the beginning of the staging, in a thread, since Mooncake's call only waits."""
        at = range(0, size, _ENTRY_BYTES)
        assert len(at) <= _MAX_ENTRIES
        there, here = [remote + each for each in at], [self._address + each for each in at]
        sizes = [min(_ENTRY_BYTES, size - each) for each in at]
        codes: list[int] = []
        read, peer = self._engine.batch_transfer_sync_read, self._peer
        thread = threading.Thread(
            target=lambda: codes.append(read(peer, here, there, sizes)),
            name="flyweight-mooncake",
            daemon=True,
        )
        thread.start()
        deadline = monotonic() + timeout_seconds
        while thread.is_alive():
            thread.join(max(min(deadline - monotonic(), _CHECK_SECONDS), 0))
            if thread.is_alive() and (monotonic() >= deadline or is_over()):
                raise TransferTimeout(
                    f"Mooncake did not bring {size} bytes from {peer!r} in {timeout_seconds:g} s"
                )
        if codes != [0]:
            raise PeerLost(f"Mooncake's read from {peer!r} failed: code {codes}")

    def close(self) -> None:
        """Free the staging. Waits for a read in another thread."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._engine.unregister_memory(self._address)
            self._staging = page_memory(0)

    def _keep(self) -> None:
        """Close after a failed read: its staging may still be written until this process ends."""
        self._is_closed = True
        with _LOCK:
            _kept.append(self._staging)
        self._staging = page_memory(0)
