"""Encrypted connections: peers whose keys do not fit, messages on the way, and ends."""

import os
import socket
import threading
from contextlib import ExitStack, contextmanager, suppress
from time import monotonic

import pytest
import zmq

from child_processes import LIMIT, Child, until
from flyweight.live import connection as connections
from flyweight.live import frames, messages
from flyweight.live.connection import Connection
from flyweight.live.curve_keys import CurveClient, CurveKeys, CurveServer

CAMPAIGN = pytest.mark.campaign
SERVER, CLIENT, OTHER = CurveKeys.make(), CurveKeys.make(), CurveKeys.make()
HEARTBEAT = 0.02
TOLD_SECONDS = 3.0


class Peer:
    """A replica's connection, and everything that it is told."""

    def __init__(self, endpoint, curve, files=None):
        self.heard, self.refusals, self.was_left = [], [], threading.Event()
        self.connection = Connection(
            endpoint,
            is_publisher=False,
            on_frame=lambda _, frame: self.heard.append(frames.decode_from_publisher(frame)),
            on_heartbeat=lambda now: None,
            heartbeat_seconds=HEARTBEAT,
            curve=curve,
            on_refused=self.refusals.append,
            files=files,
            on_peer_gone=self._on_peer_gone,
        )
        self.connection.start()

    def _on_peer_gone(self):
        self.heard_before = len(self.heard)
        self.was_left.set()

    def ask(self, number):
        """Send a number and wait until the publisher sends it back."""
        self.connection.send(messages.Tick(number))
        until(lambda: messages.Tick(number) in self.heard)

    def refused(self):
        """Return why the publisher refuses us."""
        until(lambda: self.refusals)
        return self.refusals[0]

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.connection.close()


class Files:
    """What a connection for files is to the connection for messages: it tells of a death."""

    def __init__(self):
        self._ours, self._theirs = socket.socketpair()
        self.is_open = True

    def fileno(self):
        return self._ours.fileno()

    def end(self):
        self.is_open = False
        self._theirs.close()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self._ours.close()
        self._theirs.close()


@contextmanager
def echo(endpoint, curve, answers=(), is_free=None):
    """A publisher in this process that sends back what it is sent; it yields its connection."""

    def answer(sender, frame):
        if is_free is not None:
            is_free.wait(LIMIT)
        for each in answers or (frames.decode_from_replica(frame),):
            made.send(each, sender)

    made = Connection(
        endpoint,
        is_publisher=True,
        on_frame=answer,
        on_heartbeat=lambda now: None,
        heartbeat_seconds=HEARTBEAT,
        curve=curve,
    )
    made.start()
    try:
        yield made
    finally:
        made.close()


def num_open():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def echo_process(endpoint, curve, pipe):
    """Echo until told to count what is open; the parent ends us."""
    with echo(endpoint, curve) as made:
        pipe.send(made.port)
        while pipe.recv() == "count":
            pipe.send(num_open())


@contextmanager
def served(endpoint, curve):
    """A publisher in a process of its own; yield the process and where replicas reach it."""
    with Child(echo_process, endpoint, curve) as child:
        port = child.told()
        yield child, endpoint if endpoint.startswith("ipc:") else f"tcp://127.0.0.1:{port}"


def endpoint_of(kind, tmp_path):
    return "tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{tmp_path}/control"


@CAMPAIGN
@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_a_peer_with_wrong_keys_learns_why_and_a_good_one_beside_it_goes_on(tmp_path, kind):
    curve = CurveServer(SERVER, [CLIENT.public])
    bad = {
        "does not have the secret key to our server key": CurveClient(OTHER.public, CLIENT),
        f"does not admit our public key '{OTHER.public}'": CurveClient(SERVER.public, OTHER),
        "does not admit our public key": CurveClient(SERVER.public),  # new keys
        "encrypt with CURVE and we do not|encrypts with CURVE and we do not": None,
    }
    with (
        served(endpoint_of(kind, tmp_path), curve) as (_, endpoint),
        Peer(endpoint, CurveClient(SERVER.public, CLIENT)) as good,
        ExitStack() as stack,
    ):
        good.ask(1)
        peers = [stack.enter_context(Peer(endpoint, each)) for each in bad.values()]
        begun = monotonic()
        for peer, texts in zip(peers, bad, strict=True):
            assert any(text in peer.refused() for text in texts.split("|")), peer.refusals
            peer.connection.send(messages.Tick(9))
        assert monotonic() - begun < TOLD_SECONDS
        good.ask(2)
        assert [len(peer.refusals) for peer in peers] == [1] * len(peers)
        assert not good.refusals
        assert not any(peer.heard for peer in peers)


