"""A peer that lies, mixes rounds up or speaks too late: nothing of it is ever counted."""

import gc
import threading
import time

import numpy as np
import pytest

import flyweight as fw
from flyweight.errors import DigestMismatch, TransferTimeout, VersionError
from flyweight.live import messages
from peers import FakePublisher, FakeReplica, digest_of, shared

CONTENT = np.random.default_rng(1).integers(0, 256, 100_000, dtype=np.uint8)


# A publisher that lies.


@pytest.fixture(autouse=True)
def collected():
    """Leave no mapping behind to tests that count files."""
    yield
    gc.collect()


@pytest.fixture
def engine():
    return {"w": np.zeros_like(CONTENT)}


@pytest.fixture
def lying(address, engine, threads):
    """A publisher of ours, a replica that has agreed with it, and its update on the way."""
    with FakePublisher(address, CONTENT.tobytes()) as publisher:
        joining = threads.submit(fw.Replica, engine, address)
        publisher.welcome()
        publisher.agree()
        with joining.result(10) as replica:
            yield publisher, replica, threads.submit(replica.update, timeout_seconds=10)
            publisher.close()  # a replica that still waits need not wait for long


def is_failed(replica):
    """True if a replica says of itself that it must not be served."""
    with pytest.raises(VersionError, match="holds no whole version"):
        replica.check_servable()
    return (replica.state, replica.version, replica.session) == ("failed", None, "")


def test_a_publisher_that_tells_the_truth_is_believed(lying, engine):
    """Else what follows would prove nothing."""
    publisher, replica, update = lying
    publisher.begin(version=5)
    done = publisher.hear_of(messages.Done)
    assert done.digests == publisher.digests
    publisher.say(messages.Commit(1, done.digests))
    assert update.result(10).version == replica.version == 5
    assert engine["w"].tobytes() == CONTENT.tobytes()


LIES = {
    "another": lambda digests: (digests[0] ^ 1,),
    "none": lambda digests: (),
    "one more": lambda digests: (*digests, 7),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_commit_of_other_bytes_than_were_copied_is_no_commit(lying, lie):
    """The replica compares the publisher's digests with its own, whatever it was told."""
    publisher, replica, update = lying
    publisher.begin()
    publisher.hear_of(messages.Done)
    publisher.say(messages.Commit(1, LIES[lie](publisher.digests)))
    with pytest.raises(DigestMismatch, match="are not those that were committed"):
        update.result(10)
    assert is_failed(replica)
    fault = publisher.hear_of(messages.Fault)
    assert (fault.round, fault.kind, fault.is_touched) == (1, "DigestMismatch", True)


@pytest.mark.parametrize("is_true", [True, False])
def test_a_replica_that_commits_by_itself_compares_the_digests_too(lying, is_true):
    """It may if it was told them first, and its publisher is gone."""
    publisher, replica, update = lying
    publisher.begin(digests=publisher.digests if is_true else (7,))
    publisher.hear_of(messages.Done)
    publisher.close()
    if is_true:
        assert update.result(10).version == 5
    else:
        with pytest.raises(DigestMismatch):
            update.result(10)
        assert is_failed(replica)


@pytest.mark.parametrize("number", [0, 2, 2**40])
def test_a_commit_of_another_round_is_not_counted(lying, number):
    publisher, replica, update = lying
    publisher.begin()
    publisher.hear_of(messages.Done)
    publisher.say(messages.Commit(number, publisher.digests))
    publisher.say(messages.Abort(1, "PeerFailed", "on purpose"))
    with pytest.raises(fw.FlyweightError, match="on purpose"):
        update.result(10)
    assert is_failed(replica)


def test_the_end_of_another_round_does_not_end_this_one(lying, engine):
    publisher, _, update = lying
    publisher.say(messages.Commit(1, publisher.digests))  # before it began: of an earlier session
    publisher.begin(number=2)
    publisher.hear_of(messages.Done)
    publisher.say(messages.Abort(1, "PeerFailed", "of another round"))
    publisher.say(messages.Filled(1, 0))
    publisher.say(messages.Commit(2, publisher.digests))
    assert update.result(10).version == 5
    assert engine["w"].tobytes() == CONTENT.tobytes()


# A replica that lies.


@pytest.fixture
def fake(address):
    """A publisher, and a replica of ours that takes part in its rounds."""
    with (
        fw.Publisher({"w": shared(CONTENT)}, address, timeout_seconds=3) as publisher,
        FakeReplica(address) as replica,
    ):
        replica.join()
        yield publisher, replica


def begun(threads, publisher, replica, version, **options):
    """Publish to the fake replica; return what comes of it, and the round's beginning."""
    replica.say(messages.Ask(version, None, None))
    future = threads.submit(publisher.publish, version, num_replicas=1, **options)
    begin = replica.hear_of(messages.Begin)
    assert (begin.version, begin.strategy, len(begin.places)) == (version, "mapped", 1)
    return future, begin.round


def done(number):
    return messages.Done(number, (digest_of(CONTENT),), 0.0, 0.0)


def test_a_replica_that_tells_the_truth_is_committed(fake, threads):
    publisher, replica = fake
    future, number = begun(threads, publisher, replica, 1)
    replica.say(done(number))
    assert replica.hear_of(messages.Commit, messages.Abort) == messages.Commit(
        number, (digest_of(CONTENT),)
    )
    assert future.result(10).failed == ()


@pytest.mark.parametrize("step", [-1, 1, 2**40])
def test_what_is_done_in_another_round_is_not_counted(fake, threads, step):
    publisher, replica = fake
    future, number = begun(threads, publisher, replica, 1)
    replica.say(done(number + step))
    for _ in range(2):  # the publisher goes on waiting
        answer = replica.hear_of(messages.Going, messages.Commit, messages.Abort)
        assert answer == messages.Going(number)
    replica.say(done(number))
    answer = replica.hear_of(messages.Commit, messages.Abort)
    assert answer == messages.Commit(number, (digest_of(CONTENT),))
    assert future.result(10).failed == ()


def test_what_is_done_by_who_never_joined_is_not_counted(fake, threads, address):
    """The number of a round is easy to guess; it counts only from whom the round was begun with."""
    publisher, replica = fake
    future, number = begun(threads, publisher, replica, 1)
    with FakeReplica(address) as other:
        other.say(done(number))
        assert other.hear().kind == "PeerRefused"
        other.join("other")
        other.say(done(number))
        for _ in range(2):
            answer = replica.hear_of(messages.Going, messages.Commit, messages.Abort)
            assert answer == messages.Going(number)
    replica.say(done(number))
    assert future.result(10).failed == ()


# Leases: a trainer's memory is read where it lies, and may not change until that is over.


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
