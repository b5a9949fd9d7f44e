"""Token files: made once, whoever comes first, and read only where nobody else can."""

import fcntl
import os
import resource
from pathlib import Path
from threading import Barrier

import pytest

from child_processes import LIMIT
from flyweight.cli import tokens
from flyweight.errors import PeerRefused, StoreError


def private(path, text="secret", mode=0o600):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_servers_that_start_at_once_agree_on_one_token(tmp_path, threads):
    for number in range(50):
        path, barrier = tmp_path / f"{number}" / "token", Barrier(4)

        def start(path=path, barrier=barrier):
            barrier.wait(LIMIT)
            return tokens.read_or_create(path)

        starts = [threads.submit(start) for _ in range(4)]
        assert {each.result(LIMIT) for each in starts} == {path.read_text()}
        assert os.listdir(path.parent) == ["token"]  # no drafts
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_token_that_is_there_stays(tmp_path):
    path = private(tmp_path / "token")
    assert tokens.read_or_create(path) == tokens.read(path) == "secret"


def test_a_token_file_may_be_a_link_as_mounted_secrets_are(tmp_path):
    private(tmp_path / "..2024" / "token", mode=0o400)
    (tmp_path / "..data").symlink_to("..2024")
    (tmp_path / "token").symlink_to("..data/token")
    assert tokens.read_or_create(tmp_path / "token") == tokens.read(tmp_path / "token") == "secret"


def test_a_link_to_what_others_can_read_is_refused(tmp_path):
    (tmp_path / "token").symlink_to(private(tmp_path / "loose", mode=0o644))
    with pytest.raises(PeerRefused, match="with mode 644; it must be of user"):
        tokens.read(tmp_path / "token")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link of another user's")
def test_a_link_that_another_user_made_is_refused(tmp_path):
    (tmp_path / "token").symlink_to(private(tmp_path / "mine"))
    os.chown(tmp_path / "token", 12345, -1, follow_symlinks=False)
    with pytest.raises(PeerRefused, match="is a link that is of user 12345"):
        tokens.read(tmp_path / "token")


def test_a_link_to_nothing_is_refused_in_words(tmp_path):
    (tmp_path / "token").symlink_to(tmp_path / "gone")
    with pytest.raises(PeerRefused, match="it is a link; make the file that it leads to"):
        tokens.read_or_create(tmp_path / "token")
    assert os.listdir(tmp_path) == ["token"]


def test_a_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="token file"):
        tokens.read_or_create(tmp_path / "file" / "token")


def test_a_token_file_that_cannot_be_read_or_written_is_said_in_words(tmp_path):
    """C24: a failing disk, or a full one."""
    with pytest.raises(StoreError, match="token file '/proc/self/mem': Input/output error"):
        tokens.read(Path("/proc/self/mem"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with (
            pytest.raises(StoreError, match="cannot write token file .*: File too large"),
            tokens.server_token(tmp_path / "token"),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with tokens.server_token(tmp_path / "token") as token:  # nobody has it locked
        assert tokens.read(tmp_path / "token") == token


def test_a_token_is_not_written_to_a_file_that_its_server_has_just_removed(tmp_path, monkeypatch):
    path, lock, calls = tmp_path / "token", fcntl.flock, []

    def flock(file, how):
        calls.append(file)
        if len(calls) == 1:
            path.unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with tokens.server_token(path) as token:
        assert path.read_text() == token
    assert len(calls) == 2
