"""Gathers: buckets for replicas on other hosts, sent from the memory where their blocks lie.

Such a bucket needs no slot, and has only what one kind of replica wants. Blocks that lie in very
short runs of bytes, on a device or in files are packed into slots of host memory instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from flyweight.cuda.copy_tasks import run_bytes
from flyweight.live.source import ALIGN_BYTES, PublishedSource, Share
from flyweight.memory_table import HOST, BufferTable, Integers, row_major_strides
from flyweight.plans.buckets import PieceTable, pack
from flyweight.transports.network import NetworkHandle, NetworkTransport

_MIN_RUN_BYTES = 2048
"""Shorter runs are packed first: to send each of them by itself costs more than a copy."""
_PADDING = memoryview(bytes(ALIGN_BYTES))


@dataclass(frozen=True, eq=False)
class GatheredBucket:
    """A bucket that is always full, as its bytes are sent from the source itself."""

    number: int
    slot: int
    pieces: PieceTable
    handle: NetworkHandle

    def start(self) -> None:
        """Do nothing: there is nothing to copy."""

    def run(self, deadline: float) -> None:
        """Do nothing: the bucket is full."""

    def close(self) -> None:
        """Do nothing: the handle is released with the slots."""


def gathered_blocks(source: PublishedSource, share: Share, blocks: Integers) -> Integers:
    """Return those of the blocks that can be sent from where they lie."""
    on_host = blocks[source.memory.device[blocks] == HOST]
    memory = source.memory.regions(on_host, *share.bounds(on_host))
    run = run_bytes(_row_major(memory), memory)
    found: Integers = on_host[(run >= _MIN_RUN_BYTES) | (run == memory.nbytes)]
    return found


def gathered_buckets(
    source: PublishedSource,
    share: Share,
    blocks: Integers,
    transport: NetworkTransport,
    *,
    bucket_bytes: int,
    first: int,
) -> Iterator[GatheredBucket]:
    """Offer what a share wants of blocks, in buckets with numbers from `first`."""
    offset, shape = share.bounds(blocks)
    rows = np.arange(len(blocks))
    tables = pack(
        rows, shape, source.item_bytes[blocks], bucket_bytes=bucket_bytes, align_bytes=ALIGN_BYTES
    )
    for number, packed in enumerate(tables, first):
        row = packed.block
        pieces = PieceTable(blocks[row], packed.offset + offset[row], packed.shape, packed.at)
        memory = source.memory.regions(pieces.block, pieces.offset, pieces.shape)
        handle = transport.offer_rows(_rows(memory, pieces.at), memory.owner)
        yield GatheredBucket(number, -1 - number, pieces, handle)


def _row_major(memory: BufferTable) -> BufferTable:
    """Return a table of the same shapes whose items lie row-major without gaps."""
    strides = row_major_strides(memory.shape) * memory.item_bytes[:, None]
    return replace(memory, strides=strides, is_writable=True)


def _rows(memory: BufferTable, at: Integers) -> list[memoryview]:
    """Return the bytes of a bucket, whose pieces start `at` these bytes, in runs."""
    found: list[memoryview] = []
    run, end = run_bytes(_row_major(memory), memory), 0
    for row, nbytes in enumerate(memory.nbytes.tolist()):
        if at[row] > end:
            found.append(_PADDING[: at[row] - end])
        starts = memory.address[row]
        if run[row] < nbytes:
            sizes, strides = memory.shape[row], memory.strides[row]
            num_runs, dim = nbytes // int(run[row]), 0
            while num_runs > 1:  # the dims before those that a run has all of
                starts = np.add.outer(starts, np.arange(sizes[dim]) * strides[dim])
                num_runs //= int(sizes[dim])
                dim += 1
        kind = ctypes.c_char * int(min(run[row], nbytes))
        found += [memoryview(kind.from_address(each)) for each in np.ravel(starts).tolist()]
        end = int(at[row]) + nbytes
    return found
