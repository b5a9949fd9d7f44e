"""Release and restore of a model's memory, while all its tensors stay the same objects.

On the host the pages are freed and the addresses stay: reads return zeros meanwhile, and
every reference, view and stride holds, in any framework. On a GPU, torch's storages are
resized to nothing and back, and Paddle's tensors are cleared and given memory again; a kernel
that reads them meanwhile fails.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Mapping
from typing import Any

from flyweight.adapters import paddle_layer
from flyweight.adapters.model import tensor_of
from flyweight.adapters.sharded import local_of
from flyweight.adapters.tree import walk
from flyweight.errors import SpecError, StoreError, listed
from flyweight.memory import shared_mappings

_libc = ctypes.CDLL(None, use_errno=True)
_DONTNEED = 4


class ModelMemory:
    """The memory of the tensors that a model saves: an update brings back those, and no others.

    Buffers that are not saved keep their memory, and so do tensors that share it with others.
    """

    def __init__(self, thing: object) -> None:
        self._thing = thing
        self._storages: list[tuple[Any, int]] = []
        self._cleared: list[list[Any]] = []
        """Paddle's tensors on a GPU; those that share memory are together."""
        self._is_released = False

    def release(self) -> int:
        """Free the memory and return how many bytes were freed. Safe to repeat.

        Raises SpecError, and frees nothing, if other processes share some of it.
        """
        if self._is_released:
            return 0
        spans: dict[tuple[int, int], str] = {}
        on_devices: dict[int, tuple[Any, set[tuple[int, int]]]] = {}
        of_paddle: dict[tuple[int, int, int], list[Any]] = {}
        for name, leaf, _ in walk(self._thing):
            local = local_of(leaf)
            tensor = tensor_of(local)
            if tensor is None or tensor.buffer is None or not tensor.spec.nbytes:
                continue
            start, end = tensor.buffer.span
            if end - start != tensor.spec.nbytes:
                continue  # the memory between its elements is not its own
            if tensor.buffer.device is None:
                spans[start, end] = name
            elif paddle_layer.is_tensor(local):
                is_dist = paddle_layer.is_tensor(leaf) and leaf.is_dist()
                if tensor.buffer.is_contiguous and not is_dist:
                    of_paddle.setdefault((tensor.buffer.device, start, end), []).append(local)
            else:
                storage = local.untyped_storage()
                on_devices.setdefault(storage._cdata, (storage, set()))[1].add((start, end))
        shared = list(shared_mappings())
        fixed = [
            name
            for (start, end), name in spans.items()
            if any(start < each.end and each.start < end for each in shared)
        ]
        if fixed:
            raise SpecError(
                f"{len(fixed)} tensors are in memory that other processes may use: "
                f"{listed(fixed)}; it cannot be released"
            )
        freed = sum(_free_pages(start, end) for start, end in spans)
        self._storages = [
            (storage, storage.nbytes())
            for storage, parts in on_devices.values()
            if storage.resizable() and sum(end - start for start, end in parts) == storage.nbytes()
        ]
        for storage, nbytes in self._storages:
            storage.resize_(0)
            freed += nbytes
        freed += self._clear(of_paddle)
        if self._storages:
            sys.modules["torch"].cuda.empty_cache()  # or torch's allocator keeps it
        self._is_released = True
        return freed

    def _clear(self, found: Mapping[tuple[int, int, int], list[Any]]) -> int:
        """Clear Paddle's tensors that share all of their memory or none; return the bytes."""
        freed, last = 0, (-1, 0)
        groups: list[list[tuple[int, int, int]]] = []
        for device, start, end in sorted(found):
            if (device, start) >= last:
                groups.append([])
            groups[-1].append((device, start, end))
            last = max(last, (device, end))
        for group in groups:
            tensors = [tensor for span in group for tensor in found[span]]
            # A restored view would no longer be a view of the other tensor.
            if len(group) == 1 and len({tensor.dtype for tensor in tensors}) == 1:
                for tensor in tensors:
                    tensor._clear_data()
                self._cleared.append(tensors)
                freed += group[0][2] - group[0][1]
        return freed

    def restore(self) -> None:
        """Allocate the memory again, with any content. Safe to repeat."""
        for tensors in self._cleared:
            paddle_layer.give_memory(tensors)
        for storage, nbytes in self._storages:
            if not storage.nbytes():
                storage.resize_(nbytes)
        self._storages, self._cleared, self._is_released = [], [], False


def _free_pages(start: int, end: int) -> int:
    """Free the whole pages inside a span, and return their bytes."""
    page = mmap.PAGESIZE
    start, end = -(-start // page) * page, end // page * page
    if end <= start:
        return 0
    if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED):
        code = ctypes.get_errno()
        raise StoreError(
            code, f"{end - start} bytes of weights cannot be freed: {os.strerror(code)}"
        )
    return end - start
