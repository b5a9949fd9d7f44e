import errno
import itertools
import os
from itertools import pairwise

import numpy as np
import pytest

from child_processes import LIMIT, Child
from conftest import dead_draft, random_bytes
from flyweight.errors import StoreError
from flyweight.memory import page_memory
from flyweight.stores.draft import LocalDraft, remove, sweep
from flyweight.stores.draft_file import CacheProbe

DATA = random_bytes(3 << 20)


class Probe(CacheProbe):
    """Finds the page cache slow or not as it is told, in turn."""

    def __init__(self, *answers):
        super().__init__()
        self._answers = itertools.cycle(answers)

    def is_slow(self):
        return next(self._answers)


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 100_000])
@pytest.mark.parametrize("shift", [0, 1, 64])
@pytest.mark.parametrize("is_cache_slow", [True, False])
def test_writes_of_any_alignment_land_exactly(tmp_path, offset, shift, is_cache_slow):
    data = page_memory(2_500_000 + 4096)[shift : 2_500_000 + shift]
    data[:] = random_bytes(len(data))
    with LocalDraft(tmp_path / "place", probe=Probe(is_cache_slow)) as draft:
        draft.reserve("file", offset + len(data) + 10)
        draft.write("file", offset, data)
        draft.commit()
    content = (tmp_path / "place" / "file").read_bytes()
    assert content == bytes(offset) + data.tobytes() + bytes(10)


@pytest.mark.parametrize("ways", [[True], [False], [True, False], [False, True]])
def test_neighbouring_writes_do_not_disturb_each_other(tmp_path, ways):
    """Past the page cache, through it, and both in turn."""
    data = random_bytes(9 << 20)
    cuts = [0, 1_500_001, 3_000_017, 3_000_020, 7_777_777, len(data)]
    with LocalDraft(tmp_path / "place", probe=Probe(*ways)) as draft:
        draft.reserve("file", len(data))
        for start, end in sorted(pairwise(cuts), key=lambda p: -p[0] % 7):
            draft.write("file", start, data[start:end])
        draft.commit()
    assert (tmp_path / "place" / "file").read_bytes() == data.tobytes()


def test_the_way_past_the_cache_is_taken_while_the_cache_is_slow():
    probe, ways = CacheProbe(), []
    for rate in (0.0, 0.0, 9e9, 9e9, 0.0):
        probe.measured(rate, 1.0)
        ways.append(probe.is_slow())
    assert ways == [False, True, False, False, True]  # the first is a probe
    later = [probe.is_slow() for _ in range(5, 65)]
    assert later == [True] * 59 + [False]  # and another one now and then


def test_nothing_is_visible_before_the_commit(tmp_path):
    with LocalDraft(tmp_path / "place") as draft:
        draft.reserve("file", 3)
        draft.write("file", 0, random_bytes(3))
        assert not (tmp_path / "place").exists()
        draft.commit()
    assert os.listdir(tmp_path) == ["place"]


def test_a_draft_that_is_left_without_commit_leaves_nothing(tmp_path):
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt), LocalDraft(tmp_path / "place") as draft:
        draft.reserve("file", 3 << 20)
        draft.write("file", 0, DATA)
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_forked_child_leaves_its_parents_draft_alone(tmp_path):
    with LocalDraft(tmp_path / "place") as draft:
        draft.reserve("file", 3)
        with Child(lambda pipe: draft.abort()) as child:  # as `with` does when the child leaves it
            child.result()
        draft.write("file", 0, np.frombuffer(b"abc", np.uint8))
        draft.commit()
    assert (tmp_path / "place" / "file").read_bytes() == b"abc"


def test_a_draft_that_nobody_holds_any_more_is_gone(tmp_path):
    draft = LocalDraft(tmp_path / "place")
    draft.reserve("file", 3)
    del draft
    assert os.listdir(tmp_path) == []


