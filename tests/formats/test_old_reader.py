"""C2: an old engine reads what we write for it, by the calls that it makes at each place."""

import os
import re
from pathlib import Path

import paddle
import pytest

import flyweight as fw
from flyweight.adapters.model import adapt
from flyweight.errors import SpecError

RANK, ID = 3, 5
NAME = f"model_state.tp{RANK}.{ID}"


def state():
    """Every dtype that the two kinds of file treat differently, and some that they do not."""
    paddle.seed(1)
    return {
        **paddle.nn.Linear(5, 3).state_dict(),
        "half": paddle.randn([4, 3]).astype("bfloat16"),
        "quarter": paddle.randn([2, 6]).astype("float8_e4m3fn"),
        "scalar": paddle.to_tensor(3.5),
        "ids": paddle.arange(7),
        "flag": paddle.to_tensor([True, False]),
        "f16": paddle.randn([3]).astype("float16"),
    }


def old_reader(model, shared):
    """Look at the four places as an old engine does; return the level and what Paddle read there."""
    numbered = {}
    for name in os.listdir(model):
        if found := re.fullmatch(rf"{re.escape(NAME)}\.part(\d+)\.pdparams", name):
            numbered[int(found[1])] = model / name
    if numbered:
        tensors = {}
        for number in sorted(numbered):
            tensors.update(paddle.load(str(numbered[number]), safetensors=True))
        return 1, tensors
    for level, name in ((2, f"{NAME}.pdparams"), (3, f"model_state.tp0{ID}.pdparams")):
        if (model / name).exists():
            return level, paddle.load(str(model / name), safetensors=True)
    return 4, paddle.load(str(shared / f"{NAME}.pdparams"))


def as_bytes(tensors):
    model = adapt(tensors)
    return {name: model.read(name).tobytes() for name in model.manifest.names}


@pytest.fixture
def places(tmp_path):
    model, shared = tmp_path / "model", tmp_path / "shared"
    model.mkdir()
    shared.mkdir()
    return model, shared


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_c2_what_is_written_by_default_is_read_at_every_level(places, level):
    model, shared = places
    directory = shared if level == 4 else model
    fw.save_legacy(
        state(),
        directory,
        rank=RANK,
        legacy_id=ID,
        part_bytes=64 if level == 1 else None,
        shared_directory=shared,
    )
    if level == 3:  # a name that we do not write: an operator may give it to a file all the same
        (model / f"{NAME}.pdparams").rename(model / f"model_state.tp0{ID}.pdparams")
    found, tensors = old_reader(model, shared)
    assert found == level
    if level == 1:
        assert len(os.listdir(model)) > 2
    expected = state()
    assert tensors.keys() == expected.keys()
    assert as_bytes(tensors) == as_bytes(expected)
    assert [list(tensors[name].shape) for name in expected] == [
        list(tensor.shape) for tensor in expected.values()
    ]
    # And so do we, from the same place.
    target = {name: paddle.zeros(t.shape).astype(t.dtype) for name, t in expected.items()}
    fw.load(model, into=target, rank=RANK, legacy_id=ID, shared_directory=shared)
    assert as_bytes(target) == as_bytes(expected)


def test_c2_the_shared_directory_is_known_by_any_path(places, monkeypatch):
    model, shared = places
    link = shared.with_name("link")
    link.symlink_to(shared)
    monkeypatch.chdir(shared.parent)
    for directory in (link, "shared", "model/../link/"):
        options = {"rank": RANK, "legacy_id": ID, "shared_directory": shared}
        fw.save_legacy(state(), directory, **options)
        assert old_reader(model, shared)[0] == 4


def test_c2_a_shared_directory_that_is_not_there_yet_is_known(tmp_path):
    shared = tmp_path / "later" / "shared"
    fw.save_legacy(state(), shared, rank=RANK, legacy_id=ID, shared_directory=str(shared))
    assert old_reader(tmp_path, shared)[0] == 4


def test_c2_the_kind_of_file_can_be_chosen(places):
    model, shared = places
    names = {"rank": RANK, "legacy_id": ID, "shared_directory": shared}
    fw.save_legacy(state(), model, **names, as_safetensors=False)
    assert as_bytes(paddle.load(str(model / f"{NAME}.pdparams"))) == as_bytes(state())
    fw.save_legacy(state(), shared, **names, as_safetensors=True)
    found = paddle.load(str(shared / f"{NAME}.pdparams"), safetensors=True)
    assert as_bytes(found) == as_bytes(state())


def test_c2_parts_in_the_shared_directory_are_refused(places):
    """No reader looks for parts there, old or ours."""
    _, shared = places
    with pytest.raises(SpecError, match="shared.* is read as one file, and part_bytes is 64"):
        fw.save_legacy(
            state(), shared, rank=RANK, legacy_id=ID, part_bytes=64, shared_directory=shared
        )
    assert not list(Path(shared).iterdir())
