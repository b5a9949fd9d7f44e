"""Versions that stay available in the trainer's own memory between two publishes."""

import threading

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, in_time
from flyweight.errors import DigestMismatch, SpecError, TransferTimeout, VersionError
from flyweight.live import messages
from flyweight.live.published_model import PublishedVersion
from flyweight.live.running_round import RunningRound
from live_rounds import CONTENT, SECONDS, asking, call_before, is_failed, updated
from peers import FakeReplica, shared
from versioned_models import assign, holds, weights

pytestmark = pytest.mark.usefixtures("collected")


@pytest.fixture(params=["shared", "private"])
def model(request):
    """Weights of version 1, which other processes can map, or which they cannot."""
    made = weights(1)
    if request.param == "private":
        return made
    return {
        name: shared(each.reshape(-1).view(np.uint8)).view(each.dtype).reshape(each.shape)
        for name, each in made.items()
        if each.size
    } | {"empty": made["empty"]}


def test_a_version_that_stays_is_taken_at_once_until_it_is_withdrawn(address, model):
    engine = weights(50)
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        publisher.publish(1, stays=True)
        report = replica.update(timeout_seconds=LIMIT)
        assert (report.version, report.origin, report.verified) == (1, "published", "live")
        assert holds(engine, 1)
        assert replica.update(1, may_keep=True) is report
        with pytest.raises(TransferTimeout):  # it has that one
            replica.update(timeout_seconds=0.1)
        publisher.withdraw()
        with fw.Replica(weights(51), address) as late:
            with pytest.raises(TransferTimeout):
                late.update(timeout_seconds=0.2)
            with pytest.raises(VersionError, match="does not hold it any more"):
                late.update(1, timeout_seconds=LIMIT)


def test_a_publish_is_the_end_of_the_version_that_stayed(address, threads, model):
    engine = weights(50)
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        publisher.publish(1, stays=True)
        publisher.withdraw()
        assign(model, 2)
        publisher.publish(2, stays=True)
        publisher.withdraw()
        assign(model, 3)
        updated(threads, publisher, replica, 3, stays=True)
        assert holds(engine, 3)
        with fw.Replica(weights(51), address) as late:
            assert late.update(timeout_seconds=LIMIT).version == 3
        publisher.publish(4)
        with fw.Replica(weights(51), address) as late, pytest.raises(TransferTimeout):
            late.update(timeout_seconds=0.2)


def test_who_asks_for_a_version_while_it_is_published_gets_it_when_it_stays(address, threads):
    model, engine = weights(1), weights(50)
    has_begun, may_go_on = threading.Event(), threading.Event()

    def wait(version):
        has_begun.set()
        assert may_go_on.wait(LIMIT)

    with (
        fw.Publisher(model, address) as publisher,
        fw.Replica(weights(51), address) as first,
        fw.Replica(engine, address) as second,
    ):
        slow = threads.submit(first.update, timeout_seconds=LIMIT, before=wait)
        publishing = threads.submit(publisher.publish, 1, stays=True, num_replicas=1)
        assert has_begun.wait(LIMIT)
        other = threads.submit(second.update, 1, timeout_seconds=LIMIT)
        asking(publisher)
        may_go_on.set()
        assert (slow.result(LIMIT).version, publishing.result(LIMIT).failed) == (1, ())
        assert other.result(LIMIT).version == 1
        assert holds(engine, 1)


def test_digests_are_computed_once_for_all_who_ask_later(address, threads, monkeypatch):
    computed = []
    call_before(monkeypatch, PublishedVersion, "_digests", lambda: computed.append(1))
    with fw.Publisher(weights(1), address) as publisher:
        publisher.publish(1, stays=True)
        assert computed == []
        engines = [weights(50 + n) for n in range(4)]
        replicas = [fw.Replica(engine, address) for engine in engines]
        futures = [threads.submit(each.update, timeout_seconds=LIMIT) for each in replicas]
        assert [future.result(LIMIT).version for future in futures] == [1] * 4
        assert all(holds(engine, 1) for engine in engines)
        assert computed == [1]
        for each in replicas:
            each.close()


