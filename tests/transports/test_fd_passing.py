"""An FdServer passes files to the user's own processes that know the token, and to nobody else."""

import json
import os
import resource
import signal
import socket
import stat
import threading
from contextlib import suppress

import pytest

from child_processes import LIMIT, Child, in_time, resources, settled, until
from flyweight.errors import HandleGone, PeerLost, PeerRefused, TransferTimeout, TransportError
from flyweight.transports.fd_passing import FdConnection, FdServer
from patience import patient  # noqa: F401


@pytest.fixture
def hung_up():
    return []


@pytest.fixture
def server(tmp_path, hung_up):
    server = FdServer(tmp_path / "fds", token="secret", on_hangup=hung_up.append)
    yield server
    server.close()


def memory(data):
    fd = os.memfd_create("test")
    os.write(fd, data)
    return fd


def test_a_file_is_fetched_by_its_key_and_gone_once_released(server, tmp_path):
    key = server.offer(memory(b"hello"))
    connection = FdConnection(tmp_path / "fds", token="secret")
    fd = connection.fetch(key)
    assert os.pread(fd, 10, 0) == b"hello"
    os.close(fd)
    server.release(key)
    server.release(key)
    with pytest.raises(HandleGone, match="no longer"):
        connection.fetch(key)
    connection.close()


def test_a_wrong_token_is_refused(server, tmp_path):
    with pytest.raises(PeerRefused, match="token"):
        FdConnection(tmp_path / "fds", token="guess")


def test_a_path_without_a_server_is_a_lost_peer(tmp_path):
    with pytest.raises(PeerLost, match="listens"):
        FdConnection(tmp_path / "fds", token="secret")


def test_the_socket_is_for_its_owner_only(server, tmp_path):
    assert stat.S_IMODE(os.stat(tmp_path / "fds").st_mode) == 0o600


def test_a_path_longer_than_an_address_is_refused_with_its_length(tmp_path):
    path = tmp_path / ("x" * 120)
    with pytest.raises(TransportError, match=f"{len(os.fsencode(path))} bytes"):
        FdServer(path, token="secret")


def raw(path):
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(LIMIT)
    client.connect(str(path))
    return client


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\0" * 900,
        b"[]",
        b'{"type":"wanted","key":"0"}',
        json.dumps({"type": "wanted", "key": "0" * 5000}).encode(),
        json.dumps({"type": "greeting", "token": "secret", "line": "x", "more": 1}).encode(),
        b'{"type":"greeting","token":"\xff","line":"x"}',
    ],
)
def test_garbage_ends_the_connection_and_not_the_server(server, tmp_path, message):
    client = raw(tmp_path / "fds")
    client.send(message)
    assert client.recv(100) == b""
    client.close()
    FdConnection(tmp_path / "fds", token="secret").close()


def test_files_are_not_given_before_the_token(server, tmp_path):
    key = server.offer(memory(b"secret bytes"))
    client = raw(tmp_path / "fds")
    client.send(json.dumps({"type": "wanted", "key": key}).encode())
    assert client.recv(100) == b""
    client.close()


def wait_for_death(path, pipe):
    connection = FdConnection(path, token="secret")
    pipe.send(("name", connection.name))
    signal.pause()


def test_the_server_hears_of_a_killed_process_at_once(server, tmp_path, hung_up):
    with Child(wait_for_death, tmp_path / "fds") as child:
        _, name = child.told()
        assert hung_up == []
        child.kill()
        until(lambda: hung_up == [name])


def serve(path, pipe):
    server = FdServer(path, token="secret")
    pipe.send(("key", server.offer(memory(b"x"))))
    signal.pause()


def test_a_connection_sees_that_its_server_was_killed(tmp_path):
    with Child(serve, tmp_path / "fds") as child:
        _, key = child.told()
        connection = FdConnection(tmp_path / "fds", token="secret")
        assert connection.is_open
        child.kill()
        until(lambda: not connection.is_open)
        with pytest.raises(HandleGone, match="gone"):
            connection.fetch(key)
        connection.close()


