"""What ranks hold together: one table of all their boxes, or an error that names the ranks."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyweight.errors import DTypeMismatch, PlanError, ShapeMismatch
from flyweight.plans.copy_table import BoxTable, plan_copies
from flyweight.plans.merged_source import HeldTable, merge_held
from flyweight.spec.box import Box
from flyweight.spec.dtype import DTYPES
from flyweight.spec.layout import Layout
from flyweight.spec.manifest import TensorSpec


def planned(merged, sinks):
    """Return the copies to some boxes, all of one place."""
    return plan_copies(
        merged.boxes, sinks, list(merged.tensors), source_ranks=merged.rank,
        source_places=np.zeros_like(merged.rank), sink_places=np.zeros_like(sinks.tensor),
    )  # fmt: skip


def spec(*shape, dtype="f32"):
    return TensorSpec(DTYPES[dtype], shape)


def held(boxes, tied=None, values=None, **specs):
    """Return a rank's table; `boxes` maps names to boxes in elements."""
    rows = [
        (number, each.stored(box))
        for number, (name, each) in enumerate(specs.items())
        for box in boxes.get(name, ())
    ]
    return HeldTable(specs, tied or {}, values or {}, BoxTable.of(rows))


def box_of(merged, row):
    """Return the tensor and the box of a row, with the tensor's own number of dims."""
    number = int(merged.boxes.tensor[row])
    name = list(merged.tensors)[number]
    box, extra = merged.boxes.box(row), merged.boxes.num_dims - len(merged.tensors[name].shape)
    return name, Box(box.offset[extra:], box.shape[extra:])


@st.composite
def ranks(draw):
    """Draw tensors that ranks hold by any layout, each rank in an order of its own."""
    sizes = {"a": draw(st.integers(1, 3)), "b": draw(st.integers(1, 2))}
    held_boxes = [{} for _ in range(sizes["a"] * sizes["b"])]
    specs = {}
    for n in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        cuts = {}
        for axis in sizes:
            dim = draw(st.integers(-1, len(shape) - 1))
            if dim >= 0:
                cuts[dim] = (*cuts.get(dim, ()), axis)
        layout = Layout(sizes, cuts)
        specs[f"t{n}"] = spec(*shape)
        for rank, boxes in enumerate(held_boxes):
            boxes[f"t{n}"] = [layout.box(rank, shape)]
    orders = [draw(st.permutations(sorted(specs))) for _ in held_boxes]
    return [
        held(boxes, **{name: specs[name] for name in order})
        for boxes, order in zip(held_boxes, orders, strict=True)
    ]


@given(ranks())
def test_every_box_of_every_rank_is_a_row_and_a_whole_tensor_comes_from_them(tables):
    merged = merge_held(tables)
    assert (np.diff(merged.rank) >= 0).all()
    assert merged.tensors == {
        name: each for table in tables for name, each in table.specs().items()
    }
    for rank, table in enumerate(tables):
        assert merged.block[merged.rank == rank].tolist() == [*range(len(table.boxes))]
    for row, (rank, block) in enumerate(zip(merged.rank, merged.block, strict=True)):
        own = tables[rank].boxes.widened(merged.boxes.num_dims)
        assert merged.boxes.box(row) == own.box(block)
        name = list(merged.tensors)[merged.boxes.tensor[row]]
        assert name == list(tables[rank].tensors)[own.tensor[block]]
    wholes = BoxTable.whole(list(merged.tensors.values()))
    copies = planned(merged, wholes)
    found = np.bincount(copies.sink, copies.shape.prod(axis=1), len(wholes))
    assert found.tolist() == wholes.num_items.tolist()


def test_stages_hold_tensors_of_their_own():
    first = held({"a": [Box((0,), (4,))]}, a=spec(4))
    second = held({"b": [Box((0, 0), (2, 3))]}, values={"step": 3}, b=spec(2, 3))
    merged = merge_held([first, second])
    assert list(merged.tensors) == ["a", "b"]
    assert merged.values == {"step": 3}
    assert [box_of(merged, row) for row in range(2)] == [
        ("a", Box((0,), (4,))),
        ("b", Box((0, 0), (2, 3))),
    ]
    assert (merged.rank.tolist(), merged.block.tolist()) == ([0, 1], [0, 0])


