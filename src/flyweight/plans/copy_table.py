"""Copy tables: the plan of a very large model, as arrays.

A row is a box of a tensor, or a copy between two boxes. Tensors that are cut alike share one route
of `reshard`, which proves that every element arrives exactly once; the route's copies are then
written down for all of these tensors at once. So the time per tensor is that of a few numpy calls,
and the number of routes is the number of different cuts, about ten for a language model.

All numbers count items. Tensors with fewer dims than others have leading dims of size 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from flyweight.errors import PlanError
from flyweight.plans.reshard import Route, reshard
from flyweight.spec.box import Box
from flyweight.spec.layout import Shard
from flyweight.spec.manifest import TensorSpec

Integers = NDArray[np.int64]
MAX_COPIES = 4 << 20
"""The most copies of a plan: a small message could ask for a plan of many gigabytes."""
MAX_PAIRS = 1 << 20
"""The most pairs of a source's box and a sink's box of one tensor."""
_REMEDY = "cut the tensors into fewer boxes"
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def kinds_of(specs: Collection[TensorSpec]) -> tuple[list[TensorSpec], Integers]:
    """Return the different objects among the specs, in order, and the index of each spec there.

    A model has very many tensors and few kinds of them; those of a kind share one object.
    """
    ids = np.fromiter(map(id, specs), np.int64, len(specs))
    _, first, found = np.unique(ids, return_index=True, return_inverse=True)
    all_specs, order = list(specs), np.argsort(first)
    return [all_specs[n] for n in first[order]], np.argsort(order)[found]


def item_bytes(specs: Collection[TensorSpec]) -> Integers:
    """Return the width of the items of each tensor."""
    kinds, kind = kinds_of(specs)
    return np.array([spec.item_bytes for spec in kinds], np.int64)[kind]


def numbers_of(
    names: Sequence[str], known: Sequence[str], tied: Mapping[str, str] | None = None
) -> Integers:
    """Return the position of each name in `known`; -1 if it is not there.

    tied: second names of some that are known.
    """
    if names == known:
        return np.arange(len(names))  # most often, and without a dict of very many names
    number = {name: n for n, name in enumerate(known)}
    number |= {name: number[of] for name, of in (tied or {}).items() if of in number}
    return np.fromiter(map(number.get, names, repeat(-1)), np.int64, len(names))


@dataclass(frozen=True, eq=False)
class BoxTable:
    """Boxes of many tensors."""

    tensor: Integers
    """The number of the tensor that each box is of."""
    offset: Integers
    shape: Integers
    """Two dimensions each: a row per box, a column per dim."""

    @classmethod
    def of(cls, boxes: Sequence[tuple[int, Box]]) -> BoxTable:
        """Return a table of boxes, each with the number of its tensor."""
        num_dims = max((len(box.shape) for _, box in boxes), default=1) or 1
        zeros, ones = (0,) * num_dims, (1,) * num_dims
        offset = [(*zeros[len(box.shape) :], *box.offset) for _, box in boxes]
        shape = [(*ones[len(box.shape) :], *box.shape) for _, box in boxes]
        return cls(
            np.array([number for number, _ in boxes], np.int64),
            np.array(offset, np.int64).reshape(-1, num_dims),
            np.array(shape, np.int64).reshape(-1, num_dims),
        )

    @classmethod
    def whole(cls, specs: Collection[TensorSpec]) -> BoxTable:
        """Return one box for each tensor, which is all of it."""
        kinds, kind = kinds_of(specs)
        boxes = cls.of([(n, spec.stored(Box.whole(spec.shape))) for n, spec in enumerate(kinds)])
        return cls(np.arange(len(specs)), boxes.offset[kind], boxes.shape[kind])

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def num_dims(self) -> int:
        return int(self.offset.shape[1])

    @cached_property
    def num_items(self) -> Integers:
        """The items of each box."""
        found: Integers = self.shape.prod(axis=1, dtype=np.int64)
        return found

    def box(self, row: int) -> Box:
        return Box(tuple(self.offset[row].tolist()), tuple(self.shape[row].tolist()))

    def widened(self, num_dims: int) -> BoxTable:
        """Return the same boxes with leading dims of size 1 added, up to this number of dims."""
        extra = num_dims - self.num_dims
        if not extra:
            return self
        offset = np.pad(self.offset, ((0, 0), (extra, 0)))
        shape = np.pad(self.shape, ((0, 0), (extra, 0)), constant_values=1)
        return BoxTable(self.tensor, offset, shape)

    @cached_property
    def _by_tensor(self) -> tuple[Integers, Integers]:
        """The rows sorted by tensor, and the tensors of the sorted rows."""
        if (self.tensor[1:] >= self.tensor[:-1]).all():
            return np.arange(len(self)), self.tensor
        order = np.argsort(self.tensor, kind="stable")
        return order, self.tensor[order]

    def rows_of(self, num_tensors: int) -> tuple[Integers, Integers, Integers]:
        """Return the rows sorted by tensor, and each tensor's first position and count there."""
        order, tensors = self._by_tensor
        counts = np.bincount(tensors, minlength=num_tensors)
        return order, np.cumsum(counts) - counts, counts

    def signatures(self, num_tensors: int) -> NDArray[np.uint64]:
        """Return a number for each tensor, equal for tensors whose boxes are equal, in order.

        Others may have the same number, though hardly ever.
        """
        order, first, counts = self.rows_of(num_tensors)
        rows = np.arange(len(order)).astype(np.uint64) - np.repeat(first, counts).astype(np.uint64)
        for column in (*self.offset[order].T, *self.shape[order].T):
            rows = _mixed(rows + column.astype(np.uint64))
        # Each tensor's rows are next to each other: the sum of them is a difference of two sums.
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(rows, dtype=np.uint64)])
        return _mixed(sums[first + counts] - sums[first] + counts.astype(np.uint64))


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = (numbers + np.uint64(1)) * _FACTOR
    mixed: NDArray[np.uint64] = numbers ^ (numbers >> _SHIFT)
    return mixed


