"""Memory of this host that an engine serves to other hosts, from a process of its own.

An engine checks nothing: a reader that knows its port reads all memory of the process, and one
that leaves in mid-read may abort it. So the engine runs in `read_process`, which has nothing in its
memory but what is served; this process passes it the files of that memory. If it dies, its readers
get PeerLost, and the next use starts it again. What it said before means nothing then: places and
descriptions must be asked for again in each round.

Every place has a word in a register that readers read after the bytes. `forget` clears it first,
so a read that overlaps the end of an offer is an error at the reader, not wrong bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np

from flyweight.digest import Words
from flyweight.errors import TransportError, error_named
from flyweight.forks import call_in_child
from flyweight.host import reason
from flyweight.memory import (
    Buffer,
    Bytes,
    available_bytes,
    bytes_of,
    shared_mappings,
    without_fork,
)
from flyweight.transports.read_messages import (
    MAX_PLACES,
    Description,
    Failed,
    Forget,
    Place,
    Serve,
    Served,
)
from flyweight.transports.read_process import ReadProcess

_START_SECONDS, _ANSWER_SECONDS = 30.0, 10.0


@dataclass(eq=False)
class _Region:
    """A file that is served, where it is mapped here, and where in the engine's process."""

    fd: int
    start: int
    nbytes: int
    offset: int
    slot: int
    owner: object
    word: int = 0
    session: str = ""
    served: Served | None = None


class ReadServer:
    """Serves memory of this process to readers on other hosts. Thread-safe.

    Args:
        engine: 'nixl' or 'mooncake'.
        address: the address of this host that readers use; by default all interfaces listen.
    """

    def __init__(self, engine: str, *, address: str = "") -> None:
        self._engine, self._address = engine, address
        self._lock = threading.RLock()
        self._regions: list[_Region] = []
        self._process: ReadProcess | None = None
        self._description: Description | None = None
        self._is_closed = False
        self._register_fd, register = _new_file(8 * MAX_PLACES)
        self._words: Words = register.view(np.uint64)
        call_in_child(self._close_in_child)

    def allocate(self, nbytes: int) -> Buffer:
        """Return memory that can be served; `forget` frees it.

        RDMA cards register only memory that can be written, so it has no seal against writers,
        unlike other shared memory.
        """
        with self._lock:
            slot = self._free_slot()
            fd, data = _new_file(nbytes)
            buffer = Buffer.of(data[:nbytes])
            self._regions.append(_Region(fd, buffer.address, max(nbytes, 1), 0, slot, buffer.owner))
        return buffer

    def place(self, buffer: Buffer) -> bytes:
        """Return what a reader needs to read a buffer, whose file is mapped and registered once.

        The file stays served, and its memory in use, until `forget`: call that before it is freed.
        Raises TransportError unless the buffer is contiguous memory of a file that this process
        has open: of `allocate` here, or of `SharedMemoryTransport.allocate`.
        """
        if buffer.device is not None or not buffer.is_contiguous:
            raise TransportError("only contiguous memory of the host can be served")
        with self._lock:
            description = self._running()
            region = self._region_of(buffer.address, buffer.nbytes) or self._found(buffer)
            if region.session != description.session:
                self._serve(region, description.session)
            assert region.served is not None
            there = region.served.address
            return msgspec.json.encode(
                Place(
                    session=region.session,
                    slot=region.slot,
                    word=region.word,
                    address=there + buffer.address - region.start,
                    nbytes=buffer.nbytes,
                    region=(there, region.nbytes),
                    key=region.served.key,
                )
            )

    def forget(self, buffer: Buffer) -> None:
        """Stop to serve the file that a buffer lies in. No read of it succeeds afterwards."""
        with self._lock:
            region = self._region_of(buffer.address, buffer.nbytes)
            if region is None:
                return
            self._words[region.slot] = 0
            self._regions.remove(region)
            os.close(region.fd)
            process = self._process
            if process is not None and region.session == self._session:
                with suppress(TransportError):  # it is dead, or ended because it did not answer
                    self._ask(process, Forget(region.slot))

    def describe(self) -> bytes:
        """Return what a reader needs to connect; start the engine's process if necessary."""
        with self._lock:
            return msgspec.json.encode(self._running())

    @property
    def pid(self) -> int | None:
        """The engine's process, if one is running."""
        with self._lock:
            return self._process.pid if self._process is not None else None

    def close(self) -> None:
        """End the engine's process, and with it every read. Safe to repeat."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._words[:] = 0
            if self._process is not None:
                self._process.close()
            self._process = self._description = None
            self._close_files()

    def _close_in_child(self) -> None:
        self._lock = threading.RLock()  # the thread that held it does not exist in the child
        if not self._is_closed:
            self._is_closed = True
            if self._process is not None:
                self._process.control.close()
            self._close_files()

    def _close_files(self) -> None:
        for region in self._regions:
            os.close(region.fd)
        self._regions.clear()
        os.close(self._register_fd)
        self._words = np.zeros(0, np.uint64)

    @property
    def _session(self) -> str:
        return self._description.session if self._description is not None else ""

    def _running(self) -> Description:
        """Return the description of the engine's process, which is started if there is none."""
        if self._is_closed:
            raise TransportError("the server of reads was closed")
        if self._process is not None and self._process.has_ended:
            self._end(self._process)
        if self._process is None or self._description is None:
            self._words[:] = 0
            self._process = ReadProcess(self._engine, self._address)
            register = Serve(0, 0, 8 * MAX_PLACES)
            answer = self._ask(self._process, register, self._register_fd, _START_SECONDS)
            self._description = Description(
                engine=self._engine,
                session=secrets.token_hex(16),
                connection=answer.connection,
                register=answer.address,
                key=answer.key,
            )
        return self._description

    def _serve(self, region: _Region, session: str) -> None:
        assert self._process is not None
        request = Serve(region.slot, region.offset, region.nbytes)
        region.served = self._ask(self._process, request, region.fd)
        region.word, region.session = secrets.randbits(62) + 1, session
        self._words[region.slot] = region.word

    def _ask(
        self,
        process: ReadProcess,
        request: Serve | Forget,
        fd: int | None = None,
        seconds: float = _ANSWER_SECONDS,
    ) -> Served:
        """Return the process's answer. If there is none, the process is ended first."""
        try:
            answer = process.ask(request, fd, seconds)
        except TransportError:
            self._end(process)
            raise
        if isinstance(answer, Failed):
            if process is self._process and self._description is None:
                self._end(process)
            raise error_named(answer.kind, answer.text)
        return answer

    def _end(self, process: ReadProcess) -> None:
        process.close(by_force=True)
        self._process = self._description = None

    def _free_slot(self) -> int:
        used = {region.slot for region in self._regions}
        for slot in range(1, MAX_PLACES):  # slot 0 is the register itself
            if slot not in used:
                return slot
        raise TransportError(f"{MAX_PLACES - 1} files are served already; forget some")

    def _region_of(self, address: int, nbytes: int) -> _Region | None:
        for region in self._regions:
            if region.start <= address and address + nbytes <= region.start + region.nbytes:
                return region
        return None

    def _found(self, buffer: Buffer) -> _Region:
        """Return the file that a buffer is mapped from, as a new region."""
        low, high = buffer.address, buffer.address + buffer.nbytes
        for mapping in shared_mappings():
            if mapping.start <= low and high <= mapping.end:
                fd, nbytes = _open_again(mapping.file, mapping.offset)
                nbytes = min(nbytes, mapping.end - mapping.start)
                slot = self._free_slot()
                region = _Region(fd, mapping.start, nbytes, mapping.offset, slot, buffer.owner)
                self._regions.append(region)
                return region
        raise TransportError(
            f"{buffer.nbytes} bytes at {low:#x} are no shared memory whose file this process has "
            f"open; copy them to memory of `allocate` first"
        )


