import errno
import os

import numpy as np
import pytest

from conftest import drop_cache, random_bytes
from flyweight.errors import FormatError, StoreError
from flyweight.memory import page_memory
from flyweight.ports import WINDOW_SLACK
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


def test_a_pipe_of_a_files_name_does_not_keep_us_waiting(tmp_path):
    os.mkfifo(tmp_path / "file")
    with pytest.raises(FormatError, match="not a regular file"):
        LocalStore(tmp_path).size("file")


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
