"""Source rank: one rank of the trainer, and all that a session has of it.

Its rows come in one of four ways: from memory that is mapped, through a ring on their device, by
the trainer's own writes into staging, or from any holder of them, in ranges (`fetch.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flyweight.digest import Words
from flyweight.live import messages
from flyweight.live.catalog import Catalog
from flyweight.live.plan import Plan, Stream
from flyweight.live.publish_id import PublishId
from flyweight.live.reader import Reader, seconds_for_holder
from flyweight.live.ring import RingCopies
from flyweight.live.rows import RowCopies, check_digests, words_of
from flyweight.live.staging import Staging
from flyweight.live.target import ModelTarget, Target
from flyweight.memory import Buffer
from flyweight.memory_table import BufferTable, Integers
from flyweight.transports.address import Endpoint
from flyweight.transports.device_segments import open_segments
from flyweight.transports.segments import Segment, mapped_rows


@dataclass(kw_only=True, eq=False)
class SourceRank:
    """What a session has of a rank; `fill` and `check` run in a thread for each rank."""

    rank: int
    endpoint: Endpoint
    """Where it serves its stream."""
    reader: Reader | None
    """A connection on this host, if there is one."""
    catalog: Catalog
    plan: Plan
    kinds: Sequence[str]
    """What is leased: that of the plan, and where a loader puts it."""
    target: Target
    transport: str
    replica: str
    _copies: tuple[BufferTable, RowCopies] | None = None
    _ring_copies: RingCopies | None = None
    _filled: Segment | None = None
    """The memory that the trainer has filled last, whose file it has."""

    @property
    def stream(self) -> Stream:
        return self.plan.streams[self.rank]

    @property
    def _local(self) -> Reader:
        assert self.reader is not None
        return self.reader

    @property
    def leased(self) -> messages.Leased | None:
        return None if self.reader is None else self.reader.leased

    def ask_lease(self, id: PublishId, deadline: float) -> None:
        self._local.ask_lease(id, self.kinds, self.rank, deadline, can_map=self._can_map)

    def lease(self, deadline: float) -> None:
        """Take the lease that was asked for, and map its memory if that is possible."""
        self._local.lease(deadline, self._rows_in)

    def _rows_in(self, layout: messages.Layout, files: Sequence[int]) -> BufferTable:
        """Map the segments of the trainer, and return where the rows lie in them."""
        catalog, here = self.catalog, self.catalog.rank == self.rank
        shape, item_bytes = catalog.blocks.shape[here], catalog.item_bytes
        item_bytes = item_bytes[catalog.blocks.tensor[here]]
        mapped = open_segments(layout.segments, files)
        return self.stream.in_source(mapped_rows(layout.places, mapped, shape, item_bytes))

    def _devices(self, rows: Integers) -> tuple[NDArray[np.str_], NDArray[np.str_]]:
        """Return the devices that rows come from, and those that they go to."""
        stream, devices, wanted = self.stream, self.catalog.devices, self.plan.wanted.devices
        at = devices.index[self.catalog.rank == self.rank][stream.block[rows]]
        return np.array(devices.names)[at], np.array(wanted.names)[wanted.index[stream.sink[rows]]]

    @cached_property
    def _can_map(self) -> bool:
        """True unless rows must be cast on another device than the one that they come from."""
        at, to = self._devices(np.flatnonzero(self.stream.cast[:, 0] >= 0))
        return self.transport in ("auto", "mapped") and bool((at == to).all())

    @cached_property
    def _ring_device(self) -> str:
        """The device of which the trainer may fill a ring; "" if there is none.

        Its blocks, and all that they fill here, must be on one device, the same one.
        """
        if self.transport not in ("auto", "filled") or not isinstance(self.target, ModelTarget):
            return ""
        names = np.unique(self._devices(np.arange(len(self.stream.sink)))).tolist()
        return names[0] if len(names) == 1 else ""

    def arrived(self, deadline: float) -> Arrived | None:
        """Return the rows that are mapped, or come through a ring; None if they must be staged."""
        if (leased := self.leased) is None:
            return None
        digests, overflows = leased.digests[0], leased.overflows[0]
        if leased.layout:
            return Arrived(self, self._local.mapped[leased.layout], digests, overflows, {"mapped"})
        if not self._ring_device:
            return None
        ring, no_rows = self._take_ring(deadline), BufferTable.of([])
        return Arrived(self, no_rows, digests, overflows, {"filled"}, ring)

    def _take_ring(self, deadline: float) -> RingCopies:
        """Take the trainer's ring until the lease ends; return copies from it, prepared once."""
        take = messages.TakeRing(self._ring_device, seconds_for_holder(deadline))
        channel, copies = self._local.channel, self._ring_copies
        frame = channel.answer(channel.ask(take, deadline), messages.Ringed, deadline)
        try:
            assert isinstance(frame.message, messages.Ringed)
            (memory,) = open_segments([frame.message.segment], frame.files)
            assert isinstance(memory, Buffer)
        finally:
            frame.close()
        if copies is None or copies.memory.address != memory.address:
            copies = RingCopies(self.stream, self.sink, memory, self.plan.digest)
            self._ring_copies = copies
        return copies

    def fill(self, staging: Staging, leased: messages.Leased, deadline: float) -> None:
        """Have the trainer write what it has leased into staging, and end the lease.

        If no answer comes, the connection is over, and with it the session and this memory: a late
        trainer writes where nobody reads.
        """
        segment, digests = staging.memory[self.rank].segment, leased.digests[0]
        files = () if self._filled is segment else segment.files
        fill = messages.Fill(self.plan.kind, segment.nbytes, seconds_for_holder(deadline))
        self._filled = None
        self._local.channel.call(fill, messages.Confirmed, deadline, files)
        self._filled = segment
        staging.set_digests(self.rank, digests, leased.overflows[0])
        for each in staging.missing(self.rank):
            staging.arrived(each, self.endpoint, "filled")
        self._local.release(deadline, is_proof=not digests)

    @cached_property
    def sink(self) -> BufferTable:
        """Where the rows lie in the model."""
        assert isinstance(self.target, ModelTarget)
        return self.stream.in_sink(self.target.table)

    def copies(self, arrived: Arrived) -> RowCopies:
        """Return prepared copies into the model: memory that is leased again lies as before."""
        if self._copies is None or self._copies[0] is not arrived.rows:
            if self._copies is not None:
                self._copies[1].close()
            made = RowCopies(self.sink, arrived.rows, self.plan.digest, arrived.cast)
            self._copies = arrived.rows, made
        return self._copies[1]

    def check(self, found: Words, digests: bytes, where: str) -> None:
        """Raise DigestMismatch unless the rows have the digests that came with the lease."""
        path = f"from rank {self.rank} of the trainer to replica {self.replica!r}, {where}"
        names = self.catalog.names
        check_digests(found, words_of(digests), self.stream.tensor, names, path)

    def throw_copies_away(self) -> None:
        """Forget what was prepared for an attempt that failed: devices may still work on it."""
        if self._copies is not None:
            self._copies[1].close()
        if self._ring_copies is not None:
            self._ring_copies.close()
        self._copies = self._ring_copies = None


@dataclass(frozen=True, eq=False)
class Arrived:
    """The rows of one source rank, in memory that keeps still until they are copied."""

    source: SourceRank
    rows: BufferTable
    """Empty if they come through a ring."""
    digests: bytes
    overflows: int
    ways: set[str]
    """How they have come."""
    ring: RingCopies | None = None
    is_staged: bool = False

    @property
    def lease(self) -> Reader | None:
        """Where the memory is leased, as long as it is."""
        return None if self.is_staged or self.source.leased is None else self.source.reader

    @property
    def cast(self) -> Integers | None:
        """How rows are cast when they are copied; those in staging have been cast."""
        return (
            self.source.stream.cast if self.source.stream.is_cast and not self.is_staged else None
        )
