"""A trainer that is killed at any time leaves a complete version, or a replica that has none."""

import random
import threading

import pytest

from campaign import SEED
from child_processes import FORK, LIMIT, Child
from flyweight.errors import FlyweightError
from flyweight.live import Publisher, Replica
from live.live_processes import TOKEN, Part, free_address, plain, shared

SHAPES = {f"layer.{n}": (512, 512) for n in range(8)}  # 8 MiB: an update takes milliseconds


def trainer(address, keep, make, version, pipe):
    part = Part(SHAPES, make)
    with Publisher(part.model, address, token=TOKEN, keep=keep) as publisher:
        part.fill(version)
        pipe.send("ready")
        publisher.publish(version, num_replicas=1, timeout_seconds=LIMIT)
        publisher.withdraw()
        while True:  # goes on to train, until it is killed
            version += 1000
            part.fill(version)


def engine(address, transport, pipe):
    part = Part(SHAPES)
    with Replica(part.model, address, token=TOKEN, transport=transport) as replica:
        while (seconds := pipe.recv()) is not None:
            error = None
            try:
                replica.update(timeout_seconds=seconds)
            except FlyweightError as found:
                error = str(found)
            version = replica.version
            is_complete = part.is_complete(version or 0)
            pipe.send((version, is_complete, error, replica.failure is not None))


@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
@pytest.mark.parametrize("keep", [None, "in_place", "memory"])
@pytest.mark.parametrize(
    "trials",
    [pytest.param(6, marks=pytest.mark.check), pytest.param(300, marks=pytest.mark.campaign)],
)
def test_a_trainer_killed_at_a_random_time(transport, keep, trials):
    address, chance, counts = free_address(), random.Random(SEED), {}
    make = shared if transport == "mapped" else plain
    with Child(engine, address, transport, context=FORK) as replica:
        held = None
        for trial in range(1, trials + 1):
            with Child(trainer, address, keep, make, trial, context=FORK) as source:
                source.told()
                replica.send(0.5 if trial > 1 else LIMIT)
                if trial > 1:  # the first one lives, so that there is an old version
                    threading.Event().wait(chance.uniform(0, 0.04))  # when to kill it
                    source.kill()
                version, is_complete, error, has_failed = replica.told()
                if version is None:
                    assert transport == "mapped", error  # else a complete version always stays
                    assert has_failed
                    assert error
                else:
                    assert is_complete, (version, error)
                    assert version == trial if error is None else version in (held, trial)
                outcome = "none" if version is None else "new" if version == trial else "old"
                counts[outcome] = counts.get(outcome, 0) + 1
                held = version
        with Child(trainer, address, keep, make, 999, context=FORK) as source:
            source.told()
            replica.send(LIMIT)
            version, is_complete, error, _ = replica.told()
            assert (version, is_complete) == (999, True), error
        replica.send(None)
    assert counts.get("new", 0) > 0, counts