@dataclass(frozen=True, eq=False)
class CopyTable:
    """Copies from boxes of one table to boxes of another, in the order of the sink's boxes."""

    source: Integers
    sink: Integers
    """Rows of the two tables."""
    source_offset: Integers
    sink_offset: Integers
    """Counted from the corner of the source's and the sink's box."""
    shape: Integers


def plan_copies(
    sources: BoxTable,
    sinks: BoxTable,
    names: Sequence[str],
    *,
    source_ranks: Integers,
    source_places: Integers,
    sink_places: Integers,
) -> CopyTable:
    """Return the copies that fill every sink box; raise PlanError if some item cannot come.

    Rows of both tables refer to tensors by their number in `names`. Of several sources of a box,
    one on the sink's own place is taken; of those that are left, the one on the rank that has the
    fewest items to send. The same tables always give the same copies.

    source_ranks: the rank that holds each source box.
    source_places, sink_places: the device of each box, as a number.
    """
    num_dims = max(sources.num_dims, sinks.num_dims)
    sources, sinks = sources.widened(num_dims), sinks.widened(num_dims)
    _check_pairs(sources, sinks, names)
    fills = _all_fills(sources, sinks, names)
    chosen = _chosen_sources(fills, source_ranks, source_places, sink_places)
    if not fills:
        none, empty = np.empty(0, np.int64), np.empty((0, num_dims), np.int64)
        return CopyTable(none, none, empty, empty, empty)
    source, sink = np.concatenate(chosen), np.concatenate([fill.taken for fill in fills])
    offset = np.concatenate([fill.offset for fill in fills])
    shape = np.concatenate([fill.shape for fill in fills])
    del fills, chosen  # of very many tensors they are megabytes
    if (sink[1:] < sink[:-1]).any():
        order = np.argsort(sink, kind="stable")
        source, sink, offset, shape = source[order], sink[order], offset[order], shape[order]
    source_offset = offset - sources.offset[source]
    offset -= sinks.offset[sink]
    return CopyTable(source, sink, source_offset, offset, shape)


