"""Device segments: memory of a device that other processes of the host map (CUDA IPC).

The driver exports memory of cudaMalloc as a handle of 64 bytes, a whole allocation at a time, and
mapped memory, such as torch's expandable segments, as an open file for each piece. A reader may
find other bytes there once the exporter has freed the memory or died: a lease and digests, not this
file, say whether what was read is the version.
"""

from __future__ import annotations

import os
import secrets
import threading
import uuid as uuids
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ctypes import byref, c_size_t, c_uint64
from functools import cache
from itertools import islice
from typing import Annotated
from weakref import WeakSet, WeakValueDictionary

import msgspec
import numpy as np
from msgspec.structs import replace

from flyweight.cuda import driver
from flyweight.errors import HandleGone, TransportError
from flyweight.host import has_room
from flyweight.memory import Buffer, Bytes
from flyweight.memory_table import BufferTable, Integers
from flyweight.plans.tables import Table
from flyweight.transports.segments import SPARE_FILES, Offered, Placed, map_segment

MAX_BYTES, MAX_PIECES = 1 << 47, 1 << 16
_MAX_PID = 1 << 22
_NumBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]


class DeviceHandle(Table, frozen=True):
    """Names allocations that follow each other. It arrives from another process and is checked."""

    session: Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
    """The process that exports them."""
    pid: Annotated[int, msgspec.Meta(ge=1, le=_MAX_PID)]
    device: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """The device's UUID, which is the same in every process."""
    allocation: Annotated[int, msgspec.Meta(ge=0)]
    """The driver's number of the first one; memory at the same address later has another."""
    pieces: Annotated[tuple[_NumBytes, ...], msgspec.Meta(min_length=1, max_length=MAX_PIECES)]
    """The size of each."""
    ipc: Annotated[bytes, msgspec.Meta(max_length=driver.IPC_BYTES)] = b""
    """The driver's handle of a single allocation; else each comes as an open file."""

    def __post_init__(self) -> None:
        if self.nbytes > MAX_BYTES:
            raise TransportError(f"handle of {self.nbytes} bytes, at most {MAX_BYTES} are accepted")
        if self.ipc and (len(self.ipc), len(self.pieces)) != (driver.IPC_BYTES, 1):
            raise TransportError(
                f"handle of {len(self.pieces)} allocations with {len(self.ipc)} bytes for the "
                f"driver, which takes {driver.IPC_BYTES} for 1 allocation"
            )

    @property
    def nbytes(self) -> int:
        return sum(self.pieces)

    @property
    def num_files(self) -> int:
        return 0 if self.ipc else len(self.pieces)


# The side that offers memory.


class DeviceSegment(Offered):
    """Allocations of a device that follow each other."""

    def __init__(
        self, handle: DeviceHandle, files: Sequence[int], start: int, owner: object
    ) -> None:
        super().__init__(files, start, handle.nbytes, owner)
        self.handle = handle
        with _lock:
            _exported.add(self)


@cache
def _session(pid: int) -> bytes:
    """Return a name of this process: a forked child has another one."""
    return secrets.token_bytes(8)


def export(device: int, start: int, nbytes: int, owner: object) -> DeviceSegment:
    """Return a segment of all allocations that a range of memory lies in.

    Raises TransportError if the driver cannot export them.
    """
    low, high = np.array([start]), np.array([start + nbytes])
    return _exported_run(device, _allocations(device, low, high), owner)


def places_on_devices(memory: BufferTable) -> Placed | None:
    """Return where blocks lie in allocations of devices; None if one cannot be exported.

    Those of the host, of a stream-ordered pool (cudaMallocAsync) and of managed memory cannot.
    """
    has_items = memory.nbytes > 0
    if (memory.device[has_items] < 0).any():
        return None
    low, high = memory.spans
    segments: list[DeviceSegment] = []
    segment = np.full(len(memory), -1)
    try:
        for device in np.unique(memory.device[has_items]).tolist():
            rows = np.flatnonzero(has_items & (memory.device == device))
            first = len(segments)
            for run in _runs(_allocations(device, low[rows], high[rows])):
                segments.append(_exported_run(device, run, memory.owner))
            starts = np.array([each.start for each in segments[first:]])
            segment[rows] = first + np.searchsorted(starts, low[rows], side="right") - 1
    except TransportError:
        return None
    return Placed.of(segments, segment, memory)


def _allocations(device: int, low: Integers, high: Integers) -> list[driver.Allocation]:
    """Return the allocations that blocks lie in, by address."""
    order = np.argsort(low, kind="stable")
    starts, ends = low[order], np.maximum.accumulate(high[order])
    found: list[driver.Allocation] = []
    end = block = 0
    while block < len(order):
        # A block that goes on beyond an allocation lies in the next one too.
        each = driver.allocation_at(device, max(int(starts[block]), end))
        if not each.can_ipc and (not each.can_export or each.is_managed):
            raise TransportError(
                f"{each.nbytes} bytes at {each.start:#x} of device {device} are managed, of a pool "
                f"or mapped without a file; the driver exports no such memory"
            )
        found.append(each)
        end = each.start + each.nbytes
        block = int(np.searchsorted(ends, end, side="right"))
    return found


