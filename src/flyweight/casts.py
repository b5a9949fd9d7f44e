"""Casts between f32, bf16 and f16 on the host, to the same bytes as a device's casts.

Values round to nearest even, as in torch. Digests compare bytes, so every NaN becomes one quiet
pattern of its dtype. Finite values that become infinite are counted.

numpy's own casts to and from f16 are slow, and it has no bf16. So f32 is rounded by arithmetic on
its bits, in steps that stay in a core's cache, and 16-bit dtypes are looked up in tables.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyweight.digest import SMALL_BYTES, Digest, DigestKind, Words, checksum, short_digests
from flyweight.digest import small_digests as digests_of_small
from flyweight.errors import SpecError, TransferTimeout
from flyweight.memory import STAGING, Buffer, Bytes, Items, block_of, item_dtype
from flyweight.memory_table import HOST, BufferTable, Integers, runs_of
from flyweight.spec.box import blocks
from flyweight.worker_threads import run_on_threads

Pair = tuple[int, int]
"""The codes of the dtypes at the source and at the sink."""
CASTABLE = ("f32", "bf16", "f16")
F32, BF16, F16 = range(3)
"""The code of a dtype is its index in CASTABLE."""
ITEM_BYTES = (4, 2, 2)
INFINITY = (0x7F80_0000, 0x7F80, 0x7C00)
NAN = (0x7FC0_0000, 0x7FC0, 0x7E00)
"""The bits of positive infinity, and of the NaN that every NaN becomes, by the code of a dtype."""
PAIRS = tuple((a, b) for a in range(3) for b in range(3) if a != b)
_OVERFLOW = {(F32, BF16): 0x7F7F_8000, (F32, F16): 0x477F_F000, (BF16, F16): 0x4780}
"""The smallest magnitude of the source that becomes infinite."""

_STEP_ITEMS = 1 << 16  # numpy's calls are long enough, and all of their arrays fit in a cache
_PART_ITEMS = 1 << 20  # what a thread takes at once, a multiple of the rows of digests
_SMALL_ITEMS = SMALL_BYTES // 4
_SCRATCH_BYTES = 21 * _STEP_ITEMS
_INLINE_BYTES = 8 << 20  # below this, starting threads costs more than they save


class _Scratch:
    """Memory of one thread for one step."""

    def __init__(self, block: Bytes) -> None:
        n = _STEP_ITEMS
        self.indices = block[: 8 * n].view(np.int64)
        self.words, self.magic = block[: 8 * n].view(np.uint32).reshape(2, n)
        self.high, self.low = block[8 * n : 12 * n].view(np.uint16).reshape(2, n)
        self.flags = block[12 * n : 13 * n].view(np.bool_)
        self.source, self.cast = block[13 * n : 17 * n], block[17 * n :]


def _u16(bits: int) -> NDArray[np.uint16]:
    return np.array(bits, np.uint16)


def _u32(bits: int) -> NDArray[np.uint32]:
    return np.array(bits, np.uint32)


# Arrays without dims: numpy would convert a Python integer again in each call.
_ONE, _TIE = _u16(1), _u16(0x8000)
_SIXTEEN, _SIGN, _MAGNITUDE, _EXPONENT = map(_u32, (16, 1 << 31, 0x7FFF_FFFF, 0x7F80_0000))
_F16_OVERFLOW = _u32(_OVERFLOW[F32, F16])
_RAISED, _SPREAD = _u32((13 << 23) + 2048), _u32((1 << 16) + 8)
# An array, because numpy takes the maximum with a scalar item by item.
_F16_SMALLEST_NORMAL = np.full(_STEP_ITEMS, 0x3880_0000, np.uint32)


def _reaches(halves: Items, magnitude: int) -> bool:
    """True if one of the 16-bit floats has at least this magnitude, by its bits."""
    if np.maximum.reduce(halves) >= 0x8000 + magnitude:
        return True
    return bool(np.maximum.reduce(halves.view(np.int16)) >= magnitude)


def _f32_to_bf16(source: Items, sink: Items, scratch: _Scratch) -> bool:
    n = len(source)
    words, high, low, is_up = (
        each[:n] for each in (scratch.words, scratch.high, scratch.low, scratch.flags)
    )
    np.right_shift(source, _SIXTEEN, out=words)
    np.copyto(high, words, casting="unsafe")
    np.copyto(low, source, casting="unsafe")
    # An odd high half rounds up from the tie, an even one above it.
    odd = words.view(np.uint16)[:n]
    np.bitwise_and(high, _ONE, out=odd)
    np.bitwise_or(low, odd, out=low)
    np.greater(low, _TIE, out=is_up)
    np.add(high, is_up, out=sink)
    return _reaches(high, 0x7F7F)


def _f32_to_f16(source: Items, sink: Items, scratch: _Scratch) -> bool:
    """Round by adding 2**(13 + exponent), whose last place is that of the result.

    The exponent is at least the smallest of f16, so subnormals round alike. Bits of the sum: the
    exponent, raised by 13, and the rounded significand plus 2048. The multiplication adds them 16
    bits higher, where the 2048 takes off what the bias of the exponent is too large by.
    """
    n = len(source)
    words, magic = scratch.words[:n], scratch.magic[:n]
    np.bitwise_and(source, _MAGNITUDE, out=words)
    is_special = bool(np.maximum.reduce(words) >= _OVERFLOW[F32, F16])
    if is_special:  # infinity is all that larger numbers become
        np.minimum(words, _F16_OVERFLOW, out=words)
    np.bitwise_and(words, _EXPONENT, out=magic)
    np.maximum(magic, _F16_SMALLEST_NORMAL[:n], out=magic)
    np.add(magic, _RAISED, out=magic)
    total = words.view(np.float32)
    np.add(total, magic.view(np.float32), out=total)
    np.multiply(words, _SPREAD, out=words)
    np.bitwise_and(source, _SIGN, out=magic)
    np.bitwise_or(words, magic, out=words)
    np.right_shift(words, _SIXTEEN, out=words)
    np.copyto(sink, words, casting="unsafe")
    return is_special


def _bf16_to_f32(source: Items, sink: Items, scratch: _Scratch) -> bool:
    np.copyto(sink, source)
    np.left_shift(sink, _SIXTEEN, out=sink)
    return _reaches(source, INFINITY[BF16] + 1)


def _looked_up(pair: Pair) -> Callable[[Items, Items, _Scratch], bool]:
    def cast_step(source: Items, sink: Items, scratch: _Scratch) -> bool:
        indices = scratch.indices[: len(source)]
        np.copyto(indices, source)
        _table(pair).take(indices, out=sink, mode="wrap")  # the mode that needs no second copy
        return pair in _OVERFLOW and _reaches(source, _OVERFLOW[pair])

    return cast_step


@cache
def _table(pair: Pair) -> Items:
    """Return the cast of each pattern of 16 bits."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    if pair == (F16, F32):
        table = patterns.view(np.float16).astype(np.float32).view(np.uint32)
        table[(patterns & 0x7FFF) > INFINITY[F16]] = NAN[F32]
        return table
    table = np.empty(1 << 16, np.uint16)
    wide = np.empty(1 << 16, np.uint32)
    cast(patterns.view(np.uint8), wide.view(np.uint8), (pair[0], F32))
    cast(wide.view(np.uint8), table.view(np.uint8), (F32, pair[1]))
    return table


