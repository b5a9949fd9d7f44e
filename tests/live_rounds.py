"""Steps that tests of live updates share."""

import os
import threading
import time

import msgspec
import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, until
from flyweight.errors import VersionError
from flyweight.events import listening
from flyweight.live import fanned_out, member, messages, running_round
from flyweight.live.connection import Connection
from flyweight.live.member import MemberRound
from peers import digests_of
from versioned_models import weights

SECONDS = 1.0
"""A time limit that a test waits for: everything else in that test may take longer."""


def asking(publisher, number=1):
    """Wait until replicas wait for a version."""
    until(lambda: len(publisher.waiting) >= number)


def updated(threads, publisher, replica, version, **options):
    """Publish a version to a replica that waits for it; return both reports."""
    future = threads.submit(replica.update, version, timeout_seconds=LIMIT)
    report = publisher.publish(version, num_replicas=1, **options)
    update = future.result(LIMIT)
    assert report.failed == ()
    return report, update


def delayed(monkeypatch, owner, name, seconds, when=lambda *args: True):
    """Let a method take at least that long, as it does when a machine is busy."""
    original = getattr(owner, name)

    def slow(self, *args, **options):
        if when(self, *args):
            time.sleep(seconds)
        return original(self, *args, **options)

    monkeypatch.setattr(owner, name, slow)


def moved_clock(monkeypatch):
    """Return how many seconds the clock of rounds is ahead, in a list: nobody is late until then.

    Who is in step may still pause for some seconds then.
    """
    seconds = [0.0]
    for module in (running_round, member, fanned_out):
        monkeypatch.setattr(module, "monotonic", lambda: time.monotonic() + seconds[0])
    return seconds


def said_by(monkeypatch, name, kind):
    """Return a list to which what a replica says in rounds is added, if it is of a kind."""
    found, receive = [], MemberRound.receive

    def noting(self, message):
        receive(self, message)
        if self.member.name == name and isinstance(message, kind):
            found.append(message)

    monkeypatch.setattr(MemberRound, "receive", noting)
    return found


def slow_loader(address, seconds, pipe):
    def load(named):
        for _ in named:
            pipe.send(("took", None))
            time.sleep(seconds)

    with fw.Replica(load, address, name="slow", framework="numpy") as replica:
        replica.update(timeout_seconds=LIMIT)


SIZES = (1000, 200_000)  # digested with others, and as it lands


def call_before(monkeypatch, owner, name, work):
    """Have something happen just before a method runs."""
    original = getattr(owner, name)

    def method(self, *args, **options):
        work()
        return original(self, *args, **options)

    monkeypatch.setattr(owner, name, method)


def refuse_catch_up_threads(monkeypatch, times):
    """Let that many threads of catch-up rounds not start, as at a limit of processes."""
    start, left = threading.Thread.start, [None] * times

    def refusing(self):
        if self.name == "flyweight-catch-up" and left:
            left.pop()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refusing)


def telling_publisher(address, pipe):
    """Tell of a replica that joins and of those that are lost; publish when told to."""

    def listener(event):
        if event.kind == "replica.lost":
            pipe.send(("lost", event.fields["error"]))

    with (
        listening(listener),
        fw.Publisher(weights(1), address, silence_seconds=SECONDS) as publisher,
    ):
        pipe.send(("up", None))
        until(lambda: publisher.replicas)
        pipe.send(("joined", None))
        pipe.recv()
        version = 1
        # Right after a stop it may still know a connection that the engine has given up.
        while publisher.publish(version, num_replicas=1, timeout_seconds=LIMIT).failed:
            version += 1


def welcomed(peer):
    peer.say(messages.Hello(peer.token, "raw", os.getpid()))
    answer = peer.hear()
    assert isinstance(answer, messages.Welcome)
    return answer


def publisher_that_lies(address, change, pipe):
    """A publisher whose first message of a round is changed on its way."""
    send = Connection.send

    def lying(self, message, to=b""):
        if isinstance(message, messages.Begin):
            message = msgspec.structs.replace(message, **change(message))
        send(self, message, to)

    Connection.send = lying
    with fw.Publisher(weights(1), address, hold=True) as publisher:
        publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)


CONTENT = np.random.default_rng(1).integers(0, 256, 100_000, dtype=np.uint8)


def is_failed(replica):
    """True if a replica says of itself that it must not be served."""
    with pytest.raises(VersionError, match="holds no whole version"):
        replica.check_servable()
    return (replica.state, replica.version, replica.session) == ("failed", None, "")


def begun(threads, publisher, replica, version, **options):
    """Publish to the fake replica; return what comes of it, and the round's beginning."""
    replica.say(messages.Ask(version, None, None))
    asking(publisher)
    future = threads.submit(publisher.publish, version, num_replicas=1, **options)
    begin = replica.hear_of(messages.Begin)
    found = begin.version, begin.strategy, len(begin.memory.handles)
    assert found == (version, "mapped", 1)
    return future, begin.round


def done(number):
    return messages.Done(number, digests_of(CONTENT), 0.0, 0.0)


def joined(threads, publisher, engine, address):
    """Return a replica that has agreed with a publisher of ours."""
    joining = threads.submit(fw.Replica, engine, address)
    publisher.welcome()
    publisher.agree()
    return joining.result(LIMIT)
