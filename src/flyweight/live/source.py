"""The blocks that a process can give, where each one is in memory, and their digests.

The source is a trainer's model, an opened snapshot, or the copy that is held in shared memory
for replicas that ask between two publishes. A block has a number, its row in the tables. Copies
and digests that are prepared for a source live as long as it does.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import monotonic

import numpy as np

from flyweight.adapters.model import Model
from flyweight.copies import BufferCopies, Copiers, PreparedCopies, PreparedDigests
from flyweight.digest import Digest, DigestKind, Words
from flyweight.errors import TransferTimeout
from flyweight.formats.stored import Stored, whole_digest
from flyweight.memory import Buffer
from flyweight.memory_table import HOST, NOWHERE, BufferTable, Integers, row_major_strides
from flyweight.plans.buckets import PieceTable
from flyweight.plans.copy_table import BoxTable, item_bytes
from flyweight.ports import Source
from flyweight.spec.box import Box
from flyweight.spec.manifest import Manifest, TensorSpec
from flyweight.transports.shared_memory import SharedMemoryTransport

ALIGN_BYTES = 512
_READ_BYTES = 4 << 20
_MAX_PREPARED = 16


@dataclass(frozen=True, eq=False)
class Regions:
    """The items of blocks that copies read, one row each."""

    block: Integers
    offset: Integers
    """Counted from the block's corner."""
    shape: Integers


@dataclass(frozen=True, eq=False)
class Share:
    """The copies for a replica that read blocks of one process."""

    number: int
    """Its id, which no other share of the same publisher has."""
    regions: Regions
    """What each copy reads, with blocks as this process numbers them."""
    source: Integers
    """The number that the replica knows each copy's block by."""
    places: Sequence[str]
    """The devices that occur: the uuid of a GPU, or "" for the host."""
    place: Integers
    """The index of the device that each copy writes to."""
    devices: frozenset[str]
    """The GPUs that the replica's process sees."""
    engine: str = ""
    """What a replica on another host reads by, such as 'sockets'; "" for one on this host."""

    @property
    def is_remote(self) -> bool:
        """True if the replica is on another host, or connected as if it were."""
        return self.engine != ""

    def bounds(self, blocks: Integers) -> tuple[Integers, Integers]:
        """Return the offset and shape of the smallest box of each block that has all it reads.

        blocks: numbers of this process in ascending order, each of which is read.
        """
        regions = self.regions
        rows = np.searchsorted(blocks, regions.block)
        is_one = np.append(blocks, -1)[rows] == regions.block
        rows, offset, shape = rows[is_one], regions.offset[is_one], regions.shape[is_one]
        low = np.full((len(blocks), shape.shape[1]), np.iinfo(np.int64).max)
        high = np.zeros_like(low)
        np.minimum.at(low, rows, offset)
        np.maximum.at(high, rows, offset + shape)
        return low, high - low

    def renumbered(self, blocks: Integers) -> tuple[Integers, Integers]:
        """Return, for blocks of this process, an index into them and the replica's numbers.

        A block that ranks have under two names has two numbers.
        """
        known, numbers = self._numbers
        first, end = np.searchsorted(known, blocks), np.searchsorted(known, blocks, "right")
        index = np.repeat(np.arange(len(blocks)), end - first)
        return index, numbers[first[index] + np.arange(len(index)) - np.searchsorted(index, index)]

    @cached_property
    def _numbers(self) -> tuple[Integers, Integers]:
        span = int(self.source.max(initial=0)) + 1
        pairs = np.unique(self.regions.block * span + self.source)
        return pairs // span, pairs % span


