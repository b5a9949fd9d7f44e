"""A DataServer sends memory to processes that know the token, and stops when it is released."""

import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import threading
import time
import weakref
from contextlib import closing, contextmanager, suppress

import numpy as np
import pytest

from child_processes import LIMIT, Child, in_time, resources, settled, until
from conftest import random_bytes
from flyweight.errors import HandleGone, PeerLost, PeerRefused, TransferTimeout, TransportError
from flyweight.transports import data_sockets, tcp
from flyweight.transports.data_sockets import DataConnection, DataServer, Welcome
from patience import patient  # noqa: F401

WELCOME = Welcome(4711, "session", "host", "unix:/somewhere")
BIG = 64 << 20
"""More than the kernel keeps for a connection, so a reader that stops stops the sender."""
PAUSED = 16 << 20
"""The same for a PausedRead."""


def serving(host="127.0.0.1", **options):
    return DataServer(host, token="secret", welcome=WELCOME, **options)


def connection_to(server, host="127.0.0.1", **options):
    return DataConnection(host, server.port, **{"token": "secret", **options})


@pytest.fixture
def hung_up():
    return []


@pytest.fixture
def server(hung_up):
    with closing(serving(on_hangup=hung_up.append)) as server:
        yield server


@pytest.fixture
def connection(server):
    with closing(connection_to(server)) as connection:
        yield connection


def read(connection, key, offset, nbytes, *, timeout_seconds=LIMIT, **options):
    into = np.zeros(nbytes, np.uint8)
    connection.read(key, offset, into, timeout_seconds=timeout_seconds, **options)
    return into.tobytes()


# Bytes.


@pytest.mark.parametrize("num_rows", [0, 1, 1022, 1023, 1024, 5000])
def test_rows_are_read_as_one_run_of_bytes(server, connection, num_rows):
    rng = np.random.default_rng(num_rows)
    rows = [random_bytes(rng.integers(0, 50), seed) for seed in range(num_rows)]
    whole = b"".join(row.tobytes() for row in rows)
    key = server.offer([memoryview(row) if n % 2 else row for n, row in enumerate(rows)])
    assert read(connection, key, 0, len(whole)) == whole
    for _ in range(50):
        start, end = sorted(rng.integers(0, len(whole) + 1, 2))
        assert read(connection, key, int(start), end - start) == whole[start:end]


def test_every_range_of_few_rows_is_right(server, connection):
    rows = [random_bytes(size, size) for size in (0, 1, 0, 3, 2, 0)]
    whole = b"".join(row.tobytes() for row in rows)
    key = server.offer(rows)
    for start in range(len(whole) + 1):
        for end in range(start, len(whole) + 1):
            assert read(connection, key, start, end - start) == whole[start:end]


def test_many_bytes_arrive_with_their_progress(server, connection):
    data, progress = random_bytes(40 << 20), []
    key = server.offer([data[: 7 << 20], data[7 << 20 :]])
    found = read(connection, key, 3, len(data) - 3, on_progress=progress.append)
    assert found == data[3:].tobytes()
    assert sum(progress) == len(found)
    assert len(progress) > 1


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, 11), (10, 1), (11, 0), (2**63 - 1, 1), (2**63 - 1, 0), (2**63, 0), (-1, 1)],
)
def test_a_range_beyond_the_offer_is_refused(server, connection, offset, nbytes):
    key = server.offer([random_bytes(10)])
    with pytest.raises(HandleGone, match=f"bytes {offset}"):
        read(connection, key, offset, nbytes)
    assert not connection.is_open


def test_a_released_or_unknown_key_is_gone(server, connection):
    key = server.offer([random_bytes(10)])
    server.release(key)
    server.release(key)
    with pytest.raises(HandleGone, match="no longer"):
        read(connection, key, 0, 10)
    for unknown in ("", "0" * 16, "0" * 17, "é" * 16, "é" * 8):
        with closing(connection_to(server)) as other, pytest.raises(HandleGone):
            read(other, unknown, 0, 0)


def test_the_owner_is_kept_until_the_release(server):
    class Owner:
        pass

    owner, gone = Owner(), []
    weakref.finalize(owner, gone.append, True)
    key = server.offer([random_bytes(3)], owner)
    del owner
    assert not gone
    server.release(key)
    assert gone


