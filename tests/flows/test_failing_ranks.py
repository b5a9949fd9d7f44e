"""Ranks that die, fall silent or fail in the middle of a save or a load: who is told what, and when.

Real processes and real signals. A rank is killed at each call that changes the disk or
sends to another rank, one after the other, until a save gets through.
"""

import json
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import flyweight as fw
import syscalls
from flyweight.ranks.connection import TICK
from rank_processes import launch, run_ranks

TIMEOUT = 4.0
ROWS = 6


def shards(version, rank, num_ranks):
    whole = whole_of(version)
    low, high = rank * ROWS // num_ranks, (rank + 1) * ROWS // num_ranks
    return {
        "w": fw.Sharded(whole["w"][low:high].clone(), shape=whole["w"].shape, offset=(low, 0)),
        "copied": whole["copied"].clone(),
        "step": version,
    }


def whole_of(version):
    generator = torch.Generator().manual_seed(version)
    return {
        "w": torch.randn(ROWS, 200_000, generator=generator),
        "copied": torch.randn(50, generator=generator),
    }


def check_newest(run):
    """The newest version is whole and right; returns it."""
    target = {"w": torch.zeros(ROWS, 200_000), "copied": torch.zeros(50), "step": 0}
    version = fw.load(run, into=target).version
    assert all(torch.equal(target[name], tensor) for name, tensor in whole_of(version).items()), (
        version
    )
    assert target["step"] == version
    return version


def kill_at(number, sig=signal.SIGKILL):
    """Die at the call of that number, of those that change the disk or send to another rank.

    Ticks come by the clock: with them a number would be another call in every round.
    """
    lock, count = threading.RLock(), 0

    def act(name, original, args, kwargs):
        nonlocal count
        with lock:
            if count == number:
                os.kill(os.getpid(), sig)
                time.sleep(0.05)  # a stop takes effect here at the latest
            count += 1
        return original(*args, **kwargs)

    syscalls.wrap(act)
    send = socket.socket.send

    def counted_send(*args):
        return send(*args) if args[1] == TICK else act("send", send, args, {})

    socket.socket.send = counted_send


def attempt(place, rank, call):
    """Write down how a rank fared: what it was told, and after how long."""
    started = time.monotonic()
    told = {"error": None, "text": ""}
    try:
        call()
    except fw.FlyweightError as error:
        told = {"error": type(error).__name__, "text": str(error)}
    (place / f"{rank}.json").write_text(json.dumps({**told, "seconds": time.monotonic() - started}))


def told(place, ranks):
    return {rank: json.loads((place / f"{rank}.json").read_text()) for rank in ranks}


def rounds(root, victim, coordinator):
    """Kill the victim at call 0, 1, 2, ... of a save, until it gets through."""
    root, victim, coordinator = Path(root), int(victim), int(coordinator)
    os.fsync = lambda fd: None  # still a call to be killed at; what was written outlives a process
    fates = []
    for number in range(200):
        run, place = root / f"run{number}", root / f"told{number}"
        place.mkdir()
        fw.save({**whole_of(1), "step": 1}, run, version=1)

        def save(rank, num_ranks, run=run, place=place, number=number):
            if rank == victim:
                kill_at(number)

            def call():
                fw.save_state_dict(
                    shards(2, rank, num_ranks),
                    run,
                    None,
                    coordinator,
                    version=2,
                    timeout_seconds=TIMEOUT,
                )

            attempt(place, rank, call)

        codes = launch(3, "torch", save)
        survivors = [rank for rank in range(3) if rank != victim]
        assert [codes[rank] for rank in survivors] == [0, 0], codes
        found = told(place, survivors)
        version = check_newest(run)
        if codes[victim] == 0:
            assert version == 2
            break
        assert codes[victim] == -signal.SIGKILL
        for rank, each in found.items():
            assert each["seconds"] < TIMEOUT + 2, (number, rank, each)
            if each["error"] is None:
                assert version == 2, (number, rank)
                continue
            assert each["error"] in ("PeerLost", "TransferTimeout"), (number, rank, each)
            # The store of the process group itself lives in rank 0.
            assert f"rank {victim}" in each["text"] or (
                victim == 0 and "store is gone" in each["text"]
            ), (number, each)
            if "is there all the same" in each["text"]:
                assert version == 2
        assert fw.versions(run) == ([1] if version == 1 else [1, 2])
        fates.append(version)
        fw.save({**whole_of(3), "step": 3}, run, version=3)
        assert check_newest(run) == 3
        assert not [name for name in os.listdir(run) if name.startswith(".")]
    print(json.dumps(fates))


