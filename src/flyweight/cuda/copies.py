"""Copies on a CUDA device, many at once, and tables of copies that run again and again.

The driver copies large blocks and strided rows. A kernel of our own copies thousands of small
blocks in one launch. torch copies what the driver could copy only in small parts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from flyweight.cuda.copy_tasks import Dim, copy_tasks, driver_dims, kernel_rows, offsets
from flyweight.cuda.driver import (
    allocate,
    call,
    check,
    current_context,
    free,
    function,
    primary_context,
    wait_until,
)
from flyweight.cuda.launches import imported
from flyweight.errors import TransportError
from flyweight.memory import Buffer
from flyweight.memory_table import BufferTable

_NUM_STREAMS = 8
_PIECE_BYTES = 256 << 20  # small enough that one huge tensor keeps all streams busy
_NOT_READY = 600
_HOST, _DEVICE = 1, 2
_LAUNCH_BYTES = 32 << 20
"""Copies of this size and more are as fast by the driver as by the kernel."""


class _Side(ctypes.Structure):
    _fields_ = (
        *((name, c_size_t) for name in ("x", "y", "z", "level")),
        ("kind", c_int),
        *((name, c_void_p) for name in ("host", "device", "array", "reserved")),
        *((name, c_size_t) for name in ("pitch", "height")),
    )


class _Copy3D(ctypes.Structure):
    _fields_ = (
        ("source", _Side),
        ("sink", _Side),
        *((name, c_size_t) for name in ("width", "height", "depth")),
    )


def _per_load(line: str) -> str:
    """Repeat a line of the kernel for each load of a thread."""
    quads = ["{" + ", ".join(f"%x{4 * k + lane}" for lane in range(4)) + "}" for k in range(_LOADS)]
    step = 16 * _THREADS
    return "\n".join(
        line.format(k=k, step=step, offset=step * k, quad=quads[k]) for k in range(_LOADS)
    )


# A block of threads copies one task, {sink, source, bytes}: each thread copies 16 bytes up to
# eight times, then one of the remaining bytes. All loads are issued before the first store.
_THREADS, _LOADS = 1024, 8
_TASK_BYTES = 16 * _THREADS * _LOADS
_KERNEL = f"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry copy_tasks(.param .u64 tasks) {{
.reg .pred %p, %q<{_LOADS}>; .reg .b16 %byte; .reg .b32 %i, %at, %n, %whole, %x<{4 * _LOADS}>;
.reg .b64 %task, %sink, %source, %from, %to, %wide;
ld.param.u64 %task, [tasks];         cvta.to.global.u64 %task, %task;
mov.u32 %i, %ctaid.x;                mul.wide.u32 %wide, %i, 24;
add.u64 %task, %task, %wide;         ld.global.u32 %n, [%task+16];
ld.global.u64 %sink, [%task];        ld.global.u64 %source, [%task+8];
and.b32 %whole, %n, -16;             mov.u32 %i, %tid.x;
add.u32 %at, %whole, %i;             setp.lt.u32 %p, %at, %n;
cvt.u64.u32 %wide, %at;              add.u64 %from, %source, %wide;
add.u64 %to, %sink, %wide;           @%p ld.global.u8 %byte, [%from];
shl.b32 %at, %i, 4;                  cvt.u64.u32 %wide, %at;
add.u64 %sink, %sink, %wide;         add.u64 %source, %source, %wide;
{_per_load("setp.lt.u32 %q{k}, %at, %whole; add.u32 %at, %at, {step};")}
{_per_load("@%q{k} ld.global.cs.v4.u32 {quad}, [%source+{offset}];")}
{_per_load("@%q{k} st.global.cs.v4.u32 [%sink+{offset}], {quad};")}
@%p st.global.u8 [%to], %byte;
ret; }}
"""


