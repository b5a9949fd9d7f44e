"""A thousand rounds with faults at random: every replica ends whole, and nothing has leaked."""

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import flyweight as fw
from campaign import SEED
from child_processes import LIMIT, Child, resources, settled, shared_files, until
from versioned_models import assign, holds, weights

NUM_ROUNDS = 1000


def engine(address, number, pipe):
    """Follow until the last version, through publishers that come and go."""
    model = weights(50 + number)
    with fw.Replica(model, address, name=f"engine {number}") as replica:
        last = -1
        while last < NUM_ROUNDS:
            try:
                report = replica.update(timeout_seconds=LIMIT)
            except fw.FlyweightError:
                if replica.version is not None and not holds(model, replica.version):
                    return f"holds something else than version {replica.version}"
                continue
            last = report.version
            if not holds(model, last):
                return f"holds something else than version {last}"
        return "whole"


def trainer(address, options, first, pipe):
    """Publish from a version on; tell of each, so that whoever kills us knows how far we came."""
    model = weights(1)
    # An engine may be stopped in a round: it goes on when that is over.
    with fw.Publisher(model, address, timeout_seconds=5, **options) as publisher:
        for version in range(first, NUM_ROUNDS + 1):
            assign(model, version)
            publisher.publish(version)
            pipe.send(("published", version))
            if version == first + 1:  # with the engines, or some of them, or none
                before = resources()
            if version < first + 3:
                time.sleep(0.02)
        pipe.recv()  # the last version stays until everybody has it, and has gone
        until(lambda: not publisher.replicas)
        until(lambda: len(resources()["files"]) <= len(before["files"]))
        return before, resources()


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_a_thousand_rounds_with_faults_leave_everybody_whole_and_nothing_behind(tmp_path):
    chance = random.Random(SEED)
    address = f"unix:{tmp_path}/policy"
    before = resources()
    shm = shared_files()
    faults = {"engine killed": 0, "engine stopped": 0, "trainer killed": 0}
    options = {"hold": True, "bucket_bytes": 16384}
    engines = {number: Child(engine, address, number) for number in range(3)}
    running = Child(trainer, address, options, 1)
    version, stopped = 0, None
    try:
        while version < NUM_ROUNDS:
            kind, value = running.told()
            if kind != "published":
                assert kind == "result", value
                break
            version = value
            if stopped is not None:
                engines[stopped].kill(signal.SIGCONT)
                stopped = None
            if version >= NUM_ROUNDS - 5 or chance.random() > 0.05:
                continue
            fault = chance.choice(list(faults))
            faults[fault] += 1
            number = chance.randrange(3)
            if fault == "engine killed":
                engines[number].kill()
                engines[number].__exit__()
                engines[number] = Child(engine, address, number)
            elif fault == "engine stopped":
                engines[number].stop()
                stopped = number
            else:
                running.kill()
                running.__exit__()
                running = Child(trainer, address, options, version + 1)
        results = {number: each.result(LIMIT) for number, each in engines.items()}
        assert results == dict.fromkeys(range(3), "whole")
        running.send("all have it")
        early, late = running.result(LIMIT)
        assert len(late["threads"]) <= len(early["threads"])
        assert len(late["files"]) <= len(early["files"])
        assert late["mapped"] <= early["mapped"]
        assert min(faults.values()) >= 5, faults
    finally:
        for each in (*engines.values(), running):
            each.__exit__()
    assert shared_files() == shm
    assert settled(before) == before


def quiet_resources():
    """Return what this process uses, once that does not change any more."""
    before, found = None, resources()
    while before != found:
        time.sleep(0.2)
        before, found = found, resources()
    return found


@pytest.mark.check
def test_two_hundred_rounds_in_one_process_grow_nothing(tmp_path):
    model, target = weights(1), weights(2)
    address = f"unix:{tmp_path}/policy"
    with (
        fw.Publisher(model, address, bucket_bytes=32768) as publisher,
        fw.Replica(target, address) as replica,
        ThreadPoolExecutor(1) as pool,
    ):
        for version in range(200):
            future = pool.submit(replica.update, timeout_seconds=LIMIT)
            publisher.publish(version, num_replicas=1)
            future.result(LIMIT)
            if version == 10:
                before = quiet_resources()
        assert settled(before) == before
