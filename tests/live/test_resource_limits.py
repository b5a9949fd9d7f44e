"""Files or memory run out: no process dies, none hangs, and each is told why."""

import mmap
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child, resources, until
from conftest import in_own_mounts
from flyweight.errors import (
    TransferTimeout,
    TransportError,
)
from live_rounds import SECONDS
from versioned_models import holds, weights


def fill_files(left, more):
    """Open files until so many are left, and more if the limit is raised; return them."""
    soft = max(map(int, os.listdir("/proc/self/fd"))) + 100 + left
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft + more))
    files = []
    with suppress(OSError):
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(left):
        os.close(files.pop())
    return files


def crowded_trainer(address, left, more, pipe):
    with fw.Publisher(weights(1), address, hold=True) as publisher:
        publisher.publish(1)
        files = fill_files(left, more)
        pipe.send(("full", None))
        pipe.recv()
        for each in files:
            os.close(each)
        pipe.send(("free", None))
        pipe.recv()


def timed_out(replica):
    """Return why no version came within a short time."""
    with pytest.raises(TransferTimeout) as raised:
        replica.update(timeout_seconds=SECONDS)
    return str(raised.value)


@pytest.mark.parametrize("left", [1, 2, 3, 20])
def test_a_trainer_without_files_turns_engines_away_and_lives(address, left):
    engine = weights(50)
    with Child(crowded_trainer, address, left, 0) as child:
        assert child.told() == ("full", None)
        with fw.Replica(engine, address) as replica:
            # An error tells of the last attempt, which may have been too short for an answer.
            until(lambda: "ulimit -n" in timed_out(replica))
            child.send("go on")
            assert child.told() == ("free", None)
            assert replica.update(timeout_seconds=LIMIT).version == 1
            assert holds(engine, 1)
        child.send("go on")
        child.result()


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_trainer_that_may_have_more_files_takes_them(address, left):
    engine = weights(50)
    with Child(crowded_trainer, address, left, 500) as child:
        assert child.told() == ("full", None)
        with fw.Replica(engine, address) as replica:
            assert replica.update(timeout_seconds=LIMIT).version == 1
        assert holds(engine, 1)


def crowded_engine(address, left, more, pipe):
    engine, told = weights(50), ""
    files = fill_files(left, more)
    try:
        fw.Replica(engine, address).close()
    except TransportError as error:
        told = str(error)
    for each in files:
        os.close(each)
    with fw.Replica(engine, address) as replica:
        replica.update(timeout_seconds=LIMIT)
    return told, holds(engine, 1)


@pytest.mark.parametrize("left", [1, 3, 4, 6, 9, 12])
def test_an_engine_without_files_is_told_so_and_lives(address, left):
    with fw.Publisher(weights(1), address, hold=True) as publisher:
        publisher.publish(1)
        with Child(crowded_engine, address, left, 0) as child:
            told, is_whole = child.result()
        assert "ulimit -n" in told
        assert is_whole
        with Child(crowded_engine, address, left, 500) as child:
            assert child.result() == ("", True)


def shared_array(number):
    """An array in shared memory, which costs this process a file."""
    file = os.memfd_create("test")
    os.ftruncate(file, 4096)
    array = np.frombuffer(mmap.mmap(file, 4096), np.uint8)
    os.close(file)
    array[:] = number
    return array


def many_shared(address, more, pipe):
    fill_files(300, more)
    model = {f"w{number}": shared_array(number) for number in range(200)}
    told = ""
    with fw.Publisher(model, address) as publisher:
        before = resources()["files"]
        try:
            publisher.publish(1, num_replicas=1)
        except TransportError as error:
            told = str(error)
            after = resources()["files"]
            assert after.count("/memfd") == before.count("/memfd")
    return told


@pytest.mark.parametrize("more", [0, 500])
def test_more_shared_tensors_than_files_are_refused_with_the_remedy(address, threads, more):
    engine = {f"w{number}": np.zeros(4096, np.uint8) for number in range(200)}
    with Child(many_shared, address, more) as child, fw.Replica(engine, address) as replica:
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        told = child.result()
        if more:
            assert told == ""
            assert future.result(LIMIT).strategy == "mapped"
            assert all((engine[f"w{number}"] == number).all() for number in range(200))
        else:
            assert "200 segments" in told
            assert "ulimit -n" in told
            assert "transport='host'" in told
            replica.close()
            with pytest.raises(fw.FlyweightError):
                future.result(LIMIT)


def test_memory_that_runs_out_is_an_error_of_the_publish_by_name(address, monkeypatch):
    monkeypatch.setattr("flyweight.transports.shared_memory.available_bytes", lambda: 1000)
    engine = weights(2)
    with (
        fw.Publisher(weights(1), address) as publisher,
        fw.Replica(engine, address) as replica,
        ThreadPoolExecutor(1) as pool,
    ):
        future = pool.submit(replica.update, timeout_seconds=LIMIT)
        with pytest.raises(TransportError, match="1000 bytes"):
            publisher.publish(1, num_replicas=1)
        monkeypatch.undo()
        assert publisher.publish(1, num_replicas=1).failed == ()
        future.result(LIMIT)
        assert holds(engine, 1)


FULL_SHM = """
import os, sys, threading
import numpy as np
import flyweight as fw

with open("/dev/shm/filler", "wb") as file:
    try:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    except OSError as error:
        print("full:", error.strerror)
model, engine = {"w": np.arange(1 << 20)}, {"w": np.zeros(1 << 20, np.int64)}
with fw.Publisher(model, sys.argv[1]) as publisher, fw.Replica(engine, sys.argv[1]) as replica:
    waiting = threading.Thread(target=replica.update)
    waiting.start()
    assert publisher.publish(1, num_replicas=1, timeout_seconds=60).failed == ()
    waiting.join(60)
    assert replica.version == 1
assert (model["w"] == engine["w"]).all()
print("arrived")
"""


def test_a_full_dev_shm_does_not_matter(address):
    """Segments are not files of /dev/shm; the child's is a real one of 1 MiB, and full."""
    mount = "mount -t tmpfs -o size=1m none /dev/shm"
    done = in_own_mounts(mount, FULL_SHM, address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "full: No space left on device\narrived\n"
