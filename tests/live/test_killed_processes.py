"""Real processes, killed or stopped at every step of a round, on either side.

After each, the survivor has a named error within its deadline, and holds the old version whole
or says that it holds none.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import flyweight as fw
from child_processes import LIMIT, Child, resources, settled, until
from flyweight.copies import PreparedCopies
from flyweight.errors import (
    HandleGone,
    PeerLost,
    TransferTimeout,
    VersionError,
)
from flyweight.live import messages
from flyweight.live.connection import Connection
from live_rounds import moved_clock, said_by
from versioned_models import assign, holding, holds, weights

CHECK, CAMPAIGN = pytest.mark.check, pytest.mark.campaign


def loader_that_waits(address, pipe):
    """Take the first tensor, and the others when told to."""

    def load(named):
        next(named)
        pipe.recv()
        for _ in named:
            pass

    with fw.Replica(load, address, name="slow", framework="numpy") as replica:
        replica.update(timeout_seconds=2 * LIMIT)


def test_a_slow_replica_does_not_keep_a_fast_one_from_its_commit(address, threads):
    model, engine = weights(1), weights(50)
    with (
        Child(loader_that_waits, address) as child,
        fw.Publisher(model, address, timeout_seconds=2 * LIMIT) as publisher,
        fw.Replica(engine, address, name="fast") as replica,
    ):
        until(lambda: len(publisher.replicas) == 2)
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        lease = publisher.publish(1, num_replicas=2, background=True)
        assert future.result(LIMIT).version == 1
        assert not lease.is_done
        child.send("go on")
        assert lease.wait(LIMIT).failed == ()


def stopped_replica(address, pipe):
    with fw.Replica(weights(50), address, name="stopped") as replica:
        replica.update(timeout_seconds=LIMIT)


def test_a_stopped_replica_does_not_fail_the_others(address, threads):
    model, engine = weights(1), weights(51)
    with (
        Child(stopped_replica, address) as child,
        fw.Publisher(model, address) as publisher,
        fw.Replica(engine, address, name="other") as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        until(lambda: len(publisher.waiting) == 2)
        child.stop()
        publish = threads.submit(publisher.publish, 1, timeout_seconds=2 * LIMIT)
        assert future.result(LIMIT).version == 1
        assert holds(engine, 1)
        assert not publish.done()
        child.kill()
        assert [each.name for each in publish.result(LIMIT).failed] == ["stopped"]


BUCKETS = {"bucket_bytes": 32768, "depth": 2}


def kill_at(step):
    """Kill this process at a step: before or after its nth message, or within its nth copies."""
    kind, number = step
    sent = copied = 0
    send, run = Connection.send, PreparedCopies.run

    def counted_send(self, message, to=b""):
        nonlocal sent
        if isinstance(message, messages.Tick):
            return send(self, message, to)
        if kind == "before" and sent == number:
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, message, to)
        if kind == "after" and sent == number:
            time.sleep(0.05)  # let it go out
            os.kill(os.getpid(), signal.SIGKILL)
        sent += 1
        return None

    def counted_run(self, deadline, **options):
        nonlocal copied
        if kind == "copy" and copied == number:  # after the first bytes, or after none
            options["on_progress"] = lambda nbytes: os.kill(os.getpid(), signal.SIGKILL)
            run(self, deadline, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        copied += 1
        return run(self, deadline, **options)

    Connection.send, PreparedCopies.run = counted_send, counted_run


def replica_that_dies(address, step, pipe):
    kill_at(step)
    replica = fw.Replica(weights(50), address, name="victim")
    replica.update(timeout_seconds=LIMIT)
    replica.update(timeout_seconds=LIMIT)
    return replica.version


REPLICA_STEPS = [
    *(("before", n) for n in range(1, 14)),
    *(("after", n) for n in (0, 2, 3, 5, 12)),
    *(("copy", n) for n in (0, 3, 10)),
]


@pytest.mark.parametrize(
    ("hold", "steps"),
    [
        pytest.param(False, [("before", 2), ("after", 3), ("copy", 3)], id="some", marks=CHECK),
        pytest.param(True, [("copy", 0)], id="one-held", marks=CHECK),
        pytest.param(False, REPLICA_STEPS, id="any", marks=CAMPAIGN),
        pytest.param(True, REPLICA_STEPS, id="any-held", marks=CAMPAIGN),
    ],
)
def test_a_replica_killed_at_a_step_harms_nobody_else(tmp_path, hold, steps):
    """The publisher names it, the other replica gets every version, and nothing is left behind."""
    model, engine = weights(1), weights(51)
    before = resources()
    num_died = 0
    for number, step in enumerate(steps):
        address = f"unix:{tmp_path}/p{number}"
        with (
            Child(replica_that_dies, address, step) as victim,
            ThreadPoolExecutor(1) as pool,
            fw.Publisher(model, address, hold=hold, timeout_seconds=LIMIT, **BUCKETS) as publisher,
            fw.Replica(engine, address, name="other") as replica,
        ):
            until(lambda: len(publisher.replicas) == 2 or victim.process.exitcode is not None)
            for version in (1, 2, 3):
                assign(model, version)
                future = pool.submit(replica.update, version, timeout_seconds=LIMIT)
                until(lambda: "other" in publisher.waiting)
                until(lambda: "victim" in publisher.waiting or victim.process.exitcode is not None)
                report = publisher.publish(version)
                assert future.result(LIMIT).version == version
                assert holds(engine, version)
                for each in report.failed:
                    assert each.name == "victim"
                    assert isinstance(each.error, PeerLost), each.error
                    num_died += 1
    assert num_died > len(steps) // (8 if hold else 4)  # what is held takes fewer messages
    assert settled(before) == before


def publisher_that_dies(address, step, options, pipe):
    model = weights(1)
    publisher = fw.Publisher(model, address, **options)
    publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)
    pipe.recv()
    kill_at(step)
    assign(model, 2)
    publisher.publish(2, num_replicas=1, timeout_seconds=LIMIT)
    time.sleep(0.3)
    publisher.close()


PUBLISHER_STEPS = [
    *(("before", n) for n in (0, 1, 2, 5)),
    *(("after", n) for n in (0, 1, 2, 4)),
    *(("copy", n) for n in (0, 1, 4)),
]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        pytest.param(BUCKETS, [("before", 0), ("copy", 4)], id="some", marks=CHECK),
        pytest.param({"hold": True}, [("before", 0), ("after", 4)], id="some-held", marks=CHECK),
        pytest.param(BUCKETS, PUBLISHER_STEPS, id="any", marks=CAMPAIGN),
        pytest.param({"hold": True}, PUBLISHER_STEPS, id="any-held", marks=CAMPAIGN),
    ],
)
def test_a_publisher_killed_at_a_step_leaves_no_half_new_model(tmp_path, options, steps):
    before = resources()
    outcomes = set()
    for number, step in enumerate(steps):
        address = f"unix:{tmp_path}/p{number}"
        engine = weights(50)
        with (
            Child(publisher_that_dies, address, step, options) as victim,
            ThreadPoolExecutor(1) as pool,
            fw.Replica(engine, address) as replica,
        ):
            replica.update(timeout_seconds=LIMIT)
            assert holds(engine, 1)
            update = pool.submit(
                replica.update, 2, timeout_seconds=LIMIT, is_over=lambda: not replica.is_connected
            )
            victim.send("go on")
            victim.join()
            until(lambda replica=replica, update=update: replica.wake() or update.done())
            error = update.exception()
            assert error is None or isinstance(error, (PeerLost, TransferTimeout, HandleGone))
            outcomes.add(replica.state if error else "committed")
            if replica.state == "ready":
                assert holding(engine, (1, 2)) == replica.version, step
            else:
                assert (replica.state, replica.version) == ("failed", None), step
                with pytest.raises(VersionError):
                    replica.check_servable()
            # A publisher that comes back makes every replica whole again.
            with fw.Publisher(weights(3), address, hold=True) as publisher:
                publisher.publish(3)
                assert replica.update(3, timeout_seconds=LIMIT).version == 3
                assert holds(engine, 3)
    assert "ready" in outcomes
    if options == BUCKETS:
        assert "failed" in outcomes
    else:
        assert "failed" not in outcomes  # what is held outlives its publisher
        assert "committed" in outcomes
    assert settled(before) == before


def replica_that_stops(address, number, pipe):
    """Stop in the middle of a round, before the nth bucket is given back."""
    send, count = Connection.send, 0

    def stopping(self, message, to=b""):
        nonlocal count
        if isinstance(message, messages.Emptied):
            if count == number:
                os.kill(os.getpid(), signal.SIGSTOP)
            count += 1
        send(self, message, to)

    Connection.send = stopping
    engine = weights(50)
    replica = fw.Replica(engine, address, name="stopped")
    try:
        replica.update(timeout_seconds=LIMIT)
    except fw.FlyweightError as error:
        return type(error).__name__, replica.state, replica.version
    return "committed", replica.state, replica.version


@pytest.mark.parametrize("number", [pytest.param(0, marks=CHECK), pytest.param(2, marks=CAMPAIGN)])
def test_a_replica_that_never_acknowledges_stalls_nobody_beyond_its_deadline(
    address, threads, monkeypatch, number
):
    model, engine = weights(1), weights(51)
    passed, emptied = moved_clock(monkeypatch), said_by(monkeypatch, "other", messages.Emptied)
    with (
        Child(replica_that_stops, address, number) as stopped,
        fw.Publisher(
            model, address, timeout_seconds=LIMIT, silence_seconds=2 * LIMIT, **BUCKETS
        ) as publisher,
        fw.Replica(engine, address, name="other") as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        publish = threads.submit(publisher.publish, 1, num_replicas=2)
        until(lambda: stopped.is_stopped and len(emptied) == number + BUCKETS["depth"])
        passed[0] = 2 * LIMIT
        report = publish.result(LIMIT)
        assert future.result(LIMIT).version == 1
        assert holds(engine, 1)
        (failed,) = report.failed
        assert failed.name == "stopped"
        assert isinstance(failed.error, TransferTimeout)
        assert "'stopped'" in str(failed.error)
        assign(model, 2)  # the next publish has all its slots
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        assert publisher.publish(2, num_replicas=1).failed == ()
        future.result(LIMIT)
        assert holds(engine, 2)
        stopped.kill(signal.SIGCONT)
        error, state, version = stopped.result()
        assert (state, version) == ("failed", None)
        assert error in ("TransferTimeout", "PeerLost")


def alone_on_one_core():
    """Share the same core with whoever calls this too."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def spin(pipe):
    alone_on_one_core()
    while True:
        pass