def _new_file(nbytes: int) -> tuple[int, Bytes]:
    """Return a new file without a name, of fixed size, and its mapping here."""
    if nbytes > (left := available_bytes()):
        raise TransportError(f"no {nbytes} bytes to serve: {left} bytes of memory are available")
    fd = -1
    try:
        fd = os.memfd_create("flyweight-reads", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 0, max(nbytes, 1))
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        data = bytes_of(mmap.mmap(fd, max(nbytes, 1)))
    except (OSError, ValueError, OverflowError) as cause:
        if fd >= 0:
            os.close(fd)
        raise TransportError(f"no {nbytes} bytes to serve: {reason(cause)}") from cause
    without_fork(data)
    return fd, data


def _open_again(file: tuple[int, int], offset: int) -> tuple[int, int]:
    """Return a descriptor of an open file, and how many bytes it has from an offset on.

    A descriptor that can write comes first: RDMA cards need it.
    """
    found = -1
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            fd = os.dup(int(name))  # first, since another thread may reuse the number
            status = os.fstat(fd)
            can_write = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            if (status.st_dev, status.st_ino) == file and (found < 0 or can_write):
                found, fd = fd, found
            if fd >= 0:
                os.close(fd)
    if found < 0:
        raise TransportError("the file of that shared memory is not open in this process")
    seals = 0
    with suppress(OSError):  # a kind of file that has no seals
        seals = fcntl.fcntl(found, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK:
        os.close(found)
        raise TransportError("the file of that shared memory could shrink; it is not sealed")
    return found, os.fstat(found).st_size - offset
