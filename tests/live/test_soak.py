"""A thousand versions with faults at random: everybody ends whole, and nothing has leaked."""

import random
import signal
from contextlib import ExitStack

import pytest

from campaign import SEED
from child_processes import FORK, LIMIT, Child, resources, settled
from flyweight.errors import FlyweightError
from flyweight.live import Publisher, Replica
from live.live_processes import SHAPES, TOKEN, Part, free_address, plain, relay, shared

NUM_VERSIONS = 1000


def engine(address, number, transport, last, pipe):
    """Follow until the last version, through publishers that come and go."""
    part = Part(SHAPES)
    options = {"token": TOKEN, "name": f"engine {number}", "transport": transport}
    with Replica(part.model, address, **options) as replica:
        while replica.version != last:
            try:
                replica.update(timeout_seconds=5)
            except FlyweightError as error:
                if str(replica.state) == "FAILED" and transport in ("filled", "read"):
                    return f"has failed, by {transport}: {error}"
            if replica.version is not None and not part.is_complete(replica.version):
                return f"holds something else than version {replica.version}"
    return "whole"


def trainer(address, keep, make, first, last, pipe):
    """Publish from a version on, and tell of each."""
    part = Part(SHAPES, make)
    options = {"token": TOKEN, "keep": keep, "timeout_seconds": 2}
    with Publisher(part.model, address, **options) as publisher:
        for version in range(first, last + 1):
            publisher.withdraw()
            part.fill(version)
            publisher.publish(version, num_replicas=1 if version == last else 0)
            pipe.send(version)
            pipe.recv()  # the last version stays until everybody has it


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(60, marks=pytest.mark.check),
        pytest.param(NUM_VERSIONS, marks=[pytest.mark.campaign, pytest.mark.timeout(1800)]),
    ],
)
@pytest.mark.parametrize("keep", ["memory", "in_place"])
def test_many_versions_with_faults_leave_everybody_whole_and_nothing_behind(tmp_path, keep, last):
    chance, before = random.Random(SEED), resources()
    address, on = free_address(), f"unix:{tmp_path}/relay"
    make = shared if keep == "in_place" else plain
    ways = ["auto", "filled", "read", "read", "auto"]
    faults = {"engine killed": 0, "engine stopped": 0, "trainer killed": 0, "relay killed": 0}

    def start(number):
        at = on if number == len(ways) - 1 else address
        return Child(engine, at, number, ways[number], last, context=FORK)

    with ExitStack() as stack:
        engines = [start(number) for number in range(len(ways))]
        source = Child(trainer, address, keep, make, 1, last, context=FORK)
        relaying = Child(relay, address, on, context=FORK)
        stack.callback(lambda: [each.__exit__() for each in (*engines, source, relaying)])
        version, stopped = 0, None
        while version < last:
            said = source.told()
            assert isinstance(said, int), said
            version = said
            for each in engines:
                assert version == last or not each.has_told, each.told()
            if stopped is not None:
                engines[stopped].kill(signal.SIGCONT)
                stopped = None
            if version == last:
                break
            if version < last - 2 and chance.random() < 0.1:
                fault, number = chance.choice(list(faults)), chance.randrange(len(ways))
                faults[fault] += 1
                if fault == "engine killed":
                    engines[number].__exit__()
                    engines[number] = start(number)
                elif fault == "engine stopped":
                    engines[number].stop()
                    stopped = number
                elif fault == "relay killed":
                    relaying.__exit__()
                    relaying = Child(relay, address, on, context=FORK)
                else:
                    source.__exit__()
                    source = Child(trainer, address, keep, make, version + 1, last, context=FORK)
                    continue
            source.send("go on")
        for number, each in enumerate(engines):
            assert each.result(2 * LIMIT) == "whole", (number, ways[number])
        source.send("all have it")
        assert source.result() is None
    assert last < NUM_VERSIONS or min(faults.values()) >= 5, faults
    assert settled(before) == before
