from collections import Counter
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyweight.errors import PlanError
from flyweight.plans.reshard import Copy, reshard
from flyweight.spec.box import Box
from flyweight.spec.layout import Layout, Shard

axes = st.integers(1, 4)


def shards(layout, shape):
    return [Shard(rank, layout.box(rank, shape)) for rank in range(layout.num_ranks)]


@st.composite
def layouts(draw, dims):
    sizes = {"a": draw(axes), "b": draw(axes)}
    cuts = {}
    for axis in sizes:
        dim = draw(st.integers(-1, dims - 1))
        if dim >= 0:
            cuts[dim] = (*cuts.get(dim, ()), axis)
    return Layout(sizes, cuts)


@given(st.data(), st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple))
def test_any_layout_fills_any_other_exactly_once(data, shape):
    source = data.draw(layouts(len(shape)))
    sink = data.draw(layouts(len(shape)))
    copies = list(reshard({"w": shards(source, shape)}, {"w": shards(sink, shape)}).copies())
    for shard in shards(sink, shape):
        seen = Counter()
        for copy in copies:
            if copy.sink == shard:
                assert copy.source.box.contains(copy.box)
                local = copy.box.within(copy.sink.box)
                seen.update(i for at, n in local.runs(shard.box.shape) for i in range(at, at + n))
        assert seen == Counter(range(shard.box.num_elements))


def test_boxes_are_counted_from_the_corner_of_the_whole_tensor():
    whole, half = Shard(0, Box((0, 0), (4, 4))), Shard(3, Box((2, 0), (2, 4)))
    (copy,) = reshard({"w": [whole]}, {"w": [half]}).copies()
    assert copy == Copy("w", half.box, whole, half)


def test_replicas_share_the_load():
    box = Box((0,), (8,))
    names = [f"layers.{n}.weight" for n in range(400)]
    source = {name: [Shard(rank, box) for rank in range(4)] for name in names}
    plan = reshard(source, {name: [Shard(8 * rank, box) for rank in range(8)] for name in names})
    load = Counter(copy.source.rank for copy in plan.copies())
    assert sum(load.values()) == 3200
    assert max(load.values()) < 1.1 * 800


def test_a_rank_that_plans_alone_finds_the_same_copies_as_all_together():
    box = Box((0,), (8,))
    source = {f"w{n}": [Shard(rank, box) for rank in range(4)] for n in range(20)}
    sink = {name: [Shard(rank, box) for rank in range(3)] for name in source}
    together = [copy for copy in reshard(source, sink).copies() if copy.sink.rank == 2]
    alone = reshard(source, {name: [shards[2]] for name, shards in sink.items()})
    assert list(alone.copies()) == together


def test_pairs_count_the_bytes_of_every_copy():
    shape = (12, 6)
    source = {n: shards(Layout({"a": 3}, {0: ("a",)}), shape) for n in "uvw"}
    sink = {n: shards(Layout({"a": 2, "b": 2}, {1: ("a",)}), shape) for n in "uvw"}
    plan = reshard(source, sink)
    counted = Counter()
    for copy in plan.copies():
        counted[copy.source.rank, copy.sink.rank] += 2 * copy.box.num_elements
    assert plan.pairs(dict.fromkeys("uvw", 16)) == counted
    assert plan.num_copies == len(list(plan.copies())) == 3 * 4 * 3


def test_a_hole_is_named():
    with pytest.raises(PlanError, match=r"has 4 of the 6 elements of \(0,\)\.\.\(6,\)[\s\S]*'w'"):
        reshard({"w": [Shard(0, Box((0,), (4,)))]}, {"w": [Shard(0, Box((0,), (6,)))]})


def test_a_doubled_element_is_named():
    source = [Shard(0, Box((0,), (4,))), Shard(1, Box((3,), (3,)))]
    with pytest.raises(
        PlanError, match="twice at the source.* of rank [01] and in .* of rank [01]"
    ):
        reshard({"w": source}, {"w": [Shard(0, Box((0,), (6,)))]})


def test_a_missing_name_has_none_of_its_elements():
    with pytest.raises(PlanError, match="sink wants 1 tensors the source lacks: 'w'"):
        reshard({}, {"w": [Shard(0, Box((0,), (2,)))]})


def test_an_empty_shard_needs_nothing():
    assert not list(reshard({}, {"w": [Shard(0, Box((4,), (0,)))]}).copies())


def cuts(length):
    """Every way to cut a length into pieces, as (start, length) pairs."""
    for inner in product([False, True], repeat=length - 1):
        edges = [0, *(at for at, is_edge in enumerate(inner, 1) if is_edge), length]
        yield [(low, high - low) for low, high in pairwise(edges)]


def filled(source, sink):
    """The flat elements of a sink that the plan's copies fill, each with its source rank."""
    copies = list(reshard({"w": source}, {"w": [sink]}).copies())
    for copy in copies:
        assert copy.source.box.contains(copy.box)
        assert copy.source in source
    starts = [copy.box.offset for copy in copies]
    runs = [run for copy in copies for run in copy.box.within(sink.box).runs(sink.box.shape)]
    return starts, Counter(i for at, n in runs for i in range(at, at + n))


@pytest.mark.parametrize("dim", [0, 1])
def test_uneven_pieces_in_any_order_fill_every_window_of_the_tensor(dim):
    """The longest piece may start far before a window that only its end reaches."""

    def box(start, length):
        return Box((start, 0), (length, 2)) if dim == 0 else Box((0, start), (2, length))

    for cut in cuts(6):
        source = [Shard(rank, box(*piece)) for rank, piece in enumerate(cut)]
        for order in (source, source[::-1], source[::2] + source[1::2]):
            for low, high in combinations(range(7), 2):
                sink = Shard(9, box(low, high - low))
                starts, seen = filled(order, sink)
                assert seen == Counter(range(sink.box.num_elements)), (cut, low, high)
                assert starts == sorted(starts)


def test_pieces_cut_in_both_dims_fill_every_window():
    """More cuts along the second dim than along the first: the search goes along the second."""
    rows, columns = [(0, 3), (3, 1)], [(0, 1), (1, 4), (5, 1), (6, 2)]
    pieces = [Box((r, c), (h, w)) for (r, h), (c, w) in product(rows, columns)]
    source = [Shard(rank, piece) for rank, piece in enumerate(pieces)]
    for (top, bottom), (left, right) in product(
        combinations(range(5), 2), combinations(range(9), 2)
    ):
        sink = Shard(9, Box((top, left), (bottom - top, right - left)))
        assert filled(source, sink)[1] == Counter(range(sink.box.num_elements))


def test_a_scalar_that_several_ranks_hold_fills_every_rank():
    source = [Shard(rank, Box((), ())) for rank in range(3)]
    plan = reshard({"s": source}, {"s": [Shard(rank, Box((), ())) for rank in range(5)]})
    copies = list(plan.copies())
    assert [copy.sink.rank for copy in copies] == [0, 1, 2, 3, 4]
    assert all(copy.source in source for copy in copies)
    assert plan.num_copies == 5
