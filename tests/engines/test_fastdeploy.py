"""The old manager of FastDeploy (C11 to C20, C22, C24, C26) on Paddle layers of this process."""

import os
import secrets
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType, SimpleNamespace

import paddle
import pytest

import flyweight as fw
from conftest import flip
from flyweight.adapters.adapt import adapt
from flyweight.engines.fastdeploy import DynamicWeightManager, ModelWeightsStatus
from flyweight.engines.fastdeploy_config import FastDeployOptions
from flyweight.engines.fastdeploy_engine import FastDeployHooks
from flyweight.engines.fastdeploy_models import Models
from flyweight.engines.legacy_cells import KV_CACHE, MODEL_WEIGHTS, LegacyCell
from flyweight.errors import (
    ChecksumMismatch,
    DTypeMismatch,
    LifecycleError,
    MissingDependency,
    PlanError,
    ShapeMismatch,
    SnapshotNotFound,
    SpecError,
    StoreError,
    TransferTimeout,
    VersionError,
)
from flyweight.events import listening
from flyweight.lifecycle.cell import Cell
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.states import Signal, State, Tag
from live_models import SPAWN, Child, until

NORMAL, UPDATING, CLEARING, CLEARED = ModelWeightsStatus


class Net(paddle.nn.Layer):
    """Every byte depends on the version; `cache` is the engine's own, and is never saved."""

    def __init__(self, version=0, size=8, dtype="float32"):
        super().__init__()
        paddle.seed(version)
        self.embed = paddle.nn.Embedding(size, 4)
        self.up = paddle.nn.Linear(4, size)
        self.head = self.create_parameter([4, size], dtype=dtype)
        self.head.set_value(paddle.randn([4, size]).astype(dtype))
        self.register_buffer("steps", paddle.arange(6) + version)
        self.register_buffer("cache", paddle.full([5000], 3.0), persistable=False)


def content(*layers):
    models = [adapt(layer) for layer in layers]
    return [{name: model.read(name).tobytes() for name in model.manifest.names} for model in models]


def holds(layer, version):
    return content(layer) == content(Net(version)) and bool((layer.cache == 3).all())


def shape_of(layer):
    """What must stay as it is when memory goes and comes."""
    return {
        name: (id(p), p.data_ptr(), tuple(p.shape), p.dtype, tuple(p.strides))
        for name, p in layer.state_dict().items()
    }


def config(directory, strategy="ipc_snapshot", **flyweight):
    flyweight.setdefault("timeout_seconds", 20)
    return SimpleNamespace(
        load_config=SimpleNamespace(load_strategy=strategy, rsync_config=None),
        model_config=SimpleNamespace(model=str(directory)),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, tensor_parallel_rank=0),
        flyweight=flyweight,
    )


@pytest.fixture
def open_manager():
    """Makes managers that are closed with the test."""
    made = []

    def make(*args, **options):
        made.append(DynamicWeightManager(*args, 0, **options))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


@pytest.fixture
def pid():
    """An engine of this test's own; its cells are removed afterwards."""
    number = secrets.randbits(40)
    yield number
    for path in Path("/dev/shm").glob(f"*.{number}"):
        path.unlink()


@pytest.fixture
def cell(pid):
    with LegacyCell.create(MODEL_WEIGHTS, pid) as cell:
        yield cell


class Hooks(FastDeployHooks):
    """Writes down what it is asked for."""

    def __init__(self):
        self.did = []
        self.faults = {}

    def _note(self, name):
        self.did.append(name)
        if name in self.faults:
            raise self.faults.pop(name)

    def clear_expert_buffer(self):
        self._note("clear_expert_buffer")

    def recreate_expert_buffer(self):
        self._note("recreate_expert_buffer")

    def shut_groups_down(self):
        self._note("shut_groups_down")

    def restart_groups(self):
        self._note("restart_groups")

    def drop_cache(self):
        self._note("drop_cache")


# C11, C12: the constructor.


def test_an_unknown_strategy_is_refused_before_anything_else():  # C12
    only = SimpleNamespace(load_config=SimpleNamespace(load_strategy="carrier_pigeon"))
    wanted = "'carrier_pigeon', not one of ipc_snapshot, ipc, ipc_async, rsync"
    with pytest.raises(ValueError, match=wanted):
        DynamicWeightManager(only, None, 0)


def test_every_entry_point_looks_the_strategy_up_in_one_table(tmp_path, open_manager):  # C11
    fw.save(Net(1), tmp_path, version=1)
    told = config(tmp_path)
    manager = open_manager(told, Net())
    told.load_config.load_strategy = "carrier_pigeon"
    for call in (
        manager.update_parameters,
        manager.reload_model_weights,
        lambda: manager.update_weights_by_rdma(1),
    ):
        with pytest.raises(ValueError, match="not one of ipc_snapshot, ipc, ipc_async, rsync"):
            call()
    told.load_config.load_strategy = "rsync"
    with pytest.raises(SpecError, match="was 'ipc_snapshot' and is 'rsync'; make another manager"):
        manager.update_parameters()


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("load_config", "'load_config.load_strategy'"),
        ("parallel_config", "'parallel_config'"),
        ("model_config", "'model_config.model'"),
    ],
)
def test_what_the_config_lacks_is_named(tmp_path, missing, named):
    told = config(tmp_path)
    delattr(told, missing)
    with pytest.raises(SpecError, match=f"the config has no {named}"):
        DynamicWeightManager(told, Net(), 0)


def test_options_that_mean_nothing_are_refused(tmp_path):
    with pytest.raises(
        SpecError, match="config.flyweight has 'adress'; it may have address, token"
    ):
        DynamicWeightManager(config(tmp_path, adress="unix:x"), Net(), 0)
    told = config(tmp_path)
    told.flyweight = SimpleNamespace(adress="unix:x", timeout_seconds=3)
    with pytest.raises(SpecError, match="config.flyweight has 'adress'"):
        DynamicWeightManager(told, Net(), 0)
    told.flyweight = SimpleNamespace(timeout_seconds=3)
    assert FastDeployOptions.of(told).timeout_seconds == 3
    told = config(tmp_path, "rsync")
    told.load_config.rsync_config = "etcd_server=10.0.0.1"
    with pytest.raises(SpecError, match="rsync_config is a str, not a dict"):  # C18
        DynamicWeightManager(told, Net(), 0)
    with pytest.raises(SpecError, match="no address of a publisher"):
        DynamicWeightManager(config(tmp_path, "ipc"), Net(), 0)
    with pytest.raises(SpecError, match="models has a dict, expected Paddle layers"):
        DynamicWeightManager(config(tmp_path), [{}], 0)


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


# C1, C10, C13: files.


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


def save_state(state, directory):
    directory.mkdir(exist_ok=True)
    paddle.save(state, str(directory / "model_state.tp0.0.pdparams"))


