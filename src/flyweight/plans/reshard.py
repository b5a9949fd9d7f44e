"""Reshard: which box goes from which source shard to which sink shard.

A plan is a proof as well as a work list: it exists only if every element of every sink shard comes
from exactly one element of the source. Ranks that hold the same box are replicas and share the
load. The tensor's name and the sink's rank alone decide which replica serves which sink, so a rank
that plans only its own part gets the same answer as the others. Tensors that are cut alike share
one route, so the plan of a hundred thousand tensors takes little time and memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

from flyweight.errors import PlanError, SpecError, listed
from flyweight.spec.box import Box, overlapping_pair
from flyweight.spec.layout import Shard


@dataclass(frozen=True, slots=True)
class Copy:
    """A box that moves from one shard to another, counted from the corner of the whole tensor."""

    name: str
    box: Box
    source: Shard
    sink: Shard


@dataclass(frozen=True, slots=True)
class _SourceBox:
    """A box that a sink takes from any one of some replicas."""

    box: Box
    replicas: tuple[Shard, ...]


@dataclass(frozen=True, eq=False)
class Route:
    """How all shards of a sink are filled, for all tensors that are cut alike at both ends."""

    fills: tuple[tuple[Shard, tuple[_SourceBox, ...]], ...]

    @cached_property
    def num_copies(self) -> int:
        return sum(len(blocks) for _, blocks in self.fills)

    @cached_property
    def is_single(self) -> bool:
        """True if there are no replicas to choose from: all tensors move between the same ranks."""
        return all(len(block.replicas) == 1 for _, blocks in self.fills for block in blocks)

    def copies(self, name: str) -> Iterator[Copy]:
        for sink, blocks in self.fills:
            for block in blocks:
                yield Copy(name, block.box, _chosen(name, sink, block.replicas), sink)


def _chosen(name: str, sink: Shard, replicas: tuple[Shard, ...]) -> Shard:
    """Return the replica that serves a sink; sinks and names are spread evenly over replicas."""
    if len(replicas) == 1:
        return replicas[0]
    # Ranks that want the same box are often a power of two apart: the hash mixes them.
    return replicas[crc32(sink.rank.to_bytes(8, "little"), crc32(name.encode())) % len(replicas)]


class Plan:
    """The copies that fill a sink, kept as one route per name."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self.routes = routes

    def copies(self) -> Iterator[Copy]:
        """Yield every copy, in the sink's order."""
        for name, route in self.routes.items():
            yield from route.copies(name)

    @property
    def num_copies(self) -> int:
        return sum(route.num_copies for route in self.routes.values())

    def pairs(self, item_bits: Mapping[str, int]) -> Counter[tuple[int, int]]:
        """Return the bytes that go from each source rank to each sink rank."""
        bits: Counter[tuple[int, int]] = Counter()
        alike: Counter[tuple[Route, int]] = Counter()
        for name, route in self.routes.items():
            if route.is_single:
                alike[route, item_bits[name]] += 1
            else:
                for copy in route.copies(name):
                    pair = copy.source.rank, copy.sink.rank
                    bits[pair] += item_bits[name] * copy.box.num_elements
        for (route, width), count in alike.items():
            for copy in route.copies(""):
                pair = copy.source.rank, copy.sink.rank
                bits[pair] += count * width * copy.box.num_elements
        return Counter({pair: -(-total // 8) for pair, total in bits.items()})


def reshard(source: Mapping[str, Sequence[Shard]], sink: Mapping[str, Sequence[Shard]]) -> Plan:
    """Return the plan that fills every sink shard, or raise PlanError saying what does not fit."""
    known: dict[tuple[int, int], Route] = {}
    indexes: dict[int, _Index] = {}
    routes: dict[str, Route] = {}
    missing = [name for name, shards in sink.items() if _wants(shards) and not source.get(name)]
    if missing:
        raise PlanError(f"sink wants {len(missing)} tensors the source lacks: {listed(missing)}")
    for name, shards in sink.items():
        held = source.get(name, ())
        key = id(held), id(shards)  # both mappings live until we return
        if key not in known:
            try:
                known[key] = _route(shards, held, indexes)
            except (PlanError, SpecError) as error:
                error.note(f"tensor {name!r}")
                raise
        routes[name] = known[key]
    return Plan(routes)


def _wants(shards: Sequence[Shard]) -> bool:
    return any(shard.box.num_elements for shard in shards)


def _route(shards: Sequence[Shard], held: Sequence[Shard], indexes: dict[int, _Index]) -> Route:
    if len(held) == 1 and all(shard.box == held[0].box for shard in shards):
        block = (_SourceBox(held[0].box, (held[0],)),)
        return Route(tuple((shard, block) for shard in shards if shard.box.num_elements))
    if id(held) not in indexes:
        indexes[id(held)] = _Index(held)
    index = indexes[id(held)]
    filled: dict[Box, tuple[_SourceBox, ...]] = {}
    fills = []
    for shard in shards:
        if shard.box.num_elements:
            if shard.box not in filled:
                filled[shard.box] = tuple(index.overlaps(shard.box))
                _check_filled(shard, filled[shard.box])
            fills.append((shard, filled[shard.box]))
    return Route(tuple(fills))


def _check_filled(sink: Shard, blocks: Sequence[_SourceBox]) -> None:
    # The source's boxes do not overlap, so the right volume leaves no gap.
    covered = sum(block.box.num_elements for block in blocks)
    if covered != sink.box.num_elements:
        raise PlanError(
            f"the source has {covered} of the {sink.box.num_elements} elements of "
            f"{sink.box.offset}..{sink.box.end} that rank {sink.rank} wants"
        )


class _Index:
    """A source's boxes, each with its replicas, sorted along the dim that is cut most often."""

    def __init__(self, held: Sequence[Shard]) -> None:
        replicas: dict[Box, list[Shard]] = {}
        for shard in held:
            if shard.box.num_elements:
                replicas.setdefault(shard.box, []).append(shard)
        if pair := overlapping_pair(list(replicas)):
            one, other = pair
            raise PlanError(
                f"elements are twice at the source: in {one.offset}..{one.end} of rank "
                f"{replicas[one][0].rank} and in {other.offset}..{other.end} of rank "
                f"{replicas[other][0].rank}"
            )
        boxes = list(replicas)
        num_dims = len(boxes[0].shape) if boxes else 0
        self._dim = max(range(num_dims), key=lambda d: len({b.offset[d] for b in boxes}), default=0)
        if num_dims:
            boxes.sort(key=lambda box: box.offset[self._dim])
        self._starts = [box.offset[self._dim] for box in boxes] if num_dims else [0] * len(boxes)
        self._longest = max((box.shape[self._dim] for box in boxes), default=0) if num_dims else 1
        self._blocks = [_SourceBox(box, tuple(replicas[box])) for box in boxes]

    def overlaps(self, box: Box) -> Iterator[_SourceBox]:
        """Yield the overlap of `box` with each source box, in order of the sorted dim."""
        if not box.shape:
            yield from self._blocks
            return
        # A box that starts a longest box's length before ours cannot reach it.
        first = bisect_left(self._starts, box.offset[self._dim] - self._longest + 1)
        last = bisect_left(self._starts, box.end[self._dim])
        for block in self._blocks[first:last]:
            if (overlap := box.overlap(block.box)) is not None:
                yield _SourceBox(overlap, block.replicas) if overlap != block.box else block
