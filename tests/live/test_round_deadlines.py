"""Every wait ends when it is said to: not before, and long before twice that."""

import threading
import time
from time import monotonic

import pytest

import flyweight as fw
from child_processes import in_time
from flyweight.errors import (
    TransferTimeout,
)
from flyweight.live import messages, replica
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
        delayed(monkeypatch, Connection, "send", 0.3, is_commit)
        assert replica.update(timeout_seconds=0.2).version == 1
        with pytest.raises(TransferTimeout):
            replica.update(timeout_seconds=0)
        assert (replica.state, replica.version) == ("ready", 1)


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


def timed(wait):
    """Return what a wait raised, and how long it took."""
    started = monotonic()
    with pytest.raises(TransferTimeout) as raised:
        wait()
    return str(raised.value), monotonic() - started


def test_every_wait_that_nothing_ends_is_over_at_its_deadline(address, tmp_path, threads):
    """All of them at once, since each takes its time."""
    other = f"unix:{tmp_path}/other"
    with (
        fw.Publisher(weights(1), address) as publisher,
        fw.Replica(weights(2), address) as waiting,
        fw.Replica(weights(2), address) as following,
        fw.Replica(weights(2), f"unix:{tmp_path}/nobody") as alone,
        fw.Publisher({"w": shared(CONTENT)}, other) as busy,
        FakeReplica(other) as fake,
    ):
        fake.join()
        fake.say(messages.Ask(1, None, None))
        lease = busy.publish(1, num_replicas=1, background=True)  # which the fake never ends
        fake.hear_of(messages.Begin)
        waits = [
            ("version 7 from", lambda: waiting.update(7, timeout_seconds=SECONDS)),
            ("a version from", lambda: next(following.follow(timeout_seconds=SECONDS))),
            ("no publisher came in time", lambda: alone.update(timeout_seconds=SECONDS)),
            (
                "of 9 replicas requested version 1 in time",
                lambda: publisher.publish(1, num_replicas=9, timeout_seconds=SECONDS),
            ),
            (
                "the last publish is still under way after 3 s",
                lambda: busy.publish(2, timeout_seconds=SECONDS),
            ),
            ("still being copied after 3 s", lambda: lease.wait_copied(SECONDS)),
            ("still under way after 3 s", lambda: lease.wait(SECONDS)),
        ]
        futures = [threads.submit(timed, wait) for _, wait in waits]
        found = [future.result(20) for future in futures]
        fake.say(messages.Bye("enough"))
    for (text, _), (error, spent) in zip(waits, found, strict=True):
        assert text in error
        assert SECONDS - 0.1 <= spent < 5.4, text


def test_a_replica_waits_for_progress_as_long_as_it_says_and_longer_if_told_to(
    address, engine, threads, monkeypatch
):
    """A publisher that lives and brings nothing is given up; one that says `Going` is not."""
    monkeypatch.setattr(replica, "MIN_PROGRESS_SECONDS", 0.0)  # 10 s at least would take 10 s
    with (
        FakePublisher(address, CONTENT.tobytes()) as publisher,
        joined(threads, publisher, engine, address) as waiting,
    ):
        update = threads.submit(waiting.update, timeout_seconds=SECONDS)
        publisher.begin()
        publisher.hear_of(messages.Done)
        for _ in range(4):
            time.sleep(SECONDS / 3)  # in all, longer than it would wait
            assert not update.done()
            publisher.say(messages.Going(1))
        with (
            in_time(SECONDS),
            pytest.raises(TransferTimeout, match="a commit from .* did not come in time"),
        ):
            update.result(20)
        assert waiting.state == "failed"