def test_an_empty_state_is_a_value_error(tmp_path):  # C13
    save_state({}, tmp_path)
    with pytest.raises(ValueError, match="holds no tensors"):
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
    with pytest.raises(PlanError, match="1 tensors that the target lacks: 'lm.extra'"):
        DynamicWeightManager(config(tmp_path, extra="refuse"), Net(), 0)


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
    with fw.Publisher(with_more(1), address, hold=True) as publisher, listening(events.append):
        publisher.publish(1)
        manager = open_manager(told, target)
        assert holds(target, 1)
        assert manager.unmatched == ["ema", "value_head.w"]
        manager.update_weights_by_rdma(1)  # it is held: nothing is taken, and nothing told again
        found = [each.fields for each in events if each.kind == "weights.unmatched"]
        assert found == [{"count": 2, "names": "'ema', 'value_head.w'"}]
        with pytest.raises(PlanError, match="2 tensors that the replica lacks: 'ema', 'value_head"):
            DynamicWeightManager(
                config(tmp_path, strategy, address=address, extra="refuse"), Net(), 0
            )


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
    with fw.Publisher(with_more(3), address, hold=True) as publisher:
        publisher.publish(3)
        manager.update_weights_by_rdma(3)
        assert manager.unmatched == ["ema", "value_head.w"]
    manager.update_weights_by_rdma(1)
    assert manager.unmatched == []


def test_a_second_name_of_a_tensor_that_is_wanted_is_not_left_out(address):  # C13
    shared = paddle.ones([3])
    trainer = {"embed": shared, "head": shared, "ema": paddle.zeros([2])}
    with (
        fw.Publisher(trainer, address, hold=True) as publisher,
        fw.Replica({"head": paddle.zeros([3])}, address, extra="report") as replica,
    ):
        assert replica.unused == ()  # nothing was taken yet
        publisher.publish(1)
        replica.update()
        assert replica.unused == ("ema",)


def train(address, without, pipe):
    """A trainer of its own: has two tensors more than the models, and may lack some of theirs."""
    paddle.set_device("cpu")
    state = {name: each for name, each in with_more(1).items() if name not in without}
    with fw.Publisher(state, address, hold=True) as publisher:
        publisher.publish(1)
        pipe.send("published")
        pipe.recv()


def test_a_trainer_that_comes_back_may_have_more_than_the_models_but_not_less(
    address, tmp_path, open_manager, cell, pid
):  # C13, C24
    target = Net()
    with Child(train, address, (), context=SPAWN) as trainer:
        assert trainer.told(60) == "published"
        manager = open_manager(config(tmp_path, "ipc", address=address), target)
        trainer.kill()
        trainer.join()
    assert (holds(target, 1), manager.unmatched) == (True, ["ema", "value_head.w"])
    with Child(train, address, ("head", "up.bias"), context=SPAWN) as trainer:
        assert trainer.told(60) == "published"
        cell.ask(UPDATING)
        with pytest.raises(
            PlanError, match="2 tensors that the publisher lacks: 'head', 'up.bias'"
        ):
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
    with fw.Publisher(Net(1), address, hold=True) as publisher:
        publisher.publish(1)
        manager = open_manager(config(tmp_path, "ipc", address=address), target)
    with fw.Publisher(Net(2, **wrong), address, hold=True) as publisher:
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
    with pytest.raises(PlanError, match="target wants 4 tensors"):
        DynamicWeightManager(config(tmp_path), Net(1), 0)
    target = Net(1)
    manager = open_manager(config(tmp_path, partial_over=1), target)
    assert (target.up.weight == part["up.weight"]).all()
    assert (target.head == Net(1).head).all()
    manager.clear_parameters()
    with pytest.raises(PlanError, match="target wants 4 tensors"):  # the rest is gone by now
        manager.update_parameters()
    assert manager.version is None


# C14, C15: memory.


def test_weights_are_copied_not_shared(address, tmp_path, open_manager):  # C14
    trainer, target = Net(1), Net()
    with fw.Publisher(trainer, address, hold=True) as publisher:
        publisher.publish(1)
        open_manager(config(tmp_path, "ipc", address=address), target)
        trainer.up.weight.set_value(paddle.zeros([4, 8]))  # the optimizer steps
    assert holds(target, 1)


FROM_BOTH = pytest.mark.parametrize("strategy", ["ipc_snapshot", "ipc"])


@pytest.fixture
def source(address, tmp_path):
    """Version 1, in files and at a publisher; with what a manager is told of them."""
    fw.save(Net(1), tmp_path, version=1)
    with fw.Publisher(Net(1), address, hold=True) as publisher:
        publisher.publish(1)
        yield lambda strategy, **more: config(tmp_path, strategy, address=address, **more)


@FROM_BOTH
def test_tensors_of_other_strides_are_filled_and_keep_them(
    address, tmp_path, open_manager, strategy
):  # C14
    rows = paddle.arange(12).reshape([3, 4])
    fw.save({"t": rows}, tmp_path, version=1)
    target = paddle.nn.Layer()
    target.register_buffer("t", paddle.zeros([4, 3], "int64").t())
    assert target.t.strides == [1, 3]
    with fw.Publisher({"t": rows}, address, hold=True) as publisher:
        publisher.publish(1)
        manager = open_manager(config(tmp_path, strategy, address=address), target)
        manager.clear_parameters()
        manager.update_parameters()
    assert (target.t.tolist(), target.t.strides) == (rows.tolist(), [1, 3])


def bare_net():
    """A model as FastDeploy makes it: most of its parameters have no memory yet."""
    with paddle.LazyGuard():
        layer = Net()
    assert not layer.up.weight._is_initialized()
    return layer


@FROM_BOTH
def test_parameters_that_have_no_memory_get_some_and_are_filled(
    source, open_manager, strategy
):  # C14
    target = bare_net()
    before = {name: id(p) for name, p in target.state_dict().items()}
    manager = open_manager(source(strategy), target)
    assert holds(target, 1)
    assert {name: id(p) for name, p in target.state_dict().items()} == before
    assert (
        target.up(target.embed(paddle.arange(8))) == Net(1).up(Net(1).embed(paddle.arange(8)))
    ).all()
    manager.clear_parameters()
    manager.update_parameters()
    manager.finalize_update()
    assert holds(target, 1)


def test_only_tensors_without_memory_are_given_some():  # C14
    layer = paddle.nn.Layer()
    with paddle.LazyGuard():
        layer.bare = layer.tied = paddle.create_parameter([2, 3], "float32")
        layer.none = paddle.create_parameter([0, 3], "float32")
    layer.register_buffer("filled", paddle.ones([4]))
    models, there = Models(layer, process=lambda model: None), layer.filled.data_ptr()
    assert (models.give_memory(), models.give_memory()) == (1, 0)
    assert (layer.filled.data_ptr(), layer.filled.tolist()) == (there, [1, 1, 1, 1])
    assert models.state["bare"] is models.state["tied"]
    layer.bare.set_value(paddle.full([2, 3], 2.0))
    assert layer.tied.tolist() == [[2] * 3] * 2


def test_a_parameter_without_memory_cannot_be_vouched_for(tmp_path):  # C13, C14
    save_state({"up.weight": Net(2).up.weight}, tmp_path)
    with pytest.raises(PlanError, match="target wants 4 tensors"):
        DynamicWeightManager(config(tmp_path, partial_over=1), bare_net(), 0)


