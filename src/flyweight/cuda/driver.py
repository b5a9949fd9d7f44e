"""The CUDA driver, by ctypes: memory, copies, and memory of other processes, by address.

Everything happens in a device's primary context, which is the one frameworks use. It is
pushed for each call and popped again, so any thread may call and none has its current
device changed. Importing this needs no driver: `is_available` tells whether there is one.
"""

from __future__ import annotations

import ctypes
import threading
import uuid as uuids
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from math import prod
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyweight.errors import (
    HandleGone,
    MissingDependency,
    SpecError,
    TransferTimeout,
    TransportError,
)
from flyweight.memory import Buffer

IPC_BYTES = 64
_PIECE_BYTES = 256 << 20  # so that one huge tensor keeps all streams busy
_TABLE_BYTES = 32 << 20  # what is larger is as fast by the driver's own copies
_MAX_COPIES = 1 << 16
_MAX_PITCH = 2**31 - 1
_SPIN_SECONDS = 0.05  # a round takes about 8 ms, and who sleeps wakes 60 us late

_INVALID_VALUE, _INVALID_HANDLE, _NOT_READY = 1, 400, 600
_HOST, _DEVICE = 1, 2
_POSIX_FD = 1
_READ, _READ_WRITE = 1, 3
_IPC_CAPABLE, _HANDLE_TYPES, _POOL, _IS_MANAGED, _BUFFER_ID = 10, 14, 17, 8, 7
_MAPPING_BYTES, _MAPPING_START, _BLOCK_ID = 18, 19, 20


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * IPC_BYTES),)


class _Access(ctypes.Structure):
    _fields_ = (("location_type", c_int), ("location", c_int), ("rights", c_int))


class _Side(ctypes.Structure):
    _fields_ = (
        ("x", c_size_t),
        ("y", c_size_t),
        ("z", c_size_t),
        ("level", c_size_t),
        ("kind", c_int),
        ("host", c_void_p),
        ("device", c_void_p),
        ("array", c_void_p),
        ("reserved", c_void_p),
        ("pitch", c_size_t),
        ("height", c_size_t),
    )