@pytest.mark.check
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("victim", "coordinator"), [(1, 0), (2, 2), (0, 0), (0, 1)])
def test_a_rank_killed_at_any_call_of_a_save_is_named_and_the_newest_version_is_whole(
    tmp_path, victim, coordinator
):
    """C38."""
    done = run_ranks(0, __file__, "rounds", tmp_path, victim, coordinator, timeout=280)
    fates = json.loads(done.stdout.splitlines()[-1])
    assert len(fates) > 5
    assert 1 in fates
    assert fates == sorted(fates), "once committed, always committed"


def scenes(root, name):
    """Play one scene with three ranks, and print what each was told."""
    root = Path(root)
    run = root / "run"
    fw.save({**whole_of(1), "step": 1}, run, version=1)

    def play(rank, num_ranks):
        attempt(root, rank, lambda: SCENES[name](rank, num_ranks, run))

    if name in ("silent", "store_stopped"):
        words = [os.getpid(), root, EXPECTED[name][0]]
        threading.Thread(target=kill_stopped, args=words, daemon=True).start()
    launch(3, "torch", play)


def await_told(place, ranks):
    """Wait until those ranks have told how it was, or should have long since."""
    deadline = time.monotonic() + 3 * TIMEOUT
    while time.monotonic() < deadline and not all((place / f"{r}.json").exists() for r in ranks):
        time.sleep(0.05)


def kill_stopped(parent, place, others):
    """Kill ranks that were stopped, once the others have told how it was, or never will."""
    await_told(place, others)
    while True:
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                status = (Path("/proc") / name / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(status[1]) == parent and status[0] == "T":
                os.kill(int(name), signal.SIGKILL)
        time.sleep(0.5)


def save(rank, num_ranks, run, state=None, **options):
    options = {"version": 2, "timeout_seconds": TIMEOUT, **options}
    fw.save_state_dict(shards(2, rank, num_ranks) if state is None else state, run, **options)


def full_disk(rank, num_ranks, run):
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, -1))
    save(rank, num_ranks, run)


def full_disk_at_coordinator(rank, num_ranks, run):
    if rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, -1))
    save(rank, num_ranks, run)


def silent(rank, num_ranks, run):
    if rank == 1:
        kill_at(3, signal.SIGSTOP)
    save(rank, num_ranks, run)


def absent(rank, num_ranks, run):
    if rank == 2:
        await_told(run.parent, [0, 1])
        raise fw.FlyweightError("did not call")
    save(rank, num_ranks, run)


def absent_coordinator(rank, num_ranks, run):
    if rank == 0:
        await_told(run.parent, [1, 2])
        raise fw.FlyweightError("did not call")
    save(rank, num_ranks, run)


def other_dtype(rank, num_ranks, run):
    state = shards(2, rank, num_ranks)
    if rank == 1:
        state["copied"] = state["copied"].double()
    save(rank, num_ranks, run, state)


def other_value(rank, num_ranks, run):
    save(rank, num_ranks, run, {**shards(2, rank, num_ranks), "step": rank})


def hole(rank, num_ranks, run):
    state = shards(2, rank, num_ranks)
    if rank == 1:
        del state["w"]
    save(rank, num_ranks, run, state)


def overlap(rank, num_ranks, run):
    state = shards(2, rank, num_ranks)
    if rank == 1:
        state["w"] = fw.Sharded(state["w"].tensor, shape=state["w"].shape, offset=(1, 0))
    save(rank, num_ranks, run, state)


def other_version(rank, num_ranks, run):
    save(rank, num_ranks, run, version=2 + (rank == 2))


def no_model(rank, num_ranks, run):
    save(rank, num_ranks, run, {"w": object()} if rank == 1 else None)


