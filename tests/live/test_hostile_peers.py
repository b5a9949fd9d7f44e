"""A peer that lies, mixes rounds up or speaks too late: nothing of it is ever counted."""

import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child
from flyweight.errors import DigestMismatch, TransportError
from flyweight.live import frames, messages
from flyweight.live.member import MemberRound
from flyweight.plans import tables as message_tables
from flyweight.spec.box import Box
from flyweight.transports.engine_reads import EngineHandle
from flyweight.transports.network import NetworkHandle
from flyweight.transports.network_engines import Engines
from live_rounds import (
    CONTENT,
    begun,
    call_before,
    done,
    is_failed,
    publisher_that_lies,
    welcomed,
)
from peers import FakePublisher, FakeReplica, digests_of, want
from versioned_models import holds, weights

pytestmark = pytest.mark.usefixtures("collected")


def test_a_replica_that_lies_about_its_digests_is_not_committed(address):
    with (
        fw.Publisher({"w": np.zeros((4, 4))}, address, silence_seconds=2 * LIMIT) as publisher,
        FakeReplica(address) as peer,
    ):
        welcome = welcomed(peer)
        peer.say(want(welcome.tensors, [(0, Box.whole((4, 4)))]))
        assert isinstance(peer.hear(), messages.Agreed)
        peer.say(messages.Ask(1, None, None))
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(publisher.publish, 1, num_replicas=1)
            begin = peer.hear()
            assert isinstance(begin, messages.Begin)
            peer.say(messages.Done(begin.round, b"12345678", 0.0, 0.0))
            while not isinstance(answer := peer.hear(), (messages.Abort, messages.Commit)):
                pass
            assert (type(answer), answer.kind) == (messages.Abort, "DigestMismatch")
            assert future.result(LIMIT).failed


def changed(begin, **changes):
    return {"memory": msgspec.structs.replace(begin.memory, **changes)}


def other_handle(begin, **changes):
    first, *others = begin.memory.handles
    return changed(begin, handles=(msgspec.structs.replace(first, **changes), *others))


def other_places(begin, **columns):
    """Change the first number of some columns of the places."""
    places = begin.memory.places
    found = {}
    for name, value in columns.items():
        numbers = message_tables.numbers(getattr(places, name)).copy()
        numbers[0] = value
        found[name] = message_tables.packed(numbers)
    return changed(begin, places=msgspec.structs.replace(places, **found))


def one_bucket(begin, shape, at=0, *, slot=0, bucket=0, block=0, offset=(0, 0)):
    """Send the first block in a bucket, in the memory of its place."""
    packed, memory = message_tables.packed, begin.memory
    places = memory.places
    rest = message_tables.Places(
        places.num_dims,
        *(
            packed(message_tables.numbers(c)[1:])
            for c in (places.source, places.handle, places.start)
        ),
        packed(message_tables.numbers(places.strides)[places.num_dims :]),
    )
    pieces = message_tables.Pieces(
        2, packed([bucket]), packed([block]), packed(offset), packed(shape), packed([at])
    )
    slots, buckets = {0: memory.handles[0]}, {0: slot}
    return changed(begin, places=rest, slots=slots, bucket_slots=buckets, pieces=pieces)


OFFERED = NetworkHandle(session="s", place="h:1", key="k", offset=0, nbytes=1 << 20)
ELSEWHERE = EngineHandle(engine="nixl", description=b"{}", place=b"{}", nbytes=1 << 20)


def slot_elsewhere(begin, handle):
    """Send the first block in a bucket, in memory of another host."""
    memory = one_bucket(begin, (1024, 128))["memory"]
    return {"memory": msgspec.structs.replace(memory, slots={0: handle})}


BEGIN_LIES = {
    "segment that is gone": lambda b: other_handle(b, key="0123456789abcdef"),
    "beyond the segment": lambda b: other_handle(b, nbytes=1 << 40),
    "no handles": lambda b: changed(b, handles=()),
    "strides": lambda b: other_places(b, strides=1 << 40),
    "strides that overflow": lambda b: other_places(b, strides=1 << 62),
    "negative start": lambda b: other_places(b, start=-(1 << 20)),
    "start that overflows": lambda b: other_places(b, start=(1 << 63) - 1),
    "no such block": lambda b: other_places(b, source=10**6),
    "a block twice": lambda b: other_places(b, source=1),
    "block before the first": lambda b: other_places(b, source=-1),
    "handle before the first": lambda b: other_places(b, handle=-1),
    "too few dims": lambda b: changed(
        b, places=msgspec.structs.replace(b.memory.places, num_dims=1)
    ),
    "a block less": lambda b: changed(b, places=one_bucket(b, (1, 1))["memory"].places),
    "bucket outside": lambda b: one_bucket(b, (1 << 20, 128)),
    "bucket of huge numbers": lambda b: one_bucket(b, (1 << 62, 1 << 62)),
    "bucket without a part": lambda b: one_bucket(b, (1, 1)),
    "bucket before its slot": lambda b: one_bucket(b, (1, 1), at=-8),
    "piece before its block": lambda b: one_bucket(b, (1, 1), offset=(-1, 0)),
    "bucket without a slot": lambda b: one_bucket(b, (1, 1), slot=9),
    "piece without a bucket": lambda b: one_bucket(b, (1, 1), bucket=9),
    "memory of another host": lambda b: changed(b, handles=(ELSEWHERE, *b.memory.handles[1:])),
    "slot of another host": lambda b: slot_elsewhere(b, OFFERED),
    "slot of an engine": lambda b: slot_elsewhere(b, ELSEWHERE),
    "lists never sent": lambda b: {"memory": None},
    "version": lambda b: {"version": -1},
    "digests": lambda b: {"digests": bytes(len(b.digests))},
}


