"""Who writes what: every element once, spread over those who could, or told what does not agree."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyweight.errors import DTypeMismatch, PlanError, ShapeMismatch
from flyweight.plans.shares import Holding, share_out
from flyweight.spec.box import Box
from flyweight.spec.dtype import DTYPES
from flyweight.spec.layout import Layout
from flyweight.spec.manifest import TensorSpec


def spec(*shape, dtype="f32"):
    return TensorSpec(DTYPES[dtype], shape)


def holding(tensors, boxes, tied=None, values=None):
    return Holding(tensors, boxes, tied or {}, values or {})


def held(layout, tensors):
    """What each rank of a layout holds of tensors that are all cut alike."""
    return [
        holding(tensors, {name: [layout.box(rank, each.shape)] for name, each in tensors.items()})
        for rank in range(layout.num_ranks)
    ]


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([{}, {0: ("a",)}, {1: ("b",)}, {0: ("a", "b")}, {0: ("b",), 1: ("a",)}]),
)
def test_the_shares_are_every_element_exactly_once(a, b, cuts):
    tensors = {"w": spec(7, 5), "v": spec(4, 9), "e": spec(0, 3)}
    sharing = share_out(held(Layout({"a": a, "b": b}, cuts), tensors))
    seen = {name: Counter() for name in tensors}
    for tensor_boxes in sharing.shares:
        for tensor_box in tensor_boxes:
            runs = tensor_box.box.runs(tensor_box.spec.shape)
            seen[tensor_box.name].update(i for at, n in runs for i in range(at, at + n))
    assert seen["w"] == Counter(range(35))
    assert seen["v"] == Counter(range(36))
    assert sharing.tensors.keys() == tensors.keys()


def test_replicas_spread_the_writing():
    tensors = {f"w{n}": spec(1 + n % 7, 100) for n in range(64)}
    sharing = share_out(held(Layout({"dp": 4}, {}), tensors))
    loads = [
        sum(tensor_box.nbytes for tensor_box in tensor_boxes) for tensor_boxes in sharing.shares
    ]
    assert max(loads) - min(loads) <= 700 * 4
    assert [len(tensor_boxes) for tensor_boxes in sharing.replicas] == [64] * 4


def test_what_only_one_rank_has_counts_before_replicas_are_dealt_out():
    tensors = {"mine": spec(100), "ours": spec(50), "too": spec(50)}
    whole = {name: [Box.whole(each.shape)] for name, each in tensors.items()}
    first = holding(tensors, whole)
    second = holding(tensors, {name: boxes for name, boxes in whole.items() if name != "mine"})
    sharing = share_out([first, second])
    assert [
        [tensor_box.name for tensor_box in tensor_boxes] for tensor_boxes in sharing.shares
    ] == [
        ["mine"],
        ["ours", "too"],
    ]
    assert [tensor_box.name for tensor_box in sharing.replicas[0]] == ["ours", "too"]


def test_ties_that_all_ranks_have_stay_ties():
    tensors = {"embed": spec(8), "head": spec(8)}
    halves = [
        holding(tensors, {name: [Box((4 * rank,), (4,))] for name in tensors}, {"head": "embed"})
        for rank in range(2)
    ]
    sharing = share_out(halves)
    assert sharing.tied == {"head": "embed"}
    assert [
        [tensor_box.name for tensor_box in tensor_boxes] for tensor_boxes in sharing.shares
    ] == [
        ["embed"],
        ["embed"],
    ]


def test_a_tie_on_one_rank_only_is_two_tensors():
    tensors = {"embed": spec(8), "head": spec(8)}
    whole = {name: [Box.whole((8,))] for name in tensors}
    sharing = share_out([holding(tensors, whole, {"head": "embed"}), holding(tensors, whole)])
    assert sharing.tied == {}
    assert sorted(
        tensor_box.name for tensor_boxes in sharing.shares for tensor_box in tensor_boxes
    ) == [
        "embed",
        "head",
    ]


@pytest.mark.parametrize(
    ("boxes", "tied"),
    [
        ({"a": [(0, 8)], "b": [(0, 8)], "c": [(0, 8)]}, {"a": "b", "b": "c"}),
        ({"a": [(0, 4), (4, 4)], "b": [(0, 8)], "c": [(0, 8)]}, {"a": "b", "c": "b"}),
    ],
)
def test_a_tie_to_a_tie_or_between_other_boxes_is_two_tensors(boxes, tied):
    boxes = {name: [Box((at,), (n,)) for at, n in each] for name, each in boxes.items()}
    sharing = share_out([holding({name: spec(8) for name in boxes}, boxes, tied)])
    assert "a" not in sharing.tied
    assert "a" in sharing.tensors


def test_a_tie_does_not_hide_what_is_missing():
    tensors = {"embed": spec(8), "head": spec(8)}
    first = holding(tensors, {name: [Box((0,), (4,))] for name in tensors}, {"head": "embed"})
    second = holding({"embed": spec(8)}, {"embed": [Box((4,), (4,))]})
    with pytest.raises(PlanError, match="hold 4 of the 8 elements of 'head'"):
        share_out([first, second])


def pair(one, other, boxes=None, values=({}, {})):
    return [
        holding({"w": each}, {"w": [box]}, values=value)
        for each, box, value in zip(
            (one, other), boxes or [Box.whole(one.shape)] * 2, values, strict=True
        )
    ]


@pytest.mark.parametrize(
    ("holdings", "kind", "match"),
    [
        (pair(spec(4), spec(4, dtype="f64")), DTypeMismatch, "'w' is f32 on rank 0 and f64 on rank 1"),
        (pair(spec(4), spec(5)), ShapeMismatch, r"'w' is \(4,\) as a whole on rank 0 and \(5,\) on rank 1"),
        (pair(spec(4), spec(4), [Box((0,), (2,)), Box((3,), (1,))]), PlanError, "hold 3 of the 4 elements of 'w'"),
        (pair(spec(4), spec(4), [Box((0,), (3,)), Box((2,), (2,))]), PlanError, "'w' has elements twice"),
        (pair(spec(4), spec(4), [Box((0,), (0,)), Box((4,), (0,))]), PlanError, "hold 0 of the 4 elements of 'w' .*: none"),
        (pair(spec(4), spec(4), values=({"s": 1}, {"s": 2})), PlanError, "'s' is 1 on rank 0 and 2 on rank 1"),
        (pair(spec(4), spec(4), values=({"s": 1}, {"s": True})), PlanError, "'s' is 1 on rank 0 and True on rank 1"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_agree_are_told(holdings, kind, match):
    with pytest.raises(kind, match=match):
        share_out(holdings)


def test_values_of_some_ranks_only_are_kept():
    holdings = pair(spec(4), spec(4), values=({"a": 1}, {"b": "x"}))
    assert share_out(holdings).values == {"a": 1, "b": "x"}
