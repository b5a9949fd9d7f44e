"""The blocks that all source ranks hold together, as one table, and the plans of replicas over it.

A replica sees one publisher with one list of tensors and blocks. It knows the rank of each block
only to make the same plan. Its agreement is divided into one share for each rank that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import numpy as np

from flyweight.cuda import driver
from flyweight.digest import DigestKind, Words
from flyweight.errors import PlanError, SpecError, listed
from flyweight.formats.stored import Stored, same_bytes
from flyweight.live.messages import Agreed, Want
from flyweight.live.source import PublishedSource, Regions, Share, aligned_starts, row_major
from flyweight.memory import Buffer, collector_paused
from flyweight.memory_table import HOST, BufferTable, Integers
from flyweight.plans.copy_table import (
    BoxTable,
    CopyTable,
    item_bytes,
    kinds_of,
    numbers_of,
    plan_copies,
)
from flyweight.plans.fit import check_fit
from flyweight.plans.merged_source import HeldTable, MergedSource, merge_held
from flyweight.plans.tables import Boxes, Tensors, numbers, packed, received_boxes
from flyweight.spec.manifest import Leaf, TensorSpec

_share_numbers = count(1)


@dataclass(frozen=True, eq=False)
class Places:
    """The devices that blocks are on: the uuid of a GPU, or "" for the host."""

    names: Sequence[str]
    index: Integers
    """The index of each block's device in `names`."""

    @classmethod
    def of(cls, memory: BufferTable) -> Places:
        found, index = np.unique(np.maximum(memory.device, HOST), return_inverse=True)
        names = ["" if each == HOST else driver.uuid(int(each)) for each in found]
        return cls(names, index.astype(np.int64))


@dataclass(frozen=True, eq=False)
class Agreement:
    """The copies that a replica gets."""

    nbytes: int
    is_on_host: bool
    """True if the replica receives everything in host memory."""
    whole: Share
    """All copies, from a process that has every block."""
    shares: Mapping[int, tuple[Integers, Share]]
    """For each source rank that is read: the numbers of the copies, and its share."""

    def digest_kind(self, *, is_source_on_host: bool) -> DigestKind:
        """Return 'xxh3' if both sides are on the host, else 'words', which a GPU can compute.

        Files have digests of kind 'words', which need not be computed from their bytes.
        """
        return "xxh3" if is_source_on_host and self.is_on_host else "words"


