"""Files, memory and places run out: nobody dies, nobody hangs, and everybody says why."""

import gc
import os
import resource
import signal
import threading
from contextlib import ExitStack, suppress

import numpy as np
import pytest

from child_processes import FORK, LIMIT, Child, resources, until
from conftest import in_own_mounts
from flyweight.errors import FlyweightError, TransportError
from flyweight.live import Publisher, Replica
from live.live_processes import (
    SHAPES,
    TOKEN,
    Part,
    check_holds,
    engine,
    free_address,
    plain,
    shared,
    trainer,
)
from live.one_process import fill, holds, in_background, mappable, model, reader, relaying, taken

ANY = "tcp://127.0.0.1:0"


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
    """Keep a version while no files are left, until a word comes; then with files, until the next."""
    with Publisher(model(1), address, keep="memory") as publisher:
        publisher.publish(1)
        files = fill_files(left, more)
        pipe.send(("full", None))
        pipe.recv()
        for each in files:
            os.close(each)
        pipe.send(("free", None))
        pipe.recv()


@pytest.mark.parametrize("left", [pytest.param(0, marks=pytest.mark.check), 1, 2, 3, 6])
def test_a_trainer_without_files_turns_engines_away_and_lives(address, left):
    arrays = model()
    with Child(crowded_trainer, address, left, 0) as child:
        assert child.told() == ("full", None)
        with Replica(arrays, address) as replica:
            with suppress(FlyweightError):  # with a few files it may work
                replica.update(timeout_seconds=0.5)
            child.send("go on")
            assert child.told() == ("free", None)
            if replica.version is None:
                assert replica.update(timeout_seconds=LIMIT).version == 1
            assert holds(arrays, 1)
        child.send("end")
        child.result()


def test_a_trainer_that_may_have_more_files_takes_them(address):
    arrays = model()
    with Child(crowded_trainer, address, 0, 500) as child:
        assert child.told() == ("full", None)
        with Replica(arrays, address) as replica:
            assert replica.update(timeout_seconds=LIMIT).version == 1
        assert holds(arrays, 1)


def crowded_engine(address, left, more, pipe):
    arrays, error = model(), ""
    files = fill_files(left, more)
    try:
        with Replica(arrays, address, name="crowded") as replica:
            replica.update(timeout_seconds=0.5)
    except (FlyweightError, OSError) as found:
        error = f"{type(found).__name__}: {found}"
    for each in files:
        os.close(each)
    with Replica(arrays, address, name="free") as replica:
        replica.update(timeout_seconds=LIMIT)
    return error, holds(arrays, 1)


@pytest.mark.parametrize("left", [0, 1, 2, 3, 5])
def test_an_engine_without_files_raises_and_lives(address, left):
    with Publisher(model(1), address, keep="memory") as publisher:
        publisher.publish(1)
        with Child(crowded_engine, address, left, 0) as child:
            error, is_whole = child.result()
        assert not error or "open files" in error
        assert is_whole


def many_shared(address, more, pipe):
    """Publish more tensors in shared memory than there may be open files."""
    arrays = {f"w{number}": shared((64,)) for number in range(400)}
    fill_files(300, more)
    for number, each in enumerate(arrays.values()):
        each[...] = number
    with Publisher(arrays, address) as publisher:
        pipe.send("ready")
        return publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT).replicas[0].transport


@pytest.mark.parametrize("more", [0, 2000])
def test_more_shared_tensors_than_files_are_filled(address, more):
    arrays = {f"w{number}": np.zeros(64, np.uint32) for number in range(400)}
    with Child(many_shared, address, more) as child:
        assert child.told() == "ready"
        with Replica(arrays, address) as replica:
            replica.update(timeout_seconds=LIMIT)
        assert child.result() == ("mapped" if more else "filled")
    assert all((each == number).all() for number, each in enumerate(arrays.values()))


def test_staging_that_does_not_fit_is_refused_with_both_values_before_it_starts():
    weights, arrays = model(1), model()
    with (
        Publisher(weights, ANY, token=TOKEN, keep="memory") as publisher,
        reader(arrays, publisher.address, "read", staging_bytes=8000) as sink,
    ):
        publisher.publish(1)
        with pytest.raises(TransportError, match="staging needs 8704 bytes and may take 8000"):
            sink.update(timeout_seconds=LIMIT)
        assert holds(arrays, 0)