_STEPS: dict[Pair, Callable[[Items, Items, _Scratch], bool]] = {
    (F32, BF16): _f32_to_bf16,
    (F32, F16): _f32_to_f16,
    (BF16, F32): _bf16_to_f32,
    (F16, F32): _looked_up((F16, F32)),
    (BF16, F16): _looked_up((BF16, F16)),
    (F16, BF16): _looked_up((F16, BF16)),
}
"""Casts of at most a step of aligned items; True if there may be NaNs or overflows."""


def _magnitudes(source: Items) -> Items:
    found: Items = source & source.dtype.type((1 << 8 * source.itemsize - 1) - 1)
    return found


def _overflows(source: Items, pair: Pair) -> NDArray[np.bool_]:
    """Return which items are finite and become infinite."""
    found, infinity = _magnitudes(source), INFINITY[pair[0]]
    is_over: NDArray[np.bool_] = (found >= _OVERFLOW.get(pair, infinity)) & (found < infinity)
    return is_over


def _cast_step(source: Items, sink: Items, pair: Pair, scratch: _Scratch) -> int:
    """Cast at most a step of items between any addresses and strides; return the overflows."""
    plain_source, plain_sink = source, sink
    if not _is_plain(source):
        plain_source = scratch.source[: source.nbytes].view(source.dtype).reshape(source.shape)
        np.copyto(plain_source, source)
    if not _is_plain(sink):
        plain_sink = scratch.cast[: sink.nbytes].view(sink.dtype).reshape(sink.shape)
    flat, flat_sink = plain_source.reshape(-1), plain_sink.reshape(-1)
    num_overflows = 0
    if _STEPS[pair](flat, flat_sink, scratch):
        flat_sink[_magnitudes(flat) > INFINITY[pair[0]]] = NAN[pair[1]]
        num_overflows = int(np.count_nonzero(_overflows(flat, pair)))
    if plain_sink is not sink:
        np.copyto(sink, plain_sink)
    return num_overflows