@cache
def _kernel(device: int) -> c_void_p:
    module, kernel = c_void_p(), c_void_p()
    with current_context(device):
        call("cuModuleLoadData", byref(module), _KERNEL.encode())
        call("cuModuleGetFunction", byref(kernel), module, b"copy_tasks")
    return kernel


@dataclass(frozen=True, eq=False)
class CopyTable:
    """Copies that run again and again, and the tasks of one launch. Keeps the memory alive."""

    sink: BufferTable
    source: BufferTable
    rest: tuple[tuple[Buffer, Buffer], ...]
    """The copies that no kernel makes, sink and source each."""
    tasks: Buffer | None
    num_tasks: int
    task_bytes: int


_abandoned: list[object] = []
"""Buffers and tables of copies that were under way when their copier was closed."""


class Copier:
    """Copies between a device and itself or the host, many at once. For one thread at a time.

    A copy waits for earlier work on the device's default stream, and later work on that stream
    waits for the copy. For work on other streams, the caller must `synchronize`.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._context, self._popped = primary_context(device), byref(c_void_p())
        self._push, self._pop = function("cuCtxPushCurrent_v2"), function("cuCtxPopCurrent_v2")
        self._copy_1d, self._query = function("cuMemcpyAsync"), function("cuStreamQuery")
        self._queued_bytes = [0] * _NUM_STREAMS
        self._held: list[object] = []
        self._tables: list[Buffer] = []
        self._streams: list[c_void_p] = []
        with current_context(device):
            for _ in range(_NUM_STREAMS):
                self._streams.append(c_void_p())
                call("cuStreamCreate", byref(self._streams[-1]), 0)

    def copy(self, sink: Buffer, source: Buffer) -> None:
        """Queue a copy. Copies end in any order; both buffers are kept alive until `wait`.

        Raises SpecError if the buffers differ in shape or item width, if items of the sink share
        bytes, or if the strides need more than 65536 calls of the driver.
        """
        dims = driver_dims(sink, source)
        if dims is None:
            return
        walk, block = dims
        self._held.append((sink, source))
        check("cuCtxPushCurrent_v2", self._push(self._context))
        try:
            for to, at in offsets(walk) if walk else ((0, 0),):
                if len(block) == 1:
                    self._queue_flat(sink.address + to, source.address + at, block[0][0])
                else:
                    self._queue_rows(sink, to, source, at, block)
        finally:
            self._pop(self._popped)

    def table(self, sink: BufferTable, source: BufferTable) -> CopyTable:
        """Return a table of copies, from each row of `source` to that of `sink`, for `run`.

        One launch of a kernel makes the small ones that are contiguous: for thousands of tensors,
        many times faster than queueing each one. A table takes 24 bytes of device memory per
        128 KiB until the copier is closed. Raises as `copy` does.
        """
        is_flat = kernel_rows(sink, source, self._device, _LAUNCH_BYTES)
        left = np.flatnonzero(~is_flat & (sink.nbytes > 0))
        rest = tuple((sink.buffer(row), source.buffer(row)) for row in left.tolist())
        for pair in rest:
            driver_dims(*pair)  # raises now rather than in a round
        nbytes = sink.nbytes[is_flat]
        tasks = copy_tasks(sink.address[is_flat], source.address[is_flat], nbytes, _TASK_BYTES)
        place = None
        if len(tasks):
            place = allocate(self._device, tasks.nbytes)
            self._tables.append(place)
            with current_context(self._device):
                call("cuMemcpyHtoD_v2", place.address, tasks.ctypes.data, tasks.nbytes)
        return CopyTable(sink, source, rest, place, len(tasks), int(nbytes.sum()))

    def run(self, table: CopyTable) -> None:
        """Queue all copies of a table that this copier made."""
        if table.tasks is not None:
            self._held.append(table)
            self._queued_bytes[0] += table.task_bytes
            address = c_uint64(table.tasks.address)
            arguments = (c_void_p * 1)(ctypes.addressof(address))
            kernel, stream = _kernel(self._device), self._streams[0]
            sizes = (table.num_tasks, 1, 1, _THREADS, 1, 1, 0)
            with current_context(self._device):
                call("cuLaunchKernel", kernel, *sizes, stream, arguments, None)
        for sink, source in table.rest:
            self.copy(sink, source)

    def wait(self, timeout_seconds: float) -> None:
        """Return once every queued copy has arrived; raise TransferTimeout if one does not.

        After a timeout the copies go on, and their buffers are kept alive.
        """
        what = f"{len(self._held)} copies of device {self._device} did not all arrive"
        with current_context(self._device):
            wait_until(self._is_idle, timeout_seconds, what)
        self._held.clear()
        self._queued_bytes = [0] * len(self._streams)

    def close(self) -> None:
        """Destroy the streams and free the tables. Safe to repeat.

        Buffers of copies that are still under way are kept for ever: nobody waits for them.
        """
        if self._held:
            with suppress(TransportError):
                self.wait(0)
            _abandoned.extend(self._held)
        with current_context(self._device):
            while self._streams:
                call("cuStreamDestroy_v2", self._streams.pop())
        while self._tables:
            if self._held:
                _abandoned.append(self._tables.pop())
            else:
                free(self._tables.pop())

    def _is_idle(self) -> bool:
        for stream in self._streams:
            code = self._query(stream)
            if code == _NOT_READY:
                return False
            check("cuStreamQuery", code)
        return True

    def _stream(self, nbytes: int) -> c_void_p:
        """Return the stream with the fewest queued bytes, and count these to it."""
        index = self._queued_bytes.index(min(self._queued_bytes))
        self._queued_bytes[index] += nbytes
        return self._streams[index]

    def _queue_flat(self, sink: int, source: int, nbytes: int) -> None:
        for start in range(0, nbytes, _PIECE_BYTES):
            piece = min(_PIECE_BYTES, nbytes - start)
            stream = self._stream(piece)
            check("cuMemcpyAsync", self._copy_1d(sink + start, source + start, piece, stream))

    def _queue_rows(
        self, sink: Buffer, to: int, source: Buffer, at: int, dims: Sequence[Dim]
    ) -> None:
        (depth, *_), (height, *pitches), (width, *_) = ((1, 0, 0), *dims)[-3:]
        copy = _Copy3D(width=width, height=height, depth=depth)
        for index, (side, buffer, offset) in enumerate(
            ((copy.sink, sink, to), (copy.source, source, at))
        ):
            side.kind = _HOST if buffer.device is None else _DEVICE
            side.host = side.device = buffer.address + offset
            side.pitch = pitches[index]
            side.height = dims[0][1 + index] // pitches[index] if len(dims) == 3 else height
        stream = self._stream(width * height * depth)
        call("cuMemcpy3DAsync_v2", byref(copy), stream)


class _ArrayInterface:
    """What torch needs to view memory as a tensor, without owning it."""

    def __init__(self, interface: dict[str, object]) -> None:
        self.__cuda_array_interface__ = interface


def tensor_at(buffer: Buffer) -> Any:
    """View device memory as a torch tensor of integers, as wide as its strides allow."""
    torch = imported("torch", "strided copies")
    numbers = (buffer.address, buffer.item_bytes, *buffer.strides)
    width = next(width for width in (8, 4, 2, 1) if all(n % width == 0 for n in numbers))
    shape, strides = buffer.shape, buffer.strides
    if width != buffer.item_bytes:
        shape, strides = (*shape, buffer.item_bytes // width), (*strides, width)
    interface = {
        "shape": shape,
        "strides": strides,
        "typestr": "|u1" if width == 1 else f"<i{width}",
        "data": (buffer.address, False),
        "version": 2,
    }
    return torch.as_tensor(_ArrayInterface(interface), device=f"cuda:{buffer.device}")
