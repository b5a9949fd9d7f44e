import errno
import os
import sys

import numpy as np
import pytest

import flyweight as fw
from child_processes import Command
from conftest import dead_draft, flip, odd_arrays, same, zeros_like
from flyweight.errors import (
    FormatError,
    SnapshotIncomplete,
    SpecError,
    StoreError,
    VersionError,
)


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


def damage(run, version, how):
    """Damage a version in a way that shows when it is opened."""
    directory = run / f"v{version:010d}"
    part, manifest = directory / "model.safetensors", directory / "flyweight.json"
    match how:
        case "a part cut short":
            os.truncate(part, part.stat().st_size - 1)
        case "a part missing":
            part.unlink()
        case "a head flipped":
            flip(part, 30)
        case "a manifest flipped":
            flip(manifest, 30)
        case "a manifest of another version":
            manifest.write_bytes((run / "v0000000001" / "flyweight.json").read_bytes())


DAMAGE = [
    "a part cut short",
    "a part missing",
    "a head flipped",
    "a manifest flipped",
    "a manifest of another version",
]


@pytest.mark.parametrize("how", DAMAGE)
def test_prune_counts_only_versions_that_open(run, how):
    damage(run, 5, how)
    gone = fw.prune(run, keep=1)
    assert gone == [1]
    assert list(gone.damaged) == [5]
    assert "v0000000005" in gone.damaged[5]
    assert fw.versions(run) == [2, 5]
    target = zeros_like(odd_arrays())
    fw.load(run, into=target, version=2)
    assert same(target, odd_arrays(2))


def test_prune_removes_damaged_versions_only_when_asked(run):
    damage(run, 1, "a part missing")
    damage(run, 5, "a part missing")
    gone = fw.prune(run, keep=1)
    assert (gone, list(gone.damaged)) == ([], [1, 5])
    gone = fw.prune(run, keep=1, should_remove_damaged=True)
    assert (gone, list(gone.damaged)) == ([1, 5], [1, 5])
    assert fw.versions(run) == [2]


def test_prune_removes_nothing_that_it_merely_cannot_read(run):
    """A file that cannot be opened at the moment is not damage that was seen."""
    part = run / "v0000000005" / "model.safetensors"
    part.unlink()
    part.symlink_to(part)  # ELOOP, for root too
    gone = fw.prune(run, keep=1, should_remove_damaged=True)
    assert (gone, list(gone.damaged)) == ([1], [5])
    assert fw.versions(run) == [2, 5]


def test_a_run_whose_every_version_is_damaged_keeps_them_all(run):
    for version in (1, 2, 5):
        damage(run, version, "a part missing")
    gone = fw.prune(run, keep=1)
    assert (gone, list(gone.damaged)) == ([], [1, 2, 5])
    assert fw.versions(run) == [1, 2, 5]


def refuse(monkeypatch, name, place):
    """Have the operating system refuse a call for what is at or below a path, as to another user."""
    call = getattr(os, name)

    def refusing(path, *args, **kwargs):
        if f"{path}/".startswith(f"{place}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return call(path, *args, **kwargs)

    monkeypatch.setattr(os, name, refusing)


def test_a_version_that_may_not_be_entered_is_a_version_and_stops_nobody_else(run, monkeypatch):
    """Another user's, saved with umask 077: nobody is served an older one in its place."""
    for name in ("stat", "open"):
        refuse(monkeypatch, name, run / "v0000000005")
    assert fw.versions(run) == [1, 2, 5]
    with pytest.raises(StoreError, match=r"v0000000005.*Permission denied"):
        fw.open(run)
    fw.open(run, version=2).close()
    gone = fw.prune(run, keep=1, should_remove_damaged=True)
    assert (gone, list(gone.damaged)) == ([1], [5])
    assert fw.save({"w": np.arange(3)}, run).version == 6


def test_a_version_that_may_not_be_removed_keeps_no_other(run, monkeypatch):
    (run / dead_draft("v0000000006")).mkdir()
    refuse(monkeypatch, "rename", run / "v0000000001")
    with pytest.raises(StoreError, match=r"cannot remove .*v0000000001.*Permission denied"):
        fw.prune(run, keep=1)
    assert sorted(os.listdir(run)) == ["v0000000001", "v0000000005"]


# Pruned while it is opened.


@pytest.mark.parametrize("call", ["open", "listdir", "scandir", "stat"])
def test_the_newest_is_found_at_whatever_call_the_one_before_is_pruned(tmp_path, monkeypatch, call):
    """Another save commits and prunes in front of the first, second, ... such call of a load."""
    real = getattr(os, call)
    for number in range(50):
        run, count = tmp_path / str(number), -1
        fw.save(odd_arrays(1), run, version=1)

        def overtaken(*args, _run=run, _number=number, **options):
            nonlocal count
            count += 1
            if count == _number:
                monkeypatch.undo()
                fw.save(odd_arrays(2), _run, version=2)
                fw.prune(_run, keep=1)
                monkeypatch.setattr(os, call, overtaken)
            return real(*args, **options)

        target = zeros_like(odd_arrays())
        monkeypatch.setattr(os, call, overtaken)
        report = fw.load(run, into=target)
        monkeypatch.undo()
        assert same(target, odd_arrays(report.version))
        if count < number:
            assert number > 0, f"a load never calls os.{call}"
            return
    raise AssertionError("there was no end")


def test_a_version_asked_for_by_number_is_never_replaced_by_another(run, monkeypatch):
    real = os.open

    def overtaken(path, *args, **options):
        if str(path).endswith("v0000000005/flyweight.json"):
            monkeypatch.undo()
            fw.save(odd_arrays(6), run, version=6)
            fw.prune(run, keep=1)
        return real(path, *args, **options)

    target = zeros_like(odd_arrays())
    monkeypatch.setattr(os, "open", overtaken)
    with pytest.raises(StoreError, match="No such file"):
        fw.load(run, into=target, version=5)
    assert same(target, zeros_like(odd_arrays()))


SAVER = """
import sys
import numpy as np
import flyweight as fw

for version in range(1, 151):
    fw.save({"w": np.full(5000, version)}, sys.argv[1], version=version)
    fw.prune(sys.argv[1], keep=1)
"""


def test_the_newest_is_loaded_while_another_process_saves_and_prunes(tmp_path):
    fw.save({"w": np.full(5000, 0)}, tmp_path, version=0)
    target, loaded = {"w": np.zeros(5000, int)}, [0]
    with Command(sys.executable, "-c", SAVER, tmp_path) as saver:
        while saver.process.poll() is None:
            loaded.append(fw.load(tmp_path, into=target).version)
            assert (target["w"] == loaded[-1]).all()
        assert saver.process.returncode == 0, saver.errors
    assert loaded == sorted(loaded)
    assert fw.load(tmp_path, into=target).version == 150


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
    with pytest.raises(
        FormatError, match=r"'model.bin' .* starts with b'GGUF....': neither a pickle"
    ):
        fw.open(tmp_path / "model.bin")


def test_a_format_without_versions_refuses_a_version(run, tmp_path):
    fw.convert(run, tmp_path / "hf", to="hf")
    with pytest.raises(VersionError, match="version 3 is not one of the 0 versions"):
        fw.open(tmp_path / "hf", version=3)
    with pytest.raises(VersionError, match="is safetensors and has no versions; 3 was wanted"):
        fw.open(tmp_path / "hf" / "model.safetensors", version=3)
