"""What a forked child inherits of a publisher and a replica."""

import os
import threading

import flyweight as fw
from child_processes import LIMIT, Child
from flyweight.errors import (
    TransportError,
)
from flyweight.live.members import Members
from versioned_models import assign, weights


def use_inherited(publisher, replica, pipe):
    told = []
    for use in (lambda: publisher.publish(9), lambda: replica.update(timeout_seconds=1)):
        try:
            use()
        except TransportError as error:
            told.append(str(error))
    publisher.close()
    replica.close()
    return told


def test_what_a_child_inherits_by_fork_is_not_its_own(address, threads):
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        publisher.publish(1)
        replica.update(timeout_seconds=LIMIT)
        with Child(use_inherited, publisher, replica) as child:
            told = child.result(LIMIT)
        assert len(told) == 2
        assert all(f"belongs to process {os.getpid()}" in each for each in told)
        assign(model, 2)
        publisher.publish(2)
        assert replica.update(timeout_seconds=LIMIT).version == 2


def use(publisher, replica, pipe):
    replica.wake()
    return publisher.replicas


def test_a_child_that_was_forked_while_replicas_are_heard_can_look_at_them(
    address, threads, monkeypatch
):
    is_held, is_forked, made = threading.Event(), threading.Event(), []

    class KnownMembers(Members):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("flyweight.live.leader.Members", KnownMembers)

    def hold():
        """Run while an update holds the lock of its connection."""
        with made[0].changed:
            is_held.set()
            assert is_forked.wait(LIMIT)
        return False

    with fw.Publisher(weights(1), address) as publisher, fw.Replica(weights(2), address) as replica:
        update = threads.submit(replica.update, timeout_seconds=LIMIT, is_over=hold)
        assert is_held.wait(LIMIT)
        with Child(use, publisher, replica) as child:
            is_forked.set()
            assert child.result(LIMIT) == [replica.name]
        assert publisher.publish(1, num_replicas=1).failed == ()
        assert update.result(LIMIT).version == 1
