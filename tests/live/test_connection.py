"""The connection for messages: garbage, other protocols, publishers that come and go."""

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import flyweight as fw
from child_processes import LIMIT, until
from flyweight.errors import PlanError, TransferTimeout, TransportError
from flyweight.live import frames, messages
from flyweight.live.address import Address
from flyweight.live.connection import Connection
from flyweight.live.published_model import PublishedModel
from flyweight.live.rank_messages import Ended
from flyweight.live.report import PublishReport, ReplicaReport
from flyweight.live.rounds import Rounds
from flyweight.plans.copy_table import MAX_PAIRS
from flyweight.plans.tables import packed
from flyweight.spec.box import Box
from flyweight.transports.fd_passing import FdConnection
from live_rounds import call_before, welcomed
from peers import FakeReplica, tensors, want
from versioned_models import holds, weights


def test_a_publisher_that_is_gone_before_it_answers_is_lost_and_not_unwilling(address, threads):
    with fw.Replica(weights(2), address) as replica:
        future = threads.submit(replica.update, timeout_seconds=4 * LIMIT)
        for _ in range(50):
            fw.Publisher(weights(1), address).close()
        assert not future.done()
        with fw.Publisher(weights(1), address, hold=True) as publisher:
            publisher.publish(1)
            assert future.result(LIMIT).version == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_ours_in_the_connection_is_told_and_leaves_nobody_waiting(
    address, threads, monkeypatch
):
    model, engine = weights(1), weights(50)

    def fault(self, member):
        raise RuntimeError("an error of ours")

    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "serve", fault)  # called by the connection's thread
        publisher = fw.Publisher(model, address)
    with publisher, fw.Replica(engine, address) as replica:
        future = threads.submit(replica.update, timeout_seconds=1)
        until(lambda: publisher.replicas == [])
        with pytest.raises(TransportError, match="error"):
            publisher.publish(1, num_replicas=1)
        with pytest.raises(TransferTimeout):
            future.result(LIMIT)
        publisher.close()
        with fw.Publisher(model, address, hold=True) as another:
            another.publish(1)
            assert replica.update(timeout_seconds=LIMIT).version == 1


@pytest.mark.campaign
def test_a_replica_that_is_gone_before_the_publisher_is_ready_harms_nobody(address, monkeypatch):
    place = Address.parse(address)

    def come_and_go():
        FdConnection(place.fd_socket, token=place.token(), timeout_seconds=5).close()
        time.sleep(0.2)  # the server notices that

    call_before(monkeypatch, PublishedModel, "open", come_and_go)
    model, engine = weights(1), weights(2)
    with (
        fw.Publisher(model, address) as publisher,
        fw.Replica(engine, address) as replica,
        ThreadPoolExecutor(1) as pool,
    ):
        future = pool.submit(replica.update, timeout_seconds=LIMIT)
        assert publisher.publish(1, num_replicas=1).failed == ()
        assert future.result(LIMIT).version == 1


@pytest.mark.parametrize("change", [{}, {"num_ranks": 2}, {"role": "watcher"}], ids=str)
def test_a_second_hello_in_mid_round_ends_the_first_member(address, change):
    with (
        fw.Publisher(weights(1), address, silence_seconds=2 * LIMIT) as publisher,
        FakeReplica(address) as peer,
        ThreadPoolExecutor(1) as pool,
    ):
        peer.join()
        peer.say(messages.Ask(1, None, None))
        publish = pool.submit(publisher.publish, 1, num_replicas=1, timeout_seconds=LIMIT)
        peer.hear_of(messages.Begin)
        peer.say(messages.Hello(peer.token, "fake", os.getpid(), **change))
        assert "Hello" in peer.hear_of(messages.Refusal).text
        (failed,) = publish.result(LIMIT).failed
        assert failed.name == "fake"
        assert publisher.replicas == []


HEAD = b"fw" + bytes([frames.PROTOCOL])