def _is_plain(items: Items) -> bool:
    return items.flags.c_contiguous and items.flags.aligned


def _cast_items(source: Items, sink: Items, pair: Pair, scratch: _Scratch) -> int:
    return sum(
        _cast_step(block_of(source, box), block_of(sink, box), pair, scratch)
        for box in blocks(source.shape, _STEP_ITEMS)
    )


def cast(source: Bytes, sink: Bytes, pair: Pair) -> int:
    """Cast contiguous items of any address; return how many finite values became infinite."""
    _check_pairs(np.array(pair[:1]), np.array(pair[1:]))
    widths = ITEM_BYTES[pair[0]], ITEM_BYTES[pair[1]]
    if len(source) % widths[0] or len(source) // widths[0] * widths[1] != len(sink):
        raise SpecError(
            f"{len(source)} bytes of {CASTABLE[pair[0]]} do not become "
            f"{len(sink)} bytes of {CASTABLE[pair[1]]}"
        )
    items, cast_items = (
        each.view(item_dtype(width)) for each, width in zip((source, sink), widths, strict=True)
    )
    with STAGING.lend(_SCRATCH_BYTES) as block:
        return _cast_items(items, cast_items, pair, _Scratch(block))


def _check_pairs(source_dtype: Integers, sink_dtype: Integers) -> None:
    known = range(len(CASTABLE))
    is_known = np.minimum(source_dtype, sink_dtype) >= 0
    is_known &= np.maximum(source_dtype, sink_dtype) < len(known)
    for row in np.flatnonzero(~is_known | (source_dtype == sink_dtype))[:1].tolist():
        pair = source_dtype.tolist()[row], sink_dtype.tolist()[row]
        names = [CASTABLE[each] if each in known else each for each in pair]
        raise SpecError(
            f"no cast from {names[0]!r} to {names[1]!r}; "
            f"casts are between two different dtypes of {', '.join(CASTABLE)}"
        )


def check_rows(
    sink: BufferTable | None, source: BufferTable, source_dtype: Integers, sink_dtype: Integers
) -> None:
    """Raise SpecError unless each row of the source can be cast to the same row of the sink."""
    _check_pairs(source_dtype, sink_dtype)
    for table, dtype, name in ((source, source_dtype, "source"), (sink, sink_dtype, "sink")):
        if table is None:
            continue
        wanted = np.array(ITEM_BYTES)[dtype]
        if len(table) != len(dtype):
            raise SpecError(f"{len(table)} rows of the {name} have {len(dtype)} dtypes")
        for row in np.flatnonzero(table.item_bytes != wanted)[:1].tolist():
            raise SpecError(
                f"items of {table.item_bytes[row]} bytes in row {row} of the {name}, "
                f"{CASTABLE[dtype[row]]} has {wanted[row]}"
            )
    if sink is None:
        return
    if sink.shape.shape != source.shape.shape or (sink.shape != source.shape).any():
        raise SpecError(f"shapes {source.shape.tolist()[:5]} become {sink.shape.tolist()[:5]}")
    if not sink.is_writable:
        raise SpecError(f"one of {len(sink)} sinks of casts is read-only")


