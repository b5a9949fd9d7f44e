"""Shared memory: bytes on the host that other processes map, of any framework.

A segment is a memfd: it has no name in any file system, only processes of the same user get
it through an `FdServer`, and the kernel frees it with its last user, however that one ends.
It is sealed, so no process can truncate it under a reader, and no reader can write. Memory
that another library shares already (torch's `share_memory_`, a mapped file) is shown where
it lies.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import threading
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import numpy as np

from flyweight.errors import HandleGone, TransportError
from flyweight.host import has_room, opened, reason
from flyweight.memory import (
    Buffer,
    Bytes,
    SharedMapping,
    available_bytes,
    bytes_of,
    shared_mappings,
    without_fork,
)
from flyweight.transports.fd_passing import SPARE_FILES, FdConnection, FdServer

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_F_SEAL_FUTURE_WRITE = 0x10  # since Linux 5.1, and not in Python's list
_MAX_NUMBER = 2**63 - 1


class SharedMemoryHandle(
    msgspec.Struct, frozen=True, kw_only=True, tag="shared_memory", forbid_unknown_fields=True
):
    """Names bytes of a segment. It arrives from another process, so it checks itself."""

    session: str
    """The transport that offers it: keys of another one mean nothing."""
    key: str
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.nbytes < 0 or self.offset + self.nbytes > _MAX_NUMBER:
            raise TransportError(f"handle of {self.nbytes} bytes at byte {self.offset}")


@dataclass(eq=False)
class _Segment:
    """An offered file, where it is mapped here, and how many handles name it."""

    key: str
    start: int
    nbytes: int
    file_offset: int
    num_handles: int = 0
    is_kept: bool = True
    """True for allocated memory, which stays until `free`; else it goes with its last handle."""


class SharedMemoryTransport:
    """Offers memory of the host through an FdServer, and opens it through an FdConnection.

    A process that only offers, or only opens, needs only one of the two.
    """

    def __init__(
        self, *, fd_server: FdServer | None = None, fd_connection: FdConnection | None = None
    ) -> None:
        self._fd_server, self._fd_connection = fd_server, fd_connection
        self._session = secrets.token_hex(8)
        self._segments: list[_Segment] = []
        self._offers: dict[SharedMemoryHandle, tuple[_Segment, object]] = {}
        self._mappings: dict[tuple[str, str], tuple[Bytes, set[SharedMemoryHandle]]] = {}
        """The segments of others that are mapped here, and the open handles in each."""
        self._lock = threading.RLock()

    # The side that offers.

    def allocate(self, nbytes: int) -> Buffer:
        """Return memory that readers can map, so that offering it needs no copy.

        It stays until `free`. The system provides all of it now: if it ran out later, a write
        would end the process with SIGBUS.
        """
        # Without this check, the kernel may kill a process when memory runs out.
        if nbytes > (left := available_bytes()):
            raise TransportError(
                f"no {nbytes} bytes of shared memory: {left} bytes of memory are available"
            )
        fd = -1
        try:
            fd = os.memfd_create("flyweight", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(fd, 0, max(nbytes, 1))
            data = bytes_of(mmap.mmap(fd, max(nbytes, 1)))[:nbytes]
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            without_fork(data)
            self._add(fd, Buffer.of(data).address, max(nbytes, 1), 0, is_kept=True)
        except (OSError, ValueError, OverflowError) as cause:
            why = reason(cause) if isinstance(cause, OSError) else cause
            raise TransportError(f"no {nbytes} bytes of shared memory: {why}") from cause
        finally:
            if fd >= 0:
                os.close(fd)
        return Buffer.of(data)

    def free(self, buffer: Buffer) -> None:
        """Free what `allocate` returned; readers that have it open keep it."""
        with self._lock:
            segment = self._known(buffer.address, buffer.address + buffer.nbytes)
            if segment is not None and segment.is_kept:
                for handle in [each for each, (at, _) in self._offers.items() if at is segment]:
                    del self._offers[handle]
                self._remove(segment)

    def offer(self, buffer: Buffer) -> SharedMemoryHandle:
        with self._lock:
            segment = self._segment(buffer)
            if segment is not None:
                return self._handle(segment, buffer)
            # No other process can map it where it lies.
            copy = self.allocate(buffer.nbytes)
            np.copyto(copy.items().reshape(-1), buffer.items().reshape(-1).view(np.uint8))
            segment = self._known(*_span(copy))
            assert segment is not None
            segment.is_kept = False
            return self._handle(segment, copy)

    def offer_in_place(self, buffers: Sequence[Buffer]) -> list[SharedMemoryHandle]:
        """Offer memory where it lies; raise TransportError, and offer none, if that fails."""
        handles: list[SharedMemoryHandle] = []
        with self._lock, ExitStack() as stack:
            files = _SharedFiles()
            self._check_files(buffers, files)
            for buffer in buffers:
                segment = self._segment(buffer, files)
                if segment is None:
                    raise TransportError(
                        f"{buffer.nbytes} bytes at {_span(buffer)[0]:#x} are not, or no longer, "
                        f"shared memory whose file this process has open"
                    )
                known = len(self._offers)
                handles.append(self._handle(segment, buffer))
                if len(self._offers) > known:
                    stack.callback(self.release, handles[-1])
            stack.pop_all()
        return handles

    def can_offer_in_place(self, buffers: Sequence[Buffer]) -> list[bool]:
        """Return for each buffer whether an offer of it needs no copy."""
        files = _SharedFiles()
        return [
            each.device is None and bool(each.nbytes) and files.mapping_at(*each.span) is not None
            for each in buffers
        ]

    def _check_files(self, buffers: Sequence[Buffer], files: _SharedFiles) -> None:
        """Raise TransportError if offering the buffers would use up this process's files."""
        spans = [buffer.span for buffer in buffers if buffer.nbytes]
        new = {files.mapping_at(*span) for span in spans if not self._known(*span)}
        num_files = len(new - {None})
        if num_files and not has_room(num_files + SPARE_FILES):
            raise TransportError(
                f"{num_files} segments of shared memory need a file each, and {SPARE_FILES} must "
                f"be left; raise the limit, ulimit -n, or publish with transport='host'"
            )

    def _handle(self, segment: _Segment, buffer: Buffer) -> SharedMemoryHandle:
        low, high = _span(buffer)
        handle = SharedMemoryHandle(
            session=self._session,
            key=segment.key,
            offset=segment.file_offset + low - segment.start,
            nbytes=high - low,
        )
        if handle not in self._offers:
            segment.num_handles += 1
            self._offers[handle] = segment, buffer.owner
        return handle

    def release(self, handle: SharedMemoryHandle) -> None:
        with self._lock:
            segment, _ = self._offers.pop(handle, (None, None))
            if segment is not None:
                segment.num_handles -= 1
                if not segment.num_handles and not segment.is_kept:
                    self._remove(segment)

    def _segment(self, buffer: Buffer, files: _SharedFiles | None = None) -> _Segment | None:
        """Return the segment that a buffer lies in; None if no other process can map it."""
        low, high = _span(buffer)
        segment = self._known(low, high)
        if segment is not None or low == high:
            return segment
        files = _SharedFiles() if files is None else files
        found = files.mapping_at(low, high)  # shared by another library of this process
        if found is None:
            return None
        return self._add(files.fd(found), found.start, found.end - found.start, found.offset)

    def _known(self, low: int, high: int) -> _Segment | None:
        index = bisect_right(self._segments, low, key=lambda each: each.start) - 1
        if index < 0:
            return None
        segment = self._segments[index]
        return segment if high <= segment.start + segment.nbytes else None

    def _add(
        self, fd: int, start: int, nbytes: int, file_offset: int, *, is_kept: bool = False
    ) -> _Segment:
        """Offer a file to readers, by a description of it that cannot be written through."""
        try:
            readable = opened(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as cause:
            raise TransportError(f"cannot open a segment for readers: {reason(cause)}") from cause
        if self._fd_server is None:
            os.close(readable)
        key = self._fd_server.offer(readable) if self._fd_server else ""
        segment = _Segment(key, start, nbytes, file_offset, is_kept=is_kept)
        with self._lock:
            insort(self._segments, segment, key=lambda each: each.start)
        return segment

    def _remove(self, segment: _Segment) -> None:
        self._segments.remove(segment)
        if self._fd_server is not None:
            self._fd_server.release(segment.key)

    # The side that reads.

    def open(self, handle: SharedMemoryHandle) -> Buffer:
        if handle.session == self._session:
            return self._own(handle)
        at = handle.session, handle.key
        with self._lock:
            if at not in self._mappings:
                self._mappings[at] = self._mapped(handle), set()
            data, users = self._mappings[at]
            if handle.offset + handle.nbytes > len(data):
                raise TransportError(
                    f"handle speaks of bytes {handle.offset}..{handle.offset + handle.nbytes}, "
                    f"its segment has {len(data)}"
                )
            users.add(handle)
        return Buffer.of(data[handle.offset : handle.offset + handle.nbytes])

    def _own(self, handle: SharedMemoryHandle) -> Buffer:
        with self._lock:
            segment, owner = self._offers.get(handle, (None, None))
        if segment is None:
            raise HandleGone(f"segment {handle.key!r} was released")
        address = segment.start + handle.offset - segment.file_offset
        return Buffer.flat_at(address, handle.nbytes, owner)

    def _mapped(self, handle: SharedMemoryHandle) -> Bytes:
        if self._fd_connection is None:
            raise TransportError("no connection to an FdServer: this transport opens only its own")
        fd = self._fd_connection.fetch(handle.key)
        try:
            size = os.fstat(fd).st_size
            if not size:
                raise TransportError(f"segment {handle.key!r} is an empty file")
            # Populated at once: page faults one by one cost more than the copy saves.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            data = bytes_of(mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ))
        except (OSError, ValueError) as cause:
            why = reason(cause) if isinstance(cause, OSError) else cause
            raise TransportError(f"cannot map segment {handle.key!r}: {why}") from cause
        finally:
            os.close(fd)
        without_fork(data)
        return data

    def close_handle(self, handle: SharedMemoryHandle) -> None:
        at = handle.session, handle.key
        with self._lock:
            _, users = self._mappings.get(at, (None, set()))
            users.discard(handle)
            if not users:
                self._mappings.pop(at, None)

    def close(self) -> None:
        with self._lock:
            self._offers.clear()
            for segment in list(self._segments):
                self._remove(segment)
            self._mappings.clear()


def _span(buffer: Buffer) -> tuple[int, int]:
    if buffer.device is not None:
        raise TransportError(
            f"buffer is memory of device {buffer.device}; shared memory is the host's"
        )
    return buffer.span if buffer.nbytes else (buffer.address, buffer.address)


class _SharedFiles:
    """This process's mappings of files that it has open, at this moment."""

    def __init__(self) -> None:
        try:
            self._fds = dict(_open_files())
            mappings = [each for each in shared_mappings() if each.file in self._fds]
        except OSError as cause:
            raise TransportError(f"cannot tell what memory is shared: {reason(cause)}") from cause
        self._mappings = sorted(mappings, key=lambda each: each.start)

    def mapping_at(self, low: int, high: int) -> SharedMapping | None:
        index = bisect_right(self._mappings, low, key=lambda each: each.start) - 1
        if index < 0 or high > self._mappings[index].end:
            return None
        return self._mappings[index]

    def fd(self, mapping: SharedMapping) -> int:
        return self._fds[mapping.file]


def _open_files() -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the device and inode of each file that this process has open, and its number."""
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError as cause:
            if cause.errno != errno.EBADF:  # the listing itself is closed by now
                raise
            continue
        yield (status.st_dev, status.st_ino), int(name)
