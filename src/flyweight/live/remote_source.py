"""The publisher's blocks as a replica reads them: mapped memory and buckets.

The buckets of a publisher on another host are fetched into staging here, and read there.

Everything that a publisher says about memory is checked here, before anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from flyweight.checks import MAX_RANKS
from flyweight.cuda import driver
from flyweight.cuda.pinned_memory import pinned
from flyweight.errors import SpecError, TransportError
from flyweight.live.fetch import STAGING_SLOTS, Fetch
from flyweight.live.lanes import Transports
from flyweight.live.messages import Agreed, Begin, Handle, Memory, RemoteHandle, Want
from flyweight.live.source import row_major
from flyweight.memory import Buffer, available_bytes, collector_paused, page_memory
from flyweight.memory_table import HOST, BufferTable, Integers, row_major_strides
from flyweight.plans.copy_table import BoxTable, item_bytes, numbers_of, plan_copies
from flyweight.plans.tables import Pieces, Places, numbers, received_boxes
from flyweight.spec.manifest import TensorSpec
from flyweight.transports.network import NetworkHandle

_MAX_REACH = float(2**62)
_MAX_PARTS = 8 << 20
"""Each piece of a block is compared with each of its copies: few numbers could make very many."""


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Memory of the publisher, and the parts of copies whose bytes are there, row by row."""

    copy: Integers
    """The number of each copy in the plan."""
    offset: Integers
    shape: Integers
    """The items of the copy that are there."""
    memory: BufferTable

    def take(self, rows: NDArray[np.bool_]) -> Arrivals:
        return Arrivals(
            self.copy[rows], self.offset[rows], self.shape[rows], self.memory.take(rows)
        )


