"""Where weights come from, and which are refused (C1, C10, C11, C13, C17, C19, C20, C24)."""

import os
import threading
from pathlib import Path

import paddle
import pytest
from fastdeploy_nets import (
    CLEARED,
    NORMAL,
    UPDATING,
    Net,
    config,
    content,
    holds,
    save_state,
    shape_of,
)

import flyweight as fw
from child_processes import Child
from conftest import flip
from flyweight.engines.fastdeploy import DynamicWeightManager
from flyweight.engines.fastdeploy_config import FastDeployOptions
from flyweight.engines.legacy_cells import MODEL_WEIGHTS, LegacyCell
from flyweight.errors import (
    ChecksumMismatch,
    DTypeMismatch,
    LifecycleError,
    PeerLost,
    PlanError,
    ShapeMismatch,
    SnapshotNotFound,
    SpecError,
)
from flyweight.events import listening

pytest_plugins = ["fastdeploy_fixtures"]


def test_a_model_is_filled_at_construction_and_the_first_load_says_nothing(
    tmp_path, open_manager
):  # C11
    fw.save(Net(1), tmp_path, version=1)
    target = Net()
    before = shape_of(target)
    there = Path(f"/dev/shm/{MODEL_WEIGHTS}.0").exists()
    with LegacyCell.create(MODEL_WEIGHTS, 0) as cell:
        try:
            cell.value[0] = CLEARED
            manager = open_manager(config(tmp_path), target)
            assert cell.status is CLEARED
        finally:
            if not there:
                cell.path.unlink()
    assert holds(target, 1)
    assert shape_of(target) == before
    assert manager.state_dict.keys() == target.state_dict().keys()
    assert all(manager.state_dict[name] is p for name, p in target.state_dict().items())
    assert (manager.model_list, manager.rank, manager.nranks, manager.local_rank) == (
        [target], 0, 1, 0,
    )  # fmt: skip
    assert (manager.first_load, manager.version, manager.health) == (False, 1, "serving")


def test_old_files_are_found_at_all_four_places_after_ours(
    tmp_path, open_manager, monkeypatch
):  # C1, C10
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8932ab")
    monkeypatch.setenv("FLAGS_selected_gpus", "1")
    model, shared = tmp_path / "model", tmp_path / "shared"
    told = config(model, shared_directory=shared)
    names = {"rank": 0, "legacy_id": "GPU-8932ab"}
    target = Net()
    with pytest.raises(SnapshotNotFound, match="GPU-8932ab") as caught:
        DynamicWeightManager(told, target, 0)
    assert isinstance(caught.value, FileNotFoundError)
    fw.save_legacy(Net(4), shared, **names)
    manager = open_manager(told, target)
    assert manager.meta_src_id == "GPU-8932ab"
    assert holds(target, 4)
    model.mkdir()
    os.link(
        shared / "model_state.tp0.GPU-8932ab.pdparams", model / "model_state.tp0GPU-8932ab.pdparams"
    )
    fw.save_legacy(Net(3), shared, **names)
    manager.update_parameters()
    assert holds(target, 4)
    fw.save_legacy(Net(2), model, **names)
    manager.update_parameters()
    assert holds(target, 2)
    fw.save_legacy(Net(1), model, **names, part_bytes=150)
    manager.update_parameters()
    assert holds(target, 1)
    fw.save(Net(9), model, version=9)
    manager.update_parameters()
    assert (holds(target, 9), manager.version) == (True, 9)


def test_an_empty_state_is_a_value_error(tmp_path):  # C13
    save_state({}, tmp_path)
    with pytest.raises(ValueError, match="tensors"):
        DynamicWeightManager(config(tmp_path), Net(), 0)


def test_names_that_the_model_lacks_are_counted_and_reported(tmp_path, open_manager):  # C13
    save_state({**Net(1).state_dict(), "lm.extra": paddle.zeros([2])}, tmp_path)
    target, events = Net(), []
    with listening(events.append):
        manager = open_manager(config(tmp_path), target)
    assert holds(target, 1)
    assert manager.unmatched == ["lm.extra"]
    (event,) = (each for each in events if each.kind == "weights.unmatched")
    assert event.fields == {"count": 1, "names": "'lm.extra'"}
    with pytest.raises(PlanError, match="lm.extra"):
        DynamicWeightManager(config(tmp_path, strict=True), Net(), 0)


def with_more(version):
    """What a trainer has: all that the models want, and two tensors of its own."""
    more = {"value_head.w": paddle.full([3], version), "ema": paddle.zeros([2, 2])}
    return {**more, **Net(version).state_dict()}