@pytest.mark.parametrize(
    ("bound", "hosts"),
    [("", ["127.0.0.1", "::1", "localhost"]), ("0.0.0.0", ["127.0.0.1"]), ("::1", ["::1"])],
)
def test_a_server_listens_at_addresses_of_both_kinds(bound, hosts):
    with closing(serving(bound)) as server:
        for host in hosts:
            with closing(connection_to(server, host)) as connection:
                assert connection.welcome == WELCOME
                assert connection.is_open


# The greeting.


def test_both_sides_know_a_first_connection_and_its_end(server, hung_up):
    connection = connection_to(server)
    other = connection_to(server, line=connection.name)
    assert connection.welcome == WELCOME
    assert connection.fileno() >= 0
    assert other.name == connection.name
    assert server.knows(connection.name)
    assert not server.knows("")
    other.close()
    assert server.knows(connection.name)
    connection.close()
    connection.close()
    assert not connection.is_open
    until(lambda: hung_up == [connection.name])
    assert not server.knows(connection.name)


def test_the_end_of_a_further_connection_is_not_reported(server, hung_up):
    before = resources()
    connection_to(server, line="0123456789abcdef").close()
    assert not server.knows("0123456789abcdef")
    assert settled(before) == before
    assert hung_up == []


def test_a_wrong_token_is_refused(server):
    with pytest.raises(PeerRefused, match="token"):
        connection_to(server, token="guess")


def test_nobody_there_is_a_lost_peer():
    with closing(socket.create_server(("127.0.0.1", 0))) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(PeerLost, match=f"127.0.0.1:{port}"):
        DataConnection("127.0.0.1", port, token="secret")
    with pytest.raises(PeerLost, match="host"):
        DataConnection("..", port, token="secret")


def test_a_port_in_use_and_an_address_of_another_host_are_refused(server):
    with pytest.raises(TransportError, match=f"127.0.0.1:{server.port}"):
        DataServer("127.0.0.1", server.port, token="secret", welcome=WELCOME)
    with pytest.raises(TransportError, match="192.0.2.1"):
        serving("192.0.2.1")


def test_a_welcome_that_does_not_fit_is_refused_before_anybody_is_greeted():
    with pytest.raises(TransportError, match="1024"):
        DataServer("127.0.0.1", token="t", welcome=Welcome(0, "s" * 1000, "host"))


def raw(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT)


def framed(data):
    return len(data).to_bytes(2, "big") + data


def greeting(**changes):
    said = {"type": "greeting", "nonce": "0" * 32, "line": "0" * 16, "is_first": True}
    return framed(json.dumps({**said, **changes}).encode())


GARBAGE = [
    framed(b""),
    framed(b"\0" * 900),
    framed(b"[]"),
    framed(b"[" * 1000),
    framed(b'{"type":"greeting","nonce":"\xff"}'),
    greeting(more=1),
    greeting(line="x"),
    greeting(line="0" * 16 + "\n"),
    greeting(nonce="0" * 31 + "\n"),
    greeting(nonce="0" * 900),
    greeting(is_first=1),
    framed(json.dumps({"type": "answer", "proof": "0"}).encode()),
    b"\xff\xff" + b"x" * 65535,
    b"GET / HTTP/1.1\r\n\r\n",
    b"\0" * 32,
    random_bytes(32).tobytes(),
    random_bytes(300).tobytes(),
]


@pytest.mark.parametrize("message", GARBAGE)
def test_garbage_ends_the_connection_and_not_the_server(server, hung_up, message):
    with closing(raw(server)) as client, suppress(OSError):  # a reset, if it is not read whole
        client.sendall(message)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""
    connection_to(server).close()


def heard(client):
    length = int.from_bytes(client.recv(2, socket.MSG_WAITALL), "big")
    return json.loads(client.recv(length, socket.MSG_WAITALL))


@pytest.mark.parametrize("answer", GARBAGE)
def test_garbage_instead_of_a_proof_gives_nothing_away(server, hung_up, answer):
    key = server.offer([b"secret bytes" * 100])
    with closing(raw(server)) as client:
        client.sendall(greeting())
        assert heard(client).keys() == {"type", "nonce"}
        with suppress(OSError):
            client.sendall(answer + key.encode() + (0).to_bytes(8, "big") + (9).to_bytes(8, "big"))
            client.shutdown(socket.SHUT_WR)
            assert client.recv(2000) in (b"", framed(b'{"type":"refusal","why":"token"}'))
    assert not server.knows("0" * 16)
    assert hung_up == []


