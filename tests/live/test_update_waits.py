"""Which version an update gets, and how long it waits for it."""

import threading
from concurrent.futures import wait

import pytest

import flyweight as fw
from child_processes import LIMIT, until
from flyweight.errors import (
    TransferTimeout,
    VersionError,
)
from flyweight.live.bucket_slots import BucketSlots
from live_rounds import asking, call_before, updated
from versioned_models import assign, holds, weights


def test_who_asks_late_waits_for_the_next_publish_up_to_its_deadline(address, threads):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        publisher.publish(1)
        with pytest.raises(TransferTimeout, match="a version"):
            replica.update(timeout_seconds=0.1)
        assert holds(engine, 50)
        assert replica.state == "empty"
        with pytest.raises(VersionError, match="version 1 "):
            replica.update(1, timeout_seconds=LIMIT)
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        asking(publisher)
        assign(model, 2)
        publisher.publish(2)
        assert future.result(LIMIT).version == 2
        assert holds(engine, 2)


def test_a_version_that_was_asked_for_never_changes_on_the_way(address, threads):
    with fw.Publisher(weights(1), address) as publisher, fw.Replica(weights(2), address) as replica:
        future = threads.submit(replica.update, 5, timeout_seconds=LIMIT)
        asking(publisher)
        assert publisher.publish(4).replicas == ()
        assert publisher.publish(5).replicas[0].error is None
        assert future.result(LIMIT).version == 5
        assert replica.update(5).version == 5  # it is here already
        future = threads.submit(replica.update, 6, timeout_seconds=LIMIT)
        asking(publisher)
        publisher.publish(7)
        with pytest.raises(VersionError, match="version 6 .* 7"):
            future.result(LIMIT)


def test_follow_yields_each_version_as_it_comes(address, threads):
    model, engine = weights(1), weights(50)
    seen = []

    def follow(replica):
        for report in replica.follow(timeout_seconds=LIMIT):
            seen.append((report.version, holds(engine, report.version)))
            if report.version == 3:
                return

    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        future = threads.submit(follow, replica)
        for version in (1, 2, 3):
            assign(model, version)
            publisher.publish(version, num_replicas=1)
        future.result(LIMIT)
    assert seen == [(1, True), (2, True), (3, True)]


def test_a_replica_may_be_there_before_its_publisher_and_outlive_it(address, threads):
    model, engine = weights(1), weights(50)
    with fw.Replica(engine, address) as replica:
        with pytest.raises(TransferTimeout, match="no publisher"):
            replica.update(timeout_seconds=0.2)
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        with fw.Publisher(model, address) as publisher:
            publisher.publish(1, num_replicas=1)
            future.result(LIMIT)
        assert replica.version == 1  # still whole
        with fw.Publisher(model, address) as publisher:
            # Another session's version 1 is not the one that is held.
            future = threads.submit(replica.update, 1, timeout_seconds=LIMIT)
            asking(publisher)
            assign(model, 4)
            publisher.publish(1, num_replicas=1)
            future.result(LIMIT)
            assert holds(engine, 4)


@pytest.mark.parametrize("should_verify", [True, False])
def test_a_replica_that_gives_up_while_a_round_is_made_gets_the_next_one_right(
    address, threads, monkeypatch, should_verify
):
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address, should_verify=should_verify) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        updated(threads, publisher, replica, 1)
        model["step"] = 1  # so that lists must be sent anew
        with monkeypatch.context() as patch:
            model.update(weights(2))
            is_over = threading.Event()
            future = threads.submit(replica.update, timeout_seconds=LIMIT, is_over=is_over.is_set)
            until(lambda: publisher.waiting)

            def give_up():
                is_over.set()
                replica.wake()
                assert wait([future], LIMIT).done

            call_before(patch, BucketSlots, "lay_out", give_up)
            report = publisher.publish(2)
            assert isinstance(report.replicas[0].error, TransferTimeout)
            with pytest.raises(TransferTimeout):
                future.result(LIMIT)
        assert (replica.state, replica.version) == ("ready", 1)
        assert holds(engine, 1)
        for version in (3, 4):
            assign(model, version)
            updated(threads, publisher, replica, version)
            assert holds(engine, version)
