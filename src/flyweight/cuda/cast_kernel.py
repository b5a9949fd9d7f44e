"""The casts of flyweight.casts on a GPU, to the same bytes: one launch per pair of dtypes.

Triton compiles the kernel at the first use. Rows where both addresses are multiples of 16 are
read and written 16 bytes at a time; ends and other addresses item by item, or byte by byte where
the items are not aligned. Rows that are not contiguous pass through scratch memory, a block at a
time.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from flyweight.casts import CASTABLE, INFINITY, ITEM_BYTES, NAN, check_rows
from flyweight.cuda.copies import tensor_at
from flyweight.cuda.copy_tasks import split
from flyweight.cuda.driver import wait_until
from flyweight.errors import MissingDependency, SpecError
from flyweight.memory import Buffer
from flyweight.memory_table import HOST, BufferTable, Integers
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
    try:
        triton: Any = importlib.import_module("triton")
        tl: Any = importlib.import_module("triton.language")
    except ImportError as cause:
        raise MissingDependency("casts on a GPU need triton; pip install triton") from cause

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


class DeviceCasts:
    """Casts between the same blocks, round after round; memory for them is allocated once.

    Keeps the blocks alive. Needs torch and triton. For one thread at a time.
    """

    def __init__(
        self, sink: BufferTable, source: BufferTable, source_dtype: Integers, sink_dtype: Integers
    ) -> None:
        """Prepare casts, row by row; dtypes are codes, and both tables have the same shapes."""
        check_rows(sink, source, source_dtype, sink_dtype)
        self._sink, self._source = sink, source
        devices = np.unique(np.concatenate([sink.device, source.device])).tolist()
        if devices and (len(devices) > 1 or devices[0] < 0):
            names = ["host" if each == HOST else each for each in devices]
            raise SpecError(f"blocks of devices {names}, all must be of one device")
        self._device: int | None = devices[0] if devices else None
        self._is_started = False
        if self._device is None:
            return
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as cause:
            raise MissingDependency("casts on a GPU need torch; pip install torch") from cause
        kernel()  # a missing triton is found before the first round
        place = f"cuda:{self._device}"
        with self._torch.cuda.device(self._device):
            self._counts = self._torch.zeros(len(sink), dtype=self._torch.int64, device=place)
            self._host = self._torch.zeros(len(sink), dtype=self._torch.int64, pin_memory=True)
            self._event = self._torch.cuda.Event()
            self._steps = self._planned(source_dtype, sink_dtype, place)

    def start(self) -> None:
        """Queue the casts after earlier work on the device's default stream.

        The copies of a Copier count as such work. `wait` waits for the casts.
        """
        if self._device is None or self._is_started:
            return
        self._is_started = True
        with self._torch.cuda.stream(self._torch.cuda.default_stream(self._device)):
            self._counts.zero_()
            for copy_in, launches, copy_out in self._steps:
                for to, at in copy_in:
                    to.copy_(at)
                for pair, how, tasks in launches:
                    launch(pair, how, tasks, self._counts)
                for to, at in copy_out:
                    to.copy_(at)
            self._host.copy_(self._counts, non_blocking=True)
            self._event.record()

    def wait(self, timeout_seconds: float) -> Integers:
        """Return how many finite values of each row became infinite; raise TransferTimeout."""
        if self._device is None:
            return np.zeros(0, np.int64)
        self.start()
        self._is_started = False
        what = f"casts of {len(self._sink)} blocks on device {self._device} were not done"
        wait_until(self._event.query, timeout_seconds, what)
        counts: Integers = self._host.numpy().copy()
        return counts

    def _planned(self, source_dtype: Integers, sink_dtype: Integers, place: str) -> list[_Step]:
        """Return the steps: contiguous rows, then each block of others by way of scratch."""
        torch, sink, source = self._torch, self._sink, self._source

        def launches(tasks: Tasks) -> list[_Launch]:
            return [(pair, how, torch.from_numpy(each).to(place)) for pair, how, each in tasks]

        is_flat = sink.is_contiguous & source.is_contiguous
        flat = np.flatnonzero(is_flat)
        num_items = source.shape.prod(axis=1, dtype=np.int64)
        casts = np.stack([sink.address, source.address, num_items, np.arange(len(sink))], axis=1)
        tasks = cast_tasks(casts[flat], source_dtype[flat], sink_dtype[flat])
        steps: list[_Step] = [([], launches(tasks), [])]
        strided = np.flatnonzero(~is_flat).tolist()
        if not strided:
            return steps
        scratch = torch.empty((2, SCRATCH_BYTES), dtype=torch.uint8, device=place)
        for row in strided:
            of_row = slice(row, row + 1)
            for block, to in _blocks(source.buffer(row), sink.buffer(row)):
                copy_in, at = _through(scratch[0], block)
                copy_out, into = _through(scratch[1], to)
                casts = np.array([[into, at, block.nbytes // block.item_bytes, row]], np.int64)
                tasks = cast_tasks(casts, source_dtype[of_row], sink_dtype[of_row])
                backwards = [(items, held) for held, items in copy_out]
                steps.append((copy_in, launches(tasks), backwards))
        return steps


_Launch = tuple[tuple[int, int], int, Any]
_Copies = list[tuple[Any, Any]]
_Step = tuple[_Copies, list[_Launch], _Copies]
"""Copies to scratch memory, sink and source each; then launches; then copies from scratch."""
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


def _blocks(source: Buffer, sink: Buffer) -> Iterator[tuple[Buffer, Buffer]]:
    """Split a row into blocks that fit into scratch memory."""
    for box in blocks(source.shape, SCRATCH_BYTES // max(source.item_bytes, sink.item_bytes)):
        yield source.block(box), sink.block(box)


def _through(scratch: Any, block: Buffer) -> tuple[_Copies, int]:
    """Return the copy to scratch memory, if the block is strided, and where its items lie then."""
    if block.is_contiguous:
        return [], block.address
    items = tensor_at(block)
    held = scratch[: block.nbytes].view(items.dtype).view(items.shape)
    return [(held, items)], scratch.data_ptr()
