"""The casts of flyweight.casts on a GPU, to the same bytes: one launch per pair of dtypes.

Triton compiles the kernel at the first use. Rows where both addresses are multiples of 16 are
read and written 16 bytes at a time; ends and other addresses item by item, or byte by byte where
the items are not aligned. Rows that are not contiguous pass through scratch memory, a block at a
time.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from flyweight.casts import CASTABLE, INFINITY, ITEM_BYTES, NAN, check_rows
from flyweight.cuda.copies import tensor_at
from flyweight.cuda.copy_tasks import split
from flyweight.cuda.launches import Launches, imported
from flyweight.memory import Buffer
from flyweight.memory_table import BufferTable, Integers
from flyweight.spec.box import blocks

SCRATCH_BYTES = 16 << 20
"""Of each side: one block of a row that is not contiguous."""
STEP_ITEMS, _NUM_WARPS = 2048, 8  # of one step of a task, and of its program
_TASK_ITEMS = 64 * STEP_ITEMS  # small enough to balance the load
WHOLE, ITEMS, BYTES = range(3)
"""How a task reads and writes: whole steps at multiples of 16 bytes, items, or single bytes."""


@cache
def kernel() -> Any:
    """Return the kernel; each program casts one task and adds its overflows to those of a row."""
    triton: Any = imported("triton", "casts")
    tl: Any = imported("triton.language", "casts")

    def load(address, at, mask, WIDTH: tl.constexpr, HOW: tl.constexpr):  # type: ignore # noqa
        if HOW == 2:
            bits = tl.zeros(at.shape, tl.uint32)
            for byte in tl.static_range(WIDTH):
                pointer = address.to(tl.pointer_type(tl.uint8)) + at * WIDTH + byte
                bits |= tl.load(pointer, mask=mask, other=0).to(tl.uint32) << byte * 8
        else:
            if WIDTH == 4:
                pointer = address.to(tl.pointer_type(tl.uint32))
            else:
                pointer = address.to(tl.pointer_type(tl.uint16))
            if HOW == 0:
                pointer = tl.multiple_of(pointer, 16)
                bits = tl.load(pointer + at, eviction_policy="evict_first").to(tl.uint32)
            else:
                bits = tl.load(pointer + at, mask=mask, other=0).to(tl.uint32)
        return bits

    def store(address, at, mask, bits, WIDTH: tl.constexpr, HOW: tl.constexpr):  # type: ignore # noqa
        if HOW == 2:
            for byte in tl.static_range(WIDTH):
                pointer = address.to(tl.pointer_type(tl.uint8)) + at * WIDTH + byte
                tl.store(pointer, (bits >> byte * 8).to(tl.uint8), mask=mask)
        else:
            if WIDTH == 4:
                pointer, items = address.to(tl.pointer_type(tl.uint32)), bits
            else:
                pointer, items = address.to(tl.pointer_type(tl.uint16)), bits.to(tl.uint16)
            if HOW == 0:
                tl.store(tl.multiple_of(pointer, 16) + at, items)
            else:
                tl.store(pointer + at, items, mask=mask)

    loaded: Any = triton.jit(load)
    stored: Any = triton.jit(store)

    def cast_rows(  # type: ignore # noqa
        tasks, counts, SOURCE: tl.constexpr, SINK: tl.constexpr,  # noqa
        SOURCE_WIDTH: tl.constexpr, SINK_WIDTH: tl.constexpr,  # noqa
        INFINITE: tl.constexpr, NOT_A_NUMBER: tl.constexpr, HOW: tl.constexpr, STEP: tl.constexpr,  # noqa
    ):  # fmt: skip
        task = tasks + 4 * tl.program_id(0)
        sink, source = tl.load(task), tl.load(task + 1)
        num_items, row = tl.load(task + 2), tl.load(task + 3)
        overflows = tl.zeros([STEP], tl.int32)
        for step in range(tl.cdiv(num_items, STEP)):
            at = step * STEP + tl.arange(0, STEP)
            mask = at < num_items
            bits = loaded(source, at, mask, SOURCE_WIDTH, HOW)
            if SOURCE == 1:  # bf16 is the upper half of f32
                bits = bits << 16
            elif SOURCE == 2:
                half = bits.to(tl.uint16).to(tl.float16, bitcast=True)
                bits = half.to(tl.float32).to(tl.uint32, bitcast=True)
            magnitude = bits & 0x7FFFFFFF
            if SINK == 0:
                found = bits
            elif SINK == 1:
                found = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            else:
                rounded = bits.to(tl.float32, bitcast=True).to(tl.float16)
                found = rounded.to(tl.uint16, bitcast=True).to(tl.uint32)
            if SINK != 0:
                is_infinite = (found & 0x7FFF) == INFINITE
                overflows += (is_infinite & (magnitude < 0x7F800000)).to(tl.int32)
            found = tl.where(magnitude > 0x7F800000, NOT_A_NUMBER, found).to(tl.uint32)
            stored(sink, at, mask, found, SINK_WIDTH, HOW)
        if SINK != 0:
            tl.atomic_add(counts + row, tl.sum(overflows, 0).to(tl.int64), sem="relaxed")

    return triton.jit(cast_rows)


def launch(pair: tuple[int, int], how: int, tasks: Any, counts: Any) -> None:
    """Queue casts of one pair of dtypes on the current stream."""
    source, sink = pair
    kernel()[(len(tasks),)](
        tasks,
        counts,
        source,
        sink,
        ITEM_BYTES[source],
        ITEM_BYTES[sink],
        INFINITY[sink],
        NAN[sink],
        how,
        STEP_ITEMS,
        num_warps=_NUM_WARPS,
    )


class DeviceCasts(Launches):
    """Casts between the same blocks: `wait` returns how many finite values became infinite."""

    def __init__(
        self, sink: BufferTable, source: BufferTable, source_dtype: Integers, sink_dtype: Integers
    ) -> None:
        """Prepare casts, row by row; dtypes are codes, and both tables have the same shapes."""
        check_rows(sink, source, source_dtype, sink_dtype)
        super().__init__((sink, source), "casts")
        if self._device is not None:
            kernel()  # a missing triton is found before the first round
            with self._torch.cuda.device(self._device):
                self._plan(sink, source, source_dtype, sink_dtype)

    def _plan(
        self, sink: BufferTable, source: BufferTable, source_dtype: Integers, sink_dtype: Integers
    ) -> None:
        """Cast contiguous rows, then each block of others by way of scratch memory."""
        is_flat = sink.is_contiguous & source.is_contiguous
        flat = np.flatnonzero(is_flat)
        num_items = source.shape.prod(axis=1, dtype=np.int64)
        casts = np.stack([sink.address, source.address, num_items, np.arange(len(sink))], axis=1)
        self._add(cast_tasks(casts[flat], source_dtype[flat], sink_dtype[flat]))
        if is_flat.all():
            return
        kind = self._torch.uint8
        scratch = self._torch.empty((2, SCRATCH_BYTES), dtype=kind, device=self._place)
        for row in np.flatnonzero(~is_flat).tolist():
            of, into, this = source.buffer(row), sink.buffer(row), slice(row, row + 1)
            widest = max(of.item_bytes, into.item_bytes)
            for box in blocks(of.shape, SCRATCH_BYTES // widest):
                block, to = of.block(box), into.block(box)
                at, held, items = _through(scratch[0], block)
                if held is not None:
                    self._steps.append(partial(held.copy_, items))
                into_at, cast, sinks = _through(scratch[1], to)
                casts = np.array([[into_at, at, box.num_elements, row]], np.int64)
                self._add(cast_tasks(casts, source_dtype[this], sink_dtype[this]))
                if cast is not None:
                    self._steps.append(partial(sinks.copy_, cast))

    def _add(self, tasks: Tasks) -> None:
        for pair, how, each in tasks:
            self._steps.append(partial(launch, pair, how, self._to_device(each), self._sums))


Tasks = list[tuple[tuple[int, int], int, Integers]]
"""The kernel's tasks by pair and way to read, a row each: sink, source, items, number of row."""


