"""Lanes: how each block gets to a replica, and the memory that it goes through.

mapped    the replica maps the block's own memory and copies from it: one copy
bucketed  the block is packed into slots of device memory that both sides can map, for trainers
          that must free or rewrite their memory soon, and for memory that cannot be mapped
host      the block is packed into slots of shared host memory, which every process can map; for a
          replica on another host, what it wants of the block, and it reads over the network
network   a replica on another host reads the block's own memory over the network
nixl, mooncake  what a replica on another host wants of the block is packed into slots that such an
          engine serves
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from flyweight.cuda import driver
from flyweight.errors import PlanError, TransportError, listed
from flyweight.live.messages import Handle
from flyweight.live.source import PublishedSource, Share
from flyweight.memory import Buffer
from flyweight.memory_table import HOST as HOST_MEMORY
from flyweight.memory_table import Integers
from flyweight.plans.tables import Places, packed
from flyweight.ports import Transport
from flyweight.transports.cuda_ipc import CudaIpcHandle, CudaIpcTransport, allocations_of
from flyweight.transports.engine_reads import EngineReads
from flyweight.transports.network import NetworkHandle, NetworkTransport
from flyweight.transports.shared_memory import SharedMemoryTransport

TransportChoice = Literal["auto", "mapped", "bucketed", "host"]
TRANSPORTS: tuple[TransportChoice, ...] = ("auto", "mapped", "bucketed", "host")
MAPPED, NETWORK, HOST = "mapped", "network", ""
ENGINES = ("nixl", "mooncake")
"""Lanes; any other one is the uuid of the device that has the slots."""
Lanes = Mapping[str, Integers]
"""The blocks of each lane, by number."""


@dataclass(frozen=True)
class Transports:
    """The transports of a process: for host memory, for GPUs, and to other hosts if it has one."""

    host: SharedMemoryTransport
    device: CudaIpcTransport
    network: NetworkTransport | None = None
    engines: EngineReads = field(default_factory=EngineReads)

    def offer_all(self, buffers: Sequence[Buffer]) -> list[Handle]:
        """Offer buffers without a copy, which the next round would not see."""
        on_host = iter(self.host.offer_in_place([each for each in buffers if each.device is None]))
        return [
            next(on_host) if each.device is None else self.device.offer(each) for each in buffers
        ]

    def of(self, handle: Handle) -> Transport[Any]:
        """Return the transport that a handle belongs to."""
        if isinstance(handle, NetworkHandle):
            if self.network is None:
                raise TransportError("a handle names memory of a host without a connection")
            return self.network
        return self.device if isinstance(handle, CudaIpcHandle) else self.host

    def close(self) -> None:
        self.engines.close()
        if self.network is not None:
            self.network.close()
        self.device.close()
        self.host.close()


class Offers:
    """Chooses the lane of each block, and offers the memory that replicas can map.

    What is offered is a range of a segment of shared memory, or of an allocation of a device.
    Most models lie in few of them.
    """

    def __init__(self, source: PublishedSource, transports: Transports) -> None:
        self._source, self._transports = source, transports
        self._lanes: WeakKeyDictionary[Share, Lanes] = WeakKeyDictionary()
        self._ranges: list[_Range] = []
        self._range = np.full(len(source.boxes), -1)
        """The range that each block lies in; -1 if other processes cannot map it."""
        memory = source.memory
        low, high = memory.spans
        for device in (HOST_MEMORY, *source.devices):
            rows = np.flatnonzero((memory.device == device) & (memory.nbytes > 0))
            if device == HOST_MEMORY:
                index = transports.host.segments_of(low[rows], high[rows])
            else:
                index = allocations_of(device, low[rows], high[rows])
            self._range[rows] = np.where(index < 0, -1, index + len(self._ranges))
            on = None if device == HOST_MEMORY else device
            inside = index >= 0
            index, low_of, high_of = index[inside], low[rows][inside], high[rows][inside]
            starts = np.full(index.max(initial=-1) + 1, np.iinfo(np.int64).max)
            ends = np.zeros_like(starts)
            np.minimum.at(starts, index, low_of)
            np.maximum.at(ends, index, high_of)
            self._ranges += [
                _Range(Buffer.flat_at(start, end - start, memory.owner, device=on))
                for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
            ]

    @property
    def refusal(self) -> str:
        """Why some memory of a device cannot be mapped by other processes; "" if all can."""
        return next((each.refusal for each in self._ranges if each.refusal), "")

    def lanes(self, share: Share, transport: TransportChoice) -> Lanes:
        """Return the lane of each block that a replica wants something of."""
        if share not in self._lanes:
            self._lanes[share] = self._chosen(share, transport)
        return self._lanes[share]

    def _chosen(self, share: Share, transport: TransportChoice) -> Lanes:
        used = np.unique(share.regions.block)
        if share.is_remote:
            return self._chosen_remote(share, used, transport)
        device = self._source.memory.device[used]
        found: dict[str, Integers] = {}
        is_host = device == HOST_MEMORY
        is_mapped = is_host & (self._range[used] >= 0) & (transport in ("auto", "mapped"))
        for each in np.unique(device[device >= 0]).tolist():
            rows = device == each
            uuid = driver.uuid(each)
            if transport == "host" or uuid not in share.devices:
                continue
            is_read = ~np.isin(used, self._unreadable(share, each)) & rows
            is_mappable = is_read & self._is_mappable(used)
            if transport == "bucketed":
                is_mappable[:] = False
            is_mapped |= is_mappable
            found[uuid] = used[is_read & ~is_mappable]
        bucketed = np.concatenate([np.empty(0, np.int64), *found.values()])
        found[HOST] = used[~is_mapped & ~np.isin(used, bucketed)]
        found[MAPPED] = used[is_mapped]
        if transport == "mapped" and len(found[MAPPED]) < len(used):
            unmapped = sorted({self._source.name_of(n) for n in used[~is_mapped].tolist()})
            remedy = self.refusal or "put them into shared memory (torch: model.share_memory())"
            raise PlanError(
                f"{len(unmapped)} tensors cannot be mapped by the replica: "
                f"{listed(unmapped)}; {remedy}, or publish with transport='auto'"
            )
        return {lane: blocks for lane, blocks in sorted(found.items()) if len(blocks)}

    def _chosen_remote(self, share: Share, used: Integers, transport: TransportChoice) -> Lanes:
        """Return the lanes of a replica on another host."""
        if transport == "mapped":
            raise PlanError(
                "a replica on another host cannot map the publisher's memory; publish with "
                "transport='auto'"
            )
        if share.engine in ENGINES:
            return {share.engine: used} if len(used) else {}
        is_sent = (self._source.memory.device[used] == HOST_MEMORY) & (transport == "auto")
        found = {HOST: used[~is_sent], NETWORK: used[is_sent]}
        return {lane: blocks for lane, blocks in found.items() if len(blocks)}

    def _unreadable(self, share: Share, device: int) -> Integers:
        """Return the blocks that go to memory which cannot be filled from a device."""
        is_bad = np.array([not _can_read(device, each) for each in share.places], bool)
        return np.unique(share.regions.block[is_bad[share.place]])

    def _is_mappable(self, blocks: Integers) -> NDArray[np.bool_]:
        """Return which blocks of devices other processes can map."""
        numbers = self._range[blocks]
        for number in np.unique(numbers[numbers >= 0]).tolist():
            self._ranges[number].check(self._transports.device)
        can_map = np.array([each.refusal == "" for each in self._ranges] + [False])
        found: NDArray[np.bool_] = can_map[numbers]
        return found

    def places(self, share: Share, blocks: Integers) -> tuple[tuple[Handle, ...], Places]:
        """Offer the memory of blocks, and return where a replica finds them in it."""
        rows, renumbered = share.renumbered(blocks)
        blocks = blocks[rows]
        numbers, index = np.unique(self._range[blocks], return_inverse=True)
        ranges = [self._ranges[number] for number in numbers.tolist()]
        new = [each for each in ranges if each.handle is None]
        handles = self._transports.offer_all([each.buffer for each in new])
        for each, handle in zip(new, handles, strict=True):
            each.handle = handle
        memory = self._source.memory
        starts = np.array([each.buffer.address for each in ranges], np.int64)
        places = Places(
            memory.strides.shape[1],
            packed(renumbered),
            packed(index),
            packed(memory.address[blocks] - starts[index]),
            packed(memory.strides[blocks]),
        )
        return tuple(each.handle for each in ranges if each.handle is not None), places

    def close(self) -> None:
        for each in self._ranges:
            if each.handle is not None:
                self._transports.of(each.handle).release(each.handle)
                each.handle = None


@dataclass(eq=False)
class _Range:
    """Memory that other processes may map as one."""

    buffer: Buffer
    handle: Handle | None = None
    """Its offer, if it was offered."""
    refusal: str = ""
    """Why a device's memory cannot be mapped; "" if it can, or was not tried."""
    is_tried: bool = False

    def check(self, transport: CudaIpcTransport) -> None:
        if not self.is_tried:
            self.refusal, self.is_tried = transport.refusal(self.buffer), True


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


def lane_names(lanes: Lanes, engine: str) -> str:
    """Return the lanes in use as text for people, such as 'host+mapped' or 'network:nixl'."""
    if engine and lanes:
        return f"{NETWORK}:{engine}" if engine in ENGINES else NETWORK
    kinds = {MAPPED if lane == MAPPED else "host" if lane == HOST else "bucketed" for lane in lanes}
    return "+".join(sorted(kinds)) if kinds else "nothing"
