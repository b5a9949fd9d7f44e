import importlib.util
import os
from pathlib import Path

import pytest

import flyweight as fw
from child_processes import in_time
from flyweight.errors import FlyweightError, FormatError

ATTACKS = Path(__file__).parents[1] / "attacks"
spec = importlib.util.spec_from_file_location("make", ATTACKS / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)
CASES = {name: content for name, content, _ in make.cases()}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_by_name_and_nothing_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with in_time(0), pytest.raises(FormatError) as refusal:
        fw.open(ATTACKS / name)
    assert name in str(refusal.value)
    assert os.listdir(tmp_path) == []


def test_the_files_and_the_table_are_what_make_writes():
    assert (ATTACKS / "README.md").read_text() == make.table()
    for name, content in CASES.items():
        assert (ATTACKS / name).read_bytes() == content
    assert {p.name for p in ATTACKS.glob("*-*")} == set(CASES)


def test_the_pickles_would_really_have_run(tmp_path, monkeypatch):
    # Otherwise the tests above prove nothing.
    import pickle

    monkeypatch.chdir(tmp_path)
    pickle.loads(CASES["pk-system.pdparams"])
    assert os.listdir(tmp_path) == ["pwned"]


def test_an_array_built_like_the_attacks_is_fine_when_it_is_whole(tmp_path):
    path = tmp_path / "good.pdparams"
    path.write_bytes(make.dictionary((b"a", make.array())))
    with fw.open(path) as source:
        assert source.read("a").tobytes() == bytes(16)


def test_no_error_of_ours_is_anything_else():
    assert issubclass(FormatError, FlyweightError)
