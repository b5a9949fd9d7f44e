"""The manager and its status cells, old ones and ours, with the worker loop (C22 to C24, C26)."""

import time

import pytest
from fastdeploy_nets import (
    CLEARED,
    CLEARING,
    NORMAL,
    UPDATING,
    Hooks,
    Net,
    Runner,
    asked,
    config,
    holds,
    little_time,
)

import flyweight as fw
from child_processes import LIMIT, until
from flyweight.engines.fastdeploy import DynamicWeightManager
from flyweight.engines.legacy_cells import KV_CACHE, LegacyCell
from flyweight.errors import (
    LifecycleError,
    PeerLost,
    ShapeMismatch,
    SpecError,
    StoreError,
    TransferTimeout,
)
from flyweight.lifecycle.cell import Cell
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.states import Signal, State, Tag

pytest_plugins = ["fastdeploy_fixtures"]


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
    with fw.Publisher(trainer, address, keep="memory") as publisher:
        publisher.publish(1)
        manager = open_manager(config(tmp_path, "ipc", address=address), target)
        runner = Runner(manager)

        def asked():
            cell.ask(UPDATING)
            DynamicWeightManager.check_model_weights_status(cell, None, runner, pid, False)

        with little_time(manager), pytest.raises(TransferTimeout, match="version"):
            asked()
        assert (cell.status, manager.version, manager.health) == (CLEARED, 1, "paused")
        trainer.set_state_dict(Net(2).state_dict())
        publisher.publish(2)
        asked()
        assert (cell.status, manager.version, manager.health) == (NORMAL, 2, "serving")
        assert holds(target, 2)
    with little_time(manager), pytest.raises(PeerLost, match="publisher"):
        asked()
    assert (cell.status, manager.version, manager.health) == (CLEARED, 2, "paused")


def test_an_update_that_waits_is_normal_once_the_version_is_there(
    address, tmp_path, open_manager, cell, pid, threads
):
    trainer, target = Net(1), Net()
    with fw.Publisher(trainer, address, keep="memory") as publisher:
        publisher.publish(1)
        manager = open_manager(config(tmp_path, "ipc", address=address), target)
        cell.ask(UPDATING)
        check = DynamicWeightManager.check_model_weights_status
        updating = threads.submit(check, cell, None, Runner(manager), pid, False)
        until(lambda: manager.health == "paused")
        assert cell.status is UPDATING
        trainer.set_state_dict(Net(2).state_dict())
        publisher.publish(2)
        updating.result(LIMIT)
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
            operation = control.start(signal, timeout_seconds=LIMIT, **options)
            until(lambda: word.value[0] in (UPDATING, CLEARING))
            DynamicWeightManager.check_model_weights_status(given, cache, runner, pid, False)
            return control.wait(operation, LIMIT)

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
        operation = control.start(Signal.UPDATE, timeout_seconds=LIMIT)
        until(lambda: word.value[0] == UPDATING)
        with pytest.raises(ShapeMismatch):
            DynamicWeightManager.check_model_weights_status(given, cache, runner, pid, False)
        ended = control.wait(operation, LIMIT)
        assert (ended.ending, ended.error) == ("failed", "ShapeMismatch")
        assert (word.value[0], manager.version) == (NORMAL, 3)

        runner.clear_requests = lambda: 1 / 0
        operation = control.start(Signal.UPDATE, version=2, timeout_seconds=LIMIT)
        until(lambda: word.value[0] == UPDATING)
        with pytest.raises(ZeroDivisionError):
            DynamicWeightManager.check_model_weights_status(given, cache, runner, pid, False)
        ended = control.wait(operation, LIMIT)
        assert (ended.ending, "ZeroDivisionError" in ended.reason) == ("failed", True)
        assert (word.value[0], manager.version, holds(target, 3)) == (NORMAL, 3, True)

        ended = control.wait(control.start(Signal.UPDATE, timeout_seconds=0.2), LIMIT)
        assert ended.error == "TransferTimeout"  # no loop came
        assert "UPDATE" in ended.reason
        assert word.value[0] == NORMAL


def test_a_blocked_worker_loop_stays_until_our_cell_has_brought_weights(
    tmp_path, open_manager, pid, threads
):
    """C22: block, with our cell."""
    fw.save(Net(1), tmp_path, version=1)
    manager = open_manager(config(tmp_path, cell=tmp_path / "cell"), Net())
    word, runner = manager.model_weights_status, Runner(manager)
    with Control(tmp_path / "cell") as control:
        operation = control.start(Signal.CLEAR, tags=(Tag.WEIGHTS,), timeout_seconds=LIMIT)
        until(lambda: word.value[0] == CLEARING)
        loop = threads.submit(
            DynamicWeightManager.check_model_weights_status, word, None, runner, pid, True
        )
        assert control.wait(operation, LIMIT).ending == "done"
        assert not loop.done()
        assert asked(control, Signal.UPDATE).ending == "done"
        loop.result(LIMIT)
    assert (manager.health, runner.num_cleared) == ("serving", 2)


