"""Catalog: the tensors of a model, and the blocks of them that the ranks of a trainer hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flyweight.cuda import driver
from flyweight.digest import DigestKind
from flyweight.errors import PlanError, SpecError
from flyweight.live.messages import CatalogTable
from flyweight.memory_table import HOST, BufferTable, Integers
from flyweight.plans.copy_table import BoxTable, item_bytes, numbers_of
from flyweight.plans.merged_source import HeldTable, merge_held
from flyweight.plans.tables import Boxes, Tensors, numbers, packed
from flyweight.spec.manifest import Leaf, TensorSpec


def common_digest(*kinds: DigestKind) -> DigestKind:
    """Return the kind that all can compute: devices have no 'xxh3'."""
    return "words" if "words" in kinds else "xxh3"


@dataclass(frozen=True, eq=False)
class Devices:
    """The devices that boxes are on: the uuid of a GPU, or "" for the host."""

    names: tuple[str, ...]
    index: Integers
    """The index of the device of each box."""

    @classmethod
    def of(cls, memory: BufferTable) -> Devices:
        found, index = np.unique(np.maximum(memory.device, HOST), return_inverse=True)
        names = ("" if each == HOST else driver.uuid(int(each)) for each in found)
        return cls(tuple(names), index.astype(np.int64))

    @classmethod
    def received(cls, names: tuple[str, ...], index: bytes, num_boxes: int) -> Devices:
        found = numbers(index)
        if len(found) != num_boxes:
            raise SpecError(f"{num_boxes} boxes have {len(found)} devices")
        if len(found) and not 0 <= found.min() <= found.max() < len(names):
            raise SpecError(f"a box is on device {found.max()} of {len(names)}")
        return cls(names, found)

    @property
    def digest(self) -> DigestKind:
        """The kind of digest that can be computed where the boxes lie."""
        return "words" if any(self.names) else "xxh3"


@dataclass(frozen=True, eq=False)
class Catalog:
    """What a trainer, or a rank of one, has: readers and holders work plans out from it."""

    tensors: Mapping[str, TensorSpec]
    tied: Mapping[str, str]
    """Second names of tensors."""
    blocks: BoxTable
    rank: Integers
    """The rank that holds each block."""
    devices: Devices

    @classmethod
    def joined(
        cls, ranks: Sequence[Catalog], values: Sequence[Mapping[str, Leaf]]
    ) -> tuple[Catalog, list[Integers]]:
        """Return the catalog of all ranks, and for each rank the blocks of its own that count.

        values: what each rank has besides tensors. Raises PlanError, which names the ranks, if what
        they hold does not fit together.
        """
        merged = merge_held(
            [
                HeldTable(each.tensors, each.tied, found, each.blocks)
                for each, found in zip(ranks, values, strict=True)
            ]
        )
        names = tuple(sorted({name for each in ranks for name in each.devices.names}))
        index = np.empty(len(merged.rank), np.int64)
        blocks = [merged.block[merged.rank == rank] for rank in range(len(ranks))]
        for rank, own in enumerate(each.devices for each in ranks):
            number = numbers_of(own.names, names)
            index[merged.rank == rank] = number[own.index[blocks[rank]]]
        found = cls(merged.tensors, merged.tied, merged.boxes, merged.rank, Devices(names, index))
        return found, blocks

    @classmethod
    def received(cls, table: CatalogTable) -> Catalog:
        """Return what a table says; raise SpecError or PlanError for what is absurd."""
        specs = table.tensors.specs()
        blocks = table.blocks.table(BoxTable.whole(specs.values()))
        for name, target in table.tied.items():
            if name in specs or target not in specs:
                raise SpecError(f"{name!r} is tied to {target!r}, which is no other tensor's name")
        rank = numbers(table.rank)
        if len(rank) != len(blocks) or (len(rank) and rank.min() < 0):
            raise PlanError(f"{len(blocks)} blocks have {len(rank)} ranks")
        devices = Devices.received(table.devices, table.device, len(blocks))
        return cls(specs, table.tied, blocks, rank, devices)

    @cached_property
    def table(self) -> CatalogTable:
        return CatalogTable(
            Tensors.of(self.tensors),
            dict(self.tied),
            Boxes.of(self.blocks),
            packed(self.rank),
            self.devices.names,
            packed(self.devices.index),
        )

    @cached_property
    def names(self) -> list[str]:
        return list(self.tensors)

    @cached_property
    def whole(self) -> BoxTable:
        """One box for each tensor, which is all of it."""
        return BoxTable.whole(self.tensors.values())

    @cached_property
    def item_bytes(self) -> Integers:
        """The width of the items of each tensor."""
        return item_bytes(self.tensors.values())

    @cached_property
    def number_in_rank(self) -> Integers:
        """The number of each block among those of its own rank."""
        local = np.empty(len(self.rank), np.int64)
        for each in np.unique(self.rank).tolist():
            rows = self.rank == each
            local[rows] = np.arange(int(rows.sum()))
        return local