@contextmanager
def recorded(server):
    """Pass a connection on to a server; record what each side says, until both have closed."""
    said = {}

    def pump(name, source, goal):
        said[name] = []
        while data := source.recv(1 << 16):
            said[name].append(data)
            goal.sendall(data)
        with suppress(OSError):
            goal.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1], said, listener, pump


def conversation(server):
    """Return the messages of a greeting, of each side."""
    with recorded(server) as (port, said, listener, pump):
        made = []
        thread = threading.Thread(
            target=lambda: made.append(DataConnection("127.0.0.1", port, token="secret"))
        )
        thread.start()
        near, _ = listener.accept()
        far = raw(server)
        pumps = [
            threading.Thread(target=pump, args=args)
            for args in (("client", near, far), ("server", far, near))
        ]
        for each in pumps:
            each.start()
        thread.join(LIMIT)
        made[0].close()
        for each in pumps:
            each.join(LIMIT)
            assert not each.is_alive()
        near.close()
        far.close()
    return said["client"], said["server"]


def test_a_proof_cannot_be_used_again_by_an_impostor_of_either_side(server, hung_up):
    client, answers = conversation(server)
    assert len(client) == len(answers) == 2
    assert b"secret" not in b"".join(client + answers)
    until(lambda: hung_up)
    hung_up.clear()
    with closing(raw(server)) as replayed:
        replayed.sendall(client[0])
        heard(replayed)
        replayed.sendall(client[1])
        assert heard(replayed) == {"type": "refusal", "why": "token"}
        assert replayed.recv(1) == b""
    assert hung_up == []
    with impostor(answers) as port, pytest.raises(PeerRefused, match="token"):
        DataConnection("127.0.0.1", port, token="secret")


