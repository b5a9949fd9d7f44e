"""The CUDA driver through ctypes: calls, contexts, memory, and memory of other processes.

Every call uses a device's primary context, the one that frameworks use. The context is pushed
for the call and popped again, so any thread may call and no thread's current device changes.
Importing this needs no driver: without one, `num_devices` is 0.
"""

from __future__ import annotations

import ctypes
import threading
import uuid as uuids
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any

from flyweight.errors import (
    HandleGone,
    MissingDependency,
    TransferTimeout,
    TransportError,
)
from flyweight.memory import Buffer

IPC_BYTES = 64
_SPIN_SECONDS = 0.05  # a round takes about 8 ms, and a thread that sleeps wakes 60 us late

_INVALID_VALUE, _INVALID_HANDLE = 1, 400
_POSIX_FD = 1
_READ, _READ_WRITE = 1, 3
_IPC_CAPABLE, _HANDLE_TYPES, _POOL, _IS_MANAGED, _BUFFER_ID = 10, 14, 17, 8, 7
_MAPPING_BYTES, _MAPPING_START, _BLOCK_ID = 18, 19, 20


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", c_char * IPC_BYTES),)


class _Access(ctypes.Structure):
    _fields_ = (("location_type", c_int), ("location", c_int), ("rights", c_int))


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostRegister_v2": (c_uint64, c_size_t, c_uint),
    "cuMemHostUnregister": (c_uint64,),
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
            "CUDA needs libcuda.so.1, which is not found here; install NVIDIA's driver"
        ) from cause


@cache
def function(name: str) -> Callable[..., int]:
    """Return a function of the driver, to call often or to look at its code."""
    try:
        found = getattr(_library(), name)
    except AttributeError as cause:
        raise MissingDependency(
            f"this CUDA driver has no {name!r}; install a driver of CUDA 12.4 or later"
        ) from cause
    found.argtypes = _ARGUMENTS[name]
    return found  # type: ignore[no-any-return]


def error_text(code: int) -> str:
    texts = []
    for name in ("cuGetErrorName", "cuGetErrorString"):
        text = c_char_p()
        function(name)(code, byref(text))
        texts.append((text.value or b"unknown").decode())
    return ": ".join(texts)


def check(name: str, code: int) -> None:
    """Raise TransportError if a function of the driver did not return success."""
    if code:
        raise TransportError(f"{name} answered {code}, {error_text(code)}")


def call(name: str, *args: object) -> None:
    check(name, function(name)(*args))


@cache
def _init() -> None:
    call("cuInit", 0)


@cache
def primary_context(device: int) -> c_void_p:
    _init()
    context = c_void_p()
    call("cuDevicePrimaryCtxRetain", byref(context), device)
    return context


@contextmanager
def current_context(device: int) -> Iterator[None]:
    call("cuCtxPushCurrent_v2", primary_context(device))
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", byref(c_void_p()))


def wait_until(is_done: Callable[[], bool], timeout_seconds: float, what: str) -> None:
    """Return once `is_done`; raise TransferTimeout, which says `what`, after the timeout."""
    start = monotonic()
    while not is_done():
        waited = monotonic() - start
        if waited > timeout_seconds:
            raise TransferTimeout(f"{what} in {timeout_seconds:g} s")
        sleep(0 if waited < _SPIN_SECONDS else 0.0005)


# Devices.


def num_devices() -> int:
    """Return how many devices this process sees; 0 without a driver."""
    count = c_int()
    try:
        _init()
        call("cuDeviceGetCount", byref(count))
    except (MissingDependency, TransportError):
        return 0
    return count.value


@cache
def uuid(device: int) -> str:
    """Return the device's name in nvidia-smi, which is the same in every process."""
    _init()
    raw = (c_char * 16)()
    call("cuDeviceGetUuid_v2", raw, device)
    return f"GPU-{uuids.UUID(bytes=raw.raw)}"


def device_named(name: str) -> int | None:
    """Return the number of a device in this process, or None if the process does not see it."""
    return next((device for device in range(num_devices()) if uuid(device) == name), None)


def synchronize(device: int, timeout_seconds: float) -> None:
    """Wait until everything that this process has queued on the device, on any stream, is done.

    Raises TransferTimeout; the thread that waits for the driver is then abandoned.
    """
    waiter = _waiters.pop() if _waiters else _new_waiter()
    devices, answers = waiter
    devices.put(device)
    try:
        error = answers.get(timeout=max(timeout_seconds, 0))
    except Empty:
        raise TransferTimeout(f"device {device} was not done in {timeout_seconds:g} s") from None
    _waiters.append(waiter)
    if error is not None:
        raise error


_Waiter = tuple["SimpleQueue[int]", "SimpleQueue[TransportError | None]"]
"""A thread that waits for devices: those to wait for, and for each the error or None."""
_waiters: list[_Waiter] = []


def _new_waiter() -> _Waiter:
    """Start a thread that waits for devices: the driver's own wait has no deadline."""
    devices: SimpleQueue[int] = SimpleQueue()
    answers: SimpleQueue[TransportError | None] = SimpleQueue()

    def wait() -> None:
        while True:
            device = devices.get()
            try:
                with current_context(device):
                    call("cuCtxSynchronize")
                answers.put(None)
            except TransportError as error:
                answers.put(error)

    threading.Thread(target=wait, name="cuda-wait", daemon=True).start()
    return devices, answers