@pytest.mark.parametrize("is_cleared_first", [True, False])
def test_a_parameter_that_was_cleared_is_not_vouched_for(
    tmp_path, open_manager, is_cleared_first
):  # C13, C15
    save_state({"up.weight": Net(2).up.weight}, tmp_path)
    target, where = Net(1), config(tmp_path, partial_over=1)
    if is_cleared_first:
        target.head._clear_data()
        with pytest.raises(PlanError, match="target wants 4 tensors"):
            open_manager(where, target)
        return
    manager = open_manager(where, target)
    target.head._clear_data()
    with pytest.raises(PlanError, match="target wants 4 tensors"):
        manager.update_parameters()
    assert (manager.version, manager.health) == (None, "failed")


def test_no_memory_to_be_had_is_named(tmp_path, monkeypatch):  # C14
    target = bare_net()

    def full(shape, dtype):
        raise MemoryError("out of memory")

    monkeypatch.setattr(paddle, "empty", full)
    with pytest.raises(LifecycleError, match="give_memory failed: MemoryError: out of memory"):
        DynamicWeightManager(config(tmp_path), target, 0)


@FROM_BOTH
def test_parameters_that_others_cleared_are_not_served_until_they_are_filled_again(
    source, open_manager, strategy
):  # C14, C15, C17
    target = Net()
    manager = open_manager(source(strategy), target)
    target.head._clear_data()
    target.up.weight._clear_data()
    with pytest.raises(LifecycleError, match="or lost their memory; update"):
        manager.finalize_update()
    assert (manager.version, manager.health) == (None, "failed")
    manager.clear_parameters()  # what is gone already does not stand in its way
    assert manager.health == "cleared"
    manager.update_parameters()
    manager.finalize_update()
    assert (manager.version, manager.health, holds(target, 1)) == (1, "serving", True)


@FROM_BOTH
@pytest.mark.parametrize("is_cleared_first", [True, False])
def test_a_dist_parameter_that_was_cleared_is_not_served(
    source, open_manager, strategy, is_cleared_first
):  # C14, C15
    target, where = Net(), source(strategy)
    mesh = paddle.distributed.ProcessMesh([0], dim_names=["x"])
    shard = [paddle.distributed.Shard(0)]
    target.up.weight = paddle.distributed.shard_tensor(target.up.weight, mesh, shard)
    refusal = r"dist tensor has no memory(.|\n)*tensor 'up.weight'"
    if is_cleared_first:
        target.up.weight._clear_data()
        with pytest.raises(SpecError, match=refusal):
            open_manager(where, target)
        return
    manager = open_manager(where, target)
    assert holds(target, 1)
    target.up.weight._clear_data()
    with pytest.raises(LifecycleError, match="or lost their memory; update"):
        manager.finalize_update()
    with pytest.raises(SpecError, match=refusal):
        manager.update_parameters()
    assert (manager.version, manager.health) == (None, "failed")


@FROM_BOTH
def test_parameters_that_were_given_other_memory_are_not_served(
    source, open_manager, strategy
):  # C17
    target = Net()
    manager = open_manager(source(strategy), target)
    Net(2).head._share_buffer_to(target.head)
    with pytest.raises(LifecycleError, match="parameters were replaced after they were filled"):
        manager.finalize_update()
    assert (manager.version, manager.health) == (None, "failed")
    manager.update_parameters()
    manager.finalize_update()
    assert (manager.version, holds(target, 1)) == (1, True)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def clear_and_fill(directory, pipe):
    """Return how much memory went, whether tensors stayed who they are, and came back whole."""
    paddle.set_device("cpu")
    target = Net(0, size=1 << 19)
    with DynamicWeightManager(config(directory), target, 0) as manager:
        wanted, shape = content(target), shape_of(target)
        full = resident_bytes()
        manager.clear_parameters()
        empty = resident_bytes()
        manager.clear_parameters()
        again = resident_bytes()
        manager.update_parameters()
        manager.finalize_update()
        nbytes = sum(len(each) for each in wanted[0].values())
        return {
            "given": (full - empty) / nbytes,
            "given_again": (empty - again) / nbytes,
            "is_same": shape_of(target) == shape and content(target) == wanted,
            "cache": bool((target.cache == 3).all()),
        }


def test_a_clear_gives_memory_back_and_an_update_fills_the_same_tensors(tmp_path):  # C15
    fw.save(Net(1, size=1 << 19), tmp_path, version=1)
    with Child(clear_and_fill, tmp_path, context=SPAWN) as child:
        found = child.result(60)
    assert found["given"] > 0.9
    assert abs(found["given_again"]) < 0.1
    assert found["is_same"]
    assert found["cache"]


# C16: the calls in pieces.


def test_the_calls_in_pieces_reach_the_engines_hooks(tmp_path, open_manager):  # C16
    fw.save(Net(1), tmp_path, version=1)
    told, hooks, target = config(tmp_path), Hooks(), Net()
    told.parallel_config.enable_expert_parallel = True
    manager = open_manager(told, target, hooks=hooks)
    assert hooks.did == ["drop_cache"]  # nothing of it happens on the first load
    hooks.did.clear()
    manager.clear_deepep_buffer()
    manager.clear_model_weight()
    manager.clear_communication_group()
    assert (manager.version, manager.health) == (None, "cleared")
    manager.restart_communication_group()
    manager.recreate_deepep_buffer()
    manager.reload_model_weights()
    assert hooks.did == [
        "clear_expert_buffer", "drop_cache", "shut_groups_down", "restart_groups",
        "recreate_expert_buffer", "drop_cache",
    ]  # fmt: skip
    assert (manager.version, manager.health) == (1, "serving")
    assert holds(target, 1)
    hooks.did.clear()
    manager.clear_parameters(0, True)
    manager.clear_parameters(0, True)
    manager.update_parameters(0, True)
    assert hooks.did == [
        "drop_cache", "clear_expert_buffer", "shut_groups_down", "restart_groups",
        "recreate_expert_buffer", "drop_cache",
    ]  # fmt: skip
    manager.finalize_update()
    assert manager.health == "serving"
    hooks.did.clear()
    manager.clear_parameters()
    assert hooks.did == ["drop_cache", "clear_expert_buffer"]  # groups go only when that is asked


@pytest.fixture
def recorded(monkeypatch):
    """What the default hooks call: Paddle's groups and FastDeploy's expert buffers."""
    calls = []

    def note(name):
        return lambda group=None: calls.append(name if group is None else f"{name} {group}")

    manager = SimpleNamespace(
        clear_buffer=note("clear_buffer"), recreate_buffer=note("recreate_buffer")
    )
    for parts in range(1, 6):
        name = ".".join(["fastdeploy", "model_executor", "layers", "moe", "ep"][:parts])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fastdeploy.model_executor.layers.moe.ep"].DeepEPBufferManager = manager
    monkeypatch.setattr(paddle.distributed, "shutdown_process_group", note("shutdown"))
    monkeypatch.setattr(paddle.distributed, "restart_process_group", note("restart"))
    return calls


def with_groups(told, *, tp, experts):
    told.parallel_config.tensor_parallel_size = tp
    told.parallel_config.enable_expert_parallel = experts
    told.parallel_config.tp_group, told.parallel_config.ep_group = "tp", "ep"
    return told


