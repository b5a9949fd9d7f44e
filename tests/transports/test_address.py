"""Addresses, and the directory of one: a publisher removes what a publisher made, no other file."""

import os
import socket
import sys
from contextlib import ExitStack

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Command
from flyweight.errors import PeerRefused, SpecError, TransportError
from flyweight.transports.address import (
    TcpAddress,
    UnixAddress,
    parse_address,
)
from live.one_process import in_background
from versioned_models import holds, weights

NAMES = ["token", "token.new", "holder", "holder.1"]


def small_model():
    return {"w": np.arange(4.0)}


@pytest.fixture
def directory(tmp_path):
    """A directory of the user's own, where no publisher ever was."""
    path = tmp_path / "policy"
    path.mkdir(mode=0o700)
    return path


def killed_publisher(address):
    """Leave behind what a publisher that is killed leaves."""
    code = (
        "import sys, time, numpy, flyweight as fw\n"
        "publisher = fw.Publisher({'w': numpy.arange(4.0)}, sys.argv[1])\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    with Command(sys.executable, "-c", code, address) as child:
        assert child.line() == "up"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("token", [None, "ours"])
@pytest.mark.parametrize("was_used", [False, True])
@pytest.mark.parametrize("content", ["my notes", "secret", ""])
def test_a_file_of_the_users_own_is_refused_and_stays(
    directory, address, name, token, was_used, content
):
    if was_used:
        fw.Publisher(small_model(), address).close()
    (directory / name).write_text(content)
    (directory / name).chmod(0o600 if content else 0o644)
    before = sorted(os.listdir(directory))
    with pytest.raises(SpecError, match=rf"{name}' exists"):
        fw.Publisher(small_model(), address, token=token)
    assert (directory / name).read_text() == content
    assert sorted(os.listdir(directory)) == before
    (directory / name).unlink()
    fw.Publisher(small_model(), address, token=token).close()


def make(path, kind):
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(os.fspath(path))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["directory", "link", "pipe", "socket"])
def test_whatever_else_has_such_a_name_is_refused_and_stays(directory, address, name, kind):
    make(directory / name, kind)
    for _ in range(2):  # the first attempt leaves nothing that the second takes for a publisher's
        with pytest.raises(SpecError, match=rf"{name}' exists"):
            fw.Publisher(small_model(), address)
        assert os.listdir(directory) == [name]


@pytest.mark.parametrize("token", [None, "ours"])
def test_what_a_killed_publisher_left_is_cleared_away(directory, address, token):
    killed_publisher(address)
    assert sorted(os.listdir(directory)) == ["holder", "lock", "token"]
    (directory / "token.new").touch(mode=0o600)  # killed in the middle of writing it
    with fw.Publisher(small_model(), address, token=token):
        assert (directory / "token").exists() == (token is None)
        fw.Replica(small_model(), address, token=token).close()
    assert os.listdir(directory) == ["lock"]


def test_closing_leaves_a_file_of_the_users_own(directory, address):
    with fw.Publisher(small_model(), address, token="ours"):
        (directory / "token").write_text("my own, by now")
    assert sorted(os.listdir(directory)) == ["lock", "token"]
    assert (directory / "token").read_text() == "my own, by now"


def test_of_two_that_start_at_once_the_second_hears_of_the_first(directory, address, monkeypatch):
    """And not that it should move the other's door away."""
    lstat, others = os.lstat, []

    def slow(path, **options):
        try:
            return lstat(path, **options)
        finally:
            if not others and str(path).startswith(str(directory)):
                monkeypatch.undo()
                others.append(fw.Publisher(small_model(), address))

    monkeypatch.setattr(os, "lstat", slow)
    with pytest.raises(TransportError, match="another publisher is at"):
        fw.Publisher(small_model(), address)
    others[0].close()
    fw.Publisher(small_model(), address).close()
    assert os.listdir(directory) == ["lock"]


def test_a_second_publisher_in_a_new_directory_survives_the_first(address, tmp_path):
    first = fw.Publisher(weights(1), address)
    os.rename(tmp_path / "policy", tmp_path / "moved")
    engine = weights(50)
    with fw.Publisher(weights(2), address, keep="memory") as second:
        first.close()
        second.publish(2)
        with fw.Replica(engine, address) as replica:
            assert replica.update(timeout_seconds=LIMIT).version == 2
    assert holds(engine, 2)


def test_a_token_that_was_read_just_before_another_publisher_came_is_read_again(
    address, monkeypatch
):
    with fw.Publisher(weights(1), address):
        stale, token = [parse_address(address).token()], UnixAddress.token
    engine = weights(50)
    with fw.Publisher(weights(2), address, keep="memory") as publisher:
        publisher.publish(2)
        monkeypatch.setattr(
            UnixAddress, "token", lambda self: stale.pop() if stale else token(self)
        )
        with fw.Replica(engine, address) as replica:
            assert replica.update(timeout_seconds=LIMIT).version == 2
            assert holds(engine, 2)


