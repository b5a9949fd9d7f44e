"""Bucket slots: the memory that buckets are filled into and read from, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat, zip_longest
from operator import is_
from weakref import WeakKeyDictionary

import numpy as np

from flyweight.cuda import driver
from flyweight.cuda.pinned_memory import pinned
from flyweight.errors import FlyweightError
from flyweight.live.gathers import GatheredBucket, gathered_bucket, share_pieces
from flyweight.live.lanes import ENGINES, HOST, MAPPED, NETWORK, Lanes, Offers, Transports
from flyweight.live.messages import Handle, Memory
from flyweight.live.source import ALIGN_BYTES, BucketFill, PublishedSource, Share
from flyweight.memory import Buffer
from flyweight.memory_table import Integers
from flyweight.plans.buckets import PieceTable, pack
from flyweight.plans.tables import Pieces, Places, packed_columns
from flyweight.transports.engine_reads import EngineHandle
from flyweight.transports.network import NetworkHandle

_HOST_BUCKET_BYTES, _HOST_DEPTH = 64 << 20, 4
# Each replica of a chain is two buckets behind the one before it: small ones keep that short.
_MIN_REMOTE_BYTES, _MAX_REMOTE_BYTES, _REMOTE_DEPTH = 1 << 20, 8 << 20, 8
_REMOTE_BUCKETS = 32
"""A model is cut into so many buckets for other hosts, if their size allows."""
# Each switch between two processes on a device costs some tenths of a millisecond.
_DEVICE_BUCKET_BYTES, _DEVICE_DEPTH = 512 << 20, 2


Fill = BucketFill | GatheredBucket
_NewFill = Callable[[int], Fill]
"""Makes a bucket, given its number."""


def _is_each(some: Sequence[object], others: Sequence[object]) -> bool:
    """True if both have the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


_memory_numbers = count(1)


def new_memory_number() -> int:
    """Return a number that no other memory of this process has."""
    return next(_memory_numbers)


