"""Small contiguous blocks of the host, maybe very many, copied and hashed in batches."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import xxhash

from flyweight.digest import Words
from flyweight.errors import TransferTimeout
from flyweight.memory import Bytes
from flyweight.memory_table import BufferTable

_BATCH_BYTES = 1 << 20  # copied, then digested in a core's own cache


def check_time(deadline: float, num_chunks: int) -> None:
    if monotonic() > deadline:
        raise TransferTimeout(f"{num_chunks} chunks of memory were not done in time")


class SmallBlocks:
    """Blocks that are copied and hashed by C, batch after batch."""

    def __init__(self, sink: BufferTable, source: BufferTable | None = None) -> None:
        self._address, self._nbytes = sink.address, sink.nbytes
        self._source = None if source is None else source.address
        self._owners = sink.owner, None if source is None else source.owner
        batch = np.cumsum(sink.nbytes) // _BATCH_BYTES
        cuts = (np.flatnonzero(np.diff(batch)) + 1).tolist() if len(sink) else []
        self._batches = list(pairwise([0, *cuts, len(sink)])) if len(sink) else []
        self._view_at = {
            size: (ctypes.c_char * size).from_address for size in np.unique(self._nbytes).tolist()
        }

    def __len__(self) -> int:
        return len(self._address)

    def run(
        self, deadline: float, on_progress: Callable[[int], None], *, should_hash: bool
    ) -> tuple[Words, float]:
        """Copy the blocks; return the hash of each if it should, and the seconds that took.

        Blocks without a source are only hashed.
        """
        hashes: Words = np.zeros(len(self), np.uint64)
        spent = 0.0
        for first, end in self._batches:
            check_time(deadline, len(self))
            # Objects for one batch, not for all blocks: those would take megabytes all the time.
            sinks, sizes = self._address[first:end].tolist(), self._nbytes[first:end].tolist()
            if self._source is not None:
                deque(map(ctypes.memmove, sinks, self._source[first:end].tolist(), sizes), maxlen=0)
                on_progress(sum(sizes))
            if should_hash:
                started = perf_counter()
                found = map(xxhash.xxh3_64_intdigest, self._views(sinks, sizes))
                hashes[first:end] = np.fromiter(found, np.uint64, end - first)
                spent += perf_counter() - started
        return hashes, spent

    def _views(self, addresses: list[int], sizes: list[int]) -> list[Any]:
        view_at = self._view_at
        return [view_at[size](at) for at, size in zip(addresses, sizes, strict=True)]

    def bytes(self) -> list[Bytes]:
        """Return each block's bytes, in place."""
        views = self._views(self._address.tolist(), self._nbytes.tolist())
        return [np.frombuffer(view, np.uint8) for view in views]