def test_a_directory_that_others_can_enter_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    os.chmod(tmp_path / "open", 0o755)
    with pytest.raises(SpecError, match=r"chmod\s+700"):
        fw.Publisher(weights(1), f"unix:{tmp_path}/open")
    with pytest.raises(SpecError, match="755"):
        fw.Replica(weights(1), f"unix:{tmp_path}/open")
    (tmp_path / "file").touch()
    with pytest.raises((SpecError, TransportError), match="file"):
        fw.Publisher(weights(1), f"unix:{tmp_path}/file")


def modes(directory):
    return {name: os.stat(directory / name).st_mode & 0o777 for name in os.listdir(directory)}


@pytest.mark.parametrize("umask", [0, 0o077])
def test_what_a_publisher_makes_is_for_its_user_only(address, tmp_path, umask):
    before = os.umask(umask)
    try:
        with (
            in_background(
                fw.Publisher, weights(1), address, rank=1, world_size=2, timeout_seconds=LIMIT
            ) as other,
            fw.Publisher(weights(1), address, rank=0, world_size=2, timeout_seconds=LIMIT),
        ):
            other().close()
            assert os.stat(tmp_path / "policy").st_mode & 0o777 == 0o700
            wanted = dict.fromkeys(("lock", "token", "holder"), 0o600)
            assert modes(tmp_path / "policy") == wanted
        assert modes(tmp_path / "policy") == {"lock": 0o600}
    finally:
        os.umask(before)


def test_an_address_is_a_directory_or_a_host_and_a_port(tmp_path):
    assert parse_address("unix:run/policy") == UnixAddress(tmp_path.cwd() / "run/policy")
    assert parse_address("tcp://10.0.0.7:9400") == TcpAddress("10.0.0.7", 9400)
    assert str(parse_address("tcp://[::1]:9400")) == "tcp://[::1]:9400"
    assert parse_address("tcp://0.0.0.0:0").is_any


def test_a_replica_of_another_host_reads_and_one_of_the_same_host_maps(monkeypatch):
    seen = []
    with fw.Publisher(weights(1), "tcp://127.0.0.1:0", token="ours", keep="memory") as publisher:
        publisher.publish(1)
        for host in ("", "another"):
            monkeypatch.setenv("FLYWEIGHT_HOST", host)
            engine = weights(50)
            with fw.Replica(engine, publisher.address, token="ours", name="engine") as replica:
                seen.append(replica.update(timeout_seconds=LIMIT).transport)
            assert holds(engine, 1)
    assert seen == ["mapped", "read"]


FORMS = "run/policy tcp:1.2.3.4:5 unix: http:x tcp://host tcp://host:5/x tcp://:5 tcp://h:99999"


@pytest.mark.parametrize("text", ["", *FORMS.split()])
def test_an_address_of_another_form_is_refused(text):
    with pytest.raises(SpecError, match="form|range"):
        fw.Replica(weights(1), text)


def test_a_token_with_the_end_of_its_line_is_refused_and_not_shown(address):
    for make in (fw.Publisher, fw.Replica):
        with pytest.raises(SpecError, match=r"strip\(\)") as caught:
            make(weights(1), address, token="hush-hush\n")
        assert "hush" not in str(caught.value)


def test_an_address_of_another_host_cannot_be_listened_at():
    with pytest.raises(TransportError, match=r"192\.0\.2\.1:9400"):
        fw.Publisher(weights(1), "tcp://192.0.2.1:9400", token="ours")


def test_a_directory_too_deep_for_a_socket_is_refused_with_its_length(tmp_path):
    with pytest.raises(TransportError, match="at most 107"):
        fw.Publisher(weights(1), f"unix:{tmp_path}/{'x' * 100}")


def test_a_wrong_token_is_refused_by_name(address, tmp_path):
    with fw.Publisher(weights(1), address) as publisher:
        with pytest.raises(PeerRefused, match="token"):
            fw.Replica(weights(1), address, token="guess")
        assert publisher.replicas == []
    with fw.Publisher(weights(1), address, token="ours"):
        assert not (tmp_path / "policy" / "token").exists()
        with pytest.raises(PeerRefused, match="token="):
            fw.Replica(weights(1), address)
        fw.Replica(weights(1), address, token="ours").close()


def test_ranks_of_an_engine_meet_at_a_publisher_that_was_started_again_with_another_token(address):
    """Each makes a token of its own."""
    with ExitStack() as stack:
        arrays = [weights(50), weights(50)]
        ranks = [
            stack.enter_context(fw.Replica(each, address, name="engine", rank=rank, world_size=2))
            for rank, each in enumerate(arrays)
        ]
        for version in (1, 2):
            with fw.Publisher(weights(version), address, keep="memory") as publisher:
                publisher.publish(version)
                with in_background(ranks[1].update, timeout_seconds=LIMIT) as other:
                    assert ranks[0].update(timeout_seconds=LIMIT).version == version
                assert other().version == version
            if version == 1:  # rank 1 is started again, so that they must meet anew
                ranks[1].close()
                ranks[1] = fw.Replica(arrays[1], address, name="engine", rank=1, world_size=2)
                stack.enter_context(ranks[1])
        assert holds(arrays[0], 2)
        assert holds(arrays[1], 2)
