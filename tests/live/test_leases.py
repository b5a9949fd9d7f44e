"""Leases: a trainer's memory is read in place, and may not change until the reading is over."""

import threading

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, in_time, until
from flyweight.errors import (
    TransferTimeout,
)
from flyweight.live import messages
from live_rounds import CONTENT, SECONDS, asking, begun, done, is_failed, updated
from peers import shared
from versioned_models import assign, holds, weights

pytestmark = pytest.mark.usefixtures("collected")


class HeldReader:
    """A reader that has begun, and is kept from the memory until it may read."""

    def __init__(self):
        self.has_begun, self.may_read = threading.Event(), threading.Event()

    def wait(self, version):
        self.has_begun.set()
        assert self.may_read.wait(LIMIT)


@pytest.mark.parametrize(
    "options", [{}, {"bucket_bytes": 4096, "depth": 2}, {"hold": True}], ids=str
)
def test_a_background_publish_lets_the_trainer_step_once_copied(address, threads, options):
    model, engine = weights(1, 1 << 20), weights(50, 1 << 20)
    with (
        fw.Publisher(model, address, **options) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        asking(publisher)
        lease = publisher.publish(1, background=True)
        lease.wait_copied(LIMIT)
        assert lease.is_copied
        assign(model, 2)  # a step
        assert future.result(LIMIT).version == 1
        assert lease.wait(LIMIT).failed == ()
        assert lease.is_done
        assert holds(engine, 1)


def test_publishes_in_the_background_follow_each_other(address, threads):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        for version in (1, 2, 3):
            future = threads.submit(replica.update, version, timeout_seconds=LIMIT)
            asking(publisher)
            lease = publisher.publish(version, background=True)
            lease.wait(LIMIT)
            future.result(LIMIT)
        assert replica.version == 3


@pytest.mark.parametrize("step", [-1, 1])
def test_what_is_copied_in_another_round_gives_no_lease_back(fake, threads, step):
    publisher, replica = fake
    lease, number = begun(threads, publisher, replica, 1, background=True)
    lease = lease.result(LIMIT)
    replica.say(messages.Copied(number + step))
    with pytest.raises(TransferTimeout):
        lease.wait_copied(0.3)
    replica.say(messages.Copied(number))
    lease.wait_copied(LIMIT)
    assert not lease.is_done
    replica.say(done(number))
    assert lease.wait(LIMIT).failed == ()


@pytest.mark.parametrize("has_buckets", [False, True], ids=["mapped", "mapped and host"])
def test_a_lease_lasts_until_every_reader_has_copied(address, threads, has_buckets):
    """C14: memory that is shared is lent: the trainer is told when it may step, and not before."""
    model, engine = {"w": shared(CONTENT)}, {"w": np.zeros_like(CONTENT)}
    if has_buckets:
        model["private"], engine["private"] = CONTENT[:5000].copy(), np.zeros(5000, np.uint8)
    held = HeldReader()
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        update = threads.submit(replica.update, timeout_seconds=LIMIT, before=held.wait)
        lease = publisher.publish(1, num_replicas=1, background=True)
        assert held.has_begun.wait(LIMIT)
        with pytest.raises(TransferTimeout, match="copied"):
            lease.wait_copied(0.3)
        assert not update.done()
        held.may_read.set()
        lease.wait_copied(LIMIT)
        model["w"][:] = 0  # a step
        assert update.result(LIMIT).strategy == ("host+mapped" if has_buckets else "mapped")
        assert lease.wait(LIMIT).failed == ()
        assert engine["w"].tobytes() == CONTENT.tobytes()


def test_a_lease_lasts_until_the_slowest_of_two_readers_has_copied(address, threads):
    """C14: the first one has copied long before."""
    model, held = {"w": shared(CONTENT)}, HeldReader()
    engines = [{"w": np.zeros_like(CONTENT)} for _ in range(2)]
    with (
        fw.Publisher(model, address) as publisher,
        fw.Replica(engines[0], address) as quick,
        fw.Replica(engines[1], address) as slow,
    ):
        late = threads.submit(slow.update, timeout_seconds=LIMIT, before=held.wait)
        update = threads.submit(quick.update, timeout_seconds=LIMIT)
        lease = publisher.publish(1, num_replicas=2, background=True)
        until(lambda: engines[0]["w"].tobytes() == CONTENT.tobytes())
        assert held.has_begun.wait(LIMIT)
        with pytest.raises(TransferTimeout, match="copied"):
            lease.wait_copied(0.3)
        held.may_read.set()
        lease.wait_copied(LIMIT)
        model["w"][:] = 0  # a step
        assert [each.result(LIMIT).version for each in (update, late)] == [1, 1]
        assert engines[1]["w"].tobytes() == CONTENT.tobytes()


def test_a_publish_returns_once_every_reader_is_done_and_not_before(address, threads):
    """C14: a step after `publish` cannot tear what an engine reads."""
    model, engine, held = {"w": shared(CONTENT)}, {"w": np.zeros_like(CONTENT)}, HeldReader()
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        update = threads.submit(replica.update, timeout_seconds=LIMIT, before=held.wait)

        def publish_and_step():
            report = publisher.publish(1, num_replicas=1)
            model["w"][:] = 0
            return report

        publishing = threads.submit(publish_and_step)
        assert held.has_begun.wait(LIMIT)
        with pytest.raises(TimeoutError):
            publishing.result(0.3)  # on a slow machine one that returns too early is not seen
        held.may_read.set()
        assert publishing.result(LIMIT).failed == ()
        assert update.result(LIMIT).version == 1
        assert engine["w"].tobytes() == CONTENT.tobytes()


def test_a_reader_that_is_given_up_never_commits_whatever_it_says_then(fake, threads):
    """C14: the trainer may step from then on, so what is read later is no version."""
    publisher, replica = fake
    with in_time(SECONDS):
        future, number = begun(threads, publisher, replica, 1, timeout_seconds=SECONDS)
        (failed,) = future.result(LIMIT).failed
    assert isinstance(failed.error, TransferTimeout)
    assert failed.is_touched
    replica.say(messages.Copied(number))
    replica.say(done(number))
    answer = replica.hear_of(messages.Abort, messages.Commit)
    assert (type(answer), answer.round, answer.kind) == (messages.Abort, number, "TransferTimeout")
    replica.say(messages.Ask(2, None, None))
    report = threads.submit(publisher.publish, 2, num_replicas=1)
    answer = replica.hear_of(messages.Begin, messages.Commit)
    assert isinstance(answer, messages.Begin), "nothing was committed after it was given up"
    replica.say(done(answer.round))
    assert report.result(LIMIT).failed == ()


def test_an_engine_that_is_given_up_before_it_reads_never_takes_what_it_reads_then(
    address, threads
):
    """C14: the trainer has stepped by then; the old version is kept, or none is held."""
    model, engine, held = {"w": shared(CONTENT)}, {"w": np.zeros_like(CONTENT)}, HeldReader()
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        updated(threads, publisher, replica, 1)
        update = threads.submit(replica.update, timeout_seconds=LIMIT, before=held.wait)
        asking(publisher)
        (failed,) = publisher.publish(2, num_replicas=1, timeout_seconds=SECONDS).failed
        assert isinstance(failed.error, TransferTimeout)
        model["w"][:] = 0
        held.may_read.set()
        with pytest.raises(TransferTimeout, match="copied"):
            update.result(LIMIT)
        if replica.state == "ready":  # it was told so before it began to read
            assert replica.version == 1
            assert engine["w"].tobytes() == CONTENT.tobytes()
        else:
            assert is_failed(replica)
