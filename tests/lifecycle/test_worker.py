"""Workers and controllers of real processes: asked, killed, restarted, and told the truth of."""

import os
import signal as signals
import threading

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child, in_time, until
from conftest import flip
from flyweight.errors import Busy, LifecycleError, PeerLost, SpecError, TransferTimeout
from flyweight.events import listening
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.replica_status import ABSENT
from flyweight.lifecycle.states import Signal, State, Tag
from versioned_models import assign, holds, weights


@pytest.fixture
def cell(tmp_path):
    return tmp_path / "run" / "engine.cell"


def engine(address, cell, store, pipe):
    """Serve until told to end: hold a request open, let it go, say what is held."""
    model = weights(0)
    plain = fw.ModelEngine(model)
    replica = fw.Replica(model, address, fallback=[] if store is None else [store])
    is_free, is_held = threading.Event(), threading.Event()

    def request():
        with plain.request():
            is_held.set()
            is_free.wait(LIMIT)

    with replica, fw.Worker(plain, replica, cell):
        pipe.send("ready")
        while (command := pipe.recv()) != "end":
            if command == "hold":
                is_free.clear()
                is_held.clear()
                threading.Thread(target=request, daemon=True).start()
                pipe.send(is_held.wait(LIMIT))
            elif command == "free":
                is_free.set()
            else:
                with plain.request(LIMIT if command == "version" else 0.2) as version:
                    pipe.send((version, holds(model, version)))


@pytest.fixture
def start(address, cell):
    children = []

    def started(store=None):
        child = Child(engine, address, cell, store)
        children.append(child)
        assert child.told() == "ready"
        return child

    yield started
    for child in children:
        child.__exit__()


@pytest.fixture
def publisher(address):
    model = weights(1)
    with fw.Publisher(model, address, keep="memory") as publisher:
        yield publisher, model


def publish(publisher, version):
    publisher, model = publisher
    assign(model, version)
    return publisher.publish(version, num_replicas=1, timeout_seconds=LIMIT)


def serves(control, version):
    status = control.status()
    return status.is_serving and status.version == version


def ended(control, signal, **options):
    operation = control.start(signal, **{"timeout_seconds": LIMIT, **options})
    return control.wait(operation, 2 * LIMIT)


def served(child):
    child.send("version")
    return child.told()


def test_a_worker_follows_its_trainer_and_does_what_is_asked(start, publisher, cell):
    """C15, C16, C32: tags one by one; serving resumes once weights and cache are both there."""
    with Control(cell) as control:
        assert control.status().state == ABSENT
        with pytest.raises(PeerLost, match="started"):
            control.start(Signal.PAUSE)
        child = start()
        assert control.status().state == State.CLEARED
        publish(publisher, 1)
        until(lambda: serves(control, 1))
        assert served(child) == (1, True)
        assert ended(control, Signal.PAUSE).ending == "done"
        publish(publisher, 2)  # taken over while paused, and not resumed: an operator paused it
        until(lambda: control.status().version == 2)
        assert control.status().state == State.PAUSED
        assert ended(control, Signal.RESUME).ending == "done"
        assert served(child) == (2, True)
        assert ended(control, Signal.CLEAR, tags=[Tag.WEIGHTS]).ending == "done"
        assert ended(control, Signal.CLEAR).ending == "done"
        assert set(control.status().ranks[0].absent) == {"weights", "kv_cache"}
        refused = ended(control, Signal.RESUME)
        assert refused.ending == "failed"
        assert "UPDATE" in refused.reason
        assert ended(control, Signal.RESTORE, tags=[Tag.KV_CACHE]).ending == "done"
        assert control.status().state == State.CLEARED
        assert ended(control, Signal.RESTORE).ending == "done"
        assert serves(control, 2)
        assert served(child) == (2, True)


@pytest.fixture
def patient(monkeypatch):
    """Let controllers hear a rank after the deadline, however slow the machine is."""
    monkeypatch.setattr("flyweight.lifecycle.control.ANSWER_SECONDS", LIMIT)


def test_an_update_is_refused_or_drains_as_asked(start, patient, publisher, cell):
    with Control(cell) as control:
        child = start()
        publish(publisher, 1)
        until(lambda: serves(control, 1))
        child.send("hold")
        assert child.told()
        publishing = threading.Thread(target=publish, args=(publisher, 2))
        publishing.start()
        until(lambda: control.status().state == State.PAUSING)
        operation = control.start(Signal.PAUSE, timeout_seconds=LIMIT)
        with pytest.raises(Busy, match=operation.id):
            control.start(Signal.CLEAR)
        child.send("free")
        publishing.join(LIMIT)
        assert control.wait(operation, LIMIT).ending == "done"
        until(lambda: control.status().version == 2)
        assert ended(control, Signal.RESUME).ending == "done"
        child.send("hold")
        assert child.told()
        refused = ended(control, Signal.PAUSE, timeout_seconds=0.2)
        assert (refused.ending, refused.error) == ("failed", "TransferTimeout")
        assert serves(control, 2)  # C32: a pause that did not come about is no pause


