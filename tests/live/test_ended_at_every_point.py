"""Whoever is killed or stopped, at any point: no mix of versions, no hang, and the next one works."""

import signal
from itertools import product

import pytest

from child_processes import LIMIT
from flyweight.errors import FlyweightError
from live.live_processes import check_next_update, free_address, plain, shared

OF_THE_TRAINER = [
    "announcing", "serving", "leasing", "fill", "filled", "reclaiming", "withdrawn", "copying",
]  # fmt: skip
OF_AN_ENGINE = ["asking", "found", "leased", "range", "before", "copy", "copied"]
KEEPS = [None, "in_place", "memory"]
WAYS = ["mapped", "filled", "read"]
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def is_reached(point, transport, keep):
    """True if somebody comes to a point by this way of the bytes; a copy is always mapped."""
    is_filled = transport == "filled" and keep != "memory"
    return {
        "fill": is_filled,
        "filled": is_filled,
        "copying": is_filled or keep == "memory",
        "range": transport != "mapped",
    }.get(point, True)


def cases(points, keeps):
    """Return every point with every way: the kills of the simplest trainer for each change."""
    return [
        pytest.param(
            point, keep, way, SIGNALS[how],
            marks=pytest.mark.check if how == "killed" and keep is None else pytest.mark.campaign,
            id=f"{point}-{keep}-{way}-{how}",
        )
        for point, keep, way, how in product(points, keeps, WAYS, SIGNALS)
        if is_reached(point, way, keep)
    ]  # fmt: skip


def check_whole(found, transport, versions):
    """Check what an engine holds: a whole version, or none if it was written to in the pause."""
    if found["version"] is None:
        assert found["state"] == "FAILED" or found["version"] in versions
        assert transport == "mapped", found
        assert found["error"]
    else:
        assert found["is_complete"], found
        assert found["version"] in versions
        assert (found["error"] is None) == (found["version"] == max(versions))


def end(process, how):
    process.kill() if how == signal.SIGKILL else process.stop()


@pytest.mark.parametrize(("point", "keep", "transport", "how"), cases(OF_THE_TRAINER, KEEPS))
def test_a_trainer_leaves_an_engine_with_a_whole_version_or_none(
    processes, point, keep, transport, how
):
    address, make = free_address(), shared if transport == "mapped" else plain
    trainer = processes.trainer(address, keep=keep, make=make)
    trainer.told()
    engine = processes.engine(address, name="engine", transport=transport)
    engine.told()
    check_next_update([trainer], [engine], 1)
    engine.send(("update", {"version": 2, "timeout_seconds": 5}))
    options = {"waiting": 1, "num_replicas": 1, "timeout_seconds": 5}
    trainer.send(("publish", 2, {"stop_at": point, **options}))
    assert trainer.told() == point
    end(trainer, how)
    if how == signal.SIGSTOP:
        found = engine.told()
        trainer.go_on()
        trainer.send("go on")
        assert trainer.told() is not None
    else:
        trainer.join()
        found = engine.told()
        trainer = processes.trainer(address, keep=keep, make=make)
        trainer.told()
    check_whole(found, transport, {1, 2})
    check_next_update([trainer], [engine], 3)


@pytest.mark.parametrize(
    ("point", "keep", "transport", "how"), cases(OF_AN_ENGINE, [None, "memory"])
)
def test_an_engine_costs_the_trainer_and_other_engines_nothing(
    processes, point, keep, transport, how
):
    make = shared if transport == "mapped" else plain
    trainer = processes.trainer(keep=keep, make=make)
    address = trainer.told()

    def start(name):
        found = processes.engine(address, name=name, transport=transport, stall_seconds=0.5)
        found.told()
        return found

    victim, other = start("victim"), start("other")
    check_next_update([trainer], [victim, other], 1)
    victim.send(("update", {"version": 2, "timeout_seconds": 5, "stop_at": point}))
    if point == "asking":
        assert victim.told() == point
    other.send(("update", {"version": 2, "timeout_seconds": LIMIT}))
    waiting = 1 if point == "asking" else 2
    options = {"waiting": waiting, "num_replicas": 1, "timeout_seconds": 5}
    trainer.send(("publish", 2, options))
    if point != "asking":
        assert victim.told() == point
    end(victim, how)
    found = other.told()
    assert (found["version"], found["is_complete"]) == (2, True), found
    assert not isinstance(trainer.told(), FlyweightError)
    if how == signal.SIGSTOP:
        victim.send("go on")
        victim.go_on()
        check_whole(victim.told(), transport, {1, 2})
    else:
        victim.join()
        victim = start("victim")
    check_next_update([trainer], [victim, other], 3)
