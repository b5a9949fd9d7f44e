"""Silence: a peer that sends nothing is given up in time, unless we were stopped ourselves."""

import signal
import time

import numpy as np
import pytest

import flyweight as fw
from child_processes import Child, in_time, until
from flyweight.errors import TransferTimeout
from flyweight.events import listening
from flyweight.live import messages
from live_rounds import CONTENT, SECONDS, counting_publisher, joined
from peers import FakePublisher, FakeReplica, shared
from versioned_models import holds, weights

pytestmark = pytest.mark.usefixtures("collected")


def test_who_may_be_silent_for_less_than_a_second_beats_as_often(address):
    told = []
    with (
        listening(lambda event: told.append(event.kind)),
        fw.Publisher(weights(1), address, silence_seconds=0.9) as publisher,
        fw.Replica(weights(50), address) as replica,
    ):
        end = time.monotonic() + 3
        while time.monotonic() < end:
            time.sleep(0.02)
            assert replica.is_connected
            assert publisher.replicas == [replica.name]
        assert told == ["replica.joined"]


def waiting_engine(address, pipe):
    engine = weights(50)
    with fw.Replica(engine, address) as replica:
        pipe.send(("there", None))
        replica.update(timeout_seconds=20)
        return holds(engine, 1)


def test_an_engine_that_was_stopped_waits_on(address):
    with (
        Child(counting_publisher, address) as trainer,
        Child(waiting_engine, address) as engine,
    ):
        assert [trainer.told()[0], trainer.told()[0], engine.told()[0]] == ["up", "joined", "there"]
        engine.stop()
        time.sleep(2)  # twice what may be silent
        engine.kill(signal.SIGCONT)
        trainer.send("publish")
        lost = trainer.result()
        assert len(lost) == 1
        assert "was silent for 1 s" in lost[0]
        assert engine.result()


def test_an_engine_whose_trainer_was_stopped_waits_on(address):
    with (
        Child(counting_publisher, address) as trainer,
        Child(waiting_engine, address) as engine,
    ):
        assert [trainer.told()[0], trainer.told()[0], engine.told()[0]] == ["up", "joined", "there"]
        trainer.stop()
        time.sleep(2)
        trainer.kill(signal.SIGCONT)
        trainer.send("publish")
        trainer.result()
        assert engine.result()


BEAT_SECONDS = SECONDS / 5
"""Who is heard of may have spoken so much earlier."""


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
