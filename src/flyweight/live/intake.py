"""Intake: what a replica agreed to take, and the memory of the publisher that it comes by.

It comes from another process, so everything is checked before a byte is touched: that
each index is one, and that each block lies inside of the memory that was offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from flyweight.errors import TransportError
from flyweight.live.copies import Move
from flyweight.live.lanes import Transports
from flyweight.live.messages import Agreed, Begin, Bucket, Copy, Handle
from flyweight.live.source import row_major
from flyweight.memory import Buffer
from flyweight.spec.box import Box, strides_of
from flyweight.spec.manifest import TensorSpec


@dataclass(eq=False)
class Intake:
    """What was agreed, and the memory it comes by: kept from round to round."""

    sources: Sequence[Box]
    """The publisher's blocks, in items."""
    widths: Sequence[int]
    copies: Sequence[Copy]
    transports: Transports
    mapped: dict[int, Buffer] = field(default_factory=dict)
    slots: dict[int, Buffer] = field(default_factory=dict)
    begin: Begin | None = None
    """The one that brought the lists."""
    generation: int = 0
    """Grows whenever memory changes under what was prepared."""
    _handles: set[Handle] = field(default_factory=set)

    @classmethod
    def of(cls, agreed: Agreed, tensors: Sequence[TensorSpec], transports: Transports) -> Intake:
        for block in agreed.sources:
            _check_index(block.tensor, tensors, "tensor")
        specs = [tensors[block.tensor] for block in agreed.sources]
        boxes = [
            spec.stored(block.box()) for spec, block in zip(specs, agreed.sources, strict=True)
        ]
        intake = cls(boxes, [spec.item_bytes for spec in specs], agreed.copies, transports)
        for copy in agreed.copies:
            _check_index(copy.source, boxes, "block")
            whole = Box.whole(boxes[copy.source].shape)
            if not whole.contains(Box(copy.source_offset, copy.shape)):
                raise TransportError(f"{copy} reads outside of its block of {whole.shape}")
        return intake

    def nbytes(self, copy: Copy) -> int:
        return prod(copy.shape) * self.widths[copy.source]

    def open(self, begin: Begin) -> None:
        """Map what a round brings, all of it or nothing, unless it is what the last one brought."""
        if begin.places is None or begin.slots is None or begin.buckets is None:
            if self.begin is None or self.begin.lists != begin.lists:
                raise TransportError(f"the publisher speaks of lists {begin.lists}, never sent")
            return
        self.begin = None  # until all is mapped there is nothing to go by
        handles = {place.handle for place in begin.places} | set(begin.slots.values())
        known, self._handles = self._handles, self._handles | handles
        mapped = {}
        for place in begin.places:
            _check_index(place.source, self.sources, "block")
            span, box = self.transports.open(place.handle), self.sources[place.source]
            buffer = replace(
                span,
                address=span.address + place.start,
                shape=box.shape,
                strides=place.strides,
                item_bytes=self.widths[place.source],
                is_writable=False,
            )
            _check_inside(span, buffer)
            mapped[place.source] = buffer
        slots = {n: self.transports.open(handle) for n, handle in begin.slots.items()}
        for bucket in begin.buckets:
            if bucket.slot not in slots:
                raise TransportError(f"bucket {bucket.number} is to come by slot {bucket.slot}")
            for piece in bucket.pieces:
                _check_index(piece.source, self.sources, "block")
        for handle in known - handles:
            self.transports.close_handle(handle)
        self._handles, self.mapped, self.slots, self.begin = handles, mapped, slots, begin
        self.generation += 1

    def pieces(self, bucket: int) -> Iterator[tuple[int, Box, Buffer]]:
        """Yield what a bucket brings: the block, which items of it, and where they stand."""
        for each in self._buckets:
            if each.number == bucket:
                slot = self.slots[each.slot]
                for piece in each.pieces:
                    box = Box(piece.offset, piece.shape)
                    buffer = row_major(slot, piece.at, piece.shape, self.widths[piece.source])
                    _check_inside(slot, buffer)
                    yield piece.source, box, buffer
                return
        raise TransportError(f"bucket {bucket} is not one of those that were announced")

    @property
    def bucket_numbers(self) -> list[int]:
        return [each.number for each in self._buckets]

    @property
    def _buckets(self) -> Sequence[Bucket]:
        return () if self.begin is None or self.begin.buckets is None else self.begin.buckets

    def moves(self, source: int, box: Box, buffer: Buffer, sink_of: SinkOf) -> Iterator[Move]:
        """Yield what of some items of a block goes where."""
        for number in self._by_source.get(source, []):
            copy = self.copies[number]
            wanted = Box(copy.source_offset, copy.shape)
            meet = wanted.overlap(box)
            if meet is None:
                continue
            inner = meet.within(wanted)
            at = sum(a * b for a, b in zip(inner.offset, strides_of(copy.shape), strict=True))
            yield Move(
                sink_of(copy.sink).block(inner.moved(copy.sink_offset)),
                buffer.block(meet.within(box)),
                number,
                at * self.widths[source],
            )

    @cached_property
    def _by_source(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, copy in enumerate(self.copies):
            found.setdefault(copy.source, []).append(number)
        return found

    def close(self) -> None:
        for handle in self._handles:
            self.transports.close_handle(handle)
        self._handles = set()
        self.mapped, self.slots = {}, {}


SinkOf = Callable[[int], Buffer]


def _check_index(index: int, things: Sequence[object], what: str) -> None:
    if not 0 <= index < len(things):
        raise TransportError(f"the publisher speaks of {what} {index} of {len(things)}")


def _check_inside(span: Buffer, buffer: Buffer) -> None:
    """Raise unless a buffer lies in the memory that it is said to lie in."""
    if len(buffer.shape) != len(buffer.strides):
        raise TransportError(f"strides {buffer.strides} for a block of shape {buffer.shape}")
    low, high = buffer.span if buffer.nbytes else (buffer.address, buffer.address)
    if low < span.address or high > span.address + span.nbytes:
        raise TransportError(
            f"a block of {buffer.shape} reaches from byte {low - span.address} to "
            f"{high - span.address} of {span.nbytes} that were offered"
        )
