"""The directory of an address: a publisher removes what a publisher made, and nothing else."""

import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

import flyweight as fw
from flyweight.errors import SpecError, TransportError

NAMES = ["token", "token.new", "control", "door"]


def weights():
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
    with subprocess.Popen(
        [sys.executable, "-c", code, address], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "up\n"
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=20)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("token", [None, "ours"])
@pytest.mark.parametrize("was_used", [False, True])
@pytest.mark.parametrize("content", ["my notes", "secret", ""])
def test_a_file_of_the_users_own_is_refused_and_stays(
    directory, address, name, token, was_used, content
):
    if was_used:
        fw.Publisher(weights(), address).close()
    (directory / name).write_text(content)
    (directory / name).chmod(0o600 if content else 0o644)
    before = sorted(os.listdir(directory))
    with pytest.raises(SpecError, match=rf"{name}' exists.*not made by a publisher.*move it"):
        fw.Publisher(weights(), address, token=token)
    assert (directory / name).read_text() == content
    assert sorted(os.listdir(directory)) == before
    (directory / name).unlink()
    fw.Publisher(weights(), address, token=token).close()


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
        with pytest.raises(SpecError, match=rf"{name}' exists.*not made by a publisher"):
            fw.Publisher(weights(), address)
        assert os.listdir(directory) == [name]


@pytest.mark.parametrize("token", [None, "ours"])
def test_what_a_killed_publisher_left_is_cleared_away(directory, address, token):
    killed_publisher(address)
    assert sorted(os.listdir(directory)) == ["control", "door", "lock", "token"]
    (directory / "token.new").touch(mode=0o600)  # killed in the middle of writing it
    with fw.Publisher(weights(), address, token=token):
        assert (directory / "token").exists() == (token is None)
        fw.Replica(weights(), address, token=token).close()
    assert os.listdir(directory) == ["lock"]


def test_closing_leaves_a_file_of_the_users_own(directory, address):
    with fw.Publisher(weights(), address, token="ours"):
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
                others.append(fw.Publisher(weights(), address))

    monkeypatch.setattr(os, "lstat", slow)
    with pytest.raises(TransportError, match="another publisher is at"):
        fw.Publisher(weights(), address)
    others[0].close()
    assert os.listdir(directory) == ["lock"]
