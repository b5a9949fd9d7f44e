"""What every draft promises. A new one joins by adding a line to DRAFTS, a third party's too."""

import numpy as np
import pytest

from conftest import random_bytes
from fakes import MemoryDraft
from flyweight.stores.draft import LegacyDraft, LocalDraft

DATA = random_bytes(2_500_000)


class Directory:
    """A draft of a directory, and the files that others see there."""

    def __init__(self, path, begin):
        self._path, self.draft = path, begin(path)

    def visible(self):
        files = self._path.iterdir() if self._path.exists() else ()
        return {each.name: each.read_bytes() for each in files if not each.name.startswith(".")}


class Memory:
    def __init__(self):
        self._files = {}
        self.draft = MemoryDraft(self._files)

    def visible(self):
        return dict(self._files)


DRAFTS = {
    "local": lambda path: Directory(path / "place", LocalDraft),
    "legacy": lambda path: Directory(path, LegacyDraft),
    "memory": lambda path: Memory(),
}


@pytest.fixture(params=DRAFTS)
def place(request, tmp_path):
    place = DRAFTS[request.param](tmp_path)
    yield place
    place.draft.abort()


def written(draft):
    """Two files, written from their end to their start, and what a commit must show."""
    draft.reserve("large", len(DATA) + 10)
    draft.write("large", 1_300_001, DATA[1_300_001:])
    draft.write("large", 0, DATA[:1_300_001])
    draft.reserve("small", 3)
    draft.write("small", 0, np.frombuffer(b"abc", np.uint8))
    return {"large": DATA.tobytes() + bytes(10), "small": b"abc"}


def test_a_commit_shows_every_byte_and_zeros_where_nothing_was_written(place):
    with place.draft as draft:
        expected = written(draft)
        draft.commit()
        assert place.visible() == expected
    assert place.visible() == expected


def test_nothing_is_visible_before_the_commit(place):
    written(place.draft)
    assert place.visible() == {}
    place.draft.flush()
    assert place.visible() == {}


def test_a_draft_that_is_left_without_a_commit_shows_nothing(place):
    with pytest.raises(KeyboardInterrupt), place.draft as draft:
        written(draft)
        raise KeyboardInterrupt
    assert place.visible() == {}


def test_aborting_may_repeat_and_takes_no_commit_back(place):
    expected = written(place.draft)
    place.draft.commit()
    place.draft.abort()
    place.draft.abort()
    assert place.visible() == expected
    assert isinstance(place.draft.place, str)