def test_the_default_hooks_follow_the_old_order(tmp_path, open_manager, recorded):
    """C15, C16: with expert and tensor parallelism, in whole calls and in pieces."""
    fw.save(Net(1), tmp_path, version=1)
    manager = open_manager(with_groups(config(tmp_path), tp=2, experts=True), Net())
    assert recorded == []  # nothing happens on the first load
    manager.clear_parameters(0, True)
    assert recorded == ["clear_buffer", "shutdown ep", "shutdown tp", "shutdown"]
    recorded.clear()
    manager.update_parameters(0, True)
    manager.finalize_update()
    assert recorded == ["restart", "restart tp", "restart ep", "recreate_buffer"]
    recorded.clear()
    manager.clear_model_weight()
    assert recorded == []  # the expert buffer stays
    manager.clear_deepep_buffer()
    manager.clear_communication_group()
    assert recorded == ["clear_buffer", "shutdown ep", "shutdown tp"]
    recorded.clear()
    manager.restart_communication_group()
    manager.recreate_deepep_buffer()
    manager.reload_model_weights()
    assert recorded == ["restart", "restart tp", "restart ep", "recreate_buffer"]
    assert (manager.version, manager.health) == (1, "serving")
    recorded.clear()
    manager.clear_parameters()
    assert recorded == ["clear_buffer"]
    manager.clear_parameters(0, True)  # the weights are gone, the groups are not
    assert recorded == ["clear_buffer", "shutdown ep", "shutdown tp", "shutdown"]


def test_groups_that_are_not_in_use_are_left_alone(tmp_path, open_manager, recorded):
    """C16: no expert parallelism, and one rank of tensor parallelism."""
    fw.save(Net(1), tmp_path, version=1)
    manager = open_manager(with_groups(config(tmp_path), tp=1, experts=False), Net())
    manager.clear_parameters(0, True)
    manager.update_parameters(0, True)
    manager.clear_communication_group()
    manager.clear_deepep_buffer()
    assert recorded == ["shutdown", "restart"]


def test_groups_that_the_runner_shut_down_are_restarted(tmp_path, open_manager, recorded):
    """C16: the manager did not shut them down, and is asked to restart them."""
    fw.save(Net(1), tmp_path, version=1)
    manager = open_manager(with_groups(config(tmp_path), tp=1, experts=True), Net())
    manager.restart_communication_group()
    assert recorded == ["restart", "restart ep"]
    fw.save(Net(2), tmp_path, version=2)
    manager.update_parameters(0, True)
    assert recorded == ["restart", "restart ep"] * 2


def test_a_hook_that_fails_is_named_and_can_be_tried_again(
    tmp_path, open_manager, cell, pid
):  # C16, C24
    fw.save(Net(1), tmp_path, version=1)
    told, hooks = config(tmp_path), Hooks()
    told.parallel_config.enable_expert_parallel = True
    manager = open_manager(told, Net(), hooks=hooks)
    hooks.faults["clear_expert_buffer"] = RuntimeError("deep_ep is busy")
    with pytest.raises(LifecycleError, match="clear_expert_buffer failed: RuntimeError: deep_ep"):
        manager.clear_deepep_buffer()
    hooks.faults["clear_expert_buffer"] = RuntimeError("deep_ep is busy")
    cell.ask(CLEARING)
    with pytest.raises(LifecycleError, match="release_experts failed: RuntimeError: deep_ep"):
        manager.clear_parameters(pid)
    assert (cell.status, manager.health) == (CLEARED, "failed")
    assert "deep_ep" in str(manager.failure)
    cell.ask(UPDATING)
    manager.update_parameters(pid)
    manager.finalize_update(pid)
    assert (cell.status, manager.health) == (NORMAL, "serving")


def test_a_clear_that_fails_leaves_no_wish_to_shut_groups_behind(tmp_path, open_manager):  # C16
    fw.save(Net(1), tmp_path, version=1)
    hooks = Hooks()
    manager = open_manager(config(tmp_path), Net(), hooks=hooks)
    hooks.faults["drop_cache"] = RuntimeError("on purpose")
    with pytest.raises(LifecycleError, match="drop_cache failed"):
        manager.clear_parameters(0, True)
    manager.clear_model_weight()
    assert "shut_groups_down" not in hooks.did
    hooks.faults["shut_groups_down"] = RuntimeError("on purpose")
    with pytest.raises(LifecycleError, match="shut_groups_down failed: RuntimeError: on purpose"):
        manager.clear_communication_group()
    hooks.did.clear()
    manager.update_parameters()
    manager.clear_model_weight()
    assert "shut_groups_down" not in hooks.did


# C17: verification.


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
    with pytest.raises(LifecycleError, match="signal RESUME needs"):
        manager.finalize_update(pid)
    assert cell.status is CLEARED
    cell.ask(UPDATING)
    assert manager.update_weights_by_rdma(2)["version"] == "2"
    manager.finalize_update(pid)
    assert (cell.status, manager.failure) == (NORMAL, None)
    assert holds(target, 2)


def test_parameters_replaced_after_they_were_filled_are_not_served(tmp_path, open_manager):  # C17
    fw.save(Net(1), tmp_path, version=1)
    target = Net()
    manager = open_manager(config(tmp_path), target)
    fw.save(Net(2), tmp_path, version=2)
    manager.update_parameters()
    target.up.weight = target.create_parameter([4, 8])
    with pytest.raises(LifecycleError, match="parameters were replaced after they were filled"):
        manager.finalize_update()
    assert (manager.health, manager.version) == ("failed", None)
    with pytest.raises(LifecycleError, match="signal RESUME needs"):  # nor when asked again
        manager.finalize_update()
    fw.save(Net(3), tmp_path, version=3)
    manager.update_parameters()
    manager.finalize_update()
    assert holds(target, 3)
    target.up.weight = target.create_parameter([4, 8])  # an update fills what is there by then
    fw.save(Net(4), tmp_path, version=4)
    manager.update_parameters()
    manager.finalize_update()
    assert holds(target, 4)


@pytest.mark.parametrize("strategy", ["ipc_snapshot", "ipc"])
def test_parameters_that_were_replaced_are_filled_with_the_same_version(
    address, tmp_path, open_manager, strategy
):
    fw.save(Net(2), tmp_path, version=2)
    with fw.Publisher(Net(2), address, hold=True) as publisher:
        publisher.publish(2)
        target = Net()
        manager = open_manager(config(tmp_path, strategy, address=address), target)
        target.up.weight = target.create_parameter([4, 8])
        with pytest.raises(LifecycleError, match="parameters were replaced"):
            manager.finalize_update()
        assert manager.health == "failed"  # it served what nobody had loaded
        manager.update_parameters()
        manager.finalize_update()
        assert (manager.version, manager.health) == (2, "serving")
        assert holds(target, 2)


def test_parameters_that_were_replaced_are_not_served_if_the_update_does_not_come(
    tmp_path, open_manager
):
    fw.save(Net(1), tmp_path / "model", version=1)
    target = Net()
    manager = open_manager(config(tmp_path / "model"), target)
    target.up.weight = target.create_parameter([4, 8])
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(SnapshotNotFound):
        manager.update_parameters()
    assert (manager.version, manager.health) == (None, "failed")
    (tmp_path / "elsewhere").rename(tmp_path / "model")
    manager.update_weights_by_rdma(1)
    assert (manager.version, holds(target, 1)) == (1, True)


