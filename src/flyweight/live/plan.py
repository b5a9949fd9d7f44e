"""Plans: the copies that fill one kind of model, and the streams of bytes that they make.

Both sides work a plan out from the same tables, so it is never sent. The copies from one source
rank, in plan order, are a stream: row after row, each row-major and without gaps, in the dtype that
the reader wants. A mapped reader copies the rows; a network reader asks for ranges of the stream.
The digests are those of the rows, so they are the same for the trainer's memory, a stream on its
way, and the engine's parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from flyweight.casts import CASTABLE, ITEM_BYTES
from flyweight.digest import DigestKind
from flyweight.errors import PlanError, SpecError
from flyweight.live.buckets import Bucket, buckets_of
from flyweight.live.catalog import Catalog, Devices, common_digest
from flyweight.live.messages import Want
from flyweight.memory import Buffer, collector_paused
from flyweight.memory_table import BufferTable, Integers
from flyweight.plans.copy_table import BoxTable, numbers_of, plan_copies
from flyweight.plans.tables import Boxes, numbers, packed

_SAME = -1
_WIDTHS = np.array(ITEM_BYTES)


@dataclass(frozen=True, eq=False)
class Wanted:
    """The boxes that a reader wants, with the numbers that tensors have in the catalog."""

    boxes: BoxTable
    dtype: Integers
    """The dtype of each box at the reader, as an index of CASTABLE; -1 if it is the trainer's."""
    devices: Devices
    digest: DigestKind
    """What the reader can compute."""

    @classmethod
    def received(cls, want: Want, catalog: Catalog) -> Wanted:
        boxes = want.boxes.table(catalog.whole)
        devices = Devices.received(want.devices, want.device, len(boxes))
        dtype = np.full(len(boxes), _SAME)
        if want.dtype:
            found, known = numbers(want.dtype), numbers_of(want.dtypes, CASTABLE)
            if len(found) != len(boxes) or (len(found) and found.max() >= len(known)):
                raise SpecError(f"{len(boxes)} boxes have {len(found)} dtypes")
            dtype = np.where(found < 0, _SAME, known[found])
            if ((found >= 0) & (dtype < 0)).any():
                raise SpecError(f"dtypes {want.dtypes} are wanted, casts make {CASTABLE}")
        return cls(boxes, dtype, devices, want.digest)

    @property
    def message(self) -> Want:
        dtype = packed(self.dtype) if (self.dtype >= 0).any() else b""
        devices = self.devices.names, packed(self.devices.index)
        return Want(Boxes.of(self.boxes), CASTABLE, dtype, *devices, self.digest)


@dataclass(frozen=True, eq=False)
class Stream:
    """The copies of a plan that read from one source rank, as rows."""

    block: Integers
    """The block of each row, counted among those of its rank."""
    offset: Integers
    """Counted from the corner of the block."""
    sink: Integers
    sink_offset: Integers
    shape: Integers
    item_bytes: Integers
    """The width of items in the stream."""
    tensor: Integers
    cast: Integers
    """The dtypes that a row is cast from and to, as indexes of CASTABLE; -1 without a cast."""

    @cached_property
    def nbytes(self) -> Integers:
        found: Integers = self.shape.prod(axis=1, dtype=np.int64) * self.item_bytes
        return found

    @cached_property
    def starts(self) -> Integers:
        """The byte at which each row starts, and the end of the last."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.nbytes)])

    @cached_property
    def is_cast(self) -> bool:
        return bool((self.cast >= 0).any())

    @property
    def columns(self) -> list[Integers]:
        return [getattr(self, each.name) for each in fields(self)]

    def take(self, rows: Integers) -> Stream:
        return Stream(*(column[rows] for column in self.columns))

    def range(self, start: int, stop: int) -> tuple[Integers, Integers, Integers]:
        """Return the rows of a range of the stream, and the bytes of each from which to which."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        row = np.arange(first, int(np.searchsorted(self.starts, stop, side="left")))
        low = np.maximum(start - self.starts[row], 0)
        return row, low, np.minimum(stop, self.starts[row + 1]) - self.starts[row]

    def parts(self, first: int, end: int, nbytes: int) -> list[tuple[int, int]]:
        """Cut rows into ranges of about so many bytes, between items."""
        cuts = np.arange(self.starts[first], self.starts[end], nbytes)
        row = np.searchsorted(self.starts, cuts, side="right") - 1
        cuts -= (cuts - self.starts[row]) % self.item_bytes[row]
        return list(pairwise([*cuts.tolist(), int(self.starts[end])]))

    @property
    def total(self) -> int:
        return int(self.starts[-1])

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The stream in pieces that go through a ring of a device."""
        return buckets_of(self.shape, self.item_bytes)

    def in_source(self, blocks: BufferTable) -> BufferTable:
        """Return where the rows lie in the memory of the source's blocks."""
        return blocks.widened(self.shape.shape[1]).regions(self.block, self.offset, self.shape)

    def in_sink(self, blocks: BufferTable) -> BufferTable:
        """Return where the rows lie in the memory of the model that they fill."""
        width = self.shape.shape[1]
        return blocks.widened(width).regions(self.sink, self.sink_offset, self.shape)

    def packed_at(self, address: int, owner: object) -> BufferTable:
        """Return where the rows lie in memory that holds the whole stream."""
        memory = Buffer.flat_at(address, self.total, owner)
        return BufferTable.packed(memory, self.starts[:-1], self.shape, self.item_bytes)


