"""What a replica holds while it is overwritten, in every order of events."""

import pytest
from every_order import NotPossible, explore

from flyweight.errors import PeerLost, VersionError
from flyweight.live.held_version import HeldVersion, ReplicaState
from flyweight.live.publish_id import PublishId


def id_(version):
    return PublishId("3fa9c1d2", version)


def held(version=None, is_current=lambda: True):
    found = HeldVersion(is_current)
    if version is not None:
        found.begin_write()
        found.commit(id_(version))
    return found


def seen(found):
    return str(found.state), found.id, str(found.failure or "")


def test_an_update_that_fails_before_its_first_write_leaves_the_old_version():
    found = held(5)
    found.fail(PeerLost("the trainer died"))
    assert seen(found) == ("READY", id_(5), "")
    found.check_servable("engine")


def test_an_update_that_fails_after_its_first_write_leaves_none_and_says_why():
    found = held(5)
    found.begin_write()
    assert seen(found) == ("UPDATING", None, "")
    with pytest.raises(VersionError, match="'engine' is UPDATING and .* it is being overwritten"):
        found.check_servable("engine")
    found.fail(PeerLost("the trainer died"))
    assert seen(found) == ("FAILED", None, "the trainer died")
    with pytest.raises(VersionError, match="'engine' is FAILED and .*: the trainer died"):
        found.check_servable("engine")
    found.begin_write()
    found.commit(id_(6))
    assert seen(found) == ("READY", id_(6), "")


def test_a_replica_that_never_took_a_version_says_so():
    found = held()
    assert seen(found) == ("EMPTY", None, "")
    with pytest.raises(VersionError, match="'engine' is EMPTY .*: it never took one"):
        found.check_servable("engine")


def test_why_a_version_is_held_no_more_is_kept_over_an_update_that_fails_before_its_write():
    found = held(5)
    found.forget("others wrote to it")
    found.fail(PeerLost("the trainer died"))
    assert seen(found) == ("EMPTY", None, "others wrote to it")


def test_a_version_that_was_forgotten_while_it_was_written_is_not_held():
    found = held(5)
    found.begin_write()
    found.forget("its memory was freed")
    assert found.state is ReplicaState.UPDATING
    found.commit(id_(6))
    assert seen(found) == ("EMPTY", None, "its memory was freed")


def test_a_version_is_held_only_while_its_tensors_are_the_models():
    tensors = ["same"]
    found = held(5, lambda: tensors == ["same"])
    tensors[0] = "others"
    state, id, failure = seen(found)
    assert (state, id) == ("EMPTY", None)
    assert failure.startswith("tensors of the model were replaced, or have moved, since version 5")
    with pytest.raises(VersionError, match="'engine' is EMPTY .* replaced"):
        found.check_servable("engine")
    tensors[0] = "same"
    assert found.id == id_(5)  # nobody has adopted the others
    tensors[0] = "others"
    found.forget_if_moved()
    tensors[0] = "same"
    assert (found.state, found.id) == (ReplicaState.EMPTY, None)


class Weights:
    """A model, and what is true of it: a version is in it only if all of it was written last."""

    def __init__(self):
        self.held, self.next = HeldVersion(self.is_current), 1
        self.contents, self.is_same, self.is_writing, self.has_failed = None, True, False, False

    def is_current(self):
        return self.is_same

    def begin_write(self):
        self.held.begin_write()
        self.contents, self.is_writing, self.is_same = "partly overwritten", True, True
        self.has_failed = False

    def commit(self):
        if not self.is_writing:
            raise NotPossible
        self.held.commit(id_(self.next))
        if self.contents == "partly overwritten":
            self.contents, self.next = self.next, self.next % 2 + 1
        self.is_writing = False

    def fail(self):
        self.held.fail(PeerLost("gone"))
        self.has_failed = self.has_failed or self.is_writing
        self.is_writing = False

    def forget(self):
        self.held.forget("others wrote")
        self.contents, self.has_failed = "others", False

    def replace(self):
        self.is_same = False

    def adopt(self):
        if not self.is_writing and not self.is_same:
            self.held.forget_if_moved()
            self.contents = "others" if isinstance(self.contents, int) else self.contents
        self.is_same = True

    def check(self):
        is_whole = isinstance(self.contents, int) and self.is_same
        assert self.held.id == (id_(self.contents) if is_whole else None)
        assert (self.held.state is ReplicaState.READY) == is_whole
        assert (self.held.state is ReplicaState.UPDATING) == self.is_writing
        assert (self.held.state is ReplicaState.FAILED) == self.has_failed
        assert self.held.id is None or self.held.failure is None
        try:
            self.held.check_servable("engine")
        except VersionError:
            assert not is_whole
        else:
            assert is_whole


def test_in_every_order_a_version_is_held_only_if_all_of_it_was_written_last():
    steps = [(each,) for each in ("begin_write", "commit", "fail", "forget", "replace", "adopt")]
    assert explore(Weights, steps, depth=8) > 20
