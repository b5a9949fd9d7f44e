"""Stock: what a publisher has to give, block by block, and where each block can be read.

A trainer's model is one, an opened snapshot is one, and so is the copy that is held
in shared memory for replicas that come late. Handles, copies and digests that were
prepared for it live as long as it does.
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
from flyweight.live.copies import Copiers, Move, Moves, Regions
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
    """Items of a block that a copy reads, and how they are digested."""

    block: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    kind: DigestKind


@dataclass(frozen=True)
class StockBlock:
    """A box of a tensor that can be given."""

    tensor: int
    name: str
    spec: TensorSpec
    box: Box
    buffer: Buffer | None
    """Where it lies; None if it can only be read, from files or strange devices."""

    @property
    def items(self) -> Box:
        return self.spec.stored(self.box)

    @property
    def nbytes(self) -> int:
        return self.spec.box_bytes(self.box)


class Stock:
    """Blocks of one model, and what was prepared to move and digest them."""

    def __init__(self, source: Source, blocks: Sequence[StockBlock], copiers: Copiers) -> None:
        self.manifest: Manifest = source.manifest
        self.source, self.blocks, self._copiers = source, blocks, copiers
        self.by_name: dict[str, list[int]] = {}
        for number, block in enumerate(blocks):
            self.by_name.setdefault(block.name, []).append(number)
        self._digesting = threading.Lock()
        self._prepared: dict[DigestKind, tuple[list[Region], Regions]] = {}

    @classmethod
    def of(cls, source: Source, copiers: Copiers) -> Stock:
        blocks: list[StockBlock] = []
        for number, (name, spec) in enumerate(source.manifest.tensors.items()):
            found: list[tuple[Box, Buffer | None]]
            if isinstance(source, Model):
                found = [(block.box, block.buffer) for block in source.blocks(name)]
            else:
                found = [(box, None) for box in source.boxes(name)]
            blocks += [StockBlock(number, name, spec, *each) for each in found]
        return cls(source, blocks, copiers)

    @classmethod
    def at_rest(cls, stored: Stored, like: Stock, copiers: Copiers) -> Stock:
        """Return the same blocks as another stock has, read from files."""
        known = set(stored.manifest.names)
        for name, spec in like.manifest.tensors.items():
            if name not in known or stored.manifest.spec(name) != spec:
                found = stored.manifest.spec(name) if name in known else "not there"
                raise PlanError(f"{name!r} is {spec} in the model, in the snapshot it is {found}")
        for alias, name in like.manifest.tied.items():
            if alias in known and not same_bytes(stored, name, stored, alias):
                raise PlanError(
                    f"{name!r} and {alias!r} are one tensor in the model and differ in the snapshot"
                )
        blocks = [replace(block, buffer=None) for block in like.blocks]
        return cls(stored, blocks, copiers)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(Tensor.of(name, spec) for name, spec in self.manifest.tensors.items())

    @cached_property
    def sources(self) -> tuple[Block, ...]:
        return tuple(Block(b.tensor, b.box.offset, b.box.shape) for b in self.blocks)

    @cached_property
    def devices(self) -> list[int]:
        """The CUDA devices that have some of it."""
        return sorted(
            {b.buffer.device for b in self.blocks if b.buffer and b.buffer.device is not None}
        )

    @cached_property
    def is_on_host(self) -> bool:
        """True if all of it lies in memory of the host."""
        return all(b.buffer is not None and b.buffer.device is None for b in self.blocks)

    @cached_property
    def wholes(self) -> list[Region]:
        """Every block as a region, digested as is quickest where it lies."""
        kind: DigestKind = "xxh3" if self.is_on_host else "words"
        shapes = [block.items.shape for block in self.blocks]
        return [Region(n, (0,) * len(shape), shape, kind) for n, shape in enumerate(shapes)]

    def is_like(self, other: Stock) -> bool:
        """True if what was agreed for one holds for the other."""
        return (
            self.tensors == other.tensors
            and self.manifest.tied == other.manifest.tied
            and self.sources == other.sources
        )

    def lies_like(self, other: Stock) -> bool:
        """True if every block lies where the other's does: only values have changed."""
        return [_spot(block) for block in self.blocks] == [_spot(block) for block in other.blocks]

    def nbytes_of(self, copy: Copy) -> int:
        return prod(copy.shape) * self.blocks[copy.source].spec.item_bytes

    def agree(self, want: Want) -> tuple[Copy, ...]:
        """Return the copies that fill what a replica wants; raise PlanError if they cannot."""
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
        left = self.manifest.tensors.keys() - {tied.get(name, name) for name in names}
        if left and not want.may_leave:
            raise PlanError(
                f"the publisher has {len(left)} tensors that the replica lacks: {listed(left)}; "
                f"make the replica with extra='report' to leave them out"
            )
        sources = {
            name: [Shard(n, self.blocks[n].box) for n in self.by_name.get(tied.get(name, name), [])]
            for name in names
        }
        found = []
        for copy in reshard(sources, sinks).copies():
            spec, source = wanted[copy.name], self.blocks[copy.source.rank]
            items = spec.stored(copy.box)
            found.append(
                Copy(
                    copy.source.rank,
                    copy.sink.rank,
                    items.within(source.items).offset,
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

    def packing(self, bucket: Bucket, slot: Buffer) -> Packing:
        """Prepare what fills a bucket."""
        return Packing(self, bucket, slot, self._copiers)

    def read(self, piece: Piece, into: Buffer) -> None:
        """Put a piece of a block that lies nowhere in memory where it is wanted, on the host."""
        block, goal = self.blocks[piece.source], into.flat()
        assert goal is not None
        box = block.spec.elements(_box(piece).moved(block.items.offset))
        data = self.source.read(block.name, box, into=goal)
        if data.ctypes.data != goal.ctypes.data:
            goal[:] = data

    def digests(self, regions: Sequence[Region], deadline: float) -> dict[Region, int]:
        """Return the digest of what each copy reads."""
        shown: dict[DigestKind, list[Region]] = {}
        for each in regions:
            if self.blocks[each.block].buffer is not None:
                shown.setdefault(each.kind, []).append(each)
        found: dict[Region, int] = {}
        with self._digesting:  # what is prepared for a device is for one at a time
            for kind, some in shown.items():
                if kind not in self._prepared or self._prepared[kind][0] != some:
                    self._prepared[kind] = some, Regions([self._buffer(each) for each in some])
                values = self._prepared[kind][1].digests(kind, deadline)
                found.update(zip(some, values, strict=True))
        for each in regions:
            if each not in found:
                found[each] = self._read_digest(each, deadline)
        return found

    def _buffer(self, region: Region) -> Buffer:
        buffer = self.blocks[region.block].buffer
        assert buffer is not None
        return buffer.block(Box(region.offset, region.shape))

    def _read_digest(self, region: Region, deadline: float) -> int:
        block = self.blocks[region.block]
        corner = Box(region.offset, region.shape).moved(block.items.offset)
        whole = block.spec.elements(corner)
        is_whole = whole.shape == block.spec.shape and region.kind == "words"
        if is_whole and isinstance(self.source, Stored):
            known = whole_digest(self.source, block.name)
            if known is not None:
                return known
        running, at = Digest(block.spec.box_bytes(whole), region.kind), 0
        for items in block.spec.chunks(whole, _READ_BYTES):
            if monotonic() > deadline:
                raise TransferTimeout(f"{block.name!r} was not read in time")
            data = self.source.read(block.name, block.spec.elements(items.moved(corner.offset)))
            running.add(at, data)
            at += len(data)
        return running.value()


def _spot(block: StockBlock) -> tuple[object, ...] | None:
    at = block.buffer
    return None if at is None else (at.address, at.shape, at.strides, at.item_bytes, at.device)


class Packing:
    """What fills one bucket, prepared: copies from memory, and reads from files."""

    def __init__(self, stock: Stock, bucket: Bucket, slot: Buffer, copiers: Copiers) -> None:
        self.bucket, self._stock = bucket, stock
        moves: list[Move] = []
        self._reads: list[tuple[Piece, Buffer]] = []
        for piece in bucket.pieces:
            block = stock.blocks[piece.source]
            goal = row_major(slot, piece.at, piece.shape, block.spec.item_bytes)
            if block.buffer is None:
                self._reads.append((piece, goal))
            else:
                moves.append(Move(goal, block.buffer.block(_box(piece)), 0))
        self._moves = Moves(moves, copiers, is_bucket=True)

    def start(self) -> None:
        """Queue what goes by a device."""
        self._moves.start()

    def run(self, deadline: float) -> None:
        """Return once the bucket is full."""
        self._moves.run([None], deadline)
        for piece, goal in self._reads:
            if monotonic() > deadline:
                name = self._stock.blocks[piece.source].name
                raise TransferTimeout(f"{name!r} was not read in time")
            self._stock.read(piece, goal)

    def close(self) -> None:
        self._moves.close()


def _box(piece: Piece) -> Box:
    return Box(piece.offset, piece.shape)


def row_major(buffer: Buffer, at: int, shape: tuple[int, ...], item_bytes: int) -> Buffer:
    """Return items that stand row-major from byte `at` of a flat buffer on."""
    strides = tuple(item_bytes * stride for stride in strides_of(shape))
    return replace(
        buffer, address=buffer.address + at, shape=shape, strides=strides, item_bytes=item_bytes
    )


class Held:
    """A copy of a whole model in shared memory, which outlives the trainer's next step."""

    def __init__(self, stock: Stock, transport: SharedMemoryTransport, copiers: Copiers) -> None:
        self._transport = transport
        at, starts = 0, []
        for block in stock.blocks:
            starts.append(at)
            at += -(-block.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        self.segment = transport.allocate(at)
        blocks = [
            replace(
                block,
                buffer=row_major(self.segment, start, block.items.shape, block.spec.item_bytes),
            )
            for block, start in zip(stock.blocks, starts, strict=True)
        ]
        self.stock = Stock(stock.source, blocks, copiers)
        pieces = tuple(
            Piece(number, (0,) * len(block.items.shape), block.items.shape, start)
            for number, (block, start) in enumerate(zip(stock.blocks, starts, strict=True))
            if block.nbytes
        )
        self._bucket = Bucket(0, 0, pieces)
        self._packing = stock.packing(self._bucket, self.segment)

    def take_from(self, stock: Stock) -> None:
        """Take the next version from tensors that have moved."""
        self.stock.source = stock.source  # it would keep the old ones
        self._packing.close()
        self._packing = stock.packing(self._bucket, self.segment)

    def refill(self, deadline: float) -> None:
        self._packing.run(deadline)

    def close(self) -> None:
        self._packing.close()
        self._transport.free(self.segment)
