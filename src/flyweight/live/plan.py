"""The plan between a publisher and a replica. Both sides work it out from the same tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flyweight.memory_table import Integers
from flyweight.plans.copy_table import BoxTable, CopyTable, plan_copies
from flyweight.spec.box import Box
from flyweight.spec.manifest import TensorSpec


@dataclass(frozen=True, eq=False)
class Holders:
    """Who holds each of the publisher's blocks: of equal blocks the nearest is read."""

    rank: Integers
    place: Integers
    """The device, as a number."""


def plan(
    names: Sequence[str],
    tied: Mapping[str, str],
    sources: BoxTable,
    holders: Holders,
    *,
    wanted: Sequence[str],
    sinks: BoxTable,
    sink_places: Integers,
) -> CopyTable:
    """Return the copies that fill a replica's blocks; raise PlanError if some item cannot come.

    names: the publisher's tensors, whose blocks `sources` has.
    tied: other names for some of them.
    wanted: the replica's tensors, whose blocks `sinks` has. Each must be in `names` or `tied`.
    sink_places: the device of each of the replica's blocks, as a number that `holders` has too.
    """
    number = {name: n for n, name in enumerate(names)}
    tensor = np.array([number[tied.get(name, name)] for name in wanted], np.int64)
    return plan_copies(
        sources,
        replace(sinks, tensor=tensor[sinks.tensor]),
        names,
        source_ranks=holders.rank,
        source_places=holders.place,
        sink_places=sink_places,
    )


def common_places(places: Sequence[str], others: Sequence[str]) -> Integers:
    """Return the number of each of the others in `places`; -1 if it is none of them."""
    known = {place: number for number, place in enumerate(places)}
    return np.array([known.get(each, -1) for each in others], np.int64)


def whole_boxes(specs: Sequence[TensorSpec]) -> BoxTable:
    """Return one box for each tensor, which is all of it, in items."""
    kinds, kind = _kinds(specs)
    table = BoxTable.of([(n, spec.stored(Box.whole(spec.shape))) for n, spec in enumerate(kinds)])
    return BoxTable(np.arange(len(specs)), table.offset[kind], table.shape[kind])


def item_bytes(specs: Sequence[TensorSpec]) -> Integers:
    """Return the width of the items of each tensor."""
    kinds, kind = _kinds(specs)
    return np.array([spec.item_bytes for spec in kinds], np.int64)[kind]


def _kinds(specs: Sequence[TensorSpec]) -> tuple[list[TensorSpec], Integers]:
    """Return the different specs, as far as they are one object, and the number of each tensor's.

    A model has very many tensors and few kinds of them.
    """
    ids = list(map(id, specs))
    kinds = dict(zip(ids, specs, strict=True))
    number = {key: n for n, key in enumerate(kinds)}
    return list(kinds.values()), np.array([number[key] for key in ids], np.int64)
