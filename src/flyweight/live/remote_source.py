"""The publisher's blocks as a replica sees them: the plan, and the memory that it maps.

All of it comes from another process, so it is checked before a byte is read: every index must
exist, and every block must be inside of the memory that was offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod

from flyweight.errors import TransportError
from flyweight.live.copies import BufferCopy
from flyweight.live.lanes import Transports
from flyweight.live.messages import Agreed, Begin, Bucket, Copy, Handle
from flyweight.live.source import row_major_view
from flyweight.memory import Buffer
from flyweight.spec.box import Box, strides_of
from flyweight.spec.manifest import TensorSpec

SinkBuffer = Callable[[int], Buffer]
"""Returns the memory of a sink's block by its number."""


class RemoteSource:
    """The plan that was agreed, and the publisher's memory: kept from round to round."""

    def __init__(
        self, agreed: Agreed, tensors: Sequence[TensorSpec], transports: Transports
    ) -> None:
        for block in agreed.sources:
            _check_index(block.tensor, tensors, "tensor")
        specs = [tensors[block.tensor] for block in agreed.sources]
        pairs = zip(specs, agreed.sources, strict=True)
        self._blocks = [spec.stored(block.box()) for spec, block in pairs]
        """The publisher's blocks, in items."""
        self._item_bytes = [spec.item_bytes for spec in specs]
        self.copies, self._transports = agreed.copies, transports
        self._by_block: dict[int, list[int]] = {}
        for number, copy in enumerate(self.copies):
            _check_index(copy.source, self._blocks, "block")
            whole = Box.whole(self._blocks[copy.source].shape)
            if not whole.contains(Box(copy.source_offset, copy.shape)):
                raise TransportError(f"{copy} reads outside of its block of {whole.shape}")
            self._by_block.setdefault(copy.source, []).append(number)
        self.mapped: dict[int, Buffer] = {}
        """The blocks that are mapped, by number."""
        self._slots: dict[int, Buffer] = {}
        self._buckets: dict[int, Bucket] = {}
        self._lists: int | None = None
        """The number of the lists that are open."""
        self.generation = 0
        """Grows whenever other memory is mapped, so that copies must be prepared again."""
        self._handles: set[Handle] = set()

    def nbytes_of(self, copy: Copy) -> int:
        return prod(copy.shape) * self._item_bytes[copy.source]

    @property
    def nbytes(self) -> int:
        return sum(map(self.nbytes_of, self.copies))

    @property
    def bucket_numbers(self) -> list[int]:
        return list(self._buckets)

    def open(self, begin: Begin) -> None:
        """Map the memory that a round uses, all or nothing, unless the last round used it too."""
        if begin.places is None or begin.slots is None or begin.buckets is None:
            if self._lists is None or self._lists != begin.lists:
                raise TransportError(f"the publisher refers to lists {begin.lists}, never sent")
            return
        self._lists, self._buckets = None, {}  # until everything is mapped
        handles = {place.handle for place in begin.places} | set(begin.slots.values())
        known, self._handles = self._handles, self._handles | handles
        mapped = {}
        for place in begin.places:
            _check_index(place.source, self._blocks, "block")
            span = self._transports.of(place.handle).open(place.handle)
            buffer = replace(
                span,
                address=span.address + place.start,
                shape=self._blocks[place.source].shape,
                strides=place.strides,
                item_bytes=self._item_bytes[place.source],
                is_writable=False,
            )
            _check_inside(span, buffer)
            mapped[place.source] = buffer
        slots = {n: self._transports.of(handle).open(handle) for n, handle in begin.slots.items()}
        for bucket in begin.buckets:
            if bucket.slot not in slots:
                raise TransportError(f"bucket {bucket.number} uses slot {bucket.slot}, never sent")
            for piece in bucket.pieces:
                _check_index(piece.source, self._blocks, "block")
        for handle in known - handles:
            self._transports.of(handle).close_handle(handle)
        self._handles, self.mapped, self._slots = handles, mapped, slots
        self._lists, self._buckets = begin.lists, {each.number: each for each in begin.buckets}
        self.generation += 1

    def check_targets(self, blocks: Sequence[tuple[Box, int]]) -> None:
        """Raise unless every copy writes inside of the sink's blocks: their items and widths."""
        for copy in self.copies:
            if not 0 <= copy.sink < len(blocks):
                raise TransportError(f"{copy} writes to block {copy.sink} of {len(blocks)}")
            whole, item_bytes = blocks[copy.sink]
            if not whole.contains(Box(copy.sink_offset, copy.shape)):
                raise TransportError(f"{copy} writes outside of its block of {whole.shape}")
            if item_bytes != self._item_bytes[copy.source]:
                raise TransportError(f"{copy} writes other items than those of {item_bytes} bytes")

    def mapped_copies(self, block: int, sink: SinkBuffer) -> Iterator[BufferCopy]:
        """Yield the copies from a mapped block."""
        buffer = self.mapped[block]
        return self._copies(block, Box.whole(buffer.shape), buffer, sink)

    def bucket_copies(self, number: int, sink: SinkBuffer) -> Iterator[BufferCopy]:
        """Yield the copies from a bucket."""
        if number not in self._buckets:
            raise TransportError(
                f"bucket {number} is not one of the {len(self._buckets)} announced"
            )
        bucket = self._buckets[number]
        slot = self._slots[bucket.slot]
        for piece in bucket.pieces:
            item_bytes = self._item_bytes[piece.source]
            buffer = row_major_view(slot, piece.at, piece.shape, item_bytes)
            _check_inside(slot, buffer)
            yield from self._copies(piece.source, Box(piece.offset, piece.shape), buffer, sink)

    def _copies(
        self, block: int, box: Box, buffer: Buffer, sink: SinkBuffer
    ) -> Iterator[BufferCopy]:
        """Yield the copies from some items of a block, which are in `buffer`."""
        for number in self._by_block.get(block, []):
            copy = self.copies[number]
            wanted = Box(copy.source_offset, copy.shape)
            overlap = wanted.overlap(box)
            if overlap is None:
                continue
            inner = overlap.within(wanted)
            at = sum(a * b for a, b in zip(inner.offset, strides_of(copy.shape), strict=True))
            yield BufferCopy(
                sink(copy.sink).block(inner.moved(copy.sink_offset)),
                buffer.block(overlap.within(box)),
                number,
                at * self._item_bytes[block],
            )

    def close(self) -> None:
        """Unmap all memory, and close the transports."""
        for handle in self._handles:
            self._transports.of(handle).close_handle(handle)
        self._handles = set()
        self.mapped, self._slots = {}, {}
        self._transports.close()


def _check_index(index: int, things: Sequence[object], what: str) -> None:
    if not 0 <= index < len(things):
        raise TransportError(f"the publisher refers to {what} {index} of {len(things)}")


def _check_inside(span: Buffer, buffer: Buffer) -> None:
    """Raise unless a buffer is inside of the memory that was offered."""
    if len(buffer.shape) != len(buffer.strides):
        raise TransportError(f"strides {buffer.strides} for a block of shape {buffer.shape}")
    low, high = buffer.span if buffer.nbytes else (buffer.address, buffer.address)
    if low < span.address or high > span.address + span.nbytes:
        raise TransportError(
            f"a block of {buffer.shape} reaches from byte {low - span.address} to "
            f"{high - span.address} of {span.nbytes} that were offered"
        )
