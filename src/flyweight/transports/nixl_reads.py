"""NIXL behind the network port: its part of a process that serves, and the readers.

A `NixlReader` has an agent of its own. `close` drops it, and that is the fence: afterwards not one
byte arrives in memory that was read into. Every failure of a read closes the reader first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import numpy as np

from flyweight.checks import check_seconds
from flyweight.errors import HandleGone, PeerLost, TransferTimeout, TransportError
from flyweight.forks import call_in_child
from flyweight.memory import Buffer
from flyweight.transports.nixl_agent import PAUSE_SECONDS, Agent, UnfencedRead
from flyweight.transports.read_messages import Description, Place, checked_place, decoded

CHUNK_BYTES = 8 << 20
"""What one transfer brings: progress is seen, and the deadline renewed, once for each."""
_SPIN_SECONDS = 0.0005
_WORD_BYTES = 8
_DRAIN_SECONDS = 0.3
_kept: list[tuple[Buffer, Any]] = []
"""Memory that may still be written, because an agent did not end."""


class NixlSource:
    """NIXL in a process that serves reads."""

    def __init__(self, address: str) -> None:
        self._agent, self._address = Agent(address=address), address
        self.connection = b""
        """What a reader needs to connect; there once something is registered."""

    def register(self, address: int, nbytes: int) -> tuple[object, bytes]:
        """Register memory; return what `forget` takes, and what a reader needs to read it."""
        registered = self._agent.register(address, nbytes)
        if not self.connection:
            self.connection = self._agent.describe(registered, with_connection=True)
        return registered, self._agent.describe(registered, with_connection=False)

    def forget(self, registered: object) -> None:
        self._agent.forget(registered)

    def pump(self) -> None:
        self._agent.pump()

    def close(self) -> None:
        self._agent.close()


class NixlReader:
    """Reads memory of another host into memory here, one read at a time.

    Args:
        description: what the other host's `ReadServer.describe` returned; only from a peer that has
            proved the token, because a C++ parser reads parts of it.
        address: the address of this host that the other one knows; UCX listens only there.
        depth: how many transfers are in flight.
        can_use_devices: read straight into memory of CUDA devices; run over TCP only.
    """

    def __init__(
        self,
        description: bytes,
        *,
        address: str = "",
        depth: int = 4,
        chunk_bytes: int = CHUNK_BYTES,
        can_use_devices: bool = False,
    ) -> None:
        self._source = decoded(Description, description)
        if self._source.engine != "nixl":
            raise TransportError(f"description is of engine {self._source.engine!r}, not of 'nixl'")
        self._depth, self._chunk_bytes = depth, chunk_bytes
        self._can_use_devices = can_use_devices
        self._lock = threading.Lock()
        self._known: set[bytes] = set()
        """The places' keys that the agent has taken in."""
        self._registered: list[tuple[Buffer, Any]] = []
        self._is_closed = False
        self._word = np.zeros(1, np.uint64)
        self._agent = Agent(address=address)
        call_in_child(self._leave_in_child)
        try:
            self._peer = self._agent.know(self._source.connection)
            self._register(Buffer.of(self._word.view(np.uint8)))
        except BaseException:
            self.close()
            raise

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

        `into` is registered on its first use and kept until `close`: read into the same memory
        again. If this raises, the reader is closed, and not one byte arrives afterwards, unless it
        raises UnfencedRead.

        timeout_seconds: how long to wait for the next chunk.
        on_progress: called with the number of bytes of each chunk that is here.
        is_over: checked while waiting; once it returns True, the read ends with TransferTimeout.
        """
        check_seconds("timeout_seconds", timeout_seconds)
        with self._lock:
            if self._is_closed:
                raise PeerLost("the reader was closed")
            try:
                found = checked_place(place, self._source.session, offset, into.nbytes)
                if found.key not in self._known:
                    self._agent.know(found.key)
                    self._known.add(found.key)
                self._register(into)
                wait = _Wait(timeout_seconds, is_over)
                self._bring(found.address + offset, into, wait, on_progress)
                self._check_word(found, wait)
            except PeerLost:
                self._close()
                raise
            except BaseException:
                self._agent.drain(_DRAIN_SECONDS)
                self._close()
                raise

    def _register(self, into: Buffer) -> None:
        if not into.is_contiguous or not into.is_writable:
            raise TransportError("only contiguous memory that can be written can be read into")
        if into.device is not None and not self._can_use_devices:
            raise TransportError(f"buffer is memory of device {into.device}; read into the host's")
        low, high = into.address, into.address + into.nbytes
        for known, _ in self._registered:
            is_inside = known.address <= low and high <= known.address + known.nbytes
            if is_inside and known.device == into.device:
                return
        if into.nbytes:
            registered = self._agent.register(low, into.nbytes, into.device)
            self._registered.append((into, registered))

    def _bring(
        self, remote: int, into: Buffer, wait: _Wait, on_progress: Callable[[int], None]
    ) -> None:
        pending: deque[tuple[int, int]] = deque()
        at = 0
        while at < into.nbytes or pending:
            while at < into.nbytes and len(pending) < self._depth:
                size = min(self._chunk_bytes, into.nbytes - at)
                number = self._start(remote + at, into.address + at, size, into.device)
                pending.append((number, size))
                at += size
            if self._agent.is_done(pending[0][0]):
                _, size = pending.popleft()
                on_progress(size)
                wait.renew()
            else:
                wait.pause(PAUSE_SECONDS)

    def _start(self, remote: int, local: int, size: int, device: int | None = None) -> int:
        return self._agent.start_read(self._peer, remote, local, size, device)

    def _check_word(self, place: Place, wait: _Wait) -> None:
        """Raise HandleGone if the place was forgotten before the last of its bytes was read."""
        remote = self._source.register + _WORD_BYTES * place.slot
        number = self._start(remote, self._word.ctypes.data, _WORD_BYTES)
        started = monotonic()
        while not self._agent.is_done(number):
            wait.pause(0 if monotonic() - started < _SPIN_SECONDS else PAUSE_SECONDS)
        if int(self._word[0]) != place.word:
            raise HandleGone("the memory is no longer served")

    def close(self) -> None:
        """Drop the agent: afterwards not one byte arrives. Waits for a read in another thread."""
        with self._lock:
            self._close()

    def _leave_in_child(self) -> None:
        self._lock = threading.Lock()  # the thread that held it does not exist in the child
        self._is_closed = True

    def _close(self) -> None:
        self._is_closed = True
        try:
            self._agent.close()
        except UnfencedRead:
            _kept.extend(self._registered)
            raise
        finally:
            self._registered = []


class _Wait:
    """The deadline of a read, which every chunk renews."""

    def __init__(self, seconds: float, is_over: Callable[[], bool]) -> None:
        self._seconds, self._is_over = seconds, is_over
        self.renew()

    def renew(self) -> None:
        """Wait for the next chunk; raise TransferTimeout if the read is over."""
        if self._is_over():
            raise TransferTimeout("the read was given up")
        self._deadline = monotonic() + self._seconds

    def pause(self, seconds: float) -> None:
        """Sleep a moment; raise TransferTimeout at the deadline, or if the read is over."""
        if monotonic() >= self._deadline:
            raise TransferTimeout(f"no bytes arrived by NIXL in {self._seconds:g} s")
        if self._is_over():
            raise TransferTimeout("the read was given up")
        sleep(seconds)
