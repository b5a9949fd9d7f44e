"""Where files, threads or time run out: nobody is aborted, nobody hangs, and each is told why."""

import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

import flyweight as fw
from flyweight.errors import PeerFailed, TransferTimeout, TransportError
from flyweight.events import listening
from flyweight.live import messages
from flyweight.live.catch_up import CatchUpRounds
from flyweight.live.watch import watch
from live_models import Child, holds, in_time, resources, until, weights
from peers import FakePublisher

# Files.


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


@pytest.mark.parametrize("left", [1, 2, 3, 20])
def test_a_trainer_without_files_turns_engines_away_and_lives(address, left):
    engine = weights(50)
    with Child(crowded_trainer, address, left, 0) as child:
        assert child.told() == ("full", None)
        with fw.Replica(engine, address) as replica:
            with pytest.raises(TransferTimeout, match="raise its limit, ulimit -n"):
                replica.update(timeout_seconds=0.5)
            child.send("go on")
            assert child.told() == ("free", None)
            assert replica.update(timeout_seconds=10).version == 1
            assert holds(engine, 1)
        child.send("go on")
        child.result()


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_trainer_that_may_have_more_files_takes_them(address, left):
    engine = weights(50)
    with Child(crowded_trainer, address, left, 500) as child:
        assert child.told() == ("full", None)
        with fw.Replica(engine, address) as replica:
            assert replica.update(timeout_seconds=10).version == 1
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
        replica.update(timeout_seconds=10)
    return told, holds(engine, 1)


@pytest.mark.parametrize("left", [1, 3, 4, 6, 9, 12])
def test_an_engine_without_files_is_told_so_and_lives(address, left):
    with fw.Publisher(weights(1), address, hold=True) as publisher:
        publisher.publish(1)
        with Child(crowded_engine, address, left, 0) as child:
            told, is_whole = child.result()
        assert "files are left to this process" in told
        assert "ulimit -n" in told
        assert is_whole
        with Child(crowded_engine, address, left, 500) as child:
            assert child.result() == ("", True)


def shared(number):
    """An array in shared memory, which costs this process a file."""
    file = os.memfd_create("test")
    os.ftruncate(file, 4096)
    array = np.frombuffer(mmap.mmap(file, 4096), np.uint8)
    os.close(file)
    array[:] = number
    return array


def many_shared(address, more, pipe):
    fill_files(300, more)
    model = {f"w{number}": shared(number) for number in range(200)}
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
        future = threads.submit(replica.update, timeout_seconds=20)
        told = child.result()
        if more:
            assert told == ""
            assert future.result(10).strategy == "mapped"
            assert all((engine[f"w{number}"] == number).all() for number in range(200))
        else:
            assert "200 segments of shared memory need a file each" in told
            assert "ulimit -n, or publish with transport='host'" in told
            replica.close()
            with pytest.raises(fw.FlyweightError):
                future.result(10)


# Threads.


def refuse_catch_up_threads(monkeypatch, times):
    """Let that many threads of late rounds not start, as at a limit of processes."""
    start, left = threading.Thread.start, [None] * times

    def refusing(self):
        if self.name == "flyweight-catch-up" and left:
            left.pop()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refusing)


def test_a_late_round_whose_thread_cannot_start_is_denied_and_the_next_one_served(
    address, monkeypatch
):
    engine = weights(50)
    with fw.Publisher(weights(1), address, hold=True) as publisher:
        publisher.publish(1)
        refuse_catch_up_threads(monkeypatch, 1)
        with fw.Replica(engine, address) as replica:
            with pytest.raises(PeerFailed, match="can't start new thread; .*ulimit -u"):
                replica.update(timeout_seconds=10)
            assert replica.update(timeout_seconds=10).version == 1
        assert holds(engine, 1)
        publisher.publish(2)
    fw.Publisher(weights(1), address).close()


def test_a_thread_that_cannot_start_does_not_keep_a_publisher_from_closing(address, monkeypatch):
    refuse_catch_up_threads(monkeypatch, 1)
    with fw.Publisher(weights(1), address, hold=True) as publisher:
        publisher.publish(1)
        with fw.Replica(weights(50), address) as replica, pytest.raises(PeerFailed):
            replica.update(timeout_seconds=10)
        started = time.monotonic()
    assert time.monotonic() - started < 5
    fw.Publisher(weights(1), address).close()


def test_a_publish_that_cannot_give_its_replicas_back_is_over_all_the_same(address, monkeypatch):
    def failing(self, peers):
        raise RuntimeError("an error of ours")

    with fw.Publisher(weights(1), address) as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(CatchUpRounds, "release_members", failing)
            with pytest.raises(RuntimeError, match="an error of ours"):
                publisher.publish(1)
        assert publisher.publish(2, timeout_seconds=1).version == 2


# Silence.


def test_who_may_be_silent_for_less_than_a_second_beats_as_often(address):
    told = []
    with (
        listening(lambda event: told.append(event.kind)),
        fw.Publisher(weights(1), address, silence_seconds=0.9) as publisher,
        fw.Replica(weights(50), address) as replica,
    ):
        end = time.monotonic() + 3
        while time.monotonic() < end:
            time.sleep(0.02)
            assert replica.is_connected
            assert publisher.replicas == [replica.name]
        assert told == ["replica.joined"]


def test_a_watcher_is_told_of_news_however_short_the_silence_allowed(address):
    with fw.Publisher(weights(1), address, silence_seconds=0.2):
        started = time.monotonic()
        for _ in watch(address):  # with every beat of the publisher's
            if time.monotonic() - started > 1.5:
                break


