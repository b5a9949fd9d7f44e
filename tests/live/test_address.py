"""The directory of an address: a publisher removes what a publisher made, and nothing else."""

import os
import socket
import sys

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Command
from flyweight.errors import (
    PeerRefused,
    SpecError,
    TransportError,
)
from flyweight.live import messages
from flyweight.live.address import Address
from peers import FakeReplica
from versioned_models import holds, weights

NAMES = ["token", "token.new", "control", "door"]


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
    assert sorted(os.listdir(directory)) == ["control", "door", "lock", "token"]
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
    assert os.listdir(directory) == ["lock"]


def test_a_token_of_its_own_is_asked_for(address):
    with (
        fw.Publisher(weights(1), address, token="ours"),
        pytest.raises(fw.FlyweightError, match="token="),
    ):
        fw.Replica(weights(2), address)


def test_a_second_publisher_in_a_new_directory_survives_the_first(address, tmp_path):
    first = fw.Publisher(weights(1), address)
    os.rename(tmp_path / "policy", tmp_path / "moved")
    engine = weights(50)
    with fw.Publisher(weights(2), address, hold=True) as second:
        first.close()
        second.publish(2)
        with fw.Replica(engine, address) as replica:
            assert replica.update(timeout_seconds=LIMIT).version == 2
    assert holds(engine, 2)


def test_a_token_that_was_read_just_before_another_publisher_came_is_read_again(
    address, threads, monkeypatch
):
    with fw.Publisher(weights(1), address):
        stale, token = [Address.parse(address).token()], Address.token
    engine = weights(50)
    with fw.Publisher(weights(2), address) as publisher:
        monkeypatch.setattr(Address, "token", lambda self: stale.pop() if stale else token(self))
        with fw.Replica(engine, address) as replica:
            future = threads.submit(replica.update, timeout_seconds=LIMIT)
            publisher.publish(2, num_replicas=1)
            assert future.result(LIMIT).version == 2
            assert holds(engine, 2)


def test_two_publishers_do_not_share_an_address(address):
    with (
        fw.Publisher(weights(1), address),
        pytest.raises(TransportError, match="another publisher is at"),
    ):
        fw.Publisher(weights(1), address)
    fw.Publisher(weights(1), address).close()


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


def test_what_a_publisher_makes_is_for_its_user_only(address, tmp_path):
    with fw.Publisher(weights(1), address):
        assert os.stat(tmp_path / "policy").st_mode & 0o777 == 0o700
        assert os.stat(tmp_path / "policy" / "token").st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text",
    [
        "",
        "run/policy",
        "tcp:1.2.3.4:5",
        "unix:",
        "http:x",
        "tcp://host",
        "tcp://host:5/x",
        "tcp://:5",
        "tcp://h:99999",
    ],
)
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
        with FakeReplica(address) as peer:  # and by the control channel itself
            peer.say(messages.Hello("guess", "me", 1))
            answer = peer.hear()
            assert isinstance(answer, messages.Refusal)
            assert answer.kind == "PeerRefused"
        assert publisher.replicas == []
    with fw.Publisher(weights(1), address, token="ours"):
        assert not (tmp_path / "policy" / "token").exists()
        fw.Replica(weights(1), address, token="ours").close()
