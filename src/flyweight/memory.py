"""Memory: where a tensor's elements lie, and staging memory that is reused.

The kernel zeroes fresh pages one fault at a time, which on many machines is several times slower
than copying into pages that exist already. So staging blocks are kept on a small process-wide shelf
instead of being returned to the system.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flyweight.errors import SpecError
from flyweight.spec.box import Box, strides_of

Bytes = NDArray[np.uint8]
Items = NDArray[Any]
"""An array whose dtype only gives the width of an item; nothing here interprets its values."""

_LIBC = ctypes.CDLL(None)


@cache
def item_dtype(item_bytes: int) -> np.dtype[Any]:
    """Return a numpy dtype of that width, which numpy copies without interpreting the bytes."""
    return np.dtype(f"<u{item_bytes}" if item_bytes in (1, 2, 4, 8) else f"V{item_bytes}")


def items_of(data: Bytes, item_bytes: int, shape: tuple[int, ...]) -> Items:
    """View row-major bytes as items of `shape`."""
    return data.view(item_dtype(item_bytes)).reshape(shape)


def empty_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without elements that numpy can hold, even if dims of `shape` are huge."""
    return tuple(min(size, 1) for size in shape)


def block_of(items: Items, box: Box) -> Items:
    """View a box of an array without a copy, also of a scalar, which plain indexing would copy."""
    index: tuple[Any, ...] = (Ellipsis, *box.slices)
    block: Items = items[index]
    return block


def bytes_of(view: memoryview | bytes | bytearray | mmap.mmap) -> Bytes:
    """View anything with the buffer protocol as a flat array of bytes."""
    return np.frombuffer(view, np.uint8) if len(view) else np.empty(0, np.uint8)


class Buffer(msgspec.Struct, frozen=True, gc=False):
    """Items at an address, `strides` in bytes; `owner` keeps the memory alive.

    Models have very many of them. So it is a struct, which is made twenty times as fast as a frozen
    dataclass, and Python's collector of cycles does not visit it: an owner does not refer back.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    owner: object
    is_writable: bool = True
    device: int | None = None
    """The number of the CUDA device that the address belongs to; None for the host's memory."""

    @classmethod
    def flat_at(
        cls, address: int, nbytes: int, owner: object, *, device: int | None = None
    ) -> Buffer:
        """Return a buffer of contiguous bytes."""
        return cls(address, (nbytes,), (1,), 1, owner, device=device)

    @classmethod
    def of(cls, data: Bytes) -> Buffer:
        """Return a buffer of an array of bytes, which the buffer keeps alive."""
        address = data.__array_interface__["data"][0]
        return cls(address, data.shape, data.strides, 1, data, bool(data.flags.writeable))

    def block(self, items: Box) -> Buffer:
        """Return the buffer of a box of the items."""
        corner = sum(at * stride for at, stride in zip(items.offset, self.strides, strict=True))
        return replace(self, address=self.address + corner, shape=items.shape)

    @property
    def nbytes(self) -> int:
        return self.item_bytes * Box.whole(self.shape).num_elements

    @property
    def is_contiguous(self) -> bool:
        """True if the items lie row-major without gaps; dims of size 1 have no stride to check."""
        wanted = (self.item_bytes * stride for stride in strides_of(self.shape))
        return self.nbytes == 0 or all(
            size == 1 or stride == want
            for size, stride, want in zip(self.shape, self.strides, wanted, strict=True)
        )

    @property
    def span(self) -> tuple[int, int]:
        """The addresses from the first byte of any item to the end of the last."""
        reach = [s * (n - 1) for n, s in zip(self.shape, self.strides, strict=True) if n]
        low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
        return self.address + low, self.address + high + self.item_bytes

    @property
    def is_folded(self) -> bool:
        """True unless each item certainly has bytes of its own: the dims nest without overlap."""
        if not self.nbytes:
            return False
        reach = self.item_bytes
        dims = zip(self.strides, self.shape, strict=True)
        for stride, size in sorted((abs(stride), size) for stride, size in dims if size > 1):
            if stride < reach:
                return True
            reach += stride * (size - 1)
        return False

    def items(self) -> Items:
        """View the items in place; the memory must be the host's."""
        assert self.device is None, f"the CPU cannot read the items of device {self.device}"
        dtype = item_dtype(self.item_bytes)
        if self.nbytes == 0:
            return np.empty(empty_shape(self.shape), dtype)
        low, high = self.span
        span = (ctypes.c_char * (high - low)).from_address(low)
        array: Items = np.ndarray(
            self.shape, dtype, memoryview(span), offset=self.address - low, strides=self.strides
        )
        return array

    def flat(self) -> Bytes | None:
        """View the bytes in row-major order in place, or return None if that is not their order."""
        return self.items().reshape(-1).view(np.uint8) if self.is_contiguous else None


_WORK: Any = 10**5  # steps that numpy may take to compare interleaved strides


