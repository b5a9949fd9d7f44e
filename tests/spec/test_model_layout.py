"""Layouts of whole models: what real trainers and engines do, each beside a plain way to say it."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaign import budget
from flyweight.errors import PlanError, SpecError
from flyweight.plans.reshard import reshard
from flyweight.spec.dtype import DTYPES
from flyweight.spec.manifest import TensorSpec
from flyweight.spec.model_layout import MAX_RANKS, ModelLayout
from flyweight.spec.rules import Rule, Spread
from model_layouts import EXPERTS, GROUPS, LAYOUTS, MODEL, REST, SPECS, rank_tensors, rule


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].tolist() == array.tolist(), name


def test_tensor_parallel_rows_and_columns():
    layout = ModelLayout(
        {"tp": 2},
        [rule("layers.*.q", cut={0: ("tp",)}), rule("layers.*.o", cut={1: ("tp",)}), REST],
    )
    found = rank_tensors(layout, 1)
    assert found["layers.0.q"].tolist() == MODEL["layers.0.q"][8:].tolist()
    assert found["layers.2.o"].tolist() == MODEL["layers.2.o"][:, 8:].tolist()
    assert found["norm"].tolist() == MODEL["norm"].tolist()


def test_q_k_and_v_side_by_side_in_each_tensor_parallel_rank():
    """C20: each rank has its slice of q, of k and of v in one tensor, as engines do."""
    layout = ModelLayout(
        {"tp": 4},
        [
            rule(
                "layers.*.q", "layers.*.k", "layers.*.v", cut={0: ("tp",)}, local="layers.{0}.qkv"
            ),
            REST,
        ],
    )
    for rank in range(4):
        found = rank_tensors(layout, rank)
        parts = [np.split(MODEL[f"layers.1.{n}"], 4)[rank] for n in "qkv"]
        assert found["layers.1.qkv"].tolist() == np.concatenate(parts).tolist()
        assert "layers.1.q" not in found


def test_key_heads_fewer_than_ranks_are_held_by_neighbours():
    cuts = ({0: ("tp",)}, {0: ("tp/4",)}, {0: ("tp/4",)})
    layout = ModelLayout(
        {"tp": 8},
        [
            Rule(
                names=("layers.*.q", "layers.*.k", "layers.*.v"), cuts=cuts, local="layers.{0}.qkv"
            ),
            REST,
        ],
    )
    for rank in range(8):
        parts = [np.split(MODEL["layers.0.q"], 8)[rank]]
        parts += [np.split(MODEL[f"layers.0.{n}"], 4)[rank // 2] for n in "kv"]
        assert rank_tensors(layout, rank)["layers.0.qkv"].tolist() == np.concatenate(parts).tolist()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_grouped_heads_take_turns_as_megatron_lays_them(tp):
    """For each group its query heads, then its key head, then its value head."""
    layout = ModelLayout(
        {"tp": tp},
        [
            rule(
                "layers.*.q",
                "layers.*.k",
                "layers.*.v",
                cut={0: ("tp",)},
                local="layers.{0}.qkv",
                groups=GROUPS,
            ),
            REST,
        ],
    )
    per_group = [
        np.concatenate([np.split(MODEL[f"layers.0.{n}"], GROUPS)[group] for n in "qkv"])
        for group in range(GROUPS)
    ]
    whole = np.concatenate(per_group)
    for rank in range(tp):
        found = rank_tensors(layout, rank)["layers.0.qkv"]
        assert found.tolist() == np.split(whole, tp)[rank].tolist()


def test_gate_and_up_are_joined_along_any_dim():
    layout = ModelLayout(
        {"tp": 2},
        [rule("layers.*.gate", "layers.*.up", cut={0: ("tp",)}, local="layers.{0}.gate_up"), REST],
    )
    expected = np.concatenate([MODEL["layers.0.gate"][4:], MODEL["layers.0.up"][4:]])
    assert rank_tensors(layout, 1)["layers.0.gate_up"].tolist() == expected.tolist()
    layout = ModelLayout(
        {"tp": 2},
        [
            rule(
                "layers.*.gate", "layers.*.up", cut={0: ("tp",)}, local="layers.{0}.gate_up", join=1
            ),
            REST,
        ],
    )
    expected = np.concatenate([MODEL["layers.0.gate"][4:], MODEL["layers.0.up"][4:]], axis=1)
    assert rank_tensors(layout, 1)["layers.0.gate_up"].tolist() == expected.tolist()


@pytest.mark.parametrize("ep", [1, 2, 3, 4])
def test_experts_are_stacked_joined_and_dealt_out(ep):
    """experts.N.w1 and w3 become experts.w13[N], of the experts that a rank has."""
    layout = ModelLayout(
        {"ep": ep},
        [
            rule(
                "layers.*.experts.*.w1",
                "layers.*.experts.*.w3",
                local="layers.{0}.w13",
                stack=1,
                spread={1: ("ep",)},
            ),
            rule("layers.*.experts.*.w2", local="layers.{0}.w2", stack=1, spread={1: ("ep",)}),
            REST,
        ],
    )
    per_rank = -(-EXPERTS // ep)
    for rank in range(ep):
        mine = range(EXPERTS)[rank * per_rank : (rank + 1) * per_rank]
        found = rank_tensors(layout, rank)
        if not mine:
            assert "layers.0.w13" not in found
            continue
        stack = [
            np.concatenate([MODEL[f"layers.0.experts.{e}.{n}"] for n in ("w1", "w3")]) for e in mine
        ]
        assert found["layers.0.w13"].tolist() == np.stack(stack).tolist()
        assert (
            found["layers.0.w2"].tolist()
            == np.stack([MODEL[f"layers.0.experts.{e}.w2"] for e in mine]).tolist()
        )


def test_experts_are_stacked_by_number_not_by_text():
    specs = {f"e.{n}": TensorSpec(DTYPES["f32"], (1,)) for n in (10, 9, 1, 0)}
    layout = ModelLayout({"a": 1}, [rule("e.*", local="e", stack=0)])
    assert [held.name for held in layout.locals(specs, 0)["e"].held] == [
        "e.0",
        "e.1",
        "e.9",
        "e.10",
    ]


def test_pipeline_stages_hold_some_layers_evenly_or_as_told():
    layout = ModelLayout({"pp": 2, "tp": 2}, [rule("layers.*.**", spread={0: ("pp",)}), REST])
    names = [
        {n.split(".")[1] for n in rank_tensors(layout, rank) if n.startswith("layers")}
        for rank in range(4)
    ]
    assert names == [{"0", "1"}, {"0", "1"}, {"2"}, {"2"}]
    layout = ModelLayout(
        {"pp": 2, "tp": 2}, [rule("layers.*.**", spread={0: Spread(("pp",), (0, 1))}), REST]
    )
    names = [
        {n.split(".")[1] for n in rank_tensors(layout, rank) if n.startswith("layers")}
        for rank in range(4)
    ]
    assert names == [{"0"}, {"0"}, {"1", "2"}, {"1", "2"}]


def test_names_are_mapped():
    layout = ModelLayout(
        {"a": 1},
        [rule("layers.*.**", local="model.blocks.{0}.inner.{1}"), rule("**", local="top.{0}")],
    )
    found = rank_tensors(layout, 0)
    assert found["model.blocks.2.inner.q"].tolist() == MODEL["layers.2.q"].tolist()
    assert found["top.norm"].tolist() == MODEL["norm"].tolist()


def test_fsdp_over_tensor_parallel_cuts_one_dim_twice():
    layout = ModelLayout({"dp": 3, "tp": 2}, [rule("embed", cut={0: ("tp", "dp")}), REST])
    rows = [layout.shards(SPECS)["embed"][rank].box for rank in range(6)]
    assert [(box.offset[0], box.shape[0]) for box in rows] == [
        (0, 2),
        (5, 2),
        (2, 2),
        (7, 2),
        (4, 1),
        (9, 1),
    ]


def test_the_own_part_of_one_rank_is_the_same_as_that_in_all():
    layout = ModelLayout(
        {"pp": 3, "ep": 2},
        [
            rule("layers.*.experts.*.**", spread={0: ("pp",), 1: ("ep",)}),
            rule("layers.*.**", spread={0: ("pp",)}, cut={0: ("ep",)}),
            REST,
        ],
    )
    every = layout.shards(SPECS)
    for rank in range(6):
        mine = {n: tuple(s for s in shards if s.rank == rank) for n, shards in every.items()}
        assert layout.shards(SPECS, rank=rank) == {
            n: shards for n, shards in mine.items() if shards
        }
    some = [n for n in SPECS if n.startswith("layers.2")]
    assert layout.shards(SPECS, names=set(some)) == {n: every[n] for n in some}


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("sink", LAYOUTS)
def test_every_layout_fills_every_other_exactly_once(source, sink):
    plan = reshard(LAYOUTS[source].shards(SPECS), LAYOUTS[sink].shards(SPECS))
    wanted = Counter()
    for rank in range(LAYOUTS[sink].num_ranks):
        for local in LAYOUTS[sink].locals(SPECS, rank).values():
            for held in local.held:
                wanted[held.name, rank] += held.box.num_elements
    found = Counter()
    for copy in plan.copies():
        assert copy.source.box.contains(copy.box)
        assert copy.sink.box.contains(copy.box)
        found[copy.name, copy.sink.rank] += copy.box.num_elements
    assert found == wanted


@settings(max_examples=budget(40, 1000))
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.data())
def test_random_layouts_leave_no_hole_in_any_rank(tp, ep, pp, data):
    cut = data.draw(
        st.sampled_from(
            [{}, {0: ("tp",)}, {1: ("tp",)}, {0: ("tp", "ep")}, {0: ("ep",), 1: ("tp",)}]
        )
    )
    layout = ModelLayout(
        {"pp": pp, "ep": ep, "tp": tp},
        [
            rule("layers.*.experts.*.**", spread={0: ("pp",), 1: ("ep",)}),
            rule(
                "layers.*.gate",
                "layers.*.up",
                cut=cut,
                local="layers.{0}.gate_up",
                spread={0: ("pp",)},
            ),
            rule("layers.*.**", spread={0: ("pp",)}),
            REST,
        ],
    )
    for rank in range(layout.num_ranks):
        rank_tensors(layout, rank)  # asserts that every element is filled
    plan = reshard(LAYOUTS["fsdp"].shards(SPECS), layout.shards(SPECS))
    assert plan.num_copies == len(list(plan.copies()))


# What is not right is refused, with both values.


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ([rule("norm")], "no rule fits 73 tensors"),
        ([rule("layers.*.q", "layers.*.norm", local="x.{0}"), REST], "joined of 2 tensors of one dtype; there are 'layers.0.q'"),
        ([rule("layers.*.**", local="same"), REST], "all become 'same'"),
        ([rule("embed", cut={2: ("tp",)}), REST], r"cuts dims \[2\] of a tensor of \(10, 6\)"),
        ([rule("layers.*.q", "layers.*.o", local="x.{0}", cut={0: ("tp",)}), REST], "is joined of"),
        ([rule("layers.*.q", "layers.*.k", "layers.*.v", cut={0: ("tp",)}, local="x.{0}", groups=3), REST], "the groups must come out even"),
        ([rule("*", spread={0: ("tp",)}), REST], "has 'embed' where a number is dealt out"),
        ([rule("layers.*.**", spread={0: Spread(("tp",), (1, 2))}), REST], r"comes before the first start, \[1\]"),
        ([rule("embed", "norm", local="x", join=1), REST], "one has no dim 1 to join"),
        ([rule("embed", join=5, groups=2), REST], "one has no dim 5 to join"),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit_the_model_are_refused(rules, match):
    with pytest.raises((PlanError, SpecError), match=match):
        layout = ModelLayout({"tp": 2}, rules)
        for rank in range(2):
            layout.locals(SPECS, rank)


def parsed(**changes):
    record = {"mesh": {"tp": 2}, "rules": [{"names": "**"}], **changes}
    return ModelLayout.from_json(json.dumps(record))


def test_a_layout_is_read_from_json():
    layout = parsed(
        rules=[
            {"names": ["layers.*.q", "layers.*.k", "layers.*.v"], "cuts": [{"0": "tp"}, {"0": ["tp"]}, {"0": "tp"}], "local": "layers.{0}.qkv", "groups": 4},
            {"names": "layers.*.experts.*.w1", "spread": {"1": "tp"}, "stack": 1, "local": "layers.{0}.w1"},
            {"names": "layers.*.o", "cut": {"1": "tp"}, "spread": {"0": {"axes": "tp", "starts": [0, 2]}}},
            {"names": ["**"]},
        ]
    )  # fmt: skip
    expected = ModelLayout(
        {"tp": 2},
        [
            rule(
                "layers.*.q",
                "layers.*.k",
                "layers.*.v",
                cut={0: ("tp",)},
                local="layers.{0}.qkv",
                groups=4,
            ),
            rule("layers.*.experts.*.w1", spread={1: ("tp",)}, stack=1, local="layers.{0}.w1"),
            rule("layers.*.o", cut={1: ("tp",)}, spread={0: Spread(("tp",), (0, 2))}),
            REST,
        ],
    )
    for rank in range(2):
        same(rank_tensors(layout, rank), rank_tensors(expected, rank))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"mesh": []}, "layout: Expected `object`, got `array` - at `\\$.mesh`"),
        ({"mesh": {"tp": "2"}}, "Expected `int`, got `str` - at `\\$.mesh"),
        ({"mesh": {"tp": 0}}, "need a size of at least 1"),
        ({"mesh": {"tp": MAX_RANKS + 1}}, "a mesh of 1048577 ranks"),
        ({"rules": {}}, "Expected `array`, got `object` - at `\\$.rules`"),
        ({"rules": [{}]}, "missing required field `names` - at `\\$.rules\\[0\\]`"),
        ({"rules": [{"names": "**", "what": 1}]}, "unknown field `what` - at `\\$.rules\\[0\\]`"),
        ({"rules": [{"names": 3}]}, "Expected `str \\| array`, got `int` - at `\\$.rules\\[0\\].names`, found 3"),
        ({"rules": [{"names": "**", "cut": {"0": "dp"}}]}, "axes \\['dp'\\] cut a dim, the mesh has \\['tp'\\]"),
        ({"rules": [{"names": "**", "cut": {"x": "tp"}}]}, "Expected `int`, got `str` - at `key` in `\\$.rules\\[0\\].cut`"),
        ({"rules": [{"names": "**", "cut": {"0": "tp", "1": "tp"}}]}, "an axis cuts at most one"),
        ({"rules": [{"names": "**", "cut": {"0": "tp/3"}}]}, "has 2 ranks, the pieces must divide them"),
        ({"rules": [{"names": "**", "cut": {}, "cuts": [{}]}]}, "both 'cut'"),
        ({"rules": [{"names": "**", "cut": None}]}, "Expected `object`, got `null`"),
        ({"rules": [{"names": "**", "cut": {"-1": "tp"}}]}, "Expected `int` >= 0"),
        ({"rules": [{"names": "**", "join": 2**31}]}, "Expected `int` <= 2147483647"),
        ({"rules": [{"names": "**", "join": True}]}, "got `bool`"),
        ({"rules": [{"names": "**", "join": 1.0}]}, "got `float`"),
        ({"rules": [{"names": "a.*", "spread": {"0": {"axes": "tp"}}}]}, "missing required field `starts`"),
        ({"rules": [{"names": ["a", "b"]}]}, "does not name the result"),
        ({"rules": [{"names": []}]}, "has 0 names and 0 cuts"),
        ({"rules": [{"names": ["a", "b"], "local": "x", "cuts": [{}]}]}, "has 2 names and 1 cuts"),
        ({"rules": [{"names": ["a.*", "b"], "local": "x"}]}, "same number of stars"),
        ({"rules": [{"names": "a.*", "stack": 1}]}, "has 1 stars and refers to stars \\[1\\]"),
        ({"rules": [{"names": "a.*", "local": "{1}"}]}, "does not fit"),
        ({"rules": [{"names": "a.*", "local": "{0.foo}"}]}, "does not fit"),
        ({"rules": [{"names": "a.*", "local": "{0:>2000000000}"}]}, "does not fit"),
        ({"rules": [{"names": "a.*", "local": "x{"}]}, "does not fit"),
        ({"rules": [{"names": "a.*", "spread": {"0": {"axes": "tp", "starts": [0]}}}]}, "starts 1 pieces"),
        ({"rules": [{"names": "a", "groups": 0}]}, "Expected `int` >= 1"),
        ({"rules": [{"names": ["a", "b"], "local": "x", "groups": 4, "cuts": [{"0": "tp"}, {}]}]}, "names that alternate are cut alike"),
    ],
)  # fmt: skip
def test_json_that_is_no_layout_is_refused(changes, match):
    with pytest.raises(SpecError, match=match):
        parsed(**changes)


def test_text_that_is_no_json_is_refused():
    for text in (b"", b"{", b"[]", b'{"mesh": NaN}', b"\xff", b'{"mesh": {}, "mesh": {}}'):
        with pytest.raises(SpecError):
            ModelLayout.from_json(text)


def test_a_scalar_is_held_whole_by_whoever_has_it():
    layout = parsed(rules=[{"names": "**", "cut": {"0": "tp"}}])
    shards = layout.shards({"step": TensorSpec(DTYPES["i64"], ())})["step"]
    assert [shard.box.shape for shard in shards] == [(), ()]