@dataclass(frozen=True)
class _Part:
    """Some items of a row."""

    row: int
    pair: Pair
    offset: int
    """Its first byte in the row's cast."""
    source: Items
    sink: Items | None


@dataclass(frozen=True)
class _Batch:
    """Small contiguous rows that are cast in one step, by their places among all small rows."""

    pair: Pair
    first: int
    end: int


class PreparedCasts:
    """Casts of blocks of the host's memory that run again in every round.

    Rows are cut into what threads take: batches of small rows, parts of others.
    """

    def __init__(
        self,
        sink: BufferTable | None,
        source: BufferTable,
        source_dtype: Integers,
        sink_dtype: Integers,
    ) -> None:
        """Prepare casts, row by row; dtypes are codes, and both tables have the same shapes.

        sink: None if the casts are only digested, and stored nowhere.
        """
        check_rows(sink, source, source_dtype, sink_dtype)
        tables = [source] if sink is None else [source, sink]
        if any((each.device != HOST).any() for each in tables):
            raise SpecError("casts on the host read and write memory of the host only")
        self._owners = [each.owner for each in tables]
        num_items = source.shape.prod(axis=1, dtype=np.int64)
        self._nbytes: Integers = num_items * np.array(ITEM_BYTES)[sink_dtype]
        self._total_bytes = int(source.nbytes.sum() + self._nbytes.sum())
        is_small = num_items <= _SMALL_ITEMS
        for each in tables:
            is_small &= each.is_contiguous
        pair_code = source_dtype * len(CASTABLE) + sink_dtype
        small = np.flatnonzero(is_small)
        small = small[np.argsort(pair_code[small], kind="stable")]
        self._small, self._num_items = small, num_items[small]
        self._source_at = source.address[small]
        self._sink_at = None if sink is None else sink.address[small]
        # A batch ends with the row that exceeds what is left of a step beside one small row.
        step = np.cumsum(self._num_items) // (_STEP_ITEMS - _SMALL_ITEMS)
        pairs = np.stack([source_dtype, sink_dtype], axis=1)
        self._jobs: list[_Part | _Batch] = []
        self._large = np.flatnonzero(~is_small)
        for row in self._large.tolist():
            to = None if sink is None else sink.buffer(row)
            self._jobs += _parts(row, tuple(pairs[row].tolist()), source.buffer(row), to)
        for first, end in runs_of(step, pair_code[small]):
            self._jobs.append(_Batch(tuple(pairs[small[first]].tolist()), first, end))

    def run(self, deadline: float) -> Integers:
        """Cast everything; return how many finite values of each row became infinite."""

        def cast_part(part: _Part, scratch: _Scratch) -> int:
            assert part.sink is not None
            return _cast_items(part.source, part.sink, part.pair, scratch)

        return self._run(cast_part, lambda batch, casts: None, deadline)

    def digests(self, kind: DigestKind, deadline: float) -> tuple[Words, Integers]:
        """Return the digest of each row's cast, and how many finite values became infinite."""
        found: Words = np.zeros(len(self._nbytes), np.uint64)
        running = {row: Digest(int(self._nbytes[row]), kind) for row in self._large.tolist()}

        def digest_batch(batch: _Batch, casts: Sequence[Bytes]) -> None:
            rows = self._small[batch.first : batch.end]
            found[rows] = list(map(checksum, casts)) if kind == "xxh3" else digests_of_small(casts)

        overflows = self._run(
            lambda part, scratch: _digest_part(part, running[part.row], scratch),
            digest_batch,
            deadline,
        )
        if kind == "xxh3":
            found[self._small] = short_digests(self._nbytes[self._small], found[self._small])
        for row, each in running.items():
            found[row] = each.value()
        return found, overflows

    def _run(
        self,
        part: Callable[[_Part, _Scratch], int],
        batch: Callable[[_Batch, Sequence[Bytes]], None],
        deadline: float,
    ) -> Integers:
        """Do each job, in several threads if there are many bytes; return the overflows by row.

        part: casts a part of a row, and returns its overflows.
        batch: called with the casts of small rows.
        """
        overflows: list[tuple[Any, Any]] = []

        def run(queue: Iterator[_Part | _Batch]) -> None:
            with STAGING.lend(_SCRATCH_BYTES) as block:
                scratch = _Scratch(block)
                for job in queue:
                    if monotonic() > deadline:
                        raise TransferTimeout(f"casts of {len(self._nbytes)} blocks took too long")
                    if isinstance(job, _Part):
                        overflows.append((job.row, part(job, scratch)))
                        continue
                    casts, counts = self._cast_batch(job, scratch)
                    batch(job, casts)
                    if counts is not None:
                        overflows.append((self._small[job.first : job.end], counts))

        is_inline = self._total_bytes <= _INLINE_BYTES
        num_threads = 1 if is_inline else min(len(os.sched_getaffinity(0)), 4)
        if self._jobs:
            run_on_threads(self._jobs, run, num_threads, "flyweight-casts")
        found = np.zeros(len(self._nbytes), np.int64)
        for rows, counts in overflows:
            found[rows] += counts
        return found

    def _cast_batch(
        self, batch: _Batch, scratch: _Scratch
    ) -> tuple[Sequence[Bytes], Integers | None]:
        """Cast the rows into scratch memory, and from there to the sinks, if there are any.

        Returns the cast of each row, and how many values of each overflowed, if any did.
        """
        rows = slice(batch.first, batch.end)
        ends = np.cumsum(self._num_items[rows])
        starts = ends - self._num_items[rows]
        width, cast_width = (ITEM_BYTES[each] for each in batch.pair)
        at = scratch.source.ctypes.data + starts * width
        _move(at, self._source_at[rows], self._num_items[rows] * width)
        total, counts = int(ends[-1]), None
        if total:
            source = scratch.source[: total * width].view(item_dtype(width))
            sink = scratch.cast[: total * cast_width].view(item_dtype(cast_width))
            if _cast_step(source, sink, batch.pair, scratch):
                before = np.concatenate([[0], np.cumsum(_overflows(source, batch.pair))])
                counts = before[ends] - before[starts]
        if self._sink_at is not None:
            at = scratch.cast.ctypes.data + starts * cast_width
            _move(self._sink_at[rows], at, self._num_items[rows] * cast_width)
            return [], counts
        cuts = pairwise([0, *(ends * cast_width).tolist()])
        return [scratch.cast[a:b] for a, b in cuts], counts


