"""A directory in which ranks find each other: nothing is half read, and nothing piles up."""

import os
import signal
import stat

import pytest

from child_processes import LIMIT, Child, exit_code
from flyweight.errors import SpecError, TransferTimeout
from flyweight.ranks.file_store import FileStore
from flyweight.ranks.rendezvous import Rendezvous, join_group


def joined(directory, rank, pipe):
    """Join the other rank, then be killed."""
    place = Rendezvous(rank, 2, FileStore(directory), "group")
    group = join_group(place, timeout_seconds=LIMIT)
    pipe.send(("gathered", group.gather("a", rank)))
    pipe.recv()


def test_jobs_that_are_killed_again_and_again_leave_the_files_of_one(tmp_path):
    """The arrivals and answers of a job that was killed are not taken for those of the next."""
    sizes = []
    for _ in range(3):
        with Child(joined, tmp_path, 1) as other, Child(joined, tmp_path, 0) as first:
            assert first.told() == ("gathered", [0, 1])
            assert other.told() == ("gathered", [])
            other.kill()
        with pytest.raises(TransferTimeout, match="join"):
            join_group(Rendezvous(0, 2, FileStore(tmp_path), "group"), timeout_seconds=0.1)
        with pytest.raises(TransferTimeout, match="answer"):
            join_group(Rendezvous(1, 2, FileStore(tmp_path), "group"), timeout_seconds=0.1)
        sizes.append(len(os.listdir(tmp_path)))
    assert sizes == [sizes[0]] * 3


@pytest.mark.parametrize("call", ["opened", "half written"])
def test_a_text_that_a_killed_process_did_not_finish_is_not_there(tmp_path, call, monkeypatch):
    store = FileStore(tmp_path / "ranks")
    store.set("key", "an old text", 0)

    def killed():
        opened = os.open

        def open_then_die(path, flags, mode):
            file = opened(path, flags, mode)
            if call == "half written":
                os.write(file, b"x" * 20)
            os.kill(os.getpid(), signal.SIGKILL)

        os.open = open_then_die
        store.set("key", "a text", 0)

    assert exit_code(killed) == -signal.SIGKILL
    assert store.get("key", 0) is None
    assert len(os.listdir(tmp_path / "ranks")) == 1
    store.set("key", "a text", 0)
    assert FileStore(tmp_path / "ranks").get("key", 0) == "a text"


def test_only_this_user_reads_the_texts(tmp_path):
    store = FileStore(tmp_path / "ranks")
    store.set("key", "a secret", 0)
    (file,) = (tmp_path / "ranks").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (tmp_path / "ranks").chmod(0o755)
    with pytest.raises(SpecError, match="mode 700"):
        FileStore(tmp_path / "ranks")
