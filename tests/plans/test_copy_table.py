"""Copy tables against `reshard`, which plans one tensor at a time."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyweight.errors import PlanError
from flyweight.plans import copy_table
from flyweight.plans.copy_table import BoxTable, plan_copies
from flyweight.spec.box import Box
from flyweight.spec.layout import Layout


@st.composite
def models(draw):
    """Draw shapes, and how each tensor is cut at both ends: several are cut alike."""
    kinds = []
    for _ in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 6), min_size=0, max_size=3)))
        cuts = []
        for _ in range(2):
            sizes, cut = {"a": draw(st.integers(1, 3)), "b": draw(st.integers(1, 3))}, {}
            for axis in sizes:
                dim = draw(st.integers(-1, len(shape) - 1))
                if dim >= 0:
                    cut[dim] = (*cut.get(dim, ()), axis)
            layout = Layout(sizes, cut)
            cuts.append([layout.box(rank, shape) for rank in range(layout.num_ranks)])
        kinds.append((shape, *cuts))
    return draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=8))


def planned(sources, sinks, names):
    """Return the copies if each box of a tensor is on a rank of its own, and all on one place."""
    seen, ranks = Counter(), []
    for tensor in sources.tensor.tolist():
        ranks.append(seen[tensor])
        seen[tensor] += 1
    return plan_copies(
        sources, sinks, names,
        source_ranks=np.array(ranks, np.int64),
        source_places=np.zeros_like(sources.tensor), sink_places=np.zeros_like(sinks.tensor),
    )  # fmt: skip


def filled(copies, sources, sinks):
    """Return how often each item of each sink box is written, after checking what is read."""
    seen = [Counter() for _ in range(len(sinks))]
    for n in range(len(copies.source)):
        source, sink = int(copies.source[n]), int(copies.sink[n])
        assert sources.tensor[source] == sinks.tensor[sink]
        shape = tuple(copies.shape[n].tolist())
        read = Box(tuple(copies.source_offset[n].tolist()), shape)
        written = Box(tuple(copies.sink_offset[n].tolist()), shape)
        assert Box.whole(sources.box(source).shape).contains(read)
        assert read.moved(sources.box(source).offset) == written.moved(sinks.box(sink).offset)
        runs = written.runs(sinks.box(sink).shape)
        seen[sink].update(i for at, length in runs for i in range(at, at + length))
    return seen


@given(models(), st.randoms(use_true_random=False))
def test_every_item_of_every_sink_box_comes_exactly_once(model, random):
    boxes = [(n, box) for n, (_, cut, _) in enumerate(model) for box in cut]
    wanted = [(n, box) for n, (_, _, cut) in enumerate(model) for box in cut]
    random.shuffle(boxes)
    sources, sinks = BoxTable.of(boxes), BoxTable.of(wanted)
    copies = planned(sources, sinks, [f"t{n}" for n in range(len(model))])
    assert (np.diff(copies.sink) >= 0).all()
    for row, seen in enumerate(filled(copies, sources, sinks)):
        assert seen == Counter(range(sinks.box(row).num_elements))


def test_two_cuts_with_one_signature_are_planned_apart(monkeypatch):
    monkeypatch.setattr(copy_table, "_mixed", np.zeros_like)
    halves, thirds = [Box((0,), (3,)), Box((3,), (3,))], [Box((0,), (2,)), Box((2,), (4,))]
    sources = BoxTable.of([(n, box) for n in range(6) for box in (halves if n % 2 else thirds)])
    sinks = BoxTable.of([(n, Box((1,), (4,))) for n in range(6)])
    copies = planned(sources, sinks, list("abcdef"))
    assert [Counter(range(4))] * 6 == filled(copies, sources, sinks)


def test_sources_that_hold_the_same_box_take_turns():
    box, num = Box((0,), (8,)), 400
    sources = BoxTable.of([(n, box) for n in range(num) for _ in range(4)])
    sinks = BoxTable.of([(n, box) for n in range(num)])
    copies = planned(sources, sinks, [str(n) for n in range(num)])
    assert set(Counter((copies.source % 4).tolist()).values()) == {100}
    assert (np.diff(copies.source % 4) != 0).all()  # and no rank is read for long while others wait


def test_what_no_source_has_is_named():
    sources = BoxTable.of([(0, Box((0,), (8,))), (1, Box((0,), (4,)))])
    sinks = BoxTable.of([(0, Box((0,), (8,))), (1, Box((0,), (8,)))])
    with pytest.raises(PlanError, match="4 of the 8 elements") as caught:
        planned(sources, sinks, ["first", "second"])
    assert "second" in str(caught.value)
    with pytest.raises(PlanError, match="'second'"):
        planned(BoxTable.of([(0, Box((0,), (8,)))]), sinks, ["first", "second"])


def test_a_table_without_rows_makes_no_copies():
    nothing = BoxTable.of([])
    assert len(planned(nothing, nothing, []).source) == 0
    assert len(planned(BoxTable.of([(0, Box((0,), (4,)))]), nothing, ["a"]).source) == 0


def test_a_source_on_the_sinks_own_place_is_taken():
    box, num = Box((0,), (8,)), 40
    sources = BoxTable.of([(n, box) for n in range(num) for _ in range(4)])
    sinks = BoxTable.of([(n, box) for n in range(num) for _ in range(2)])
    source_places = np.tile([0, 1, 2, 2], num)
    sink_places = np.tile([2, 5], num)  # nothing is on place 5
    copies = plan_copies(
        sources, sinks, [str(n) for n in range(num)], source_ranks=np.tile(range(4), num),
        source_places=source_places, sink_places=sink_places,
    )  # fmt: skip
    near = copies.source[copies.sink % 2 == 0] % 4
    assert Counter(near.tolist()) == {2: 20, 3: 20}
    # The others make up for it: every rank sends as much.
    assert Counter((copies.source % 4).tolist()) == {0: 20, 1: 20, 2: 20, 3: 20}


def test_what_only_one_rank_holds_counts_before_replicas_are_dealt_out():
    box, num = Box((0,), (8,)), 30
    rows = [(n, box) for n in range(num) for _ in range(3 if n % 3 else 1)]
    ranks = [rank for n in range(num) for rank in ((0, 1, 2) if n % 3 else (2,))]
    copies = plan_copies(
        BoxTable.of(rows), BoxTable.of([(n, box) for n in range(num)]),
        [str(n) for n in range(num)], source_ranks=np.array(ranks),
        source_places=np.zeros(len(rows)), sink_places=np.zeros(num),
    )  # fmt: skip
    assert Counter(np.array(ranks)[copies.source].tolist()) == {0: 10, 1: 10, 2: 10}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 40))
def test_things_are_dealt_to_those_that_have_least(loads, size, count):
    takers = copy_table._dealt(np.array(loads), size, count)
    assert len(takers) == count
    expected = list(loads)
    for _ in range(count):
        expected[expected.index(min(expected))] += size
    found = np.array(loads) + size * np.bincount(takers, minlength=len(loads))
    assert sorted(found.tolist()) == sorted(expected)