@CAMPAIGN
@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_a_replica_that_encrypts_is_told_that_its_publisher_does_not(tmp_path, kind):
    with served(endpoint_of(kind, tmp_path), None) as (_, endpoint):
        with Peer(endpoint, CurveClient(SERVER.public)) as peer:
            assert "or has no keys" in peer.refused() or "does not encrypt" in peer.refused()
        with Peer(endpoint, None) as plain:
            plain.ask(1)


@CAMPAIGN
def test_without_a_list_every_replica_that_knows_the_publishers_key_is_admitted():
    with served("tcp://127.0.0.1:0", CurveServer(SERVER)) as (_, endpoint):
        with Peer(endpoint, CurveClient(SERVER.public)) as peer:
            peer.ask(1)
        with Peer(endpoint, CurveClient(OTHER.public)) as peer:
            assert peer.refused()
            with pytest.raises(AssertionError):  # told once, though ZeroMQ tries again
                until(lambda: len(peer.refusals) > 1, 0.3)


def test_an_empty_list_admits_nobody():
    with (
        echo("tcp://127.0.0.1:0", CurveServer(SERVER, [])) as made,
        Peer(f"tcp://127.0.0.1:{made.port}", CurveClient(SERVER.public)) as peer,
    ):
        assert "does not admit" in peer.refused()


@contextmanager
def strangers(endpoint):
    """Clients without keys, with keys that are not listed, and with a wrong server key."""
    ways = ((None, None), (SERVER, OTHER), (OTHER, CLIENT))
    with zmq.Context() as context, ExitStack() as stack:
        for server, own in ways * 20:
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.setsockopt(zmq.LINGER, 0)
            if own is not None:
                dealer.curve_serverkey = server.public.encode()
                dealer.curve_publickey = own.public.encode()
                dealer.curve_secretkey = own.secret.encode()
            dealer.connect(endpoint)
            dealer.send(b"x")
        for _ in range(20):
            half = stack.enter_context(socket.create_connection(address_of(endpoint)))
            half.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + bytes(47))
        yield


def test_refused_peers_leave_nothing_at_the_publisher():
    with (
        served("tcp://127.0.0.1:0", CurveServer(SERVER, [CLIENT.public])) as (child, endpoint),
        Peer(endpoint, CurveClient(SERVER.public, CLIENT)) as good,
    ):

        def count():
            child.send("count")
            return child.told()

        good.ask(1)
        before = count()
        with strangers(endpoint):
            until(lambda: count()[0] >= before[0] + 20)  # those that do not finish a handshake
            good.ask(2)
        until(lambda: count() == before)
        good.ask(3)


def address_of(endpoint):
    host, port = endpoint.removeprefix("tcp://").split(":")
    return host, int(port)


class Wire:
    """Forwards one tcp connection, and keeps the bytes that pass."""

    def __init__(self, port):
        self.seen = bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(LIMIT)
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._far = socket.create_connection(("127.0.0.1", port))
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        self._near, _ = self._server.accept()
        for ends in ((self._near, self._far), (self._far, self._near)):
            self._threads.append(threading.Thread(target=self._forward, args=ends))
            self._threads[-1].start()

    def _forward(self, one, other):
        with suppress(OSError):
            while data := one.recv(65536):
                self.seen += data
                other.sendall(data)

    def cut(self):
        """End the connection; another one is not forwarded."""
        for each in (self._near, self._far):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.cut()
        for each in self._threads:
            each.join()
        for each in (self._server, self._near, self._far):
            each.close()


@pytest.mark.parametrize("is_encrypted", [True, False])
def test_nobody_on_the_way_can_read_the_messages(is_encrypted):
    token = "a-token-that-nobody-may-read"
    curve = (CurveServer(SERVER), CurveClient(SERVER.public)) if is_encrypted else (None, None)
    with (
        echo("tcp://127.0.0.1:0", curve[0]) as made,
        Wire(made.port) as wire,
        Peer(wire.endpoint, curve[1]) as peer,
    ):
        peer.connection.send(messages.Bye(token))
        peer.ask(1)
        assert (token.encode() in wire.seen) is not is_encrypted


