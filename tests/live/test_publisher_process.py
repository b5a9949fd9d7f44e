"""C27: which process a publisher is. One that is dead, restarted or another is told apart."""

import signal

import pytest

import flyweight as fw
from child_processes import LIMIT, Child
from flyweight.errors import HandleGone, TransferTimeout
from flyweight.host import birth_of
from flyweight.live import messages
from live_rounds import CONTENT, SECONDS
from peers import FakePublisher, FakeReplica
from versioned_models import holds, weights


def test_a_publisher_says_which_process_it_is_and_when_that_started(address):
    """Typed, with a session; each of its rounds tells the version beside the handles."""
    with fw.Publisher(weights(1), address), FakeReplica(address) as replica:
        replica.say(messages.Hello(replica.token, "fake", 1))
        welcome = replica.hear_of(messages.Welcome)
        assert (welcome.pid, welcome.started) == birth_of()
        assert welcome.started > 0
        assert len(welcome.session) == 16


def holding(address, like, pipe):
    """Hold version 5, with the bytes of another number, until told to end."""
    with fw.Publisher(weights(like), address, hold=True, token="ours") as publisher:
        publisher.publish(5)
        pipe.send(("up", None))
        pipe.recv()


def test_a_publisher_that_was_restarted_where_another_died_is_another(address):
    """Its version of the same number is not taken for the one that is held."""
    engine = weights(0)
    with Child(holding, address, 1) as first:
        first.told()
        replica = fw.Replica(engine, address, token="ours")
        before = replica.update(5, timeout_seconds=LIMIT)
        session = replica.session
        assert holds(engine, 1)
        first.kill(signal.SIGKILL)
        first.join()
    with Child(holding, address, 2) as second, replica:
        second.told()
        after = replica.update(5, timeout_seconds=LIMIT)
        assert holds(engine, 2)
        assert after is not before
        assert replica.session not in ("", session)
        second.send("end")


def test_a_handle_of_a_publisher_that_is_dead_is_refused_by_who_mapped_it_before(
    address, engine, threads
):
    with FakePublisher(address, CONTENT.tobytes()) as first:
        joining = threads.submit(fw.Replica, engine, address)
        first.welcome()
        first.agree()
        replica = joining.result(LIMIT)
        update = threads.submit(replica.update, timeout_seconds=LIMIT)
        first.begin(version=5)
        first.say(messages.Commit(1, first.hear_of(messages.Done).digests))
        assert update.result(LIMIT).version == 5
    with FakePublisher(address, bytes(len(CONTENT))) as second, replica:
        update = threads.submit(replica.update, timeout_seconds=LIMIT)
        second.welcome()
        second.agree()
        second.begin(version=6, key=first.key)
        with pytest.raises(HandleGone):
            update.result(LIMIT)
        assert (replica.version, replica.state) == (5, "ready")
        assert engine["w"].tobytes() == CONTENT.tobytes()


LIES = {
    "another start": lambda pid, started: {"pid": pid, "started": started + 1},
    "another process": lambda pid, started: {"pid": pid + 1, "started": started},
    "no process": lambda pid, started: {"pid": 0, "started": 0},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_publisher_that_is_not_the_process_at_the_door_is_left(address, engine, threads, lie):
    """Memory is fetched at the door: it must be of the process that speaks of it."""
    with FakePublisher(address, CONTENT.tobytes()) as publisher:
        joining = threads.submit(fw.Replica, engine, address)
        publisher.welcome(**LIES[lie](*birth_of()))
        assert publisher.hear_of(messages.Want, messages.Bye) == messages.Bye("could not agree")
        with joining.result(LIMIT) as replica:
            assert not replica.is_connected
            update = threads.submit(replica.update, timeout_seconds=SECONDS)
            publisher.welcome(**LIES[lie](*birth_of()))
            with pytest.raises(TransferTimeout, match="no publisher"):
                update.result(LIMIT)
            assert replica.version is None
