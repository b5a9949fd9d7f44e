import os

import numpy as np
import pytest

import flyweight as fw
from conftest import dead_draft, odd_arrays
from flyweight.errors import FormatError, SnapshotIncomplete, SpecError, VersionError


def test_versions_of_a_path_that_is_not_there_are_none(tmp_path):
    assert fw.versions(tmp_path / "gone") == []


def test_versions_are_sorted_as_numbers_and_strangers_do_not_count(run):
    (run / "v0000000099").mkdir()
    (run / "notes.txt").write_text("hello")
    (run / "v5").mkdir()
    fw.save(odd_arrays(), run, version=10**11)
    assert fw.versions(run) == [1, 2, 5, 10**11]


def test_prune_keeps_the_newest_and_says_what_went(run):
    assert fw.prune(run, keep=2) == [1]
    assert fw.versions(run) == [2, 5]
    assert fw.prune(run, keep=2) == []
    assert sorted(os.listdir(run)) == ["v0000000002", "v0000000005"]


def test_prune_clears_away_what_killed_saves_left(run):
    (run / dead_draft("v0000000009")).mkdir()
    fw.prune(run, keep=3)
    assert len(os.listdir(run)) == 3


def test_prune_keeps_at_least_one(run):
    with pytest.raises(SpecError, match="at least 1 version stays"):
        fw.prune(run, keep=0)
    assert fw.versions(run) == [1, 2, 5]


def test_open_finds_a_version_by_directory_manifest_or_number(run):
    for path, version in ((run, 2), (run / "v0000000002", None), (run / "v0000000002", 2)):
        with fw.open(path, version=version) as source:
            assert source.manifest.version == 2
    with fw.open(run / "v0000000002" / "flyweight.json") as source:
        assert source.manifest.version == 2
    with pytest.raises(VersionError, match="holds version 2, not 1"):
        fw.open(run / "v0000000002", version=1)


def test_open_reads_boxes(run):
    with fw.open(run) as source:
        assert sorted(source.manifest.names) == sorted(odd_arrays())
        array = odd_arrays(5)["transposed"]
        box = fw.Box((1, 2), (4, 2))
        assert source.read("transposed", box).tobytes() == array[1:5, 2:4].tobytes()
        into = np.zeros(100, np.uint8)
        source.read("transposed", box, into=into)
        assert into[:32].tobytes() == array[1:5, 2:4].tobytes()


def test_a_run_with_only_an_unfinished_save_says_so(tmp_path):
    (tmp_path / ".draft-v0000000000-00000000-0123456789abcdef").mkdir()
    with pytest.raises(SnapshotIncomplete, match="1 saves that never committed and no version"):
        fw.open(tmp_path)


def test_a_file_of_nothing_known_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"GGUF....")
    with pytest.raises(FormatError, match="has 8 bytes and starts with b'GGUF"):
        fw.open(tmp_path / "model.bin")


def test_a_format_without_versions_refuses_a_version(run, tmp_path):
    fw.convert(run, tmp_path / "hf", to="hf")
    with pytest.raises(VersionError, match="version 3 is not one of the 0 versions"):
        fw.open(tmp_path / "hf", version=3)
    with pytest.raises(VersionError, match="is safetensors and has no versions; 3 was wanted"):
        fw.open(tmp_path / "hf" / "model.safetensors", version=3)
