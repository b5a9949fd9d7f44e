"""What every store promises. A new one joins by adding a line to STORES, a third party's too."""

import numpy as np
import pytest

from conftest import random_bytes
from fakes import MemoryStore
from flyweight.errors import StoreError
from flyweight.formats.stored import DecodedStore
from flyweight.memory import page_memory
from flyweight.ports import WINDOW_SLACK
from flyweight.stores.local import LocalStore

DATA = random_bytes(300_001)
STORES = {
    "local": LocalStore,
    "local, buffered": lambda place: LocalStore(place, unbuffered=False),
    "memory": lambda place: MemoryStore({"file": DATA.tobytes()}),
    "decoded": lambda place: DecodedStore(LocalStore(place)),
}
RANGES = [(0, 0), (0, 1), (0, len(DATA)), (4095, 4098), (len(DATA) - 1, 1), (100_000, 99_999)]


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    (tmp_path / "file").write_bytes(DATA.tobytes())
    store = STORES[request.param](tmp_path)
    yield store
    store.close()


def test_names_and_sizes(store):
    assert store.names() == ["file"]
    assert store.size("file") == len(DATA)
    assert isinstance(store.place, str)


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
@pytest.mark.parametrize("may_map", [True, False])
def test_every_way_of_reading_shows_the_same_bytes(store, offset, nbytes, may_map):
    expected = DATA[offset : offset + nbytes].tobytes()
    assert store.read("file", offset, nbytes) == expected
    staging = page_memory(nbytes + WINDOW_SLACK)
    with store.window("file", offset, nbytes, staging, may_map=may_map) as window:
        assert window.tobytes() == expected
    goals = np.array_split(np.zeros(nbytes, np.uint8), 3)
    store.read_into("file", offset, goals)
    assert b"".join(goal.tobytes() for goal in goals) == expected


def test_more_goals_than_one_system_call_takes(store):
    goals = np.array_split(np.zeros(len(DATA), np.uint8), 3000)
    store.read_into("file", 0, goals)
    assert b"".join(goal.tobytes() for goal in goals) == DATA.tobytes()


def test_is_cached_is_an_answer_and_changes_nothing(store):
    assert store.is_cached("file", 0, 100) in (True, False)
    assert store.read("file", 0, 100) == DATA[:100].tobytes()


def test_a_file_that_is_not_there_is_a_store_error(store):
    with pytest.raises(StoreError):
        store.size("gone")


def test_closing_may_repeat(store):
    store.close()
    store.close()
