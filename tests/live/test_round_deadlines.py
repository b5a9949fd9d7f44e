"""Every wait ends when it is said to: not before, and long before twice that."""

import gc
import time
from time import monotonic

import numpy as np
import pytest

import flyweight as fw
from flyweight.errors import TransferTimeout
from flyweight.live import messages, replica
from live_models import Child, in_time, until, weights
from peers import FakePublisher, FakeReplica, shared

CONTENT = np.random.default_rng(1).integers(0, 256, 5000, dtype=np.uint8)
SECONDS = 3.0
BEAT_SECONDS = SECONDS / 5
"""Who is heard of may have spoken so much earlier."""


@pytest.fixture(autouse=True)
def collected():
    """Leave no mapping behind to tests that count files."""
    yield
    gc.collect()


@pytest.fixture
def engine():
    return {"w": np.zeros_like(CONTENT)}


def joined(threads, publisher, engine, address):
    """Return a replica that has agreed with a publisher of ours."""
    joining = threads.submit(fw.Replica, engine, address)
    publisher.welcome()
    publisher.agree()
    return joining.result(10)


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


def test_a_late_reader_is_given_up_after_half_of_what_the_next_publish_may_take(address):
    with (
        fw.Publisher({"w": CONTENT}, address, hold=True, timeout_seconds=60) as publisher,
        FakeReplica(address) as reader,
    ):
        publisher.publish(1)
        reader.join()
        reader.say(messages.Ask(1, None, None))
        begin = reader.hear_of(messages.Begin)
        assert begin.origin == "held"
        with in_time(SECONDS):
            publisher.publish(2, timeout_seconds=2 * SECONDS)
        abort = reader.hear_of(messages.Abort, messages.Commit)
        assert (abort.round, abort.kind) == (begin.round, "TransferTimeout")


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


# Silence.


def quiet_publisher(address, pipe):
    publisher = fw.Publisher(weights(1), address, silence_seconds=SECONDS)
    pipe.send(("there", None))
    pipe.recv()
    publisher.close()


def test_a_publisher_that_stands_still_is_given_up_in_time(address):
    """Its process is there, and so is its door: nothing but its silence tells."""
    with Child(quiet_publisher, address) as child:
        child.told()
        with fw.Replica(weights(2), address) as waiting:
            child.stop()
            with in_time(SECONDS, early=2 * BEAT_SECONDS):
                until(lambda: not waiting.is_connected, 20)


def test_a_publisher_that_falls_silent_in_a_round_is_given_up_in_time(address, engine, threads):
    """A round may wait for 20 s without progress, but not for who is silent for 3."""
    with (
        FakePublisher(address, CONTENT.tobytes(), silence_seconds=SECONDS) as publisher,
        joined(threads, publisher, engine, address) as waiting,
    ):
        update = threads.submit(waiting.update, timeout_seconds=20)
        publisher.begin()
        with in_time(SECONDS), pytest.raises(TransferTimeout, match="was silent for 3 s"):
            update.result(20)
        assert waiting.state == "failed"


def quiet_replica(address, pipe):
    pipe.recv()
    with fw.Replica(weights(2), address):
        pipe.recv()


def test_a_replica_that_stands_still_is_given_up_in_time(address):
    with (
        Child(quiet_replica, address) as child,
        fw.Publisher(weights(1), address, silence_seconds=SECONDS) as publisher,
    ):
        child.send("there is a publisher")
        until(lambda: publisher.replicas)
        child.stop()
        with in_time(SECONDS, early=2 * BEAT_SECONDS):
            until(lambda: not publisher.replicas, 20)


def test_a_replica_that_falls_silent_in_a_round_is_given_up_in_time(address, threads):
    with (
        fw.Publisher({"w": shared(CONTENT)}, address, silence_seconds=SECONDS) as publisher,
        FakeReplica(address) as fake,
    ):
        fake.join()
        fake.say(messages.Ask(1, None, None))
        with in_time(SECONDS):
            (failed,) = publisher.publish(1, num_replicas=1, timeout_seconds=20).failed
        assert "'fake' was silent for 3 s" in str(failed.error)
        assert fake.hear_of(messages.Bye, messages.Commit).text == str(failed.error)


# Silence that is our own: who was stopped could hear nobody, and gives nobody up for that.


def test_a_publisher_that_was_stopped_itself_gives_no_replica_up_for_that(address):
    """Nobody spoke while it stood still: it counts from when it goes on."""
    with Child(quiet_publisher, address) as child:
        child.told()
        with FakeReplica(address) as fake:
            fake.join()
            child.stop()
            time.sleep(SECONDS + 1)
            while fake.has_heard():
                assert isinstance(fake.hear(), messages.Tick)
            child.go_on()
            assert isinstance(fake.hear(), messages.Tick)
            fake.say(messages.Tick())
            assert isinstance(fake.hear(), messages.Tick)


def waiting_replica(address, pipe):
    with fw.Replica({"w": np.zeros_like(CONTENT)}, address) as waiting:
        waiting.update(timeout_seconds=60)


def test_a_replica_that_was_stopped_itself_does_not_leave_its_publisher_for_that(address):
    with (
        FakePublisher(address, CONTENT.tobytes(), silence_seconds=SECONDS) as publisher,
        Child(waiting_replica, address) as child,
    ):
        publisher.welcome()
        publisher.agree()
        publisher.hear_of(messages.Ask)
        child.stop()
        time.sleep(SECONDS + 1)
        while publisher.has_heard():
            assert isinstance(publisher.hear(), messages.Tick)
        child.go_on()
        for _ in range(3):  # if it left, a hello would follow its first beat
            assert isinstance(publisher.hear(), messages.Tick)
        publisher.say(messages.Tick())
        assert isinstance(publisher.hear(), messages.Tick)
