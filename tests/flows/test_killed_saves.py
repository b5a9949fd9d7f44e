"""A save that dies at any moment: the newest whole version is there, right, and nothing else is."""

import itertools
import json
import os
import signal
from pathlib import Path

import pytest

import flyweight as fw
import syscalls
from campaign import HANG_SECONDS
from child_processes import exit_code
from conftest import same, zeros_like
from rank_processes import run_ranks


def in_nursery(function, *words):
    """Run a function of this file in a process that has imported nothing large."""
    return run_ranks(0, __file__, function, *words, framework="numpy", timeout=HANG_SECONDS)


def loaded(run):
    target = zeros_like(syscalls.weights(0))
    version = fw.load(run, into=target).version
    assert same(target, syscalls.weights(version)), f"version {version} is not what was saved"
    return version


def recorded(log, *words):
    """Return the calls of a save that is not killed."""
    assert exit_code(syscalls.main, "record", *words) == 0
    return [json.loads(line) for line in Path(log).read_text().splitlines()]


def rounds(root, way, which):
    """Kill a save at the first call, the second, and so on to its end, or at a few of them."""
    os.fsync = lambda fd: None  # still a call to be killed at; what was written outlives a process
    numbers = itertools.count()
    if which == "few":
        log, run = Path(root) / "log", Path(root) / "unkilled"
        fw.save(syscalls.weights(1), run, version=1)
        names = [name for name, *_ in recorded(log, f"{log},{way}", str(run), 2)]
        commit = names.index("rename")
        numbers = [0, names.index("pwrite"), commit - 1, commit, commit + 1]
    outcomes = []
    for number in numbers:
        run = Path(root) / str(number)
        fw.save(syscalls.weights(1), run, version=1)
        code = exit_code(syscalls.main, "kill", f"{number},{way}", str(run), 2)
        if code == 0:
            assert loaded(run) == 2
            break
        assert code == -signal.SIGKILL, code
        version = loaded(run)
        outcomes.append(version)
        assert fw.versions(run) == ([1] if version == 1 else [1, 2])
        # The trainer comes back and saves on; nothing of the dead one is in its way or left.
        fw.save(syscalls.weights(3), run, version=3)
        assert loaded(run) == 3
        leftovers = [name for name in os.listdir(run) if name.startswith(".")]
        assert leftovers == []
    print(json.dumps(outcomes))


@pytest.mark.check
@pytest.mark.parametrize("way", ["cached", "direct"])
def test_killed_where_it_matters_most_the_newest_whole_version_is_right(tmp_path, way):
    done = in_nursery("rounds", tmp_path, way, "few")
    assert json.loads(done.stdout.splitlines()[-1]) == [1, 1, 1, 1, 2]


@pytest.mark.campaign
@pytest.mark.parametrize("way", ["cached", "direct"])
def test_killed_at_every_call_the_newest_whole_version_is_right(tmp_path, way):
    done = in_nursery("rounds", tmp_path, way, "every")
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert len(outcomes) > 15, "every call that matters was tried"
    assert outcomes == sorted(outcomes), "once committed, always committed"
    assert set(outcomes) == {1, 2}


def first_save(run, number):
    assert exit_code(syscalls.main, "kill", number, run, 1) == -signal.SIGKILL
    assert fw.versions(run) == []
    with pytest.raises(fw.FlyweightError):
        loaded(run)
    assert fw.save(syscalls.weights(0), run).version == 0
    assert loaded(run) == 0


@pytest.mark.check
@pytest.mark.parametrize("number", [2, 6, 12])
def test_a_first_save_that_dies_leaves_a_run_without_versions(tmp_path, number):
    in_nursery("first_save", tmp_path / "run", number)


def prune_and_die(run, number):
    """Die at the call of that number that removes a file."""
    unlink, numbers = os.unlink, itertools.count()

    def dying(*args, **options):
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return unlink(*args, **options)

    os.unlink = dying
    fw.prune(run, keep=1)


def prunes(root):
    os.fsync = lambda fd: None
    codes = []
    for number in range(5):
        run = Path(root) / str(number)
        for version in (1, 2, 3):
            fw.save(syscalls.weights(version), run, version=version)
        codes.append(exit_code(prune_and_die, run, number))
        for version in fw.versions(run):
            assert fw.verify(run, version=version).is_whole
        assert loaded(run) == 3
        fw.prune(run, keep=1)
        assert os.listdir(run) == ["v0000000003"]
    assert codes[0] == -signal.SIGKILL
    assert set(codes) <= {-signal.SIGKILL, 0}


@pytest.mark.check
def test_a_prune_that_dies_leaves_every_version_whole_or_gone(tmp_path):
    in_nursery("prunes", tmp_path)


def one_save(log, run):
    recorded(log, log, run, 1)


@pytest.mark.check
def test_nothing_is_written_after_its_sync_and_the_commit_comes_last(tmp_path):
    in_nursery("one_save", tmp_path / "log", tmp_path / "run")
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    order = [name for name, *_ in log]
    commit = order.index("rename")
    last_write = max(i for i, name in enumerate(order) if name == "pwrite")
    synced = {place for name, place, *_ in log[last_write:commit] if name == "fsync"}
    written = {place for name, place, *_ in log if name == "pwrite"}
    assert written <= synced
    work = os.path.dirname(next(iter(written)))
    assert work in synced  # the names of the files, before the name of their directory
    assert "fsync" in order[commit:]  # and that name itself
