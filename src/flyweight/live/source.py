"""The blocks that a publisher can give, where each one is in memory, and their digests.

The source is a trainer's model, an opened snapshot, or the copy that is held in shared memory
for replicas that ask between two publishes. Copies and digests that are prepared for a source
live as long as it does.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from time import monotonic
from typing import NamedTuple

from flyweight.adapters.model import Model
from flyweight.digest import Digest, DigestKind
from flyweight.errors import PlanError, TransferTimeout, listed
from flyweight.formats.stored import Stored, same_bytes, whole_digest
from flyweight.live.copies import BufferCopy, Copiers, PreparedCopies, PreparedDigests
from flyweight.live.messages import Block, Bucket, Copy, Piece, Tensor, Want
from flyweight.memory import Buffer
from flyweight.plans.fit import check_fit
from flyweight.plans.reshard import reshard
from flyweight.ports import Source
from flyweight.spec.box import Box, strides_of
from flyweight.spec.layout import Shard
from flyweight.spec.manifest import Manifest, TensorSpec
from flyweight.transports.shared_memory import SharedMemoryTransport

ALIGN_BYTES = 512
_READ_BYTES = 4 << 20


class Region(NamedTuple):
    """The items of a block that a copy reads, and how they are digested."""

    block: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    kind: DigestKind


@dataclass(frozen=True)
class SourceBlock:
    """A box of a tensor that a publisher has."""

    tensor: int
    name: str
    spec: TensorSpec
    box: Box
    buffer: Buffer | None
    """Its memory; None if it can only be read, from files or from an unknown device."""

    @property
    def items(self) -> Box:
        return self.spec.stored(self.box)

    @property
    def nbytes(self) -> int:
        return self.spec.box_bytes(self.box)


class PublishedSource:
    """The blocks of one model, with the copies and digests that were prepared for them."""

    def __init__(self, source: Source, blocks: Sequence[SourceBlock], copiers: Copiers) -> None:
        self.manifest: Manifest = source.manifest
        self.source, self.blocks, self.copiers = source, blocks, copiers
        self.by_name: dict[str, list[int]] = {}
        for number, block in enumerate(blocks):
            self.by_name.setdefault(block.name, []).append(number)
        self._digesting = threading.Lock()
        self._prepared: dict[DigestKind, tuple[list[Region], PreparedDigests]] = {}

    @classmethod
    def of(cls, source: Source, copiers: Copiers) -> PublishedSource:
        """Return the blocks of a model in memory, or of an opened snapshot."""
        blocks: list[SourceBlock] = []
        for number, (name, spec) in enumerate(source.manifest.tensors.items()):
            found: list[tuple[Box, Buffer | None]]
            if isinstance(source, Model):
                found = [(block.box, block.buffer) for block in source.blocks(name)]
            else:
                found = [(box, None) for box in source.boxes(name)]
            blocks += [SourceBlock(number, name, spec, *each) for each in found]
        return cls(source, blocks, copiers)

    def read_from(self, stored: Stored) -> PublishedSource:
        """Return the same blocks, read from a snapshot; raise PlanError if it does not fit."""
        known = set(stored.manifest.names)
        for name, spec in self.manifest.tensors.items():
            if name not in known or stored.manifest.spec(name) != spec:
                found = stored.manifest.spec(name) if name in known else "missing"
                raise PlanError(f"{name!r} is {spec} in the model and {found} in the snapshot")
        for alias, name in self.manifest.tied.items():
            if alias in known and not same_bytes(stored, name, stored, alias):
                raise PlanError(
                    f"{name!r} and {alias!r} are one tensor in the model and differ in the snapshot"
                )
        blocks = [replace(block, buffer=None) for block in self.blocks]
        return PublishedSource(stored, blocks, self.copiers)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(Tensor.of(name, spec) for name, spec in self.manifest.tensors.items())

    @cached_property
    def sources(self) -> tuple[Block, ...]:
        return tuple(Block(b.tensor, b.box.offset, b.box.shape) for b in self.blocks)

    @cached_property
    def devices(self) -> list[int]:
        """The CUDA devices that some of the blocks are on."""
        return sorted(
            {b.buffer.device for b in self.blocks if b.buffer and b.buffer.device is not None}
        )

    @cached_property
    def is_on_host(self) -> bool:
        """True if all blocks are in host memory."""
        return all(b.buffer is not None and b.buffer.device is None for b in self.blocks)

    @cached_property
    def whole_blocks(self) -> list[Region]:
        """Every block as a region, with the kind of digest that is fastest for its memory."""
        kind: DigestKind = "xxh3" if self.is_on_host else "words"
        shapes = [block.items.shape for block in self.blocks]
        return [Region(n, (0,) * len(shape), shape, kind) for n, shape in enumerate(shapes)]

    def has_same_blocks(self, other: PublishedSource) -> bool:
        """True if an agreement with a replica for one source holds for the other."""
        return (
            self.tensors == other.tensors
            and self.manifest.tied == other.manifest.tied
            and self.sources == other.sources
        )

    def has_same_memory(self, other: PublishedSource) -> bool:
        """True if every block is at the same address: at most values that are no tensors differ."""
        return list(map(_memory, self.blocks)) == list(map(_memory, other.blocks))

    def nbytes_of(self, copy: Copy) -> int:
        return prod(copy.shape) * self.blocks[copy.source].spec.item_bytes

    def plan(self, want: Want) -> tuple[Copy, ...]:
        """Return the copies that fill what a replica wants; raise PlanError if none can."""
        wanted = {each.name: each.spec() for each in want.tensors}
        self._check_specs(wanted)
        tied, names = self.manifest.tied, list(wanted)
        sinks: dict[str, list[Shard]] = {name: [] for name in names}
        for number, block in enumerate(want.blocks):
            if not 0 <= block.tensor < len(names):
                raise PlanError(f"block {number} is of tensor {block.tensor} of {len(names)}")
            name, box = names[block.tensor], block.box()
            if not Box.whole(wanted[name].shape).contains(box):
                raise PlanError(f"{name!r} is {wanted[name].shape}, {box} is wanted of it")
            sinks[name].append(Shard(number, box))
        unused = self.manifest.tensors.keys() - {tied.get(name, name) for name in names}
        if unused and not want.may_leave:
            raise PlanError(
                f"the publisher has {len(unused)} tensors that the replica lacks: "
                f"{listed(unused)}; make the replica with extra='report' to leave them out"
            )
        sources = {
            name: [Shard(n, self.blocks[n].box) for n in self.by_name.get(tied.get(name, name), [])]
            for name in names
        }
        found = []
        for copy in reshard(sources, sinks).copies():
            spec, origin = wanted[copy.name], self.blocks[copy.source.rank]
            items = spec.stored(copy.box)
            found.append(
                Copy(
                    copy.source.rank,
                    copy.sink.rank,
                    items.within(origin.items).offset,
                    items.within(spec.stored(copy.sink.box)).offset,
                    items.shape,
                )
            )
        return tuple(found)

    def _check_specs(self, wanted: Mapping[str, TensorSpec]) -> None:
        known = set(self.manifest.names)
        missing = [name for name in wanted if name not in known]
        if missing:
            raise PlanError(
                f"the replica wants {len(missing)} tensors that the publisher lacks: "
                f"{listed(missing)}"
            )
        have = {name: self.manifest.spec(name) for name in wanted}
        check_fit(have, wanted, source="at the publisher", sink="at the replica")

    def read(self, piece: Piece, into: Buffer) -> None:
        """Read a piece of a block that is not in memory into a buffer on the host."""
        block, target = self.blocks[piece.source], into.flat()
        assert target is not None
        box = block.spec.elements(_box(piece).moved(block.items.offset))
        data = self.source.read(block.name, box, into=target)
        if data.ctypes.data != target.ctypes.data:
            target[:] = data

    def digests(self, regions: Sequence[Region], deadline: float) -> dict[Region, int]:
        """Return the digest of each region."""
        in_memory: dict[DigestKind, list[Region]] = {}
        for each in regions:
            if self.blocks[each.block].buffer is not None:
                in_memory.setdefault(each.kind, []).append(each)
        found: dict[Region, int] = {}
        with self._digesting:  # prepared digests of a device can run once at a time
            for kind, some in in_memory.items():
                if kind not in self._prepared or self._prepared[kind][0] != some:
                    buffers = [self._buffer(each) for each in some]
                    self._prepared[kind] = some, PreparedDigests(buffers)
                values = self._prepared[kind][1].digests(kind, deadline)
                found.update(zip(some, values, strict=True))
        for each in regions:
            if each not in found:
                found[each] = self._digest_of_file(each, deadline)
        return found

    def _buffer(self, region: Region) -> Buffer:
        buffer = self.blocks[region.block].buffer
        assert buffer is not None
        return buffer.block(Box(region.offset, region.shape))

    def _digest_of_file(self, region: Region, deadline: float) -> int:
        block = self.blocks[region.block]
        corner = Box(region.offset, region.shape).moved(block.items.offset)
        whole = block.spec.elements(corner)
        is_whole = whole.shape == block.spec.shape and region.kind == "words"
        if is_whole and isinstance(self.source, Stored):
            known = whole_digest(self.source, block.name)
            if known is not None:
                return known
        digest, at = Digest(block.spec.box_bytes(whole), region.kind), 0
        for items in block.spec.chunks(whole, _READ_BYTES):
            if monotonic() > deadline:
                raise TransferTimeout(f"{block.name!r} was not read in time")
            data = self.source.read(block.name, block.spec.elements(items.moved(corner.offset)))
            digest.add(at, data)
            at += len(data)
        return digest.value()


def _memory(block: SourceBlock) -> tuple[object, ...] | None:
    at = block.buffer
    return None if at is None else (at.address, at.shape, at.strides, at.item_bytes, at.device)


class BucketFill:
    """Fills one bucket: prepared copies from memory, and reads from files."""

    def __init__(self, source: PublishedSource, bucket: Bucket, slot: Buffer) -> None:
        self.bucket, self._source = bucket, source
        copies: list[BufferCopy] = []
        self._reads: list[tuple[Piece, Buffer]] = []
        for piece in bucket.pieces:
            block = source.blocks[piece.source]
            target = row_major_view(slot, piece.at, piece.shape, block.spec.item_bytes)
            if block.buffer is None:
                self._reads.append((piece, target))
            else:
                copies.append(BufferCopy(target, block.buffer.block(_box(piece)), 0))
        self._copies = PreparedCopies(copies, source.copiers, is_bucket=True)

    def start(self) -> None:
        """Queue the copies of devices without waiting for them."""
        self._copies.start()

    def run(self, deadline: float) -> None:
        """Return once the bucket is full."""
        self._copies.run([None], deadline)
        for piece, target in self._reads:
            if monotonic() > deadline:
                name = self._source.blocks[piece.source].name
                raise TransferTimeout(f"{name!r} was not read in time")
            self._source.read(piece, target)

    def close(self) -> None:
        self._copies.close()


def _box(piece: Piece) -> Box:
    return Box(piece.offset, piece.shape)


def row_major_view(buffer: Buffer, at: int, shape: tuple[int, ...], item_bytes: int) -> Buffer:
    """Return the items that start at byte `at` of a flat buffer, in row-major order."""
    strides = tuple(item_bytes * stride for stride in strides_of(shape))
    return replace(
        buffer, address=buffer.address + at, shape=shape, strides=strides, item_bytes=item_bytes
    )


class HeldCopy:
    """A copy of a whole model in shared memory, which outlives the trainer's next step."""

    def __init__(self, model: PublishedSource, transport: SharedMemoryTransport) -> None:
        at, starts = 0, []
        for block in model.blocks:
            starts.append(at)
            at += -(-block.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        self._memory = transport.allocate(at)
        placed = list(zip(model.blocks, starts, strict=True))
        blocks = [
            replace(
                block,
                buffer=row_major_view(self._memory, at, block.items.shape, block.spec.item_bytes),
            )
            for block, at in placed
        ]
        self.source = PublishedSource(model.source, blocks, model.copiers)
        pieces = tuple(
            Piece(number, (0,) * len(block.items.shape), block.items.shape, at)
            for number, (block, at) in enumerate(placed)
            if block.nbytes
        )
        self._bucket = Bucket(0, 0, pieces)
        self._fill = BucketFill(model, self._bucket, self._memory)

    def copy_from(self, model: PublishedSource) -> None:
        """Copy the next version from these tensors, which replace those before."""
        self.source.source = model.source  # otherwise it would keep the old tensors alive
        self._fill.close()
        self._fill = BucketFill(model, self._bucket, self._memory)

    def refill(self, deadline: float) -> None:
        """Copy the model as it is now."""
        self._fill.run(deadline)