class _Copy3D(ctypes.Structure):
    _fields_ = (
        ("source", _Side),
        ("sink", _Side),
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    )


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceCanAccessPeer": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemGetAddressRange_v2": (c_void_p, c_void_p, c_uint64),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuIpcGetMemHandle": (c_void_p, c_uint64),
    "cuIpcOpenMemHandle_v2": (c_void_p, _IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemRetainAllocationHandle": (c_void_p, c_void_p),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (c_void_p, c_void_p, c_int),
    "cuMemAddressReserve": (c_void_p, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, c_void_p, c_size_t),
    "cuMemRelease": (c_uint64,),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamQuery": (c_void_p,),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuModuleLoadData": (c_void_p, c_char_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpy3DAsync_v2": (c_void_p, c_void_p),
}


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as cause:
        raise MissingDependency(
            "CUDA needs libcuda.so.1, which comes with NVIDIA's driver and is not found here"
        ) from cause


@cache
def _function(name: str) -> Callable[..., int]:
    try:
        function = getattr(_library(), name)
    except AttributeError as cause:
        raise MissingDependency(
            f"this CUDA driver has no {name!r}; a driver of CUDA 12.4 or later has"
        ) from cause
    function.argtypes = _ARGUMENTS[name]
    return function  # type: ignore[no-any-return]


def _told(code: int) -> str:
    texts = []
    for name in ("cuGetErrorName", "cuGetErrorString"):
        text = c_char_p()
        _function(name)(code, byref(text))
        texts.append((text.value or b"unknown").decode())
    return ": ".join(texts)


def _check(name: str, code: int) -> None:
    if code:
        raise TransportError(f"{name} answered {code}, {_told(code)}")


def _call(name: str, *args: object) -> None:
    _check(name, _function(name)(*args))


@cache
def _init() -> None:
    _call("cuInit", 0)


@cache
def _context(device: int) -> c_void_p:
    _init()
    context = c_void_p()
    _call("cuDevicePrimaryCtxRetain", byref(context), device)
    return context


@contextmanager
def _current(device: int) -> Iterator[None]:
    _call("cuCtxPushCurrent_v2", _context(device))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", byref(c_void_p()))


def _until(is_done: Callable[[], bool], timeout_seconds: float, what: str) -> None:
    """Return once `is_done`; raise TransferTimeout if that takes too long."""
    start = monotonic()
    while not is_done():
        waited = monotonic() - start
        if waited > timeout_seconds:
            raise TransferTimeout(f"{what} in {timeout_seconds:g} s")
        sleep(0 if waited < _SPIN_SECONDS else 0.0005)


# Devices.


def is_available() -> bool:
    """True if there is a driver and at least one device; makes no context."""
    return num_devices() > 0


def num_devices() -> int:
    """Return how many devices this process sees: 0 without a driver."""
    count = c_int()
    try:
        _init()
        _call("cuDeviceGetCount", byref(count))
    except (MissingDependency, TransportError):
        return 0
    return count.value


@cache
def uuid(device: int) -> str:
    """Return what nvidia-smi calls the device, the same in every process."""
    _init()
    raw = (c_char * 16)()
    _call("cuDeviceGetUuid_v2", raw, device)
    return f"GPU-{uuids.UUID(bytes=raw.raw)}"


def device_named(name: str) -> int | None:
    """Return the number that a device has in this process, or None if it is not seen here."""
    return next((device for device in range(num_devices()) if uuid(device) == name), None)


def can_access_peer(device: int, other: int) -> bool:
    """True if kernels and copies of `device` reach the memory of `other` directly."""
    _init()
    answer = c_int()
    _call("cuDeviceCanAccessPeer", byref(answer), device, other)
    return bool(answer.value)


def synchronize(device: int, timeout_seconds: float) -> None:
    """Wait until all that this process has queued on the device, on any stream, is done.

    Raises TransferTimeout; the thread that waits for the driver is then left to itself.
    """
    waiter = _waiters.pop() if _waiters else _Waiter()
    answer = waiter.ask(device, timeout_seconds)
    if answer is None:  # it is left to itself
        raise TransferTimeout(f"device {device} was not done in {timeout_seconds:g} s")
    _waiters.append(waiter)
    _check("cuCtxSynchronize", answer)


class _Waiter:
    """A thread that waits for a device: the driver's own wait has no deadline."""

    def __init__(self) -> None:
        self._devices: SimpleQueue[int] = SimpleQueue()
        self._answers: SimpleQueue[int | TransportError] = SimpleQueue()
        threading.Thread(target=self._wait, name="cuda-wait", daemon=True).start()

    def ask(self, device: int, timeout_seconds: float) -> int | None:
        self._devices.put(device)
        try:
            answer = self._answers.get(timeout=max(timeout_seconds, 0))
        except Empty:
            return None
        if isinstance(answer, TransportError):
            raise answer
        return answer

    def _wait(self) -> None:
        while True:
            device = self._devices.get()
            try:
                with _current(device):
                    self._answers.put(_function("cuCtxSynchronize")())
            except TransportError as error:
                self._answers.put(error)


_waiters: list[_Waiter] = []


# Memory of this process.


def allocate(device: int, nbytes: int) -> Buffer:
    """Return memory of its own, which others can map; it stays until `free`."""
    address = c_uint64()
    with _current(device):
        _call("cuMemAlloc_v2", byref(address), max(nbytes, 1))
    return Buffer.flat_at(address.value, nbytes, None, device=device)


def free(buffer: Buffer) -> None:
    """Give back what `allocate` returned; waits for the device if that is busy."""
    assert buffer.device is not None, "memory of the host was not allocated here"
    with _current(buffer.device):
        _call("cuMemFree_v2", buffer.address)


@dataclass(frozen=True)
class Allocation:
    """What the driver knows of the memory around an address."""

    start: int
    nbytes: int
    number: int
    """Unique in its process: memory freed and taken again at the same address has another."""
    can_ipc: bool
    can_export: bool
    is_managed: bool
    is_pooled: bool


def allocation_at(device: int, address: int) -> Allocation:
    """Return the allocation that an address lies in; of mapped memory, the one that is mapped."""
    with _current(device):
        can_ipc = bool(_attribute(address, _IPC_CAPABLE, c_int()))
        pool = _attribute(address, _POOL, c_uint64())
        is_managed = bool(_attribute(address, _IS_MANAGED, c_int()))
        is_fd = bool(_attribute(address, _HANDLE_TYPES, c_uint64()) & _POSIX_FD)
        if can_ipc or pool or is_managed:
            start, nbytes = c_uint64(), c_size_t()
            _call("cuMemGetAddressRange_v2", byref(start), byref(nbytes), address)
            place = start.value, nbytes.value, _attribute(address, _BUFFER_ID, c_uint64())
        else:
            place = (
                _attribute(address, _MAPPING_START, c_uint64()),
                _attribute(address, _MAPPING_BYTES, c_size_t()),
                _attribute(address, _BLOCK_ID, c_uint64()),
            )
    return Allocation(*place, can_ipc, is_fd and not pool, is_managed, bool(pool))


def _attribute(address: int, attribute: int, value: Any) -> int:
    _call("cuPointerGetAttribute", byref(value), attribute, address)
    return int(value.value or 0)


# Memory of other processes.


def ipc_handle(device: int, address: int) -> bytes:
    """Return by what another process opens the whole allocation that an address lies in."""
    handle = _IpcHandle()
    with _current(device):
        _call("cuIpcGetMemHandle", byref(handle), address)
    return bytes(handle)


def open_ipc(device: int, handle: bytes) -> int:
    """Map an allocation of another process, and return where it starts here.

    Raises HandleGone if it was freed, or its process is gone.
    """
    address = c_uint64()
    with _current(device):
        peer_access = 1
        struct = _IpcHandle.from_buffer_copy(handle)
        code = _function("cuIpcOpenMemHandle_v2")(byref(address), struct, peer_access)
    if code in (_INVALID_VALUE, _INVALID_HANDLE):  # seen for memory that is freed, for the dead
        raise HandleGone(f"no memory of another process has this handle: {_told(code)}")
    _check("cuIpcOpenMemHandle_v2", code)
    return address.value


def close_ipc(device: int, address: int) -> None:
    """Let go of what `open_ipc` mapped."""
    with _current(device):
        _call("cuIpcCloseMemHandle", address)


def export_fd(device: int, address: int) -> int:
    """Return a file that stands for the mapped memory at an address, and keeps it alive."""
    fd, memory = c_int(-1), c_uint64()
    with _current(device):
        _call("cuMemRetainAllocationHandle", byref(memory), address)
        try:
            _call("cuMemExportToShareableHandle", byref(fd), memory, _POSIX_FD, 0)
        finally:
            _call("cuMemRelease", memory)
    return fd.value


def map_fds(device: int, files: Sequence[tuple[int, int]]) -> int:
    """Map memory that (file, bytes) stand for, one after the other, and return where it starts.

    The files may be closed afterwards. Mapped for reading only where the driver can do so.
    """
    start, total = c_uint64(), sum(nbytes for _, nbytes in files)
    mapped: list[int] = []
    with _current(device):
        _call("cuMemAddressReserve", byref(start), total, 0, 0, 0)
        try:
            for fd, nbytes in files:
                memory = c_uint64()
                _call("cuMemImportFromShareableHandle", byref(memory), fd, _POSIX_FD)
                try:
                    _call("cuMemMap", start.value + sum(mapped), nbytes, 0, memory, 0)
                finally:
                    _call("cuMemRelease", memory)
                mapped.append(nbytes)
            access = _Access(1, device, _READ)
            if _function("cuMemSetAccess")(start, total, byref(access), 1):
                access.rights = _READ_WRITE
                _call("cuMemSetAccess", start, total, byref(access), 1)
        except TransportError:
            _unmap(start.value, mapped, total)
            raise
    return start.value


def unmap(device: int, address: int, sizes: Sequence[int]) -> None:
    """Let go of what `map_fds` mapped, in the sizes it was told."""
    with _current(device):
        _unmap(address, sizes, sum(sizes))


def _unmap(address: int, sizes: Sequence[int], total: int) -> None:
    at = address
    for nbytes in sizes:
        _call("cuMemUnmap", at, nbytes)
        at += nbytes
    _call("cuMemAddressFree", address, total)


# Copies.

_Dim = tuple[int, int, int]
"""How many, and how many bytes apart at the sink and at the source."""


@lru_cache(maxsize=1 << 16)
def _dims(
    shape: tuple[int, ...], sink: tuple[int, ...], source: tuple[int, ...], item_bytes: int
) -> tuple[tuple[_Dim, ...], tuple[_Dim, ...]]:
    """Return what to walk through here, and below it what the driver copies in one call."""
    dims = sorted(
        (each for each in zip(shape, sink, source, strict=True) if each[0] != 1),
        key=lambda dim: (dim[1], dim[2]),
    )
    if any(stride < item_bytes for _, stride, _ in dims):
        raise SpecError(f"items of the sink share bytes: shape {shape}, byte strides {sink}")
    merged: list[_Dim] = [(item_bytes, 1, 1)]
    for size, to, at in dims:
        inner, inner_to, inner_at = merged[-1]
        if (to, at) == (inner * inner_to, inner * inner_at):
            merged[-1] = (inner * size, inner_to, inner_at)
        else:
            merged.append((size, to, at))
    merged.reverse()
    cut = next(cut for cut in range(max(len(merged) - 3, 0), len(merged)) if _fits(merged[cut:]))
    if prod(size for size, _, _ in merged[:cut]) > _MAX_COPIES:
        raise SpecError(
            f"copy of shape {shape} from byte strides {source} to {sink} takes more than "
            f"{_MAX_COPIES} calls of the driver; copy it to contiguous memory first"
        )
    return tuple(merged[:cut]), tuple(merged[cut:])


def run_bytes(sink: Buffer, source: Buffer) -> int:
    """Return how many bytes of a copy lie without a gap on both sides, at least."""
    _, block = _dims(sink.shape, sink.strides, source.strides, sink.item_bytes)
    return block[-1][0]


def _fits(dims: Sequence[_Dim]) -> bool:
    """True if the driver can copy rows, or planes of rows, that lie so at both sides."""
    *outer, (width, _, _) = dims
    for side in (1, 2):
        if outer and not width <= outer[-1][side] <= _MAX_PITCH:
            return False
        if len(outer) == 2:
            height, odd = divmod(outer[0][side], outer[1][side])
            if odd or height < outer[1][0]:
                return False
    return True


def _is_any(sink: Buffer, source: Buffer) -> bool:
    """True if there is something to copy; raise SpecError if it cannot be copied."""
    if (sink.shape, sink.item_bytes) != (source.shape, source.item_bytes):
        raise SpecError(
            f"source is {source.shape} items of {source.item_bytes} bytes, "
            f"sink is {sink.shape} of {sink.item_bytes}"
        )
    if not sink.is_writable:
        raise SpecError(f"sink of shape {sink.shape} is read-only")
    return 0 not in sink.shape


def _offsets(dims: Sequence[_Dim]) -> Iterator[tuple[int, int]]:
    """Yield where each step through the dims is, in bytes, at the sink and at the source."""
    for steps in product(*(range(size) for size, _, _ in dims)):
        to = sum(step * dim[1] for step, dim in zip(steps, dims, strict=True))
        yield to, sum(step * dim[2] for step, dim in zip(steps, dims, strict=True))


def _each(line: str) -> str:
    """Write a line of the kernel once for each load of a thread."""
    quads = ["{" + ", ".join(f"%x{4 * k + lane}" for lane in range(4)) + "}" for k in range(_LOADS)]
    step = 16 * _THREADS
    return "\n".join(
        line.format(k=k, step=step, offset=step * k, quad=quads[k]) for k in range(_LOADS)
    )


# A block of threads copies one task, {sink, source, bytes}: each thread eight times 16 bytes if
# there are as many, then one of the bytes left over. All loads are under way before a store.
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
{_each("setp.lt.u32 %q{k}, %at, %whole; add.u32 %at, %at, {step};")}
{_each("@%q{k} ld.global.cs.v4.u32 {quad}, [%source+{offset}];")}
{_each("@%q{k} st.global.cs.v4.u32 [%sink+{offset}], {quad};")}
@%p st.global.u8 [%to], %byte;
ret; }}
"""


@cache
def _kernel(device: int) -> c_void_p:
    module, function = c_void_p(), c_void_p()
    with _current(device):
        _call("cuModuleLoadData", byref(module), _KERNEL.encode())
        _call("cuModuleGetFunction", byref(function), module, b"copy_tasks")
    return function


def _tasks(copies: Sequence[tuple[int, int, int]]) -> NDArray[np.uint64]:
    """Cut (sink, source, bytes) into tasks of the kernel."""
    whole = np.array(copies, np.uint64).reshape(-1, 3)
    step = np.uint64(_TASK_BYTES)
    counts = (whole[:, 2] + step - np.uint64(1)) // step
    first = np.cumsum(counts) - counts
    tasks = np.repeat(whole, counts.astype(np.int64), axis=0)
    offsets = np.arange(len(tasks), dtype=np.uint64) - np.repeat(first, counts.astype(np.int64))
    offsets *= step
    tasks[:, :2] += offsets[:, None]
    tasks[:, 2] = np.minimum(tasks[:, 2] - offsets, step)
    return tasks


@dataclass(frozen=True, eq=False)
class CopyTable:
    """Copies that are made again and again, and what of them one launch does. Keeps the buffers."""

    pairs: tuple[tuple[Buffer, Buffer], ...]
    rest: tuple[tuple[Buffer, Buffer], ...]
    tasks: Buffer
    num_tasks: int
    task_bytes: int


_abandoned: list[object] = []


class Copier:
    """Copies between a device and the device or the host, many at once; one thread at a time.

    A copy waits for what was queued before on the device's default stream, and later work on
    that stream waits for it. Work on other streams is the caller's to wait for: `synchronize`.
    """

    def __init__(
        self, device: int, *, num_streams: int = 8, piece_bytes: int = _PIECE_BYTES
    ) -> None:
        self._device, self._piece_bytes = device, piece_bytes
        self._context, self._popped = _context(device), byref(c_void_p())
        self._push, self._pop = _function("cuCtxPushCurrent_v2"), _function("cuCtxPopCurrent_v2")
        self._copy_1d, self._query = _function("cuMemcpyAsync"), _function("cuStreamQuery")
        self._queued_bytes = [0] * num_streams
        self._held: list[object] = []
        self._tables: list[Buffer] = []
        self._streams: list[c_void_p] = []
        with _current(device):
            for _ in range(num_streams):
                self._streams.append(c_void_p())
                _call("cuStreamCreate", byref(self._streams[-1]), 0)

    def copy(self, sink: Buffer, source: Buffer) -> None:
        """Queue a copy; both buffers are kept until `wait`, and copies arrive in any order.

        Raises SpecError if the buffers differ in shape or item width, if items of the sink share
        bytes, or if the strides take more calls of the driver than 65536.
        """
        if not _is_any(sink, source):
            return
        walk, block = _dims(sink.shape, sink.strides, source.strides, sink.item_bytes)
        self._held.append((sink, source))
        _check("cuCtxPushCurrent_v2", self._push(self._context))
        try:
            for to, at in _offsets(walk) if walk else ((0, 0),):
                if len(block) == 1:
                    self._queue_flat(sink.address + to, source.address + at, block[0][0])
                else:
                    self._queue_rows(sink, to, source, at, block)
        finally:
            self._pop(self._popped)

    def table(
        self, pairs: Sequence[tuple[Buffer, Buffer]], *, launch_bytes: int = _TABLE_BYTES
    ) -> CopyTable:
        """Return copies, (sink, source) each, that `run` makes as often as it is asked to.

        Those of less than `launch_bytes` are made by one launch of a kernel, as far as it can.

        For thousands of small tensors this is many times faster than to queue each. It takes 24
        bytes of the device's memory for 128 KiB of copies, until `drop`. Raises as `copy` does.
        """
        flat: list[tuple[int, int, int]] = []
        rest: list[tuple[Buffer, Buffer]] = []
        for sink, source in pairs:
            if not _is_any(sink, source):
                continue
            walk, block = _dims(sink.shape, sink.strides, source.strides, sink.item_bytes)
            is_small = not walk and len(block) == 1 and block[0][0] < launch_bytes
            is_here = sink.device == source.device == self._device
            if is_small and is_here and sink.address % 16 == source.address % 16 == 0:
                flat.append((sink.address, source.address, block[0][0]))
            else:
                rest.append((sink, source))
        tasks = _tasks(flat)
        place = allocate(self._device, tasks.nbytes)
        self._tables.append(place)
        if len(tasks):
            with _current(self._device):
                _call("cuMemcpyHtoD_v2", place.address, tasks.ctypes.data, tasks.nbytes)
        nbytes = sum(each[2] for each in flat)
        return CopyTable(tuple(pairs), tuple(rest), place, len(tasks), nbytes)

    def drop(self, table: CopyTable) -> None:
        """Give back what a table takes, once none of its copies is under way. Safe to repeat."""
        if table.tasks in self._tables:
            self._tables.remove(table.tasks)
            free(table.tasks)

    def run(self, table: CopyTable) -> None:
        """Queue all copies of a table of this copier."""
        if table.num_tasks:
            self._held.append(table)
            self._queued_bytes[0] += table.task_bytes
            address = c_uint64(table.tasks.address)
            arguments = (c_void_p * 1)(ctypes.addressof(address))
            kernel, stream = _kernel(self._device), self._streams[0]
            sizes = (table.num_tasks, 1, 1, _THREADS, 1, 1, 0)
            with _current(self._device):
                _call("cuLaunchKernel", kernel, *sizes, stream, arguments, None)
        for sink, source in table.rest:
            self.copy(sink, source)

    def wait(self, timeout_seconds: float) -> None:
        """Return once every queued copy has arrived; raise TransferTimeout if one does not.

        After a timeout the buffers are still being written, and stay held.
        """
        what = f"{len(self._held)} copies of device {self._device} did not all arrive"
        with _current(self._device):
            _until(self._is_idle, timeout_seconds, what)
        self._held.clear()
        self._queued_bytes = [0] * len(self._streams)

    def close(self) -> None:
        """Let go of the streams and tables. Safe to repeat.

        What is still on its way is kept for good: nobody would notice its arrival.
        """
        if self._held:
            with suppress(TransportError):
                self.wait(0)
            _abandoned.extend(self._held)
        with _current(self._device):
            while self._streams:
                _call("cuStreamDestroy_v2", self._streams.pop())
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
            _check("cuStreamQuery", code)
        return True

    def _stream(self, nbytes: int) -> c_void_p:
        """Return the stream with the least to do, and count these bytes to it."""
        index = self._queued_bytes.index(min(self._queued_bytes))
        self._queued_bytes[index] += nbytes
        return self._streams[index]

    def _queue_flat(self, sink: int, source: int, nbytes: int) -> None:
        for start in range(0, nbytes, self._piece_bytes):
            piece = min(self._piece_bytes, nbytes - start)
            stream = self._stream(piece)
            _check("cuMemcpyAsync", self._copy_1d(sink + start, source + start, piece, stream))

    def _queue_rows(
        self, sink: Buffer, to: int, source: Buffer, at: int, dims: Sequence[_Dim]
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
        _call("cuMemcpy3DAsync_v2", byref(copy), stream)
