"""The digest of flyweight.digest on a GPU: one launch reads all memory of a device.

Triton compiles the kernel at the first use. The kernel reads whole, aligned rows 16 bytes at
a time, and ends and odd addresses byte by byte, which costs little since they are few.
Tensors that are not contiguous are first copied into scratch memory, a block at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from msgspec.structs import replace

from flyweight.cuda.copies import tensor_at
from flyweight.cuda.copy_tasks import split
from flyweight.cuda.driver import wait_until
from flyweight.digest import ROW_BYTES, ROW_WORDS, Words, fmix, splitmix
from flyweight.errors import MissingDependency, SpecError
from flyweight.memory import Buffer
from flyweight.memory_table import HOST, BufferTable, Integers
from flyweight.spec.box import Box

SCRATCH_BYTES = 16 << 20
_TASK_ROWS = 128  # 1 MiB: small enough to balance the load; a task reads 16 KiB of tables
_NUM_ROWS, _NUM_WARPS = 4, 8  # of one step of a task, and of its program


@cache
def _kernel() -> Any:
    try:
        triton: Any = importlib.import_module("triton")
        tl: Any = importlib.import_module("triton.language")
    except ImportError as cause:
        raise MissingDependency("digests on a GPU need triton; pip install triton") from cause

    def mix(x):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
        x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
        return x ^ (x >> 33)

    def factor(row):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        x = (row.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        return (x ^ (x >> 31)) | 1

    mixed: Any = triton.jit(mix)
    factor_of: Any = triton.jit(factor)

    def add_rows(tasks, tables, sums, UNIT: tl.constexpr, ROWS: tl.constexpr):  # type: ignore # noqa
        task = tasks + 4 * tl.program_id(0)
        address, nbytes = tl.load(task), tl.load(task + 1)
        first_row, index = tl.load(task + 2), tl.load(task + 3)
        columns, rows = tl.arange(0, 1024), tl.arange(0, ROWS)
        at = rows[:, None] * 1024 + columns[None, :]
        a = tl.load(tables + columns).to(tl.uint64, bitcast=True)[None, :]
        b = tl.load(tables + 1024 + columns).to(tl.uint64, bitcast=True)[None, :]
        total = tl.zeros([ROWS], tl.uint64)
        for step in range(tl.cdiv(nbytes, 8192 * ROWS)):
            row = step * ROWS
            if UNIT == 1:
                words = tl.zeros([ROWS, 1024], tl.uint64)
                for byte in tl.static_range(8):
                    here = row * 8192 + at * 8 + byte
                    pointer = address.to(tl.pointer_type(tl.uint8)) + here
                    words |= tl.load(pointer, mask=here < nbytes, other=0).to(tl.uint64) << byte * 8
            else:
                pointer = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), UNIT)
                words = tl.load(pointer + row * 1024 + at, eviction_policy="evict_first")
            x = words * a
            sum_of_row = tl.sum((x ^ (x >> 32)) * b, 1)
            total += mixed(sum_of_row) * factor_of(first_row + row + rows)
        tl.atomic_add(sums + index, tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")

    return triton.jit(add_rows)


class DeviceDigests:
    """Digests of the same blocks, round after round; memory for them is allocated once.

    Keeps the blocks alive. Needs torch and triton. For one thread at a time.
    """

    def __init__(self, blocks: BufferTable) -> None:
        self._blocks = blocks
        devices = np.unique(blocks.device).tolist()
        if devices and (len(devices) > 1 or devices[0] < 0):
            names = ["host" if each == HOST else each for each in devices]
            raise SpecError(f"blocks of devices {names}, all must be of one device")
        self._device: int | None = devices[0] if devices else None
        self._is_started = False
        self._start = fmix(blocks.nbytes.astype(np.uint64))
        if self._device is None:
            return
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as cause:
            raise MissingDependency("digests on a GPU need torch; pip install torch") from cause
        place = f"cuda:{self._device}"
        columns = np.arange(2 * ROW_WORDS, dtype=np.uint64)
        tables = (splitmix(columns) | np.uint64(1)).view(np.int64)
        with self._torch.cuda.device(self._device):
            self._tables = self._torch.from_numpy(tables).to(place)
            self._sums = self._torch.zeros(len(blocks), dtype=self._torch.int64, device=place)
            self._host = self._torch.zeros(len(blocks), dtype=self._torch.int64, pin_memory=True)
            self._event = self._torch.cuda.Event()
            self._steps = self._planned(place)

    def start(self) -> None:
        """Queue the digests after earlier work on the device's default stream.

        The copies of a Copier count as such work. `values` waits for the digests.
        """
        if self._device is None or self._is_started:
            return
        self._is_started = True
        with self._torch.cuda.stream(self._torch.cuda.default_stream(self._device)):
            self._sums.zero_()
            for sink, source, launches in self._steps:
                if sink is not None:
                    sink.copy_(source)
                for unit, tasks in launches:
                    rows, num_warps = (1, 4) if unit == 1 else (_NUM_ROWS, _NUM_WARPS)
                    _kernel()[(len(tasks),)](
                        tasks, self._tables, self._sums, unit, rows, num_warps=num_warps
                    )
            self._host.copy_(self._sums, non_blocking=True)
            self._event.record()

    def values(self, timeout_seconds: float) -> Words:
        """Return the digest of each block's bytes in row-major order; raise TransferTimeout."""
        if self._device is None:
            return np.empty(0, np.uint64)
        self.start()
        self._is_started = False
        what = f"digests of {len(self._blocks)} blocks on device {self._device} were not there"
        wait_until(self._event.query, timeout_seconds, what)
        return fmix(self._start + self._host.numpy().view(np.uint64))

    def _planned(self, place: str) -> list[_Step]:
        """Return the steps: contiguous blocks, then each part of others by way of scratch."""
        torch, memory = self._torch, self._blocks

        def launches(tasks: Tasks) -> list[tuple[int, Any]]:
            return [(unit, torch.from_numpy(each).to(place)) for unit, each in tasks.items()]

        flat = np.flatnonzero(memory.is_contiguous)
        starts = np.zeros_like(flat)
        tasks = digest_tasks(memory.address[flat], memory.nbytes[flat], starts, flat)
        steps: list[_Step] = [(None, None, launches(tasks))]
        strided = np.flatnonzero(~memory.is_contiguous).tolist()
        if not strided:
            return steps
        scratch = torch.empty(SCRATCH_BYTES + ROW_BYTES, dtype=torch.uint8, device=place)
        for index in strided:
            buffer = memory.buffer(index)
            held = row = done = 0
            for block in _blocks(buffer):
                source = tensor_at(block)
                end = held + block.nbytes
                sink = scratch[held:end].view(source.dtype).view(source.shape)
                done += block.nbytes
                is_last = done == buffer.nbytes
                num_rows, rest = divmod(end, ROW_BYTES)
                ready = end if is_last else end - rest
                of_block = (scratch.data_ptr(), ready, row, index)
                tasks = digest_tasks(*(np.array([each], np.int64) for each in of_block))
                steps.append((sink, source, launches(tasks)))
                if not is_last and num_rows and rest:
                    steps.append((scratch[:rest], scratch[end - rest : end], []))
                held, row = rest, row + num_rows
        return steps


