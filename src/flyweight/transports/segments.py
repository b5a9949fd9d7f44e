"""Segments: memory that other processes map, by open files that travel with a frame of a channel.

A host segment is a file without a name: a sealed memfd, or shared memory that was unlinked, as
torch's is. The kernel frees it with its last user, so a reader can finish with a version after the
trainer was killed. A file with a name is never mapped: any process could truncate it, and SIGBUS
would end the reader. `device_segments.py` has the memory of devices.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from flyweight.errors import TransportError
from flyweight.forks import call_in_child
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
from flyweight.memory_table import HOST, BufferTable, Integers
from flyweight.plans.tables import Table, numbers, packed
from flyweight.spec.manifest import MAX_DIMS

if TYPE_CHECKING:
    from flyweight.transports.device_segments import DeviceSegment

SPARE_FILES = 64
"""Offering memory leaves so many open files to the rest of the process."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_F_SEAL_FUTURE_WRITE = 0x10  # since Linux 5.1, and not in Python's list
_BLOCK_BYTES = 512
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


class Places(Table, frozen=True):
    """Where blocks lie in segments; `strides` in bytes, `num_dims` of them for each block."""

    num_dims: Annotated[int, msgspec.Meta(ge=1, le=MAX_DIMS)]
    segment: bytes
    """The index of each block's segment; -1 for a block without items."""
    start: bytes
    """The byte of its segment at which its first item starts."""
    strides: bytes


# The side that offers memory.


class Offered:
    """Memory that readers map, and its open files, which close with it and in forked children."""

    def __init__(self, files: Sequence[int], start: int, nbytes: int, owner: object) -> None:
        """start: the address here. owner: what keeps the memory alive."""
        self.files, self.start, self.nbytes, self.owner = tuple(files), start, nbytes, owner
        self._closing = weakref.finalize(self, _close, self.files)
        self._closing.atexit = False  # a thread may still send them
        call_in_child(self._close_in_child)

    def _close_in_child(self) -> None:
        self._closing()


