"""Source: what a publisher publishes, the model of one rank, or a checkpoint that was opened."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from flyweight.adapters.identity import Identity as ModelIdentity
from flyweight.adapters.model import Model, adapt
from flyweight.adapters.parts import emptied_names, partial_names, undeclared_shards
from flyweight.adapters.tree import reshard
from flyweight.checks import check_version
from flyweight.errors import PlanError, SpecError, listed
from flyweight.formats.reader import Reader, Target
from flyweight.formats.stored import Stored
from flyweight.live.catalog import Catalog, Devices
from flyweight.live.offer import OfferMemory, packed_memory
from flyweight.memory import STAGING, collector_paused
from flyweight.memory_table import NOWHERE
from flyweight.plans.copy_table import BoxTable, item_bytes
from flyweight.plans.reshard import reshard as reshard_boxes
from flyweight.ranks.rendezvous import Rendezvous
from flyweight.spec.box import Box
from flyweight.spec.layout import Shard
from flyweight.spec.manifest import Leaf
from flyweight.worker_threads import default_threads


class PublishedModel:
    """The model of one rank: what it holds, where that lies, and whether it is still the same."""

    def __init__(self, thing: object) -> None:
        """Look at a model; raise PlanError if another library has taken parameters' memory away."""
        self.thing = thing
        with collector_paused():
            self.identity = ModelIdentity(thing)
            self.model: Model = adapt(thing, may_be_empty=True)
            self.names = list(self.model.manifest.tensors)
            self.boxes, self.memory = self.model.tables(self.names)
        if emptied := emptied_names(self.model, thing):
            raise PlanError(
                f"{len(emptied)} parameters are partitioned by ZeRO-3 and empty on this rank: "
                f"{listed(emptied)}; make the publisher and publish inside of "
                f"deepspeed.zero.GatheredParameters(model.parameters()), which every rank enters"
            )
        if (self.memory.device == NOWHERE).any():
            raise SpecError("some tensors are on a device whose memory has no address")

    @property
    def values(self) -> Mapping[str, Leaf]:
        """What is no tensor."""
        return self.model.manifest.values

    def catalog(self, rank: int) -> Catalog:
        """Return what this rank holds."""
        manifest, ranks = self.model.manifest, np.full(len(self.boxes), rank)
        specs = {name: manifest.spec(name) for name in self.names}
        return Catalog(specs, manifest.tied, self.boxes, ranks, Devices.of(self.memory))

    def check_ranks(self, found: Rendezvous) -> None:
        """Raise unless this can be the model, or the part of it, of a rank of so many."""
        model, thing = self.model, self.thing
        parts = partial_names(model)
        if parts and found.num_ranks == 1:
            raise PlanError(
                f"{len(parts)} tensors are only in part on this rank: {listed(parts)}; make a "
                f"publisher on every rank that holds a part, with process_group=, or with rank= "
                f"and world_size="
            )
        if found.num_ranks == 1 and not self.names:
            raise SpecError(f"{type(thing).__name__} holds no tensors")
        if found.num_ranks > 1 and (unknown := undeclared_shards(thing)):
            raise SpecError(
                f"{len(unknown)} tensors are marked as the part of one rank and do not say which "
                f"part: {listed(unknown)}; put flyweight.Sharded(tensor, shape, offset) in their "
                f"place"
            )

    def refresh(self) -> bool:
        """Look at the model again; return True if its tensors lie elsewhere now.

        Raises PlanError if they are others than when the publisher was made, each time again.
        """
        reshard(self.thing)  # a forward may have put whole tensors in the place of shards
        if self.identity.is_same():
            return False
        last, after = self.memory, PublishedModel(self.thing)
        before, found = self.catalog(0).table, after.catalog(0).table
        if replace(found, devices=before.devices) != before:  # all of it may be on another device
            names = set(before.tensors.names) ^ set(found.tensors.names)
            which = f": {listed(names)}" if names else ""
            raise PlanError(
                f"the model has other tensors than when its publisher was made{which}; make a new "
                f"publisher, on every rank if there are several"
            )
        vars(self).update(vars(after))
        is_moved = (last.address != self.memory.address).any()
        return bool(is_moved or (last.strides != self.memory.strides).any())


class PublishedFiles:
    """An opened snapshot or checkpoint: all tensors, whole, in one rank."""

    def __init__(self, stored: Stored, version: int | None) -> None:
        """version: the number by which it is to be known; else that of the files, or 0."""
        if not stored.manifest.tensors:
            raise SpecError(f"{stored.store.place!r} holds no tensors")
        found = stored.manifest.version if version is None else check_version(version)
        self._stored, self.version = stored, 0 if found is None else found
        self.values, self.parent = stored.manifest.values, stored.manifest.parent

    def catalog(self, rank: int) -> Catalog:
        manifest = self._stored.manifest
        boxes = BoxTable.whole(manifest.tensors.values())
        zeros = np.zeros(len(boxes), np.int64)
        return Catalog(manifest.tensors, manifest.tied, boxes, zeros, Devices(("",), zeros))

    def read(self) -> OfferMemory:
        """Return the tensors, read and checked, in shared memory that replicas map.

        The files themselves are never mapped: to truncate one would end a replica by SIGBUS.
        """
        stored, specs = self._stored, self._stored.manifest.tensors
        whole = {name: [Shard(0, Box.whole(spec.shape))] for name, spec in specs.items()}
        boxes = BoxTable.whole(specs.values())
        table, placed = packed_memory(boxes.shape, item_bytes(specs.values()))
        targets = {}
        for row, (name, spec) in enumerate(specs.items()):
            items = spec.stored(whole[name][0].box)
            data = table.buffer(row).items().reshape(items.shape)
            targets[name] = Target(items, data, STAGING, may_map=False)
        reader = Reader(stored.store, stored.manifest)
        plan = reshard_boxes({name: stored.shards(name) for name in specs}, whole)
        for copy in plan.copies():
            reader.add(stored.manifest.extents[copy.source.rank], copy.box, targets[copy.name])
        reader.run(num_threads=default_threads(), verb="load")
        return OfferMemory(0, table, placed)


def source_of(thing: object, version: int | None) -> PublishedModel | PublishedFiles:
    """Return what a publisher knows of its source; `version` is for files only."""
    if isinstance(thing, Stored):
        return PublishedFiles(thing, version)
    if version is not None:
        raise SpecError(f"version={version} is for files; a model's is an argument of publish")
    return PublishedModel(thing)
