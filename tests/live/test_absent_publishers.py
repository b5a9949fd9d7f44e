"""Replicas whose publisher is gone, or only slow, and others that hold older and newer versions."""

from contextlib import ExitStack

import pytest

import flyweight as fw
from child_processes import LIMIT, until
from flyweight.errors import TransferTimeout
from flyweight.live import messages
from flyweight.live.planner import Planner
from live_rounds import delayed, updated
from peers import FakeReplica
from versioned_models import assign, holds, weights

pytestmark = pytest.mark.usefixtures("collected")


@pytest.fixture
def served(tmp_path):
    """Where a replica of this test serves."""
    return f"unix:{tmp_path}/served"


@pytest.fixture
def behind(address, served, threads, monkeypatch):
    """A trainer at version 2, a replica that has it, its weights, and one that serves version 1."""
    monkeypatch.setattr("flyweight.live.reconnect._ABSENT_SECONDS", 0.2)
    monkeypatch.setattr("flyweight.live.reconnect._PEER_SECONDS", 2 * LIMIT)
    model, engine = weights(1), weights(50)
    with ExitStack() as stack:
        publisher = stack.enter_context(fw.Publisher(model, address))
        old = stack.enter_context(fw.Replica(weights(51), address, serve_on=served))
        updated(threads, publisher, old, 1)
        assign(model, 2)
        new = stack.enter_context(fw.Replica(engine, address, name="new", peers=[served]))
        updated(threads, publisher, new, 2)
        yield publisher, new, engine


def test_a_replica_without_its_trainer_does_not_go_back_to_what_others_hold(behind):
    publisher, new, engine = behind
    publisher.close()
    with pytest.raises(TransferTimeout):
        new.update(timeout_seconds=1)
    assert new.version == 2
    assert holds(engine, 2)
    assert new.update(1, timeout_seconds=LIMIT).version == 1  # it was asked for
    assert holds(engine, 1)


def test_one_that_holds_nothing_newer_does_not_keep_a_replica_from_the_next(
    address, served, tmp_path, threads, behind
):
    publisher, _, _ = behind
    second = f"unix:{tmp_path}/second"
    with (
        fw.Replica(weights(52), address, serve_on=second) as newest,
        fw.Replica(weights(53), address, peers=[served, second]) as late,
    ):
        updated(threads, publisher, late, 3)
        updated(threads, publisher, newest, 4)
        publisher.close()
        assert late.update(timeout_seconds=LIMIT).version == 4


def test_a_publisher_that_plans_for_long_is_there(address, served, threads, monkeypatch):
    monkeypatch.setattr("flyweight.live.reconnect._ABSENT_SECONDS", 2)
    monkeypatch.setattr("flyweight.live.reconnect._PEER_SECONDS", 2 * LIMIT)
    with (
        fw.Publisher(weights(1), address) as publisher,
        fw.Replica(weights(51), address, serve_on=served) as other,
        fw.Replica(weights(52), address, name="slow") as replica,
    ):
        updated(threads, publisher, other, 1)
        assert replica.update(timeout_seconds=LIMIT).version == 1  # from the other one
        updated(threads, publisher, other, 2)
        publisher.publish(3, stays=True)
        delayed(monkeypatch, Planner, "_agreed", 3, lambda _, member, want: member.name == "slow")
        assert replica.update(timeout_seconds=LIMIT).version == 3


def test_the_version_of_an_earlier_trainer_is_not_taken_for_a_newer_one(
    address, served, threads, behind
):
    publisher, new, engine = behind
    publisher.close()
    with fw.Replica(weights(54), f"{address}2", peers=[served]) as empty:
        with fw.Publisher(weights(7), address) as restarted:
            updated(threads, restarted, new, 0)  # a lower number
        with pytest.raises(TransferTimeout):
            new.update(timeout_seconds=1)
        assert (new.version, holds(engine, 7)) == (0, True)
        assert empty.update(timeout_seconds=LIMIT).version == 1  # better than nothing


@pytest.mark.campaign
def test_what_is_available_is_sent_only_if_it_is_newer_or_asked_for_by_number(address):
    with (
        fw.Publisher(weights(1), address, silence_seconds=2 * LIMIT) as publisher,
        FakeReplica(address) as fake,
    ):
        publisher.publish(5, stays=True)
        fake.join()
        fake.say(messages.Ask(1, None, 6))
        until(lambda: publisher.waiting)
        fake.say(messages.Withdraw(1))
        fake.say(messages.Ask(2, 5, 6))
        begin = fake.hear_of(messages.Begin)
        assert (begin.ask, begin.version) == (2, 5)
