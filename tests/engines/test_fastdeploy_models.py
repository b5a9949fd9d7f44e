"""Models of FastDeploy that load weights by themselves (C11, C19, C20, C24, C28)."""

import gc
import sys
import threading
import weakref
from types import ModuleType, SimpleNamespace

import numpy as np
import paddle
import pytest
from fastdeploy_nets import CLEARED, NORMAL, UPDATING, config

import flyweight as fw
from conftest import flip
from flyweight.errors import (
    ChecksumMismatch,
    DTypeMismatch,
    LifecycleError,
    PlanError,
    ShapeMismatch,
    SpecError,
)

pytest_plugins = ["fastdeploy_fixtures"]
STRATEGIES = pytest.mark.parametrize("strategy", ["ipc_snapshot", "ipc", "ipc_async", "rsync"])


def trained(version):
    """What a trainer has: q, k, v and a norm apart, under names of its own."""
    values = {name: paddle.full([2, 4], version + n / 8) for n, name in enumerate("qkv")}
    return {**{f"attn.{n}_proj": t for n, t in values.items()}, "norm": paddle.full([4], version)}


class Attention(paddle.nn.Layer):
    """Turns its weight round once it is loaded, as engines do: into another parameter."""

    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([6, 4])
        self.num_processed = 0

    def process_weights_after_loading(self):
        turned = self.create_parameter([4, 6])
        turned.set_value(self.weight.t())
        self.weight = turned
        self.num_processed += 1