def garbage():
    hello = frames.encode(messages.Hello("x", "y", 1))
    body = msgspec.msgpack.encode
    return {
        "empty": b"",
        "mark only": b"fw",
        "another protocol": b"fw\x01",
        "no message": HEAD,
        "text": b"GET / HTTP/1.1\r\n\r\n",
        "zeros": bytes(1000),
        "cut short": hello[:-3],
        "more after it": hello + b"\0",
        "another type": HEAD + body({"type": "Hello", "token": 1, "name": "", "pid": ""}),
        "unknown message": HEAD + body({"type": "Exec", "code": "1"}),
        "unknown field": HEAD + body({"type": "Tick", "more": 1}),
        "a publisher's": frames.encode(messages.Commit(1, b"")),
        "deep": HEAD + b"\x91" * 100000,
        "numbers": HEAD + body({"type": "Emptied", "round": 2**70 % 2**63, "bucket": -5}),
    }


@pytest.mark.parametrize("name", garbage())
def test_garbage_is_answered_or_ignored_and_harms_nobody(address, name):
    model, engine = weights(1), weights(2)
    with (
        fw.Publisher(model, address, silence_seconds=2 * LIMIT) as publisher,
        fw.Replica(engine, address) as replica,
        FakeReplica(address) as peer,
        ThreadPoolExecutor(1) as pool,
    ):
        for _ in range(3):
            peer.send(garbage()[name])
        peer.send(b"a", b"b", garbage()[name])
        peer.say(want((), [], may_leave=True))
        assert isinstance(peer.hear(), messages.Refusal)
        future = pool.submit(replica.update, timeout_seconds=LIMIT)
        assert publisher.publish(1, num_replicas=1).failed == ()
        future.result(LIMIT)
        assert holds(engine, 1)


def test_another_protocol_is_refused_with_both_numbers(address):
    frame = bytearray(frames.encode(messages.Hello("x", "y", 1)))
    frame[2] = 77
    with fw.Publisher(weights(1), address, silence_seconds=2 * LIMIT), FakeReplica(address) as peer:
        peer.send(bytes(frame))
        answer = peer.hear()
        assert answer.kind == "PeerRefused"
        assert "protocol 77" in answer.text
        assert f" {frames.PROTOCOL};" in answer.text


def test_another_rank_gets_the_report_with_the_errors_in_it():
    replica = ReplicaReport("a", 7, 8, 0.5, 0.25, 0.125, "mapped", PlanError("no room"), True)
    ended = Ended(PublishReport(3, 8, 0.5, 0.25, (replica,)), TransferTimeout("late"), 3)
    found = frames.decode_from_publisher(frames.encode(ended))
    for ours, theirs in (
        (ended.error, found.error),
        (replica.error, found.report.replicas[0].error),
    ):
        assert (type(ours), str(ours)) == (type(theirs), str(theirs))
    assert str(found.report) == str(ended.report)
    assert replace(found.report.replicas[0], error=None) == replace(replica, error=None)


@pytest.mark.parametrize("error", ["text", ["kind"], ["kind", 1], ["kind", "text", ""], {"a": 1}])
def test_an_error_that_is_not_a_class_and_a_text_is_not_decoded(error):
    ended = {"type": "Ended", "report": [3, 8, 0.5, 0.25, []], "error": error}
    with pytest.raises(TransportError, match="cannot decode"):
        frames.decode_from_publisher(HEAD + msgspec.msgpack.encode(ended))