def test_a_copy_that_does_not_fit_is_an_error_of_the_publish(monkeypatch):
    from flyweight.transports import segments

    weights, arrays = model(1), model()
    with (
        Publisher(weights, ANY, token=TOKEN, keep="memory") as publisher,
        reader(arrays, publisher.address) as sink,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(segments, "available_bytes", lambda: 1000)
            with pytest.raises(TransportError, match="1000"):
                publisher.publish(1)
        assert taken(publisher, 2, sink)[1][0].version == 2
        assert holds(arrays, 1)


FULL_SHM = """
import sys, threading
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
    assert not publisher.publish(1, num_replicas=1, timeout_seconds=60).failed
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


def counted():
    gc.collect()
    found = resources()
    return {kind: len(found[kind]) for kind in ("threads", "files")} | {"mapped": found["mapped"]}


def counted_once_settled():
    """Return what this process uses, once that does not change any more."""
    before, found = None, counted()
    while before != found:
        threading.Event().wait(0.2)
        before, found = found, counted()
    return found


@pytest.mark.check
@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
def test_fifty_restarts_of_engines_leave_nothing_at_the_trainer(transport):
    weights = Part(SHAPES, shared if transport == "mapped" else plain)
    with Publisher(weights.model, ANY, token=TOKEN, keep="in_place") as publisher:
        weights.fill(1)
        publisher.publish(1)

        def restart(number):
            options = {"name": "engine", "transport": transport}
            with Child(engine, publisher.address, options, context=FORK) as child:
                child.told()
                child.send(("update", {"timeout_seconds": LIMIT}))
                check_holds(child.told(), 1)
                child.kill(signal.SIGKILL if number % 2 else signal.SIGTERM)
                child.join()
            until(lambda: not publisher.replicas)

        for number in range(3):
            restart(number)
        before = counted_once_settled()
        for number in range(50):
            restart(number)
        until(lambda: all(counted()[kind] <= before[kind] for kind in before))


@pytest.mark.check
@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
def test_fifty_restarts_of_the_trainer_leave_nothing_at_the_engine(transport):
    make, address, part = shared if transport == "mapped" else plain, free_address(), Part(SHAPES)
    with Replica(part.model, address, token=TOKEN, transport=transport, name="engine") as replica:

        def restart(version):
            with (
                Child(trainer, address, {"make": make}, context=FORK) as source,
                in_background(replica.update, version, timeout_seconds=LIMIT) as result,
            ):
                assert source.told() == address
                source.send(("publish", version, {"num_replicas": 1, "timeout_seconds": LIMIT}))
                assert not isinstance(source.told(), FlyweightError)
                assert result().version == version
                assert part.is_complete(version)
            until(lambda: not replica.is_connected)

        for version in range(1, 4):
            restart(version)
        before = counted_once_settled()
        for version in range(4, 54):
            restart(version)
        until(lambda: all(counted()[kind] <= before[kind] for kind in before))


def test_two_hundred_updates_grow_nothing(tmp_path, collected):
    weights, arrays, read = mappable(1), model(), model()
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher(weights, ANY, token=TOKEN))
        sinks = [
            stack.enter_context(reader(arrays, publisher.address, "mapped", name="mapped")),
            stack.enter_context(reader(read, publisher.address, "read", name="read")),
        ]
        relay = stack.enter_context(relaying(publisher.address, f"unix:{tmp_path}/relay"))
        until(lambda: len(publisher.waiting) == 1)
        for version in range(200):
            fill(weights, version)
            taken(publisher, version, *sinks, num_replicas=3)
            if version == 10:
                gc.collect()
                before = counted_once_settled()
        assert holds(arrays, 199)
        assert holds(read, 199)
        assert relay.holder is not None
        # The reader and the relay keep a connection once one has fetched from the other: a thread,
        # two sockets and a bell for each direction, at whichever update that was.
        more = {"threads": 2, "files": 6, "mapped": 0}
        until(lambda: all(counted()[kind] <= before[kind] + more[kind] for kind in before))