def test_the_second_of_two_writers_is_refused_and_the_first_is_whole(tmp_path):
    with LocalDraft(tmp_path / "place") as first, LocalDraft(tmp_path / "place") as second:
        for draft, byte in ((first, 1), (second, 2)):
            draft.reserve("file", 4)
            draft.write("file", 0, np.full(4, byte, np.uint8))
        second.commit()
        with pytest.raises(StoreError) as refusal:
            first.commit()
    assert refusal.value.errno == errno.EEXIST
    assert (tmp_path / "place" / "file").read_bytes() == b"\2\2\2\2"
    assert os.listdir(tmp_path) == ["place"]


def test_a_place_that_is_there_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "place").mkdir()
    with pytest.raises(StoreError) as refusal:
        LocalDraft(tmp_path / "place")
    assert refusal.value.errno == errno.EEXIST


def test_room_that_is_not_there_is_refused_with_both_numbers(tmp_path):
    with (
        LocalDraft(tmp_path / "place") as draft,
        pytest.raises(StoreError, match=r"cannot reserve \d+ bytes for 'file'.*bytes free"),
    ):
        draft.reserve("file", 1 << 62)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_may_not_be_written_is_refused(tmp_path):
    # Tests may run as root, whom no mode stops; a file where a directory should be stops all.
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot write"):
        LocalDraft(tmp_path / "file" / "place")


def test_sweeping_removes_dead_drafts_and_spares_live_ones(tmp_path):
    (tmp_path / dead_draft("place")).mkdir()
    (tmp_path / dead_draft("place") / "file").write_bytes(b"x")
    (tmp_path / dead_draft("place", "trash")).mkdir()
    (tmp_path / ".draft-but-not-ours").mkdir()
    with LocalDraft(tmp_path / "place") as draft:
        draft.reserve("file", 1)
        assert not (tmp_path / dead_draft("place")).exists()  # a new draft sweeps
        (tmp_path / dead_draft("place")).mkdir()
        assert sweep(tmp_path) == [dead_draft("place")]
        draft.commit()
    assert sorted(os.listdir(tmp_path)) == [".draft-but-not-ours", "place"]


def test_what_another_machine_left_is_spared_for_a_day(tmp_path):
    foreign = tmp_path / ".draft-place-00000000-0123456789abcdef"
    foreign.mkdir()
    assert sweep(tmp_path) == []
    os.utime(foreign, (0, 0))
    assert sweep(tmp_path) == [foreign.name]


def test_removing_is_all_at_once(tmp_path):
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "file").write_bytes(b"x")
    remove(tmp_path / "place")
    assert os.listdir(tmp_path) == []
    remove(tmp_path / "place")  # gone already is as good as gone


def test_a_link_to_a_directory_is_removed_and_the_directory_is_not(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "place").symlink_to(tmp_path / "real")
    remove(tmp_path / "place")
    assert os.listdir(tmp_path) == ["real"]


def test_a_draft_swept_away_as_it_is_made_begins_again(tmp_path, monkeypatch):
    real, calls = os.open, []

    def gone_once(path, *rest, **options):
        if ".draft-" in str(path) and not calls:
            calls.append(path)
            os.rmdir(path)
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "open", gone_once)
    with LocalDraft(tmp_path / "place") as draft:
        draft.reserve("file", 1)
        draft.commit()
    assert len(calls) == 1
    assert os.listdir(tmp_path) == ["place"]


def test_a_file_system_without_locks_can_still_be_written(tmp_path, monkeypatch):
    import fcntl

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with LocalDraft(tmp_path / "place") as draft:
        draft.reserve("file", 1)
        draft.commit()
    assert os.listdir(tmp_path) == ["place"]


def test_a_file_system_that_refuses_unbuffered_writes_is_written_through_the_cache(
    tmp_path, monkeypatch
):
    """Two threads find out at once; neither may close what the other still writes by."""
    import threading

    real = os.pwrite
    direct = os.O_DIRECT

    def refuse_direct(fd, data, offset):
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse_direct)
    data = random_bytes(8 << 20)
    with LocalDraft(tmp_path / "place", probe=Probe(True)) as draft:
        draft.reserve("file", len(data))
        halves = [(0, data[: 4 << 20]), (4 << 20, data[4 << 20 :])]
        threads = [threading.Thread(target=draft.write, args=("file", *half)) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        assert not draft.can_go_direct("file")
        draft.commit()
    assert (tmp_path / "place" / "file").read_bytes() == data.tobytes()
