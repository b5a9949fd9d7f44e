import errno
import fcntl
import itertools
import os
from concurrent.futures import wait
from itertools import pairwise

import numpy as np
import pytest

from conftest import dead_draft, drop_cache, random_bytes
from flyweight.errors import FormatError, StoreError
from flyweight.memory import page_memory
from flyweight.ports import WINDOW_SLACK
from flyweight.stores.draft import LocalDraft, remove, sweep
from flyweight.stores.local import LocalStore

DATA = random_bytes(3 << 20)


@pytest.fixture
def store(tmp_path):
    (tmp_path / "file").write_bytes(DATA.tobytes())
    store = LocalStore(tmp_path)
    yield store
    store.close()


RANGES = [(0, 1), (0, len(DATA)), (4095, 2), (12345, 700_001), (len(DATA) - 1, 1), (4096, 4096)]


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
@pytest.mark.parametrize("is_cold", [False, True])
@pytest.mark.parametrize("may_map", [False, True])
def test_a_window_shows_the_files_bytes(store, tmp_path, offset, nbytes, is_cold, may_map):
    if is_cold:
        drop_cache(tmp_path / "file")
    staging = page_memory(nbytes + WINDOW_SLACK)
    with store.window("file", offset, nbytes, staging, may_map=may_map) as window:
        assert window.tobytes() == DATA[offset : offset + nbytes].tobytes()


def test_a_warm_window_is_mapped_and_a_cold_one_is_read_past_the_cache(store, tmp_path):
    staging = page_memory(len(DATA) + WINDOW_SLACK)
    store.read("file", 0, len(DATA))
    with store.window("file", 0, len(DATA), staging) as window:
        assert not np.may_share_memory(window, staging)
    drop_cache(tmp_path / "file")
    with store.window("file", 0, len(DATA), staging) as window:
        assert np.may_share_memory(window, staging)
    with store.window("file", 0, len(DATA), staging) as window:  # the first left no trace in it
        assert np.may_share_memory(window, staging)


def test_asking_whether_a_window_is_cached_does_not_bring_it_in(store, tmp_path):
    drop_cache(tmp_path / "file")
    assert not any(store.is_cached("file", 0, len(DATA)) for _ in range(200))
    assert not store.is_cached("file", len(DATA) - 1, 1)
    store.read("file", 0, len(DATA))
    assert store.is_cached("file", 0, len(DATA))


def test_plain_reads_work_where_nothing_better_does(tmp_path):
    (tmp_path / "file").write_bytes(DATA.tobytes())
    drop_cache(tmp_path / "file")
    store = LocalStore(tmp_path, unbuffered=False)
    with store.window("file", 5, 1000, page_memory(1000 + WINDOW_SLACK)) as window:
        assert window.tobytes() == DATA[5:1005].tobytes()
    store.close()


def test_an_empty_window_is_empty(store):
    with store.window("file", 5, 0, page_memory(WINDOW_SLACK)) as window:
        assert len(window) == 0


@pytest.mark.parametrize("is_cold", [False, True])
def test_a_file_cut_after_it_was_opened_is_refused_not_a_crash(store, tmp_path, is_cold):
    assert store.size("file") == len(DATA)
    os.truncate(tmp_path / "file", 1 << 20)
    if is_cold:
        drop_cache(tmp_path / "file")
    staging = page_memory(len(DATA) + WINDOW_SLACK)
    with (
        pytest.raises(FormatError, match=r"has 1048576 bytes, 3145728 when it was opened"),
        store.window("file", 0, len(DATA), staging),
    ):
        pass


def test_a_missing_file_a_directory_and_a_pipe_are_refused(tmp_path):
    store = LocalStore(tmp_path)
    with pytest.raises(StoreError, match="No such file") as refusal:
        store.size("gone")
    assert refusal.value.errno == errno.ENOENT
    (tmp_path / "directory").mkdir()
    with pytest.raises(FormatError, match="not a regular file"):
        store.size("directory")
    store.close()
    with pytest.raises(StoreError, match="cannot list"):
        LocalStore(tmp_path / "gone").names()