class PublishedSource:
    """The blocks of one model, with the copies and digests that were prepared for them."""

    def __init__(
        self,
        source: Source,
        boxes: BoxTable,
        memory: BufferTable,
        copiers: Copiers,
        tensors: Mapping[str, TensorSpec] | None = None,
    ) -> None:
        """Describe a source.

        boxes: the blocks, in items, of `tensors`.
        memory: where each block is; NOWHERE if it can only be read.
        tensors: by default those of the source.
        """
        self.manifest: Manifest = source.manifest
        self.source, self.copiers = source, copiers
        self.boxes, self.memory = boxes, memory
        self.tensors = self.manifest.tensors if tensors is None else tensors
        self.names = list(self.tensors)
        self._digesting = threading.Lock()
        self._prepared: dict[Regions, PreparedDigests] = {}

    @classmethod
    def of(cls, source: Source, copiers: Copiers, num_dims: int = 1) -> PublishedSource:
        """Return the blocks of a model in memory, or of an opened snapshot.

        num_dims: the least number of dims of the tables; those of all ranks must have the same.
        """
        tensors = source.manifest.tensors
        if isinstance(source, Model):
            boxes, memory = source.tables(list(tensors))
        else:
            boxes = BoxTable.of(
                [
                    (number, spec.stored(box))
                    for number, (name, spec) in enumerate(tensors.items())
                    for box in source.boxes(name)
                ]
            )
            memory = BufferTable.of([None] * len(boxes), boxes.shape)
        num_dims = max(num_dims, boxes.num_dims)
        return cls(source, boxes.widened(num_dims), memory.widened(num_dims), copiers)

    @cached_property
    def item_bytes(self) -> Integers:
        """The width of the items of each block."""
        return item_bytes(self.tensors.values())[self.boxes.tensor]

    @cached_property
    def nbytes(self) -> Integers:
        """The bytes of each block."""
        return self.boxes.num_items * self.item_bytes

    @cached_property
    def devices(self) -> list[int]:
        """The CUDA devices that some of the blocks are on."""
        return [int(each) for each in np.unique(self.memory.device) if each >= 0]

    @cached_property
    def is_on_host(self) -> bool:
        """True if all blocks are in host memory."""
        return bool((self.memory.device == HOST).all())

    @cached_property
    def whole_blocks(self) -> Regions:
        """Every block as a region."""
        return Regions(
            np.arange(len(self.boxes)), np.zeros_like(self.boxes.shape), self.boxes.shape
        )

    @property
    def fast_digest_kind(self) -> DigestKind:
        """The kind of digest that is fastest for the memory of this source."""
        return "xxh3" if self.is_on_host else "words"

    def name_of(self, block: int) -> str:
        """Return the name of a block's tensor."""
        return self.names[int(self.boxes.tensor[block])]

    def has_same_blocks(self, other: PublishedSource) -> bool:
        """True if an agreement with a replica for one source holds for the other."""
        return (
            list(self.tensors.items()) == list(other.tensors.items())
            and self.manifest.tied == other.manifest.tied
            and self.boxes.is_same(other.boxes)
        )

    def has_same_memory(self, other: PublishedSource) -> bool:
        """True if every block is at the same address: at most values that are no tensors differ."""
        return all(
            np.array_equal(getattr(self.memory, name), getattr(other.memory, name))
            for name in ("address", "strides", "device")
        )

    def read(self, block: int, items: Box, into: Buffer) -> None:
        """Read items of a block that is not in memory into a buffer on the host."""
        target = into.flat()
        assert target is not None
        _, box = self._located(block, items)
        data = self.source.read(self.name_of(block), box, into=target)
        if data.ctypes.data != target.ctypes.data:
            target[:] = data

    def _located(self, block: int, items: Box) -> tuple[TensorSpec, Box]:
        """Return the spec of a block's tensor, and items of the block as a box of the tensor."""
        spec = self.tensors[self.name_of(block)]
        extra = len(items.shape) - len(spec.shape)
        moved = items.moved(self.boxes.offset[block].tolist())
        return spec, spec.elements(Box(moved.offset[extra:], moved.shape[extra:]))

    def digests(self, regions: Regions, kind: DigestKind, deadline: float) -> Words:
        """Return the digest of each region."""
        in_memory = self.memory.device[regions.block] != NOWHERE
        rows = np.flatnonzero(in_memory)
        found: Words = np.zeros(len(regions.block), np.uint64)
        with self._digesting:  # prepared digests of a device can run once at a time
            if len(rows):
                if regions not in self._prepared:
                    memory = self.memory.regions(
                        regions.block[rows], regions.offset[rows], regions.shape[rows]
                    )
                    while len(self._prepared) >= _MAX_PREPARED:
                        del self._prepared[next(iter(self._prepared))]
                    self._prepared[regions] = PreparedDigests(memory)
                found[rows] = self._prepared[regions].digests(kind, deadline)
        for row in np.flatnonzero(~in_memory).tolist():
            items = Box(tuple(regions.offset[row].tolist()), tuple(regions.shape[row].tolist()))
            found[row] = self._digest_of_file(int(regions.block[row]), items, kind, deadline)
        return found

    def _digest_of_file(self, block: int, items: Box, kind: DigestKind, deadline: float) -> int:
        name, (spec, whole) = self.name_of(block), self._located(block, items)
        if whole.shape == spec.shape and kind == "words" and isinstance(self.source, Stored):
            known = whole_digest(self.source, name)
            if known is not None:
                return known
        corner = spec.stored(whole).offset
        digest, at = Digest(spec.box_bytes(whole), kind), 0
        for chunk in spec.chunks(whole, _READ_BYTES):
            if monotonic() > deadline:
                raise TransferTimeout(f"{name!r} was not read in time")
            data = self.source.read(name, spec.elements(chunk.moved(corner)))
            digest.add(at, data)
            at += len(data)
        return digest.value()


