"""Copy tables: the plan of a very large model, as arrays.

A row is a box of a tensor, or a copy between two boxes. Tensors that are cut alike share one route
of `reshard`, which proves that every element arrives exactly once; the route's copies are then
written down for all of these tensors at once. So the time per tensor is that of a few numpy calls,
and the number of routes is the number of different cuts, about ten for a language model.

All numbers count items. Tensors with fewer dims than others have leading dims of size 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flyweight.plans.reshard import Route, reshard
from flyweight.spec.box import Box
from flyweight.spec.layout import Shard

Integers = NDArray[np.int64]
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


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

    def is_same(self, other: BoxTable) -> bool:
        """True if the other table has the same rows."""
        return all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("tensor", "offset", "shape")
        )

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
        is_sorted = bool((self.tensor[1:] >= self.tensor[:-1]).all())
        order = np.arange(len(self)) if is_sorted else np.argsort(self.tensor, kind="stable")
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

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def num_items(self) -> Integers:
        found: Integers = self.shape.prod(axis=1, dtype=np.int64)
        return found


def plan_copies(sources: BoxTable, sinks: BoxTable, names: Sequence[str]) -> CopyTable:
    """Return the copies that fill every sink box; raise PlanError if some item cannot come.

    Rows of both tables refer to tensors by their number in `names`. Sources that hold the same
    box take turns.
    """
    num_dims = max(sources.num_dims, sinks.num_dims)
    sources, sinks = sources.widened(num_dims), sinks.widened(num_dims)
    found = list(_groups_of_copies(sources, sinks, names))
    source, sink, offset, shape = (
        np.concatenate([each[n] for each in found]) if found else np.empty((0, num_dims), np.int64)
        for n in range(4)
    )
    if not found:
        source = sink = np.empty(0, np.int64)
    order = np.argsort(sink, kind="stable")
    source, sink, offset, shape = source[order], sink[order], offset[order], shape[order]
    return CopyTable(
        source, sink, offset - sources.offset[source], offset - sinks.offset[sink], shape
    )


_Copies = tuple[Integers, Integers, Integers, Integers]


def _groups_of_copies(
    sources: BoxTable, sinks: BoxTable, names: Sequence[str]
) -> Iterator[_Copies]:
    """Yield the copies of all tensors that are cut alike, with offsets in the whole tensor."""
    source_rows, source_first, source_counts = sources.rows_of(len(names))
    sink_rows, sink_first, sink_counts = sinks.rows_of(len(names))
    mixed = sources.signatures(len(names)) * np.uint64(3) + sinks.signatures(len(names))
    wanted = np.flatnonzero(sink_counts)
    _, inverse = np.unique(mixed[wanted], return_inverse=True)
    by_group = wanted[np.argsort(inverse, kind="stable")]
    ends = np.cumsum(np.bincount(inverse))
    todo = np.split(by_group, ends[:-1]) if len(wanted) else []
    while todo:
        group = todo.pop()
        first = int(group[0])
        held = _rows(source_rows, source_first, source_counts, group)
        taken = _rows(sink_rows, sink_first, sink_counts, group)
        is_alike = _is_alike(sources, held) & _is_alike(sinks, taken)
        if not is_alike.all():  # two cuts with one signature
            todo.append(group[~is_alike])
            group, held, taken = group[is_alike], held[is_alike], taken[is_alike]
        route = _route(sources, held[0], sinks, taken[0], names[first])
        yield from _written_down(route, group, held, taken)


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


def _route(sources: BoxTable, held: Integers, sinks: BoxTable, taken: Integers, name: str) -> Route:
    have = [Shard(n, sources.box(row)) for n, row in enumerate(held.tolist())]
    want = [Shard(n, sinks.box(row)) for n, row in enumerate(taken.tolist())]
    return reshard({name: have}, {name: want}).routes[name]


def _written_down(
    route: Route, group: Integers, held: Integers, taken: Integers
) -> Iterator[_Copies]:
    for sink, blocks in route.fills:
        for block in blocks:
            choices = np.array([replica.rank for replica in block.replicas])
            chosen = choices[(group + sink.rank) % len(choices)]
            source = held[np.arange(len(group)), chosen]
            offset, shape = (
                np.broadcast_to(np.array(each, np.int64), (len(group), len(each)))
                for each in (block.box.offset, block.box.shape)
            )
            yield source, taken[:, sink.rank], offset, shape