def test_closing_gives_every_descriptor_back(tmp_path):
    (tmp_path / "file").write_bytes(DATA.tobytes())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        store = LocalStore(tmp_path)
        drop_cache(tmp_path / "file")
        with store.window("file", 0, 100, page_memory(100 + WINDOW_SLACK)):
            pass
        store.close()
        store.close()
    assert len(os.listdir("/proc/self/fd")) == before


# Drafts.


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 100_000])
@pytest.mark.parametrize("shift", [0, 1, 64])
@pytest.mark.parametrize("is_cache_slow", [True, False])
def test_writes_of_any_alignment_land_exactly(tmp_path, offset, shift, is_cache_slow, monkeypatch):
    monkeypatch.setattr(LocalDraft, "_is_cache_slow", lambda draft: is_cache_slow)
    data = page_memory(2_500_000 + 4096)[shift : 2_500_000 + shift]
    data[:] = random_bytes(len(data))
    with LocalDraft(tmp_path / "place") as draft:
        draft.reserve("file", offset + len(data) + 10)
        draft.write("file", offset, data)
        draft.commit()
    content = (tmp_path / "place" / "file").read_bytes()
    assert content == bytes(offset) + data.tobytes() + bytes(10)


@pytest.mark.parametrize("ways", [[True], [False], [True, False], [False, True]])
def test_neighbouring_writes_do_not_disturb_each_other(tmp_path, ways, monkeypatch):
    """Past the page cache, through it, and both in turn."""
    turn = itertools.cycle(ways)
    monkeypatch.setattr(LocalDraft, "_is_cache_slow", lambda draft: next(turn))
    data = random_bytes(9 << 20)
    cuts = [0, 1_500_001, 3_000_017, 3_000_020, 7_777_777, len(data)]
    with LocalDraft(tmp_path / "place") as draft:
        draft.reserve("file", len(data))
        for start, end in sorted(pairwise(cuts), key=lambda p: -p[0] % 7):
            draft.write("file", start, data[start:end])
        draft.commit()
    assert (tmp_path / "place" / "file").read_bytes() == data.tobytes()


def test_the_way_past_the_cache_is_taken_while_the_cache_is_slow(tmp_path):
    with LocalDraft(tmp_path / "place") as draft:
        ways = []
        for rate in (0.0, 0.0, 9e9, 9e9, 0.0):
            draft._cached_rate = rate
            ways.append(draft._is_cache_slow())
        assert ways == [False, True, False, False, True]  # the first is a probe
        draft._num_large = 64
        assert not draft._is_cache_slow()  # and another one now and then


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
        child = os.fork()
        if child == 0:
            try:
                draft.abort()  # as `with` does when the child leaves it
                del draft
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
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