def _move(sinks: Integers, sources: Integers, sizes: Integers) -> None:
    deque(map(ctypes.memmove, sinks.tolist(), sources.tolist(), sizes.tolist()), maxlen=0)


def _parts(row: int, pair: Pair, source: Buffer, sink: Buffer | None) -> list[_Part]:
    items, cast_items = source.items(), None if sink is None else sink.items()
    if source.is_contiguous and (sink is None or sink.is_contiguous):
        items = items.reshape(-1)
        cast_items = None if cast_items is None else cast_items.reshape(-1)
    found, offset = [], 0
    for box in blocks(items.shape, _PART_ITEMS):
        to = None if cast_items is None else block_of(cast_items, box)
        found.append(_Part(row, pair, offset, block_of(items, box), to))
        offset += box.num_elements * ITEM_BYTES[pair[1]]
    return found


def _digest_part(part: _Part, digest: Digest, scratch: _Scratch) -> int:
    """Add a part's cast to the digest of its row; return the overflows."""
    width, sink = ITEM_BYTES[part.pair[1]], scratch.cast
    num_overflows, offset, filled = 0, part.offset, 0
    for box in blocks(part.source.shape, _STEP_ITEMS):
        nbytes = box.num_elements * width
        if filled + nbytes > len(sink):  # full: a whole row of digests of kind 'xxh3', if aligned
            digest.add(offset, sink[:filled])
            offset, filled = offset + filled, 0
        to = sink[filled : filled + nbytes].view(item_dtype(width)).reshape(box.shape)
        num_overflows += _cast_step(block_of(part.source, box), to, part.pair, scratch)
        filled += nbytes
    digest.add(offset, sink[:filled])
    return num_overflows