@pytest.mark.parametrize("strategy", ["ipc", "ipc_async", "rsync"])
def test_names_of_a_publisher_that_the_model_lacks_are_counted_and_reported(
    address, tmp_path, open_manager, strategy
):  # C13
    (tmp_path / "version.yaml").write_text("step: 1")
    target, events = Net(), []
    told = config(tmp_path, strategy, address=address)
    with fw.Publisher(with_more(1), address, keep="memory") as publisher, listening(events.append):
        publisher.publish(1)
        manager = open_manager(told, target)
        assert holds(target, 1)
        assert manager.unmatched == ["ema", "value_head.w"]
        manager.update_weights_by_rdma(1)  # it is held: nothing is taken, and nothing told again
        found = [each.fields for each in events if each.kind == "weights.unmatched"]
        assert found == [{"count": 2, "names": "'ema', 'value_head.w'"}]
        with pytest.raises(PlanError, match="ema.*value_head"):
            DynamicWeightManager(config(tmp_path, strategy, address=address, strict=True), Net(), 0)


def test_what_the_model_lacks_is_told_of_the_source_that_was_taken_from_last(
    address, tmp_path, open_manager
):  # C13
    for version, state in (
        (1, Net(1)),
        (2, {**Net(2).state_dict(), "lm.extra": paddle.zeros([2])}),
    ):
        fw.save(state, tmp_path, version=version)
    (tmp_path / "version.yaml").write_text("step: 2")
    manager = open_manager(config(tmp_path, "rsync", address=address), Net())
    assert manager.unmatched == ["lm.extra"]
    with fw.Publisher(with_more(3), address, keep="memory") as publisher:
        publisher.publish(3)
        manager.update_weights_by_rdma(3)
        assert manager.unmatched == ["ema", "value_head.w"]
    manager.update_weights_by_rdma(1)
    assert manager.unmatched == []


def test_a_second_name_of_a_tensor_that_is_wanted_is_not_left_out(address):  # C13
    shared = paddle.ones([3])
    trainer = {"embed": shared, "head": shared, "ema": paddle.zeros([2])}
    with (
        fw.Publisher(trainer, address, keep="memory") as publisher,
        fw.Replica({"head": paddle.zeros([3])}, address, strict=False) as replica,
    ):
        assert replica.unused == ()  # nothing was taken yet
        publisher.publish(1)
        replica.update()
        assert replica.unused == ("ema",)


def train(address, without, pipe):
    """A trainer of its own: has two tensors more than the models, and may lack some of theirs."""
    paddle.set_device("cpu")
    state = {name: each for name, each in with_more(1).items() if name not in without}
    with fw.Publisher(state, address, keep="memory") as publisher:
        publisher.publish(1)
        pipe.send("published")
        pipe.recv()


@pytest.mark.check
def test_a_trainer_that_comes_back_may_have_more_than_the_models_but_not_less(
    address, tmp_path, open_manager, cell, pid
):  # C13, C24
    target = Net()
    with Child(train, address, ()) as trainer:
        assert trainer.told() == "published"
        manager = open_manager(config(tmp_path, "ipc", address=address), target)
        trainer.kill()
        trainer.join()
    assert (holds(target, 1), manager.unmatched) == (True, ["ema", "value_head.w"])
    with Child(train, address, ("head", "up.bias")) as trainer:
        assert trainer.told() == "published"
        cell.ask(UPDATING)
        with pytest.raises(PlanError, match="head.*up.bias"):
            manager.update_parameters(pid)
    assert (cell.status, manager.version, manager.health) == (CLEARED, 1, "paused")
    assert holds(target, 1)
    assert manager.unmatched == ["ema", "value_head.w"]  # of what is served


@pytest.mark.parametrize(
    ("wrong", "kind", "builtin", "words"),
    [
        ({"dtype": "float16"}, DTypeMismatch, TypeError, r"'head' is f16 .* and f32"),
        ({"size": 9}, ShapeMismatch, ValueError, r"'head' is \(4, 9\) .* and \(4, 8\)"),
    ],
)
def test_a_publishers_other_dtype_and_shape_are_refused_by_the_same_types(
    address, tmp_path, open_manager, wrong, kind, builtin, words
):  # C13
    target = Net()
    with fw.Publisher(Net(1), address, keep="memory") as publisher:
        publisher.publish(1)
        manager = open_manager(config(tmp_path, "ipc", address=address), target)
    with fw.Publisher(Net(2, **wrong), address, keep="memory") as publisher:
        publisher.publish(2)
        with pytest.raises(kind, match=words) as caught:
            manager.update_parameters()
    assert isinstance(caught.value, builtin)
    assert (manager.version, manager.health, holds(target, 1)) == (1, "serving", True)


def test_another_dtype_and_another_shape_name_the_parameter_and_both(tmp_path, open_manager):  # C13
    fw.save(Net(1), tmp_path, version=1)
    target = Net()
    manager = open_manager(config(tmp_path), target)
    for version, wrong, kind, builtin, words in (
        (2, Net(2, dtype="float16"), DTypeMismatch, TypeError, r"'head' is f16 .* and f32"),
        (3, Net(2, size=9), ShapeMismatch, ValueError, r"'head' is \(4, 9\) .* and \(4, 8\)"),
    ):
        fw.save(wrong, tmp_path, version=version)
        with pytest.raises(kind, match=words) as caught:
            manager.update_parameters()
        assert isinstance(caught.value, builtin)
        assert (manager.version, manager.health) == (1, "serving")  # it was not touched
        assert holds(target, 1)