@pytest.mark.parametrize("is_served", [True, False])
def test_memory_that_comes_back_at_the_same_address_is_not_served(
    tmp_path, open_manager, is_served
):  # C17
    fw.save(Net(1), tmp_path, version=1)
    target = Net()
    manager = open_manager(config(tmp_path), target)
    if not is_served:
        fw.save(Net(1), tmp_path, version=2)
        manager.update_parameters()
    target.head._clear_data()
    paddle.zeros([4, 8])._share_buffer_to(target.head)  # the allocator has just the place for it
    with pytest.raises(LifecycleError, match="parameters were replaced after they were filled"):
        manager.finalize_update()
    assert manager.health == "failed"
    manager.update_parameters()
    manager.finalize_update()
    assert holds(target, 1)


def test_parameters_replaced_while_they_are_filled_are_not_served(tmp_path, open_manager):  # C17
    fw.save(Net(1), tmp_path, version=1)
    target = Net()
    manager = open_manager(config(tmp_path), target)
    fw.save(Net(2), tmp_path, version=2)

    def swap(event):
        if event.kind == "load.done":
            target.up.weight = target.create_parameter([4, 8])

    with listening(swap), pytest.raises(LifecycleError, match="parameters were replaced"):
        manager.update_parameters()
    assert (manager.version, manager.health) == (None, "failed")
    manager.update_parameters()
    manager.finalize_update()
    assert holds(target, 2)


def asked(control, signal, **options):
    return control.wait(control.start(signal, timeout_seconds=20, **options), 20)


def still_hooks():
    hooks = Hooks()
    hooks.pause = lambda deadline: None
    return hooks


@FROM_BOTH
def test_parameters_replaced_before_an_update_by_a_cell_are_those_it_fills(
    source, tmp_path, open_manager, strategy
):  # C17
    target = Net()
    manager = open_manager(source(strategy, cell=tmp_path / "cell"), target, hooks=still_hooks())
    with Control(tmp_path / "cell") as control:
        target.up.weight = target.up.create_parameter([4, 8])
        assert asked(control, Signal.UPDATE).ending == "done"
        assert (control.status().state, manager.version) == (State.SERVING, 1)
        assert holds(target, 1)
        target.head._clear_data()
        assert asked(control, Signal.UPDATE).ending == "done"
        assert holds(target, 1)


def test_parameters_replaced_while_it_stood_still_are_not_served_by_a_cell(
    tmp_path, open_manager
):  # C17
    fw.save(Net(1), tmp_path, version=1)
    target, told = Net(), config(tmp_path, cell=tmp_path / "cell")
    manager = open_manager(told, target, hooks=still_hooks())
    with Control(tmp_path / "cell") as control:
        asked(control, Signal.PAUSE)
        target.up.weight = target.up.create_parameter([4, 8])
        ended = asked(control, Signal.RESUME)
        assert ended.ending == "failed"
        assert "parameters were replaced after they were filled" in ended.reason
        assert manager.health == "paused"
        assert asked(control, Signal.UPDATE, should_resume=True).ending == "done"
        assert (manager.health, holds(target, 1)) == ("serving", True)


def test_an_old_call_in_a_round_of_a_cell_does_not_fail_it(tmp_path, open_manager):  # C17, C24
    fw.save(Net(1), tmp_path, version=1)
    target, told = Net(), config(tmp_path, cell=tmp_path / "cell")
    manager = open_manager(told, target, hooks=still_hooks())
    fw.save(Net(2), tmp_path, version=2)
    is_reading, may_end = threading.Event(), threading.Event()

    def wait(event):
        if event.kind == "progress" and not is_reading.is_set():
            is_reading.set()
            assert may_end.wait(20)

    with Control(tmp_path / "cell") as control, listening(wait):
        operation = control.start(Signal.UPDATE, timeout_seconds=20)
        assert is_reading.wait(20)
        threading.Timer(0.3, may_end.set).start()  # when the old call has looked, and waits
        manager.finalize_update()
        assert control.wait(operation, 20).ending == "done"
    assert (manager.version, manager.health, holds(target, 2)) == (2, "serving", True)


# C18: a version by its number.


def test_a_version_is_taken_from_the_store_or_from_its_publisher(
    address, tmp_path, open_manager
):  # C18
    store, target = tmp_path / "run", Net()
    for version in (6, 7, 8):
        fw.save(Net(version), store, version=version)
    (tmp_path / "version.yaml").write_text("# written by the trainer\nmodel: a\nstep: 7  # of 8\n")
    told = config(tmp_path, "rsync", store=store)
    told.load_config.rsync_config = {"address": address}
    manager = open_manager(told, target)
    assert (manager.version, holds(target, 7)) == (7, True)
    answer = manager.update_weights_by_rdma("6", True)
    assert answer.keys() == {"sync_cost", "update_cost", "total_cost", "version", "rank"}
    assert (answer["version"], answer["rank"]) == ("6", 0)
    assert 0 < answer["sync_cost"] <= answer["total_cost"]
    assert answer["sync_cost"] + answer["update_cost"] == pytest.approx(answer["total_cost"])
    assert (manager.health, holds(target, 6)) == ("serving", True)
    with fw.Publisher(Net(9), address, hold=True) as publisher:
        publisher.publish(9)
        manager.update_weights_by_rdma(9, verify_checksum=True)
        assert (manager.version, holds(target, 9)) == (9, True)
    manager.clear_model_weight()
    manager.update_weights_by_rdma(8)
    manager.reload_model_weights()  # the version asked for last, not the one it began with
    assert (manager.version, holds(target, 8)) == (8, True)
    told.flyweight["address"], told.load_config.rsync_config = None, {"timeout_seconds": 5}
    manager = open_manager(told, target)
    with pytest.raises(VersionError, match="version 5 is not one of the 3 versions"):
        manager.update_weights_by_rdma(5)
    assert (manager.version, manager.health) == (7, "serving")


def test_old_files_are_not_asked_for_by_a_number(tmp_path, open_manager):  # C18
    fw.save_legacy(Net(1), tmp_path, rank=0, legacy_id=0)
    target = Net()
    manager = open_manager(config(tmp_path), target)
    fw.save_legacy(Net(2), tmp_path, rank=0, legacy_id=0)
    with pytest.raises(VersionError, match="version 0 is not one of the 0 versions"):
        manager.update_weights_by_rdma("0")  # else it would be told that it has the new ones
    assert (manager.version, manager.health, holds(target, 1)) == (0, "serving", True)
    manager.update_parameters()
    assert holds(target, 2)


