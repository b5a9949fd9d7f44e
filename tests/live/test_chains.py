"""Engines on several hosts: each takes a version from the one before it, as the bytes arrive."""

import os
import signal

import numpy as np
import pytest

from child_processes import LIMIT
from live.live_processes import LARGE, check_holds

NBYTES = 4 * sum(int(np.prod(shape)) for shape in LARGE.values())


def chain(processes, num_engines, *, first=None, **options):
    """Return a trainer and engines that wait for a version, each on a host of its own, in order."""
    trainer = processes.trainer(shapes=LARGE)
    address = trainer.told()
    engines = []
    for number in range(num_engines):
        own = {"name": f"engine {number}", "host": f"host {number}", "shapes": LARGE}
        own |= options | (first or {} if number == 0 else {})
        engines.append(processes.engine(address, **own))
        engines[-1].told()
    return trainer, engines


def published(trainer, engines, version, num_replicas, **stops):
    """Publish a version to engines that all wait for it."""
    for number, engine in enumerate(engines):
        options = {"version": version, "timeout_seconds": LIMIT}
        if number in stops.get("stopped", ()):
            options["stop_at"] = "range 3"
        engine.send(("update", options))
        trainer.send(("await", number + 1))  # so that they are a chain in this order
        assert trainer.told() == "waiting"
    options = {"num_replicas": num_replicas, "timeout_seconds": LIMIT}
    trainer.send(("publish", version, options))


def test_a_trainer_sends_one_model_to_a_chain_of_engines(processes):
    trainer, engines = chain(processes, 5)
    for version in (1, 2):
        published(trainer, engines, version, 5)
        for each in engines:
            found = each.told()
            check_holds(found, version)
            assert found["report"].transport == "read"
        assert not trainer.told().failed
        trainer.send(("sent bytes",))
        assert trainer.told() <= 1.1 * version * NBYTES


@pytest.mark.parametrize("lost", [(0,), (1,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_get_everything_when_neighbours_are_lost(processes, lost, how):
    trainer, engines = chain(processes, 4, stall_seconds=1.0)
    published(trainer, engines, 1, 4 - len(lost), stopped=lost)
    for number in reversed(lost):  # each waits for the one before it
        assert engines[number].told() == "range 3"
    for number in lost:
        os.kill(engines[number].pid, how)
    for number in set(range(4)) - set(lost):
        check_holds(engines[number].told(), 1)
    if how == signal.SIGSTOP:
        for number in lost:
            engines[number].kill()
    trainer.told()


def test_wrong_bytes_of_a_neighbour_are_fetched_from_the_trainer_again(processes):
    trainer, engines = chain(processes, 3, first={"is_spoiled": True})
    published(trainer, engines, 1, 3)
    for each in engines:
        check_holds(each.told(), 1)
    report = trainer.told()
    assert not report.failed
    trainer.send(("sent bytes",))
    assert trainer.told() >= 2 * NBYTES