def test_a_parameter_that_no_source_covers_is_refused_unless_its_version_is_vouched_for(
    tmp_path, open_manager
):  # C13
    part = {"up.weight": Net(2).up.weight}
    save_state(part, tmp_path)
    with pytest.raises(PlanError, match="target"):
        DynamicWeightManager(config(tmp_path), Net(1), 0)
    target = Net(1)
    manager = open_manager(config(tmp_path, partial_over=1), target)
    assert (target.up.weight == part["up.weight"]).all()
    assert (target.head == Net(1).head).all()
    manager.clear_parameters()
    with pytest.raises(PlanError, match="target"):  # the rest is gone by now
        manager.update_parameters()
    assert manager.version is None


def test_damaged_weights_are_never_served(tmp_path, open_manager, cell, pid):  # C17, C24
    fw.save(Net(1), tmp_path, version=1)
    fw.save(Net(2), tmp_path, version=2)
    target = Net()
    manager = open_manager(config(tmp_path), target)
    fw.save(Net(3), tmp_path, version=3)
    (data,) = (tmp_path / "v0000000003").glob("*.safetensors")
    flip(data, data.stat().st_size - 9)
    cell.ask(UPDATING)
    with pytest.raises(ChecksumMismatch):
        manager.update_parameters(pid)
    assert (cell.status, manager.version, manager.health) == (CLEARED, None, "failed")
    assert isinstance(manager.failure, ChecksumMismatch)
    with pytest.raises(LifecycleError, match="RESUME"):
        manager.finalize_update(pid)
    assert cell.status is CLEARED
    cell.ask(UPDATING)
    assert manager.update_weights_by_rdma(2)["version"] == "2"
    manager.finalize_update(pid)
    assert (cell.status, manager.failure) == (NORMAL, None)
    assert holds(target, 2)


def test_no_publisher_is_an_error_and_leaves_nothing_open(address, tmp_path):  # C24
    before = {each.name for each in threading.enumerate()}
    told = config(tmp_path, "ipc", address=address, timeout_seconds=0.2)
    with pytest.raises(PeerLost, match="publisher"):
        DynamicWeightManager(told, Net(), 0)
    assert {each.name for each in threading.enumerate()} <= before


class Draft(paddle.nn.Layer):
    def __init__(self, version=0):
        super().__init__()
        paddle.seed(100 + version)
        self.mtp = paddle.nn.Linear(3, 3)


def test_models_of_a_list_share_names_and_are_one_version(address, tmp_path, open_manager):  # C19
    trainer = {**Net(1).state_dict(), **Draft(1).state_dict()}
    main, draft = Net(), Draft()
    with fw.Publisher(trainer, address, keep="memory") as publisher:
        publisher.publish(1)
        manager = open_manager(config(tmp_path, "ipc_async", address=address), [main, draft])
    assert manager.model_list == [main, draft]
    assert content(main, draft) == content(Net(1), Draft(1))
    with pytest.raises(SpecError, match="several models"):
        DynamicWeightManager(config(tmp_path), [Net(), Net()], 0)


def test_models_of_a_dict_are_named_by_its_keys(tmp_path, open_manager):  # C19
    fw.save({"main": Net(1), "draft": Net(2)}, tmp_path, version=1)
    models = {"main": Net(), "draft": Net()}
    manager = open_manager(config(tmp_path), models)
    assert holds(models["main"], 1)
    assert holds(models["draft"], 2)
    fw.save({"main": Net(3)}, tmp_path, version=2)
    with pytest.raises(PlanError, match="target"):  # both, or none
        manager.update_parameters()
    assert (manager.version, manager.health) == (1, "serving")
    assert holds(models["main"], 1)


def test_a_layout_maps_names_and_joins_tensors(tmp_path, open_manager):  # C20
    parts = {f"layer.0.{name}": paddle.full([2, 4], n) for n, name in enumerate("qkv")}
    fw.save({**parts, "model.norm": paddle.ones([4])}, tmp_path, version=1)
    layout = fw.ModelLayout.from_json(
        '{"mesh": {"tp": 1}, "rules": ['
        '{"names": ["layer.*.q", "layer.*.k", "layer.*.v"], "local": "l{0}.qkv"},'
        '{"names": ["model.*"], "local": "{0}"}]}'
    )
    layer = paddle.nn.Layer()
    layer.l0 = paddle.nn.Layer()
    layer.l0.qkv = layer.create_parameter([6, 4])
    layer.norm = layer.create_parameter([4])
    open_manager(config(tmp_path), layer, options=FastDeployOptions(layout=layout))
    assert layer.l0.qkv[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert layer.norm.tolist() == [1, 1, 1, 1]
