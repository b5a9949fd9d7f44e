"""Leases: a trainer's memory is read in place, and may not change until the reading is over."""

import threading
import time

import numpy as np
import pytest

import flyweight as fw
from flyweight.errors import (
    TransferTimeout,
)
from flyweight.live import messages
from live_rounds import CONTENT, asking, begun, done, is_failed
from peers import shared
from versioned_models import assign, holds, weights

pytestmark = pytest.mark.usefixtures("collected")


@pytest.mark.parametrize(
    "options", [{}, {"bucket_bytes": 4096, "depth": 2}, {"hold": True}], ids=str
)
def test_a_background_publish_lets_the_trainer_step_once_copied(address, threads, options):
    model, engine = weights(1, 1 << 20), weights(50, 1 << 20)
    with (
        fw.Publisher(model, address, **options) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=10)
        asking(publisher)
        lease = publisher.publish(1, background=True)
        lease.wait_copied(10)
        assert lease.is_copied
        assign(model, 2)  # a step
        assert future.result(10).version == 1
        assert lease.wait(10).failed == ()
        assert lease.is_done
        assert holds(engine, 1)


def test_publishes_in_the_background_follow_each_other(address, threads):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        for version in (1, 2, 3):
            future = threads.submit(replica.update, version, timeout_seconds=10)
            asking(publisher)
            lease = publisher.publish(version, background=True)
            lease.wait(10)
            future.result(10)
        assert replica.version == 3


@pytest.mark.parametrize("step", [-1, 1])
def test_what_is_copied_in_another_round_gives_no_lease_back(fake, threads, step):
    publisher, replica = fake
    lease, number = begun(threads, publisher, replica, 1, background=True)
    lease = lease.result(10)
    replica.say(messages.Copied(number + step))
    with pytest.raises(TransferTimeout):
        lease.wait_copied(1)
    replica.say(messages.Copied(number))
    lease.wait_copied(2)
    assert not lease.is_done
    replica.say(done(number))
    assert lease.wait(10).failed == ()


@pytest.mark.parametrize("has_buckets", [False, True], ids=["mapped", "mapped and host"])
def test_a_lease_lasts_until_every_reader_has_copied(address, threads, has_buckets):
    """C14: memory that is shared is lent: the trainer is told when it may step, and not before."""
    model, engine = {"w": shared(CONTENT)}, {"w": np.zeros_like(CONTENT)}
    if has_buckets:
        model["private"], engine["private"] = CONTENT[:5000].copy(), np.zeros(5000, np.uint8)
    may_read = threading.Event()
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        update = threads.submit(
            replica.update, timeout_seconds=20, before=lambda version: may_read.wait(20)
        )
        lease = publisher.publish(1, num_replicas=1, background=True)
        with pytest.raises(TransferTimeout, match="still being copied"):
            lease.wait_copied(1)
        assert not update.done()
        may_read.set()
        lease.wait_copied(10)
        model["w"][:] = 0  # a step
        assert update.result(10).strategy == ("host+mapped" if has_buckets else "mapped")
        assert lease.wait(10).failed == ()
        assert engine["w"].tobytes() == CONTENT.tobytes()


def test_a_publish_returns_once_every_reader_is_done_and_not_before(address, threads):
    """C14: a step after `publish` cannot tear what an engine reads."""
    model, engine, may_read = (
        {"w": shared(CONTENT)},
        {"w": np.zeros_like(CONTENT)},
        threading.Event(),
    )
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        update = threads.submit(
            replica.update, timeout_seconds=20, before=lambda version: may_read.wait(20)
        )

        def publish_and_step():
            report = publisher.publish(1, num_replicas=1)
            model["w"][:] = 0
            return report

        publishing = threads.submit(publish_and_step)
        with pytest.raises(TimeoutError):
            publishing.result(1)
        may_read.set()
        assert publishing.result(10).failed == ()
        assert update.result(10).version == 1
        assert engine["w"].tobytes() == CONTENT.tobytes()


def test_a_reader_that_is_given_up_never_commits_whatever_it_says_then(fake, threads):
    """C14: the trainer may step from then on, so what is read later is no version."""
    publisher, replica = fake
    started = time.monotonic()
    future, number = begun(threads, publisher, replica, 1)
    report = future.result(20)
    assert 3 <= time.monotonic() - started < 5.5
    (failed,) = report.failed
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
    assert report.result(10).failed == ()


def test_an_engine_that_is_given_up_before_it_reads_never_takes_what_it_reads_then(
    address, threads
):
    """C14: the trainer has stepped by then; the old version is kept, or none is held."""
    model, engine = {"w": shared(CONTENT)}, {"w": np.zeros_like(CONTENT)}
    may_read = threading.Event()
    with (
        fw.Publisher(model, address, timeout_seconds=2) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        update = threads.submit(replica.update, timeout_seconds=20)
        publisher.publish(1, num_replicas=1)
        update.result(10)
        update = threads.submit(
            replica.update, timeout_seconds=20, before=lambda version: may_read.wait(20)
        )
        (failed,) = publisher.publish(2, num_replicas=1, timeout_seconds=3).failed
        assert isinstance(failed.error, TransferTimeout)
        model["w"][:] = 0
        may_read.set()
        with pytest.raises(TransferTimeout, match="has not copied the weights in 3 s"):
            update.result(10)
        if replica.state == "ready":  # it was told so before it began to read
            assert replica.version == 1
            assert engine["w"].tobytes() == CONTENT.tobytes()
        else:
            assert is_failed(replica)
