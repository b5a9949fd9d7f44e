import errno
import fcntl
import os
import threading

import numpy as np
import pytest

from child_processes import LIMIT
from flyweight.errors import StoreError
from flyweight.stores import draft as draft_module
from flyweight.stores.draft import LegacyDraft


def test_a_draft_into_a_directory_refuses_a_name_that_is_taken(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    with LegacyDraft(tmp_path) as draft:
        draft.reserve("old", 3)
        with pytest.raises(StoreError, match="exists"):
            draft.commit()
    assert (tmp_path / "old").read_bytes() == b"old"


def test_a_draft_into_a_directory_removes_what_is_stale_and_appears(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "stale").write_bytes(b"stale")
    (tmp_path / "other").write_bytes(b"other")
    with LegacyDraft(tmp_path, stale=lambda: ["stale", "old", "never-was"]) as draft:
        draft.reserve("old", 3)
        draft.write("old", 0, np.frombuffer(b"new", np.uint8))
        draft.commit()
    assert sorted(os.listdir(tmp_path)) == ["old", "other"]
    assert (tmp_path / "old").read_bytes() == b"new"


def test_a_draft_that_finds_a_name_taken_removes_nothing(tmp_path):
    for name in ("stale", "taken"):
        (tmp_path / name).write_bytes(b"old")
    with LegacyDraft(tmp_path, stale=lambda: ["stale"]) as draft:
        draft.reserve("stale", 3)
        draft.reserve("taken", 3)
        with pytest.raises(StoreError, match="exists"):
            draft.commit()
    assert [(tmp_path / name).read_bytes() for name in ("stale", "taken")] == [b"old", b"old"]


@pytest.fixture
def turn(tmp_path):
    """The lock on a directory that another writer holds while it commits."""
    lock = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield lock
    os.close(lock)


def test_writers_into_one_directory_take_turns(tmp_path, threads, turn, monkeypatch):
    lock, is_refused = draft_module._lock_directory, threading.Event()

    def tried(fd):
        try:
            lock(fd)
        except BlockingIOError:
            is_refused.set()
            raise

    monkeypatch.setattr(draft_module, "_lock_directory", tried)

    def visible():
        yield from (name for name in os.listdir(tmp_path) if not name.startswith("."))

    with LegacyDraft(tmp_path, stale=visible) as draft:
        draft.reserve("new", 3)
        commit = threads.submit(draft.commit)
        assert is_refused.wait(LIMIT)
        assert not commit.done()
        (tmp_path / "left by the other").write_bytes(b"old")
        fcntl.flock(turn, fcntl.LOCK_UN)
        commit.result(LIMIT)
    assert os.listdir(tmp_path) == ["new"]


def test_a_turn_that_does_not_end_is_given_up_by_name(tmp_path, turn, monkeypatch):
    monkeypatch.setattr("flyweight.stores.draft.TURN_SECONDS", 0.05)
    (tmp_path / "stale").write_bytes(b"old")
    with LegacyDraft(tmp_path, stale=lambda: ["stale"]) as draft:
        draft.reserve("new", 3)
        with pytest.raises(StoreError, match="lock") as late:
            draft.commit()
    assert late.value.errno == errno.ETIMEDOUT
    assert os.listdir(tmp_path) == ["stale"]