def test_a_step_of_the_trainer_without_a_withdrawal_is_found(address, model):
    engine = weights(50)
    with fw.Publisher(model, address) as publisher:
        publisher.publish(1, stays=True)
        with fw.Replica(weights(51), address) as first:
            first.update(timeout_seconds=LIMIT)
        model["norm"][3] += 1
        with fw.Replica(engine, address) as replica:
            with pytest.raises(DigestMismatch, match="norm"):
                replica.update(timeout_seconds=LIMIT)
            assert is_failed(replica)
        assign(model, 2)
        publisher.publish(2, stays=True)
        with fw.Replica(engine, address) as replica:
            assert replica.update(timeout_seconds=LIMIT).version == 2
            assert holds(engine, 2)


@pytest.mark.parametrize("end", ["withdraw", "publish"])
def test_a_late_reader_is_given_up_after_half_of_the_time(address, end):
    with (
        fw.Publisher(
            {"w": shared(CONTENT)}, address, timeout_seconds=LIMIT, silence_seconds=2 * LIMIT
        ) as publisher,
        FakeReplica(address) as reader,
    ):
        publisher.publish(1, stays=True)
        reader.join()
        reader.say(messages.Ask(1, None, None))
        begin = reader.hear_of(messages.Begin)
        assert (begin.origin, begin.strategy) == ("published", "mapped")
        assert begin.digests is not None
        with in_time(SECONDS / 2):
            if end == "withdraw":
                publisher.withdraw(timeout_seconds=SECONDS)
            else:
                publisher.publish(2, timeout_seconds=SECONDS)
        abort = reader.hear_of(messages.Abort, messages.Commit)
        assert (abort.round, abort.kind) == (begin.round, "TransferTimeout")


def test_a_withdrawal_waits_for_those_who_read_and_lets_nobody_begin(address, threads, model):
    engine, other = weights(50), weights(51)
    has_begun, may_go_on = threading.Event(), threading.Event()

    def wait(version):
        has_begun.set()
        assert may_go_on.wait(LIMIT)

    with (
        fw.Publisher(model, address) as publisher,
        fw.Replica(engine, address) as replica,
        fw.Replica(other, address) as late,
    ):
        publisher.publish(1, stays=True)
        reading = threads.submit(replica.update, timeout_seconds=LIMIT, before=wait)
        assert has_begun.wait(LIMIT)
        withdrawing = threads.submit(publisher.withdraw, timeout_seconds=LIMIT)
        with pytest.raises(TransferTimeout):
            late.update(timeout_seconds=0.3)
        assert not withdrawing.done()
        may_go_on.set()
        withdrawing.result(LIMIT)
        assign(model, 9)
        assert reading.result(LIMIT).version == 1
        assert holds(engine, 1)


def test_a_round_that_is_prepared_during_the_withdrawal_does_not_begin(
    address, threads, monkeypatch
):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        publisher.publish(1, stays=True)
        has_begun, may_go_on = threading.Event(), threading.Event()

        def wait():
            has_begun.set()
            assert may_go_on.wait(LIMIT)

        with monkeypatch.context() as patch:
            call_before(patch, RunningRound, "run", wait)
            future = threads.submit(replica.update, timeout_seconds=LIMIT)
            assert has_begun.wait(LIMIT)
            publisher.withdraw(timeout_seconds=SECONDS)
            assign(model, 2)
            may_go_on.set()
        asking(publisher)
        publisher.publish(2)
        assert future.result(LIMIT).version == 2
        assert holds(engine, 2)


def test_a_version_stays_only_where_its_memory_is_the_publishers_own(address, tmp_path):
    with (
        fw.Publisher(weights(1), address, hold=True) as publisher,
        pytest.raises(SpecError, match="without hold=True"),
    ):
        publisher.publish(1, stays=True)
    with fw.Publisher(weights(1), address) as publisher:
        with pytest.raises(SpecError, match="publish in the foreground"):
            publisher.publish(1, stays=True, background=True)
        publisher.withdraw()  # nothing to do


def test_publishers_of_several_ranks_are_told_what_to_use_instead(address, threads):
    def rank_of(rank):
        with fw.Publisher({f"w{rank}": np.ones(3)}, address, rank=rank, num_ranks=2) as publisher:
            with pytest.raises(SpecError, match="hold=True"):
                publisher.publish(1, stays=True)
            publisher.publish(1)

    for each in [threads.submit(rank_of, rank) for rank in (0, 1)]:
        each.result(LIMIT)
