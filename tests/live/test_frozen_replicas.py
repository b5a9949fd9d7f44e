"""A publish returns in its time: a frozen replica is named as late, a slow one is waited for."""

import os
import signal
import time

import numpy as np
import pytest

import flyweight as fw
from child_processes import Child, until
from flyweight.errors import FlyweightError, TransferTimeout
from flyweight.live import messages
from flyweight.live.connection import Connection
from flyweight.live.copies import PreparedCopies
from versioned_models import holds, weights

pytestmark = pytest.mark.check

BUCKETS = {"bucket_bytes": 1 << 16, "depth": 2}


def replica_that_freezes(address, moment, pipe):
    """Stop this process at a moment of a round; return the state when it goes on."""
    send, run, has_stopped = Connection.send, PreparedCopies.run, []

    def stop():
        if not has_stopped:
            has_stopped.append(True)
            pipe.send(("stops", None))
            os.kill(os.getpid(), signal.SIGSTOP)

    def stopping_send(self, message, to=b""):
        send(self, message, to)
        if moment == "copied" and isinstance(message, messages.Done):
            time.sleep(0.05)  # let it go out
            stop()

    def stopping_run(self, deadline, **options):
        if moment == "copying":
            stop()
        return run(self, deadline, **options)

    Connection.send, PreparedCopies.run = stopping_send, stopping_run
    replica = fw.Replica(weights(50), address, name="frozen")
    try:
        before = {"before": lambda version: stop()} if moment == "draining" else {}
        replica.update(timeout_seconds=20, **before)
    except FlyweightError as error:
        return replica.state, replica.version, type(error).__name__
    return replica.state, replica.version, None


@pytest.mark.parametrize("options", [{}, BUCKETS], ids=["whole", "buckets"])
@pytest.mark.parametrize(
    ("moment", "seconds", "what"),
    [
        ("asked", 2, "copied the weights|emptied bucket"),
        ("draining", 1, "copied the weights|emptied bucket"),
        ("copying", 1, "copied the weights|emptied bucket"),
        ("copied", 2, None),
    ],
)
def test_a_frozen_replica_is_late_and_delays_nobody(
    address, threads, moment, seconds, what, options
):
    model, engine = weights(1), weights(51)
    with (
        Child(replica_that_freezes, address, moment) as child,
        fw.Publisher(model, address, **options) as publisher,
        fw.Replica(engine, address, name="other") as replica,
    ):
        update = threads.submit(replica.update, timeout_seconds=20)
        until(lambda: len(publisher.waiting) == 2)
        if moment == "asked":
            child.stop()
        started = time.monotonic()
        report = publisher.publish(1, timeout_seconds=seconds)
        spent = time.monotonic() - started
        assert update.result(10).version == 1
        assert holds(engine, 1)
        if what is None:  # all its bytes were right, so it has committed
            assert report.failed == ()
            assert spent < seconds / 2
        else:
            assert seconds - 0.1 < spent < 1.25 * seconds + 0.5
            (failed,) = report.failed
            assert isinstance(failed.error, TransferTimeout)
            late = failed.error
            with pytest.raises(TransferTimeout, match=f"'frozen' is late: it has not ({what})"):
                raise late
            assert f"'frozen': {late}" in str(report)
        assert moment == "asked" or child.told() == ("stops", None)
        until(lambda: child.is_stopped)
        child.go_on()
        state, version, _ = child.result()
    if what is None:
        assert (state, version) == ("ready", 1)
    else:  # it keeps what it had if it hears of its end before it writes
        assert (state, version) in [("failed", None), ("empty", None)][: 1 + (moment != "copying")]


def slow_replica(address, seconds, pipe):
    run = PreparedCopies.run

    def slow_run(self, deadline, **options):
        time.sleep(seconds)
        return run(self, deadline, **options)

    PreparedCopies.run = slow_run
    engine = {"w": np.zeros(1 << 26, np.uint8)}
    with fw.Replica(engine, address, name="slow") as replica:
        replica.update(timeout_seconds=20)
        return int(engine["w"].sum()), replica.version


def test_a_slow_replica_that_makes_progress_is_waited_for(address):
    model = {"w": np.ones(1 << 26, np.uint8)}
    with (
        Child(slow_replica, address, 0.06) as child,
        fw.Publisher(model, address, bucket_bytes=1 << 21, depth=1) as publisher,
    ):
        until(lambda: publisher.waiting)
        started = time.monotonic()
        report = publisher.publish(1, timeout_seconds=1)
        assert report.failed == ()
        assert time.monotonic() - started > 1.6
        assert child.result() == (1 << 26, 1)


def slow_loader(address, seconds, pipe):
    """A replica whose progress only its heartbeats tell."""

    def load(named):
        for _ in named:
            time.sleep(seconds)

    with fw.Replica(load, address, name="slow", framework="numpy") as replica:
        replica.update(timeout_seconds=20)
        return replica.version


def test_progress_between_two_heartbeats_is_seen(address):
    """A replica beats once in a second; the publisher asks it more often if time is short."""
    model = {f"w{number}": np.ones(1000) for number in range(40)}
    with (
        Child(slow_loader, address, 0.05) as child,
        fw.Publisher(model, address, hold=True, transport="mapped") as publisher,
    ):
        until(lambda: publisher.waiting)
        started = time.monotonic()
        report = publisher.publish(1, timeout_seconds=1)
        assert report.failed == ()
        assert time.monotonic() - started > 1.6
        assert child.result() == 1