def first_overlap(buffers: Mapping[str, Buffer]) -> tuple[str, str] | None:
    """Return two names whose buffers share a byte, or may share one, or None.

    Buffers of different devices never overlap: each device has addresses of its own.
    """
    by_device: dict[int | None, list[tuple[int, int, str]]] = {}
    for name, buffer in buffers.items():
        if buffer.nbytes:
            by_device.setdefault(buffer.device, []).append((*buffer.span, name))
    for spans in by_device.values():
        live: list[tuple[int, str]] = []
        for start, end, name in sorted(spans):
            live = [(other_end, other) for other_end, other in live if other_end > start]
            for _, other in live:
                if _may_overlap(buffers[other], buffers[name]):
                    return other, name
            live.append((end, name))
    return None


def _may_overlap(a: Buffer, b: Buffer) -> bool:
    """True if two buffers of one device share a byte, or if it would take too long to find out."""
    # numpy compares addresses and reads nothing, so addresses of a device are fine.
    first, second = (replace(each, device=None).items() for each in (a, b))
    try:
        return np.shares_memory(first, second, max_work=_WORK)
    except np.exceptions.TooHardError:
        return True


def bytes_for(nbytes: int, into: Bytes | None) -> Bytes:
    """Return memory for `nbytes`: the beginning of `into`, or fresh memory."""
    if into is None:
        return np.empty(nbytes, np.uint8)
    if len(into) < nbytes:
        raise SpecError(f"there is space for {len(into)} bytes, {nbytes} are to be read")
    return into[:nbytes]


def available_bytes() -> int:
    """Return how many bytes this process may still allocate, by system and cgroup limits."""
    found = [2**63]
    with suppress(OSError, ValueError, StopIteration), open("/proc/meminfo", "rb") as meminfo:
        line = next(line for line in meminfo if line.startswith(b"MemAvailable:"))
        found.append(1024 * int(line.split()[1]))
    root = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError, KeyError):  # no limit, or cgroups version 1
        limit = int((root / "memory.max").read_text())
        used = int((root / "memory.current").read_text())
        usage = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        cached = int(usage["inactive_file"]) + int(usage["active_file"])  # the kernel reclaims it
        found.append(max(limit - used + cached, 0))
    return min(found)


@dataclass(frozen=True)
class SharedMapping:
    """Memory of this process that is a file's, and that other processes may map too."""

    start: int
    end: int
    offset: int
    file: tuple[int, int]
    """The file's device and inode."""


def shared_mappings() -> Iterator[SharedMapping]:
    """Yield the memory of this process that other processes may share."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, rights, offset, device, inode, *_ = line.split(None, 5)
            if rights[3] == "s":
                start, end = (int(each, 16) for each in span.split("-"))
                major, minor = (int(each, 16) for each in device.split(":"))
                file = os.makedev(major, minor), int(inode)
                yield SharedMapping(start, end, int(offset, 16), file)


def without_fork(data: Bytes) -> None:
    """Exclude a mapping from forked children, which would keep its memory from being freed."""
    address = data.__array_interface__["data"][0]
    start = address - address % mmap.PAGESIZE
    nbytes = -(-(address + len(data) - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    if nbytes:
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_DONTFORK)


def page_memory(nbytes: int) -> Bytes:
    """Return page-aligned, zeroed, private memory: a forked child gets a copy."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return bytes_of(mmap.mmap(-1, max(nbytes, 1), flags=flags))[:nbytes]


class Staging:
    """Lends page-aligned blocks, and keeps up to `shelf_bytes` of them for the next call."""

    def __init__(
        self,
        *,
        shelf_bytes: int,
        allocate: Callable[[int], Bytes] = page_memory,
        max_blocks: int = 1 << 30,
    ) -> None:
        self.allocate, self._shelf_bytes, self._max_blocks = allocate, shelf_bytes, max_blocks
        self._shelf: list[Bytes] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[Bytes]:
        """Lend a block of exactly `nbytes` until the end of the `with` statement."""
        block = self._take(nbytes)
        try:
            yield block[:nbytes]
        finally:
            with self._lock:
                if sum(each.nbytes for each in self._shelf) + block.nbytes <= self._shelf_bytes:
                    self._shelf.append(block)
                    del self._shelf[: -self._max_blocks]

    def _take(self, nbytes: int) -> Bytes:
        with self._lock:
            for index, block in enumerate(self._shelf):
                # A block that is much larger would exceed the caller's memory budget.
                if nbytes <= block.nbytes <= nbytes + nbytes // 8:
                    return self._shelf.pop(index)
        return self.allocate(nbytes)


_pauses = 0
_pause_lock = threading.Lock()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector of cycles while many small records are made.

    Planning makes no cycles, and searching for them again and again doubles its time for a model of
    many thousand tensors.
    """
    global _pauses  # noqa: PLW0603
    with _pause_lock:
        was_enabled = gc.isenabled() or _pauses > 0
        if was_enabled:
            _pauses += 1
            gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            with _pause_lock:
                _pauses -= 1
                if _pauses == 0:
                    gc.enable()


STAGING = Staging(shelf_bytes=32 << 20)

MEMORY_BYTES = 256 << 20
"""The extra memory that a verb may use by default."""
