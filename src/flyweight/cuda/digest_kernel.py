"""The digest of flyweight.digest on a GPU: one launch reads all memory of a device.

Triton compiles the kernel at the first use. The kernel reads whole, aligned rows 16 bytes at
a time, and ends and odd addresses byte by byte, which costs little since they are few.
Tensors that are not contiguous are first copied into scratch memory, a block at a time.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from flyweight.cuda.copies import tensor_at
from flyweight.cuda.copy_tasks import split
from flyweight.cuda.launches import Launches, imported
from flyweight.digest import ROW_BYTES, ROW_WORDS, Words, fmix, splitmix
from flyweight.memory_table import BufferTable, Integers
from flyweight.spec.box import blocks

SCRATCH_BYTES = 16 << 20
_TASK_ROWS = 128  # 1 MiB: small enough to balance the load; a task reads 16 KiB of tables
_NUM_ROWS, _NUM_WARPS = 4, 8  # of one step of a task, and of its program


@cache
def _kernel() -> Any:
    triton: Any = imported("triton", "digests")
    tl: Any = imported("triton.language", "digests")

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


class DeviceDigests(Launches):
    """Digests of the same blocks, round after round."""

    def __init__(self, memory: BufferTable) -> None:
        super().__init__((memory,), "digests")
        self._start = fmix(memory.nbytes.astype(np.uint64))
        if self._device is not None:
            with self._torch.cuda.device(self._device):
                columns = np.arange(2 * ROW_WORDS, dtype=np.uint64)
                tables = (splitmix(columns) | np.uint64(1)).view(np.int64)
                self._weights = self._to_device(tables)
                self._plan(memory)

    def values(self, timeout_seconds: float) -> Words:
        """Return the digest of each block's bytes in row-major order; raise TransferTimeout."""
        return fmix(self._start + self.wait(timeout_seconds).view(np.uint64))

    def _plan(self, memory: BufferTable) -> None:
        """Digest contiguous blocks, then each part of others by way of scratch memory."""
        flat = np.flatnonzero(memory.is_contiguous)
        starts = np.zeros_like(flat)
        self._add(digest_tasks(memory.address[flat], memory.nbytes[flat], starts, flat))
        strided = np.flatnonzero(~memory.is_contiguous).tolist()
        if not strided:
            return
        kind, size = self._torch.uint8, SCRATCH_BYTES + ROW_BYTES
        scratch = self._torch.empty(size, dtype=kind, device=self._place)
        for index in strided:
            buffer = memory.buffer(index)
            held = row = done = 0
            for box in blocks(buffer.shape, SCRATCH_BYTES // buffer.item_bytes):
                block = buffer.block(box)
                source = tensor_at(block)
                end = held + block.nbytes
                sink = scratch[held:end].view(source.dtype).view(source.shape)
                self._steps.append(partial(sink.copy_, source))
                done += block.nbytes
                is_last = done == buffer.nbytes
                num_rows, rest = divmod(end, ROW_BYTES)
                ready = end if is_last else end - rest
                of_block = (scratch.data_ptr(), ready, row, index)
                self._add(digest_tasks(*(np.array([each], np.int64) for each in of_block)))
                if not is_last and num_rows and rest:
                    self._steps.append(partial(scratch[:rest].copy_, scratch[end - rest : end]))
                held, row = rest, row + num_rows

    def _add(self, tasks: Tasks) -> None:
        for unit, each in tasks.items():
            work = self._to_device(each), self._weights, self._sums
            rows, num_warps = (1, 4) if unit == 1 else (_NUM_ROWS, _NUM_WARPS)
            self._steps.append(partial(_launch, work, unit, rows, num_warps))


def _launch(work: tuple[Any, Any, Any], unit: int, rows: int, num_warps: int) -> None:
    """Queue tasks on the current stream: they, the weights, and the sums that they add to."""
    tasks = work[0]
    _kernel()[(len(tasks),)](*work, unit, rows, num_warps=num_warps)


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