def _check_pairs(sources: BoxTable, sinks: BoxTable, names: Sequence[str]) -> None:
    _, _, source_counts = sources.rows_of(len(names))
    _, _, sink_counts = sinks.rows_of(len(names))
    pairs = source_counts * sink_counts
    if (pairs > MAX_PAIRS).any():
        worst = int(pairs.argmax())
        raise PlanError(
            f"{names[worst]!r} has {source_counts[worst]} boxes at the source and "
            f"{sink_counts[worst]} at the sink, more than {MAX_PAIRS} pairs; {_REMEDY}"
        )


def groups_cut_alike(
    sources: BoxTable, sinks: BoxTable, num_tensors: int
) -> Iterator[tuple[Integers, Integers, Integers]]:
    """Yield the wanted tensors in groups whose boxes are equal in both tables.

    Each group has its tensors, and for each of them a row of rows of `sources` and of `sinks`.
    Both tables have the same number of dims.
    """
    source_rows, source_first, source_counts = sources.rows_of(num_tensors)
    sink_rows, sink_first, sink_counts = sinks.rows_of(num_tensors)
    mixed = sources.signatures(num_tensors) * np.uint64(3) + sinks.signatures(num_tensors)
    todo = _equal(mixed, np.flatnonzero(sink_counts))
    while todo:
        group = todo.pop()
        held = _rows(source_rows, source_first, source_counts, group)
        taken = _rows(sink_rows, sink_first, sink_counts, group)
        is_alike = _is_alike(sources, held) & _is_alike(sinks, taken)
        if not is_alike.all():  # two cuts with one signature
            todo.append(group[~is_alike])
            group, held, taken = group[is_alike], held[is_alike], taken[is_alike]
        yield group, held, taken


def _equal(numbers: NDArray[np.uint64], of: Integers) -> list[Integers]:
    """Return the indexes `of` some numbers, those of equal numbers together."""
    if not len(of):
        return []
    _, inverse = np.unique(numbers[of], return_inverse=True)
    return np.split(of[np.argsort(inverse, kind="stable")], np.cumsum(np.bincount(inverse))[:-1])


def _rows(order: Integers, first: Integers, counts: Integers, group: Integers) -> Integers:
    """Return the rows of each tensor of a group: all have as many as the first."""
    count = int(counts[group[0]])
    positions = first[group][:, None] + np.arange(count)
    return (
        order[np.minimum(positions, len(order) - 1)]
        if count
        else np.empty((len(group), 0), np.int64)
    )


def _is_alike(boxes: BoxTable, rows: Integers) -> NDArray[np.bool_]:
    """Return which tensors have the same boxes as the first."""
    same = (boxes.offset[rows] == boxes.offset[rows[0]]) & (
        boxes.shape[rows] == boxes.shape[rows[0]]
    )
    found: NDArray[np.bool_] = same.all(axis=(1, 2))
    return found


@dataclass(frozen=True, eq=False)
class _Fill:
    """Boxes that sinks want, of tensors that are cut alike, and the sources that hold each."""

    held: Integers
    """The rows of the sources of each box, one of which is to be chosen."""
    taken: Integers
    """The row of the sink of each box."""
    offset: Integers
    shape: Integers
    """If there are several sources to choose from, all boxes are equal."""

    @cached_property
    def num_items(self) -> Integers:
        found: Integers = self.shape.prod(axis=1, dtype=np.int64)
        return found