def test_a_draft_into_a_directory_refuses_a_name_that_is_taken(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    with LocalDraft(tmp_path, into=True) as draft:
        draft.reserve("old", 3)
        with pytest.raises(StoreError, match="File exists"):
            draft.commit()
    assert (tmp_path / "old").read_bytes() == b"old"


def test_a_draft_into_a_directory_removes_what_is_stale_and_appears(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "stale").write_bytes(b"stale")
    (tmp_path / "other").write_bytes(b"other")
    with LocalDraft(tmp_path, into=True) as draft:
        draft.stale = ["stale", "old", "never-was"]
        draft.reserve("old", 3)
        draft.write("old", 0, np.frombuffer(b"new", np.uint8))
        draft.commit()
    assert sorted(os.listdir(tmp_path)) == ["old", "other"]
    assert (tmp_path / "old").read_bytes() == b"new"


def test_a_draft_that_finds_a_name_taken_removes_nothing(tmp_path):
    for name in ("stale", "taken"):
        (tmp_path / name).write_bytes(b"old")
    with LocalDraft(tmp_path, into=True) as draft:
        draft.stale = ["stale"]
        draft.reserve("stale", 3)
        draft.reserve("taken", 3)
        with pytest.raises(StoreError, match="File exists"):
            draft.commit()
    assert [(tmp_path / name).read_bytes() for name in ("stale", "taken")] == [b"old", b"old"]


@pytest.fixture
def turn(tmp_path):
    """The lock on a directory that another writer holds while it commits."""
    lock = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield lock
    os.close(lock)


def test_writers_into_one_directory_take_turns(tmp_path, threads, turn):
    def visible():
        yield from (name for name in os.listdir(tmp_path) if not name.startswith("."))

    with LocalDraft(tmp_path, into=True) as draft:
        draft.stale = visible()
        draft.reserve("new", 3)
        commit = threads.submit(draft.commit)
        assert wait([commit], timeout=0.3).not_done
        (tmp_path / "left by the other").write_bytes(b"old")
        fcntl.flock(turn, fcntl.LOCK_UN)
        commit.result(timeout=20)
    assert os.listdir(tmp_path) == ["new"]


def test_a_turn_that_does_not_end_is_given_up_by_name(tmp_path, turn, monkeypatch):
    monkeypatch.setattr("flyweight.stores.draft._TURN_SECONDS", 0.05)
    (tmp_path / "stale").write_bytes(b"old")
    with LocalDraft(tmp_path, into=True) as draft:
        draft.stale = ["stale"]
        draft.reserve("new", 3)
        with pytest.raises(StoreError, match=r"another save has had its lock for 0\.05 s") as late:
            draft.commit()
    assert late.value.errno == errno.ETIMEDOUT
    assert os.listdir(tmp_path) == ["stale"]


def test_a_store_tells_which_names_lead_to_other_files_by_now(tmp_path):
    for name in ("same", "replaced", "gone", "never opened"):
        (tmp_path / name).write_bytes(b"old")
    store = LocalStore(tmp_path)
    for name in ("same", "replaced", "gone"):
        store.size(name)
    assert store.replaced() == []
    for name in ("replaced", "never opened"):
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(b"new")
    (tmp_path / "gone").unlink()
    assert store.replaced() == ["gone", "replaced"]
    store.close()


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


def test_a_pipe_of_a_files_name_does_not_keep_us_waiting(tmp_path):
    os.mkfifo(tmp_path / "file")
    with pytest.raises(FormatError, match="not a regular file"):
        LocalStore(tmp_path).size("file")


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
    monkeypatch.setattr(LocalDraft, "_is_cache_slow", lambda draft: True)
    data = random_bytes(8 << 20)
    with LocalDraft(tmp_path / "place") as draft:
        draft.reserve("file", len(data))
        halves = [(0, data[: 4 << 20]), (4 << 20, data[4 << 20 :])]
        threads = [threading.Thread(target=draft.write, args=("file", *half)) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert not draft.can_go_direct("file")
        draft.commit()
    assert (tmp_path / "place" / "file").read_bytes() == data.tobytes()


def test_reads_that_are_shared_stay_in_memory_for_others(tmp_path):
    data = random_bytes(8 << 20)
    (tmp_path / "file").write_bytes(data.tobytes())
    drop_cache(tmp_path / "file")
    store = LocalStore(tmp_path)
    if store.is_cached("file", 0, len(data)):
        pytest.skip("this file system keeps everything in memory")
    staging = page_memory(len(data) + WINDOW_SLACK)
    with store.window("file", 0, len(data), staging) as shown:
        assert shown.tobytes() == data.tobytes()
    was_direct = not store.is_cached("file", 0, len(data))
    store.share_reads()
    with store.window("file", 0, len(data), staging) as shown:
        assert shown.tobytes() == data.tobytes()
    assert store.is_cached("file", 0, len(data))
    assert was_direct or not store.ways("file")["unbuffered_reads"]
    store.close()
