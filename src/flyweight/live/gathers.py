"""Gathers: buckets for replicas on other hosts, sent from the memory where their blocks lie.

Such a bucket needs no slot. Blocks on a device or in files are packed into slots of host memory
instead. Both kinds have only what one kind of replica wants: a network is slower than a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from flyweight.cuda.copy_tasks import run_bytes
from flyweight.live.source import ALIGN_BYTES, PublishedSource, Share
from flyweight.memory import Items
from flyweight.memory_table import BufferTable, Integers, row_major_strides
from flyweight.plans.buckets import PieceTable, pack
from flyweight.transports.network import NetworkHandle, NetworkTransport
from flyweight.transports.tcp import PACK_BYTES

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


def share_pieces(
    source: PublishedSource, share: Share, blocks: Integers, bucket_bytes: int
) -> Iterator[PieceTable]:
    """Yield buckets of what a share wants of blocks."""
    offset, shape = share.bounds(blocks)
    rows = np.arange(len(blocks))
    tables = pack(
        rows, shape, source.item_bytes[blocks], bucket_bytes=bucket_bytes, align_bytes=ALIGN_BYTES
    )
    for packed in tables:
        row = packed.block
        yield PieceTable(blocks[row], packed.offset + offset[row], packed.shape, packed.at)


def gathered_bucket(
    source: PublishedSource, pieces: PieceTable, number: int, *, transport: NetworkTransport
) -> GatheredBucket:
    """Offer pieces of blocks in host memory."""
    memory = source.memory.regions(pieces.block, pieces.offset, pieces.shape)
    handle = transport.offer_rows(_rows(memory, pieces.at), memory.owner)
    return GatheredBucket(number, -1 - number, pieces, handle)


def _row_major(memory: BufferTable) -> BufferTable:
    """Return a table of the same shapes whose items lie row-major without gaps."""
    strides = row_major_strides(memory.shape) * memory.item_bytes[:, None]
    return replace(memory, strides=strides, is_writable=True)


def _rows(memory: BufferTable, at: Integers) -> list[memoryview | Items]:
    """Return the bytes of a bucket, whose pieces start `at` these bytes, in rows."""
    found: list[memoryview | Items] = []
    run, end = run_bytes(_row_major(memory), memory), 0
    for row, nbytes in enumerate(memory.nbytes.tolist()):
        if at[row] > end:
            found.append(_PADDING[: at[row] - end])
        if run[row] == nbytes:
            found.append(
                memoryview((ctypes.c_char * nbytes).from_address(int(memory.address[row])))
            )
        else:
            found += _parts(memory.buffer(row).items(), max(int(run[row]), PACK_BYTES))
        end = int(at[row]) + nbytes
    return found


def _parts(items: Items, max_bytes: int) -> Iterator[Items]:
    """Cut an array into parts of at most so many bytes, in the order of its items."""
    if items.nbytes <= max_bytes:
        yield items
        return
    step = max(max_bytes * len(items) // items.nbytes, 1)
    for start in range(0, len(items), step):
        part = items[start : start + step]
        yield from _parts(part[0] if len(part) == 1 else part, max_bytes)
