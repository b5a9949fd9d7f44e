"""Lanes: how each block gets to a replica, and the memory that it goes through.

mapped    the replica maps the block's own memory and copies from it: one copy
bucketed  the block is packed into slots of device memory that both sides can map, for trainers
          that must free or rewrite their memory soon, and for memory that cannot be mapped
host      the block is packed into slots of shared host memory, which every process can map
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, Literal

from flyweight.cuda import driver
from flyweight.errors import FlyweightError, PlanError, listed
from flyweight.live.messages import Block, Bucket, Copy, Handle, Piece, Place
from flyweight.live.source import ALIGN_BYTES, BucketFill, PublishedSource
from flyweight.memory import Buffer
from flyweight.plans.buckets import pack
from flyweight.ports import Transport
from flyweight.transports.cuda_ipc import CudaIpcHandle, CudaIpcTransport
from flyweight.transports.shared_memory import SharedMemoryTransport

TransportChoice = Literal["auto", "mapped", "bucketed", "host"]
TRANSPORTS: tuple[TransportChoice, ...] = ("auto", "mapped", "bucketed", "host")
MAPPED, HOST = "mapped", ""
"""Two lanes; any other one is the uuid of the device that has the slots."""

_HOST_BUCKET_BYTES, _HOST_DEPTH = 64 << 20, 4
# Each switch between two processes on a device costs some tenths of a millisecond.
_DEVICE_BUCKET_BYTES, _DEVICE_DEPTH = 512 << 20, 2


@dataclass(frozen=True)
class Transports:
    """The transports between processes of this host: one for host memory, one for GPUs."""

    host: SharedMemoryTransport
    device: CudaIpcTransport

    def offer_all(self, buffers: Sequence[Buffer]) -> list[Handle]:
        """Offer buffers without a copy, which the next round would not see."""
        on_host = iter(self.host.offer_in_place([each for each in buffers if each.device is None]))
        return [
            next(on_host) if each.device is None else self.device.offer(each) for each in buffers
        ]

    def of(self, handle: Handle) -> Transport[Any]:
        """Return the transport that a handle belongs to."""
        return self.device if isinstance(handle, CudaIpcHandle) else self.host

    def close(self) -> None:
        self.device.close()
        self.host.close()


class Offers:
    """Chooses the lane of each block, and offers those that replicas can map."""

    def __init__(self, source: PublishedSource, transports: Transports) -> None:
        self._source, self._transports = source, transports
        buffers = [block.buffer for block in source.blocks]
        on_host = [each for each in buffers if each is not None and each.device is None]
        shown = iter(transports.host.can_offer_in_place(on_host))
        self._can_map = [
            each is not None and (each.device is not None or next(shown)) for each in buffers
        ]
        self._places: dict[int, Place] = {}
        self._refusals: dict[int, str] = {}
        """Why each block on a device that was tried cannot be mapped; "" if it can."""

    @property
    def refusal(self) -> str:
        """Why some block on a device cannot be mapped by other processes; "" if all can."""
        return next(filter(None, self._refusals.values()), "")

    def lanes(
        self,
        copies: Sequence[Copy],
        sinks: Sequence[Block],
        visible: Collection[str],
        transport: TransportChoice,
    ) -> dict[int, str]:
        """Return the lane of each block that a replica wants something of.

        `visible` are the GPUs that the replica's process sees.
        """
        targets: dict[int, set[str]] = {}
        for copy in copies:
            targets.setdefault(copy.source, set()).add(sinks[copy.sink].place)
        found = {n: self._lane(n, each, visible, transport) for n, each in targets.items()}
        if transport == "mapped":
            unmapped = [self._source.blocks[n].name for n, lane in found.items() if lane != MAPPED]
            if unmapped:
                remedy = self.refusal or "put them into shared memory (torch: model.share_memory())"
                raise PlanError(
                    f"{len(unmapped)} tensors cannot be mapped by the replica: "
                    f"{listed(unmapped)}; {remedy}, or publish with transport='auto'"
                )
        return found

    def _lane(
        self, number: int, targets: set[str], visible: Collection[str], transport: TransportChoice
    ) -> str:
        buffer = self._source.blocks[number].buffer
        if buffer is None or transport == "host":
            return HOST
        if buffer.device is None:
            return MAPPED if self._can_map[number] and transport != "bucketed" else HOST
        uuid = driver.uuid(buffer.device)
        if uuid not in visible or not all(_can_read(buffer.device, each) for each in targets):
            return HOST
        if transport == "bucketed":
            return uuid
        if number not in self._refusals:
            self._refusals[number] = self._transports.device.refusal(buffer)
        return uuid if self._refusals[number] else MAPPED

    def places(self, numbers: Sequence[int]) -> tuple[Place, ...]:
        """Offer blocks, each once, and return where they are."""
        new = [number for number in numbers if number not in self._places]
        buffers = [self._buffer(number) for number in new]
        handles = self._transports.offer_all(buffers)
        for number, buffer, handle in zip(new, buffers, handles, strict=True):
            start = buffer.address - buffer.span[0] if buffer.nbytes else 0
            self._places[number] = Place(number, handle, start, buffer.strides)
        return tuple(self._places[number] for number in numbers)

    def _buffer(self, number: int) -> Buffer:
        buffer = self._source.blocks[number].buffer
        assert buffer is not None
        return buffer

    def close(self) -> None:
        for place in self._places.values():
            self._transports.of(place.handle).release(place.handle)
        self._places.clear()


def visible_devices() -> tuple[str, ...]:
    """Return the uuids of the GPUs that this process sees."""
    return tuple(map(driver.uuid, range(driver.num_devices())))


def _can_read(device: int, target: str) -> bool:
    """True if a process with memory on `target` can read memory of `device`."""
    if target == HOST:
        return False
    if target == driver.uuid(device):
        return True
    other = driver.device_named(target)
    return other is not None and driver.can_access_peer(other, device)


class BucketSlots:
    """Memory that buckets are filled into and read from in turn, kept from round to round."""

    def __init__(self, transports: Transports, bucket_bytes: int | None, depth: int | None) -> None:
        self._transports, self._bucket_bytes, self._depth = transports, bucket_bytes, depth
        self._key: object = None
        self.generation = 0
        """Counts the layouts of buckets; each replica gets a layout once."""
        self._lanes: list[str] = []
        self.fills: list[BucketFill] = []
        self.slots: dict[int, Buffer] = {}
        self.handles: dict[int, Handle] = {}

    def lay_out(self, source: PublishedSource, blocks: Mapping[str, Sequence[int]]) -> None:
        """Plan buckets for the blocks of each lane; keep the plan of the last round if it fits."""
        key = source, {lane: tuple(numbers) for lane, numbers in blocks.items()}
        if key == self._key:
            return
        self.close()
        self.generation += 1
        try:
            for lane, numbers in blocks.items():
                if numbers:
                    self._lay_out(source, lane, self._pack(source, lane, numbers))
        except FlyweightError:
            self.close()
            raise
        self._key = key

    def _lay_out(
        self, source: PublishedSource, lane: str, packed: Sequence[tuple[Piece, ...]]
    ) -> None:
        first = len(self.slots)
        nbytes = max(_end(source, pieces[-1]) for pieces in packed)
        default = _HOST_DEPTH if lane == HOST else _DEVICE_DEPTH
        num_slots = min(default if self._depth is None else self._depth, len(packed))
        for slot in range(first, first + num_slots):
            self.slots[slot] = self._allocate(lane, nbytes)
            (self.handles[slot],) = self._transports.offer_all([self.slots[slot]])
        for number, pieces in enumerate(packed):
            bucket = Bucket(len(self._lanes), first + number % num_slots, pieces)
            self._lanes.append(lane)
            self.fills.append(BucketFill(source, bucket, self.slots[bucket.slot]))

    def _pack(
        self, source: PublishedSource, lane: str, numbers: Sequence[int]
    ) -> list[tuple[Piece, ...]]:
        default = _HOST_BUCKET_BYTES if lane == HOST else _DEVICE_BUCKET_BYTES
        bucket_bytes = default if self._bucket_bytes is None else self._bucket_bytes
        blocks = [source.blocks[n] for n in numbers]
        shapes = [(block.items.shape, block.spec.item_bytes) for block in blocks]
        return [
            tuple(
                Piece(numbers[each.index], each.box.offset, each.box.shape, each.at)
                for each in pieces
            )
            for pieces in pack(shapes, bucket_bytes=bucket_bytes, align_bytes=ALIGN_BYTES)
        ]

    def _allocate(self, lane: str, nbytes: int) -> Buffer:
        if lane == HOST:
            return self._transports.host.allocate(nbytes)
        device = driver.device_named(lane)
        assert device is not None
        return driver.allocate(device, nbytes)

    def buckets_for(self, lanes: Mapping[int, str]) -> tuple[Bucket, ...]:
        """Return the buckets that a replica needs, with only the pieces that it needs."""
        found = []
        for fill, lane in zip(self.fills, self._lanes, strict=True):
            bucket = fill.bucket
            pieces = tuple(p for p in bucket.pieces if lanes.get(p.source) == lane)
            if pieces:
                found.append(Bucket(bucket.number, bucket.slot, pieces))
        return tuple(found)

    def close(self) -> None:
        for fill in self.fills:
            fill.close()
        for handle in self.handles.values():
            self._transports.of(handle).release(handle)
        for slot in self.slots.values():
            if slot.device is None:
                self._transports.host.free(slot)
            else:
                driver.free(slot)
        self._key, self.fills, self.slots, self.handles, self._lanes = None, [], {}, {}, []


def _end(source: PublishedSource, piece: Piece) -> int:
    """Return the byte at which the last piece of a bucket ends."""
    return piece.at + prod(piece.shape) * source.blocks[piece.source].spec.item_bytes


def lane_names(lanes: Mapping[int, str]) -> str:
    """Return the lanes in use as text for people, such as 'host+mapped'."""
    kinds = {
        MAPPED if lane == MAPPED else "host" if lane == HOST else "bucketed"
        for lane in lanes.values()
    }
    return "+".join(sorted(kinds)) if kinds else "nothing"


def bucketed_blocks(lanes: Sequence[Mapping[int, str]]) -> dict[str, list[int]]:
    """Return the blocks that go through buckets, by lane, in the order of the source."""
    found: dict[str, set[int]] = {}
    for number, lane in chain.from_iterable(each.items() for each in lanes):
        if lane != MAPPED:
            found.setdefault(lane, set()).add(number)
    return {lane: sorted(numbers) for lane, numbers in sorted(found.items())}