def test_checksums_that_are_asked_for_are_never_skipped(address, tmp_path, open_manager):  # C18
    trainer, target = Net(1), Net()
    with fw.Publisher(trainer, address, hold=True, should_verify=False) as publisher:
        publisher.publish(1)
        told = config(tmp_path, "ipc", address=address, timeout_seconds=3)
        manager = open_manager(told, target)
        assert manager.update_weights_by_rdma(1)["version"] == "1"
        with pytest.raises(VersionError, match="without checksums, and they were to be compared"):
            manager.update_weights_by_rdma(1, verify_checksum=True)
        assert (manager.version, manager.health) == (1, "serving")  # it was held, and stays so
        publisher.publish(2)
        with pytest.raises(VersionError, match="without checksums, and they were to be compared"):
            manager.update_weights_by_rdma(2, verify_checksum=True)
        assert (manager.version, manager.health) == (1, "serving")  # nothing was written
        publisher.publish(3)
        manager.update_weights_by_rdma(3)
        assert (manager.version, manager.health) == (3, "serving")
        with pytest.raises(VersionError, match="without checksums"):
            manager.update_weights_by_rdma(3, verify_checksum=True)
        assert (manager.version, manager.health) == (3, "serving")
        with pytest.raises(TransferTimeout):  # whatever fails next, it is still held
            manager.update_weights_by_rdma(4)
        assert (manager.version, manager.health, holds(target, 1)) == (3, "serving", True)
    with pytest.raises(TypeError, match="transfer_mode"):  # an option that is unknown
        manager.update_weights_by_rdma(2, transfer_mode="gdr")


def test_an_existing_rsync_config_is_taken_and_what_it_means_to_others_is_listed(
    tmp_path, open_manager, caplog
):
    """C18: a deployment brings the config of FastDeploy's own transport along."""
    fw.save(Net(7), tmp_path / "run", version=7)
    (tmp_path / "version.yaml").write_text("step: 7")
    told, events, target = config(tmp_path, "rsync"), [], Net()
    told.load_config.rsync_config = {
        "etcd_server": "10.0.0.1", "store": tmp_path / "run", "user": "me",
    }  # fmt: skip
    with listening(events.append):
        open_manager(told, target)
    assert holds(target, 7)
    (event,) = (each for each in events if each.kind == "config.ignored")
    assert event.fields == {
        "where": "load_config.rsync_config", "names": "'etcd_server', 'user'",
    }  # fmt: skip
    (record,) = (each for each in caplog.records if each.name == "flyweight.fastdeploy")
    assert (record.levelname, "'etcd_server', 'user'" in record.message) == ("WARNING", True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "version.yaml.* cannot be read: No such file"),
        ("- 7\n", "holds a list with 0 values .*, expected a mapping with one"),
        ("step: 7\n- 8\n", "is no YAML"),
        ("step:\n- 8\n", r"step is \[8\] in"),
        ("7\n", "holds a int with 0 values"),
        ("step\n", "holds a str with 0 values"),
        ("", "holds a NoneType with 0 values"),
        ("model: a\n", "holds a dict with 0 values for 'step'"),
        ("model:\n  step: 7\n", "holds a dict with 0 values for 'step'"),
        ("step: 7\nstep: 8\n", "holds a dict with 2 values for 'step'"),
        ("step:\n", "step is '' in .*, a YAML NoneType; expected a decimal number"),
        (
            "step: latest\n",
            "step is 'latest' in .*, a YAML str; expected .* text that ends with one",
        ),
        ("step: 1.0\n", "step is '1.0' in .*, a YAML float"),
        ("step: 'v1.0'\n", "step is 'v1.0' in"),
        ("step: -7\n", "step is '-7' in .*, a YAML int"),
        ("step: true\n", "step is 'true' in .*, a YAML bool"),
        ("step: 2024-01-05\n", "step is '2024-01-05' in .*, a YAML date"),
        (f"step: 0x{'f' * 9000}\n", "step is '0xf{77} in"),
        (f"step: {'9' * 9000}\n", "is no YAML"),
        ("step: '7\n", "is no YAML"),
        ("step: !!bool 7\n", "is no YAML: KeyError"),
        ("step: !!int ''\n", "is no YAML: IndexError"),
        ("step: 7\nday: !!timestamp today\n", "is no YAML: AttributeError"),
        ("step: 0017\n", "step is '0017' in .*, a YAML int; expected a decimal"),
        ("step: 1:30\n", "step is '1:30' in .*, a YAML int; expected a decimal"),
        ("step: !!python/object/apply:os.getcwd []\n", "is no YAML"),
        ("step: " + "[" * 30000, "is no YAML"),
        ("step: 7\n#" + "x" * (1 << 16), "has more than 65536 bytes"),
        (b"step: \xff\n", "is no YAML"),
    ],
)
def test_a_version_file_that_says_nothing_says_how_to_set_it(tmp_path, text, words):  # C18
    if text is not None:
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "version.yaml").write_bytes(data)
    with pytest.raises(VersionError, match=words) as caught:
        DynamicWeightManager(config(tmp_path, "rsync"), Net(), 0)
    assert "write 'step: NUMBER' to" in str(caught.value)
    assert "or pass version=" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("step: 7", "7"),
        ("---\nstep: '7'\n", "7"),
        ('"step": "7" # x\nother: [1, 2]\n', "7"),
        ("models: # all\n- a: b\n- c\nstep: 7\n", "7"),
        ("step: 007", "7"),
        ("step: global_step_7\n", "global_step_7"),
        ("{step: step-7, run: {step: 8}}", "step-7"),
        ("step: >-\n  global_step_0007\n", "global_step_0007"),
    ],
)
def test_a_version_file_is_read(tmp_path, open_manager, text, told):  # C18
    fw.save(Net(7), tmp_path, version=7)
    (tmp_path / "version.yaml").write_text(text)
    manager = open_manager(config(tmp_path, "rsync"), Net())
    assert (manager.version, manager.read_model_version_from_file()) == (7, told)
    with pytest.raises(VersionError, match="version is 'v1.0', expected a whole number"):
        manager.update_weights_by_rdma("v1.0")


def test_a_version_may_be_text_and_results_repeat_it(tmp_path, open_manager):
    """C18: the number that ends a text is the version's; a text without one is refused."""
    for version in (5, 6):
        fw.save(Net(version), tmp_path, version=version)
    target = Net()
    manager = open_manager(config(tmp_path), target)
    for given, number in (("5", 5), ("step-6", 6), ("global_step_0005", 5), ("2024/step.6", 6)):
        answer = manager.update_weights_by_rdma(given, verify_checksum=False)
        assert (answer["version"], manager.version) == (given, number)
        assert holds(target, number)
    for given in ("latest", "6.0", "-6", -6, "step-6b", "9" * 19, "step-٦"):
        with pytest.raises(VersionError, match="expected a whole number, or text that ends with"):
            manager.update_weights_by_rdma(given)
    assert (manager.version, manager.health) == (6, "serving")


def test_a_version_file_without_pyyaml_names_the_extra(tmp_path, monkeypatch):
    """C18: PyYAML is optional."""
    (tmp_path / "version.yaml").write_text("step: 7")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingDependency, match=r"pip install 'flyweight\[fastdeploy\]'"):
        DynamicWeightManager(config(tmp_path, "rsync"), Net(), 0)


# C19, C20: several models, other names.


class Draft(paddle.nn.Layer):
    def __init__(self, version=0):
        super().__init__()
        paddle.seed(100 + version)
        self.mtp = paddle.nn.Linear(3, 3)


def test_models_of_a_list_share_names_and_are_one_version(address, tmp_path, open_manager):  # C19
    trainer = {**Net(1).state_dict(), **Draft(1).state_dict()}
    main, draft = Net(), Draft()
    with fw.Publisher(trainer, address, hold=True) as publisher:
        publisher.publish(1)
        manager = open_manager(config(tmp_path, "ipc_async", address=address), [main, draft])
    assert manager.model_list == [main, draft]
    assert content(main, draft) == content(Net(1), Draft(1))
    with pytest.raises(SpecError, match="5 names are in several models: .*pass a dict of models"):
        DynamicWeightManager(config(tmp_path), [Net(), Net()], 0)


