"""One trainer and its engines, each in a process of its own."""

import os
import signal

import numpy as np
import pytest

from child_processes import LIMIT
from live.live_processes import (
    LARGE,
    SHAPES,
    check_holds,
    check_next_update,
    shared,
)

NBYTES = 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())
WAYS = {
    "mapped": {"make": shared},
    "mapped copy": {"keep": "memory"},
    "filled": {},
    "read": {},
    "read copy": {"keep": "memory"},
}


def way_of(name):
    """Return the options of a trainer, and how an engine should get its bytes."""
    transport = name.split()[0]
    return WAYS[name], transport


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_engines_take_every_version_and_both_reports_say_how(processes, way, verify):
    options, transport = way_of(way)
    asked = transport if transport == "read" else "auto"
    trainer, engine = processes.pair(transport=asked, verify=verify, **options)
    for version in (1, 2, 3):
        engine.send(("update", {"version": version}))
        trainer.send(("publish", version, {"num_replicas": 1, "timeout_seconds": LIMIT}))
        found, report = engine.told(), trainer.told()
        check_holds(found, version)
        assert found["report"].transport == transport
        assert found["report"].verified == ("live" if verify else "nothing")
        assert found["report"].nbytes == NBYTES
        assert found["report"].parent == (None if version == 1 else version - 1)
        assert report.nbytes == NBYTES
        assert [(each.name, each.transport) for each in report.replicas] == [("engine", transport)]
        assert not report.failed
        assert not report.pending


@pytest.mark.parametrize("asked", ["mapped", "filled", "read"])
def test_a_transport_that_is_asked_for_is_taken_or_refused(processes, asked):
    trainer, engine = processes.pair(transport=asked, keep="in_place")  # cannot be mapped
    trainer.send(("publish", 1, {}))
    trainer.told()
    engine.send(("update", {}))
    found = engine.told()
    if asked == "mapped":
        assert "cannot be mapped here, and transport='mapped' was asked for" in found["error"]
        assert found["state"] == "EMPTY"
    else:
        check_holds(found, 1)
        assert found["report"].transport == asked


@pytest.mark.parametrize("transport", ["filled", "read"])
def test_what_is_not_mapped_is_here_and_verified_before_the_pause(processes, transport):
    trainer, engine = processes.pair(transport=transport)
    engine.send(("update", {"stop_at": "before"}))
    trainer.send(("publish in the background", 1, {"num_replicas": 1, "timeout_seconds": LIMIT}))
    assert engine.told() == "before"
    trainer.kill()  # the engine needs it no more
    trainer.join()
    engine.send("go on")
    check_holds(engine.told(), 1)


@pytest.mark.parametrize("transport", ["filled", "read"])
def test_the_trainer_goes_on_while_an_engine_drains_and_reports_it_as_pending(processes, transport):
    trainer, engine = processes.pair(transport=transport)
    engine.send(("update", {"stop_at": "before"}))
    trainer.send(("publish", 1, {"waiting": 1, "timeout_seconds": LIMIT}))
    assert engine.told() == "before"
    report = trainer.told()  # while the engine drains
    assert report.pending == ("engine",)
    assert not report.replicas
    trainer.send(("train", 7))
    trainer.told()
    engine.send("go on")
    check_holds(engine.told(), 1)
    check_next_update([trainer], [engine], 2)


def test_the_trainer_sends_one_model_and_readers_serve_each_other(processes):
    trainer = processes.trainer(keep="memory", shapes=LARGE)
    address = trainer.told()
    engines = [
        processes.engine(address, name=f"engine {n}", transport="read", shapes=LARGE)
        for n in range(3)
    ]
    for each in engines:
        each.told()
        each.send(("update", {"timeout_seconds": LIMIT}))
    trainer.send(("publish", 1, {"num_replicas": 3, "timeout_seconds": LIMIT}))
    for each in engines:
        check_holds(each.told(), 1)
    assert len(trainer.told().replicas) == 3
    trainer.send(("sent bytes",))
    models = trainer.told() / (64 << 20)
    assert 1 <= models < 1.2, f"the trainer sent {models} models"


def parent_at(processes, point, **options):
    """Return a trainer, and an engine that others fetch from and that waits at a range.

    It has all ranges before that one.
    """
    trainer = processes.trainer(keep="memory", shapes=LARGE)
    address = trainer.told()
    options = {"transport": "read", "shapes": LARGE, "num_connections": 1, **options}
    parent = processes.engine(address, name="parent", **options)
    parent.told()
    parent.send(("update", {"timeout_seconds": LIMIT, "stop_at": point}))
    trainer.send(("publish", 1, {"timeout_seconds": LIMIT}))
    trainer.told()
    assert parent.told() == point
    return trainer, parent, address