def test_a_stopped_server_is_given_up_in_time(tmp_path):
    with Child(serve, tmp_path / "fds") as child:
        _, key = child.told()
        connection = FdConnection(tmp_path / "fds", token="secret")
        child.stop()
        with in_time(0.3), pytest.raises(TransferTimeout, match="answer"):
            connection.fetch(key, timeout_seconds=0.3)
        assert not connection.is_open
        connection.close()


def test_a_connection_to_a_stopped_server_is_given_up_in_time(tmp_path):
    with Child(serve, tmp_path / "fds") as child:
        child.told()
        child.stop()
        late = {"timeout_seconds": 2 * LIMIT, "is_over": lambda: True}
        for seconds, options in ((0.3, {"timeout_seconds": 0.3}), (0, late)):
            with in_time(seconds), pytest.raises(TransferTimeout, match="answer"):
                FdConnection(tmp_path / "fds", token="secret", **options)


def sleep_on(pipe):
    signal.pause()


def test_a_forked_child_does_not_keep_a_connection_open(server, tmp_path, hung_up):
    connection = FdConnection(tmp_path / "fds", token="secret")
    with Child(sleep_on):
        connection.close()
        until(lambda: hung_up == [connection.name])


def fetch_in_child(connection, key, pipe):
    try:
        connection.fetch(key)
    except HandleGone:
        return connection.is_open


def test_children_forked_while_files_are_fetched_have_no_lock_and_no_connection(server, tmp_path):
    key = server.offer(memory(b"x"))
    connection = FdConnection(tmp_path / "fds", token="secret")
    is_over = threading.Event()

    def fetch():
        while not is_over.is_set():
            os.close(connection.fetch(key))

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        for _ in range(10):
            with Child(fetch_in_child, connection, key) as child:
                assert child.result() is False
    finally:
        is_over.set()
        thread.join(LIMIT)
    assert not thread.is_alive()
    assert connection.is_open
    connection.close()


def full_server(path, pipe):
    server = FdServer(path, token="secret")
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    files = []
    with suppress(OSError):
        while True:
            files.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(50):
        os.close(files.pop())
    pipe.send(("ready", None))
    pipe.recv()
    for each in files:
        os.close(each)
    pipe.send(("free", None))
    pipe.recv()
    server.close()


def test_newcomers_who_may_all_need_another_file_are_turned_away_before_there_are_none(tmp_path):
    with Child(full_server, tmp_path / "fds") as child:
        child.told()
        connections = []
        with pytest.raises(PeerLost, match="ulimit"):
            while True:
                connections.append(FdConnection(tmp_path / "fds", token="secret"))
        assert 5 <= len(connections) <= 12  # each takes one of 50, and might take another
        child.send("free them")
        child.told()
        connections.append(FdConnection(tmp_path / "fds", token="secret"))
        child.send("close")
        child.result()
        for each in connections:
            each.close()


def test_many_threads_fetch_at_once(server, tmp_path):
    connection = FdConnection(tmp_path / "fds", token="secret")
    keys = {server.offer(memory(b"%d" % n)): b"%d" % n for n in range(20)}
    wrong = []

    def fetch(key, data):
        fd = connection.fetch(key)
        if os.pread(fd, 10, 0) != data:
            wrong.append(key)
        os.close(fd)

    threads = [threading.Thread(target=fetch, args=each) for each in keys.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert wrong == []
    connection.close()


def test_a_closed_server_leaves_no_file_thread_or_socket(tmp_path):
    before = resources()
    server = FdServer(tmp_path / "fds", token="secret")
    server.offer(memory(b"x"))
    connection = FdConnection(tmp_path / "fds", token="secret")
    server.close()
    server.close()
    connection.close()
    assert settled(before) == before
    assert not (tmp_path / "fds").exists()