def test_models_of_a_dict_are_named_by_its_keys(tmp_path, open_manager):  # C19
    fw.save({"main": Net(1), "draft": Net(2)}, tmp_path, version=1)
    models = {"main": Net(), "draft": Net()}
    manager = open_manager(config(tmp_path), models)
    assert holds(models["main"], 1)
    assert holds(models["draft"], 2)
    fw.save({"main": Net(3)}, tmp_path, version=2)
    with pytest.raises(PlanError, match="target wants 5 tensors"):  # both, or none
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


# C22, C24, C26: the worker loop, failures, health.


class Runner:
    """FastDeploy's runner, as far as weights are concerned."""

    def __init__(self, manager):
        self.dynamic_weight_manager = manager
        self.num_cleared = 0

    def clear_requests(self):
        self.num_cleared += 1

    def update_parameters(self, pid):
        self.dynamic_weight_manager.update_parameters(pid, False)
        self.dynamic_weight_manager.finalize_update(pid)
        self.dynamic_weight_manager._log_memory("updated")

    def clear_parameters(self, pid):
        self.dynamic_weight_manager.clear_parameters(pid, False)


def test_the_worker_loop_drives_the_manager(tmp_path, open_manager, cell, pid):  # C22, C24
    fw.save(Net(1), tmp_path, version=1)
    target = Net()
    manager = open_manager(config(tmp_path), target)
    runner = Runner(manager)
    with LegacyCell.create(KV_CACHE, pid) as cache:

        def asked(request, block=False):
            cell.ask(request)
            DynamicWeightManager.check_model_weights_status(cell, cache, runner, pid, block)

        asked(CLEARING)
        assert (cell.status, cache.status, manager.health) == (CLEARED, CLEARING, "cleared")
        fw.save(Net(2), tmp_path, version=2)
        asked(UPDATING, block=True)
        assert (cell.status, cache.status, manager.health) == (NORMAL, UPDATING, "serving")
        assert (holds(target, 2), runner.num_cleared) == (True, 2)
        fw.save(Net(3, size=9), tmp_path, version=3)
        with pytest.raises(ShapeMismatch):
            asked(UPDATING, block=True)
        # The old version is whole, but NORMAL would tell the caller that the new one is served.
        assert (cell.status, manager.version, manager.health) == (CLEARED, 2, "paused")
        asked(CLEARING)
        with pytest.raises(ShapeMismatch):
            asked(UPDATING, block=True)
        assert (cell.status, manager.version) == (CLEARED, None)  # there is none to serve
        fw.save(Net(4), tmp_path, version=4)
        asked(UPDATING, block=True)
        assert (cell.status, holds(target, 4)) == (NORMAL, True)


def test_an_update_that_brings_nothing_is_not_normal(address, tmp_path, open_manager, cell, pid):
    """C24: a trainer that waits for NORMAL must not take the old policy for its new one."""
    trainer, target = Net(1), Net()
    with fw.Publisher(trainer, address, hold=True) as publisher:
        publisher.publish(1)
        told = config(tmp_path, "ipc", address=address, timeout_seconds=1.5)
        manager = open_manager(told, target)
        runner = Runner(manager)

        def asked():
            cell.ask(UPDATING)
            DynamicWeightManager.check_model_weights_status(cell, None, runner, pid, False)

        with pytest.raises(TransferTimeout, match="a version after 1"):
            asked()
        assert (cell.status, manager.version, manager.health) == (CLEARED, 1, "paused")
        trainer.set_state_dict(Net(2).state_dict())
        publisher.publish(2)
        asked()
        assert (cell.status, manager.version, manager.health) == (NORMAL, 2, "serving")
        assert holds(target, 2)
    with pytest.raises(TransferTimeout, match="no publisher came in time"):
        asked()
    assert (cell.status, manager.version, manager.health) == (CLEARED, 2, "paused")


def test_an_update_that_waits_is_normal_once_the_version_is_there(
    address, tmp_path, open_manager, cell, pid, threads
):
    trainer, target = Net(1), Net()
    with fw.Publisher(trainer, address, hold=True) as publisher:
        publisher.publish(1)
        manager = open_manager(config(tmp_path, "ipc", address=address), target)
        cell.ask(UPDATING)
        check = DynamicWeightManager.check_model_weights_status
        updating = threads.submit(check, cell, None, Runner(manager), pid, False)
        until(lambda: manager.health == "paused")
        assert cell.status is UPDATING
        trainer.set_state_dict(Net(2).state_dict())
        publisher.publish(2)
        updating.result(20)
        assert (cell.status, manager.version, holds(target, 2)) == (NORMAL, 2, True)


@pytest.mark.parametrize("passes", ["word", "cell"])
def test_the_worker_loop_does_what_a_cell_of_ours_asks(tmp_path, open_manager, pid, passes):
    """C22: the same loop with our cell; requests are stopped by the loop, not by hooks."""
    fw.save(Net(1), tmp_path, version=1)
    target, path = Net(), tmp_path / "cell"
    manager = open_manager(config(tmp_path, cell=path), target)
    runner = Runner(manager)
    with Control(path) as control, Cell(path) as cell, LegacyCell.create(KV_CACHE, pid) as cache:
        word = manager.model_weights_status
        given = word if passes == "word" else cell

        def done(signal, **options):
            operation = control.start(signal, timeout_seconds=20, **options)
            until(lambda: word.value[0] in (UPDATING, CLEARING), 20)
            DynamicWeightManager.check_model_weights_status(given, cache, runner, pid, False)
            return control.wait(operation, 20)

        assert word.value[0] == NORMAL
        assert done(Signal.CLEAR).ending == "done"
        assert (word.value[0], cache.status, manager.health) == (CLEARED, CLEARING, "cleared")
        assert control.status().ranks[0].absent == ("kv_cache", "weights")
        for version in (2, 3):
            fw.save(Net(version), tmp_path, version=version)
        assert done(Signal.RESTORE, version=2).ending == "done"
        assert (cache.status, manager.health, holds(target, 2)) == (UPDATING, "serving", True)
        assert done(Signal.UPDATE).ending == "done"
        assert (control.status().state, control.status().version) == (State.SERVING, 3)
        assert (runner.num_cleared, holds(target, 3)) == (3, True)

        # What fails is told to both: to the loop, and to whoever asked.
        fw.save(Net(4, size=9), tmp_path, version=4)
        operation = control.start(Signal.UPDATE, timeout_seconds=20)
        until(lambda: word.value[0] == UPDATING, 20)
        with pytest.raises(ShapeMismatch):
            DynamicWeightManager.check_model_weights_status(given, cache, runner, pid, False)
        ended = control.wait(operation, 20)
        assert (ended.ending, ended.error) == ("failed", "ShapeMismatch")
        assert (word.value[0], manager.version) == (NORMAL, 3)

        runner.clear_requests = lambda: 1 / 0
        operation = control.start(Signal.UPDATE, version=2, timeout_seconds=20)
        until(lambda: word.value[0] == UPDATING, 20)
        with pytest.raises(ZeroDivisionError):
            DynamicWeightManager.check_model_weights_status(given, cache, runner, pid, False)
        ended = control.wait(operation, 20)
        assert (ended.ending, "ZeroDivisionError" in ended.reason) == ("failed", True)
        assert (word.value[0], manager.version, holds(target, 3)) == (NORMAL, 3, True)

        ended = control.wait(control.start(Signal.UPDATE, timeout_seconds=0.2), 20)
        assert ended.error == "TransferTimeout"  # no loop came
        assert "the worker loop did not answer UPDATE" in ended.reason
        assert word.value[0] == NORMAL