def load_missing(rank, num_ranks, run):
    target = shards(0, rank, num_ranks)
    before = target["w"].tensor.clone()
    if rank == 1:
        target["more"] = torch.zeros(3)
    try:
        fw.load_state_dict(target, run, timeout_seconds=TIMEOUT)
    finally:
        assert torch.equal(target["w"].tensor, before), "a target was touched"
        assert target["step"] == 0


def load_other_shape(rank, num_ranks, run):
    target = shards(0, rank, num_ranks)
    before = target["w"].tensor.clone()
    if rank == 2:
        target["copied"] = torch.zeros(51)
    try:
        fw.load_state_dict(target, run, timeout_seconds=TIMEOUT)
    finally:
        assert torch.equal(target["w"].tensor, before), "a target was touched"


def load_extra(rank, num_ranks, run):
    target = shards(0, rank, num_ranks)
    del target["copied"]
    fw.load_state_dict(target, run, extra="refuse", timeout_seconds=TIMEOUT)


def load_killed(rank, num_ranks, run):
    if rank == 1:
        read = os.preadv

        def preadv(*args):
            os.kill(os.getpid(), signal.SIGKILL)
            return read(*args)

        os.preadv = preadv
        os.pread = preadv
    fw.load_state_dict(shards(0, rank, num_ranks), run, timeout_seconds=TIMEOUT)


def other_paths(rank, num_ranks, run):
    """The same version number, other weights."""
    other = run.parent / "other"
    if rank == 0:
        fw.save({**whole_of(5), "step": 1}, other, version=1)
    torch.distributed.barrier()
    target = shards(0, rank, num_ranks)
    before = target["w"].tensor.clone()
    try:
        fw.load_state_dict(target, other if rank == 1 else run, timeout_seconds=TIMEOUT)
    finally:
        assert torch.equal(target["w"].tensor, before), "a target was touched"


def store_stopped(rank, num_ranks, run):
    """The process group's own store lives in rank 0; here another is the coordinator."""
    torch.distributed.barrier()  # joining the group needs the store too
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    fw.save_state_dict(shards(2, rank, num_ranks), run, None, 1, version=2, timeout_seconds=TIMEOUT)


def damaged(rank, num_ranks, run):
    if rank == 0:
        part = sorted((run / "v0000000001").glob("*.safetensors"))[0]
        data = bytearray(part.read_bytes())
        data[-1000] ^= 1  # in the last rows of "w", or in "copied"
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
    torch.distributed.barrier()
    fw.load_state_dict(shards(0, rank, num_ranks), run, timeout_seconds=TIMEOUT)


