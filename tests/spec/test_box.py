from collections import Counter
from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyweight.errors import SpecError
from flyweight.spec.box import (
    Box,
    block_lengths,
    blocks,
    boxes_of_range,
    num_blocks,
    overlapping_pair,
)

SHAPES = [(), (7,), (4, 6), (2, 3, 5), (0, 3), (1, 1), (3, 1, 2)]
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def grids(shape):
    """Every way to cut `shape` into 1 to 3 pieces along each dimension."""
    for pieces in product((1, 2, 3), repeat=len(shape)):
        edges = [[n * i // p for i in range(p + 1)] for n, p in zip(shape, pieces, strict=True)]
        yield [
            Box(tuple(lo for lo, _ in cell), tuple(hi - lo for lo, hi in cell))
            for cell in product(*(pairwise(edge) for edge in edges))
        ]


def elements(box, shape):
    return [i for at, n in box.runs(shape) for i in range(at, at + n)]


@pytest.mark.parametrize("shape", [(), (7,), (4, 6), (2, 3, 5), (0, 3)])
def test_any_grid_meets_any_other_once_per_element(shape):
    for source, sink in product(grids(shape), repeat=2):
        seen = Counter()
        for ours, theirs in product(source, sink):
            if meet := ours.overlap(theirs):
                seen.update(elements(meet, shape))
        assert seen == Counter(range(prod(shape)))


def test_rows_that_span_the_buffer_melt_into_one_run():
    assert list(Box((2, 0), (3, 8)).runs((10, 8))) == [(16, 24)]
    assert list(Box((2, 1), (3, 2)).runs((10, 8))) == [(17, 2), (25, 2), (33, 2)]


def test_a_box_that_leaves_the_buffer_is_refused():
    with pytest.raises(SpecError, match=r"box \(9, 0\)\.\.\(11, 8\) leaves a buffer of \(10, 8\)"):
        list(Box((9, 0), (2, 8)).runs((10, 8)))


@pytest.mark.parametrize("box", [((0,), (1, 1)), ((-1,), (1,)), ((0,), (-1,))])
def test_a_box_that_describes_nothing_is_refused(box):
    with pytest.raises(SpecError):
        Box(*box)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [1, 2, 3, 5, 7, 100])
def test_blocks_are_the_tensor_in_order_without_gaps(shape, most):
    cut = list(blocks(shape, most))
    assert [i for box in cut for i in elements(box, shape)] == list(range(prod(shape)))
    assert all(len(list(box.runs(shape))) == 1 for box in cut)
    assert all(box.num_elements <= most for box in cut)
    assert num_blocks(shape, most) == len(cut)
    assert list(block_lengths(shape, most)) == [box.num_elements for box in cut]


@given(shapes, st.integers(1, 300))
def test_blocks_cover_any_shape(shape, most):
    cut = list(blocks(shape, most))
    assert [i for box in cut for i in elements(box, shape)] == list(range(prod(shape)))
    assert num_blocks(shape, most) == len(cut)


def test_blocks_of_no_elements_are_refused():
    with pytest.raises(SpecError):
        list(blocks((3,), 0))


@given(st.data(), shapes)
def test_a_stretch_is_its_elements_in_order(data, shape):
    start = data.draw(st.integers(0, prod(shape)))
    length = data.draw(st.integers(0, prod(shape) - start))
    boxes = list(boxes_of_range(shape, start, length))
    assert [i for b in boxes for i in elements(b, shape)] == list(range(start, start + length))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_a_stretch_that_leaves_the_tensor_is_refused():
    with pytest.raises(SpecError, match=r"elements 3\.\.7 leave a tensor of \(2, 3\)"):
        list(boxes_of_range((2, 3), 3, 4))


def test_boxes_of_different_rank_are_refused():
    with pytest.raises(SpecError, match="boxes of 1 and 2 dims"):
        Box((0,), (1,)).overlap(Box((0, 0), (1, 1)))


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.integers(0, 3)),
        max_size=6,
    )
)
def test_an_overlapping_pair_is_found_if_there_is_one(cells):
    boxes = [Box((a, b), (c, d)) for a, b, c, d in cells]
    meets = any(x.overlap(y) for i, x in enumerate(boxes) for y in boxes[:i])
    found = overlapping_pair(boxes)
    assert (found is not None) == meets
    assert found is None or found[0].overlap(found[1])


def test_within_and_contains_agree():
    outer, inner = Box((2, 4), (6, 6)), Box((3, 5), (2, 2))
    assert outer.contains(inner)
    assert not inner.contains(outer)
    assert inner.within(outer) == Box((1, 1), (2, 2))


def test_strips_across_and_strips_along_are_told_apart_by_few_comparisons(monkeypatch):
    """Many boxes side by side in both dims at once: a sweep that looks at all of them takes hours."""
    k = 1000
    monkeypatch.setattr("flyweight.spec.box.MAX_COMPARED", 10 * k)
    rows = [Box((n, 0), (1, k)) for n in range(k)]
    columns = [Box((0, k + n), (k, 1)) for n in range(k)]
    assert overlapping_pair(rows + columns) is None
    assert overlapping_pair([*rows, *columns, Box((7, k - 1), (1, 2))]) is not None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.integers(0, 4),
            st.integers(0, 4),
            st.integers(0, 3),
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        max_size=12,
    )
)
def test_an_overlapping_pair_is_found_whenever_there_is_one(numbers):
    boxes = [Box(each[:3], each[3:]) for each in numbers]
    there_is = any(a.overlap(b) for i, a in enumerate(boxes) for b in boxes[:i])
    found = overlapping_pair(boxes)
    assert (found is not None) == there_is
    assert found is None or found[0].overlap(found[1])


def test_boxes_cut_so_that_comparing_them_takes_for_ever_are_given_up(monkeypatch):
    monkeypatch.setattr("flyweight.spec.box.MAX_COMPARED", 1000)
    rods = [Box((0, n, 0), (100, 1, 50)) for n in range(50)] + [
        Box((0, 0, 50 + n), (100, 50, 1)) for n in range(50)
    ]
    with pytest.raises(SpecError, match="100 boxes are cut so irregularly"):
        overlapping_pair(rods)
