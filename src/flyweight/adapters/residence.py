"""Residence: a model's memory given back and taken again, while all its tensors stay who they are.

On the host the pages go and the addresses stay: what is read there meanwhile is zeros, and
every reference, view and stride holds, whatever framework it is of. On a GPU torch's storages
are made empty and full again; a kernel that reads them meanwhile fails.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from flyweight.adapters import numpy_dict, paddle_layer, torch_module
from flyweight.adapters.model import is_model
from flyweight.adapters.sharded import Sharded
from flyweight.errors import SpecError, StoreError, listed

_libc = ctypes.CDLL(None, use_errno=True)
_DONTNEED = 4


class Residence:
    """The memory of one model's tensors: parameters, and buffers whether they are saved or not."""

    def __init__(self, thing: object) -> None:
        self._thing = thing
        self._storages: list[tuple[Any, int]] = []
        self._is_home = True

    @property
    def is_home(self) -> bool:
        """False while the memory is given back."""
        return self._is_home

    def release(self) -> int:
        """Give the memory back and return how many bytes went. Safe to repeat.

        Nothing is given back if some of it cannot be.
        """
        if not self._is_home:
            return 0
        spans: dict[tuple[int, int], str] = {}
        storages: dict[int, tuple[Any, int]] = {}
        fixed = []
        for name, leaf in _leaves(self._thing, ""):
            storage = _storage(leaf)
            if storage is not None and storage.device.type != "cpu":
                if not storage.resizable():
                    fixed.append(name)
                storages[storage._cdata] = (storage, storage.nbytes())
            else:
                address, nbytes = _span(leaf) if storage is None else _span_of_storage(storage)
                if nbytes:
                    spans[address, nbytes] = name
        shared = _shared_mappings()
        fixed += [
            name
            for (address, nbytes), name in spans.items()
            if any(address < end and start < address + nbytes for start, end in shared)
        ]
        if fixed:
            raise SpecError(
                f"{len(fixed)} tensors lie in memory that others may use: {listed(fixed)}; it "
                f"cannot be given back"
            )
        given = sum(_give_back(address, nbytes) for address, nbytes in spans)
        self._storages = list(storages.values())
        for storage, nbytes in self._storages:
            storage.resize_(0)
            given += nbytes
        if self._storages:
            sys.modules["torch"].cuda.empty_cache()  # the allocator would keep it for itself
        self._is_home = False
        return given

    def restore(self) -> None:
        """Have memory again, as much as before; what is in it is anything. Safe to repeat."""
        for storage, nbytes in self._storages:
            if not storage.nbytes():
                storage.resize_(nbytes)
        self._storages, self._is_home = [], True


def _leaves(thing: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield all tensors of a model, with a name for each."""
    parts = next(
        (p for of in (torch_module.parts_of, paddle_layer.parts_of) if (p := of(thing))), None
    )
    if parts is not None:
        for part in parts:
            yield from _leaves(part, prefix)
        return
    for key, leaf in thing.items() if isinstance(thing, Mapping) else enumerate(thing):
        name = f"{prefix}.{key}" if prefix else str(key)
        local = leaf.tensor if isinstance(leaf, Sharded) else leaf
        if local is not None and is_model(local):
            yield from _leaves(local, name)
        elif hasattr(local, "shape") and hasattr(local, "dtype"):
            yield name, local


def _storage(leaf: Any) -> Any:
    """Return a torch tensor's storage; None for others."""
    local = leaf._local_tensor if hasattr(leaf, "_local_tensor") else leaf
    return local.untyped_storage() if hasattr(local, "untyped_storage") else None


def _span_of_storage(storage: Any) -> tuple[int, int]:
    return storage.data_ptr(), storage.nbytes()


def _span(leaf: Any) -> tuple[int, int]:
    """Return where the elements of an array or a Paddle tensor lie, from first to last byte."""
    if hasattr(leaf, "is_dist") and leaf.is_dist():
        leaf = leaf._local_value()
    tensor = numpy_dict.tensor_of(leaf) or paddle_layer.tensor_of(leaf)
    if tensor is None or not tensor.spec.nbytes:
        return 0, 0
    start, end = tensor.host.span
    return start, end - start


def _give_back(address: int, nbytes: int) -> int:
    """Give the whole pages inside a span back, and return their bytes."""
    page = mmap.PAGESIZE
    start, end = -(-address // page) * page, (address + nbytes) // page * page
    if end <= start:
        return 0
    if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED):
        code = ctypes.get_errno()
        raise StoreError(
            code, f"{end - start} bytes of weights stay where they are: {os.strerror(code)}"
        )
    return end - start


def _shared_mappings() -> list[tuple[int, int]]:
    """Return where this process sees memory of others: there pages would not go by themselves."""
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            place, mode, _ = line.split(" ", 2)
            if mode.endswith("s"):
                start, end = (int(each, 16) for each in place.split("-"))
                found.append((start, end))
    return found