SCENES = {each.__name__: each for each in (
    full_disk, full_disk_at_coordinator, silent, absent, absent_coordinator, other_dtype, other_value, hole, overlap,
    other_version, no_model, load_missing, load_other_shape, load_extra, load_killed, other_paths, store_stopped, damaged,
)}  # fmt: skip
EXPECTED = {
    "full_disk": ({1: "StoreError", 0: "PeerFailed", 2: "PeerFailed"}, "File too large", "rank 1 failed in step"),
    "full_disk_at_coordinator": ({0: "StoreError", 1: "PeerFailed", 2: "PeerFailed"}, "File too large", "rank 0 failed in step"),
    "silent": ({0: "TransferTimeout", 2: "TransferTimeout"}, "", "rank 1 was silent for 3 s"),
    "absent": ({0: "TransferTimeout", 1: "TransferTimeout", 2: "FlyweightError"}, "", r"1 ranks did not join within 3 s: \[2\]|did not call"),
    "absent_coordinator": ({1: "TransferTimeout", 2: "TransferTimeout", 0: "FlyweightError"}, "", "coordinator rank 0 did not answer|did not call"),
    "other_dtype": ({0: "DTypeMismatch", 1: "PeerFailed", 2: "PeerFailed"}, "'copied' is f32 on rank 0 and f64 on rank 1", "rank 0 failed"),
    "other_value": ({0: "PlanError", 1: "PeerFailed", 2: "PeerFailed"}, "'step' is 0 on rank 0 and 1 on rank 1", "rank 0 failed"),
    "hole": ({0: "PlanError", 1: "PeerFailed", 2: "PeerFailed"}, "the ranks hold 800000 of the 1200000 elements of 'w'", "rank 0 failed"),
    "overlap": ({0: "PlanError", 1: "PeerFailed", 2: "PeerFailed"}, "'w' has elements twice: in .* of rank 1 and in .* of rank 0", "rank 0 failed"),
    "other_version": ({0: "VersionError", 1: "PeerFailed", 2: "PeerFailed"}, "rank 2 saves to 'run', version 3, .*; rank 0 saves to 'run', version 2", "rank 0 failed"),
    "no_model": ({1: "SpecError", 0: "PeerFailed", 2: "PeerFailed"}, "neither a tensor nor a plain value", "rank 1 failed in step"),
    "load_missing": ({1: "PlanError", 0: "PeerFailed", 2: "PeerFailed"}, "target wants 1 tensors .* lacks: 'more'", "rank 1 failed"),
    "load_other_shape": ({2: "ShapeMismatch", 0: "PeerFailed", 1: "PeerFailed"}, r"'copied' is \(50,\) .* and \(51,\)", "rank 2 failed"),
    "load_extra": ({0: "PlanError", 1: "PeerFailed", 2: "PeerFailed"}, "has 1 tensors that the target lacks: 'copied'", "rank 0 failed"),
    "load_killed": ({0: "PeerLost", 2: "PeerLost"}, "", "rank 1 closed its connection"),
    "other_paths": ({0: "PlanError", 1: "PeerFailed", 2: "PeerFailed"}, "rank 1 opened .*other.*: not the same weights", "rank 0 failed in step 'opened'"),
    "store_stopped": ({1: "TransferTimeout", 2: "TransferTimeout"}, "", "store, usually on rank 0, did not answer|did not join"),
    "damaged": ({0: "ChecksumMismatch PeerFailed", 1: "ChecksumMismatch PeerFailed", 2: "ChecksumMismatch PeerFailed"}, "", "checksum"),
}  # fmt: skip


@pytest.mark.check
@pytest.mark.parametrize("name", SCENES)
def test_what_goes_wrong_on_one_rank_is_told_to_all(tmp_path, name):
    import re

    kinds, own, others = EXPECTED[name]
    run_ranks(0, __file__, "scenes", tmp_path, name, timeout=60)
    found = told(tmp_path, kinds)
    for rank, each in found.items():
        assert each["error"] in kinds[rank].split(), (rank, each)
        is_own = each["error"] not in (
            "PeerFailed",
            "PeerLost",
            "TransferTimeout",
            "FlyweightError",
        )
        assert re.search(own if is_own and own else others, each["text"]), (rank, each)
        assert each["seconds"] < TIMEOUT + 2, (rank, each)
    if name != "damaged":
        assert check_newest(tmp_path / "run") == 1
    assert not [each for each in os.listdir(tmp_path / "run") if each.startswith(".")]


def paddle_scene(root):
    """Ranks of Paddle, one of them killed in the middle of its writing."""
    run, place = Path(root) / "run", Path(root)
    fw.save({**whole_of(1), "step": 1}, run, version=1)

    def play(rank, num_ranks):
        if rank == 1:
            kill_at(2)
        attempt(place, rank, lambda: save(rank, num_ranks, run))

    codes = launch(3, "paddle", play)
    assert codes[1] == -signal.SIGKILL, codes


def test_a_rank_of_paddle_that_is_killed_is_named(tmp_path):
    run_ranks(0, __file__, "paddle_scene", tmp_path, framework="paddle", timeout=60)
    for each in told(tmp_path, [0, 2]).values():
        assert each["error"] == "PeerLost"
        assert "rank 1 closed its connection" in each["text"]
        assert each["seconds"] < TIMEOUT + 2
    assert check_newest(tmp_path / "run") == 1


def test_the_memory_of_a_rank_stays_within_its_budget(tmp_path):
    run_ranks(2, __file__, "measured", tmp_path)


