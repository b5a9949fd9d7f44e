"""Copies of rows between two memories, casts on their way, and digests of what has arrived.

Everything is prepared once and runs again in every update. After any error it must be closed or
thrown away: work of the failed attempt may still be queued on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from flyweight.casts import ITEM_BYTES, PreparedCasts
from flyweight.copies import DeviceCopies, HostBlocks, PreparedDigests, seconds_left
from flyweight.cuda import driver
from flyweight.cuda.cast_kernel import DeviceCasts
from flyweight.cuda.copies import Copier
from flyweight.digest import DigestKind, Words
from flyweight.errors import DigestMismatch, PlanError, listed
from flyweight.memory import Buffer
from flyweight.memory_table import HOST, BufferTable, Integers, aligned, runs_of

_SCRATCH_BYTES = 256 << 20
_NO_BLOCKS, _NO_DIGESTS = HostBlocks(BufferTable.of([])), PreparedDigests(BufferTable.of([]))


class RowCopies:
    """Copies of rows, with the digest of each row read back from where it was written."""

    def __init__(
        self,
        sink: BufferTable,
        source: BufferTable,
        digest: DigestKind | None = None,
        cast: Integers | None = None,
    ) -> None:
        """Prepare copies.

        digest: the kind of digest that runs can return; None if they never do.
        cast: the dtypes that each row is cast from and to, or -1.
        """
        self._num_rows, self._digest = len(sink), digest
        is_cast = np.zeros(len(sink), bool) if cast is None else cast[:, 0] >= 0
        on_host = ~is_cast & (sink.device == HOST) & (source.device == HOST)
        self._on_host, self._late = np.flatnonzero(on_host), np.zeros(0, np.int64)
        self._blocks, self._late_digests = _NO_BLOCKS, _NO_DIGESTS
        self._on_devices: list[DeviceCopies] = []
        self._casts: list[_Casts] = []
        if len(self._on_host):
            self._blocks = HostBlocks(sink.take(on_host), source.take(on_host))
        if len(rows := np.flatnonzero(~is_cast & ~on_host)):
            self._on_devices = DeviceCopies.on_each(sink.take(rows), source.take(rows))
        if cast is not None and is_cast.any():
            self._casts = _prepared_casts(sink, source, cast)
        if digest is not None:  # memory that several rows write is digested after all of them
            is_late = ~on_host | doubles(sink)
            self._late = np.flatnonzero(is_late)
            self._late_digests = PreparedDigests(sink.take(is_late))
        self.overflows = 0
        """How many finite values became infinite by the casts of the last run."""
        self.digest_seconds = 0.0
        """The time of the last run for digests that were not computed while it copied."""

    def start(self, *, should_digest: bool) -> Callable[[float], Words | None]:
        """Queue the work of devices without waiting.

        Returns what copies the rest until a deadline, and returns the digest of each row.
        """
        assert self._digest is not None or not should_digest
        for copies in self._on_devices:
            copies.start()
        for casts in self._casts:
            if isinstance(casts, DeviceCasts):
                casts.start()
        if should_digest and all(each.is_ordered for each in self._on_devices):
            self._late_digests.start()
        return partial(self._run, self._digest if should_digest else None)

    def _run(self, kind: DigestKind | None, deadline: float) -> Words | None:
        early = self._blocks.run(deadline, kind)
        for copies in self._on_devices:
            copies.wait(deadline)
        self.overflows = 0
        for casts in self._casts:
            if isinstance(casts, DeviceCasts):
                counts = casts.wait(seconds_left(deadline))
            else:
                counts = casts.run(deadline)
            self.overflows += int(counts.sum())
        if kind is None:
            return None
        copied = monotonic()
        found: Words = np.zeros(self._num_rows, np.uint64)
        found[self._on_host] = early
        found[self._late] = self._late_digests.run(deadline, kind)
        self.digest_seconds = monotonic() - copied
        return found

    def close(self) -> None:
        """Free what was prepared; an error's traceback that still has it keeps no memory alive."""
        for each in (*self._on_devices, *self._casts):
            if isinstance(each, (DeviceCopies, _BouncedCasts)):
                each.close()
        self._blocks, self._late_digests = _NO_BLOCKS, _NO_DIGESTS
        self._on_devices, self._casts = [], []


def _prepared_casts(sink: BufferTable, source: BufferTable, cast: Integers) -> list[_Casts]:
    """Return what casts the rows, by the memory that they are in."""
    found: list[_Casts] = []
    rows = np.flatnonzero(cast[:, 0] >= 0)
    sinks, sources = sink.device[rows], source.device[rows]
    places = ((to, at) for to in np.unique(sinks).tolist() for at in np.unique(sources).tolist())
    for to, at in places:
        some = rows[(sinks == to) & (sources == at)]
        if not len(some):
            continue
        tables = sink.take(some), source.take(some), cast[some, 0], cast[some, 1]
        if to == at == HOST:
            found.append(PreparedCasts(*tables))
        elif to == at:
            found.append(DeviceCasts(*tables))
        elif to == HOST:
            found.append(_BouncedCasts(*tables))
        else:
            raise PlanError(
                f"a cast from device {at} to device {to} is made where the bytes come from"
            )
    return found


class _Owner:
    """Frees memory of a device once no table refers to it."""

    def __init__(self, memory: Buffer) -> None:
        self._memory = memory

    def __del__(self) -> None:
        driver.free(self._memory)