class RemoteSource:
    """The plan that was agreed, and the publisher's memory: kept from round to round."""

    def __init__(
        self,
        agreed: Agreed,
        tensors: Mapping[str, TensorSpec],
        tied: Mapping[str, str],
        want: Want,
        transports: Transports,
    ) -> None:
        """Work out the plan that the publisher has worked out too.

        tensors, tied: what the publisher has.
        want: what it was asked for.
        """
        try:
            self._boxes = received_boxes(agreed.sources, BoxTable.whole(tensors.values()))
        except SpecError as cause:
            raise TransportError(f"the publisher describes no blocks: {cause}") from cause
        self._item_bytes = item_bytes(tensors.values())[self._boxes.tensor]
        place, rank = numbers(agreed.place), numbers(agreed.rank)
        if not len(place) == len(rank) == len(self._boxes):
            raise TransportError(f"{len(self._boxes)} blocks have {len(place)} devices")
        self._check_index(place, len(agreed.places), "device")
        self._check_index(rank, MAX_RANKS, "rank")
        with collector_paused():
            wholes = BoxTable.whole(want.tensors.specs().values())
            self.sinks: BoxTable = received_boxes(want.blocks, wholes)
            names = list(tensors)
            tensor = numbers_of(list(want.tensors.names), names, tied)
            if (tensor < 0).any():
                raise TransportError("the publisher agrees to send tensors that it does not have")
            self.copies = plan_copies(
                self._boxes,
                replace(self.sinks, tensor=tensor[self.sinks.tensor]),
                names,
                source_ranks=rank,
                source_places=place,
                sink_places=numbers_of(want.places, agreed.places)[numbers(want.place)],
            )
        self.copy_bytes: Integers = self.copies.num_items * self._item_bytes[self.copies.source]
        self.nbytes = int(self.copy_bytes.sum())
        self.transports = transports
        self._device = next((driver.device_named(each) for each in want.places if each), None)
        self._lists: int | None = None
        """The number of the lists that are open."""
        self.generation = 0
        """Grows whenever other memory is mapped, so that copies must be prepared again."""
        self._handles: set[Handle] = set()
        self.mapped = self._arrivals(np.empty(0, np.int64))
        self.buckets: dict[int, Arrivals] = {}
        """What arrives in each bucket."""
        self.fetches: dict[int, Fetch] = {}
        """The buckets that must be fetched from another host."""
        self.lent: list[NetworkHandle] = []
        """Staging that other replicas may still read, after the round."""
        self._staging_slots: list[Buffer] = []
        """The memory that they are fetched into, kept for the next rounds."""

    def open(self, begin: Begin) -> None:
        """Map the memory that a round uses, all or nothing, unless the last round used it too."""
        memory = begin.memory
        self._take_back()
        if memory is None:
            if self._lists is None or self._lists != begin.lists:
                raise TransportError(f"the publisher refers to lists {begin.lists}, never sent")
            return
        self._lists, self.buckets, self.fetches = None, {}, {}  # until everything is mapped
        if any(isinstance(each, RemoteHandle) for each in memory.handles):
            raise TransportError("memory of another host cannot be mapped; it comes in buckets")
        slots = [each for each in memory.slots.values() if not isinstance(each, RemoteHandle)]
        handles = {*memory.handles, *slots}
        known, self._handles = self._handles, self._handles | handles
        try:
            blocks = self._opened_places(memory.handles, memory.places)
            buckets = self._opened_buckets(memory)
        except SpecError as cause:
            raise TransportError(f"the publisher describes no memory: {cause}") from cause
        self.mapped, self.buckets = blocks, buckets
        self._check_whole([self.mapped, *self.buckets.values()])
        for handle in known - handles:
            self.transports.of(handle).close_handle(handle)
        self._handles, self._lists = handles, begin.lists
        self.generation += 1

    def _opened_places(self, handles: Sequence[Handle], places: Places) -> Arrivals:
        """Return the copies from blocks that are mapped."""
        spans = [self.transports.of(handle).open(handle) for handle in handles]
        block, index, start = map(numbers, (places.source, places.handle, places.start))
        strides = numbers(places.strides, places.num_dims)
        if not len(block) == len(index) == len(start) == len(strides):
            raise SpecError(f"{len(block)} blocks have {len(start)} places")
        self._check_index(block, len(self._boxes), "block")
        self._check_index(index, len(spans), "handle")
        if places.num_dims != self._boxes.num_dims:
            raise SpecError(
                f"strides of {places.num_dims} dims for blocks of {self._boxes.num_dims}"
            )
        bases = np.array([each.address for each in spans], np.int64)
        sizes = np.array([each.nbytes for each in spans], np.int64)
        devices = [HOST if each.device is None else each.device for each in spans]
        shape = self._boxes.shape[block]
        _check_reach(shape, strides, start)
        mapped = BufferTable(
            bases[index] + start,
            shape,
            strides,
            self._item_bytes[block],
            np.array(devices, np.int64)[index],
            spans,
        )
        low, high = mapped.spans
        is_outside = (low < bases[index]) | (high > bases[index] + sizes[index])
        if is_outside.any():
            row = int(np.flatnonzero(is_outside)[0])
            base = int(bases[index[row]])
            raise TransportError(
                f"a block of {shape[row].tolist()} reaches from byte {int(low[row]) - base} to "
                f"{int(high[row]) - base} of {sizes[index[row]]} that were offered"
            )
        row_of = np.full(len(self._boxes), -1)
        row_of[block] = np.arange(len(block))
        copies = np.flatnonzero(row_of[self.copies.source] >= 0)
        return self._arrivals(copies, mapped, row_of[self.copies.source[copies]])

    def _arrivals(
        self, copies: Integers, memory: BufferTable | None = None, rows: Integers | None = None
    ) -> Arrivals:
        """Return whole copies from the blocks in these rows of `memory`."""
        shape = self.copies.shape[copies]
        if memory is None or rows is None:
            memory, rows = BufferTable.of([], shape), copies
        regions = memory.regions(rows, self.copies.source_offset[copies], shape)
        return Arrivals(copies, np.zeros_like(shape), shape, regions)

    def _opened_buckets(self, memory: Memory) -> dict[int, Arrivals]:
        for number, slot in memory.bucket_slots.items():
            if slot not in memory.slots:
                raise TransportError(f"bucket {number} uses slot {slot}, never sent")
        pieces: Pieces = memory.pieces
        bucket, block, at = map(numbers, (pieces.bucket, pieces.source, pieces.at))
        offset = numbers(pieces.offset, pieces.num_dims)
        shape = numbers(pieces.shape, pieces.num_dims)
        if not len(bucket) == len(block) == len(at) == len(offset) == len(shape):
            raise SpecError(f"{len(bucket)} pieces have {len(at)} places")
        self._check_index(block, len(self._boxes), "block")
        if len(block) and pieces.num_dims != self._boxes.num_dims:
            raise SpecError(f"pieces of {pieces.num_dims} dims, blocks of {self._boxes.num_dims}")
        order = np.argsort(bucket, kind="stable")
        present, starts = np.unique(bucket[order], return_index=True)
        rows = dict(zip(present.tolist(), np.split(order, starts[1:]), strict=False))
        unknown = rows.keys() - memory.bucket_slots.keys()
        if unknown:
            raise TransportError(f"pieces are of bucket {min(unknown)}, never sent")
        _, _, counts = self._copies_by_block
        num_parts = int(counts[block].sum())
        if num_parts > _MAX_PARTS:
            raise TransportError(
                f"{len(block)} pieces of buckets have {num_parts} parts of copies, at most "
                f"{_MAX_PARTS} are allowed"
            )
        none = np.empty(0, np.int64)
        ends = at.astype(float) + shape.astype(float).prod(axis=1) * self._item_bytes[block]
        sizes = {n: float(ends[rows.get(n, none)].max(initial=0)) for n in memory.bucket_slots}
        slots = self._opened_slots(memory, sizes)
        found = {}
        for number in memory.bucket_slots:
            some = rows.get(number, none)
            found[number] = self._in_bucket(
                slots[number], block[some], offset[some], shape[some], at[some]
            )
        return found

    def _opened_slots(self, memory: Memory, sizes: Mapping[int, float]) -> dict[int, Buffer]:
        """Return the memory of each bucket: a slot that is mapped, or staging for what is fetched.

        sizes: how many bytes of each bucket this replica reads.
        """
        mapped, handles = {}, {}
        for number, handle in memory.slots.items():
            if not isinstance(handle, RemoteHandle):
                mapped[number] = self.transports.of(handle).open(handle)
        for number, slot in memory.bucket_slots.items():
            if isinstance(handle := memory.slots[slot], RemoteHandle):
                handles[number] = handle
        if handles and self.transports.network is None:
            raise TransportError("the publisher offers memory of another host to one on its own")
        if handles:
            self.transports.engines.close_readers()  # they keep staging that may be replaced
        for number, handle in handles.items():
            if sizes[number] > handle.nbytes:
                raise TransportError(
                    f"bucket {number} reaches to byte {sizes[number]:.0f} of {handle.nbytes}"
                )
        staging = self._staging(len(handles), max((sizes[n] for n in handles), default=0.0))
        self.fetches = {}
        for index, (number, handle) in enumerate(sorted(handles.items())):
            memory_of = staging[index % len(staging)]
            into = Buffer.flat_at(memory_of.address, int(sizes[number]), memory_of)
            needed = msgspec.structs.replace(handle, nbytes=into.nbytes)
            self.fetches[number] = Fetch(needed, index % len(staging), into)
        return {
            number: self.fetches[number].into if number in handles else mapped[slot]
            for number, slot in memory.bucket_slots.items()
        }

    def _staging(self, num_buckets: int, nbytes: float) -> list[Buffer]:
        """Return memory for buckets of this size that are fetched; a few of them share it."""
        count = min(num_buckets, STAGING_SLOTS)
        slots = self._staging_slots
        # Copies that were prepared for the last round would keep staging that is replaced.
        if len(slots) >= count and all(each.nbytes >= nbytes for each in slots):
            return slots[:count]
        if count * nbytes > (left := available_bytes()):
            raise TransportError(
                f"no {count * nbytes:.0f} bytes of memory for buckets from another host: {left} "
                f"bytes are available; publish with a smaller bucket_bytes"
            )
        slots = [Buffer.of(page_memory(max(int(nbytes), 1))) for _ in range(count)]
        if self._device is not None:
            slots = [pinned(self._device, each) for each in slots]
        self._staging_slots = slots
        return slots

    def _in_bucket(
        self, slot: Buffer, block: Integers, offset: Integers, shape: Integers, at: Integers
    ) -> Arrivals:
        """Return the parts of copies that arrive in a bucket with these pieces."""
        whole, width = self._boxes.shape[block], self._item_bytes[block]
        is_wrong = (offset < 0) | (shape < 1) | (shape > whole) | (offset > whole - shape)
        ends = at.astype(float) + shape.astype(float).prod(axis=1) * width
        if is_wrong.any() or (at < 0).any() or (ends > slot.nbytes).any():
            raise TransportError(
                f"a piece of a bucket is outside of its block, or of its slot of {slot.nbytes} "
                f"bytes"
            )
        order, first, counts = self._copies_by_block
        pairs = np.repeat(np.arange(len(block)), counts[block])
        inside = np.arange(len(pairs)) - np.repeat(
            np.cumsum(counts[block]) - counts[block], counts[block]
        )
        copy = order[first[block[pairs]] + inside] if len(pairs) else np.empty(0, np.int64)
        wanted, size = self.copies.source_offset[copy], self.copies.shape[copy]
        low = np.maximum(wanted, offset[pairs])
        high = np.minimum(wanted + size, offset[pairs] + shape[pairs])
        is_there = (high > low).all(axis=1)
        copy, pairs, low, high = copy[is_there], pairs[is_there], low[is_there], high[is_there]
        memory = row_major(slot, at, shape, width)
        return Arrivals(
            copy,
            low - self.copies.source_offset[copy],
            high - low,
            memory.regions(pairs, low - offset[pairs], high - low),
        )

    @cached_property
    def _copies_by_block(self) -> tuple[Integers, Integers, Integers]:
        """The copies sorted by block, and the first of each block there and their number."""
        order = np.argsort(self.copies.source, kind="stable")
        counts = np.bincount(self.copies.source, minlength=len(self._boxes))
        return order, np.cumsum(counts) - counts, counts

    def byte_offsets(self, arrivals: Arrivals) -> Integers:
        """Return where the items that arrive start in the bytes of their copies."""
        shape = self.copies.shape[arrivals.copy]
        items: Integers = (arrivals.offset * row_major_strides(shape)).sum(axis=1)
        return items * self._item_bytes[self.copies.source[arrivals.copy]]

    def _check_whole(self, arrivals: Sequence[Arrivals]) -> None:
        """Raise unless every byte of every copy comes exactly once."""
        for each in arrivals:
            if not _is_contiguous(each.shape, self.copies.shape[each.copy]).all():
                raise TransportError("a part of a copy comes in several places of its bytes")
        copy = np.concatenate([each.copy for each in arrivals])
        nbytes = np.concatenate([each.memory.nbytes for each in arrivals])
        offset = np.concatenate([self.byte_offsets(each) for each in arrivals])
        order = np.lexsort((offset, copy))
        copy, nbytes, offset = copy[order], nbytes[order], offset[order]
        found = np.bincount(copy, weights=nbytes, minlength=len(self.copies)).astype(np.int64)
        if (found != self.copy_bytes).any():
            row = int(np.flatnonzero(found != self.copy_bytes)[0])
            raise TransportError(f"{found[row]} of the {self.copy_bytes[row]} bytes of a copy come")
        # Each part is contiguous in the copy's own bytes, so it starts where the last one ends.
        is_first = np.append(True, copy[1:] != copy[:-1]) if len(copy) else np.empty(0, bool)
        expected = np.where(is_first, 0, np.append(0, (offset + nbytes)[:-1])[: len(copy)])
        if (offset != expected).any():
            row = int(np.flatnonzero(offset != expected)[0])
            raise TransportError(f"byte {offset[row]} of a copy comes twice, or never")

    @staticmethod
    def _check_index(index: Integers, count: int, what: str) -> None:
        if len(index) and not 0 <= index.min() <= index.max() < count:
            raise TransportError(f"the publisher refers to {what} {index.max()} of {count}")

    def _take_back(self) -> None:
        """Let other replicas no longer read staging, which is about to change."""
        for handle in self.lent:
            self.transports.of(handle).release(handle)
        self.lent = []

    def forget(self) -> None:
        """Open everything anew in the next round, and use other staging."""
        self.buckets, self.fetches, self._staging_slots, self._lists = {}, {}, [], None

    def close(self) -> None:
        """Unmap all memory, and close the transports."""
        self._take_back()
        for handle in self._handles:
            self.transports.of(handle).close_handle(handle)
        self._handles = set()
        self.forget()
        self.mapped = self._arrivals(np.empty(0, np.int64))
        self.transports.close()


def _check_reach(shape: Integers, strides: Integers, start: Integers) -> None:
    """Raise if addresses would not fit in 64 bits."""
    reach = np.abs(strides.astype(float)) * shape
    if (reach.sum(axis=1) + np.abs(start.astype(float)) > _MAX_REACH).any():
        raise SpecError("a block has strides that no memory has")


def _is_contiguous(shape: Integers, whole: Integers) -> NDArray[np.bool_]:
    """Return which boxes of these shapes are one run of bytes of a whole one, row-major.

    That is a range of one dim, at one index of the dims before, with all of the dims after.
    """
    ones = np.ones((len(shape), 1), bool)
    is_index = np.hstack([ones, np.logical_and.accumulate(shape == 1, axis=1)[:, :-1]])
    is_all = np.logical_and.accumulate((shape == whole)[:, ::-1], axis=1)[:, ::-1]
    found: NDArray[np.bool_] = (is_index & np.hstack([is_all[:, 1:], ones])).any(axis=1)
    return found