def measured(rank, num_ranks, root):
    """Save and load 256 MiB a rank with 32 MiB of extra memory."""
    whole = 64 * num_ranks
    tensor = torch.zeros(64, 1 << 20)
    tensor.random_(generator=torch.Generator().manual_seed(rank))
    state = {"w": fw.Sharded(tensor, shape=(whole, 1 << 20), offset=(64 * rank, 0))}
    group = torch.distributed.group.WORLD
    fw.save(
        {"v": fw.Sharded(tensor[:1], shape=(num_ranks, 1 << 20), offset=(rank, 0))},
        Path(root) / "warm",
        process_group=group,
    )
    with Peak() as peak:
        fw.save(state, Path(root) / "run", process_group=group, memory_bytes=32 << 20)
    saved = peak.risen
    expected = tensor.clone()
    tensor.zero_()
    with Peak() as peak:
        fw.load(Path(root) / "run", into=state, process_group=group, memory_bytes=32 << 20)
    loaded = peak.risen
    assert torch.equal(tensor, expected)
    assert saved < 40 << 20, saved
    assert loaded < 40 << 20, loaded


class Peak:
    """Watches this process's anonymous memory, every few milliseconds, and tells how far it rose."""

    def __enter__(self):
        self._base = self.bytes = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *raised):
        self._done.set()
        self._thread.join(10)

    def _watch(self):
        while not self._done.wait(0.002):
            self.bytes = max(self.bytes, self._now())

    @property
    def risen(self):
        return self.bytes - self._base

    @staticmethod
    def _now():
        fields = dict(
            line.split(":") for line in Path("/proc/self/status").read_text().splitlines()
        )
        return int(fields["RssAnon"].split()[0]) << 10


def test_the_watch_itself_sees_memory_that_is_gone_again():
    deadline = time.monotonic() + 10
    with Peak() as peak:
        held = np.ones(8 << 20)
        while peak.risen <= 48 << 20 and time.monotonic() < deadline:
            time.sleep(0.002)  # on a busy machine the watch has to wait for a core
        del held
        time.sleep(0.05)
    assert peak.risen > 48 << 20


def one_skips(rank, num_ranks, root):
    run = Path(root) / "run"
    if rank != 1:
        with pytest.raises(fw.FlyweightError, match="did not join"):
            save(rank, num_ranks, run, version=1, timeout_seconds=1.5)
    else:
        time.sleep(2.5)
    for version in (2, 3):
        save(rank, num_ranks, run, version=version)
    assert fw.versions(run) == [2, 3]


def test_a_rank_that_skipped_a_save_is_there_for_the_next(tmp_path):
    run_ranks(3, __file__, "one_skips", tmp_path)


def nothing_here(rank, num_ranks, root):
    """A stage with nothing to save; and a scalar that lives on some ranks only."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    state = {"w": torch.ones(3), "step": 1} if rank == 0 else {"step": 1}
    fw.save_state_dict(state, Path(root) / "run", timeout_seconds=TIMEOUT)
    target = {"w": torch.zeros(3), "step": 0} if rank == 0 else {"step": 0}
    fw.load_state_dict(target, Path(root) / "run", timeout_seconds=TIMEOUT)
    assert target["step"] == 1
    scalar = distribute_tensor(
        torch.tensor(3.0), DeviceMesh("cpu", [0, 1]), [Replicate()], src_data_rank=None
    )
    fw.save_state_dict({"s": scalar}, Path(root) / "scalar", timeout_seconds=TIMEOUT)


def test_a_rank_without_any_tensor_takes_part(tmp_path):
    run_ranks(3, __file__, "nothing_here", tmp_path)
    with fw.open(tmp_path / "scalar") as opened:
        assert opened.read("s").view("f4").tolist() == [3.0]


def test_numpy_state_needs_no_framework_and_no_group(tmp_path):
    """C39: alone, nobody is asked for a process group."""
    fw.save_state_dict({"w": np.arange(4), "step": 1}, tmp_path / "run")
    target = {"w": np.zeros(4, int), "step": 0}
    fw.load_state_dict(target, tmp_path / "run")
    assert target["w"].tolist() == [0, 1, 2, 3]
    assert target["step"] == 1


def test_one_rank_of_several_cannot_save_alone(tmp_path):
    half = fw.Sharded(np.zeros(4), shape=(8,), offset=(4,))
    with pytest.raises(
        fw.FlyweightError, match=r"hold 4 of the 8 elements of 'w'[\s\S]*process_group"
    ):
        fw.save({"w": half}, tmp_path / "run")
    assert not list(tmp_path.iterdir())