class Segment(Offered):
    """Memory of the host: one file, from its beginning."""

    @classmethod
    def allocate(cls, nbytes: int, *, is_writable_by_readers: bool = False) -> Segment:
        """Return memory of the host that nobody can truncate, all of which is provided now.

        is_writable_by_readers: if True, the processes that get its file fill it; else no process
            but this one can write it.
        """
        assert nbytes >= 0
        size = max(nbytes, 1)
        if size > (left := available_bytes()):  # the kernel may kill a process instead
            raise TransportError(f"no {size} bytes of shared memory: {left} bytes are available")
        access = os.O_RDWR if is_writable_by_readers else os.O_RDONLY
        file = -1
        try:
            file = os.memfd_create("flyweight", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.posix_fallocate(file, 0, size)  # if memory ran out later, SIGBUS would end a process
            data = _mapped(file, size, is_writable=True)
            if not is_writable_by_readers:
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            passed = _opened_again(file, access)
        except OSError as cause:
            raise TransportError(f"no {size} bytes of shared memory: {reason(cause)}") from cause
        finally:
            if file >= 0:
                os.close(file)
        return cls((passed,), Buffer.of(data).address, size, data[:nbytes])

    @property
    def bytes(self) -> Bytes:
        """The memory of a segment that was allocated."""
        assert isinstance(self.owner, np.ndarray)
        return self.owner


def _close(files: Sequence[int]) -> None:
    for each in files:
        os.close(each)


def _opened_again(file: int, access: int) -> int:
    """Open a file with rights of its own: those who get it cannot do more."""
    return opened(f"/proc/self/fd/{file}", access | os.O_CLOEXEC)


@dataclass(frozen=True, eq=False)
class Placed:
    """Segments, and the segment and byte at which each block of an offer lies."""

    segments: tuple[Segment | DeviceSegment, ...]
    segment: Integers
    """-1 for blocks without items, wherever they start."""
    start: Integers
    layout: str = field(default_factory=lambda: secrets.token_hex(8))
    """Names these places for readers that have mapped them."""

    @classmethod
    def of(
        cls, segments: Sequence[Segment | DeviceSegment], segment: Integers, memory: BufferTable
    ) -> Placed:
        base = np.array([*(each.start for each in segments), 0], np.int64)
        return cls(tuple(segments), segment, memory.address - base[segment])

    def table(self, memory: BufferTable) -> Places:
        columns = packed(self.segment), packed(self.start), packed(memory.strides)
        return Places(memory.strides.shape[1], *columns)


def places_in_shared_memory(memory: BufferTable) -> Placed | None:
    """Return where blocks lie in files that this process shares already; None if one does not.

    Also None if a reader would refuse a file, or if too few open files would be left.
    """
    if (memory.device != HOST).any():
        return None
    rows = np.flatnonzero(memory.nbytes)
    low, high = (each[rows] for each in memory.spans)
    segment = np.full(len(memory), -1)
    try:
        files = _open_files()
        # The kernel lists mappings by address.
        found = [each for each in shared_mappings() if each.file in files]
        starts = np.array([0, *(each.start for each in found)])
        # A mapping may be larger than its file.
        sizes = (min(each.end - each.start, files[each.file][1] - each.offset) for each in found)
        ends = starts + np.array([0, *sizes])
        index = np.searchsorted(starts, low, side="right") - 1
        if (high > ends[index]).any():
            return None
        used, segment[rows] = np.unique(index, return_inverse=True)
        if not has_room(len(used) + SPARE_FILES):
            return None
        segments = [
            _shared(found[each - 1], files[found[each - 1].file][0], memory.owner)
            for each in used.tolist()
        ]
    except (OSError, TransportError):  # of a file that readers refuse
        return None
    return Placed.of(segments, segment, memory)


def _open_files() -> dict[tuple[int, int], tuple[int, int]]:
    """Return the number and the size of this process's open files, by device and inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing itself is closed by now
            status = os.fstat(int(name))
            found[status.st_dev, status.st_ino] = int(name), status.st_size
    return found


def _shared(mapping: SharedMapping, file: int, owner: object) -> Segment:
    """Return the whole file of a mapping as a segment."""
    passed = _opened_again(file, os.O_RDONLY)
    try:
        status = check_file(passed, 1)
        if (status.st_dev, status.st_ino) != mapping.file:
            raise TransportError(f"file {file} was closed meanwhile, and is another one")
    except BaseException:
        os.close(passed)
        raise
    return Segment((passed,), mapping.start - mapping.offset, status.st_size, owner)


# The side that maps it.


def check_file(file: int, nbytes: int) -> os.stat_result:
    """Raise TransportError unless a file is memory that cannot go away while it is mapped."""
    status = os.fstat(file)
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError as cause:  # a pipe, a device, a file on a disk
        kind = f"mode {status.st_mode:o}, {status.st_size} bytes"
        raise TransportError(f"a file is not shared memory, but has {kind}") from cause
    # A process that has the file open can truncate it, unless it is sealed. Without a name, that is
    # only one that got it from its maker: a trainer of the same user, which is trusted.
    if not seals & fcntl.F_SEAL_SHRINK and status.st_nlink:
        raise TransportError(
            f"a file of shared memory has {status.st_nlink} names and seals {seals:#x}; it can be "
            f"truncated unless it has 0 names or F_SEAL_SHRINK ({fcntl.F_SEAL_SHRINK:#x})"
        )
    if status.st_size < nbytes:
        raise TransportError(f"a file has {status.st_size} bytes, its segment {nbytes}")
    if (provided := status.st_blocks * _BLOCK_BYTES) < status.st_size:
        raise TransportError(
            f"a file of {status.st_size} bytes has memory for {provided}; the rest could be "
            f"missing when it is read"
        )
    return status


def map_segment(file: int, nbytes: int, *, is_writable: bool = False) -> Bytes:
    """Map a segment that another process sent, as long as the bytes are referenced.

    The file may be closed afterwards. Raises TransportError for a file that could lose its memory.
    """
    try:
        check_file(file, nbytes)
        return _mapped(file, nbytes, is_writable=is_writable)
    except OSError as cause:
        raise TransportError(f"cannot map {nbytes} bytes of a file: {reason(cause)}") from cause


def _mapped(file: int, nbytes: int, *, is_writable: bool) -> Bytes:
    """Map a file, outside of forked children.

    An `mmap.mmap` would keep the file open, here and in children.
    """
    rights = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # page faults one by one cost more than a copy
    address = _LIBC.mmap(None, nbytes, rights, flags, file, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    unmapping = weakref.finalize(memory, _unmap, address, nbytes, os.getpid())
    unmapping.atexit = False  # a thread may still read it
    view = memoryview(memory)
    data = bytes_of(view if is_writable else view.toreadonly())
    without_fork(data)
    return data


def _unmap(address: int, nbytes: int, pid: int) -> None:
    if os.getpid() == pid:  # other memory may lie there in a forked child
        _LIBC.munmap(address, nbytes)


def mapped_rows(
    places: Places, mapped: Sequence[Bytes | Buffer], shape: Integers, item_bytes: Integers
) -> BufferTable:
    """Return a holder's blocks as memory of this process; raise unless each is in its segment.

    shape: that of each block, as this process knows it.
    """
    segment, start = numbers(places.segment), numbers(places.start)
    strides = numbers(places.strides, places.num_dims)
    if not len(segment) == len(start) == len(strides) == len(shape):
        raise TransportError(
            f"{len(shape)} blocks have {len(segment)} segments, {len(start)} starts and "
            f"{len(strides)} strides"
        )
    extra = shape.shape[1] - places.num_dims
    if extra < 0 or (shape[:, :extra] != 1).any():
        raise TransportError(f"places have {places.num_dims} dims, blocks {shape.shape[1]}")
    if len(segment) and not -1 <= segment.min() <= segment.max() < len(mapped):
        raise TransportError(
            f"blocks are in segments {segment.min()} to {segment.max()} of {len(mapped)}"
        )
    is_empty = (shape == 0).any(axis=1)
    is_idle = (shape <= 1) | is_empty[:, None]  # nothing is reached by these strides
    strides = np.where(is_idle, 0, np.pad(strides, ((0, 0), (extra, 0))))
    start = np.where(is_empty, 0, start)
    buffers = [each if isinstance(each, Buffer) else Buffer.of(each) for each in mapped]
    devices = [HOST if each.device is None else each.device for each in buffers]
    # The last entries are of segment -1.
    base = np.array([*(each.address for each in buffers), 0], np.int64)
    size = np.array([*(each.nbytes for each in buffers), 0], np.int64)[segment]
    device = np.array([*devices, devices[0] if devices else HOST], np.int64)[segment]
    is_outside = _is_outside(start, strides, shape, item_bytes, size) & ~is_empty
    if is_outside.any():
        row = int(np.flatnonzero(is_outside)[0])
        raise TransportError(
            f"block {row} of shape {shape[row].tolist()} at byte {start[row]} with strides "
            f"{strides[row].tolist()} is not inside of segment {segment[row]}, {size[row]} bytes"
        )
    is_writable = all(each.is_writable for each in buffers)
    return BufferTable(
        base[segment] + start, shape, strides, item_bytes, device, list(mapped), is_writable
    )


def _is_outside(
    start: Integers, strides: Integers, shape: Integers, item_bytes: Integers, size: Integers
) -> NDArray[np.bool_]:
    """Return which blocks have a byte outside of their `size` bytes.

    Where a product overflows, the stride is too far: it is compared before.
    """
    steps = np.maximum(shape - 1, 0)
    most = size[:, None] // np.maximum(steps, 1)
    is_far = (strides < -most) | (strides > most)
    reach = strides * steps
    below, above = -np.minimum(reach, 0).sum(axis=1), np.maximum(reach, 0).sum(axis=1)
    is_beyond = (start < below) | (start > size - above - item_bytes)
    found: NDArray[np.bool_] = np.logical_or(is_far.any(axis=1), is_beyond)
    return found