def _runs(allocations: Sequence[driver.Allocation]) -> Iterator[list[driver.Allocation]]:
    """Yield mapped allocations that follow each other together, and all others alone."""
    run: list[driver.Allocation] = []
    for each in allocations:
        end = run[-1].start + run[-1].nbytes if run else 0
        if run and (each.can_ipc or run[-1].can_ipc or each.start != end):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def _exported_run(device: int, run: Sequence[driver.Allocation], owner: object) -> DeviceSegment:
    first, files = run[0], list[int]()
    try:
        if not first.can_ipc:
            if not has_room(len(run) + SPARE_FILES):
                raise TransportError(
                    f"{len(run)} pieces of mapped memory need an open file each, and {SPARE_FILES} "
                    f"must be left; raise the limit, ulimit -n"
                )
            files += (driver.export_fd(device, each.start) for each in run)
        handle = DeviceHandle(
            _session(os.getpid()),
            os.getpid(),
            uuids.UUID(driver.uuid(device).removeprefix("GPU-")).bytes,
            first.number,
            tuple(each.nbytes for each in run),
            driver.ipc_handle(device, first.start) if first.can_ipc else b"",
        )
    except TransportError:
        for file in files:
            os.close(file)
        raise
    return DeviceSegment(handle, files, first.start, owner)


# The side that maps it.


class _Mapping:
    """Memory of another process, mapped until the last reference goes."""

    def __init__(self, device: int, handle: DeviceHandle, files: Sequence[int]) -> None:
        if handle.ipc:
            self.start = driver.open_ipc(device, handle.ipc)
        else:
            self.start = driver.map_fds(device, list(zip(files, handle.pieces, strict=True)))
        closing = weakref.finalize(self, _close, os.getpid(), device, self.start, handle)
        closing.atexit = False  # the driver may be gone
        if handle.ipc:  # files are mapped with their sizes
            start, nbytes = c_uint64(), c_size_t()
            with driver.current_context(device):
                driver.call("cuMemGetAddressRange_v2", byref(start), byref(nbytes), self.start)
            if handle.nbytes > nbytes.value:
                raise TransportError(
                    f"handle speaks of {handle.nbytes} bytes, its allocation has {nbytes.value}"
                )


def _close(pid: int, device: int, start: int, handle: DeviceHandle) -> None:
    if os.getpid() == pid:  # a forked child has no context
        with suppress(TransportError):  # a broken context cannot unmap, and need not
            if handle.ipc:
                driver.close_ipc(device, start)
            else:
                driver.unmap(device, start, handle.pieces)


_exported: WeakSet[DeviceSegment] = WeakSet()
_mappings: WeakValueDictionary[DeviceHandle, _Mapping] = WeakValueDictionary()
_lock = threading.Lock()


def open_segment(handle: DeviceHandle, files: Sequence[int]) -> Buffer:
    """Map a segment, once for each handle and process, as long as the buffer's owner is referenced.

    The files may be closed afterwards. Raises HandleGone if the memory was freed.
    """
    name = f"GPU-{uuids.UUID(bytes=handle.device)}"
    device = driver.device_named(name)
    if device is None:
        raise TransportError(
            f"handle of process {handle.pid} is of device {name!r}, which is none of the "
            f"{driver.num_devices()} that this process sees; see CUDA_VISIBLE_DEVICES"
        )
    if len(files) != handle.num_files:
        raise TransportError(f"handle of {handle.num_files} files came with {len(files)}")
    owner: DeviceSegment | _Mapping | None
    with _lock:
        if handle.session == _session(os.getpid()):  # the driver does not open its own handles
            owner = next((each for each in _exported if each.handle == handle), None)
            if owner is None:
                raise HandleGone(f"this process has given back allocation {handle.allocation}")
        elif (owner := _mappings.get(handle)) is None:
            try:
                owner = _mappings[handle] = _Mapping(device, handle, files)
            except TransportError as error:
                error.note(f"offered by process {handle.pid}, {handle.nbytes} bytes of {name}")
                raise
        buffer = Buffer.flat_at(owner.start, handle.nbytes, owner, device=device)
        return replace(buffer, is_writable=False)


def open_segments(
    handles: Sequence[DeviceHandle | int], files: Sequence[int]
) -> list[Bytes | Buffer]:
    """Map the segments of a message, with the open files of its frame, in order.

    A number is a segment of the host: the bytes of its file.
    """
    wanted = sum(1 if isinstance(each, int) else each.num_files for each in handles)
    if wanted != len(files):
        raise TransportError(f"{len(files)} files came with segments of {wanted} files")
    coming = iter(files)
    return [
        map_segment(next(coming), each)
        if isinstance(each, int)
        else open_segment(each, list(islice(coming, each.num_files)))
        for each in handles
    ]
