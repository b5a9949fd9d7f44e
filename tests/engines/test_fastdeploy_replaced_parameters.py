"""Parameters that are replaced are not served before an update has filled them (C17)."""

import threading

import pytest
from fastdeploy_nets import FROM_BOTH, Net, asked, config, holds, still_hooks

import flyweight as fw
from child_processes import LIMIT
from flyweight.errors import (
    LifecycleError,
    SnapshotNotFound,
)
from flyweight.events import listening
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.states import Signal, State

pytest_plugins = ["fastdeploy_fixtures"]


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
    with fw.Publisher(Net(2), address, keep="memory") as publisher:
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
            assert may_end.wait(LIMIT)

    with Control(tmp_path / "cell") as control, listening(wait):
        operation = control.start(Signal.UPDATE, timeout_seconds=LIMIT)
        assert is_reading.wait(LIMIT)
        threading.Timer(0.3, may_end.set).start()  # when the old call has looked, and waits
        manager.finalize_update()
        assert control.wait(operation, LIMIT).ending == "done"
    assert (manager.version, manager.health, holds(target, 2)) == (2, "serving", True)