class Engine(paddle.nn.Layer):
    """Fuses q, k and v as they come; its loader makes its weight anew each time."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.norm = self.create_parameter([4])
        self.calls, self.fault = [], None

    def load_weights(self, weights):
        self.calls.append([])
        self.attention.weight = self.attention.create_parameter([6, 4])
        for name, tensor in weights:
            self.calls[-1].append(name)
            if self.fault == name:
                raise ValueError(f"no place for {name}")
            if name == "norm":
                self.norm.set_value(tensor)
            elif name.startswith("attn."):
                row = 2 * "qkv".index(name[5])
                self.attention.weight[row : row + 2] = tensor

    def holds(self, version):
        rows = [np.full([2, 4], version + n / 8, np.float32) for n in range(3)]
        is_turned = np.array_equal(self.attention.weight.numpy(), np.concatenate(rows).T)
        return is_turned and bool((self.norm == version).all())


class Source:
    """Publishes versions and saves them, so that every strategy finds them."""

    def __init__(self, directory, publisher, trainer, make):
        self._directory, self._publisher = directory, publisher
        self._trainer, self._make = trainer, make

    def bring(self, version):
        for name, tensor in self._make(version).items():
            self._trainer[name].set_value(tensor)
        self._publisher.publish(version)
        fw.save(self._trainer, self._directory, version=version)
        (self._directory / "version.yaml").write_text(f"step: {version}")


@pytest.fixture
def open_source(address, tmp_path):
    opened = []

    def make(state=trained):
        trainer = state(0)
        publisher = fw.Publisher(trainer, address, keep="memory")
        opened.append(publisher)
        return Source(tmp_path, publisher, trainer, state)

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def open_by(address, tmp_path, open_manager):
    """Makes a manager by its strategy, for what `open_source` brings."""

    def make(strategy, models, **options):
        return open_manager(config(tmp_path, strategy, address=address, **options), models)

    return make


def updated(manager, strategy, version, pid=0):
    """Take a version by the call that its strategy has, and serve it."""
    if strategy == "rsync":
        manager.update_weights_by_rdma(version)
    else:
        manager.update_parameters(pid)
    manager.finalize_update(pid)


@STRATEGIES
def test_a_model_that_loads_by_itself_is_handed_tensors_and_processes_them(
    open_source, open_by, strategy
):
    """C20, C28: under every strategy, with parameters that are replaced on the way."""
    source, engine = open_source(), Engine()
    source.bring(1)
    manager = open_by(strategy, engine)
    assert engine.calls == [["attn.q_proj", "attn.k_proj", "attn.v_proj", "norm"]]
    assert (manager.version, manager.health, engine.holds(1)) == (1, "serving", True)
    assert engine.attention.num_processed == 1
    first = weakref.ref(engine.attention.weight)
    source.bring(2)
    updated(manager, strategy, 2)
    assert (manager.version, manager.health, engine.holds(2)) == (2, "serving", True)
    assert (len(engine.calls), engine.attention.num_processed) == (2, 2)
    assert {n: id(t) for n, t in manager.state_dict.items()} == {
        n: id(t) for n, t in engine.state_dict().items()
    }
    gc.collect()
    assert first() is None  # what was replaced is not kept
    manager.clear_parameters()
    assert (manager.version, manager.health) == (None, "cleared")
    manager.update_parameters()
    manager.finalize_update()
    assert (manager.version, engine.holds(2)) == (2, True)


@STRATEGIES
def test_what_is_replaced_after_the_commit_is_not_served(open_source, open_by, strategy):
    """C17, C28: only the round itself may replace parameters."""
    source, engine = open_source(), Engine()
    source.bring(1)
    manager = open_by(strategy, engine)
    source.bring(2)
    manager.update_weights_by_rdma(2)
    engine.attention.weight = engine.attention.create_parameter([4, 6])
    with pytest.raises(LifecycleError, match="parameters were replaced after they were filled"):
        manager.finalize_update()
    assert (manager.version, manager.health) == (None, "failed")
    manager.update_weights_by_rdma(2)
    manager.finalize_update()
    assert (manager.version, engine.holds(2)) == (2, True)


def test_loaded_parameters_that_were_given_other_memory_are_not_served(open_source, open_by):
    """C17, C28"""
    source, engine = open_source(), Engine()
    source.bring(1)
    manager = open_by("ipc", engine)
    paddle.zeros([4])._share_buffer_to(engine.norm)
    with pytest.raises(LifecycleError, match="parameters were replaced after they were filled"):
        manager.finalize_update()
    manager.update_parameters()
    manager.finalize_update()
    assert engine.holds(1)


@STRATEGIES
@pytest.mark.parametrize("wrong", ["load", "process", "early", "refused"])
def test_a_loader_or_hook_that_fails_is_failed_with_its_reason(
    open_source, open_by, strategy, wrong, cell, pid
):
    """C24, C28: never NORMAL, and a later update is taken."""
    source, engine = open_source(), Engine()
    source.bring(1)
    manager = open_by(strategy, engine)
    source.bring(2)
    words = {
        "load": "load_weights failed: ValueError: no place for norm",
        "process": "process_weights_after_loading failed: ZeroDivisionError",
        "early": "load_weights of Engine returned before it took 'attn.k_proj'",
        "refused": "a shape that describes nothing",
    }
    if wrong == "load":
        engine.fault = "norm"
    elif wrong == "process":
        engine.attention.process_weights_after_loading = lambda: 1 / 0
    elif wrong == "early":
        engine.load_weights = lambda weights: next(iter(weights))
    else:  # an error of ours means elsewhere that nothing was written yet

        def refuse(weights):
            next(iter(weights))
            raise SpecError("a shape that describes nothing")

        engine.load_weights = refuse
    cell.ask(UPDATING)
    with pytest.raises((LifecycleError, SpecError), match=words[wrong]):
        manager.update_parameters(pid)
    assert (cell.status, manager.version, manager.health) == (CLEARED, None, "failed")
    assert words[wrong] in str(manager.failure)
    with pytest.raises(LifecycleError, match="signal RESUME needs"):
        manager.finalize_update(pid)
    assert cell.status is CLEARED
    engine.fault = None
    for name in ("load_weights", "process_weights_after_loading"):
        for layer in (engine, engine.attention):
            layer.__dict__.pop(name, None)
    cell.ask(UPDATING)
    updated(manager, strategy, 2, pid)
    assert (cell.status, manager.version, engine.holds(2)) == (NORMAL, 2, True)


def test_damaged_files_that_a_loader_was_handed_are_not_served(open_source, open_by, tmp_path):
    """C7, C28"""
    source, engine = open_source(), Engine()
    source.bring(1)
    manager = open_by("ipc_snapshot", engine)
    source.bring(2)
    (data,) = (tmp_path / "v0000000002").glob("*.safetensors")
    flip(data, data.stat().st_size - 3)
    with pytest.raises(ChecksumMismatch):
        manager.update_parameters()
    assert (manager.version, manager.health) == (None, "failed")


class Draft(paddle.nn.Layer):
    """Keeps the very tensors that it is handed, and changes them in place."""

    def __init__(self):
        super().__init__()
        self.kept = self.create_parameter([4])
        self.names = []

    def load_weights(self, weights):
        for name, tensor in weights:
            self.names.append(name)
            if name == "norm":
                tensor._share_buffer_to(self.kept)
                tensor.scale_(2)


class Plain(paddle.nn.Layer):
    def __init__(self, dtype="float32", size=4):
        super().__init__()
        self.norm = self.create_parameter([size], dtype=dtype)


@STRATEGIES
def test_several_models_load_together_and_each_gets_all_in_one_call(open_source, open_by, strategy):
    """C19, C28: a list shares its names; who has no loader is filled by name."""
    source, engine, draft, plain = open_source(), Engine(), Draft(), Plain()
    source.bring(1)
    # The names that two of them have are told apart by a dict's keys only.
    del engine.norm
    engine.norm = paddle.zeros([4])
    manager = open_by(strategy, [engine, draft, plain])
    for version in (1, 2):
        if version == 2:
            source.bring(2)
            draft.names.clear()
            updated(manager, strategy, 2)
        assert engine.holds(version)
        assert draft.names == ["attn.q_proj", "attn.k_proj", "attn.v_proj", "norm"]
        assert draft.kept.tolist() == [2.0 * version] * 4
        assert plain.norm.tolist() == [version] * 4
        assert (manager.version, manager.health) == (version, "serving")


@STRATEGIES
def test_models_of_a_dict_get_what_is_named_for_them(open_source, open_by, strategy):
    """C19, C28"""

    def both(version):
        more = {f"draft.{name}": tensor + 1 for name, tensor in trained(version).items()}
        main = {f"main.{name}": tensor for name, tensor in trained(version).items()}
        mixed = [pair for pairs in zip(main.items(), more.items(), strict=True) for pair in pairs]
        return {**dict(mixed), "ema": paddle.zeros([1])}

    source, main, draft = open_source(both), Engine(), Engine()
    source.bring(1)
    manager = open_by(strategy, {"main": main, "draft": draft})
    assert main.calls == draft.calls == [["attn.q_proj", "attn.k_proj", "attn.v_proj", "norm"]]
    assert (main.holds(1), draft.holds(2), manager.unmatched) == (True, True, ["ema"])
    source.bring(2)
    draft.fault = "attn.k_proj"
    with pytest.raises(LifecycleError, match="no place for attn.k_proj"):
        manager.update_weights_by_rdma(2)
    assert (manager.version, manager.health) == (None, "failed")
    draft.fault, main.fault = None, "norm"
    with pytest.raises(LifecycleError, match="no place for norm"):
        manager.update_weights_by_rdma(2)
    assert "flyweight-load" not in {each.name for each in threading.enumerate()}
    main.fault = None
    manager.update_weights_by_rdma(2)
    manager.finalize_update()
    assert (main.holds(2), draft.holds(3), manager.version) == (True, True, 2)


@pytest.mark.parametrize(
    ("other", "kind", "words"),
    [
        (lambda: Plain(dtype="float16"), DTypeMismatch, "'norm' is paddle.float32, in the model"),
        (lambda: Plain(size=5), ShapeMismatch, r"'norm' is \(4,\), in the model \(5,\)"),
        (lambda: Draftless(), PlanError, "no tensors came for 1 parameters: 'absent'"),
    ],
)
def test_a_model_without_a_loader_beside_one_that_has_one_must_fit(
    open_source, open_by, other, kind, words
):
    """C13, C28"""
    source, draft = open_source(), Draft()
    source.bring(1)
    with pytest.raises(kind, match=words):
        open_by("ipc", [draft, other()])


class Draftless(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.absent = self.create_parameter([4])


def test_fastdeploys_own_processing_runs_where_fastdeploy_does(open_source, open_by, monkeypatch):
    """C28: its function looks at the config, so it is called instead of the layers' methods."""
    seen = []
    for name in ("fastdeploy", "fastdeploy.model_executor", "fastdeploy.model_executor.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    def process(model, told):
        seen.append((model, told.load_config.load_strategy))
        model.attention.process_weights_after_loading()

    sys.modules["fastdeploy.model_executor.utils"].process_final_after_loading = process
    source, engine = open_source(), Engine()
    source.bring(1)
    open_by("ipc", engine)
    assert (seen, engine.holds(1)) == ([(engine, "ipc")], True)


def test_a_quantization_method_processes_its_layer(open_source, open_by):
    """C28: FastDeploy's layers have it as `quant_method`."""
    source, engine = open_source(), Engine()
    source.bring(1)
    process = Attention.process_weights_after_loading
    engine.attention.quant_method = SimpleNamespace(process_weights_after_loading=process)
    open_by("ipc", engine)
    assert (engine.holds(1), engine.attention.num_processed) == (True, 1)


def test_a_loader_can_be_passed_over(open_source, open_by):
    """C11: files of each rank's own tensors fit by name, and not by a loader that cuts them."""

    def own(version):
        return {"attention.weight": paddle.full([6, 4], version), "norm": paddle.full([4], version)}

    source, engine = open_source(own), Engine()
    source.bring(1)
    manager = open_by("ipc_snapshot", engine, load_weights=False)
    assert (engine.calls, engine.attention.num_processed, manager.version) == ([], 0, 1)
    assert (engine.attention.weight == 1).all()
    with pytest.raises(SpecError, match="partial_over is for parameters that are filled by name"):
        open_by("ipc_snapshot", Engine(), partial_over=1)


class InPlace(paddle.nn.Layer):
    """Replaces nothing: nobody could see by its parameters that it has failed half-way."""

    def __init__(self):
        super().__init__()
        self.norm = self.create_parameter([4])
        self.num_processed, self.fault = 0, None

    def load_weights(self, weights):
        for name, tensor in weights:
            if name == "norm":
                self.norm.set_value(tensor)
        if self.fault == "load":
            raise SpecError("a shape that describes nothing")

    def process_weights_after_loading(self):
        if self.fault == "process":
            raise RuntimeError("on purpose")
        self.norm.scale_(2)
        self.num_processed += 1


@STRATEGIES
def test_a_version_whose_processing_failed_is_loaded_again(open_source, open_by, strategy):
    """C24, C28: it is not held, though all of it came."""
    source, engine = open_source(), InPlace()
    source.bring(1)
    manager = open_by(strategy, engine)
    source.bring(2)
    engine.fault = "process"
    with pytest.raises(LifecycleError, match="RuntimeError: on purpose"):
        manager.update_weights_by_rdma(2)
    assert (manager.version, manager.health) == (None, "failed")
    engine.fault = None
    manager.update_weights_by_rdma(2)
    manager.finalize_update()
    assert (manager.version, engine.norm.tolist(), engine.num_processed) == (2, [4.0] * 4, 2)


def test_files_that_a_loader_refuses_half_way_leave_nothing_of_the_publishers_version(
    address, tmp_path, open_by
):
    """C24, C28: to fill by name, the same error means that nothing was written."""
    (tmp_path / "version.yaml").write_text("step: 1")
    engine = InPlace()
    with fw.Publisher(trained(1), address, keep="memory") as publisher:
        publisher.publish(1)
        manager = open_by("rsync", engine)
    fw.save(trained(2), tmp_path, version=2)
    engine.fault = "load"
    with pytest.raises(SpecError, match="describes nothing"):
        manager.update_weights_by_rdma(2)
    assert (manager.version, manager.health) == (None, "failed")
    engine.fault = None
    manager.update_weights_by_rdma(2)
    assert (manager.version, engine.norm.tolist()) == (2, [4.0] * 4)