def _remote_bytes(shapes: Integers, item_bytes: Integers) -> int:
    """Return the size of the buckets in which blocks of these shapes go to other hosts."""
    nbytes = int((shapes.prod(axis=1) * item_bytes).sum())
    return min(max(nbytes // _REMOTE_BUCKETS, _MIN_REMOTE_BYTES), _MAX_REMOTE_BYTES)


@dataclass(frozen=True, eq=False)
class OfferedMemory:
    """The memory that a share goes through, as it is sent to the replica."""

    number: int
    """Its id: a replica that has received it gets only this number."""
    memory: Memory
    lanes: Lanes
    generation: int
    """The lanes and the layout of buckets that it was made from."""


class BucketSlots:
    """Memory that buckets are filled into and read from in turn, kept from round to round."""

    def __init__(self, transports: Transports, bucket_bytes: int | None, depth: int | None) -> None:
        self._transports, self._bucket_bytes, self._depth = transports, bucket_bytes, depth
        self._key: object = None
        self._laid_out: tuple[object, ...] = ()
        """The source and the lanes of the last plan."""
        self.generation = 0
        """Counts the layouts of buckets; each replica gets a layout once."""
        self._lanes: list[str] = []
        self.fills: list[Fill] = []
        self._share_of: dict[int, Share] = {}
        """The share that a bucket for other hosts is for."""
        self._slots: dict[int, Buffer] = {}
        self._handles: dict[int, Handle] = {}
        self._remote_handles: dict[int, NetworkHandle] = {}
        """The same slots, and gathered buckets, as other hosts read them."""
        self._engines: dict[int, str] = {}
        """The engine that serves a slot to other hosts, if one does."""
        self._served: dict[int, EngineHandle] = {}
        self._offered: WeakKeyDictionary[Share, OfferedMemory] = WeakKeyDictionary()
        """What was offered last for each share."""

    def lay_out(self, source: PublishedSource, lanes: Mapping[Share, Lanes]) -> None:
        """Plan buckets for the blocks of all these lanes; keep the last plan if it fits."""
        if self._key is not None and _is_each(self._laid_out, (source, *lanes.values())):
            return  # as in most rounds: nothing needs to be compared
        local = [each for share, each in lanes.items() if not share.is_remote]
        names = sorted({lane for each in local for lane in each} - {MAPPED})
        blocks = {
            lane: np.unique(np.concatenate([each[lane] for each in local if lane in each]))
            for lane in names
        }
        remote = {share: each for share, each in lanes.items() if share.is_remote}
        packed = {lane: numbers.tobytes() for lane, numbers in blocks.items()}
        key = source, packed, [share.number for share in remote]
        if key == self._key:
            self._laid_out = (source, *lanes.values())
            return
        self.close()
        self.generation += 1
        try:
            for lane, numbers in blocks.items():
                shapes, item_bytes = source.boxes.shape[numbers], source.item_bytes[numbers]
                bucket_bytes, depth = self._sizes(lane, shapes, item_bytes)
                buckets = pack(
                    numbers,
                    shapes,
                    item_bytes,
                    bucket_bytes=bucket_bytes,
                    align_bytes=ALIGN_BYTES,
                )
                for bucket in self._in_slots(source, lane, list(buckets), depth):
                    self._add(lane, bucket)
            self._lay_out_remote(source, remote)
        except FlyweightError:
            self.close()
            raise
        self._key, self._laid_out = key, (source, *lanes.values())

    def _lay_out_remote(self, source: PublishedSource, remote: Mapping[Share, Lanes]) -> None:
        """Plan buckets for replicas on other hosts, each with what one share wants.

        The shares take turns, so that none waits until others have all that they want.
        """
        turns: list[Iterator[tuple[str, Share, _NewFill]]] = []
        for share, lanes in remote.items():
            for lane, blocks in lanes.items():
                _, shapes = share.bounds(blocks)
                bucket_bytes, depth = self._sizes(NETWORK, shapes, source.item_bytes[blocks])
                buckets = list(share_pieces(source, share, blocks, bucket_bytes))
                fills = (
                    self._gathered(source, buckets)
                    if lane == NETWORK
                    else self._in_slots(source, lane, buckets, depth)
                )
                turns.append(zip(repeat(lane), repeat(share), fills, strict=False))
        for turn in zip_longest(*turns):
            for each in turn:
                if each is not None:
                    lane, share, fill = each
                    self._share_of[self._add(lane, fill)] = share

    def _add(self, lane: str, fill: _NewFill) -> int:
        """Add a bucket as the next one, and return its number."""
        number = len(self.fills)
        bucket = fill(number)
        if isinstance(bucket, GatheredBucket):
            self._remote_handles[bucket.slot] = bucket.handle
        self.fills.append(bucket)
        self._lanes.append(lane)
        return number

    def _gathered(
        self, source: PublishedSource, buckets: Iterable[PieceTable]
    ) -> Iterator[_NewFill]:
        """Yield what offers each bucket to other hosts, without a slot."""
        assert self._transports.network is not None
        for pieces in buckets:
            yield partial(gathered_bucket, source, pieces, transport=self._transports.network)

    def _sizes(self, lane: str, shapes: Integers, item_bytes: Integers) -> tuple[int, int]:
        """Return the bytes of a bucket for blocks of these shapes, and how many are in flight."""
        default = {
            HOST: (_HOST_BUCKET_BYTES, _HOST_DEPTH),
            NETWORK: (_remote_bytes(shapes, item_bytes), _REMOTE_DEPTH),
        }.get(lane, (_DEVICE_BUCKET_BYTES, _DEVICE_DEPTH))
        return (
            default[0] if self._bucket_bytes is None else self._bucket_bytes,
            default[1] if self._depth is None else self._depth,
        )

    def _in_slots(
        self, source: PublishedSource, lane: str, buckets: Sequence[PieceTable], depth: int
    ) -> Iterator[_NewFill]:
        """Allocate slots for buckets, and yield what fills each of them."""
        first, num_slots = len(self._slots), min(depth, len(buckets))
        ends = [
            int(each.at[-1] + each.shape[-1].prod() * source.item_bytes[each.block[-1]])
            for each in buckets
        ]
        for slot in range(first, first + num_slots):
            self._slots[slot] = self._allocate(source, lane, max(ends))
            if lane in ENGINES:
                self._engines[slot] = lane
            else:
                (self._handles[slot],) = self._transports.offer_all([self._slots[slot]])
        for index, pieces in enumerate(buckets):
            slot = first + index % num_slots
            yield partial(BucketFill, source, slot=slot, pieces=pieces, memory=self._slots[slot])

    def _allocate(self, source: PublishedSource, lane: str, nbytes: int) -> Buffer:
        if lane in (HOST, *ENGINES):
            engines, host = self._transports.engines, self._transports.host
            slot = engines.allocate(lane, nbytes) if lane in ENGINES else host.allocate(nbytes)
            return pinned(source.devices[0], slot) if source.devices else slot
        device = driver.device_named(lane)
        assert device is not None
        return driver.allocate(device, nbytes)

    def offer(self, share: Share, lanes: Lanes, offers: Offers) -> OfferedMemory:
        """Offer the memory that a share goes through, unless it is what was offered last."""
        self._serve(lanes)
        last = self._offered.get(share)
        if last is None or last.lanes is not lanes or last.generation != self.generation:
            mapped = lanes.get(MAPPED, np.empty(0, np.int64))
            memory = self._memory(
                share, self._buckets_for(share, lanes), *offers.places(share, mapped)
            )
            last = OfferedMemory(new_memory_number(), memory, lanes, self.generation)
            self._offered[share] = last
        return last

    def _serve(self, lanes: Lanes) -> None:
        """Name the slots of engines: other names than before, once a process was restarted."""
        for slot, engine in self._engines.items():
            if engine in lanes:
                handle = self._transports.engines.offer(engine, self._slots[slot])
                if handle != self._served.get(slot):
                    self._served[slot] = handle
                    self.generation += 1

    def _buckets_for(self, share: Share, lanes: Lanes) -> dict[int, PieceTable]:
        """Return the buckets that a replica needs, with only the pieces that it needs."""
        found = {}
        for fill, lane in zip(self.fills, self._lanes, strict=True):
            if share.is_remote or fill.number in self._share_of:
                if self._share_of.get(fill.number) is share:
                    found[fill.number] = fill.pieces
                continue
            rows = np.flatnonzero(np.isin(fill.pieces.block, lanes.get(lane, ())))
            if len(rows):
                found[fill.number] = fill.pieces.take(rows)
        return found

    def _handle(self, slot: int, *, is_remote: bool) -> Handle:
        if not is_remote:
            return self._handles[slot]
        if slot in self._served:
            return self._served[slot]
        if slot not in self._remote_handles:
            assert self._transports.network is not None
            self._remote_handles[slot] = self._transports.network.offer(self._slots[slot])
        return self._remote_handles[slot]

    def _memory(
        self,
        share: Share,
        buckets: Mapping[int, PieceTable],
        handles: tuple[Handle, ...],
        places: Places,
    ) -> Memory:
        """Return the memory of a round: these buckets, and blocks that are mapped."""
        slot_of = {number: self.fills[number].slot for number in buckets}
        tables = []
        for number, pieces in buckets.items():
            rows, renumbered = share.renumbered(pieces.block)
            taken = pieces.take(rows)
            bucket = np.full(len(rows), number)
            tables.append((bucket, renumbered, taken.offset, taken.shape, taken.at))
        return Memory(
            handles,
            places,
            {
                slot: self._handle(slot, is_remote=share.is_remote)
                for slot in sorted(set(slot_of.values()))
            },
            slot_of,
            Pieces(places.num_dims, *packed_columns(5, tables)),
        )

    def close(self) -> None:
        for fill in self.fills:
            fill.close()
        for handle in (*self._handles.values(), *self._remote_handles.values()):
            self._transports.of(handle).release(handle)
        for number, slot in self._slots.items():
            if number in self._engines:
                self._transports.engines.free(slot)
            elif slot.device is None:
                self._transports.host.free(slot)
            else:
                driver.free(slot)
        self._key, self._laid_out = None, ()
        self.fills, self._slots, self._handles, self._lanes = [], {}, {}, []
        self._share_of, self._remote_handles, self._engines, self._served = {}, {}, {}, {}
        self._offered.clear()
