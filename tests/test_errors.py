"""Errors: whatever builtin an error of ours is as well, its text holds all that layers added."""

import copy
import errno
import pickle

import numpy as np
import pytest

import flyweight as fw
from flyweight import errors

MADE = [
    errors.FlyweightError("full"),
    errors.SnapshotNotFound("full"),
    errors.TransferTimeout("full"),
    errors.MissingDependency("full"),
    errors.StoreError("full"),
    errors.StoreError(28, "full"),
    errors.StoreError(28, "full", "model.safetensors"),
]


@pytest.mark.parametrize("made", MADE, ids=repr)
def test_every_note_is_in_the_text(made):
    error = pickle.loads(pickle.dumps(made))
    before = str(error)
    error.note("file 3")
    error.note("version 7")
    assert str(error) == f"{before}\n  file 3\n  version 7"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_note_leaves_the_number_and_the_file_of_the_operating_system():
    error = errors.StoreError(28, "full", "model.safetensors")
    error.note("version 7")
    assert (error.errno, error.strerror, error.filename) == (28, "full", "model.safetensors")


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_refusal_of_the_operating_system_keeps_its_number_in_another_process(again, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(errors.StoreError) as caught:
        fw.save({"w": np.arange(3)}, tmp_path / "file" / "run")
    error = again(caught.value)
    assert error.errno == caught.value.errno == errno.ENOTDIR
    assert str(error) == str(caught.value)


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("VersionError", errors.VersionError("full")),
        ("StoreError", errors.StoreError("full")),
        ("KeyError", errors.PeerFailed("KeyError: full")),
        ("Collection", errors.PeerFailed("Collection: full")),
        ("", errors.PeerFailed(": full")),
    ],
)
def test_only_our_own_errors_are_made_by_name(kind, made):
    error = errors.error_named(kind, "full")
    assert (type(error), str(error)) == (type(made), str(made))