@pytest.mark.check
@pytest.mark.parametrize("lie", BEGIN_LIES)
def test_a_publisher_that_lies_cannot_make_a_replica_read_or_serve_what_it_should_not(address, lie):
    engine = weights(50)
    with Child(publisher_that_lies, address, BEGIN_LIES[lie]) as child:
        with fw.Replica(engine, address) as replica:
            if lie == "digests":
                replica.update(timeout_seconds=LIMIT)  # the commit has the right ones
                assert holds(engine, 1)
            else:
                with pytest.raises(fw.FlyweightError):
                    replica.update(timeout_seconds=LIMIT)
                assert replica.state == "empty", "nothing was touched"
                assert holds(engine, 50)
        child.result()


@pytest.fixture
def lying(address, engine, threads):
    """A publisher of ours, a replica that has agreed with it, and its update on the way."""
    with FakePublisher(address, CONTENT.tobytes()) as publisher:
        joining = threads.submit(fw.Replica, engine, address)
        publisher.welcome()
        publisher.agree()
        with joining.result(LIMIT) as replica:
            yield publisher, replica, threads.submit(replica.update, timeout_seconds=LIMIT)
            publisher.close()  # a replica that still waits need not wait for long


def test_a_publisher_that_tells_the_truth_is_believed(lying, engine):
    """Else what follows would prove nothing."""
    publisher, replica, update = lying
    publisher.begin(version=5)
    done = publisher.hear_of(messages.Done)
    assert done.digests == publisher.digests
    publisher.say(messages.Commit(1, done.digests))
    assert update.result(LIMIT).version == replica.version == 5
    assert engine["w"].tobytes() == CONTENT.tobytes()


COMMIT_LIES = {
    "another": lambda digests: bytes([digests[0] ^ 1]) + digests[1:],
    "none": lambda digests: b"",
    "one more": lambda digests: digests + bytes(8),
}


@pytest.mark.parametrize("lie", COMMIT_LIES)
def test_a_commit_of_other_bytes_than_were_copied_is_no_commit(lying, lie):
    """The replica compares the publisher's digests with its own, whatever it was told."""
    publisher, replica, update = lying
    publisher.begin()
    publisher.hear_of(messages.Done)
    publisher.say(messages.Commit(1, COMMIT_LIES[lie](publisher.digests)))
    with pytest.raises(DigestMismatch, match="committed"):
        update.result(LIMIT)
    assert is_failed(replica)
    fault = publisher.hear_of(messages.Fault)
    assert (fault.round, fault.kind, fault.is_touched) == (1, "DigestMismatch", True)


@pytest.mark.parametrize("is_true", [True, False])
def test_a_replica_that_commits_by_itself_compares_the_digests_too(lying, is_true):
    """It may if it was told them first, and its publisher is gone."""
    publisher, replica, update = lying
    publisher.begin(digests=publisher.digests if is_true else bytes(8))
    publisher.hear_of(messages.Done)
    publisher.close()
    if is_true:
        assert update.result(LIMIT).version == 5
    else:
        with pytest.raises(DigestMismatch):
            update.result(LIMIT)
        assert is_failed(replica)


@pytest.mark.parametrize("number", [0, 2, 2**40])
def test_a_commit_of_another_round_is_not_counted(lying, number):
    publisher, replica, update = lying
    publisher.begin()
    publisher.hear_of(messages.Done)
    publisher.say(messages.Commit(number, publisher.digests))
    publisher.say(messages.Abort(1, "PeerFailed", "on purpose", False))
    with pytest.raises(fw.FlyweightError, match="on purpose"):
        update.result(LIMIT)
    assert is_failed(replica)