ABSURD_WANTS = {
    "no tensor": lambda t: want((), [(3, Box((0,), (1,)))]),
    "no such tensor": lambda t: want(t, [(3, Box((0, 0), (1, 1)))]),
    "tensor before the first": lambda t: want(t, [(-1, Box((0, 0), (1, 1)))]),
    "negative": lambda t: changed_boxes(t, offset=packed([-1, 0])),
    "negative size": lambda t: changed_boxes(t, shape=packed([-1, 1])),
    "outside": lambda t: changed_boxes(t, shape=packed([10**6, 1])),
    "far outside": lambda t: changed_boxes(t, offset=packed([2**62, 2**62])),
    "other dims": lambda t: want(t, [(0, Box((0,), (5,)))]),
    "no dims": lambda t: changed_boxes(t, num_dims=0),
    "many dims": lambda t: changed_boxes(t, num_dims=10**9),
    "negative dims": lambda t: changed_boxes(t, num_dims=-2),
    "more dims than the tensor": lambda t: changed_boxes(
        t, num_dims=64, offset=packed([0] * 64), shape=packed([1] * 64)
    ),
    "65 dims": lambda t: changed_boxes(t, num_dims=65, offset=bytes(520), shape=bytes(520)),
    "more boxes than a plan may have": lambda t: replace(
        changed_boxes(
            t,
            tensor=bytes(8 * (MAX_PAIRS + 1)),
            offset=bytes(16 * (MAX_PAIRS + 1)),
            shape=packed([1, 1] * (MAX_PAIRS + 1)),
        ),
        place=bytes(8 * (MAX_PAIRS + 1)),
    ),
    "half a number": lambda t: changed_boxes(t, shape=b"1234"),
    "an offset more": lambda t: changed_boxes(t, offset=packed([0, 0, 0, 0])),
    "no place": lambda t: replace(want(t, [(0, Box((0, 0), (1, 1)))]), place=b""),
    "no such place": lambda t: replace(want(t, [(0, Box((0, 0), (1, 1)))]), place=packed([1])),
    "the same twice": lambda t: want(
        replace(t, names=t.names * 2, kind=t.kind * 2), [(0, Box((0, 0), (1, 1)))]
    ),
    "huge": lambda t: want(tensors((t.names[0], t.kinds[0].dtype, (2**62, 2**62))), []),
    "dtype": lambda t: want(tensors((t.names[0], "f99", t.kinds[0].shape)), []),
    "name": lambda t: want(tensors(("\0" * 9999, t.kinds[0].dtype, t.kinds[0].shape)), []),
}


def changed_boxes(tensor, /, **changes):
    asked = want(tensor, [(0, Box((0, 0), (1, 1)))])
    return replace(asked, blocks=replace(asked.blocks, **changes))


@pytest.mark.parametrize("kind", ABSURD_WANTS)
def test_an_absurd_want_is_refused(address, kind):
    with (
        fw.Publisher({"w": np.zeros((4, 4))}, address, silence_seconds=2 * LIMIT) as publisher,
        FakeReplica(address) as peer,
    ):
        welcome = welcomed(peer)
        asked = ABSURD_WANTS[kind](welcome.tensors)
        peer.say(replace(asked, may_leave=True))
        refusal = peer.hear_of(messages.Refusal)
        assert refusal.kind != "PeerFailed", refusal.text
        until(lambda: publisher.replicas == [])


@pytest.mark.campaign
def test_a_peer_that_accepts_no_messages_is_lost_by_the_connections_thread(tmp_path):
    """The thread that sends may hold a lock which the loss of the peer needs."""
    lock, lost, is_lost = threading.Lock(), [], threading.Event()

    def lose(id, is_gone):
        if lock.acquire(timeout=1):
            lost.append((id, is_gone, threading.current_thread().name))
            lock.release()
        is_lost.set()

    connection = Connection(
        f"ipc://{tmp_path}/socket",
        is_publisher=True,
        on_frame=lambda sender, frame: None,
        on_heartbeat=lambda now: None,
        heartbeat_seconds=60,
        on_unreachable=lose,
    )
    connection.start()
    try:
        with lock:
            connection.send(messages.Tick(), b"nobody")
        assert is_lost.wait(LIMIT)
        assert lost == [(b"nobody", True, "flyweight-connection")]
    finally:
        connection.close()


def test_a_frame_over_the_limit_ends_its_senders_connection_before_it_is_read():
    is_heard = threading.Event()
    connection = Connection(
        "tcp://127.0.0.1:0",
        is_publisher=True,
        on_frame=lambda sender, frame: is_heard.set(),
        on_heartbeat=lambda now: None,
        heartbeat_seconds=60,
    )
    connection.start()
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48)
    ready = b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6DEALER"
    try:
        with socket.create_connection(("127.0.0.1", connection.port), LIMIT) as peer:
            peer.sendall(greeting + ready)
            answer = b""
            while not answer.endswith(b"Identity\0\0\0\0"):  # the end of the handshake
                answer += peer.recv(4096)
            peer.sendall(b"\0\1x")
            assert is_heard.wait(LIMIT)
            peer.sendall(b"\2" + (frames.MAX_MESSAGE_BYTES + 1).to_bytes(8, "big"))
            while peer.recv(4096):  # until it is closed
                pass
    finally:
        connection.close()