def test_a_parent_that_is_killed_in_the_middle_costs_the_others_nothing(processes):
    trainer, parent, address = parent_at(processes, "range 5")  # it has a third of the model
    others = [
        processes.engine(address, name=f"engine {n}", transport="read", shapes=LARGE)
        for n in range(2)
    ]
    for each in others:
        each.told()
        each.send(("update", {"timeout_seconds": LIMIT, "stop_at": "range 2"}))
    for each in others:  # they fetch from the parent, whatever their order
        assert each.told() == "range 2"
    parent.kill()
    for each in others:
        each.send("go on")
    for each in others:
        check_holds(each.told(), 1)
    check_next_update([trainer], others, 2)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_parent_that_makes_no_progress_is_left(processes, is_stopped):
    """FAULTS 13: a parent that answers `Later` for ever, and one that answers nothing."""
    trainer, parent, address = parent_at(processes, "range 5")
    if is_stopped:
        parent.stop()
    child = processes.engine(
        address, name="child", transport="read", shapes=LARGE, stall_seconds=0.5
    )
    child.told()
    child.send(("update", {"timeout_seconds": LIMIT}))
    check_holds(child.told(), 1)
    if is_stopped:
        parent.go_on()
    parent.send("go on")
    check_holds(parent.told(), 1)
    check_next_update([trainer], [parent, child], 2)


def test_a_late_engine_takes_the_version_from_another_ones_staging(processes):
    trainer = processes.trainer(keep="in_place")
    address = trainer.told()
    first = processes.engine(address, name="first", transport="read")
    first.told()
    trainer.send(("publish", 1, {}))
    trainer.told()
    first.send(("update", {}))
    check_holds(first.told(), 1)
    trainer.send(("withdraw",))
    trainer.told()
    trainer.send(("train", 2))  # nothing is offered any more: the trainer's memory has changed
    trainer.told()
    trainer.send(("sent bytes",))
    before = trainer.told()
    late = processes.engine(address, name="late", transport="read")
    late.told()
    late.send(("update", {}))
    check_holds(late.told(), 1)
    trainer.send(("sent bytes",))
    assert trainer.told() == before
    check_next_update([trainer], [first, late], 3)


@pytest.mark.parametrize(
    ("way", "stop_at"), [("mapped", "copy"), ("filled", "leased"), ("read", "leased")]
)
def test_a_step_of_the_trainer_between_digest_and_copy_is_noticed(processes, way, stop_at):
    options, transport = way_of(way)
    trainer, engine = processes.pair(transport=transport, **options)
    check_next_update([trainer], [engine], 1)
    engine.send(("update", {"timeout_seconds": LIMIT, "stop_at": stop_at}))
    trainer.send(("publish in the background", 2, {"waiting": 1, "timeout_seconds": LIMIT}))
    assert engine.told() == stop_at
    trainer.send(("train", 3))
    assert trainer.told() == "trained"
    engine.send("go on")
    found = engine.told()
    assert "DigestMismatch" in found["error"]
    assert "tensors are not what was published" in found["error"]
    if transport == "mapped":
        assert "where they were written" in found["error"]
        assert (found["version"], found["state"]) == (None, "FAILED")
    else:  # nothing was written
        assert "as they arrived" in found["error"]
        check_holds(found, 1)
    trainer.send(("end of publish",))
    assert trainer.told() == "ended"
    check_next_update([trainer], [engine], 4)


@pytest.mark.parametrize(
    ("way", "stop_at"), [("mapped", "copy"), ("filled", "leased"), ("read", "leased")]
)
def test_without_digests_a_trainer_that_died_proves_nothing(processes, way, stop_at):
    """FAULTS 4: the end of a stream without `Ended` is no proof that its memory is still."""
    options, transport = way_of(way)
    trainer, engine = processes.pair(transport=transport, verify=False, **options)
    check_next_update([trainer], [engine], 1)
    engine.send(("update", {"timeout_seconds": LIMIT, "stop_at": stop_at}))
    trainer.send(("publish in the background", 2, {"num_replicas": 1, "timeout_seconds": LIMIT}))
    assert engine.told() == stop_at
    trainer.kill()
    trainer.join()
    engine.send("go on")
    found = engine.told()
    assert "PeerLost" in found["error"]
    if transport == "mapped":
        assert (found["version"], found["state"]) == (None, "FAILED")
    else:
        check_holds(found, 1)


@pytest.mark.parametrize("way", ["mapped", "filled", "read"])
def test_a_killed_trainer_is_noticed_though_a_process_that_it_forked_lives(processes, way):
    """FAULTS 23: forked children kept sockets."""
    options, transport = way_of(way)
    trainer, engine = processes.pair(transport=transport, **options)
    check_next_update([trainer], [engine], 1)
    trainer.send(("fork",))
    forked = trainer.told()
    try:
        engine.send(("update", {"timeout_seconds": 600, "stop_at": "found"}))
        trainer.send(("publish in the background", 2, {"waiting": 1}))
        assert engine.told() == "found"
        trainer.kill()
        engine.send("go on")
        assert "PeerLost" in engine.told()["error"]
    finally:
        os.kill(forked, signal.SIGKILL)


@pytest.mark.parametrize("way", ["mapped", "filled", "read"])
def test_an_engine_goes_on_with_a_trainer_that_was_started_again(processes, way):
    options, transport = way_of(way)
    trainer = processes.trainer(**options)
    address = trainer.told()
    engine = processes.engine(address, name="engine", transport=transport)
    engine.told()
    check_next_update([trainer], [engine], 5)
    engine.send(("update", {"timeout_seconds": LIMIT, "stop_at": "found"}))
    trainer.send(("publish in the background", 6, {"waiting": 1}))
    assert engine.told() == "found"
    trainer.kill()
    trainer.join()
    engine.send("go on")
    found = engine.told()
    assert "PeerLost" in found["error"]
    check_holds(found, 5)
    again = processes.trainer(address, **options)
    again.told()
    check_next_update([again], [engine], 5)  # its numbers start over