def test_items_of_packed_elements_are_counted_in_bytes():
    packed = spec(4, 8, dtype="f4")
    tables = [held({"w": [Box((2 * n, 0), (2, 8))]}, w=packed) for n in range(2)]
    assert merge_held(tables).boxes.shape.tolist() == [[2, 4], [2, 4]]
    with pytest.raises(PlanError, match=r"hold 16 of the 32 elements of 'w'.*\(2, 8\) on rank 0"):
        merge_held(tables[:1])


WHOLE = [Box((0,), (8,))]
HALVES = [[Box((0,), (4,))], [Box((4,), (4,))]]


def test_a_tie_that_all_ranks_have_stays_a_tie():
    tables = [held({"e": half}, {"h": "e"}, e=spec(8)) for half in HALVES]
    # A rank without elements of either does not know whether they are tied.
    empty = [Box((8,), (0,))]
    tables.append(held({"e": empty, "h": empty}, e=spec(8), h=spec(8)))
    merged = merge_held(tables)
    assert merged.tied == {"h": "e"}
    assert list(merged.tensors) == ["e"]
    assert merged.rank.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("tables", "rows"),
    [
        # tied on the first rank, two tensors on the second
        (
            [
                held({"e": HALVES[0]}, {"h": "e"}, e=spec(8)),
                held({"e": HALVES[1], "h": HALVES[1]}, e=spec(8), h=spec(8)),
            ],
            [("e", 0, 0), ("h", 0, 0), ("e", 1, 0), ("h", 1, 1)],
        ),
        # tied the other way round
        (
            [
                held({"e": HALVES[0]}, {"h": "e"}, e=spec(8)),
                held({"h": HALVES[1]}, {"e": "h"}, h=spec(8)),
            ],
            [("e", 0, 0), ("h", 0, 0), ("h", 1, 0), ("e", 1, 0)],
        ),
        # tied to another name
        (
            [
                held({"e": WHOLE, "f": WHOLE}, {"h": "e"}, e=spec(8), f=spec(8)),
                held({"e": WHOLE, "f": WHOLE}, {"h": "f"}, e=spec(8), f=spec(8)),
            ],
            [("e", 0, 0), ("f", 0, 1), ("h", 0, 0), ("e", 1, 0), ("f", 1, 1), ("h", 1, 1)],
        ),
        # two names are tied on the first rank only
        (
            [
                held({"e": WHOLE, "f": WHOLE}, {"h": "f", "g": "e"}, e=spec(8), f=spec(8)),
                held({"g": WHOLE, "h": WHOLE}, g=spec(8), h=spec(8)),
            ],
            [("e", 0, 0), ("f", 0, 1), ("h", 0, 1), ("g", 0, 0), ("g", 1, 0), ("h", 1, 1)],
        ),
        # only one rank has the second name
        (
            [held({"e": WHOLE}, {"h": "e"}, e=spec(8)), held({"e": WHOLE}, e=spec(8))],
            [("e", 0, 0), ("h", 0, 0), ("e", 1, 0)],
        ),
    ],
)
def test_a_tie_that_ranks_do_not_share_is_two_tensors(tables, rows):
    merged = merge_held(tables)
    assert merged.tied == {}
    names = list(merged.tensors)
    found = zip(merged.boxes.tensor, merged.rank, merged.block, strict=True)
    assert [(names[tensor], rank, block) for tensor, rank, block in found] == rows


def test_a_tie_does_not_hide_what_is_missing():
    first = held({"e": HALVES[0]}, {"h": "e"}, e=spec(8))
    second = held({"e": HALVES[1]}, e=spec(8))
    with pytest.raises(
        PlanError, match=r"hold 4 of the 8 elements of 'h'.*\(0,\)..\(4,\) on rank 0"
    ):
        merge_held([first, second])