def _all_fills(sources: BoxTable, sinks: BoxTable, names: Sequence[str]) -> list[_Fill]:
    fills: list[_Fill] = []
    num_copies = 0
    for group, held, taken in groups_cut_alike(sources, sinks, len(names)):
        route = _route(sources, held[0], sinks, taken[0], names[int(group[0])])
        num_copies += route.num_copies * len(group)
        if num_copies > MAX_COPIES:
            raise PlanError(f"the plan has more than {MAX_COPIES} copies; {_REMEDY}")
        fills += _fills(route, held, taken)
    return fills


def _route(sources: BoxTable, held: Integers, sinks: BoxTable, taken: Integers, name: str) -> Route:
    have = [Shard(n, sources.box(row)) for n, row in enumerate(held.tolist())]
    want = [Shard(n, sinks.box(row)) for n, row in enumerate(taken.tolist())]
    return reshard({name: have}, {name: want}).routes[name]


def _fills(route: Route, held: Integers, taken: Integers) -> Iterator[_Fill]:
    """Yield the copies of a route for all tensors of a group, with offsets in the whole tensor."""
    parts = [(sink.rank, block) for sink, blocks in route.fills for block in blocks]
    alone = [(sink, block) for sink, block in parts if len(block.replicas) == 1]
    several = [[each] for each in parts if len(each[1].replicas) > 1]
    for some in [alone, *several]:
        if not some:
            continue
        ranks = np.array([[each.rank for each in block.replicas] for _, block in some], np.int64)
        box = np.array([(block.box.offset, block.box.shape) for _, block in some], np.int64)
        yield _Fill(
            held[:, ranks].reshape(-1, ranks.shape[1]),
            taken[:, [sink for sink, _ in some]].reshape(-1),
            np.tile(box[:, 0], (len(held), 1)),
            np.tile(box[:, 1], (len(held), 1)),
        )


def _chosen_sources(
    fills: Sequence[_Fill], ranks: Integers, source_places: Integers, sink_places: Integers
) -> list[Integers]:
    """Return the source of each tensor of each fill."""
    loads = np.zeros(int(ranks.max(initial=0)) + 1, np.int64)
    chosen = [fill.held[:, 0] for fill in fills]
    several = []
    for number, fill in enumerate(fills):
        if fill.held.shape[1] > 1:
            several.append(number)
        else:
            np.add.at(loads, ranks[chosen[number]], fill.num_items)
    several.sort(key=lambda number: -int(fills[number].num_items[0]))
    for number in several:  # the largest first: small ones make even what is left
        fill = fills[number]
        is_near = source_places[fill.held] == sink_places[fill.taken][:, None]
        is_open = is_near | ~is_near.any(axis=1, keepdims=True)
        holders = np.where(is_open, ranks[fill.held], -1)
        signatures = np.zeros(len(holders), np.uint64)
        for column in holders.T:
            signatures = _mixed(signatures + column.astype(np.uint64))
        for group in _equal(signatures, np.arange(len(holders))):
            choices = np.flatnonzero(holders[group[0]] >= 0)
            load = loads[holders[group[0], choices]]
            turns = _dealt(load, int(fill.num_items[0]), len(group))
            chosen[number][group] = fill.held[group, choices[turns]]
            found = ranks[chosen[number][group]]
            loads += fill.num_items[0] * np.bincount(found, minlength=len(loads))
    return chosen


def _dealt(loads: Integers, size: int, count: int) -> Integers:
    """Deal out `count` things of a size so that loads become even; return who gets each."""
    ordered = np.sort(loads)
    levels = (np.cumsum(ordered) + count * size) // np.arange(1, len(loads) + 1)
    level = levels[np.flatnonzero(levels >= ordered)[-1]]  # of those that get something
    counts = np.maximum(level - loads, 0) // size
    late = np.argsort(loads + counts * size, kind="stable")[: count - int(counts.sum())]
    counts[late] += 1
    takers = np.repeat(np.arange(len(loads)), counts)
    turns = np.arange(count) - np.repeat(np.cumsum(counts) - counts, counts)
    return takers[np.argsort(turns, kind="stable")]  # in turns: a sink reads from all at once