@pytest.mark.parametrize("is_loader", [False, True], ids=["memory", "loader"])
def test_a_bucket_that_comes_twice_instead_of_another_fails_the_round(address, threads, is_loader):
    """Without digests nothing else would show that the other bytes never came."""
    model = {"w": np.zeros_like(CONTENT)}
    target, options = (model.update, {"framework": "numpy"}) if is_loader else (model, {})
    with FakePublisher(address, CONTENT.tobytes()) as publisher:
        joining = threads.submit(fw.Replica, target, address, **options)
        publisher.welcome()
        publisher.agree()
        with joining.result(LIMIT) as replica:
            update = threads.submit(replica.update, timeout_seconds=LIMIT)
            publisher.begin(num_buckets=2, should_verify=False)
            publisher.say(messages.Filled(1, 0))
            assert publisher.hear_of(messages.Emptied).bucket == 0
            publisher.say(messages.Filled(1, 0))
            with pytest.raises(TransportError, match="bucket 0"):
                update.result(LIMIT)
            assert is_failed(replica)


def test_the_end_of_another_round_does_not_end_this_one(lying, engine):
    publisher, _, update = lying
    publisher.say(messages.Commit(1, publisher.digests))  # before it began: of an earlier session
    publisher.begin(number=2)
    publisher.hear_of(messages.Done)
    publisher.say(messages.Abort(1, "PeerFailed", "of another round", False))
    publisher.say(messages.Filled(1, 0))
    publisher.say(messages.Commit(2, publisher.digests))
    assert update.result(LIMIT).version == 5
    assert engine["w"].tobytes() == CONTENT.tobytes()


def test_a_replica_that_tells_the_truth_is_committed(fake, threads):
    publisher, replica = fake
    future, number = begun(threads, publisher, replica, 1)
    replica.say(done(number))
    assert replica.hear_of(messages.Commit, messages.Abort) == messages.Commit(
        number, digests_of(CONTENT)
    )
    assert future.result(LIMIT).failed == ()


def heard_nothing_of_its_end(replica):
    while replica.has_heard():
        assert isinstance(replica.hear(), (messages.Going, messages.Tick))


@pytest.mark.parametrize("step", [-1, 1, 2**40])
def test_what_is_done_in_another_round_is_not_counted(fake, threads, step, monkeypatch):
    publisher, replica = fake
    future, number = begun(threads, publisher, replica, 1)
    is_received = threading.Event()
    call_before(monkeypatch, MemberRound, "receive", is_received.set)
    replica.say(done(number + step))
    assert is_received.wait(LIMIT)
    heard_nothing_of_its_end(replica)
    replica.say(done(number))
    answer = replica.hear_of(messages.Commit, messages.Abort)
    assert answer == messages.Commit(number, digests_of(CONTENT))
    assert future.result(LIMIT).failed == ()


def test_what_is_done_by_who_never_joined_is_not_counted(fake, threads, address):
    """The number of a round is easy to guess; it counts only from whom the round was begun with."""
    publisher, replica = fake
    future, number = begun(threads, publisher, replica, 1)
    with FakeReplica(address) as other:
        other.say(done(number))
        assert other.hear().kind == "PeerRefused"
        other.join("other")
        other.say(done(number))
        other.say(messages.Hello(other.token, "other", 1))
        other.hear_of(messages.Refusal)  # so what it said before has been read
        heard_nothing_of_its_end(replica)
    replica.say(done(number))
    assert future.result(LIMIT).failed == ()


def large_want(num_names):
    """Return a frame that is short on the wire for what it becomes in memory."""
    tensors = message_tables.Tensors(("",) * num_names, (), b"")
    return frames.encode(messages.Want(tensors, None, (), b"", False))


def test_a_long_message_of_a_stranger_is_refused_before_it_is_decoded(address, monkeypatch):
    with (
        fw.Publisher(weights(1), address, silence_seconds=2 * LIMIT),
        FakeReplica(address) as stranger,
    ):
        decoded, frame = [], large_want(8 << 20)
        with monkeypatch.context() as patch:
            call_before(patch, frames, "decode_from_replica", lambda: decoded.append(True))
            stranger.send(frame)
            refused = stranger.hear()
        assert decoded == []
        assert refused.kind == "PeerRefused"
        assert str(len(frame)) in refused.text
        stranger.say(messages.Hello("another token", "x" * 100_000, 1))
        assert "65536 bytes" in stranger.hear().text
        stranger.join()  # it can still show the token
        stranger.send(large_want(1 << 17))
        assert stranger.hear_of(messages.Refusal).kind != "PeerRefused"  # decoded, but no plan


def test_the_longest_hello_is_accepted(address):
    """Its name may have ten thousand bytes, and its host 64 devices with names of 200 characters."""
    text = "\N{LINEAR B SYLLABLE B008 A}" * 200  # four bytes each
    engines = Engines(nixl=text, mooncake=text, rdma=(text,) * 64)
    with (
        fw.Publisher(weights(1), address, token="t" * 256, silence_seconds=2 * LIMIT),
        FakeReplica(address) as replica,
    ):
        replica.token = "t" * 256
        name, served = "n" * 10_000, f"tcp://{'h' * 255}:65535"
        replica.join(name, line="l" * 32, host="h" * 255, serves_at=served, engines=engines)