_Step = tuple[Any, Any, list[tuple[int, Any]]]
"""A copy to scratch memory, sink and source, if any; then tasks by the width of a read."""
Tasks = dict[int, Integers]
"""The kernel's tasks by the width of a read, a row each: address, bytes, first row, index."""


def digest_tasks(
    address: Integers, nbytes: Integers, first_row: Integers, index: Integers
) -> Tasks:
    """Split contiguous bytes, which begin with a row of their tensor, into tasks.

    first_row: the number of that row.
    index: the number of the tensor, whose sum the task adds to.
    """
    unit = np.where(address % 16 == 0, 16, np.where(address % 8 == 0, 8, 1))
    whole = np.where(unit > 1, nbytes - nbytes % (_NUM_ROWS * ROW_BYTES), 0)
    aligned = _parts(address, whole, first_row, index)
    ends = _parts(address + whole, nbytes - whole, first_row + whole // ROW_BYTES, index)
    units = np.where(aligned[:, 0] % 16 == 0, 16, 8)
    found = {16: aligned[units == 16], 8: aligned[units == 8], 1: ends}
    return {unit: tasks for unit, tasks in found.items() if len(tasks)}


def _parts(address: Integers, nbytes: Integers, first_row: Integers, index: Integers) -> Integers:
    rows, at = split(nbytes, _TASK_ROWS * ROW_BYTES)
    size = np.minimum(nbytes[rows] - at, _TASK_ROWS * ROW_BYTES)
    columns = [address[rows] + at, size, first_row[rows] + at // ROW_BYTES, index[rows]]
    return np.ascontiguousarray(np.stack(columns, axis=1))


def _blocks(buffer: Buffer) -> Iterator[Buffer]:
    """Split a buffer, in row-major order, into blocks that fit into scratch memory."""
    if buffer.nbytes <= SCRATCH_BYTES:
        yield buffer
        return
    size, *inner = buffer.shape
    row_bytes = buffer.nbytes // size
    step = max(SCRATCH_BYTES // row_bytes, 1)
    for start in range(0, size, step):
        shape = (min(step, size - start), *inner)
        block = buffer.block(Box((start, *(0 for _ in inner)), shape))
        if row_bytes <= SCRATCH_BYTES:
            yield block
        else:
            yield from _blocks(replace(block, shape=block.shape[1:], strides=block.strides[1:]))
