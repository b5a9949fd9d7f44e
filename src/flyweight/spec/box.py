"""Boxes: where a shard sits inside its tensor.

Resharding asks two questions. Where do two shards overlap? `Box.overlap`. Which contiguous ranges
of a buffer is that? `Box.runs`. Everything here counts elements in row-major order; bytes first
appear in `flyweight.memory`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import product, repeat
from math import prod
from operator import mul

from flyweight.errors import SpecError

MAX_COMPARED = 20_000_000
"""How many pairs of boxes are compared at most, so that a hostile cut takes no endless time."""


@dataclass(frozen=True, slots=True)
class Box:
    """A block of elements of a tensor.

    `offset` is its first index along each dim and `shape` its size, both in elements.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise SpecError(f"box offset {self.offset} and shape {self.shape} differ in rank")
        if min(self.offset + self.shape, default=0) < 0:
            raise SpecError(f"box offset {self.offset} or shape {self.shape} is negative")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that is all of a tensor of `shape`."""
        return _whole(tuple(shape))

    def _check_rank(self, other: Box) -> None:
        if len(self.shape) != len(other.shape):
            raise SpecError(
                f"boxes of {len(self.shape)} and {len(other.shape)} dims cannot overlap"
            )

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(start + length for start, length in zip(self.offset, self.shape, strict=True))

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index an array with this to get the block."""
        return tuple(slice(lo, hi) for lo, hi in zip(self.offset, self.end, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """Return the block both boxes cover, or None if they share no element."""
        self._check_rank(other)
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(hi - lo for lo, hi in zip(start, map(min, self.end, other.end), strict=True))
        return Box(start, shape) if all(length > 0 for length in shape) else None

    def contains(self, other: Box) -> bool:
        self._check_rank(other)
        return all(map(int.__le__, self.offset, other.offset)) and all(
            map(int.__ge__, self.end, other.end)
        )

    def moved(self, by: Sequence[int]) -> Box:
        """Return the block with `by` added to its offset: counted from a corner further out."""
        return Box(tuple(map(int.__add__, self.offset, by)), self.shape)

    def within(self, outer: Box) -> Box:
        """Return the block with its offset counted from the corner of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)

    def runs(self, buffer_shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Yield (start, length) of each contiguous run of this block in a buffer."""
        if any(end > size for end, size in zip(self.end, buffer_shape, strict=True)):
            raise SpecError(f"box {self.offset}..{self.end} leaves a buffer of {buffer_shape}")
        # Trailing dims that are covered edge to edge belong to the run of the dim before them.
        head = len(buffer_shape)
        while head and self.shape[head - 1] == buffer_shape[head - 1]:
            head -= 1
        head = max(head - 1, 0)
        strides = strides_of(buffer_shape)
        corner, length = sum(map(mul, self.offset, strides)), prod(self.shape[head:])
        for index in product(*map(range, self.shape[:head])) if length else ():
            yield corner + sum(map(mul, index, strides)), length


@lru_cache(maxsize=256)  # models have many tensors and few shapes; more could share one hash
def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def overlapping_pair(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, or None; near-linear for the grids of layouts."""
    boxes = [box for box in boxes if box.num_elements]
    if len(boxes) < 2 or not boxes[0].shape:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    # Sweep along the dim that is cut most often; boxes side by side are sorted by the next dim.
    dims = range(len(boxes[0].shape))
    dim, *others = sorted(dims, key=lambda d: -len({box.offset[d] for box in boxes}))
    side = others[0] if others else dim
    live: list[tuple[int, int]] = []  # (start along `side`, number of the box)
    ends: list[tuple[int, int]] = []
    boxes.sort(key=lambda box: box.offset[dim])
    longest, num_compared = max(box.shape[side] for box in boxes), 0
    for number, box in enumerate(boxes):
        while ends and ends[0][0] <= box.offset[dim]:
            _, gone = heappop(ends)
            live.pop(bisect_left(live, (boxes[gone].offset[side], gone)))
        last = bisect_left(live, (box.end[side], -1))
        if len(dims) <= 2:
            # Boxes side by side do not overlap: of those before ours only the last may reach it.
            first = max(bisect_left(live, (box.offset[side], -1)) - 1, 0)
        else:  # a box that starts a longest box's length before ours cannot reach it
            first = bisect_left(live, (box.offset[side] - longest + 1, -1))
        num_compared += last - first
        if num_compared > MAX_COMPARED:
            raise SpecError(
                f"{len(boxes)} boxes are cut so irregularly that more than {MAX_COMPARED} pairs of "
                f"them would have to be compared"
            )
        for _, other in live[first:last]:
            if box.overlap(boxes[other]):
                return box, boxes[other]
        insort(live, (box.offset[side], number))
        heappush(ends, (box.end[dim], number))
    return None


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of `shape`, in elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _block_rows(shape: Sequence[int], max_elements: int) -> tuple[int, int, int]:
    """Return the outermost dim whose rows fit in a block, how many fit, and a row's elements."""
    dim = next(dim for dim in range(len(shape)) if prod(shape[dim + 1 :]) <= max_elements)
    row = prod(shape[dim + 1 :])
    return dim, max_elements // row, row


def num_blocks(shape: Sequence[int], max_elements: int) -> int:
    """Return how many boxes `blocks` would yield, without making them."""
    if prod(shape) <= max_elements:
        return 1 if prod(shape) else 0
    dim, num_rows, _ = _block_rows(shape, max_elements)
    return prod(shape[:dim]) * -(-shape[dim] // num_rows)


def block_lengths(shape: Sequence[int], max_elements: int) -> Iterator[int]:
    """Yield how many elements each box of `blocks` has, without making the boxes."""
    if prod(shape) == 0:
        return
    dim, num_rows, row = _block_rows(shape or (1,), max_elements)
    num_full, rest = divmod(shape[dim] if shape else 1, num_rows)
    for _ in range(prod(shape[:dim])):
        yield from repeat(num_rows * row, num_full)
        if rest:
            yield rest * row


def blocks(shape: Sequence[int], max_elements: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most `max_elements`, in row-major order.

    Each box is contiguous in the tensor, and the boxes follow each other without a gap. A box is as
    many whole rows as fit, of the outermost dim whose rows fit.
    """
    if max_elements < 1:
        raise SpecError(f"blocks of {max_elements} elements; at least 1")
    if prod(shape) <= max_elements:
        if prod(shape):
            yield Box.whole(shape)
        return
    dim, num_rows, _ = _block_rows(shape, max_elements)
    tail = tuple(shape[dim + 1 :])
    for index in product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], num_rows):
            length = min(num_rows, shape[dim] - start)
            yield Box((*index, start, *(0 for _ in tail)), (*(1 for _ in index), length, *tail))


def boxes_of_range(shape: Sequence[int], start: int, length: int) -> Iterator[Box]:
    """Cover `length` elements from flat index `start` with contiguous boxes, in row-major order.

    A shard that is a range of the flattened tensor, across rows, becomes boxes this way.
    """
    if start < 0 or length < 0 or start + length > prod(shape):
        raise SpecError(f"elements {start}..{start + length} leave a tensor of {tuple(shape)}")
    strides = strides_of(shape)
    if not strides and length:
        yield Box((), ())
        return
    while length:
        index = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        # The outermost dim at whose row edge the range is now, and whose rows still fit.
        dim = next(d for d, s in enumerate(strides) if not any(index[d + 1 :]) and s <= length)
        count = min(length // strides[dim], shape[dim] - index[dim])
        yield Box(index, (*(1 for _ in range(dim)), count, *shape[dim + 1 :]))
        start, length = start + count * strides[dim], length - count * strides[dim]
