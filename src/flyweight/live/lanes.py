"""Lanes: how each block travels to a replica, by nearness, and the memory it travels through.

mapped    the replica reads the block where it lies: one copy
bucketed  packed into slots of device memory that both sides can reach, for trainers that must
          free or rewrite their memory soon, and for memory that other processes cannot map
host      packed into slots of shared memory on the host, which every process there can reach
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from flyweight.cuda import driver
from flyweight.errors import FlyweightError, PlanError, listed
from flyweight.live.messages import Block, Bucket, Copy, Handle, Piece, Place
from flyweight.live.source import ALIGN_BYTES, Packing, Stock
from flyweight.memory import Buffer
from flyweight.plans.buckets import pack
from flyweight.ports import Transport
from flyweight.transports.cuda_ipc import CudaIpcHandle, CudaIpcTransport
from flyweight.transports.shared_memory import SharedMemoryTransport

Strategy = Literal["auto", "mapped", "bucketed", "host"]
STRATEGIES: tuple[Strategy, ...] = ("auto", "mapped", "bucketed", "host")
MAPPED, HOST = "mapped", ""
"""Lanes; any other one is the uuid of the device that has the slots."""

_HOST_BUCKET_BYTES, _HOST_DEPTH = 64 << 20, 4
# Each time that two processes take turns on a device costs some tenths of a millisecond.
_DEVICE_BUCKET_BYTES, _DEVICE_DEPTH = 512 << 20, 2


@dataclass(frozen=True)
class Transports:
    """What moves bytes between processes of this host."""

    host: SharedMemoryTransport
    device: CudaIpcTransport

    def offer_all(self, buffers: Sequence[Buffer]) -> list[Handle]:
        """Offer memory where it lies: a copy of it would never be looked at again."""
        on_host = iter(self.host.offer_in_place([each for each in buffers if each.device is None]))
        return [
            next(on_host) if each.device is None else self.device.offer(each) for each in buffers
        ]

    def of(self, handle: Handle) -> Transport[Any]:
        """Return the transport that a handle belongs to."""
        return self.device if isinstance(handle, CudaIpcHandle) else self.host

    def release(self, handle: Handle) -> None:
        self.of(handle).release(handle)

    def open(self, handle: Handle) -> Buffer:
        return self.of(handle).open(handle)

    def close_handle(self, handle: Handle) -> None:
        self.of(handle).close_handle(handle)

    def close(self) -> None:
        self.device.close()
        self.host.close()


class Offers:
    """The blocks of a stock that can be read where they lie, offered as long as it lives."""

    def __init__(self, stock: Stock, transports: Transports) -> None:
        self._stock, self._transports = stock, transports
        hosts = [b.buffer for b in stock.blocks if b.buffer is not None and b.buffer.device is None]
        shown = iter(transports.host.can_offer_in_place(hosts))
        self._is_shown = [
            block.buffer is not None and (block.buffer.device is not None or next(shown))
            for block in stock.blocks
        ]
        self._places: dict[int, Place] = {}
        self._refusals: dict[int, str] = {}
        """Why each block on a device cannot be mapped by others, as far as that was asked."""

    @property
    def refusal(self) -> str:
        """Why some block on a device cannot be mapped by others; "" if all that are wanted can."""
        return next(filter(None, self._refusals.values()), "")

    def lanes(
        self,
        copies: Sequence[Copy],
        sinks: Sequence[Block],
        seen: Collection[str],
        strategy: Strategy,
    ) -> dict[int, str]:
        """Return the lane of each block that a replica wants something of.

        `seen` are the GPUs that the replica's process sees.
        """
        goals: dict[int, set[str]] = {}
        for copy in copies:
            goals.setdefault(copy.source, set()).add(sinks[copy.sink].place)
        found = {n: self._lane(n, each, seen, strategy) for n, each in goals.items()}
        if strategy == "mapped":
            far = [self._stock.blocks[n].name for n, lane in found.items() if lane != MAPPED]
            if far:
                way = self.refusal or "put them into shared memory (torch: model.share_memory())"
                raise PlanError(
                    f"{len(far)} tensors cannot be mapped by the replica: {listed(far)}; {way}, "
                    f"or publish with strategy='auto'"
                )
        return found

    def _lane(self, number: int, goals: set[str], seen: Collection[str], strategy: Strategy) -> str:
        buffer = self._stock.blocks[number].buffer
        if buffer is None or strategy == "host":
            return HOST
        if buffer.device is None:
            return MAPPED if self._is_shown[number] and strategy != "bucketed" else HOST
        is_seen = driver.uuid(buffer.device) in seen
        if not is_seen or not all(_reaches(buffer.device, goal) for goal in goals):
            return HOST
        if strategy == "bucketed":
            return driver.uuid(buffer.device)
        if number not in self._refusals:
            self._refusals[number] = self._transports.device.refusal(buffer)
        return driver.uuid(buffer.device) if self._refusals[number] else MAPPED

    def places(self, numbers: Sequence[int]) -> tuple[Place, ...]:
        """Offer blocks, each once."""
        new = [number for number in numbers if number not in self._places]
        buffers = [self._buffer(number) for number in new]
        handles = self._transports.offer_all(buffers)
        for number, buffer, handle in zip(new, buffers, handles, strict=True):
            start = buffer.address - buffer.span[0] if buffer.nbytes else 0
            self._places[number] = Place(number, handle, start, buffer.strides)
        return tuple(self._places[number] for number in numbers)

    def _buffer(self, number: int) -> Buffer:
        buffer = self._stock.blocks[number].buffer
        assert buffer is not None
        return buffer

    def close(self) -> None:
        for place in self._places.values():
            self._transports.release(place.handle)
        self._places.clear()


def _reaches(device: int, goal: str) -> bool:
    """True if who has `goal` can read memory of `device` here."""
    if goal == HOST:
        return False
    if goal == driver.uuid(device):
        return True
    other = driver.device_named(goal)
    return other is not None and driver.can_access_peer(other, device)


class Ring:
    """Slots that are filled and emptied in turn, kept from round to round."""

    def __init__(
        self, transports: Transports, *, bucket_bytes: int | None, depth: int | None
    ) -> None:
        self._transports, self._bucket_bytes, self._depth = transports, bucket_bytes, depth
        self._key: object = None
        self.generation = 0
        """Counts the layouts, so that a replica is told of each once."""
        self._homes: list[str] = []
        self.packings: list[Packing] = []
        self.slots: dict[int, Buffer] = {}
        self.handles: dict[int, Handle] = {}

    def lay_out(self, stock: Stock, homes: Mapping[str, Sequence[int]]) -> None:
        """Plan buckets for blocks, by where their slots are."""
        key = stock, {home: tuple(numbers) for home, numbers in homes.items()}
        if key == self._key:
            return
        self.close()
        self.generation += 1
        try:
            self._lay_out(stock, homes)
        except FlyweightError:
            self.close()
            raise
        self._key = key

    def _lay_out(self, stock: Stock, homes: Mapping[str, Sequence[int]]) -> None:
        laid = {home: self._packed(stock, home, each) for home, each in homes.items() if each}
        for home, packed in laid.items():
            first = len(self.slots)
            nbytes = max(_end(stock, pieces) for pieces in packed)
            default = _HOST_DEPTH if home == HOST else _DEVICE_DEPTH
            num_slots = min(default if self._depth is None else self._depth, len(packed))
            for slot in range(first, first + num_slots):
                self.slots[slot] = self._allocate(home, nbytes)
                (self.handles[slot],) = self._transports.offer_all([self.slots[slot]])
            for number, pieces in enumerate(packed):
                self._homes.append(home)
                bucket = Bucket(len(self._homes) - 1, first + number % num_slots, pieces)
                self.packings.append(stock.packing(bucket, self.slots[bucket.slot]))

    def _packed(self, stock: Stock, home: str, numbers: Sequence[int]) -> list[tuple[Piece, ...]]:
        default = _HOST_BUCKET_BYTES if home == HOST else _DEVICE_BUCKET_BYTES
        bucket_bytes = default if self._bucket_bytes is None else self._bucket_bytes
        blocks = [stock.blocks[n] for n in numbers]
        shapes = [(block.items.shape, block.spec.item_bytes) for block in blocks]
        return [
            tuple(
                Piece(numbers[each.index], each.box.offset, each.box.shape, each.at)
                for each in pieces
            )
            for pieces in pack(shapes, bucket_bytes=bucket_bytes, align_bytes=ALIGN_BYTES)
        ]

    def _allocate(self, home: str, nbytes: int) -> Buffer:
        if home == HOST:
            return self._transports.host.allocate(nbytes)
        device = driver.device_named(home)
        assert device is not None
        return driver.allocate(device, nbytes)

    def buckets_for(self, lanes: Mapping[int, str]) -> tuple[Bucket, ...]:
        """Return what of the buckets a replica needs."""
        found = []
        for packing, home in zip(self.packings, self._homes, strict=True):
            bucket = packing.bucket
            pieces = tuple(p for p in bucket.pieces if lanes.get(p.source) == home)
            if pieces:
                found.append(Bucket(bucket.number, bucket.slot, pieces))
        return tuple(found)

    def close(self) -> None:
        for packing in self.packings:
            packing.close()
        for handle in self.handles.values():
            self._transports.release(handle)
        for slot in self.slots.values():
            if slot.device is None:
                self._transports.host.free(slot)
            else:
                driver.free(slot)
        self._key, self.packings, self.slots, self.handles = None, [], {}, {}
        self._homes = []


def _end(stock: Stock, pieces: Sequence[Piece]) -> int:
    piece = pieces[-1]
    width = stock.blocks[piece.source].spec.item_bytes
    nbytes = width
    for size in piece.shape:
        nbytes *= size
    return piece.at + nbytes


def told(lanes: Mapping[int, str]) -> str:
    """Return the strategy in a word or two, for people."""
    kinds = {
        MAPPED if lane == MAPPED else "host" if lane == HOST else "bucketed"
        for lane in lanes.values()
    }
    return "+".join(sorted(kinds)) if kinds else "nothing"


def homes_of(lanes: Sequence[Mapping[int, str]]) -> dict[str, list[int]]:
    """Return the blocks that go through slots, by where those are, in the stock's order."""
    homes: dict[str, set[int]] = {}
    for number, lane in chain.from_iterable(each.items() for each in lanes):
        if lane != MAPPED:
            homes.setdefault(lane, set()).add(number)
    return {home: sorted(numbers) for home, numbers in sorted(homes.items())}
