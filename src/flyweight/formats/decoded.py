"""A store with extra files: arrays that are not stored row-major, decoded when they are read.

Such an array cannot be read in ranges, so it is decoded as a whole; only the last one is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from flyweight.memory import Bytes
from flyweight.ports import Store


class DecodedStore:
    """Another store, with files added whose bytes are computed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._decoders: dict[str, Callable[[], Bytes]] = {}
        self._last: tuple[str, Bytes] | None = None
        self._lock = threading.Lock()

    def add(self, file: str, decode: Callable[[], Bytes]) -> str:
        """Add a file whose bytes `decode` makes, and return its name."""
        name = f"{file}#{len(self._decoders)}"
        self._decoders[name] = decode
        return name

    @property
    def place(self) -> str:
        return self._store.place

    def names(self) -> list[str]:
        return self._store.names()

    def size(self, name: str) -> int:
        return self._store.size(name)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return self._store.read(name, offset, nbytes)

    def window(
        self, name: str, offset: int, nbytes: int, staging: Bytes, *, may_map: bool = True
    ) -> AbstractContextManager[Bytes]:
        if name not in self._decoders:
            return self._store.window(name, offset, nbytes, staging, may_map=may_map)
        with self._lock:
            if self._last is None or self._last[0] != name:
                self._last = name, self._decoders[name]()
            return nullcontext(self._last[1][offset : offset + nbytes])

    def is_cached(self, name: str, offset: int, nbytes: int) -> bool:
        return name not in self._decoders and self._store.is_cached(name, offset, nbytes)

    def read_into(self, name: str, offset: int, goals: Sequence[Bytes]) -> None:
        self._store.read_into(name, offset, goals)

    def share_reads(self) -> None:
        self._store.share_reads()

    def close(self) -> None:
        self._store.close()