def replica_that_hears_late(address, pipe):
    """The thread that reads its messages hardly ever gets to run."""
    alone_on_one_core()
    pipe.recv()
    engine = weights(50)
    with fw.Replica(engine, address) as replica:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/comm") as file:
                if file.read().startswith("ZMQbg/IO"):
                    os.setpriority(os.PRIO_PROCESS, int(task), 19)
        pipe.send(("told", "here"))
        replica.update(timeout_seconds=LIMIT)
        return replica.version, replica.state, holding(engine, (1,))


def publisher_that_goes_with_its_last_word(address, pipe):
    """Its replica stands still from before the commit until this process is gone."""
    publisher = fw.Publisher(weights(1), address)
    pipe.send(("told", "here"))
    replica, send = pipe.recv(), Connection.send

    def sending(self, message, to=b""):
        if isinstance(message, messages.Commit):
            os.kill(replica, signal.SIGSTOP)
        send(self, message, to)

    Connection.send = sending
    publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)
    time.sleep(0.2)  # let it go out
    os.kill(os.getpid(), signal.SIGKILL)


@CAMPAIGN
def test_what_a_publisher_said_before_it_went_still_counts(tmp_path):
    """The door tells of its end at once, its last messages may still be on their way."""
    for number in range(5):
        address = f"unix:{tmp_path}/p{number}"
        with (
            Child(replica_that_hears_late, address) as replica,
            Child(publisher_that_goes_with_its_last_word, address) as publisher,
            Child(spin),
        ):
            publisher.told()
            replica.send("there is a publisher")
            replica.told()
            publisher.send(replica.pid)
            assert publisher.join() == -signal.SIGKILL
            replica.kill(signal.SIGCONT)
            assert replica.result() == (1, "ready", 1)


def fork_and_die(address, pipe):
    publisher = fw.Publisher(weights(1), address, silence_seconds=2 * LIMIT)
    with Child(sleeping) as child:
        pipe.send(("child", child.pid))
        pipe.recv()
        assert publisher.replicas
        os.kill(os.getpid(), signal.SIGKILL)


def sleeping(pipe):
    signal.pause()


def test_a_child_that_a_trainer_forked_does_not_hide_the_trainers_death(address):
    with Child(fork_and_die, address) as trainer:
        _, grandchild = trainer.told()
        try:
            with fw.Replica(weights(2), address) as replica, ThreadPoolExecutor(1) as pool:
                future = pool.submit(replica.update, timeout_seconds=LIMIT)
                trainer.send("die")
                trainer.join()
                until(lambda: not replica.is_connected)
                # and its address is free
                with fw.Publisher(weights(3), address) as publisher:
                    publisher.publish(1, num_replicas=1)
                    assert future.result(LIMIT).version == 1
        finally:
            os.kill(grandchild, signal.SIGKILL)
