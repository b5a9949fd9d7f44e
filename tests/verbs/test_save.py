import os
import sys
import threading
from contextlib import ExitStack

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Command
from conftest import dead_draft, odd_arrays, random_bytes, same, zeros_like
from flyweight.errors import SpecError, StoreError, VersionError
from flyweight.events import listening
from flyweight.verbs import commit


def test_the_report_says_what_was_done(tmp_path):
    report = fw.save(odd_arrays(), tmp_path / "a" / "b", version=42)
    assert report.version == 42
    assert report.place == str(tmp_path / "a" / "b" / "v0000000042")
    assert report.num_tensors == 9
    assert report.num_files == 1
    assert report.nbytes == sum(array.nbytes for array in odd_arrays().values())
    assert report.gb_per_second > 0


def test_versions_count_up_by_themselves(tmp_path):
    assert [fw.save(odd_arrays(), tmp_path).version for _ in range(3)] == [0, 1, 2]
    fw.save(odd_arrays(), tmp_path, version=10)
    assert fw.save(odd_arrays(), tmp_path).version == 11
    assert fw.versions(tmp_path) == [0, 1, 2, 10, 11]


def test_the_parent_is_the_version_before(tmp_path):
    for version in (3, 7):
        fw.save(odd_arrays(), tmp_path, version=version)
    with fw.open(tmp_path) as source:
        assert source.manifest.parent == 3
        assert source.manifest.writer["pid"] == str(os.getpid())
    with fw.open(tmp_path, version=3) as source:
        assert source.manifest.parent is None


def test_a_version_is_never_overwritten_and_only_grows(tmp_path):
    fw.save(odd_arrays(1), tmp_path, version=5)
    with pytest.raises(VersionError, match="version 5 .* is there already"):
        fw.save(odd_arrays(2), tmp_path, version=5)
    with pytest.raises(VersionError, match="version 4 .* is older than the newest, 5"):
        fw.save(odd_arrays(2), tmp_path, version=4)
    target = zeros_like(odd_arrays())
    fw.load(tmp_path, into=target)
    assert same(target, odd_arrays(1))


@pytest.mark.parametrize("version", [-1, 2**63])
def test_a_version_that_is_no_number_is_refused(tmp_path, version):
    with pytest.raises(SpecError, match="whole number"):
        fw.save(odd_arrays(), tmp_path, version=version)
    assert os.listdir(tmp_path) == []


def test_two_writers_of_one_version_one_wins_and_nothing_is_mixed(tmp_path):
    outcomes, gate = [], threading.Barrier(2)
    sources = [{f"w{i}": np.full(200_000, k, np.uint8) for i in range(20)} for k in (1, 2)]

    def save(source):
        gate.wait(LIMIT)
        try:
            fw.save(source, tmp_path, version=7)
            outcomes.append(source["w0"][0])
        except VersionError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=save, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    winners = [each for each in outcomes if not isinstance(each, str)]
    assert len(winners) == 1
    target = zeros_like(sources[0])
    fw.load(tmp_path, into=target)
    assert all((array == winners[0]).all() for array in target.values())
    assert os.listdir(tmp_path) == ["v0000000007"]


def test_many_processes_of_one_version_exactly_one_wins(tmp_path, threads):
    code = (
        "import sys, numpy as np, flyweight as fw\n"
        "k = int(sys.argv[2])\n"
        "weights = {f'w{i}': np.full(50_000, k, np.uint8) for i in range(10)}\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "try: fw.save(weights, sys.argv[1], version=3); print('won')\n"
        "except fw.FlyweightError as error: print(type(error).__name__)\n"
    )
    with ExitStack() as stack:
        savers = [Command(sys.executable, "-c", code, tmp_path, k) for k in range(1, 6)]
        for saver in map(stack.enter_context, savers):
            assert saver.line() == "ready"
        said = list(threads.map(lambda saver: saver.ask("go"), savers))
    assert sorted(said) == ["VersionError"] * 4 + ["won"]
    target = {f"w{i}": np.zeros(50_000, np.uint8) for i in range(10)}
    fw.load(tmp_path, into=target)
    assert len({int(value) for array in target.values() for value in array}) == 1
    assert {int(array[0]) for array in target.values()} == {said.index("won") + 1}


def test_a_version_committed_after_the_run_was_listed_is_told_as_such(tmp_path, monkeypatch):
    """Not as a directory without a manifest, which the user would be told to remove."""

    def listed_too_early(root):
        monkeypatch.undo()
        fw.save(odd_arrays(1), tmp_path, version=3)
        return []

    monkeypatch.setattr(commit, "versions", listed_too_early)
    with pytest.raises(VersionError, match="committed by another writer meanwhile"):
        fw.save(odd_arrays(2), tmp_path, version=3)
    assert os.listdir(tmp_path) == ["v0000000003"]


