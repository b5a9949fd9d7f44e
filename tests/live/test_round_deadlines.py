"""Every wait ends when it is said to, and not before."""

import threading
import time
from contextlib import suppress

import pytest

import flyweight as fw
from child_processes import LIMIT, in_time
from flyweight.errors import (
    TransferTimeout,
)
from flyweight.live import line, messages, replica
from flyweight.live.connection import Connection
from live_rounds import CONTENT, SECONDS, delayed, joined
from peers import FakePublisher, FakeReplica, shared
from versioned_models import weights

pytestmark = pytest.mark.usefixtures("collected")


def is_commit(connection, message, *rest):
    return isinstance(message, messages.Commit)


def test_a_short_wait_for_a_version_is_no_short_wait_for_its_bytes(address, monkeypatch):
    """To give up in the middle of a round costs the version that was there."""
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        publisher.publish(1)
        for seconds in (0.3, 3, 30):  # a slow machine needs a longer one until the version is there
            with monkeypatch.context() as patch:
                delayed(patch, Connection, "send", 1.5 * seconds, is_commit)
                with suppress(TransferTimeout):
                    assert replica.update(timeout_seconds=seconds).version == 1
                    break
            assert replica.state == "empty"
        with pytest.raises(TransferTimeout):
            replica.update(timeout_seconds=0)
        assert (replica.state, replica.version) == ("ready", 1)


@pytest.fixture
def patient_lines(monkeypatch):
    """Let no deadline of its own end the wait for a line to the publisher."""
    monkeypatch.setattr(line, "ANSWER_SECONDS", 2 * LIMIT)


def test_an_update_from_a_publisher_that_stands_still_ends_in_time(bereft, patient_lines):
    with in_time(SECONDS), pytest.raises(TransferTimeout, match="answer"):
        bereft.update(timeout_seconds=SECONDS)


def test_an_update_at_a_door_that_does_not_answer_ends_when_it_is_over(bereft, patient_lines):
    over = threading.Event()
    with in_time(0.3), pytest.raises(TransferTimeout):
        threading.Timer(0.3, over.set).start()
        bereft.update(timeout_seconds=2 * LIMIT, is_over=over.is_set)


def timed_out(wait):
    """Return what a wait raised at its deadline."""
    with in_time(SECONDS), pytest.raises(TransferTimeout) as raised:
        wait()
    return str(raised.value)


def test_every_wait_that_nothing_ends_is_over_at_its_deadline(address, tmp_path, threads):
    """All of them at once, since each takes its time."""
    other = f"unix:{tmp_path}/other"
    with (
        fw.Publisher(weights(1), address) as publisher,
        fw.Replica(weights(2), address) as waiting,
        fw.Replica(weights(2), address) as following,
        fw.Replica(weights(2), f"unix:{tmp_path}/nobody") as alone,
        fw.Publisher(
            {"w": shared(CONTENT)}, other, timeout_seconds=LIMIT, silence_seconds=LIMIT
        ) as busy,
        FakeReplica(other) as fake,
    ):
        fake.join()
        fake.say(messages.Ask(1, None, None))
        lease = busy.publish(1, num_replicas=1, background=True)  # which the fake never ends
        fake.hear_of(messages.Begin)
        waits = [
            ("version 7", lambda: waiting.update(7, timeout_seconds=SECONDS)),
            ("a version", lambda: next(following.follow(timeout_seconds=SECONDS))),
            ("no publisher", lambda: alone.update(timeout_seconds=SECONDS)),
            (
                "9 replicas",
                lambda: publisher.publish(1, num_replicas=9, timeout_seconds=SECONDS),
            ),
            (
                "under way",
                lambda: busy.publish(2, timeout_seconds=SECONDS),
            ),
            ("being copied", lambda: lease.wait_copied(SECONDS)),
            ("under way", lambda: lease.wait(SECONDS)),
        ]
        futures = [threads.submit(timed_out, wait) for _, wait in waits]
        found = [future.result(LIMIT) for future in futures]
        fake.say(messages.Bye("enough"))
    for (text, _), error in zip(waits, found, strict=True):
        assert text in error


def test_a_publisher_that_lives_and_brings_nothing_is_given_up(address, engine, threads):
    def expect_progress(version):
        waiting._round._timeout_seconds = SECONDS

    with (
        FakePublisher(address, CONTENT.tobytes(), silence_seconds=LIMIT) as publisher,
        joined(threads, publisher, engine, address) as waiting,
    ):
        update = threads.submit(waiting.update, timeout_seconds=LIMIT, before=expect_progress)
        with in_time(SECONDS), pytest.raises(TransferTimeout, match="a commit"):
            publisher.begin()
            publisher.hear_of(messages.Done)
            update.result(LIMIT)
        assert waiting.state == "failed"


@pytest.mark.campaign
def test_a_replica_waits_for_progress_as_long_as_it_says_and_longer_if_told_to(
    address, engine, threads, monkeypatch
):
    """One that says `Going` is not given up."""
    seconds = 3.0
    monkeypatch.setattr(replica, "MIN_PROGRESS_SECONDS", 0.0)  # 10 s at least would take 10 s
    with (
        FakePublisher(address, CONTENT.tobytes()) as publisher,
        joined(threads, publisher, engine, address) as waiting,
    ):
        update = threads.submit(waiting.update, timeout_seconds=seconds)
        publisher.begin()
        publisher.hear_of(messages.Done)
        for _ in range(4):
            time.sleep(seconds / 3)  # in all, longer than it would wait
            assert not update.done()
            publisher.say(messages.Going(1))
        with in_time(seconds), pytest.raises(TransferTimeout, match="a commit"):
            update.result(LIMIT)
        assert waiting.state == "failed"