class BucketFill:
    """Fills one bucket: prepared copies from memory, and reads from files."""

    def __init__(
        self, source: PublishedSource, number: int, slot: int, pieces: PieceTable, memory: Buffer
    ) -> None:
        """Prepare to fill a bucket; `memory` is that of its slot."""
        self.number, self.slot, self._source = number, slot, source
        self.pieces = pieces
        sink = row_major(memory, pieces.at, pieces.shape, source.item_bytes[pieces.block])
        in_memory = source.memory.device[pieces.block] != NOWHERE
        rows = np.flatnonzero(in_memory)
        self._reads = [
            (int(pieces.block[row]), pieces.box(row), sink.buffer(row))
            for row in np.flatnonzero(~in_memory).tolist()
        ]
        taken = pieces.take(rows)
        copies = BufferCopies.whole(
            sink.take(rows),
            source.memory.regions(taken.block, taken.offset, taken.shape),
            np.arange(len(rows)),
        )
        self._copies = PreparedCopies(copies, source.copiers, copies.sink.nbytes, is_bucket=True)

    def start(self) -> None:
        """Queue the copies of devices without waiting for them."""
        self._copies.start()

    def run(self, deadline: float) -> None:
        """Return once the bucket is full."""
        self._copies.run(deadline)
        for block, items, target in self._reads:
            if monotonic() > deadline:
                raise TransferTimeout(f"{self._source.name_of(block)!r} was not read in time")
            self._source.read(block, items, target)

    def close(self) -> None:
        self._copies.close()


def row_major(buffer: Buffer, at: Integers, shape: Integers, item_bytes: Integers) -> BufferTable:
    """Return items in row-major order that start at bytes `at` of a flat buffer."""
    return BufferTable(
        buffer.address + at,
        shape,
        row_major_strides(shape) * item_bytes[:, None],
        item_bytes,
        np.full(len(shape), HOST if buffer.device is None else buffer.device),
        buffer,
    )


def aligned_starts(nbytes: Integers) -> Integers:
    """Return where blocks start that lie one after the other, aligned."""
    sizes = -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return np.cumsum(sizes) - sizes


class HeldCopy:
    """A copy of a whole model in shared memory, which outlives the trainer's next step."""

    def __init__(self, model: PublishedSource, transport: SharedMemoryTransport) -> None:
        starts = aligned_starts(model.nbytes)
        end = int(starts[-1] + model.nbytes[-1]) if len(starts) else 0
        self._memory = transport.allocate(-(-end // ALIGN_BYTES) * ALIGN_BYTES)
        memory = row_major(self._memory, starts, model.boxes.shape, model.item_bytes)
        self.source = PublishedSource(
            model.source, model.boxes, memory, model.copiers, model.tensors
        )
        full = np.flatnonzero(model.nbytes)
        self._pieces = PieceTable(
            full, np.zeros_like(model.boxes.shape[full]), model.boxes.shape[full], starts[full]
        )
        self._fill = BucketFill(model, 0, 0, self._pieces, self._memory)

    @property
    def memory(self) -> Buffer:
        """All of it: the blocks one after the other, each at a multiple of 512 bytes."""
        return self._memory

    def copy_from(self, model: PublishedSource) -> None:
        """Copy the next version from these tensors, which replace those before."""
        self.source.source = model.source  # otherwise it would keep the old tensors alive
        self._fill.close()
        self._fill = BucketFill(model, 0, 0, self._pieces, self._memory)

    def refill(self, deadline: float) -> None:
        """Copy the model as it is now."""
        self._fill.run(deadline)