# Memory of this process.


def allocate(device: int, nbytes: int) -> Buffer:
    """Return new memory, which other processes can map; it stays until `free`."""
    address = c_uint64()
    with current_context(device):
        call("cuMemAlloc_v2", byref(address), max(nbytes, 1))
    return Buffer.flat_at(address.value, nbytes, None, device=device)


def free(buffer: Buffer) -> None:
    """Free what `allocate` returned; waits for the device if that is busy."""
    assert buffer.device is not None, "the host's memory is not allocated by the driver"
    with current_context(buffer.device):
        call("cuMemFree_v2", buffer.address)


@dataclass(frozen=True)
class Allocation:
    """What the driver knows about the memory at an address."""

    start: int
    nbytes: int
    number: int
    """Unique in its process: memory that is allocated again at the same address has another."""
    can_ipc: bool
    can_export: bool
    is_managed: bool


def allocation_at(device: int, address: int) -> Allocation:
    """Return the allocation that an address lies in; for mapped memory, the mapped one."""
    with current_context(device):
        can_ipc = bool(_attribute(address, _IPC_CAPABLE, c_int()))
        pool = _attribute(address, _POOL, c_uint64())
        is_managed = bool(_attribute(address, _IS_MANAGED, c_int()))
        is_fd = bool(_attribute(address, _HANDLE_TYPES, c_uint64()) & _POSIX_FD)
        if can_ipc or pool or is_managed:
            start, nbytes = c_uint64(), c_size_t()
            call("cuMemGetAddressRange_v2", byref(start), byref(nbytes), address)
            place = start.value, nbytes.value, _attribute(address, _BUFFER_ID, c_uint64())
        else:
            place = (
                _attribute(address, _MAPPING_START, c_uint64()),
                _attribute(address, _MAPPING_BYTES, c_size_t()),
                _attribute(address, _BLOCK_ID, c_uint64()),
            )
    return Allocation(*place, can_ipc, is_fd and not pool, is_managed)


def _attribute(address: int, attribute: int, value: Any) -> int:
    call("cuPointerGetAttribute", byref(value), attribute, address)
    return int(value.value or 0)


# Memory of other processes.


def ipc_handle(device: int, address: int) -> bytes:
    """Return a handle by which another process opens the whole allocation at an address."""
    handle = _IpcHandle()
    with current_context(device):
        call("cuIpcGetMemHandle", byref(handle), address)
    return bytes(handle)


def open_ipc(device: int, handle: bytes) -> int:
    """Map an allocation of another process, and return its address here.

    Raises HandleGone if it was freed, or its process is gone.
    """
    address = c_uint64()
    with current_context(device):
        peer_access = 1
        struct = _IpcHandle.from_buffer_copy(handle)
        code = function("cuIpcOpenMemHandle_v2")(byref(address), struct, peer_access)
    if code in (_INVALID_VALUE, _INVALID_HANDLE):  # freed memory, dead process
        raise HandleGone(f"no memory of another process has this handle: {error_text(code)}")
    check("cuIpcOpenMemHandle_v2", code)
    return address.value


def close_ipc(device: int, address: int) -> None:
    """Unmap what `open_ipc` mapped."""
    with current_context(device):
        call("cuIpcCloseMemHandle", address)


def export_fd(device: int, address: int) -> int:
    """Return a file that stands for the mapped memory at an address and keeps it alive."""
    fd, memory = c_int(-1), c_uint64()
    with current_context(device):
        call("cuMemRetainAllocationHandle", byref(memory), address)
        try:
            call("cuMemExportToShareableHandle", byref(fd), memory, _POSIX_FD, 0)
        finally:
            call("cuMemRelease", memory)
    return fd.value


def map_fds(device: int, files: Sequence[tuple[int, int]]) -> int:
    """Map the memory of (file, bytes) pairs one after the other, and return its address.

    The files may be closed afterwards. Maps read-only if the driver supports it.
    """
    start, total = c_uint64(), sum(nbytes for _, nbytes in files)
    mapped: list[int] = []
    with current_context(device):
        call("cuMemAddressReserve", byref(start), total, 0, 0, 0)
        try:
            for fd, nbytes in files:
                memory = c_uint64()
                call("cuMemImportFromShareableHandle", byref(memory), fd, _POSIX_FD)
                try:
                    call("cuMemMap", start.value + sum(mapped), nbytes, 0, memory, 0)
                finally:
                    call("cuMemRelease", memory)
                mapped.append(nbytes)
            access = _Access(1, device, _READ)
            if function("cuMemSetAccess")(start, total, byref(access), 1):
                access.rights = _READ_WRITE
                call("cuMemSetAccess", start, total, byref(access), 1)
        except TransportError:
            _unmap(start.value, mapped, total)
            raise
    return start.value


def unmap(device: int, address: int, sizes: Sequence[int]) -> None:
    """Unmap what `map_fds` mapped, with the same sizes."""
    with current_context(device):
        _unmap(address, sizes, sum(sizes))


def _unmap(address: int, sizes: Sequence[int], total: int) -> None:
    at = address
    for nbytes in sizes:
        call("cuMemUnmap", at, nbytes)
        at += nbytes
    call("cuMemAddressFree", address, total)