def counting_publisher(address, pipe):
    lost = []

    def listener(event):
        if event.kind == "replica.lost":
            lost.append(event.fields["error"])

    with (
        listening(listener),
        fw.Publisher(weights(1), address, silence_seconds=1) as publisher,
    ):
        pipe.send(("up", None))
        until(lambda: publisher.replicas)
        pipe.send(("joined", None))
        pipe.recv()
        told, version = list(lost), 1
        # Right after a stop it may still know a connection that the engine has given up.
        while publisher.publish(version, num_replicas=1, timeout_seconds=10).failed:
            version += 1
        return told


def waiting_engine(address, pipe):
    engine = weights(50)
    with fw.Replica(engine, address) as replica:
        pipe.send(("there", None))
        replica.update(timeout_seconds=20)
        return holds(engine, 1)


def test_an_engine_that_was_stopped_waits_on(address):
    with (
        Child(counting_publisher, address) as trainer,
        Child(waiting_engine, address) as engine,
    ):
        assert [trainer.told()[0], trainer.told()[0], engine.told()[0]] == ["up", "joined", "there"]
        engine.stop()
        time.sleep(2)  # twice what may be silent
        engine.kill(signal.SIGCONT)
        trainer.send("publish")
        lost = trainer.result()
        assert len(lost) == 1
        assert "was silent for 1 s" in lost[0]
        assert engine.result()


def test_an_engine_whose_trainer_was_stopped_waits_on(address):
    with (
        Child(counting_publisher, address) as trainer,
        Child(waiting_engine, address) as engine,
    ):
        assert [trainer.told()[0], trainer.told()[0], engine.told()[0]] == ["up", "joined", "there"]
        trainer.stop()
        time.sleep(2)
        trainer.kill(signal.SIGCONT)
        trainer.send("publish")
        trainer.result()
        assert engine.result()


# Deadlines.


@pytest.fixture
def bereft(address):
    """A replica whose publisher stands still, which it has noticed."""
    with Child(counting_publisher, address) as trainer:
        assert trainer.told() == ("up", None)
        with fw.Replica(weights(50), address) as replica:
            assert trainer.told() == ("joined", None)
            trainer.stop()
            until(lambda: not replica.is_connected)
            yield replica


def test_an_update_from_a_publisher_that_stands_still_ends_in_time(bereft):
    why = "no publisher came in time: the process at .* not answer"
    with in_time(3), pytest.raises(TransferTimeout, match=why):
        bereft.update(timeout_seconds=3)


def test_an_update_at_a_door_that_does_not_answer_ends_when_it_is_over(bereft):
    over, started = threading.Event(), time.monotonic()
    threading.Timer(0.3, over.set).start()
    with pytest.raises(TransferTimeout):
        bereft.update(timeout_seconds=20, is_over=over.is_set)
    assert time.monotonic() - started < 2


def test_close_ends_an_update_at_a_door_that_does_not_answer(bereft, threads):
    is_waiting = threading.Event()
    future = threads.submit(bereft.update, timeout_seconds=20, is_over=is_waiting.set)
    assert is_waiting.wait(10)
    started = time.monotonic()
    bereft.close()
    assert time.monotonic() - started < 2
    with pytest.raises(TransportError):
        future.result(2)


def test_close_ends_an_update_that_waits_for_a_welcome(address, threads):
    replica = fw.Replica(weights(50), address)
    future = threads.submit(replica.update, timeout_seconds=20)
    with FakePublisher(address, b"never welcomes anybody") as publisher:
        publisher.hear_of(messages.Hello)
        started = time.monotonic()
        replica.close()
        assert time.monotonic() - started < 1
        with pytest.raises(TransportError):
            future.result(1)


# Forks.


def use(publisher, replica, pipe):
    replica.wake()
    return publisher.replicas


def test_a_child_that_was_forked_while_replicas_are_heard_can_look_at_them(address, threads):
    is_held, is_forked = threading.Event(), threading.Event()

    def hold():
        """Run while an update holds the lock of its connection."""
        with publisher._members.changed:
            is_held.set()
            assert is_forked.wait(10)
        return False

    with fw.Publisher(weights(1), address) as publisher, fw.Replica(weights(2), address) as replica:
        update = threads.submit(replica.update, timeout_seconds=10, is_over=hold)
        assert is_held.wait(10)
        with Child(use, publisher, replica) as child:
            is_forked.set()
            assert child.result(5) == [replica.name]
        assert publisher.publish(1, num_replicas=1).failed == ()
        assert update.result(10).version == 1


# Listeners.

STUCK = """
import sys, threading, time
import numpy as np, flyweight as fw
from flyweight.events import listening

heard = threading.Event()

def listener(event):
    if event.kind == "replica.joined":
        heard.set()
        threading.Event().wait()

with listening(listener):
    publisher = fw.Publisher({"w": np.ones(3)}, sys.argv[1])
    replica = fw.Replica({"w": np.zeros(3)}, sys.argv[1])
    assert heard.wait(10)
    replica.close()
    started = time.monotonic()
    publisher.close()
    assert time.monotonic() - started < 4
"""


def test_a_listener_that_never_returns_keeps_neither_close_nor_the_process_from_its_end(address):
    done = subprocess.run([sys.executable, "-c", STUCK, address], timeout=30, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_all_that_happened_before_close_has_been_told_after_it(address):
    told = []
    with listening(lambda event: told.append(event.kind)):
        with fw.Publisher(weights(1), address):
            fw.Replica(weights(50), address).close()
        assert told.count("replica.joined") == 1