def test_a_killed_engine_is_told_of_at_once_and_its_successor_catches_up(start, publisher, cell):
    """C24, C25: the operation ends, the cell stays, and a stale request is not done again."""
    with Control(cell) as control:
        child = start()
        publish(publisher, 1)
        until(lambda: serves(control, 1))
        child.send("hold")
        assert child.told()
        operation = control.start(Signal.PAUSE, timeout_seconds=3 * LIMIT)
        child.kill()
        child.join()
        assert control.wait(operation, LIMIT).ending == "failed"
        assert operation.error == "PeerLost"
        assert f"process {child.pid} died" in operation.reason
        assert control.status().state == State.FAILED
        assert control.status().version is None
        second = start()
        until(lambda: serves(control, 1))  # and not paused: that was asked of another process
        assert served(second) == (1, True)
        publish(publisher, 2)
        until(lambda: serves(control, 2))


def controller(cell, pipe):
    control = Control(cell)
    operation = control.start(Signal.PAUSE, timeout_seconds=LIMIT)
    pipe.send(operation.id)
    pipe.recv()


def test_a_killed_controller_leaves_the_engine_as_it_is_and_another_takes_over(
    start, publisher, cell
):
    """C25: what an earlier controller asked for is known to the next, and finished."""
    child = start()
    publish(publisher, 1)
    child.send("hold")
    assert child.told()
    with Child(controller, cell) as first:
        number = first.told()
        with pytest.raises(LifecycleError, match="controller"):
            Control(cell)
        first.kill()
        first.join()
    with Control(cell) as control:
        assert control.status().state == State.PAUSING
        with pytest.raises(Busy, match=number):
            control.start(Signal.RESUME)
        child.send("free")
        until(lambda: control.status().operation is None)
        assert control.status().state == State.PAUSED
        assert ended(control, Signal.RESUME).ending == "done"
        assert served(child) == (1, True)


def trainer(address, pipe):
    model = weights(2)
    publisher = fw.Publisher(model, address)
    pipe.recv()
    publisher.publish(2, num_replicas=1, timeout_seconds=LIMIT)
    pipe.recv()


def test_a_trainer_killed_while_an_engine_drains_costs_it_nothing(start, address, cell, tmp_path):
    """The engine is still finishing a request with version 1 when the trainer of 2 dies."""
    fw.save(weights(1), tmp_path / "store", version=1)
    with Control(cell) as control:
        child = start(tmp_path / "store")
        until(lambda: serves(control, 1))
        child.send("hold")
        assert child.told()
        with Child(trainer, address) as training:
            training.send("go")
            until(lambda: control.status().state == State.PAUSING)
            training.kill()
            training.join()
        assert control.status().state == State.PAUSING
        child.send("free")
        until(lambda: serves(control, 2))  # all of it was here before the pause
        assert served(child) == (2, True)


def test_an_engine_without_a_trainer_takes_the_newest_snapshot(
    start, patient, publisher, cell, tmp_path
):
    """And then what the trainer publishes, once there is one again."""
    store = tmp_path / "store"
    for version in (1, 3):
        fw.save(weights(version), store, version=version)
    publisher[0].close()
    with Control(cell) as control:
        child = start(store)
        until(lambda: serves(control, 3))
        assert served(child) == (3, True)
        missing = ended(control, Signal.UPDATE, version=2, timeout_seconds=1)
        assert missing.ending == "failed"
        assert serves(control, 3)
        assert ended(control, Signal.UPDATE, version=1, timeout_seconds=LIMIT).ending == "done"
        assert served(child) == (1, True)


def test_a_cell_that_is_removed_stops_the_engine_that_nobody_could_stop(start, publisher, cell):
    child = start()
    with Control(cell) as control:
        publish(publisher, 1)
        until(lambda: serves(control, 1))
        os.unlink(cell)
        with pytest.raises(LifecycleError, match="removed"):
            control.start(Signal.PAUSE)
        until(lambda: control.status().state == State.FAILED)
        assert "was removed" in control.status().reason
        child.send("version now")
        kind, text = child.told()
        assert kind == "error"
        assert "accepted no requests" in text


def test_a_stopped_engine_does_not_hold_its_controller_for_ever(start, publisher, cell):
    child = start()
    with Control(cell) as control:
        publish(publisher, 1)
        until(lambda: serves(control, 1))
        child.stop()
        with in_time(0.5):
            operation = control.start(Signal.PAUSE, timeout_seconds=0.5)
            assert control.wait(operation, LIMIT).ending == "failed"
        assert operation.error == "TransferTimeout"
        assert f"process {child.pid}" in operation.reason
        with pytest.raises(Busy, match="pause-1"):
            control.check_idle()
        child.kill(signals.SIGCONT)
        until(lambda: control.cell.record(0).done == 1)
        assert serves(control, 1)  # what was told to have failed is not done afterwards
        control.check_idle()