def test_an_interrupted_save_leaves_nothing(tmp_path):
    fw.save(odd_arrays(1), tmp_path, version=1)
    large = {f"w{i}": random_bytes(8 << 20) for i in range(4)}

    def interrupt(event):
        if event.kind == "progress":
            raise KeyboardInterrupt

    with listening(interrupt), pytest.raises(KeyboardInterrupt):
        fw.save(large, tmp_path, version=2)
    assert os.listdir(tmp_path) == ["v0000000001"]
    assert fw.versions(tmp_path) == [1]


def test_a_save_leaves_no_descriptor_and_no_thread(tmp_path):
    fw.save(odd_arrays(), tmp_path)
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        fw.save(odd_arrays(), tmp_path)
    assert len(os.listdir("/proc/self/fd")) == fds
    assert threading.active_count() == threads


def test_a_save_clears_away_what_a_killed_one_left(tmp_path):
    fw.save(odd_arrays(), tmp_path)
    (tmp_path / dead_draft("v0000000001")).mkdir()
    fw.save(odd_arrays(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["v0000000000", "v0000000001"]


def test_a_model_is_saved_as_it_is_within_a_small_budget(tmp_path):
    source = {"w": random_bytes(64 << 20).view(np.float32).reshape(-1, 1024).T}
    fw.save(source, tmp_path, memory_bytes=16 << 20)
    target = zeros_like(source)
    fw.load(tmp_path, into=target, memory_bytes=16 << 20)
    assert same(target, source)
    with pytest.raises(SpecError, match="memory_bytes is 8388608, chunks of 4194304 bytes need"):
        fw.save(source, tmp_path, memory_bytes=8 << 20)


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError):
        fw.save(odd_arrays(), tmp_path / "file")


def test_values_and_ties_are_part_of_a_version(tmp_path):
    shared = np.arange(4.0)
    fw.save({"a": shared, "b": shared, "step": 3}, tmp_path)
    with fw.open(tmp_path) as source:
        assert source.manifest.tied == {"b": "a"}
        assert source.manifest.values == {"step": 3}


def test_thousands_of_small_tensors_survive(tmp_path):
    source = {f"layer.{i}.w": np.full(i % 50, i, np.int32) for i in range(5000)}
    fw.save(source, tmp_path)
    target = zeros_like(source)
    fw.load(tmp_path, into=target)
    assert same(target, source)


@pytest.mark.parametrize("version", [True, "3", 3.0, None.__class__])
def test_a_version_of_another_kind_is_refused(tmp_path, version):
    with pytest.raises(SpecError, match="expected a whole number"):
        fw.save(odd_arrays(), tmp_path, version=version)
    with pytest.raises(SpecError, match="expected a whole number"):
        fw.open(tmp_path, version=version)


def test_a_version_may_be_numpys_number(tmp_path):
    assert fw.save(odd_arrays(), tmp_path, version=np.int64(3)).version == 3
    assert fw.load(tmp_path, into=zeros_like(odd_arrays()), version=np.int32(3)).version == 3


def test_a_directory_in_the_way_is_named_and_stepped_over(tmp_path):
    (tmp_path / "v0000000004").mkdir()
    with pytest.raises(VersionError, match="is there without a 'flyweight.json'"):
        fw.save(odd_arrays(), tmp_path, version=4)
    assert fw.save(odd_arrays(), tmp_path).version == 5


@pytest.mark.parametrize("path", [b"bytes", None, 5, "nu\0l", ""])
def test_what_is_no_path_is_refused(path):
    for act in (
        lambda: fw.save(odd_arrays(), path),
        lambda: fw.open(path),
        lambda: fw.versions(path),
    ):
        with pytest.raises(SpecError, match="path"):
            act()


@pytest.mark.parametrize(
    "options",
    [{"num_threads": 0}, {"num_threads": "2"}, {"memory_bytes": "1M"}, {"extra": "Refuse"}],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options):
    fw.save(odd_arrays(), tmp_path)
    with pytest.raises(SpecError, match=next(iter(options))):
        fw.load(tmp_path, into=zeros_like(odd_arrays()), **options)


def test_a_tensor_called_metadata_is_refused(tmp_path):
    with pytest.raises(SpecError, match="which safetensors keeps for itself"):
        fw.save({"__metadata__": np.zeros(2)}, tmp_path)
    assert os.listdir(tmp_path) == []


def test_savers_pruners_and_loaders_at_once_never_disturb_each_other(tmp_path):
    """Threads that save and prune as fast as they can; every load is whole and of one version."""
    done, errors = threading.Event(), []

    def weights(version):
        return {f"w{i}": np.full(5000, version % 251, np.uint8) for i in range(4)}

    def save():
        for version in range(1, 30):
            fw.save(weights(version), tmp_path, version=version)
        done.set()

    def prune():
        while not done.is_set():
            fw.prune(tmp_path, keep=2)

    def load():
        target = weights(0)
        while not done.is_set():
            version = fw.load(tmp_path, into=target).version
            assert same(target, weights(version))

    def guarded(act):
        try:
            act()
        except BaseException as error:
            errors.append(error)
            done.set()

    fw.save(weights(0), tmp_path, version=0)
    threads = [threading.Thread(target=guarded, args=(act,)) for act in (save, prune, prune, load)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert errors == []
    assert fw.versions(tmp_path)[-1] == 29
