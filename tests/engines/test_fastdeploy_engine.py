"""What only FastDeploy and a GPU have: buffers, groups, the live signal (C15, C16, C26)."""

import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from types import ModuleType, SimpleNamespace

import paddle
import pytest
from fastdeploy_nets import CLEARED, CLEARING, NORMAL, UPDATING, Hooks, Net, config, holds

import flyweight as fw
from child_processes import LIMIT, until
from flyweight.engines import fastdeploy_engine
from flyweight.engines.fastdeploy_engine import FastDeployHooks
from flyweight.errors import (
    LifecycleError,
)
from flyweight.events import listening

pytest_plugins = ["fastdeploy_fixtures"]


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
    with pytest.raises(LifecycleError, match="clear_expert_buffer.*deep_ep"):
        manager.clear_deepep_buffer()
    hooks.faults["clear_expert_buffer"] = RuntimeError("deep_ep is busy")
    cell.ask(CLEARING)
    with pytest.raises(LifecycleError, match="release_experts.*deep_ep"):
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
    with pytest.raises(LifecycleError, match="drop_cache"):
        manager.clear_parameters(0, True)
    manager.clear_model_weight()
    assert "shut_groups_down" not in hooks.did
    hooks.faults["shut_groups_down"] = RuntimeError("on purpose")
    with pytest.raises(LifecycleError, match="shut_groups_down"):
        manager.clear_communication_group()
    hooks.did.clear()
    manager.update_parameters()
    manager.clear_model_weight()
    assert "shut_groups_down" not in hooks.did


@pytest.fixture
def quick_beats(monkeypatch):
    assert fastdeploy_engine._BEAT_SECONDS <= 10  # a word that is 30 s old counts as dead
    monkeypatch.setattr(fastdeploy_engine, "_BEAT_SECONDS", 0.02)


@pytest.mark.usefixtures("quick_beats")
def test_health_is_told_throughout_an_update(tmp_path, open_manager):  # C26
    fw.save(Net(1), tmp_path, version=1)
    beaten, said = threading.Event(), []

    class Beating(Hooks):
        def drop_cache(self):
            assert self.did or beaten.wait(LIMIT)  # as long as a large model takes
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


@pytest.mark.usefixtures("quick_beats")
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
                until(lambda: words[1] != old)  # as long as a large model takes

        told = config(tmp_path)
        told.parallel_config.tensor_parallel_rank = 1
        setattr(told.parallel_config, name, pid)
        open_manager(told, Net(), hooks=Slow(told.parallel_config))
        assert (words[0], words[1] > old + 500) == (old, True)
        words.release()
    finally:
        signal.close()
        signal.unlink()


@pytest.mark.usefixtures("quick_beats")
def test_a_beat_that_fails_does_not_end_the_beats(tmp_path, open_manager):
    """C26"""
    fw.save(Net(1), tmp_path, version=1)
    beats = []

    class Failing(FastDeployHooks):
        def beat(self, percent):
            beats.append(percent)
            raise RuntimeError("on purpose")

        def drop_cache(self):
            until(lambda: len(beats) > 1)

    told = config(tmp_path)
    manager = open_manager(told, Net(), hooks=Failing(told.parallel_config))
    assert manager.health == "serving"