@contextmanager
def impostor(answers, *, is_open=False):
    """Listen, and answer each message of a connection with the next of some answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        is_over = threading.Event()

        def answer():
            client, _ = listener.accept()
            with client, suppress(OSError):
                for each in answers:
                    client.recv(1 << 16)
                    client.sendall(each)
                if is_open:
                    is_over.wait(2 * LIMIT)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            is_over.set()
            thread.join(LIMIT)
            assert not thread.is_alive()


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("garbage", [*GARBAGE[:5], b"HTTP/1.1 400 Bad\r\n", b"\xff\xff", b"\xff"])
def test_a_server_of_another_kind_is_refused(server, number, garbage):
    """Garbage as the first answer, or after a challenge."""
    challenge = framed(json.dumps({"type": "challenge", "nonce": "0" * 32}).encode())
    said = pytest.raises((PeerRefused, PeerLost), match="greet|closed")
    with impostor([*[challenge][:number], garbage]) as port, said:
        DataConnection("127.0.0.1", port, token="secret")


def test_a_server_that_does_not_answer_is_given_up_in_time():
    over = {"timeout_seconds": 2 * LIMIT, "is_over": lambda: True}
    for options in ({"timeout_seconds": 0.2}, over):
        given_up = pytest.raises(TransferTimeout, match="answer")
        with impostor([], is_open=True) as port, in_time(0), given_up:
            DataConnection("127.0.0.1", port, token="secret", **options)


def test_silent_strangers_are_closed_in_time(server, monkeypatch):
    monkeypatch.setattr(data_sockets, "GREETING_SECONDS", 0.3)
    before = resources()
    silent, half = raw(server), raw(server)
    half.sendall(greeting()[:-1])
    assert silent.recv(1) == half.recv(1) == b""
    silent.close()
    half.close()
    assert settled(before) == before


def test_many_silent_strangers_keep_nobody_out(server, monkeypatch):
    monkeypatch.setattr(data_sockets, "MAX_GREETING", 4)
    silent = [raw(server) for _ in range(8)]
    connection_to(server).close()
    assert [each.recv(1) for each in silent[:4]] == [b""] * 4  # the oldest made room
    for each in silent:
        each.close()


def test_a_greeting_that_is_too_long_is_not_waited_for(server):
    with closing(raw(server)) as client:
        client.sendall((1025).to_bytes(2, "big"))
        assert client.recv(1) == b""


def test_there_is_a_limit_to_connections(server, monkeypatch):
    monkeypatch.setattr(data_sockets, "MAX_CONNECTIONS", 2)
    first, second = connection_to(server), connection_to(server)
    with pytest.raises(PeerLost, match="too many"):
        connection_to(server)
    first.close()
    until(lambda: not server.knows(first.name))
    connection_to(server).close()
    second.close()


def test_two_first_connections_do_not_have_one_name(server, monkeypatch):
    monkeypatch.setattr(data_sockets.secrets, "token_hex", lambda nbytes: "0" * 2 * nbytes)
    with closing(connection_to(server)) as connection, pytest.raises(PeerLost, match="too many"):
        connection_to(server)
    assert connection.name == "0" * 16
    connection_to(server, line=connection.name).close()


def full_server(pipe):
    server = serving()
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    files = []
    with suppress(OSError):
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(50):
        os.close(files.pop())
    pipe.send(("port", server.port))
    pipe.recv()


def test_newcomers_are_turned_away_before_no_file_is_left():
    with Child(full_server) as child:
        _, port = child.told()
        made = []
        with pytest.raises(PeerLost, match="ulimit"):
            while True:
                made.append(DataConnection("127.0.0.1", port, token="secret"))
        assert 5 <= len(made) <= 12  # each takes one of 50, and might take another
        for each in made:
            each.close()


def test_both_ends_notice_a_cut_link_and_send_at_once(server, connection):
    until(lambda: server._threads)
    (accepted,) = server._threads
    mine = socket.socket(fileno=os.dup(connection.fileno()))
    for each in (accepted, mine):
        tcp = [
            each.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_NODELAY, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        ]  # fmt: skip
        assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert tcp == [1, 1, 1, 3, 3000]
    mine.close()


# Death, and silence.


def read_slowly(port, key, pipe):
    """Take some bytes and no more until told; then return the error of the rest."""
    connection = DataConnection("127.0.0.1", port, token="secret")
    pipe.send(("name", connection.name))

    def wait(nbytes):
        pipe.send(("some", nbytes))
        pipe.recv()

    read(connection, key, 0, BIG, on_progress=wait)


def test_the_server_survives_a_reader_that_is_killed_while_it_reads(server, hung_up, monkeypatch):
    monkeypatch.setattr(tcp, "LOST_SECONDS", 60)  # or it gives up one that is killed late
    key = server.offer([page_memory()])
    before = resources()
    with Child(read_slowly, server.port, key) as child:
        _, name = child.told()
        child.told()
        assert server.knows(name)
        child.kill()
        until(lambda: hung_up == [name])
    assert settled(before) == before
    with closing(connection_to(server)) as connection:
        assert read(connection, key, 5, 10) == bytes(10)


def serve(pipe):
    server = serving()
    pipe.send(("at", (server.port, server.offer([page_memory()]))))
    signal.pause()


def test_a_reader_sees_at_once_that_its_source_was_killed():
    with Child(serve) as child:
        _, (port, key) = child.told()
        connection = DataConnection("127.0.0.1", port, token="secret")
        idle = DataConnection("127.0.0.1", port, token="secret")
        with pytest.raises(PeerLost, match=str(BIG)):
            read(connection, key, 0, BIG, on_progress=lambda nbytes: child.kill())
        until(lambda: not idle.is_open)
        with pytest.raises(PeerLost, match="ended"):
            read(idle, key, 0, 1)


def test_a_stopped_source_is_given_up_at_the_deadline_and_no_byte_arrives_later(monkeypatch):
    with Child(serve) as child:
        _, (port, key) = child.told()
        connection = DataConnection("127.0.0.1", port, token="secret")
        arrived, into = [], np.full(BIG, 7, np.uint8)
        # Its deadline begins to run once the source has stopped.
        monkeypatch.setattr(tcp, "monotonic", lambda: time.monotonic() if arrived else 0.0)

        def stop(nbytes):
            arrived.append(nbytes)
            if len(arrived) == 1:
                child.stop()

        with pytest.raises(TransferTimeout, match=str(BIG)):
            connection.read(key, 0, into, timeout_seconds=0.3, on_progress=stop)
        assert not connection.is_open
        count = sum(arrived)
        assert 0 < count < BIG
        assert connection.fileno() < 0
        child.go_on()
        with closing(DataConnection("127.0.0.1", port, token="secret")) as other:
            assert read(other, key, 0, 1) == b"\0"  # it runs again
        assert (into[:count] == 0).all()
        assert (into[count:] == 7).all()


def test_a_wait_ends_early_when_it_is_over():
    with Child(serve) as child:
        _, (port, key) = child.told()
        connection = DataConnection("127.0.0.1", port, token="secret")
        child.stop()
        with in_time(0), pytest.raises(TransferTimeout):
            read(connection, key, 0, 1, timeout_seconds=2 * LIMIT, is_over=lambda: True)


def test_a_slow_trickle_renews_the_deadline(server, connection, monkeypatch):
    """By a clock that moves on between one KiB and the next, for most of the deadline."""
    data, now, has_arrived = random_bytes(6 << 10).tobytes(), [0.0], threading.Semaphore()

    def send_late(rows, peer, head, offset, nbytes):
        peer.sendall(head)
        for start in range(0, nbytes, 1 << 10):
            assert has_arrived.acquire(timeout=LIMIT)
            now[0] += 0.9
            peer.sendall(data[start : start + (1 << 10)])

    key = server.offer([data])
    monkeypatch.setattr(data_sockets.Rows, "send", send_late)
    monkeypatch.setattr(tcp, "monotonic", lambda: now[0])
    found = read(
        connection, key, 0, len(data), timeout_seconds=1.0,
        on_progress=lambda nbytes: has_arrived.release(),
    )  # fmt: skip
    assert found == data


# The release.


def page_memory(nbytes=BIG):
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


class PausedRead:
    """A read in a thread of its own, which takes some bytes, then none until `go_on`."""

    def __init__(self, server, key, into=None):
        self.connection = connection_to(server, line="0123456789abcdef")
        with socket.socket(fileno=os.dup(self.connection.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        self.into, self.arrived = page_memory(PAUSED) if into is None else into, 0
        self.has_some, self._goes_on = threading.Event(), threading.Event()
        self._key, self.error = key, None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.has_some.wait(LIMIT)

    def _read(self):
        try:
            self.connection.read(
                self._key, 0, self.into, timeout_seconds=LIMIT, on_progress=self._pause
            )
        except BaseException as error:
            self.error = error

    def _pause(self, nbytes):
        self.arrived += nbytes
        self.has_some.set()
        self._goes_on.wait(LIMIT)

    def go_on(self):
        """Read to the end; return the error."""
        self._goes_on.set()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        self.connection.close()
        return self.error


def test_a_release_during_a_read_shows_none_of_the_next_content(server):
    data = page_memory(PAUSED)
    for content in range(5):
        data[:] = content
        key = server.offer([data])
        paused = PausedRead(server, key)
        server.release(key)  # it does not wait for the reader, which goes on only now
        data[:] = 99
        assert isinstance(paused.go_on(), PeerLost)
        assert 0 < paused.arrived < PAUSED
        assert (paused.into[: paused.arrived] == content).all()


def unmap_after_release(num_times, pipe):
    data_sockets._FINISH_SECONDS = 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    server, into = serving(), page_memory(PAUSED)
    for _ in range(num_times):
        address = libc.mmap(None, PAUSED, 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        key = server.offer([memoryview((ctypes.c_char * PAUSED).from_address(address))])
        paused = PausedRead(server, key, into)
        server.release(key)
        assert libc.munmap(address, PAUSED) == 0
        assert isinstance(paused.go_on(), PeerLost)
    key = server.offer([b"alive"])
    assert read(connection_to(server), key, 0, 5) == b"alive"
    server.close()
    until(lambda: threading.active_count() == 1)


@pytest.mark.parametrize("num_times", [20, pytest.param(100, marks=pytest.mark.campaign)])
def test_memory_may_be_unmapped_right_after_its_release(num_times):
    with Child(unmap_after_release, num_times) as child:
        child.result()


def test_memory_that_is_gone_while_it_is_offered_ends_the_reader_and_not_the_server(
    server, monkeypatch
):
    escaped, libc = [], ctypes.CDLL(None)
    monkeypatch.setattr(threading, "excepthook", escaped.append)
    data = page_memory()
    address = ctypes.c_void_p(data.__array_interface__["data"][0])
    key = server.offer([data])
    with closing(connection_to(server)) as connection:
        assert libc.mprotect(address, ctypes.c_size_t(BIG), 0) == 0
        with pytest.raises(PeerLost):
            read(connection, key, 0, BIG)
    assert libc.mprotect(address, ctypes.c_size_t(BIG), 3) == 0
    with closing(connection_to(server)) as connection:
        assert read(connection, key, 0, 5) == bytes(5)
    assert escaped == []


def test_a_reader_that_stops_reading_blocks_neither_release_nor_close(hung_up):
    before = resources()
    server = serving(on_hangup=hung_up.append)
    keys = [server.offer([page_memory(PAUSED)]) for _ in range(2)]
    first, second = (PausedRead(server, key) for key in keys)
    server.release(keys[0])
    server.close()
    server.close()
    assert isinstance(first.go_on(), PeerLost)
    assert isinstance(second.go_on(), PeerLost)
    assert settled(before) == before
    assert hung_up == []


def test_a_finished_read_is_not_disturbed_by_the_release(server, connection, monkeypatch):
    send = data_sockets.Rows.send

    def send_and_dawdle(*args):
        send(*args)
        until(lambda: not server._offers)  # the reader is faster than this thread

    monkeypatch.setattr(data_sockets.Rows, "send", send_and_dawdle)
    monkeypatch.setattr(data_sockets, "_FINISH_SECONDS", LIMIT)
    for _ in range(2):
        key = server.offer([b"hello"])
        assert read(connection, key, 0, 5) == b"hello"
        server.release(key)
    assert connection.is_open


# This process.


def test_ctrl_c_during_a_read_closes_the_connection(server):
    key = server.offer([page_memory()])
    connection = connection_to(server)

    def interrupt(nbytes):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        read(connection, key, 0, BIG, on_progress=interrupt)
    assert connection.fileno() < 0
    connection.close()


def test_a_close_by_another_thread_ends_a_read_at_once():
    with Child(serve) as child:
        _, (port, key) = child.told()
        connection = DataConnection("127.0.0.1", port, token="secret")
        child.stop()

        def close():
            until(lambda: connection._is_reading)
            connection.close()

        closing_thread = threading.Thread(target=close)
        closing_thread.start()
        with pytest.raises(PeerLost):
            read(connection, key, 0, BIG)
        closing_thread.join(LIMIT)
        assert connection.fileno() < 0


def test_a_second_thread_may_not_read_from_the_same_connection(server):
    key = server.offer([page_memory(PAUSED)])
    paused = PausedRead(server, key)
    with pytest.raises(TransportError, match="another thread reads"):
        read(paused.connection, key, 0, 1)
    assert paused.go_on() is None


def sleep_on(pipe):
    signal.pause()


def test_a_forked_child_does_not_keep_a_connection_open(server, hung_up):
    connection = connection_to(server)
    until(lambda: server.knows(connection.name))
    with Child(sleep_on):
        assert connection.is_open  # the child's close is its own
        connection.close()
        until(lambda: hung_up == [connection.name])


def in_child(server, connection, key, pipe):
    server.release(key)
    server.close()
    return connection.is_open, server.knows(connection.name)


def test_children_forked_while_bytes_are_sent_have_no_lock_and_no_connection(server, connection):
    key = server.offer([random_bytes(100_000)])
    is_over = threading.Event()

    def fetch():
        while not is_over.is_set():
            read(connection, key, 0, 100_000)

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        for _ in range(5):
            with Child(in_child, server, connection, key) as child:
                assert child.result() == (False, False)
    finally:
        is_over.set()
        thread.join(LIMIT)
    assert not thread.is_alive()
    assert connection.is_open


def test_a_closed_server_leaves_no_file_thread_or_socket(hung_up):
    before = resources()
    server = serving(on_hangup=hung_up.append)
    server.offer([b"x"])
    connections = [connection_to(server) for _ in range(5)]
    stranger = raw(server)
    server.close()
    until(lambda: not any(each.is_open for each in connections))
    server.close()
    for each in (*connections, stranger):
        each.close()
    assert settled(before) == before
    assert hung_up == []  # nobody else ended them