class _CastsToScratch:
    """Casts on a device into memory of its own, some rows at a time, each time into the same."""

    def __init__(self, source: BufferTable, before: Integers, after: Integers) -> None:
        width = np.array(ITEM_BYTES)[after]
        nbytes = source.shape.prod(axis=1, dtype=np.int64) * width
        runs = runs_of(aligned(nbytes)[0] // _SCRATCH_BYTES)
        self.rows = [np.arange(*run) for run in runs]
        """The rows of each batch."""
        places = [aligned(nbytes[rows]) for rows in self.rows]
        memory = driver.allocate(int(source.device[0]), max(end for _, end in places))
        memory = replace(memory, owner=_Owner(memory))
        self.memory: list[BufferTable] = []
        """Where the casts of each batch are, until the next one is cast."""
        self._casts: list[DeviceCasts] = []
        for rows, (starts, _) in zip(self.rows, places, strict=True):
            table = BufferTable.packed(memory, starts, source.shape[rows], width[rows])
            self.memory.append(table)
            self._casts.append(DeviceCasts(table, source.take(rows), before[rows], after[rows]))

    def run(self, deadline: float) -> Iterator[tuple[int, Integers]]:
        """Yield the number of each batch once it is cast, and the overflows of its rows."""
        for n, each in enumerate(self._casts):
            yield n, each.wait(seconds_left(deadline))


class _BouncedCasts:
    """Casts from a device to the host: on the device first, since fewer bytes travel then."""

    def __init__(
        self, sink: BufferTable, source: BufferTable, before: Integers, after: Integers
    ) -> None:
        self._casts = _CastsToScratch(source, before, after)
        self._copier = Copier(int(source.device[0]))
        batches = zip(self._casts.rows, self._casts.memory, strict=True)
        self._tables = [self._copier.table(sink.take(rows), memory) for rows, memory in batches]

    def run(self, deadline: float) -> Integers:
        found = []
        for batch, counts in self._casts.run(deadline):
            self._copier.run(self._tables[batch])
            self._copier.wait(seconds_left(deadline))
            found.append(counts)
        return np.concatenate(found)

    def close(self) -> None:
        self._copier.close()


_Casts = PreparedCasts | DeviceCasts | _BouncedCasts


class RowDigests:
    """Digests of rows of memory, or of what casts of them give, again for every version."""

    def __init__(self, rows: BufferTable, digest: DigestKind, cast: Integers | None = None) -> None:
        self._rows, self._digest = rows, digest
        self._cast = np.full((len(rows), 2), -1) if cast is None else cast
        self._prepared: _PreparedDigests | None = None

    def run(self, deadline: float) -> tuple[Words, int]:
        """Return the digest of each row, and how many finite values become infinite by casts."""
        prepared = self._prepared or _PreparedDigests(self._rows, self._cast)
        self._prepared = None  # an error leaves work queued, which the next run must not take
        found = prepared.run(self._digest, deadline)
        self._prepared = prepared
        return found


class _PreparedDigests:
    def __init__(self, rows: BufferTable, cast: Integers) -> None:
        is_cast, on_host = cast[:, 0] >= 0, rows.device == HOST
        self._num_rows, self._plain_rows = len(rows), np.flatnonzero(~is_cast)
        self._plain = PreparedDigests(rows.take(~is_cast))
        self._host_rows = here = np.flatnonzero(is_cast & on_host)
        self._on_host = PreparedCasts(None, rows.take(here), cast[here, 0], cast[here, 1])
        self._on_devices = []
        for device in np.unique(rows.device[is_cast & ~on_host]).tolist():
            there = np.flatnonzero(is_cast & (rows.device == device))
            casts = _CastsToScratch(rows.take(there), cast[there, 0], cast[there, 1])
            digests = [PreparedDigests(memory) for memory in casts.memory]
            self._on_devices.append((there, casts, digests))

    def run(self, kind: DigestKind, deadline: float) -> tuple[Words, int]:
        found: Words = np.zeros(self._num_rows, np.uint64)
        found[self._plain_rows] = self._plain.run(deadline, kind)
        found[self._host_rows], counts = self._on_host.digests(kind, deadline)
        overflows = int(counts.sum())
        for there, casts, digests in self._on_devices:
            for batch, counts in casts.run(deadline):
                found[there[casts.rows[batch]]] = digests[batch].run(deadline, kind)
                overflows += int(counts.sum())
        return found, overflows


def words_of(digests: bytes) -> Words:
    """Return digests as they came with a lease, as numbers."""
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def doubles(memory: BufferTable) -> NDArray[np.bool_]:
    """Return which rows share memory with another one, as names that are one tensor here do."""
    low, _ = memory.spans
    order = np.lexsort((low, memory.device))
    is_next = (np.diff(low[order]) == 0) & (np.diff(memory.device[order]) == 0)
    found = np.zeros(len(memory), bool)
    found[order[1:]] |= is_next
    found[order[:-1]] |= is_next
    return found & (memory.nbytes > 0)


def check_digests(
    found: Words, wanted: Words, tensor: Integers, names: Sequence[str], where: str
) -> None:
    """Raise DigestMismatch, which names the tensors, unless all rows have arrived as published."""
    if np.array_equal(found, wanted):
        return
    wrong = {names[n] for n in tensor[found != wanted].tolist()}
    raise DigestMismatch(
        f"{len(wrong)} tensors are not what was published, {where}: {listed(wrong)}; the trainer "
        f"changed them before the update ended, or the lease had ended: publish them again"
    )
