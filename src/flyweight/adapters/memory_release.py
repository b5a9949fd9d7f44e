"""Release and restore of a model's memory, while all its tensors stay the same objects.

On the host the pages go and the addresses stay: what is read there meanwhile is zeros, and
every reference, view and stride holds, whatever framework it is of. On a GPU torch's storages
are made empty and full again, and Paddle's tensors are cleared and given memory; a kernel that
reads them meanwhile fails.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from flyweight.adapters import numpy_dict, paddle_layer, torch_module
from flyweight.adapters.model import Tensor
from flyweight.adapters.sharded import Sharded
from flyweight.adapters.tree import is_model
from flyweight.errors import SpecError, StoreError, listed
from flyweight.memory import shared_mappings

_libc = ctypes.CDLL(None, use_errno=True)
_DONTNEED = 4


class ModelMemory:
    """The memory of what a model would save: an update brings all of that back, and nothing else.

    So buffers that are not saved keep theirs, and so does what shares its memory with others.
    """

    def __init__(self, thing: object) -> None:
        self._thing = thing
        self._storages: list[tuple[Any, int]] = []
        self._cleared: list[list[Any]] = []
        """Paddle's tensors on a GPU, those of one memory together."""
        self._is_home = True

    @property
    def is_home(self) -> bool:
        """False while the memory is given back."""
        return self._is_home

    def release(self) -> int:
        """Give the memory back and return how many bytes went. Safe to repeat.

        Nothing is given back if some of it lies in memory that other processes see.
        """
        if not self._is_home:
            return 0
        spans: dict[tuple[int, int], str] = {}
        on_devices: dict[int, tuple[Any, set[tuple[int, int]]]] = {}
        of_paddle: dict[tuple[int, int, int], list[Any]] = {}
        for name, leaf in _leaves(self._thing, ""):
            tensor = _tensor(leaf)
            if tensor is None or tensor.buffer is None or not tensor.spec.nbytes:
                continue
            start, end = tensor.buffer.span
            if end - start != tensor.spec.nbytes:
                continue  # what is in its gaps is not its own
            if tensor.buffer.device is None:
                spans[start, end] = name
            elif paddle_layer.is_tensor(leaf):
                if tensor.buffer.is_contiguous and not leaf.is_dist():
                    of_paddle.setdefault((tensor.buffer.device, start, end), []).append(leaf)
            else:
                storage = _local(leaf).untyped_storage()
                on_devices.setdefault(storage._cdata, (storage, set()))[1].add((start, end))
        shared = list(shared_mappings())
        fixed = [
            name
            for (start, end), name in spans.items()
            if any(start < each.end and each.start < end for each in shared)
        ]
        if fixed:
            raise SpecError(
                f"{len(fixed)} tensors lie in memory that others may use: {listed(fixed)}; it "
                f"cannot be given back"
            )
        given = sum(_give_back(start, end) for start, end in spans)
        self._storages = [
            (storage, storage.nbytes())
            for storage, parts in on_devices.values()
            if storage.resizable() and sum(end - start for start, end in parts) == storage.nbytes()
        ]
        for storage, nbytes in self._storages:
            storage.resize_(0)
            given += nbytes
        given += self._clear(of_paddle)
        if self._storages:
            sys.modules["torch"].cuda.empty_cache()  # the allocator would keep it for itself
        self._is_home = False
        return given

    def _clear(self, found: Mapping[tuple[int, int, int], list[Any]]) -> int:
        """Clear Paddle's tensors that share their memory whole or not at all; return its bytes."""
        given, last = 0, (-1, 0)
        groups: list[list[tuple[int, int, int]]] = []
        for device, start, end in sorted(found):
            if (device, start) >= last:
                groups.append([])
            groups[-1].append((device, start, end))
            last = max(last, (device, end))
        for group in groups:
            tensors = [tensor for span in group for tensor in found[span]]
            # Views of other tensors would not be views of them when they are restored.
            if len(group) == 1 and len({tensor.dtype for tensor in tensors}) == 1:
                for tensor in tensors:
                    tensor._clear_data()
                self._cleared.append(tensors)
                given += group[0][2] - group[0][1]
        return given

    def restore(self) -> None:
        """Have memory again, as much as before; what is in it is anything. Safe to repeat."""
        for tensors in self._cleared:
            paddle_layer.give_memory(tensors)
        for storage, nbytes in self._storages:
            if not storage.nbytes():
                storage.resize_(nbytes)
        self._storages, self._cleared, self._is_home = [], [], True


def _leaves(thing: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a model that it would save, with a name for each."""
    states = (of(thing) for of in (torch_module.state_of, paddle_layer.state_of))
    thing = next((state for state in states if state is not None), thing)
    for key, leaf in thing.items() if isinstance(thing, Mapping) else enumerate(thing):
        name = f"{prefix}.{key}" if prefix else str(key)
        local = leaf.tensor if isinstance(leaf, Sharded) else leaf
        if local is not None and is_model(local):
            yield from _leaves(local, name)
        elif hasattr(local, "shape") and hasattr(local, "dtype"):
            yield name, local


def _local(leaf: Any) -> Any:
    """Return what of a distributed tensor is here."""
    if hasattr(leaf, "_local_tensor"):
        return leaf._local_tensor
    return leaf._local_value() if hasattr(leaf, "is_dist") and leaf.is_dist() else leaf


def _tensor(leaf: Any) -> Tensor | None:
    local = _local(leaf)
    found = (of.tensor_of(local) for of in (torch_module, paddle_layer, numpy_dict))
    return next((each for each in found if each is not None), None)


def _give_back(start: int, end: int) -> int:
    """Give the whole pages inside a span back, and return their bytes."""
    page = mmap.PAGESIZE
    start, end = -(-start // page) * page, end // page * page
    if end <= start:
        return 0
    if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED):
        code = ctypes.get_errno()
        raise StoreError(
            code, f"{end - start} bytes of weights stay where they are: {os.strerror(code)}"
        )
    return end - start