@CAMPAIGN
@pytest.mark.parametrize("curve", [None, CurveClient(SERVER.public, CLIENT)])
def test_a_connection_over_tcp_that_ends_is_over_though_zeromq_connects_again(curve):
    with (
        echo("tcp://127.0.0.1:0", curve and CurveServer(SERVER)) as made,
        Wire(made.port) as wire,
        Peer(wire.endpoint, curve) as peer,
    ):
        peer.ask(1)
        assert not peer.was_left.is_set()
        wire.cut()
        assert peer.was_left.wait(TOLD_SECONDS)
        assert not peer.refusals


@CAMPAIGN
@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_the_last_messages_of_a_publisher_arrive_before_its_end_is_told(tmp_path, kind):
    endpoint, sent = endpoint_of(kind, tmp_path), [messages.Tick(number) for number in range(500)]
    with Files() as files, echo(endpoint, CurveServer(SERVER, [CLIENT.public]), sent) as made:
        endpoint = f"tcp://127.0.0.1:{made.port}" if kind == "tcp" else endpoint
        with Peer(endpoint, CurveClient(SERVER.public, CLIENT), files) as peer:
            peer.ask(0)
            if kind == "ipc":  # over tcp the end of the connection itself must do
                files.end()
                assert not peer.was_left.wait(0.1)
            peer.connection.send(messages.Tick(0))
            until(lambda: len(peer.heard) > len(sent))
            made.close()
            assert peer.was_left.wait(TOLD_SECONDS)
            assert peer.heard_before == 2 * len(sent)
            assert not peer.refusals


@CAMPAIGN
def test_a_killed_publisher_is_told_over_tcp():
    with (
        served("tcp://127.0.0.1:0", CurveServer(SERVER, [CLIENT.public])) as (child, endpoint),
        Peer(endpoint, CurveClient(SERVER.public, CLIENT)) as peer,
    ):
        peer.ask(1)
        child.kill()
        assert peer.was_left.wait(TOLD_SECONDS)
        assert not peer.refusals


@CAMPAIGN
def test_a_stopped_publisher_refuses_nobody(monkeypatch):
    """The kernel accepts for it, and nobody answers."""
    monkeypatch.setattr(connections, "_HANDSHAKE_MILLISECONDS", 20)
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as accepted:
        server.settimeout(5)
        with Peer(f"tcp://127.0.0.1:{server.getsockname()[1]}", CurveClient(SERVER.public)) as peer:
            for _ in range(4):  # it tries again and again
                accepted.enter_context(server.accept()[0])
            assert not peer.refusals


@CAMPAIGN
def test_a_busy_publisher_refuses_nobody(monkeypatch):
    for name in ("_HANDSHAKE_MILLISECONDS", "_PUBLISHER_HANDSHAKE_MILLISECONDS"):
        monkeypatch.setattr(connections, name, getattr(connections, name) // 20)
    is_free = threading.Event()
    with echo("tcp://127.0.0.1:0", CurveServer(SERVER, [CLIENT.public]), is_free=is_free) as made:
        endpoint, curve = f"tcp://127.0.0.1:{made.port}", CurveClient(SERVER.public, CLIENT)
        is_free.set()
        with Peer(endpoint, curve) as first, Peer(endpoint, curve) as second:
            first.ask(1)
            is_free.clear()
            first.connection.send(messages.Tick(2))
            with Peer(endpoint, curve) as late:
                threading.Timer(0.6, is_free.set).start()  # longer than six handshakes may take
                late.ask(3)
                assert not late.refusals
            second.ask(4)


@CAMPAIGN
def test_keys_that_do_not_fit_a_successor_are_no_refusal_by_a_publisher_that_is_gone(tmp_path):
    endpoint = f"ipc://{tmp_path}/control"
    with served(endpoint, CurveServer(OTHER, [])), Files() as files:
        files.end()
        with Peer(endpoint, CurveClient(OTHER.public), files) as peer:
            assert peer.was_left.wait(TOLD_SECONDS)
            assert not peer.refusals


@CAMPAIGN
def test_the_port_is_the_one_that_was_free():
    hosts = ["127.0.0.1", "0.0.0.0"]
    if os.path.exists("/proc/net/if_inet6"):
        hosts.append("[::1]")
    for host in hosts:
        with echo(f"tcp://{host}:0", None) as made:
            reached = host.replace("0.0.0.0", "127.0.0.1")
            with Peer(f"tcp://{reached}:{made.port}", None) as peer:
                peer.ask(1)