def test_the_same_request_again_right_after_the_first_is_carried_out(
    tmp_path, open_manager, pid, threads
):
    """C22, C23: a request of our cell ends when the runner returns, not while it still works."""
    fw.save(Net(1), tmp_path, version=1)
    manager = open_manager(config(tmp_path, cell=tmp_path / "cell"), Net())
    word, runner = manager.model_weights_status, Runner(manager)
    runner.dynamic_weight_manager.clear_parameters = lambda *options: (
        DynamicWeightManager.clear_parameters(manager, *options),
        # What the runner does after its manager has cleared. An operation that ends too early ends
        # meanwhile; a machine on which it needs longer does not show it.
        time.sleep(0.1),
    )
    with Control(tmp_path / "cell") as control:
        operation = control.start(Signal.CLEAR, tags=(Tag.WEIGHTS,), timeout_seconds=LIMIT)
        until(lambda: word.value[0] == CLEARING)
        loop = threads.submit(
            DynamicWeightManager.check_model_weights_status, word, None, runner, pid, True
        )
        assert control.wait(operation, LIMIT).ending == "done"
        assert asked(control, Signal.CLEAR, tags=(Tag.WEIGHTS,)).ending == "done"
        assert asked(control, Signal.UPDATE).ending == "done"
        loop.result(LIMIT)
    assert (manager.health, runner.num_cleared) == ("serving", 3)


def test_a_runner_that_returns_without_an_update_has_failed(tmp_path, open_manager, pid):
    """C24: both the requester and the loop's caller hear of it."""
    fw.save(Net(1), tmp_path, version=1)
    manager = open_manager(config(tmp_path, cell=tmp_path / "cell"), Net())
    word, runner = manager.model_weights_status, Runner(manager)
    runner.clear_parameters = lambda pid: None
    with Control(tmp_path / "cell") as control:
        operation = control.start(Signal.CLEAR, timeout_seconds=LIMIT)
        until(lambda: word.value[0] == CLEARING)
        with pytest.raises(LifecycleError, match="CLEARING"):
            DynamicWeightManager.check_model_weights_status(word, None, runner, pid, False)
        ended = control.wait(operation, LIMIT)
    assert (ended.ending, ended.error, word.value[0]) == ("failed", "LifecycleError", NORMAL)


def test_a_manager_without_a_cell_of_ours_has_no_word_of_it(tmp_path, open_manager):
    fw.save(Net(1), tmp_path, version=1)
    manager = open_manager(config(tmp_path), Net())
    with pytest.raises(SpecError, match="cell"):
        manager.model_weights_status
    with (
        Cell(tmp_path / "cell") as cell,
        pytest.raises(SpecError, match="model_weights_status"),
    ):
        DynamicWeightManager.check_model_weights_status(cell, None, object(), 1, False)


def test_a_late_clear_does_not_replace_a_request_to_update(
    tmp_path, open_manager, cell, pid
):  # C23
    fw.save(Net(1), tmp_path, version=1)
    hooks = Hooks()
    manager = open_manager(config(tmp_path), Net(), hooks=hooks)
    hooks.note = lambda name: cell.ask(UPDATING)  # the server asks while memory goes
    cell.ask(CLEARING)
    manager.clear_parameters(pid)
    assert cell.status is UPDATING


def test_a_pid_without_a_cell_is_an_error_before_anything_is_done(tmp_path, open_manager, pid):
    fw.save(Net(1), tmp_path, version=1)
    manager = open_manager(config(tmp_path), Net())
    with pytest.raises(StoreError, match=f"model_weights_status.{pid}"):
        manager.clear_parameters(pid)
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
            control.start(Signal.CLEAR, tags=(Tag.WEIGHTS,), timeout_seconds=LIMIT), LIMIT
        )
        assert ended.ending == "failed"
        assert "worker loop" in ended.reason
        assert control.status().state == State.SERVING
        hooks.pause = lambda deadline: None
        assert (
            control.wait(
                control.start(Signal.CLEAR, tags=(Tag.WEIGHTS,), timeout_seconds=LIMIT), LIMIT
            ).ending
            == "done"
        )
        assert (manager.health, control.status().version) == ("cleared", None)
        fw.save(Net(2, size=9), tmp_path, version=2)
        with pytest.raises(ShapeMismatch):
            manager.update_parameters()
        assert control.status().state == State.FAILED
        assert "(4, 9)" in control.status().reason
        fw.save(Net(3), tmp_path, version=3)
        manager.update_parameters()
        manager.finalize_update()
        assert (control.status().version, holds(target, 3)) == (3, True)
