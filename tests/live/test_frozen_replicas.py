"""A publish returns in its time: a frozen replica is named as late, a slow one is waited for."""

import threading
import time
from contextlib import suppress

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child, until
from flyweight.copies import PreparedCopies
from flyweight.errors import FlyweightError, TransferTimeout
from flyweight.live import messages
from flyweight.live.connection import Connection
from flyweight.live.member import MemberRound
from live_rounds import moved_clock, said_by
from versioned_models import holds, weights

BUCKETS = {"bucket_bytes": 1 << 16, "depth": 2}


def replica_that_freezes(address, moment, pipe):
    """Wait at a moment of a round to be stopped; return the state when it goes on."""
    send, run, is_there = Connection.send, PreparedCopies.run, []

    def wait():
        if not is_there:
            is_there.append(True)
            pipe.send(("there", None))
            pipe.recv()

    def waiting_send(self, message, to=b""):
        send(self, message, to)
        if moment == "copied" and isinstance(message, messages.Done):
            wait()

    def waiting_run(self, deadline, **options):
        if moment == "copying":
            wait()
        return run(self, deadline, **options)

    Connection.send, PreparedCopies.run = waiting_send, waiting_run
    replica = fw.Replica(weights(50), address, name="frozen")
    try:
        before = {"before": lambda version: wait()} if moment == "draining" else {}
        replica.update(timeout_seconds=LIMIT, **before)
    except FlyweightError as error:
        return replica.state, replica.version, type(error).__name__
    return replica.state, replica.version, None


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole", marks=pytest.mark.check),
        pytest.param(BUCKETS, id="buckets", marks=pytest.mark.campaign),
    ],
)
@pytest.mark.parametrize("moment", ["asked", "draining", "copying"])
def test_a_frozen_replica_is_late_and_delays_nobody(address, threads, monkeypatch, moment, options):
    model, engine = weights(1), weights(51)
    passed, emptied = moved_clock(monkeypatch), said_by(monkeypatch, "other", messages.Emptied)
    with (
        Child(replica_that_freezes, address, moment) as child,
        fw.Publisher(model, address, silence_seconds=2 * LIMIT, **options) as publisher,
        fw.Replica(engine, address, name="other") as replica,
    ):
        update = threads.submit(replica.update, timeout_seconds=LIMIT)
        until(lambda: len(publisher.waiting) == 2)
        if moment == "asked":
            child.stop()
        publish = threads.submit(publisher.publish, 1, timeout_seconds=LIMIT)
        if moment != "asked":
            assert child.told() == ("there", None)
            child.stop()
        # The other one has all that there is: with buckets, as many as there are slots.
        until(lambda: len(emptied) == options["depth"] if options else update.done())
        passed[0] = 2 * LIMIT
        report = publish.result(LIMIT)
        assert update.result(LIMIT).version == 1
        assert holds(engine, 1)
        (failed,) = report.failed
        assert isinstance(failed.error, TransferTimeout)
        assert "'frozen'" in str(failed.error)
        assert str(failed.error) in str(report)
        child.go_on()
        child.send("go on")
        state, version, _ = child.result()
    # It keeps what it had if it hears of its end before it writes.
    assert (state, version) in [("failed", None), ("empty", None)][: 1 + (moment != "copying")]


def test_a_replica_that_freezes_after_it_has_copied_has_committed(address, threads, monkeypatch):
    """All its bytes were right."""
    has_copied, is_frozen, receive = threading.Event(), threading.Event(), MemberRound.receive

    def noting(self, message):
        receive(self, message)
        if isinstance(message, messages.Done):
            has_copied.set()

    monkeypatch.setattr(MemberRound, "receive", noting)
    with (
        Child(replica_that_freezes, address, "copied") as child,
        fw.Publisher(weights(1), address) as publisher,
        fw.Replica(weights(51), address, name="other") as replica,
    ):
        update = threads.submit(
            replica.update, timeout_seconds=LIMIT, before=lambda version: is_frozen.wait(LIMIT)
        )
        until(lambda: len(publisher.waiting) == 2)
        publish = threads.submit(publisher.publish, 1, timeout_seconds=2 * LIMIT)
        assert has_copied.wait(LIMIT)
        assert child.told() == ("there", None)
        child.stop()
        is_frozen.set()
        assert publish.result(LIMIT).failed == ()
        assert update.result(LIMIT).version == 1
        child.go_on()
        child.send("go on")
        assert child.result() == ("ready", 1, None)


def slow_replica(address, seconds, pipe):
    run = PreparedCopies.run

    def slow_run(self, deadline, **options):
        time.sleep(seconds)
        return run(self, deadline, **options)

    PreparedCopies.run = slow_run
    engine = {"w": np.zeros(1 << 26, np.uint8)}
    with fw.Replica(engine, address, name="slow") as replica:
        replica.update(timeout_seconds=LIMIT)
        return int(engine["w"].sum()), replica.version


@pytest.mark.campaign
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


def slow_loader(address, pipe):
    """A replica whose progress only its heartbeats tell: as slow as it is told."""

    def load(named):
        for _ in named:
            time.sleep(seconds)

    with fw.Replica(load, address, name="slow", framework="numpy") as replica:
        while replica.version is None:
            version, seconds = pipe.recv()
            with suppress(FlyweightError):
                replica.update(version, timeout_seconds=LIMIT)
        return replica.version


@pytest.mark.check
def test_progress_between_two_heartbeats_is_seen(address):
    """A replica beats once in a second; the publisher asks it more often if time is short."""
    model = {f"w{number}": np.ones(1000) for number in range(40)}
    with (
        Child(slow_loader, address) as child,
        fw.Publisher(model, address, hold=True, transport="mapped") as publisher,
    ):
        for version, seconds in enumerate((1, 4, 12), start=1):  # a slow machine needs a longer one
            child.send((version, seconds / 20))
            until(lambda: publisher.waiting)
            started = time.monotonic()
            report = publisher.publish(version, timeout_seconds=seconds)
            if not report.failed:
                break
        assert report.failed == ()
        assert time.monotonic() - started > 1.6 * seconds
        assert child.result() == version