def cast_tasks(casts: Integers, source_dtype: Integers, sink_dtype: Integers) -> Tasks:
    """Split casts of contiguous items into tasks.

    casts: a row each: addresses of sink and source, items, the row whose overflows it adds to.
    """
    sink, source, num_items, index = casts.T
    source_width, sink_width = (np.array(ITEM_BYTES)[each] for each in (source_dtype, sink_dtype))
    is_whole = (sink | source) % 16 == 0
    is_aligned = (source % source_width == 0) & (sink % sink_width == 0)
    whole = np.where(is_whole, num_items - num_items % STEP_ITEMS, 0)
    steps = np.stack([sink, source, whole, index], axis=1)
    ends = [sink + whole * sink_width, source + whole * source_width, num_items - whole, index]
    end = np.stack(ends, axis=1)
    found: Tasks = []
    pair_code = source_dtype * len(CASTABLE) + sink_dtype
    for code in np.unique(pair_code).tolist():
        pair, of_pair = divmod(code, len(CASTABLE)), pair_code == code
        parts = {
            WHOLE: _parts(steps[of_pair], pair),
            ITEMS: _parts(end[of_pair & is_aligned], pair),
            BYTES: _parts(end[of_pair & ~is_aligned], pair),
        }
        found += [(pair, how, tasks) for how, tasks in parts.items() if len(tasks)]
    return found


def _parts(casts: Integers, pair: tuple[int, int]) -> Integers:
    sink, source, num_items, index = casts.T
    of, at = split(num_items, _TASK_ITEMS)
    size = np.minimum(num_items[of] - at, _TASK_ITEMS)
    columns = [sink[of] + at * ITEM_BYTES[pair[1]], source[of] + at * ITEM_BYTES[pair[0]]]
    return np.ascontiguousarray(np.stack([*columns, size, index[of]], axis=1))


def _through(scratch: Any, block: Buffer) -> tuple[int, Any, Any]:
    """Return where the items of a block are cast: in place, or in scratch memory if it is strided.

    Then, if it is strided, those items and the block's, as tensors.
    """
    if block.is_contiguous:
        return block.address, None, None
    items = tensor_at(block)
    held = scratch[: block.nbytes].view(items.dtype).view(items.shape)
    return scratch.data_ptr(), held, items