@pytest.mark.parametrize(
    ("boxes", "others", "kind", "match"),
    [
        ((WHOLE, WHOLE), {"dtype": "f64"}, DTypeMismatch, "'w' is f32 on rank 0 and f64 on rank 1; cast"),
        ((WHOLE, WHOLE), {"shape": (9,)}, ShapeMismatch, r"'w' is \(8,\) as a whole on rank 0 and \(9,\) on rank 1; parts"),
        (([Box((0,), (3,))], HALVES[1]), {}, PlanError, r"hold 7 of the 8 elements of 'w' \(8,\): .*\(3,\) on rank 0.*\(8,\) on rank 1"),
        (([Box((0,), (5,))], HALVES[1]), {}, PlanError, r"'w' has elements twice: in \(4,\)..\(8,\) of rank 1 and in \(0,\)..\(5,\) of rank 0; boxes"),
        ((HALVES[0], [Box((4,), (5,))]), {}, PlanError, r"rank 1 holds \(4,\)..\(9,\) of 'w', which is \(8,\) as a whole"),
        (([Box((0,), (0,))], []), {}, PlanError, r"hold 0 of the 8 elements of 'w' \(8,\): none"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_agree_are_named(boxes, others, kind, match):
    other = spec(*others.get("shape", (8,)), dtype=others.get("dtype", "f32"))
    # Another tensor, cut alike, is whole: only the name of the wrong one may be told.
    fine = {"fine": [Box((0,), (8,))]}
    tables = [
        held(fine | {"w": box}, fine=spec(8), w=each)
        for box, each in zip(boxes, (spec(8), other), strict=True)
    ]
    with pytest.raises(kind, match=match):
        merge_held(tables)


def test_values_are_the_same_on_every_rank():
    tables = [
        held({"w": WHOLE}, values=each, w=spec(8)) for each in ({"s": 1, "a": 2}, {"s": 1, "b": 3})
    ]
    assert merge_held(tables).values == {"s": 1, "a": 2, "b": 3}
    tables.append(held({"w": WHOLE}, values={"s": True}, w=spec(8)))
    with pytest.raises(PlanError, match="'s' is 1 on rank 0 and True on rank 2; a value"):
        merge_held(tables)


def test_a_fault_of_one_tensor_among_many_that_are_cut_alike_is_found():
    num, size = 3000, 4
    for wrong in (0, 1234, num - 1):
        offset, shape = np.zeros((num, 1), np.int64), np.full((num, 1), size)
        shape[wrong] = size - 1
        specs = {f"t{n}": spec(size) for n in range(num)}
        table = HeldTable(specs, {}, {}, BoxTable(np.arange(num), offset, shape))
        with pytest.raises(PlanError, match=f"3 of the 4 elements of 't{wrong}'"):
            merge_held([table, table])


def test_a_table_that_describes_nothing_is_refused():
    for tied in ({"h": "x"}, {"e": "e"}, {"h": "e", "g": "h"}):
        with pytest.raises(PlanError, match="a tie is a second name of a tensor"):
            held({"e": WHOLE}, tied, e=spec(8))
    for number in (-1, 1):
        with pytest.raises(PlanError, match=f"of tensors {number} to {number}, and there are 1"):
            HeldTable({"e": spec(8)}, {}, {}, BoxTable.of([(number, WHOLE[0])]))
    for corner in ([[-4], [8]], [[4], [-4]]):
        offset, shape = np.array(corner)[:, None]
        with pytest.raises(PlanError, match="negative"):
            HeldTable({"e": spec(8)}, {}, {}, BoxTable(np.zeros(1, np.int64), offset, shape))


def test_no_ranks_and_no_tensors_hold_nothing():
    assert len(merge_held([]).boxes) == 0
    assert len(merge_held([held({}), held({"w": WHOLE}, w=spec(8))]).boxes) == 1


def transformer(num_layers=6):
    """Return the shapes of a model with eight tensors in a layer: as many as ranks."""
    layer = [(64, 64), (16, 64), (16, 64), (64, 64), (256, 64), (256, 64), (64, 256), (64,)]
    shapes = {f"{n}.{m}": shape for n in range(num_layers) for m, shape in enumerate(layer)}
    return {"embed": (512, 64), **shapes, "head": (512, 64)}


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_the_load_of_replicas_is_even_over_ranks(is_hybrid):
    """All ranks hold all tensors, or two groups of four ranks hold a quarter each."""
    specs = {name: spec(*shape, dtype="bf16") for name, shape in transformer().items()}
    layout = Layout({"dp": 2, "fsdp": 4}, {0: ("fsdp",)} if is_hybrid else {})
    merged = merge_held(
        [
            held({name: [layout.box(rank, each.shape)] for name, each in specs.items()}, **specs)
            for rank in range(8)
        ]
    )
    engine, total = Layout({"tp": 2}, {0: ("tp",)}), Counter()
    for rank in range(2):
        wanted = [(n, engine.box(rank, each.shape)) for n, each in enumerate(specs.values())]
        copies = planned(merged, BoxTable.of(wanted))
        loads = np.bincount(merged.rank[copies.source], copies.shape.prod(axis=1), 8)
        if not is_hybrid:
            assert loads.max() <= 1.1 * loads.mean()
            assert loads.min() >= 0.9 * loads.mean()
        total.update(dict(enumerate(loads)))
    assert max(total.values()) <= 1.1 * sum(total.values()) / 8
