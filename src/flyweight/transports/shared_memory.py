"""Shared memory: bytes on the host that other processes map, of any framework.

A segment is a memfd: it has no name in any file system, only processes of the same user get
it through an `FdServer`, and the kernel frees it with its last user, however that one ends.
It is sealed, so no process can truncate it under a reader, and no reader can write. Memory
that another library shares already (torch's `share_memory_`, a mapped file) is shown where
it lies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
from bisect import bisect_right, insort
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TypeVar

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
from flyweight.memory_table import Integers
from flyweight.spec.strict_json import Number
from flyweight.transports.fd_passing import SPARE_FILES, FdConnection, FdServer

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_F_SEAL_FUTURE_WRITE = 0x10  # since Linux 5.1, and not in Python's list


class SharedMemoryHandle(
    msgspec.Struct, frozen=True, kw_only=True, tag="shared_memory", forbid_unknown_fields=True
):
    """Names bytes of a segment."""

    session: str
    """The transport that offers it: keys of another one mean nothing."""
    key: str
    offset: Number
    nbytes: Number


@dataclass(eq=False)
class _Segment:
    """An offered file, where it is mapped here, and the handles that name it."""

    key: str
    start: int
    end: int
    offset: int
    is_kept: bool
    """True for allocated memory, which stays until `free`; else it goes with its last handle."""
    owners: dict[SharedMemoryHandle, object] = field(default_factory=dict)
    """What keeps the memory of each handle alive."""


_Span = TypeVar("_Span", _Segment, SharedMapping)


class SharedMemoryTransport:
    """Offers memory of the host through an FdServer, and opens it through an FdConnection.

    A process that only offers, or only opens, needs only one of the two. Without a server, memory
    can be allocated all the same, and no other process opens it.
    """

    def __init__(
        self, *, fd_server: FdServer | None = None, fd_connection: FdConnection | None = None
    ) -> None:
        self._fd_server, self._fd_connection = fd_server, fd_connection
        self._session = secrets.token_hex(8)
        self._segments: list[_Segment] = []
        """Ordered by address."""
        self._by_key: dict[str, _Segment] = {}
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
        fd, size = -1, max(nbytes, 1)
        try:
            fd = os.memfd_create("flyweight", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(fd, 0, size)
            data = bytes_of(mmap.mmap(fd, size))[:nbytes]
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            without_fork(data)
            buffer = Buffer.of(data)
            self._add(fd, buffer.address, buffer.address + size, 0, is_kept=True)
        except (OSError, ValueError, OverflowError) as cause:
            raise TransportError(f"no {nbytes} bytes of shared memory: {reason(cause)}") from cause
        finally:
            if fd >= 0:
                os.close(fd)
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Free what `allocate` returned; readers that have it open keep it."""
        with self._lock:
            segment = _containing(self._segments, *_span(buffer))
            if segment is not None and segment.is_kept:
                self._remove(segment)

    def offer(self, buffer: Buffer) -> SharedMemoryHandle:
        low, high = _span(buffer)
        with self._lock:
            if low < high and self.segments_of(np.array([low]), np.array([high]))[0] >= 0:
                return self.offer_in_place([buffer])[0]
            copy = self.allocate(buffer.nbytes)
            np.copyto(copy.items().reshape(-1), buffer.items().reshape(-1).view(np.uint8))
            (handle,) = self.offer_in_place([copy])
            self._by_key[handle.key].is_kept = False
            return handle

    def offer_in_place(self, buffers: Sequence[Buffer]) -> list[SharedMemoryHandle]:
        """Offer memory where it lies; raise TransportError, and offer none, if that fails."""
        segments = []
        with self._lock, ExitStack() as undo:
            mappings, fds = _shared_files()
            spans = [_span(buffer) for buffer in buffers]
            self._check_files(spans, mappings)
            for low, high in spans:
                segment = _containing(self._segments, low, high)
                if segment is None:
                    found = _containing(mappings, low, high)
                    if found is None:
                        raise TransportError(
                            f"{high - low} bytes at {low:#x} are not, or no longer, shared "
                            f"memory whose file this process has open"
                        )
                    segment = self._add(fds[found.file], found.start, found.end, found.offset)
                    undo.callback(self._remove, segment)
                segments.append(segment)
            undo.pop_all()
            return [
                self._handle(segment, buffer)
                for segment, buffer in zip(segments, buffers, strict=True)
            ]

    def segments_of(self, low: Integers, high: Integers) -> Integers:
        """Return the number of the segment that each block lies in, from `low` to `high`.

        The number is -1 for a block whose offer needs a copy: no other process can map it.
        """
        mappings, _ = _shared_files()
        found = {each.start: each.end for each in mappings}
        with self._lock:
            found.update({each.start: each.end for each in self._segments})
        starts, ends = np.array(sorted(found.items()), np.int64).reshape(-1, 2).T
        index = np.searchsorted(starts, low, side="right") - 1
        is_inside = (index >= 0) & (high <= np.append(ends, -1)[index])
        numbers = np.full(len(low), -1)
        numbers[is_inside] = np.unique(index[is_inside], return_inverse=True)[1]
        return numbers

    def _check_files(
        self, spans: Sequence[tuple[int, int]], mappings: Sequence[SharedMapping]
    ) -> None:
        """Raise TransportError if offering the memory would use up this process's files."""
        unknown = [each for each in spans if _containing(self._segments, *each) is None]
        num_files = len({_containing(mappings, *each) for each in unknown} - {None})
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
            offset=segment.offset + low - segment.start,
            nbytes=high - low,
        )
        segment.owners.setdefault(handle, buffer.owner)
        return handle

    def release(self, handle: SharedMemoryHandle) -> None:
        with self._lock:
            segment = self._by_key.get(handle.key)
            if segment is not None:
                segment.owners.pop(handle, None)
                if not segment.owners and not segment.is_kept:
                    self._remove(segment)

    def _add(
        self, fd: int, start: int, end: int, offset: int, *, is_kept: bool = False
    ) -> _Segment:
        """Offer a file to readers, by a description of it that cannot be written through.

        Without an FdServer there are none, and the file is not kept.
        """
        if self._fd_server is None:
            return self._added(_Segment(secrets.token_hex(8), start, end, offset, is_kept))
        try:
            readable = opened(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as cause:
            raise TransportError(f"cannot open a segment for readers: {reason(cause)}") from cause
        key = self._fd_server.offer(readable)
        return self._added(_Segment(key, start, end, offset, is_kept))

    def _added(self, segment: _Segment) -> _Segment:
        with self._lock:
            self._by_key[segment.key] = segment
            insort(self._segments, segment, key=_start)
        return segment

    def _remove(self, segment: _Segment) -> None:
        self._segments.remove(segment)
        del self._by_key[segment.key]
        if self._fd_server is not None:
            self._fd_server.release(segment.key)

    # The side that reads.

    def open(self, handle: SharedMemoryHandle) -> Buffer:
        if handle.session == self._session:
            return self._own(handle)
        at = handle.session, handle.key
        with self._lock:
            if at not in self._mappings:
                self._mappings[at] = self._mapped(handle.key), set()
            data, users = self._mappings[at]
            end = handle.offset + handle.nbytes
            if end > len(data):
                raise TransportError(
                    f"handle speaks of bytes {handle.offset}..{end}, its segment has {len(data)}"
                )
            users.add(handle)
        return Buffer.of(data[handle.offset : end])

    def _own(self, handle: SharedMemoryHandle) -> Buffer:
        with self._lock:
            segment = self._by_key.get(handle.key)
            if segment is None or handle not in segment.owners:
                raise HandleGone(f"segment {handle.key!r} was released")
            address = segment.start + handle.offset - segment.offset
            return Buffer.flat_at(address, handle.nbytes, segment.owners[handle])

    def _mapped(self, key: str) -> Bytes:
        if self._fd_connection is None:
            raise TransportError("no connection to an FdServer: this transport opens only its own")
        fd = self._fd_connection.fetch(key)
        try:
            # Populated at once: page faults one by one cost more than the copy saves.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            data = bytes_of(mmap.mmap(fd, 0, flags=flags, prot=mmap.PROT_READ))
        except (OSError, ValueError) as cause:  # ValueError: the file is empty
            raise TransportError(f"cannot map segment {key!r}: {reason(cause)}") from cause
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
            for segment in list(self._segments):
                self._remove(segment)
            self._mappings.clear()


def _start(span: _Segment | SharedMapping) -> int:
    return span.start


def _containing(ordered: Sequence[_Span], low: int, high: int) -> _Span | None:
    index = bisect_right(ordered, low, key=_start) - 1
    return ordered[index] if index >= 0 and high <= ordered[index].end else None


def _span(buffer: Buffer) -> tuple[int, int]:
    if buffer.device is not None:
        raise TransportError(
            f"buffer is memory of device {buffer.device}; shared memory is the host's"
        )
    return buffer.span if buffer.nbytes else (buffer.address, buffer.address)


def _shared_files() -> tuple[list[SharedMapping], dict[tuple[int, int], int]]:
    """Return this process's mappings of files that it has open, by address, and those files."""
    fds: dict[tuple[int, int], int] = {}
    try:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the listing itself is closed by now
                status = os.fstat(int(name))
                fds[status.st_dev, status.st_ino] = int(name)
        found = [each for each in shared_mappings() if each.file in fds]
    except OSError as cause:
        raise TransportError(f"cannot tell what memory is shared: {reason(cause)}") from cause
    return sorted(found, key=_start), fds
