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
from child_processes import Child, in_time, resources, settled, until
from flyweight.errors import (
    HandleGone,
    PeerLost,
    TransferTimeout,
    VersionError,
)
from flyweight.live import messages
from flyweight.live.connection import Connection
from flyweight.live.copies import PreparedCopies
from live_rounds import slow_loader
from versioned_models import assign, holding, holds, weights

pytestmark = pytest.mark.check


def test_a_slow_replica_does_not_keep_a_fast_one_from_its_commit(address, threads):
    model, engine = weights(1), weights(50)
    with (
        Child(slow_loader, address, 0.5),
        fw.Publisher(model, address) as publisher,
        fw.Replica(engine, address, name="fast") as replica,
    ):
        until(lambda: len(publisher.replicas) == 2)
        future = threads.submit(replica.update, timeout_seconds=1)
        started = time.monotonic()
        lease = publisher.publish(1, num_replicas=2, background=True)
        assert future.result(5).version == 1
        assert time.monotonic() - started < 2
        assert not lease.is_done
        assert lease.wait(30).failed == ()


def stopped_replica(address, pipe):
    with fw.Replica(weights(50), address, name="stopped") as replica:
        replica.update(timeout_seconds=20)


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 16384, "depth": 1}], ids=str)
def test_a_stopped_replica_does_not_fail_the_others(address, threads, options):
    model, engine = weights(1), weights(51)
    with (
        Child(stopped_replica, address) as child,
        fw.Publisher(model, address, **options) as publisher,
        fw.Replica(engine, address, name="other") as replica,
    ):
        until(lambda: len(publisher.replicas) == 2)
        future = threads.submit(replica.update, timeout_seconds=1)  # less than the publisher's
        until(lambda: len(publisher.waiting) == 2)
        child.stop()
        report = publisher.publish(1, timeout_seconds=2)
        assert future.result(5).version == 1
        assert holds(engine, 1)
        assert [each.name for each in report.failed] == ["stopped"]


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
    replica.update(timeout_seconds=10)
    replica.update(timeout_seconds=10)
    return replica.version


REPLICA_STEPS = [
    *(("before", n) for n in range(1, 14)),
    *(("after", n) for n in (0, 2, 3, 5, 12)),
    *(("copy", n) for n in (0, 3, 10)),
]


@pytest.mark.parametrize("hold", [False, True])
def test_a_replica_killed_at_any_step_harms_nobody_else(tmp_path, hold):
    """The publisher names it, the other replica gets every version, and nothing is left behind."""
    model, engine = weights(1), weights(51)
    before = resources()
    num_died = 0
    for number, step in enumerate(REPLICA_STEPS):
        address = f"unix:{tmp_path}/p{number}"
        with (
            Child(replica_that_dies, address, step) as victim,
            ThreadPoolExecutor(1) as pool,
            fw.Publisher(model, address, hold=hold, timeout_seconds=8, **BUCKETS) as publisher,
            fw.Replica(engine, address, name="other") as replica,
        ):
            until(lambda: len(publisher.replicas) == 2 or victim.process.exitcode is not None)
            for version in (1, 2, 3):
                assign(model, version)
                future = pool.submit(replica.update, version, timeout_seconds=10)
                until(lambda: "other" in publisher.waiting)
                if victim.process.exitcode is None:
                    time.sleep(0.02)
                started = time.monotonic()
                report = publisher.publish(version)
                assert time.monotonic() - started < 4
                assert future.result(10).version == version
                assert holds(engine, version)
                for each in report.failed:
                    assert each.name == "victim"
                    assert isinstance(each.error, PeerLost), each.error
                    num_died += 1
    assert num_died > (2 if hold else 5)  # what is held takes fewer messages
    assert settled(before) == before


def publisher_that_dies(address, step, options, pipe):
    model = weights(1)
    publisher = fw.Publisher(model, address, **options)
    publisher.publish(1, num_replicas=1, timeout_seconds=10)
    pipe.recv()
    kill_at(step)
    assign(model, 2)
    publisher.publish(2, num_replicas=1, timeout_seconds=10)
    time.sleep(0.3)
    publisher.close()


PUBLISHER_STEPS = [
    *(("before", n) for n in (0, 1, 2, 5)),
    *(("after", n) for n in (0, 1, 2, 4)),
    *(("copy", n) for n in (0, 1, 4)),
]


@pytest.mark.parametrize("options", [BUCKETS, {"hold": True}], ids=["bucketed", "held"])
def test_a_publisher_killed_at_any_step_leaves_no_half_new_model(tmp_path, options):
    before = resources()
    outcomes = set()
    for number, step in enumerate(PUBLISHER_STEPS):
        address = f"unix:{tmp_path}/p{number}"
        engine = weights(50)
        with (
            Child(publisher_that_dies, address, step, options) as victim,
            fw.Replica(engine, address) as replica,
        ):
            replica.update(timeout_seconds=10)
            assert holds(engine, 1)
            victim.send("go on")
            started = time.monotonic()
            error = None
            try:
                replica.update(2, timeout_seconds=2)
            except (PeerLost, TransferTimeout, HandleGone) as caught:
                error = caught
            assert time.monotonic() - started < 5, step
            outcomes.add(replica.state if error else "committed")
            if replica.state == "ready":
                assert holding(engine, (1, 2)) == replica.version, step
            else:
                assert (replica.state, replica.version) == ("failed", None), step
                with pytest.raises(VersionError):
                    replica.check_servable()
            victim.kill()
            victim.join()
            # A publisher that comes back makes every replica whole again.
            with fw.Publisher(weights(3), address, hold=True) as publisher:
                publisher.publish(3)
                assert replica.update(3, timeout_seconds=10).version == 3
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
        replica.update(timeout_seconds=5)
    except fw.FlyweightError as error:
        return type(error).__name__, replica.state, replica.version
    return "committed", replica.state, replica.version


@pytest.mark.parametrize("number", [0, 2])
def test_a_replica_that_never_acknowledges_stalls_nobody_beyond_its_deadline(address, number):
    model, engine = weights(1), weights(51)
    with (
        Child(replica_that_stops, address, number) as stopped,
        ThreadPoolExecutor(1) as pool,
        fw.Publisher(model, address, **BUCKETS) as publisher,
        fw.Replica(engine, address, name="other") as replica,
    ):
        future = pool.submit(replica.update, timeout_seconds=10)
        until(lambda: len(publisher.waiting) == 2)
        with in_time(3):
            report = publisher.publish(1, num_replicas=2, timeout_seconds=3)
        assert future.result(10).version == 1
        assert holds(engine, 1)
        (failed,) = report.failed
        assert failed.name == "stopped"
        assert isinstance(failed.error, TransferTimeout)
        assert "'stopped' is late: it has not emptied bucket" in str(failed.error)
        assign(model, 2)  # the next publish has all its slots
        future = pool.submit(replica.update, timeout_seconds=10)
        assert publisher.publish(2, num_replicas=1).failed == ()
        future.result(10)
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
        replica.update(timeout_seconds=20)
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
    publisher.publish(1, num_replicas=1, timeout_seconds=20)
    time.sleep(0.2)  # let it go out
    os.kill(os.getpid(), signal.SIGKILL)


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
    publisher = fw.Publisher(weights(1), address)
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
                future = pool.submit(replica.update, timeout_seconds=4)
                trainer.send("die")
                trainer.join()
                until(lambda: not replica.is_connected, 2)
                # and its address is free
                with fw.Publisher(weights(3), address) as publisher:
                    publisher.publish(1, num_replicas=1)
                    assert future.result(10).version == 1
        finally:
            os.kill(grandchild, signal.SIGKILL)
