"""How copies on a device are cut: into calls of the driver, or into tasks of one kernel.

Nothing here needs a device. Tables of very many copies are cut by numpy, without a loop over rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from flyweight.errors import SpecError
from flyweight.memory import Buffer
from flyweight.memory_table import BufferTable, Integers

_MAX_COPIES = 1 << 16
_MAX_PITCH = 2**31 - 1
_LAST = np.iinfo(np.int64).max

Dim = tuple[int, int, int]
"""The size of a dim, and its byte strides at the sink and at the source."""


@lru_cache(maxsize=1 << 16)
def _dims(
    shape: tuple[int, ...], sink: tuple[int, ...], source: tuple[int, ...], item_bytes: int
) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    dims = sorted(
        (each for each in zip(shape, sink, source, strict=True) if each[0] != 1),
        key=lambda dim: (dim[1], dim[2]),
    )
    if any(stride < item_bytes for _, stride, _ in dims):
        raise SpecError(f"items of the sink share bytes: shape {shape}, byte strides {sink}")
    merged: list[Dim] = [(item_bytes, 1, 1)]
    for size, to, at in dims:
        inner, inner_to, inner_at = merged[-1]
        if (to, at) == (inner * inner_to, inner * inner_at):
            merged[-1] = (inner * size, inner_to, inner_at)
        else:
            merged.append((size, to, at))
    merged.reverse()
    cut = next(cut for cut in range(max(len(merged) - 3, 0), len(merged)) if _fits(merged[cut:]))
    if prod(size for size, _, _ in merged[:cut]) > _MAX_COPIES:
        raise SpecError(
            f"copy of shape {shape} from byte strides {source} to {sink} takes more than "
            f"{_MAX_COPIES} calls of the driver; copy it to contiguous memory first"
        )
    return tuple(merged[:cut]), tuple(merged[cut:])


def _fits(dims: Sequence[Dim]) -> bool:
    """True if the driver can copy rows, or planes of rows, of this shape."""
    *outer, (width, _, _) = dims
    for side in (1, 2):
        if outer and not width <= outer[-1][side] <= _MAX_PITCH:
            return False
        if len(outer) == 2:
            height, odd = divmod(outer[0][side], outer[1][side])
            if odd or height < outer[1][0]:
                return False
    return True


def driver_dims(sink: Buffer, source: Buffer) -> tuple[tuple[Dim, ...], tuple[Dim, ...]] | None:
    """Return the dims to loop over, and the inner dims that the driver copies in one call.

    None if there is nothing to copy. Raises SpecError if the buffers do not fit.
    """
    if (sink.shape, sink.item_bytes) != (source.shape, source.item_bytes):
        raise SpecError(
            f"source is {source.shape} items of {source.item_bytes} bytes, "
            f"sink is {sink.shape} of {sink.item_bytes}"
        )
    if not sink.is_writable:
        raise SpecError(f"sink of shape {sink.shape} is read-only")
    if 0 in sink.shape:
        return None
    return _dims(sink.shape, sink.strides, source.strides, sink.item_bytes)


def offsets(dims: Sequence[Dim]) -> Iterator[tuple[int, int]]:
    """Yield the byte offset at the sink and at the source for each step of a loop over dims."""
    for steps in product(*(range(size) for size, _, _ in dims)):
        to = sum(step * dim[1] for step, dim in zip(steps, dims, strict=True))
        yield to, sum(step * dim[2] for step, dim in zip(steps, dims, strict=True))


def run_bytes(sink: BufferTable, source: BufferTable) -> Integers:
    """Return the length of the runs in which each copy is contiguous on both sides, in bytes.

    It is the whole copy if both sides have their items in the same order without gaps. Raises
    SpecError if the shapes or widths differ, if a sink is read-only, or if its items share bytes.
    """
    _check(sink, source)
    is_flat = sink.is_contiguous & source.is_contiguous
    rows = np.flatnonzero(~is_flat)
    # The innermost dim first; dims of size 1 have no stride, and go last.
    sizes, at = sink.shape[rows], source.strides[rows]
    to = np.where(sizes == 1, _LAST, sink.strides[rows])
    order = np.lexsort((at, to), axis=1)
    sizes, to, at = (np.take_along_axis(each, order, axis=1) for each in (sizes, to, at))
    run, is_growing = sink.item_bytes[rows], np.ones(len(rows), bool)
    for dim in range(sizes.shape[1]):
        is_growing &= (to[:, dim] == run) & (at[:, dim] == run)
        run = np.where(is_growing, run * sizes[:, dim], run)
    found = sink.nbytes.copy()
    found[rows] = run
    return found


def _check(sink: BufferTable, source: BufferTable) -> None:
    assert sink.shape.shape == source.shape.shape
    is_wrong = (sink.shape != source.shape).any(axis=1) | (sink.item_bytes != source.item_bytes)
    is_shared = (sink.shape != 1) & (sink.strides < sink.item_bytes[:, None])
    is_wrong |= is_shared.any(axis=1) | (not sink.is_writable)
    for row in np.flatnonzero(is_wrong).tolist():
        driver_dims(sink.buffer(row), source.buffer(row))  # raises, unless there are no items


def kernel_rows(
    sink: BufferTable, source: BufferTable, device: int, most_bytes: int
) -> NDArray[np.bool_]:
    """Return which copies the kernel makes; raise as `run_bytes`.

    They are inside the device, contiguous, aligned to 16 bytes and of less than `most_bytes`.
    """
    nbytes = sink.nbytes
    found: NDArray[np.bool_] = (run_bytes(sink, source) == nbytes) & (nbytes > 0)
    found &= (nbytes < most_bytes) & (sink.device == device) & (source.device == device)
    found &= ((sink.address | source.address) & 15) == 0
    return found


def copy_tasks(
    sink: Integers, source: Integers, nbytes: Integers, most_bytes: int
) -> NDArray[np.int64]:
    """Split copies between addresses into tasks of a kernel: sink, source, bytes."""
    rows, at = split(nbytes, most_bytes)
    size = np.minimum(nbytes[rows] - at, most_bytes)
    return np.ascontiguousarray(np.stack([sink[rows] + at, source[rows] + at, size], axis=1))


def split(nbytes: Integers, most_bytes: int) -> tuple[Integers, Integers]:
    """Split blocks into parts of at most so many bytes; return each part's row and first byte."""
    counts = -(-nbytes // most_bytes)
    rows = np.repeat(np.arange(len(nbytes)), counts)
    first = np.cumsum(counts) - counts
    return rows, (np.arange(len(rows)) - first[rows]) * most_bytes