@dataclass(frozen=True, eq=False)
class Plan:
    """What readers of one kind take from each source rank."""

    kind: str
    """A hash of the catalog, of all copies, and of the kind of digest."""
    digest: DigestKind
    wanted: Wanted
    streams: dict[int, Stream]

    @property
    def nbytes(self) -> int:
        return sum(each.total for each in self.streams.values())


@collector_paused()
def make_plan(catalog: Catalog, wanted: Wanted) -> Plan:
    """Work out who copies what; raise PlanError if some item cannot come."""
    boxes, all_devices = wanted.boxes, (*catalog.devices.names, *wanted.devices.names)
    places = [
        numbers_of(each.names, all_devices)[each.index]
        for each in (catalog.devices, wanted.devices)
    ]
    copies = plan_copies(
        catalog.blocks,
        boxes,
        catalog.names,
        source_ranks=catalog.rank,
        source_places=places[0],
        sink_places=places[1],
    )
    names = [spec.dtype.name for spec in catalog.tensors.values()]
    cast_from = numbers_of(names, CASTABLE)[boxes.tensor]
    is_cast = (wanted.dtype >= 0) & (wanted.dtype != cast_from)
    if (is_cast & (cast_from < 0)).any():
        row = int(np.flatnonzero(is_cast & (cast_from < 0))[0])
        name = catalog.names[int(boxes.tensor[row])]
        raise PlanError(f"{name!r} is {catalog.tensors[name]}; casts are between {CASTABLE}")
    dtypes = np.stack([cast_from, wanted.dtype], axis=1)
    dtypes[~is_cast] = _SAME
    width = np.where(is_cast, _WIDTHS[wanted.dtype], catalog.item_bytes[boxes.tensor])
    rows = Stream(
        catalog.number_in_rank[copies.source],
        copies.source_offset,
        copies.sink,
        copies.sink_offset,
        copies.shape,
        width[copies.sink],
        catalog.blocks.tensor[copies.source],
        dtypes[copies.sink],
    )
    rank = catalog.rank[copies.source]
    streams = {each: rows.take(np.flatnonzero(rank == each)) for each in np.unique(rank).tolist()}
    digest = common_digest(wanted.digest, catalog.devices.digest)
    found = blake2b(msgspec.msgpack.encode((catalog.table, digest)), digest_size=16)
    for each, stream in streams.items():
        found.update(each.to_bytes(8, "little"))
        for column in stream.columns:
            found.update(packed(column))
    return Plan(found.hexdigest(), digest, wanted, streams)


class Plans:
    """The plans of the readers that are connected: each lives as long as one of them has it."""

    def __init__(self, catalog: Catalog, own: Plan | None = None) -> None:
        """own: the only kind that is served, by a reader that serves others like itself."""
        self.catalog, self._own = catalog, own
        self._plans: WeakValueDictionary[bytes, Plan] = WeakValueDictionary()
        self._planning = threading.Lock()
        if own is not None:
            self._plans[_key(own.wanted)] = own

    def __iter__(self) -> Iterator[Plan]:
        found = [each() for each in self._plans.valuerefs()]  # a list: threads add and end plans
        return (each for each in found if each is not None)

    def planned(self, wanted: Wanted) -> Plan:
        """Return the plan, which readers of one kind share."""
        key = _key(wanted)
        if (known := self._plans.get(key)) is not None:  # does not wait for the plans of others
            return known
        if self._own is not None:
            raise PlanError("this replica serves only readers that want the same as itself")
        with self._planning:
            found = self._plans.get(key)
            if found is None:
                found = self._plans[key] = make_plan(self.catalog, wanted)
            return found


def _key(wanted: Wanted) -> bytes:
    return blake2b(msgspec.msgpack.encode(wanted.message), digest_size=16).digest()