class SourceBlocks:
    """The tensors of a model and the blocks of them that each source rank holds."""

    def __init__(self, held: Sequence[HeldTable], places: Sequence[Places]) -> None:
        """Merge what ranks hold; raise PlanError, naming ranks, if they do not fit together."""
        merged = merge_held(held) if len(held) > 1 else _alone(held[0])
        self.tensors: Mapping[str, TensorSpec] = merged.tensors
        self.tied: Mapping[str, str] = merged.tied
        self.values: Mapping[str, Leaf] = merged.values
        self.boxes: BoxTable = merged.boxes
        self.names: list[str] = list(self.tensors)
        self.num_ranks = len(held)
        self.rank: Integers = merged.rank
        self.block: Integers = merged.block
        """The rank that holds each block, and the block's number there."""
        self.place_names = sorted({name for each in places for name in each.names})
        flat = np.concatenate([numbers_of(e.names, self.place_names)[e.index] for e in places])
        first = np.cumsum([0, *(len(each.index) for each in places)])
        self._held = held
        self._flat: Integers = first[self.rank] + self.block
        """The position of each block if those of each rank follow those of the last."""
        self._place: Integers = flat[self._flat]

    @cached_property
    def described(self) -> Tensors:
        """The tensors, as `Welcome` has them."""
        return Tensors.of(self.tensors)

    def agreed(self) -> Agreed:
        """Return what replicas must know of the blocks to make the plan that `plan` makes."""
        boxes = None if self._is_whole else Boxes.of(self.boxes)
        return Agreed(boxes, packed(self.rank), tuple(self.place_names), packed(self._place))

    @cached_property
    def _is_whole(self) -> bool:
        """True if each tensor is one block."""
        return self.boxes.is_same(BoxTable.whole(self.tensors.values()))

    @cached_property
    def item_bytes(self) -> Integers:
        """The width of the items of each block."""
        return item_bytes(self.tensors.values())[self.boxes.tensor]

    def name_of(self, block: int) -> str:
        """Return the name of a block's tensor."""
        return self.names[int(self.boxes.tensor[block])]

    def is_held_by(self, rank: int) -> bool:
        """True if one rank has every block, under the same number."""
        return bool((self.rank == rank).all()) and np.array_equal(
            self.block, np.arange(len(self.block))
        )

    def plan(self, want: Want, engine: str = "") -> Agreement:
        """Return the copies that fill what a replica wants; raise PlanError if none can.

        engine: what a replica on another host reads by; "" for one on this host.
        """
        with collector_paused():
            sinks, place = self._sinks(want), numbers(want.place)
            copies = plan_copies(
                self.boxes,
                sinks,
                self.names,
                source_ranks=self.rank,
                source_places=self._place,
                sink_places=numbers_of(want.places, self.place_names)[place],
            )
            return self._agreement(copies, want, place[copies.sink], engine)

    def _sinks(self, want: Want) -> BoxTable:
        """Return the boxes that a replica wants of our tensors; raise if something is wrong."""
        wanted = want.tensors.specs()
        tensor = self._numbers_of(wanted)
        sinks = received_boxes(want.blocks, BoxTable.whole(wanted.values()))
        place = numbers(want.place)
        if len(place) != len(sinks) or (
            len(place) and not 0 <= place.min() <= place.max() < len(want.places)
        ):
            raise SpecError(f"{len(sinks)} blocks have {len(place)} devices")
        unused = np.flatnonzero(np.bincount(tensor, minlength=len(self.names)) == 0)
        if len(unused) and not want.may_leave:
            raise PlanError(
                f"the publisher has {len(unused)} tensors that the replica lacks: "
                f"{listed([self.names[n] for n in unused])}; make the replica with "
                f"extra='report' to leave them out"
            )
        return replace(sinks, tensor=tensor[sinks.tensor])

    def _agreement(self, copies: CopyTable, want: Want, place: Integers, engine: str) -> Agreement:
        devices = frozenset(want.devices)

        def share(rows: Integers | slice, block: Integers) -> Share:
            regions = Regions(block[rows], copies.source_offset[rows], copies.shape[rows])
            return Share(
                next(_share_numbers),
                regions,
                copies.source[rows],
                want.places,
                place[rows],
                devices,
                engine,
            )

        whole = share(slice(None), copies.source)
        rank, block = self.rank[copies.source], self.block[copies.source]
        shares = {}
        for each in np.unique(rank).tolist():
            rows = np.flatnonzero(rank == each)
            shares[each] = rows, whole if self.is_held_by(each) else share(rows, block)
        nbytes = int((copies.num_items * self.item_bytes[copies.source]).sum())
        return Agreement(nbytes, not any(want.places), whole, shares)

    def _numbers_of(self, wanted: Mapping[str, TensorSpec]) -> Integers:
        """Return the number of each tensor; raise unless all are here, as they are wanted."""
        tensor = numbers_of(list(wanted), self.names, self.tied)
        if (tensor < 0).any():
            missing = [name for name, n in zip(wanted, tensor, strict=True) if n < 0]
            raise PlanError(
                f"the replica wants {len(missing)} tensors that the publisher lacks: "
                f"{listed(missing)}"
            )
        (have, kind), (want, want_kind) = kinds_of(self.tensors.values()), kinds_of(wanted.values())
        pairs = np.unique(kind[tensor] * len(want) + want_kind).tolist()
        if any(have[pair // len(want)] != want[pair % len(want)] for pair in pairs):
            specs = {name: have[n] for name, n in zip(wanted, kind[tensor].tolist(), strict=True)}
            check_fit(specs, wanted, source="at the publisher", sink="at the replica")
        return tensor

    def copied_memory(self, rank: int, copy: Buffer) -> BufferTable:
        """Return where the blocks of a rank lie in the copy that it holds."""
        held = self._held[rank]
        boxes = held.boxes.widened(self.boxes.num_dims)
        widths = item_bytes(held.tensors.values())[boxes.tensor]
        starts = aligned_starts(boxes.num_items * widths)
        return row_major(copy, starts, boxes.shape, widths)

    def joined_copy(self, own: PublishedSource, memories: Sequence[BufferTable]) -> PublishedSource:
        """Return all blocks as a source, from the memory of each rank's blocks."""
        memory = BufferTable.joined(memories).take(self._flat)
        return PublishedSource(own.source, self.boxes, memory, own.copiers, self.tensors)

    def joined_words(self, words: Sequence[Words]) -> Words:
        """Return a word for each block, from one for each block of each rank."""
        found: Words = np.concatenate(words)[self._flat]
        return found

    def read_from(self, stored: Stored, like: PublishedSource) -> PublishedSource:
        """Return the same blocks, read from a snapshot; raise PlanError if it does not fit."""
        known = set(stored.manifest.names)
        for name, spec in self.tensors.items():
            if name not in known or stored.manifest.spec(name) != spec:
                found = stored.manifest.spec(name) if name in known else "missing"
                raise PlanError(f"{name!r} is {spec} in the model and {found} in the snapshot")
        for alias, name in self.tied.items():
            if alias in known and not same_bytes(stored, name, stored, alias):
                raise PlanError(
                    f"{name!r} and {alias!r} are one tensor in the model and differ in the snapshot"
                )
        nowhere = BufferTable.of([None] * len(self.boxes), self.boxes.shape)
        return PublishedSource(stored, self.boxes, nowhere, like.copiers, self.tensors)


def held_table(source: PublishedSource) -> HeldTable:
    """Return what a process holds, for `SourceBlocks`."""
    return HeldTable(
        source.tensors, dict(source.manifest.tied), source.manifest.values, source.boxes
    )


def _alone(held: HeldTable) -> MergedSource:
    """Return what the only rank holds; a replica whose plan lacks something is refused."""
    numbers = np.arange(len(held.boxes))
    return MergedSource(
        held.tensors, held.tied, held.values, held.boxes, np.zeros_like(numbers), numbers
    )
