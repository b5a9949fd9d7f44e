"""A save that dies at any moment: the newest whole version is there, right, and nothing else is."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import flyweight as fw
import syscalls
from child_processes import exit_code, run_python
from conftest import same, zeros_like
from rank_processes import run_ranks

pytestmark = pytest.mark.check


def child(*words):
    return subprocess.run(
        [sys.executable, syscalls.__file__, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def loaded(run):
    target = zeros_like(syscalls.weights(0))
    version = fw.load(run, into=target).version
    assert same(target, syscalls.weights(version)), f"version {version} is not what was saved"
    return version


def rounds(root, way):
    """Kill a save at the first call, the second, and so on, until one gets through to its end."""
    os.fsync = lambda fd: None  # still a call to be killed at; what was written outlives a process
    outcomes = []
    for number in range(200):
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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["cached", "direct"])
def test_killed_at_every_call_the_newest_whole_version_is_right(tmp_path, way):
    done = run_ranks(0, __file__, "rounds", tmp_path, way, framework="numpy", timeout=280)
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert 15 < len(outcomes) < 200, "every call that matters was tried, and there was an end"
    assert outcomes == sorted(outcomes), "once committed, always committed"
    assert set(outcomes) == {1, 2}


@pytest.mark.parametrize("number", [2, 6, 12])
def test_a_first_save_that_dies_leaves_a_run_without_versions(tmp_path, number):
    assert child("kill", number, tmp_path / "run", 1).returncode == -signal.SIGKILL
    assert fw.versions(tmp_path / "run") == []
    with pytest.raises(fw.FlyweightError):
        loaded(tmp_path / "run")
    assert fw.save(syscalls.weights(0), tmp_path / "run").version == 0
    assert loaded(tmp_path / "run") == 0


def test_a_prune_that_dies_leaves_every_version_whole_or_gone(tmp_path):
    code = (
        "import os, signal, sys, flyweight as fw\n"
        "real, count = os.unlink, 0\n"
        "def unlink(*a, **k):\n"
        "    global count\n"
        "    if count == int(sys.argv[2]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    count += 1; return real(*a, **k)\n"
        "os.unlink = unlink\n"
        "fw.prune(sys.argv[1], keep=1)\n"
    )
    for number in range(5):
        run = tmp_path / str(number)
        for version in (1, 2, 3):
            fw.save(syscalls.weights(version), run, version=version)
        died = run_python(code, run, number)
        assert died.returncode in (-signal.SIGKILL, 0)
        for version in fw.versions(run):
            assert fw.verify(run, version=version).is_whole
        assert loaded(run) == 3
        fw.prune(run, keep=1)
        assert os.listdir(run) == ["v0000000003"]


def test_nothing_is_written_after_its_sync_and_the_commit_comes_last(tmp_path):
    assert child("record", tmp_path / "log", tmp_path / "run", 1).returncode == 0
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
