"""Shared memory: processes of one host, any framework, tensors on the CPU.

Segments are memfds: they have no name in any file system, only the user's own
processes get them through the door, and the kernel frees them with their last
user, however that one ends. They are sealed, so no reader can be cut short under
its mapping, and none can write. Memory that another library shares already
(torch's `share_memory_`, a mapped file) is shown where it lies.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import numpy as np

from flyweight.errors import HandleGone, TransportError
from flyweight.host import has_room, opened, reason
from flyweight.memory import Buffer, Bytes, available_bytes, bytes_of, without_fork
from flyweight.transports.fd_passing import SPARE_FILES, FdConnection, FdServer

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_F_SEAL_FUTURE_WRITE = 0x10  # since Linux 5.1, and not in Python's list
_MAX_NUMBER = 2**63 - 1


class SharedMemoryHandle(
    msgspec.Struct, frozen=True, kw_only=True, tag="shared_memory", forbid_unknown_fields=True
):
    """Names bytes of a segment. It arrives from another process, so it checks itself."""

    session: str
    """Which transport offers it: numbers and keys of another one mean nothing."""
    key: str
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.nbytes < 0 or self.offset + self.nbytes > _MAX_NUMBER:
            raise TransportError(f"handle of {self.nbytes} bytes at byte {self.offset}")


@dataclass(eq=False)
class _Segment:
    """A file that is offered, where it is mapped here, and how many handles name it."""

    key: str
    start: int
    nbytes: int
    file_offset: int
    num_handles: int = 0
    is_ours: bool = True


class SharedMemoryTransport:
    """Offers at a door, opens through a line; a process that does only one needs only one."""

    def __init__(
        self, *, fd_server: FdServer | None = None, fd_connection: FdConnection | None = None
    ) -> None:
        self._fd_server, self._fd_connection = fd_server, fd_connection
        self._session = secrets.token_hex(8)
        self._segments: list[_Segment] = []
        self._offers: dict[SharedMemoryHandle, tuple[_Segment, object]] = {}
        self._opened: dict[tuple[str, str], Bytes] = {}
        self._users: dict[tuple[str, str], set[SharedMemoryHandle]] = {}
        self._lock = threading.RLock()

    # The side that offers.

    def allocate(self, nbytes: int) -> Buffer:
        """Return memory that readers can map: what is put there is offered without a copy.

        It stays until `free`. All of it is taken from the system now: to find that there is none
        left while writing to it would be a SIGBUS.
        """
        # Nothing else keeps the kernel from ending some process for want of memory.
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
        except (OSError, ValueError, OverflowError) as cause:
            if fd >= 0:
                os.close(fd)
            why = reason(cause) if isinstance(cause, OSError) else cause
            raise TransportError(f"no {nbytes} bytes of shared memory: {why}") from cause
        without_fork(data)
        self._add(fd, Buffer.of(data).address, max(nbytes, 1), 0, is_ours=True)
        return Buffer.of(data)

    def free(self, buffer: Buffer) -> None:
        """Let go of what `allocate` returned; readers that have it open keep it."""
        with self._lock:
            segment = self._segment_at(buffer.address, buffer.nbytes)
            if segment is not None and segment.is_ours:
                for handle in [each for each, (at, _) in self._offers.items() if at is segment]:
                    del self._offers[handle]
                self._forget(segment)

    def offer(self, buffer: Buffer) -> SharedMemoryHandle:
        _check_host(buffer)
        low, high = buffer.span if buffer.nbytes else (buffer.address, buffer.address)
        with self._lock:
            segment = self._segment_at(low, high - low) or self._found(low, high - low, _Scan())
            if segment is not None:
                return self._offered(segment, low, high, buffer.owner)
            # Nobody else can map it where it lies.
            copy = self.allocate(buffer.nbytes)
            np.copyto(copy.items().reshape(-1), buffer.items().reshape(-1).view(np.uint8))
            low, high = copy.address, copy.address + copy.nbytes
            segment = self._segment_at(low, high - low)
            assert segment is not None
            segment.is_ours = False  # it goes with its handle
            return self._offered(segment, low, high, copy.owner)

    def show(self, buffers: Sequence[Buffer]) -> list[SharedMemoryHandle]:
        """Offer memory where it lies; raise TransportError, and offer none of it, if that fails."""
        handles: list[SharedMemoryHandle] = []
        with self._lock, ExitStack() as stack:
            scan = _Scan()
            self._check_files(buffers, scan)
            for buffer in buffers:
                _check_host(buffer)
                low, high = buffer.span if buffer.nbytes else (buffer.address, buffer.address)
                segment = self._segment_at(low, high - low) or self._found(low, high - low, scan)
                if segment is None:
                    raise TransportError(
                        f"{buffer.nbytes} bytes at {low:#x} are not, or no longer, shared memory "
                        f"whose file this process has open"
                    )
                known = len(self._offers)
                handles.append(self._offered(segment, low, high, buffer.owner))
                if len(self._offers) > known:
                    stack.callback(self.release, handles[-1])
            stack.pop_all()
        return handles

    def _check_files(self, buffers: Sequence[Buffer], scan: _Scan) -> None:
        """Raise if to show buffers would leave this process without files."""
        spans = [buffer.span for buffer in buffers if buffer.nbytes]
        new = {scan.at(*each) for each in spans if not self._segment_at(each[0], each[1] - each[0])}
        num_files = len(new - {None})
        if num_files and not has_room(num_files + SPARE_FILES):
            raise TransportError(
                f"{num_files} segments of shared memory need a file each, and {SPARE_FILES} must "
                f"be left; raise the limit, ulimit -n, or publish with strategy='host'"
            )

    def _offered(self, segment: _Segment, low: int, high: int, owner: object) -> SharedMemoryHandle:
        handle = SharedMemoryHandle(
            session=self._session,
            key=segment.key,
            offset=segment.file_offset + low - segment.start,
            nbytes=high - low,
        )
        if handle not in self._offers:
            segment.num_handles += 1
            self._offers[handle] = segment, owner
        return handle

    def shown(self, buffers: Sequence[Buffer]) -> list[bool]:
        """Tell of each buffer whether an offer of it costs no copy."""
        scan = _Scan()
        return [
            buffer.device is None and bool(buffer.nbytes) and scan.at(*buffer.span) is not None
            for buffer in buffers
        ]

    def release(self, handle: SharedMemoryHandle) -> None:
        with self._lock:
            segment, _ = self._offers.pop(handle, (None, None))
            if segment is not None:
                segment.num_handles -= 1
                if not segment.num_handles and not segment.is_ours:
                    self._forget(segment)

    def _add(self, fd: int, start: int, nbytes: int, file_offset: int, *, is_ours: bool) -> None:
        """Keep a file for readers: a new description of it, that cannot be written through."""
        try:
            readable = opened(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as cause:
            raise TransportError(f"cannot open a segment for readers: {reason(cause)}") from cause
        finally:
            if is_ours:
                os.close(fd)
        key = self._fd_server.offer(readable) if self._fd_server else ""
        if self._fd_server is None:
            os.close(readable)
        segment = _Segment(key, start, nbytes, file_offset, is_ours=is_ours)
        with self._lock:
            self._segments.append(segment)
            self._segments.sort(key=lambda each: each.start)

    def _forget(self, segment: _Segment) -> None:
        self._segments.remove(segment)
        if self._fd_server is not None:
            self._fd_server.release(segment.key)

    def _segment_at(self, address: int, nbytes: int) -> _Segment | None:
        index = bisect_right(self._segments, address, key=lambda each: each.start) - 1
        if index < 0:
            return None
        segment = self._segments[index]
        return segment if address + nbytes <= segment.start + segment.nbytes else None

    def _found(self, address: int, nbytes: int, scan: _Scan) -> _Segment | None:
        """Return memory that something else in this process shares, if its file is still open."""
        mapping = scan.at(address, address + nbytes) if nbytes else None
        if mapping is None:
            return None
        span = mapping.end - mapping.start
        self._add(scan.file(mapping), mapping.start, span, mapping.offset, is_ours=False)
        return self._segment_at(address, nbytes)

    # The side that reads.

    def open(self, handle: SharedMemoryHandle) -> Buffer:
        if handle.session == self._session:
            return self._own(handle)
        at = handle.session, handle.key
        with self._lock:
            if at not in self._opened:
                self._opened[at] = self._mapped(handle)
            data = self._opened[at]
            if handle.offset + handle.nbytes > len(data):
                raise TransportError(
                    f"handle speaks of bytes {handle.offset}..{handle.offset + handle.nbytes}, "
                    f"its segment has {len(data)}"
                )
            self._users.setdefault(at, set()).add(handle)
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
            raise TransportError("no line to a door: this transport can only open its own offers")
        fd = self._fd_connection.fetch(handle.key)
        try:
            size = os.fstat(fd).st_size
            if not size:
                raise TransportError(f"segment {handle.key!r} is an empty file")
            # All at once: a fault for every few pages costs more than the copy saves.
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
            users = self._users.get(at)
            if users is not None:
                users.discard(handle)
                if not users:
                    del self._users[at], self._opened[at]

    def close(self) -> None:
        with self._lock:
            self._offers.clear()
            for segment in list(self._segments):
                self._forget(segment)
            self._opened.clear()
            self._users.clear()


@dataclass(frozen=True)
class _Mapping:
    start: int
    end: int
    offset: int
    device: int
    inode: int


class _Scan:
    """What of this process's memory is a file's that it has open, as of now."""

    def __init__(self) -> None:
        try:
            self._files = dict(_open_files())
            mappings = list(_shared_mappings())
        except OSError as cause:
            raise TransportError(f"cannot tell what memory is shared: {reason(cause)}") from cause
        self._mappings = sorted(
            (each for each in mappings if (each.device, each.inode) in self._files),
            key=lambda each: each.start,
        )
        self._starts = [each.start for each in self._mappings]

    def at(self, low: int, high: int) -> _Mapping | None:
        index = bisect_right(self._starts, low) - 1
        if index < 0 or high > self._mappings[index].end:
            return None
        return self._mappings[index]

    def file(self, mapping: _Mapping) -> int:
        return self._files[mapping.device, mapping.inode]


def _check_host(buffer: Buffer) -> None:
    if buffer.device is not None:
        raise TransportError(
            f"buffer is memory of device {buffer.device}; shared memory is the host's"
        )


def _shared_mappings() -> Iterator[_Mapping]:
    """Yield what of this process's memory is a file's, and seen by whoever else maps that."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, rights, offset, device, inode, *_ = line.split(None, 5)
            if rights[3] == "s" and inode != "0":
                start, _, end = span.partition("-")
                major, _, minor = device.partition(":")
                number = os.makedev(int(major, 16), int(minor, 16))
                yield _Mapping(int(start, 16), int(end, 16), int(offset, 16), number, int(inode))


def _open_files() -> Iterator[tuple[tuple[int, int], int]]:
    """Yield the files that this process has open, by what they are."""
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError as cause:
            if cause.errno != errno.EBADF:  # the listing itself is closed by now
                raise
            continue
        yield (status.st_dev, status.st_ino), int(name)
