"""A power cut after any call of a save: what was not synced is lost, and no weight is wrong."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import flyweight as fw
import syscalls
from child_processes import LIMIT
from conftest import same, zeros_like
from power_cut import Disk, durable, every_cut, put
from rank_processes import launch, run_ranks

pytestmark = pytest.mark.check

NAMES = {"rank": 0, "legacy_id": 0}


def read_log(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_first_save_is_there_whole_or_not_at_all(tmp_path):
    disk = Disk(tmp_path)
    log, run = tmp_path.with_name(f"{tmp_path.name}.log"), tmp_path / "runs" / "7"
    words = [sys.executable, Path(syscalls.__file__), "record", log, run, "1"]
    subprocess.run(words, check=True, timeout=LIMIT)
    seen = []
    for number, tree in enumerate(every_cut(disk, read_log(log))):
        place = tmp_path / f"cut{number}"
        put(tree, place)
        seen.append(fw.versions(place / "runs" / "7") if (place / "runs" / "7").exists() else [])
        if seen[-1]:
            target = zeros_like(syscalls.weights(0))
            assert fw.load(place / "runs" / "7", into=target).version == 1
            assert same(target, syscalls.weights(1))
    assert seen[0] == []
    assert "runs/7/v0000000001/flyweight.json" in durable(disk)


def whole_of(version):
    rng = np.random.default_rng(version)
    return {"w": rng.random((6, 3000)), "copied": rng.random(50)}


def sync_late(version, seconds):
    """Have this rank sync only after the commit, if the coordinator does not wait for it.

    A coordinator that needs longer for a wrong commit is not seen on this machine.
    """
    sync, first = os.fsync, []

    def late(fd):
        first.append(time.monotonic())
        while not version.exists() and time.monotonic() < first[0] + seconds:
            time.sleep(0.01)
        return sync(fd)

    os.fsync = late


def record_ranks(root, log, background):
    """Save version 2 from three ranks, every one recorded; rank 1 commits."""

    def save(rank, num_ranks):
        syscalls.record_to(log)
        if rank != 1:
            sync_late(Path(root) / "run" / "v0000000002", 0.5)
        whole = whole_of(2)
        rows = whole["w"][2 * rank : 2 * rank + 2].copy()
        handle = fw.save_state_dict(
            {
                "w": fw.Sharded(rows, shape=(6, 3000), offset=(2 * rank, 0)),
                "copied": whole["copied"],
            },
            Path(root) / "run",
            None,
            1,
            version=2,
            background=background == "True",
            timeout_seconds=LIMIT,
        )
        if background == "True":
            handle.wait(LIMIT)

    assert launch(3, "torch", save) == [0, 0, 0]


@pytest.mark.parametrize("background", [False, True])
def test_a_save_of_many_ranks_leaves_the_old_version_or_the_new_one(tmp_path, background):
    """C38: every rank's files are durable before the commit."""
    root, log = tmp_path / "root", tmp_path / "log"
    fw.save(whole_of(1), root / "run", version=1)
    disk = Disk(root)
    run_ranks(0, __file__, "record_ranks", root, log, background)
    calls = read_log(log)
    written = {Path(place).name for name, place, *_ in calls if name == "pwrite"}
    parts = {f"rank-{rank:05d}-00001.safetensors" for rank in range(3)}
    assert parts < written, "the writes of every rank were recorded"
    seen = []
    for number, tree in enumerate(every_cut(disk, calls)):
        place = tmp_path / f"cut{number}"
        put(tree, place)
        target = zeros_like(whole_of(0))
        seen.append(fw.load(place / "run", into=target).version)
        assert same(target, whole_of(seen[-1])), seen[-1]
        assert fw.verify(place / "run").is_whole
    assert seen[0] == 1
    assert set(seen) == {1, 2}
    assert "run/v0000000002/flyweight.json" in durable(disk)


def legacy_weights(value, count):
    return {f"w{n}": np.full(8, 10 * value + n) for n in range(count)}


def record_legacy(root, log, count, part_bytes):
    syscalls.record_to(log)
    part_bytes = int(part_bytes) or None
    fw.save_legacy(legacy_weights(2, int(count)), root, **NAMES, part_bytes=part_bytes)


@pytest.mark.parametrize(
    ("old", "new"),
    [((3, 64), (3, 64)), ((3, 64), (2, 64)), ((2, 64), (3, 64)), ((3, 64), (3, 0)), ((3, 0), (3, 64))],
)  # fmt: skip
def test_an_old_save_and_a_new_one_are_never_there_together(tmp_path, old, new):
    """C5: the old layout has no commit, so the files before go first, and surely."""
    root, log = tmp_path / "root", tmp_path / "log"
    fw.save_legacy(legacy_weights(1, old[0]), root, **NAMES, part_bytes=old[1] or None)
    before = {path.name: path.read_bytes() for path in root.iterdir()}
    disk = Disk(root)
    run_ranks(0, __file__, "record_legacy", root, log, *new, framework="numpy")
    after = {path.name: path.read_bytes() for path in root.iterdir()}
    trees = list(every_cut(disk, read_log(log)))
    assert trees[0] == before
    assert durable(disk) == after
    for number, tree in enumerate(trees):
        assert tree.items() <= before.items() or tree.items() <= after.items(), sorted(tree)
        put(tree, tmp_path / f"cut{number}")
        value, (count, _) = (1, old) if tree.items() <= before.items() else (2, new)
        target = zeros_like(legacy_weights(0, count))
        if tree in (before, after):
            fw.load(tmp_path / f"cut{number}", into=target, **NAMES)
            assert same(target, legacy_weights(value, count))
        else:
            with pytest.raises(fw.FlyweightError):
                fw.load(tmp_path / f"cut{number}", into=target, **NAMES)
            assert not any(each.any() for each in target.values())