def test_a_blocked_worker_loop_stays_until_our_cell_has_brought_weights(
    tmp_path, open_manager, pid, threads
):
    """C22: block, with our cell."""
    fw.save(Net(1), tmp_path, version=1)
    manager = open_manager(config(tmp_path, cell=tmp_path / "cell"), Net())
    word, runner = manager.model_weights_status, Runner(manager)
    with Control(tmp_path / "cell") as control:
        operation = control.start(Signal.CLEAR, tags=(Tag.WEIGHTS,), timeout_seconds=20)
        until(lambda: word.value[0] == CLEARING, 20)
        loop = threads.submit(
            DynamicWeightManager.check_model_weights_status, word, None, runner, pid, True
        )
        assert control.wait(operation, 20).ending == "done"
        assert not loop.done()
        assert asked(control, Signal.UPDATE).ending == "done"
        loop.result(20)
    assert (manager.health, runner.num_cleared) == ("serving", 2)


def test_a_manager_without_a_cell_of_ours_has_no_word_of_it(tmp_path, open_manager):
    fw.save(Net(1), tmp_path, version=1)
    manager = open_manager(config(tmp_path), Net())
    with pytest.raises(SpecError, match="there is no status cell; set config.flyweight"):
        manager.model_weights_status
    with (
        Cell(tmp_path / "cell") as cell,
        pytest.raises(SpecError, match="pass the manager's model_weights_status"),
    ):
        DynamicWeightManager.check_model_weights_status(cell, None, object(), 1, False)


def test_a_late_clear_does_not_replace_a_request_to_update(
    tmp_path, open_manager, cell, pid
):  # C23
    fw.save(Net(1), tmp_path, version=1)
    hooks = Hooks()
    manager = open_manager(config(tmp_path), Net(), hooks=hooks)
    hooks._note = lambda name: cell.ask(UPDATING)  # the server asks while memory goes
    cell.ask(CLEARING)
    manager.clear_parameters(pid)
    assert cell.status is UPDATING


def test_a_pid_without_a_cell_is_an_error_before_anything_is_done(tmp_path, open_manager, pid):
    fw.save(Net(1), tmp_path, version=1)
    manager = open_manager(config(tmp_path), Net())
    with pytest.raises(StoreError, match=f"model_weights_status.{pid}"):
        manager.clear_parameters(pid)
    assert manager.health == "serving"


def test_no_publisher_is_a_timeout_and_leaves_nothing_open(address, tmp_path):  # C24
    before = {each.name for each in threading.enumerate()}
    told = config(tmp_path, "ipc", address=address, timeout_seconds=0.2)
    with pytest.raises(TransferTimeout, match="no publisher came in time"):
        DynamicWeightManager(told, Net(), 0)
    assert {each.name for each in threading.enumerate()} <= before


def test_health_is_told_throughout_an_update(tmp_path, open_manager):  # C26
    fw.save(Net(1), tmp_path, version=1)
    beaten, said = threading.Event(), []

    class Beating(Hooks):
        def drop_cache(self):
            assert self.did or beaten.wait(20)  # as long as a large model takes
            self.did.append("drop_cache")

        def beat(self, percent):
            beaten.set()

    manager = open_manager(config(tmp_path), Net(), hooks=Beating())
    fw.save(Net(2), tmp_path, version=2)
    with listening(lambda event: said.append(manager.health)):
        manager.update_parameters()
    assert beaten.is_set()
    assert {"updating, 0 %", "verifying"} <= set(said)
    assert any(each.startswith("updating, 100") for each in said)


@pytest.mark.parametrize("name", ["local_engine_worker_queue_port", "engine_pid"])
def test_the_live_signal_of_fastdeploy_goes_on_during_an_update(tmp_path, open_manager, pid, name):
    """C26: a health check counts a worker as dead whose word is 30 s old; this is the default."""
    fw.save(Net(1), tmp_path, version=1)
    old = int(time.time()) - 1000
    signal = SharedMemory(f"worker_healthy_live_signal.{pid}", create=True, size=8)
    try:
        words = signal.buf.cast("i")
        words[0] = words[1] = old

        class Slow(FastDeployHooks):
            def drop_cache(self):
                until(lambda: words[1] != old, 20)  # as long as a large model takes

        told = config(tmp_path)
        told.parallel_config.tensor_parallel_rank = 1
        setattr(told.parallel_config, name, pid)
        open_manager(told, Net(), hooks=Slow(told.parallel_config))
        assert (words[0], abs(words[1] - time.time()) < 30) == (old, True)
        words.release()
    finally:
        signal.close()
        signal.unlink()


def test_a_beat_that_fails_does_not_end_the_beats(tmp_path, open_manager):
    """C26"""
    fw.save(Net(1), tmp_path, version=1)
    beats = []

    class Failing(FastDeployHooks):
        def beat(self, percent):
            beats.append(percent)
            raise RuntimeError("on purpose")

        def drop_cache(self):
            until(lambda: len(beats) > 1, 20)

    told = config(tmp_path)
    manager = open_manager(told, Net(), hooks=Failing(told.parallel_config))
    assert manager.health == "serving"


def test_a_cell_of_ours_shows_the_engine_and_may_ask_where_hooks_can_pause(
    tmp_path, open_manager
):  # C24, C26
    fw.save(Net(1), tmp_path, version=1)
    hooks, target = Hooks(), Net()
    told = config(tmp_path, cell=tmp_path / "cell")
    manager = open_manager(told, target, hooks=hooks)
    with Control(tmp_path / "cell") as control:
        assert (control.status().state, control.status().version) == (State.SERVING, 1)
        ended = control.wait(
            control.start(Signal.CLEAR, tags=(Tag.WEIGHTS,), timeout_seconds=20), 20
        )
        assert ended.ending == "failed"
        assert "FastDeploy's worker loop stops requests" in ended.reason
        assert control.status().state == State.SERVING
        hooks.pause = lambda deadline: None
        assert (
            control.wait(
                control.start(Signal.CLEAR, tags=(Tag.WEIGHTS,), timeout_seconds=20), 20
            ).ending
            == "done"
        )
        assert (manager.health, control.status().version) == ("cleared", None)
        fw.save(Net(2, size=9), tmp_path, version=2)
        with pytest.raises(ShapeMismatch):
            manager.update_parameters()
        assert control.status().state == State.FAILED
        assert "is (4, 9)" in control.status().reason
        fw.save(Net(3), tmp_path, version=3)
        manager.update_parameters()
        manager.finalize_update()
        assert (control.status().version, holds(target, 3)) == (3, True)
