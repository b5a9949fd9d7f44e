"""Futexes: wait until a word of shared memory changes, and wake the waiting threads.

The kernel compares and sleeps in one step, so no change is missed. A futex has no state
outside the word itself, so nothing has to be cleaned up after a process dies.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

from flyweight.errors import SpecError, StoreError

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_number = _NUMBERS.get(platform.machine())


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def check_supported() -> None:
    if _number is None:
        raise SpecError(
            f"status cells need one of {', '.join(_NUMBERS)}, this is {platform.machine()}"
        )


def sleep_while(address: int, value: int, timeout_seconds: float) -> None:
    """Return when the 4-byte word at `address` may differ from `value`, or at the timeout."""
    if timeout_seconds <= 0:
        return
    whole = int(timeout_seconds)
    time = _Timespec(whole, int(1e9 * (timeout_seconds - whole)))
    _call(address, _WAIT, value, ctypes.byref(time), (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT))


def wake(address: int) -> None:
    """Wake all threads, of any process, that wait on the word at `address`."""
    _call(address, _WAKE, _ALL, None, ())


def _call(address: int, operation: int, value: int, time: object, fine: tuple[int, ...]) -> None:
    # ctypes releases the GIL during the call.
    result = _libc.syscall(
        ctypes.c_long(_number or -1),
        ctypes.c_void_p(address),
        ctypes.c_int(operation),
        ctypes.c_uint32(value),
        time,
        None,
        0,
    )
    if result < 0 and (code := ctypes.get_errno()) not in fine:
        raise StoreError(code, f"futex at {address:#x}: {os.strerror(code)}")
