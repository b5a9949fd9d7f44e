from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyweight.errors import PlanError
from flyweight.plan.reshard import Copy, Shard, reshard
from flyweight.spec.box import Box
from flyweight.spec.layout import Layout

axes = st.integers(1, 4)


def shards(layout, shape):
    return [Shard(rank, box) for rank, box in enumerate(layout.boxes(shape))]


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
    copies = reshard({"w": shards(source, shape)}, {"w": shards(sink, shape)})
    for shard in shards(sink, shape):
        seen = Counter()
        for copy in copies:
            if copy.sink == shard:
                assert copy.source.box.contains(copy.box)
                local = copy.sink_box
                seen.update(i for at, n in local.runs(shard.box.shape) for i in range(at, at + n))
        assert seen == Counter(range(shard.box.num_elements))


def test_boxes_are_counted_from_the_corner_of_each_shard():
    whole, half = Shard(0, Box((0, 0), (4, 4))), Shard(3, Box((2, 0), (2, 4)))
    assert reshard({"w": [whole]}, {"w": [half]}) == [Copy("w", half.box, whole, half)]
    (copy,) = reshard({"w": [whole]}, {"w": [half]})
    assert copy.source_box == Box((2, 0), (2, 4))
    assert copy.sink_box == Box((0, 0), (2, 4))


def test_replicas_share_the_load():
    box = Box((0,), (8,))
    source = {name: [Shard(rank, box) for rank in range(4)] for name in "abcdefgh"}
    copies = reshard(source, {name: [Shard(0, box)] for name in "abcdefgh"})
    assert Counter(copy.source.rank for copy in copies) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_a_hole_is_named():
    with pytest.raises(PlanError, match=r"'w' has 4 of the 6 elements of \(0,\)\.\.\(6,\)"):
        reshard({"w": [Shard(0, Box((0,), (4,)))]}, {"w": [Shard(0, Box((0,), (6,)))]})


def test_a_doubled_element_is_named():
    source = [Shard(0, Box((0,), (4,))), Shard(1, Box((3,), (3,)))]
    with pytest.raises(PlanError, match="twice at the source.* of rank 1 and in .* of rank 0"):
        reshard({"w": source}, {"w": [Shard(0, Box((0,), (6,)))]})


def test_a_missing_name_has_none_of_its_elements():
    with pytest.raises(PlanError, match="'w' has 0 of the 2 elements"):
        reshard({}, {"w": [Shard(0, Box((0,), (2,)))]})


def test_an_empty_shard_needs_nothing():
    assert reshard({}, {"w": [Shard(0, Box((4,), (0,)))]}) == []
