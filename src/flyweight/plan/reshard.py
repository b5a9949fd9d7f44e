"""Reshard: which box goes from which source shard to which sink shard.

A plan is proof as well as work list: it exists only if every element of every
sink shard comes from exactly one element of the source. Replicas of a shard are
one element, not two, and share the load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flyweight.errors import PlanError
from flyweight.spec.box import Box


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a tensor and the rank that holds it."""

    rank: int
    box: Box


@dataclass(frozen=True, slots=True)
class Copy:
    """One block that moves: `box` counts from the corner of the whole tensor."""

    name: str
    box: Box
    source: Shard
    sink: Shard

    @property
    def source_box(self) -> Box:
        """The block counted from the corner of the source's shard."""
        return self.box.within(self.source.box)

    @property
    def sink_box(self) -> Box:
        """The block counted from the corner of the sink's shard."""
        return self.box.within(self.sink.box)


def reshard(
    source: Mapping[str, Sequence[Shard]], sink: Mapping[str, Sequence[Shard]]
) -> list[Copy]:
    """Return the copies that fill every sink shard, in the sink's order."""
    load: Counter[int] = Counter()
    copies: list[Copy] = []
    for name, shards in sink.items():
        held = source.get(name, ())
        for shard in shards:
            if shard.box.num_elements:
                copies += _fill(name, shard, held, load)
    return copies


def _fill(name: str, sink: Shard, held: Sequence[Shard], load: Counter[int]) -> list[Copy]:
    if len(held) == 1 and held[0].box == sink.box:
        return [Copy(name, sink.box, held[0], sink)]
    replicas: dict[Box, list[Shard]] = {}
    for shard in held:
        replicas.setdefault(shard.box, []).append(shard)
    found: list[Copy] = []
    for box, shards in replicas.items():
        meet = sink.box.overlap(box)
        if meet is None:
            continue
        for other in found:
            if meet.overlap(other.box):
                raise PlanError(
                    f"{name!r} has elements of {sink.box.offset}..{sink.box.end} twice at the "
                    f"source: in {box.offset}..{box.end} of rank {shards[0].rank} and in "
                    f"{other.source.box.offset}..{other.source.box.end} of rank {other.source.rank}"
                )
        nearest = min(shards, key=lambda shard: (load[shard.rank], shard.rank))
        load[nearest.rank] += meet.num_elements
        found.append(Copy(name, meet, nearest, sink))
    covered = sum(copy.box.num_elements for copy in found)
    if covered != sink.box.num_elements:
        raise PlanError(
            f"{name!r} has {covered} of the {sink.box.num_elements} elements of "
            f"{sink.box.offset}..{sink.box.end} that rank {sink.rank} wants"
        )
    return found
