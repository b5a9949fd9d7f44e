"""The door hands files to the user's own processes that know the token, and to nobody else."""

import json
import os
import resource
import signal
import socket
import stat
import threading
import time
from contextlib import suppress

import pytest

from flyweight.errors import HandleGone, PeerLost, PeerRefused, TransferTimeout, TransportError
from flyweight.transports.fd_passing import FdConnection, FdServer
from live_models import Child, in_time, resources, settled, until


@pytest.fixture
def hung_up():
    return []


@pytest.fixture
def door(tmp_path, hung_up):
    door = FdServer(tmp_path / "door", token="secret", on_hangup=hung_up.append)
    yield door
    door.close()


def memory(data):
    fd = os.memfd_create("test")
    os.write(fd, data)
    return fd


def test_a_file_is_fetched_by_its_key_and_gone_once_dropped(door, tmp_path):
    key = door.offer(memory(b"hello"))
    line = FdConnection(tmp_path / "door", token="secret")
    fd = line.fetch(key)
    assert os.pread(fd, 10, 0) == b"hello"
    os.close(fd)
    door.release(key)
    door.release(key)
    with pytest.raises(HandleGone, match="no longer offered"):
        line.fetch(key)
    line.close()


def test_a_wrong_token_is_refused(door, tmp_path):
    with pytest.raises(PeerRefused, match="does not know our token"):
        FdConnection(tmp_path / "door", token="guess")


def test_nobody_at_the_door_is_a_lost_peer(tmp_path):
    with pytest.raises(PeerLost, match="nobody is at the door"):
        FdConnection(tmp_path / "door", token="secret")


def test_the_socket_is_for_its_owner_only(door, tmp_path):
    assert stat.S_IMODE(os.stat(tmp_path / "door").st_mode) == 0o600


def test_a_path_longer_than_an_address_is_refused_with_its_length(tmp_path):
    path = tmp_path / ("x" * 120)
    with pytest.raises(TransportError, match=f"has {len(os.fsencode(path))} bytes, at most 107"):
        FdServer(path, token="secret")


def raw(path):
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(5)
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
def test_garbage_ends_the_connection_and_not_the_door(door, tmp_path, message):
    client = raw(tmp_path / "door")
    client.send(message)
    assert client.recv(100) == b""
    client.close()
    FdConnection(tmp_path / "door", token="secret").close()


def test_files_are_not_given_before_the_token(door, tmp_path):
    key = door.offer(memory(b"secret bytes"))
    client = raw(tmp_path / "door")
    client.send(json.dumps({"type": "wanted", "key": key}).encode())
    assert client.recv(100) == b""
    client.close()


def wait_for_death(path, pipe):
    line = FdConnection(path, token="secret")
    pipe.send(("line", line.name))
    signal.pause()


def test_the_door_hears_of_a_killed_process_at_once(door, tmp_path, hung_up):
    with Child(wait_for_death, tmp_path / "door") as child:
        _, name = child.told()
        assert hung_up == []
        child.kill()
        until(lambda: hung_up == [name], 2)


def serve(path, pipe):
    door = FdServer(path, token="secret")
    pipe.send(("key", door.offer(memory(b"x"))))
    signal.pause()


def test_a_line_sees_that_its_door_was_killed(tmp_path):
    with Child(serve, tmp_path / "door") as child:
        _, key = child.told()
        line = FdConnection(tmp_path / "door", token="secret")
        assert line.is_open
        child.kill()
        until(lambda: not line.is_open, 2)
        with pytest.raises(HandleGone, match="gone with the process"):
            line.fetch(key)
        line.close()


def test_a_stopped_door_is_given_up_in_time(tmp_path):
    with Child(serve, tmp_path / "door") as child:
        _, key = child.told()
        line = FdConnection(tmp_path / "door", token="secret")
        child.stop()
        with in_time(3), pytest.raises(TransferTimeout, match="did not answer in 3 s"):
            line.fetch(key, timeout_seconds=3)
        assert not line.is_open
        line.close()


def test_a_line_to_a_stopped_door_is_given_up_in_time(tmp_path):
    with Child(serve, tmp_path / "door") as child:
        child.told()
        child.stop()
        with in_time(3), pytest.raises(TransferTimeout, match="did not answer in 3"):
            FdConnection(tmp_path / "door", token="secret", timeout_seconds=3)
        started = time.monotonic()
        with pytest.raises(TransferTimeout, match="did not answer in 0"):
            FdConnection(tmp_path / "door", token="secret", timeout_seconds=5, is_over=lambda: True)
        assert time.monotonic() - started < 2


def sleep_on(pipe):
    signal.pause()


def test_a_forked_child_does_not_keep_a_line_open(door, tmp_path, hung_up):
    line = FdConnection(tmp_path / "door", token="secret")
    with Child(sleep_on):
        line.close()
        until(lambda: hung_up == [line.name], 2)


def come_up(pipe):
    return "up"


def test_a_child_forked_while_a_file_is_handed_over_comes_up(door, tmp_path):
    door.offer(memory(b"x"))
    with door._lock, Child(come_up) as child:  # as its thread has it then
        assert child.result(5) == "up"
    FdConnection(tmp_path / "door", token="secret").close()


def look(line, pipe):
    return line.is_open


def test_a_child_forked_while_a_file_is_fetched_sees_a_closed_line(door, tmp_path):
    line = FdConnection(tmp_path / "door", token="secret")
    with line._lock, Child(look, line) as child:
        assert child.result(5) is False
    assert line.is_open
    line.close()


def full_door(path, pipe):
    door = FdServer(path, token="secret")
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
    door.close()


def test_newcomers_who_may_all_need_another_file_are_turned_away_before_there_are_none(tmp_path):
    with Child(full_door, tmp_path / "door") as child:
        child.told()
        lines = []
        with pytest.raises(PeerLost, match="no files left for us; raise its limit, ulimit -n"):
            while True:
                lines.append(FdConnection(tmp_path / "door", token="secret"))
        assert 5 <= len(lines) <= 12  # each takes one of 50, and might take another
        child.send("free them")
        child.told()
        lines.append(FdConnection(tmp_path / "door", token="secret"))
        child.send("close")
        child.result()
        for each in lines:
            each.close()


def test_many_threads_fetch_at_once(door, tmp_path):
    line = FdConnection(tmp_path / "door", token="secret")
    keys = {door.offer(memory(b"%d" % n)): b"%d" % n for n in range(20)}
    wrong = []

    def fetch(key, data):
        fd = line.fetch(key)
        if os.pread(fd, 10, 0) != data:
            wrong.append(key)
        os.close(fd)

    threads = [threading.Thread(target=fetch, args=each) for each in keys.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert wrong == []
    line.close()


def test_a_closed_door_leaves_no_file_thread_or_socket(tmp_path):
    before = resources()
    door = FdServer(tmp_path / "door", token="secret")
    door.offer(memory(b"x"))
    line = FdConnection(tmp_path / "door", token="secret")
    door.close()
    door.close()
    line.close()
    assert settled(before) == before
    assert not (tmp_path / "door").exists()