def test_weights_of_a_dead_process_do_not_count_as_served(start, publisher, cell):
    child = start()
    with Control(cell) as control:
        publish(publisher, 1)
        until(lambda: serves(control, 1))
        child.kill()
        child.join()
        status = control.status()
        assert (status.state, status.version) == (State.FAILED, None)
        assert np.all([not rank.is_alive for rank in status.ranks])


def test_a_version_asked_for_by_its_number_stays_until_the_newest_is_asked_for(
    start, publisher, cell, tmp_path
):
    fw.save(weights(1), tmp_path / "store", version=1)
    with Control(cell) as control:
        child = start(tmp_path / "store")
        publish(publisher, 4)
        until(lambda: serves(control, 4))
        assert ended(control, Signal.UPDATE, version=1).ending == "done"
        assert control.status().ranks[0].pinned == 1
        assert publisher[0].publish(5, timeout_seconds=LIMIT).replicas == ()
        assert served(child) == (1, True)
        assert ended(control, Signal.UPDATE).ending == "done"
        assert served(child)[0] == 5
        assert control.status().ranks[0].pinned is None


def test_a_pin_and_a_pause_by_hand_outlive_the_process(start, publisher, cell, tmp_path):
    fw.save(weights(1), tmp_path / "store", version=1)
    with Control(cell) as control:
        child = start(tmp_path / "store")
        publish(publisher, 4)
        until(lambda: serves(control, 4))
        assert ended(control, Signal.UPDATE, version=1).ending == "done"
        assert ended(control, Signal.PAUSE).ending == "done"
        child.kill()
        child.join()
        start(tmp_path / "store")
        until(lambda: control.status().version == 1)
        assert control.status().state == State.PAUSED
        assert control.status().ranks[0].pinned == 1


def test_a_request_that_ranks_could_not_read_is_not_asked(start, publisher, cell):
    start()
    with Control(cell) as control:
        for options in ({"tags": ["x"]}, {"tags": "weights"}, {"may_drain": None}):
            with pytest.raises(SpecError):
                control.start(Signal.CLEAR, **options)
        with pytest.raises(SpecError):
            control.start("FOO")
        assert ended(control, Signal.PAUSE).ending == "done"


def test_a_damaged_request_does_not_outlive_a_restart(start, publisher, cell):
    child = start()
    with Control(cell) as control:
        publish(publisher, 1)
        until(lambda: serves(control, 1))
        assert ended(control, Signal.PAUSE).ending == "done"
        assert ended(control, Signal.RESUME).ending == "done"
        flip(cell, 64 + 8 + 40)  # the half that holds after two requests
        child.kill()
        child.join()
    with Control(cell) as control:
        start()
        until(lambda: serves(control, 1))
        assert ended(control, Signal.PAUSE).id == "pause-3"


def test_a_forked_child_leaves_its_parents_worker_alone(publisher, address, cell):
    model = weights(0)
    engine = fw.ModelEngine(model)
    with (
        fw.Replica(model, address) as replica,
        fw.Worker(engine, replica, cell) as worker,
        Control(cell) as control,
    ):
        publish(publisher, 1)
        until(lambda: serves(control, 1))
        with Child(lambda pipe: (worker.close(), control.close())) as child:
            child.result()
        assert serves(control, 1)
        assert ended(control, Signal.PAUSE).ending == "done"


def test_a_listener_that_raises_leaves_no_state_half_way(publisher, address, cell):
    def listener(event):
        if event.kind.startswith(("state.", "update.", "worker.", "operation.")):
            raise ValueError(event.kind)

    model = weights(0)
    engine = fw.ModelEngine(model)
    with (
        listening(listener),
        fw.Replica(model, address) as replica,
        fw.Worker(engine, replica, cell) as worker,
        Control(cell) as control,
    ):
        publish(publisher, 1)
        until(lambda: serves(control, 1))
        until(lambda: control.status().ranks[0].num_rounds == 1)  # counted after it serves
        assert ended(control, Signal.PAUSE).ending == "done"
        cell.unlink()
        until(lambda: worker.operations.state is State.FAILED)


def test_an_update_after_a_failure_waits_for_the_request_that_still_runs(publisher, address):
    """A request is never answered with two versions, whatever happened to the engine."""
    model = weights(0)
    engine = fw.ModelEngine(model)
    with fw.Replica(model, address) as replica:
        operations = Operations(engine, replica)
        publisher[0].publish(1)
        operations.update(timeout_seconds=LIMIT)
        with engine.request() as version:
            operations.retire(LifecycleError("lost"))
            assign(publisher[1], 2)
            publisher[0].publish(2)
            with pytest.raises(TransferTimeout):
                operations.update(timeout_seconds=0.5)
            assert holds(model, version)
        operations.update(timeout_seconds=LIMIT)
        operations.resume()
        with engine.request() as version:
            assert (version, holds(model, version)) == (2, True)
