"""Silence: a peer that sends nothing is given up in time, unless we were stopped ourselves."""

import threading
import time

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child, in_time, until
from flyweight.errors import TransferTimeout
from flyweight.live import messages
from live_rounds import CONTENT, SECONDS, joined, telling_publisher
from peers import FakePublisher, FakeReplica
from versioned_models import holds, weights

pytestmark = pytest.mark.usefixtures("collected")


def test_who_may_be_silent_for_less_than_a_second_beats_as_often(address, engine, threads):
    silence_seconds = 0.5
    with (
        fw.Publisher(weights(1), f"{address}1", silence_seconds=silence_seconds),
        FakeReplica(f"{address}1") as fake,
    ):
        fake.join()
        wait_for_beats(fake, silence_seconds)
    with (
        FakePublisher(address, CONTENT.tobytes(), silence_seconds=silence_seconds) as publisher,
        joined(threads, publisher, engine, address),
    ):
        wait_for_beats(publisher, silence_seconds)


def wait_for_beats(peer, seconds):
    """Fail unless two beats come within so many seconds; on a busy machine not any two do."""
    peer.hear_of(messages.Tick)
    for _ in range(50):
        since = time.monotonic()
        peer.hear_of(messages.Tick)
        if time.monotonic() - since < seconds:
            return
    pytest.fail(f"beats come every {seconds} s or less often")


def waiting_engine(address, pipe):
    """Tell of a publisher that is there, and of one that is given up; then take a version."""

    def tell():
        until(lambda: not replica.is_connected)
        pipe.send(("lost", None))

    engine = weights(50)
    with fw.Replica(engine, address) as replica:
        pipe.send(("there", None))
        threading.Thread(target=tell, daemon=True).start()
        replica.update(timeout_seconds=LIMIT)
        return holds(engine, 1)


def test_an_engine_that_was_stopped_waits_on(address):
    with (
        Child(telling_publisher, address) as trainer,
        Child(waiting_engine, address) as engine,
    ):
        assert [trainer.told()[0], trainer.told()[0], engine.told()[0]] == ["up", "joined", "there"]
        engine.stop()
        kind, error = trainer.told()
        assert kind == "lost"
        assert f"silent for {SECONDS:g} s" in error
        engine.go_on()
        trainer.send("publish")
        trainer.result()
        assert engine.result()


def test_an_engine_whose_trainer_was_stopped_waits_on(address):
    with (
        Child(telling_publisher, address) as trainer,
        Child(waiting_engine, address) as engine,
    ):
        assert [trainer.told()[0], trainer.told()[0], engine.told()[0]] == ["up", "joined", "there"]
        trainer.stop()
        assert engine.told() == ("lost", None)
        trainer.go_on()
        trainer.send("publish")
        trainer.result()
        assert engine.result()


def quiet_publisher(address, pipe):
    publisher = fw.Publisher(weights(1), address, silence_seconds=SECONDS)
    pipe.send(("there", None))
    pipe.recv()
    publisher.close()


def test_a_publisher_that_stands_still_is_given_up(address):
    """Its process is there, and so is its door: nothing but its silence tells."""
    with Child(quiet_publisher, address) as child:
        child.told()
        with fw.Replica(weights(2), address) as waiting:
            until(lambda: waiting.is_connected)
            child.stop()
            until(lambda: not waiting.is_connected)


def test_a_publisher_that_falls_silent_in_a_round_is_given_up_in_time(address, engine, threads):
    """A round may wait for a minute without progress, but not for who is silent for a second."""
    with (
        FakePublisher(address, CONTENT.tobytes(), silence_seconds=LIMIT) as publisher,
        joined(threads, publisher, engine, address) as waiting,
    ):
        update = threads.submit(waiting.update, timeout_seconds=LIMIT)
        with in_time(SECONDS), pytest.raises(TransferTimeout, match=f"silent for {SECONDS:g} s"):
            publisher.begin()
            waiting._publisher.connection._silence_seconds = SECONDS  # it was in step until now
            update.result(LIMIT)
        assert waiting.state == "failed"


def quiet_replica(address, pipe):
    """Take a version, and stay in its round."""

    def stay(version):
        pipe.send(("begun", None))
        pipe.recv()

    pipe.recv()
    with fw.Replica(weights(2), address, name="quiet") as replica:
        replica.update(timeout_seconds=LIMIT, before=stay)


@pytest.mark.parametrize("is_in_round", [False, True])
def test_a_replica_that_stands_still_is_given_up(address, threads, is_in_round):
    with (
        Child(quiet_replica, address) as child,
        fw.Publisher(weights(1), address, silence_seconds=SECONDS) as publisher,
    ):
        child.send("there is a publisher")
        if is_in_round:
            publish = threads.submit(publisher.publish, 1, num_replicas=1, timeout_seconds=LIMIT)
            child.told()
        else:
            until(lambda: publisher.replicas)
        child.stop()
        until(lambda: not publisher.replicas)
        if is_in_round:
            (failed,) = publish.result(LIMIT).failed
            assert isinstance(failed.error, TransferTimeout)
            assert f"'quiet' was silent for {SECONDS:g} s" in str(failed.error)


def test_a_replica_that_falls_silent_is_told_why_it_is_given_up(address):
    with fw.Publisher(weights(1), address, silence_seconds=SECONDS), FakeReplica(address) as fake:
        fake.join()
        assert f"'fake' was silent for {SECONDS:g} s" in fake.hear_of(messages.Bye).text


def test_a_publisher_that_was_stopped_itself_gives_no_replica_up_for_that(address):
    """Nobody spoke while it stood still: it counts from when it goes on."""
    with Child(quiet_publisher, address) as child:
        child.told()
        with FakeReplica(address) as fake:
            fake.join()
            fake.say(messages.Tick())  # it was in step until now
            child.stop()
            time.sleep(1.5 * SECONDS)
            while fake.has_heard():
                assert isinstance(fake.hear(), messages.Tick)
            child.go_on()
            for _ in range(3):  # if it gave us up, it would say so first
                assert isinstance(fake.hear(), messages.Tick)
                fake.say(messages.Tick())


def waiting_replica(address, pipe):
    with fw.Replica({"w": np.zeros_like(CONTENT)}, address) as waiting:
        waiting.update(timeout_seconds=LIMIT)


def test_a_replica_that_was_stopped_itself_does_not_leave_its_publisher_for_that(address):
    with (
        FakePublisher(address, CONTENT.tobytes(), silence_seconds=SECONDS) as publisher,
        Child(waiting_replica, address) as child,
    ):
        publisher.welcome()
        publisher.agree()
        publisher.hear_of(messages.Ask)
        publisher.say(messages.Tick())  # it was in step until now
        child.stop()
        time.sleep(1.5 * SECONDS)
        while publisher.has_heard():
            assert isinstance(publisher.hear(), messages.Tick)
        child.go_on()
        for _ in range(3):  # if it left, a hello would follow its first beat
            assert isinstance(publisher.hear(), messages.Tick)
            publisher.say(messages.Tick())
