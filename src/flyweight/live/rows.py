"""Copies of rows between two memories, casts on their way, and digests of what has arrived.

Everything is prepared once and runs again in every update. After any error it must be closed or
thrown away: work of the failed attempt may still be queued on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from flyweight.casts import CastDigests, PreparedCasts
from flyweight.copies import BufferCopies, Copiers, PreparedCopies, PreparedDigests
from flyweight.cuda import driver
from flyweight.cuda.cast_kernel import DeviceCasts
from flyweight.digest import Digest, DigestKind, Words, short_digests
from flyweight.errors import DigestMismatch, PlanError, listed
from flyweight.memory_table import HOST, BufferTable, Integers, row_major_strides

_SCRATCH_BYTES = 256 << 20
_ALIGN = 64


class RowCopies:
    """Copies of rows, with the digest of each row read back from where it was written."""

    def __init__(
        self,
        sink: BufferTable,
        source: BufferTable,
        digest: DigestKind,
        cast: Integers | None = None,
    ) -> None:
        """Prepare copies; `cast` has the dtypes that each row is cast from and to, or -1."""
        self._sink, self._nbytes, self._copiers = sink, sink.nbytes, Copiers()
        is_cast = np.zeros(len(sink), bool) if cast is None else cast[:, 0] >= 0
        plain = np.flatnonzero(~is_cast)
        copies = BufferCopies(sink.take(plain), source.take(plain), plain)
        self._prepared = PreparedCopies(copies, self._copiers)
        self._casts: list[PreparedCasts | _DeviceCasts | _BouncedCasts] = []
        if cast is not None and is_cast.any():
            self._casts = _prepared_casts(sink, source, cast)
        self.overflows = 0
        """How many finite values became infinite by the casts of the last run."""
        self.digest_seconds = 0.0
        """The time of the last run for digests that were not computed while it copied."""
        is_last = doubles(sink) | is_cast  # digested after everything has arrived
        is_small = np.zeros(len(sink), bool)
        is_small[self._prepared.small] = True
        self._small = np.flatnonzero(is_small & ~is_last)
        self._large = np.flatnonzero(~is_small & ~is_last).tolist()
        self._last = np.flatnonzero(is_last)
        self._words = PreparedDigests(sink) if digest == "words" else None
        self._left = PreparedDigests(sink.take(self._last)) if digest == "xxh3" else None

    def start(self, *, should_digest: bool) -> Callable[[float], Words | None]:
        """Queue the work of devices without waiting.

        Returns what copies the rest until a deadline, and returns the digest of each row.
        """
        self._prepared.start()
        for each in self._casts:
            if isinstance(each, _DeviceCasts):
                each.start()
        if not should_digest:
            return self._run
        if self._words is None:
            return self._run_and_digest
        if self._prepared.is_ordered:
            self._words.start()
        return self._run_and_digest_words

    def _run(self, deadline: float) -> None:
        self._prepared.run(deadline)
        self._cast(deadline)

    def _cast(self, deadline: float) -> None:
        self.overflows = sum(int(each.run(deadline).sum()) for each in self._casts)

    def _run_and_digest_words(self, deadline: float) -> Words:
        assert self._words is not None
        self._run(deadline)
        copied = monotonic()
        found = self._words.digests("words", deadline)
        self.digest_seconds = monotonic() - copied
        return found

    def _run_and_digest(self, deadline: float) -> Words:
        assert self._left is not None
        found: Words = np.zeros(len(self._nbytes), np.uint64)
        running = {row: Digest(int(self._nbytes[row]), "xxh3") for row in self._large}
        self._prepared.run(deadline, hashes=found, running=running)
        self._cast(deadline)
        found[self._small] = short_digests(self._nbytes[self._small], found[self._small])
        for row, each in running.items():
            found[row] = each.value()
        copied = monotonic()
        if len(self._last):
            found[self._last] = self._left.digests("xxh3", deadline)
        self.digest_seconds = monotonic() - copied
        return found

    def close(self) -> None:
        """Free what was prepared."""
        self._prepared.close()
        self._copiers.close()


def _prepared_casts(
    sink: BufferTable, source: BufferTable, cast: Integers
) -> list[PreparedCasts | _DeviceCasts | _BouncedCasts]:
    """Return what casts the rows, by the memory that they are in."""
    found: list[PreparedCasts | _DeviceCasts | _BouncedCasts] = []
    rows = np.flatnonzero(cast[:, 0] >= 0)
    pairs = np.stack([sink.device[rows], source.device[rows]], axis=1)
    for to, at in np.unique(pairs, axis=0).tolist():
        some = rows[(pairs == (to, at)).all(axis=1)]
        tables = sink.take(some), source.take(some), cast[some, 0], cast[some, 1]
        if to == at == HOST:
            found.append(PreparedCasts(*tables))
        elif to == at:
            found.append(_DeviceCasts(*tables))
        elif to == HOST:
            found.append(_BouncedCasts(*tables))
        else:
            raise PlanError(
                f"a cast from device {at} to device {to} is made where the bytes come from"
            )
    return found


class _DeviceCasts:
    """Casts on one device."""

    def __init__(
        self, sink: BufferTable, source: BufferTable, before: Integers, after: Integers
    ) -> None:
        self._casts, self._is_started = DeviceCasts(sink, source, before, after), False

    def start(self) -> None:
        self._casts.start()
        self._is_started = True

    def run(self, deadline: float) -> Integers:
        if not self._is_started:
            self._casts.start()
        self._is_started = False
        return self._casts.wait(max(deadline - monotonic(), 0.001))


class _Scratch:
    """Memory of a device for the casts of some rows at a time."""

    def __init__(self, source: BufferTable, before: Integers, after: Integers) -> None:
        widths = np.array([4, 2, 2])[after]
        nbytes = source.shape.prod(axis=1, dtype=np.int64) * widths
        sizes = -(-nbytes // _ALIGN) * _ALIGN
        batch = np.cumsum(sizes) // _SCRATCH_BYTES
        cuts = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(sizes)]
        self.batches: list[tuple[Integers, BufferTable, DeviceCasts]] = []
        device = int(source.device[0])
        most = max(int(sizes[a:b].sum()) for a, b in pairwise(cuts))
        self._memory = driver.allocate(device, max(most, _ALIGN))
        for a, b in pairwise(cuts):
            rows = np.arange(a, b)
            starts = np.cumsum(sizes[rows]) - sizes[rows]
            shape, width = source.shape[rows], widths[rows]
            table = BufferTable(
                self._memory.address + starts,
                shape,
                row_major_strides(shape) * width[:, None],
                width,
                np.full(len(rows), device),
                self,
            )
            casts = DeviceCasts(table, source.take(rows), before[rows], after[rows])
            self.batches.append((rows, table, casts))

    def __del__(self) -> None:
        if memory := getattr(self, "_memory", None):
            driver.free(memory)


class _BouncedCasts:
    """Casts from a device to the host: on the device first, since fewer bytes travel then."""

    def __init__(
        self, sink: BufferTable, source: BufferTable, before: Integers, after: Integers
    ) -> None:
        self._scratch, self._copiers = _Scratch(source, before, after), Copiers()
        self._copies = []
        for rows, table, _ in self._scratch.batches:
            copies = BufferCopies(sink.take(rows), table, np.arange(len(rows)))
            self._copies.append(PreparedCopies(copies, self._copiers))

    def run(self, deadline: float) -> Integers:
        found = []
        for (_, _, casts), copies in zip(self._scratch.batches, self._copies, strict=True):
            casts.start()
            found.append(casts.wait(max(deadline - monotonic(), 0.001)))
            copies.run(deadline)
        return np.concatenate(found)


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
        is_cast = cast[:, 0] >= 0
        self._num_rows, self._plain_rows = len(rows), np.flatnonzero(~is_cast)
        self._plain = PreparedDigests(rows.take(self._plain_rows))
        self._host_rows = np.flatnonzero(is_cast & (rows.device == HOST))
        here = self._host_rows
        self._on_host = CastDigests(rows.take(here), cast[here, 0], cast[here, 1])
        self._on_devices = []
        for device in np.unique(rows.device[is_cast & (rows.device != HOST)]).tolist():
            there = np.flatnonzero(is_cast & (rows.device == device))
            scratch = _Scratch(rows.take(there), cast[there, 0], cast[there, 1])
            digests = [PreparedDigests(table) for _, table, _ in scratch.batches]
            self._on_devices.append((there, scratch, digests))

    def run(self, kind: DigestKind, deadline: float) -> tuple[Words, int]:
        found: Words = np.zeros(self._num_rows, np.uint64)
        overflows = 0
        found[self._plain_rows] = self._plain.digests(kind, deadline)
        if len(self._host_rows):
            found[self._host_rows], counts = self._on_host.digests(kind, deadline)
            overflows += int(counts.sum())
        for there, scratch, digests in self._on_devices:
            for (rows, _, casts), each in zip(scratch.batches, digests, strict=True):
                casts.start()
                overflows += int(casts.wait(max(deadline - monotonic(), 0.001)).sum())
                found[there[rows]] = each.digests(kind, deadline)
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
