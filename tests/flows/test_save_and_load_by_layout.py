"""Models whose tensors are fused, stacked, cut and renamed: from files into them and from them to files."""

import numpy as np
import pytest
import torch

import flyweight as fw
from flyweight.errors import DTypeMismatch, PlanError, ShapeMismatch, SpecError
from model_layouts import LAYOUTS, MODEL, SPECS, rank_tensors
from rank_processes import run_ranks


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("layouts") / "run"
    fw.save(MODEL, place, version=1)
    return place


def zeros_of_paddle(array):
    import paddle  # here, so that ranks of torch need not wait for it

    return paddle.zeros(list(array.shape))


MAKERS = {
    "numpy": lambda array: np.zeros_like(array),
    "torch": lambda array: torch.zeros(array.shape),
    "paddle": zeros_of_paddle,
    "torch, turned": lambda array: torch.zeros(array.shape[::-1]).permute(
        *reversed(range(array.ndim))
    ),
}


@pytest.mark.parametrize("framework", MAKERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_of_a_layout_is_filled_byte_for_byte(run, name, framework):
    """C20, C36."""
    for rank in range(LAYOUTS[name].num_ranks):
        expected = rank_tensors(LAYOUTS[name], rank)
        target = {key: MAKERS[framework](array) for key, array in expected.items()}
        report = fw.load(run, into=target, layout=LAYOUTS[name], rank=rank)
        for key, array in expected.items():
            assert np.asarray(target[key]).tobytes() == array.tobytes(), (key, rank)
        assert report.nbytes == sum(array.nbytes for array in expected.values())


def test_only_the_byte_ranges_that_a_rank_needs_are_read(tmp_path):
    fw.save({"w": np.zeros((64, 1 << 18), np.uint8)}, tmp_path)
    layout = fw.ModelLayout.from_json(
        '{"mesh": {"tp": 4}, "rules": [{"names": "**", "cut": {"0": "tp"}}]}'
    )
    report = fw.load(tmp_path, into={"w": np.ones((16, 1 << 18), np.uint8)}, layout=layout, rank=2)
    assert report.read_bytes == 16 << 18


def test_a_fused_tensor_at_rest_is_split_for_a_model_that_has_its_parts(tmp_path):
    """The other way round: the file has qkv, the model q, k and v, each a box of it."""
    qkv = np.arange(48.0).reshape(12, 4)
    fw.save({"qkv": qkv, "experts": np.arange(24.0).reshape(3, 2, 4)}, tmp_path)
    parts = {"q": (0, 6), "k": (6, 9), "v": (9, 12)}
    for low, high in parts.values():
        target = {"qkv": fw.Sharded(np.zeros((high - low, 4)), shape=(12, 4), offset=(low, 0))}
        fw.load(tmp_path, into=target, extra="report")
        assert target["qkv"].tensor.tolist() == qkv[low:high].tolist()


@pytest.mark.parametrize("name", ["tp", "megatron", "experts", "fsdp"])
def test_ranks_save_what_their_layout_says_and_anyone_loads_it(run, tmp_path, name):
    """C35, C20: fused and stacked tensors are saved under the names of the model they came from."""
    run_ranks(LAYOUTS[name].num_ranks, __file__, "save_ranks", name, run, tmp_path / "run")
    target = {key: np.zeros_like(array) for key, array in MODEL.items()}
    fw.load(tmp_path / "run", into=target)
    for key, array in MODEL.items():
        assert target[key].tobytes() == array.tobytes(), key
    assert fw.diff(run, tmp_path / "run").is_same
    other = LAYOUTS["megatron" if name != "megatron" else "experts"]
    for rank in range(other.num_ranks):
        expected = rank_tensors(other, rank)
        local = {key: np.zeros_like(array) for key, array in expected.items()}
        fw.load(tmp_path / "run", into=local, layout=other, rank=rank)
        assert all(local[key].tobytes() == array.tobytes() for key, array in expected.items())


def save_ranks(rank, num_ranks, name, like, place):
    layout, group = LAYOUTS[name], torch.distributed.group.WORLD
    local = rank_tensors(layout, rank)
    fw.save(local, place, process_group=group, layout=layout, like=like)
    blank = {key: np.zeros_like(array) for key, array in local.items()}
    fw.load(place, into=blank, process_group=group, layout=layout)
    assert all(blank[key].tobytes() == array.tobytes() for key, array in local.items())


def test_tied_tensors_stay_tied_by_layout_too(tmp_path):
    fw.save({"embed": np.arange(8.0), "head": np.arange(8.0)}, tmp_path / "run")
    shared = np.zeros(4)
    layout = fw.ModelLayout.from_json(
        '{"mesh": {"tp": 2}, "rules": [{"names": "**", "cut": {"0": "tp"}}]}'
    )
    fw.load(tmp_path / "run", into={"embed": shared, "head": shared}, layout=layout, rank=1)
    assert shared.tolist() == [4, 5, 6, 7]
    fw.save({"embed": np.arange(8.0), "head": np.ones(8)}, tmp_path / "other")
    with pytest.raises(
        PlanError, match="'embed' and 'head' are one tensor in the target and differ"
    ):
        fw.load(tmp_path / "other", into={"embed": shared, "head": shared}, layout=layout, rank=1)


def target(rank=0):
    return {key: np.full_like(array, 9) for key, array in rank_tensors(LAYOUTS["tp"], rank).items()}


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        (lambda t: t.pop("norm"), PlanError, "the model lacks 1 tensors of its layout: 'norm'"),
        (lambda t: t.update(more=np.zeros(2)), PlanError, "the layout does not speak of 1 tensors: 'more'"),
        (lambda t: t.update(norm=np.zeros(6)), DTypeMismatch, "'norm' is f64, by the layout f32"),
        (lambda t: t.update({"layers.0.qkv": np.zeros((9, 6), "f4")}), ShapeMismatch, r"'layers.0.qkv' is \(9, 6\), by the layout \(8, 6\)"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_what_its_layout_says_is_refused_untouched(run, change, kind, match):
    into = target()
    change(into)
    before = {name: array.copy() for name, array in into.items()}
    with pytest.raises(kind, match=match):
        fw.load(run, into=into, layout=LAYOUTS["tp"], rank=0)
    assert all(into[name].tobytes() == array.tobytes() for name, array in before.items())


def test_what_is_asked_for_must_make_sense(run, tmp_path):
    with pytest.raises(SpecError, match="rank is None; the layout is for ranks 0 to 3"):
        fw.load(run, into=target(), layout=LAYOUTS["tp"])
    with pytest.raises(SpecError, match="rank is 4; the layout is for ranks 0 to 3"):
        fw.load(run, into=target(), layout=LAYOUTS["tp"], rank=4)
    with pytest.raises(SpecError, match="needs `like`"):
        fw.save(target(), tmp_path / "run", layout=LAYOUTS["tp"])
    with pytest.raises(SpecError, match="like is given without a layout"):
        fw.save(target(), tmp_path / "run", like=run)
    with pytest.raises(SpecError, match="the layout is for 4 ranks, the group has 1"):
        fw.save(target(), tmp_path / "run", layout=LAYOUTS["tp"], like=run)
    with pytest.raises(SpecError, match="does not lie in a tensor"):
        fw.save({"w": fw.Sharded(np.zeros(4), shape=(6,), offset=(3,))}, tmp_path / "run")
    with pytest.raises(SpecError, match=r"a layout is given, and 1 tensors carry their own"):
        fw.load(
            run,
            into={"w": fw.Sharded(np.zeros(4), shape=(8,), offset=(0,))},
            layout=LAYOUTS["tp"],
            rank=0,
        )
    with pytest.raises(SpecError, match="process_group is a int"):
        fw.save(target(), tmp_path / "run", process_group=3)
    assert len(SPECS) == len(MODEL)
