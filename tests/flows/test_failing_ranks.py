"""Ranks that die, fall silent or fail in the middle of a save or a load: who is told what.

Real processes and real signals. A rank is killed at calls that change the disk or send to
another rank: outside of the campaign at those that matter most, there at every one.
"""

import itertools
import json
import os
import re
import resource
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import flyweight as fw
import syscalls
from campaign import HANG_SECONDS
from child_processes import LIMIT, Hang, until
from flyweight.errors import TransferTimeout
from flyweight.verbs import save as save_verb
from rank_processes import launch, run_ranks

TIMEOUT = 2 * LIMIT
"""Longer than a test may take: what ends earlier was not ended by it."""
SILENCE = 2.0
"""The timeout of those that wait for a rank that never answers."""
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


def kill_at(number=None, sig=signal.SIGKILL):
    """Die at the call of that number, of those that change the disk or send to another rank.

    Returns the list of the calls, which grows. Ticks come by the clock, and ranks join in any order:
    with those a number would be another call in every round.
    """
    lock, names = threading.RLock(), []

    def act(name, original, args, kwargs):
        with lock:
            if len(names) == number:
                os.kill(os.getpid(), sig)
                time.sleep(2 * LIMIT)  # it never comes to the call
            names.append(name)
        return original(*args, **kwargs)

    syscalls.wrap(act)
    send = socket.socket.sendmsg

    def counted_send(*args):
        frame = bytes(args[1][0])
        is_said = any(kind in frame for kind in (b"Step", b"Refused", b"Ended"))
        return act("send", send, args, {}) if is_said else send(*args)

    socket.socket.sendmsg = counted_send
    return names


def attempt(place, rank, call):
    """Write down how a rank fared: what it was told."""
    told = {"error": None, "text": ""}
    try:
        call()
    except fw.FlyweightError as error:
        told = {"error": type(error).__name__, "text": str(error)}
    (place / f"{rank}.part").write_text(json.dumps(told))
    (place / f"{rank}.part").rename(place / f"{rank}.json")


def told(place, ranks):
    return {rank: json.loads((place / f"{rank}.json").read_text()) for rank in ranks}


def round_of(root, victim, coordinator, number):
    """Kill the victim at one call of a save; return its exit code, its calls and what is there."""
    run, place = root / f"run{number}", root / f"told{number}"
    place.mkdir()
    fw.save({**whole_of(1), "step": 1}, run, version=1)

    def save(rank, num_ranks):
        names = kill_at(number) if rank == victim else []
        words = (shards(2, rank, num_ranks), run, None, coordinator)
        options = {"version": 2, "timeout_seconds": TIMEOUT}
        attempt(place, rank, lambda: fw.save_state_dict(*words, **options))
        (place / f"calls{rank}.json").write_text(json.dumps(names))

    codes = launch(3, "torch", save)
    survivors = [rank for rank in range(3) if rank != victim]
    assert [codes[rank] for rank in survivors] == [0, 0], codes
    version = check_newest(run)
    if codes[victim] == 0:
        assert version == 2
        return 0, json.loads((place / f"calls{victim}.json").read_text()), version
    assert codes[victim] == -signal.SIGKILL
    for rank, each in told(place, survivors).items():
        if each["error"] is None:
            assert version == 2, (number, rank)
            continue
        assert each["error"] == "PeerLost", (number, rank, each)
        # The store of the process group itself lives in rank 0.
        assert f"rank {victim}" in each["text"] or (victim == 0 and "store" in each["text"]), each
        if "is there all the same" in each["text"]:
            assert version == 2
    assert fw.versions(run) == ([1] if version == 1 else [1, 2])
    fw.save({**whole_of(3), "step": 3}, run, version=3)
    assert check_newest(run) == 3
    assert not [name for name in os.listdir(run) if name.startswith(".")]
    return codes[victim], None, version


def rounds(root, victim, coordinator, which):
    """Kill the victim at call 0, 1, 2, ... of a save until it gets through, or at a few of them."""
    root, victim, coordinator = Path(root), int(victim), int(coordinator)
    os.fsync = lambda fd: None  # still a call to be killed at; what was written outlives a process
    numbers = itertools.count()
    if which == "few":
        _, names, _ = round_of(root, victim, coordinator, None)
        assert names
        commit = [names.index("rename"), names.index("rename") + 1] if "rename" in names else []
        numbers = [0, names.index("pwrite"), *(commit or [len(names) - 2])]
    fates = []
    for number in numbers:
        code, _, version = round_of(root, victim, coordinator, number)
        if code == 0:
            break
        fates.append(version)
    print(json.dumps(fates))


@pytest.mark.parametrize(
    ("victim", "coordinator", "which"),
    [
        *(pytest.param(*pair, "few", marks=pytest.mark.check) for pair in [(1, 0), (2, 2), (0, 1)]),
        *(
            pytest.param(*pair, "every", marks=pytest.mark.campaign)
            for pair in [(1, 0), (2, 2), (0, 0), (0, 1)]
        ),
    ],
)
def test_a_rank_killed_at_any_call_of_a_save_is_named_and_the_newest_version_is_whole(
    tmp_path, victim, coordinator, which
):
    """C38."""
    words = (tmp_path, victim, coordinator, which)
    done = run_ranks(0, __file__, "rounds", *words, timeout=HANG_SECONDS)
    fates = json.loads(done.stdout.splitlines()[-1])
    assert len(fates) > (5 if which == "every" else 2)
    assert 1 in fates
    assert fates == sorted(fates), "once committed, always committed"
    if victim == coordinator:
        assert 2 in fates


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
    """Wait until those ranks have told how it was."""
    until(lambda: all((place / f"{rank}.json").exists() for rank in ranks))


def kill_stopped(parent, place, others):
    """Kill ranks that were stopped, once the others have told how it was, or never will."""
    with suppress(Hang):
        await_told(place, others)
    while True:
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                status = (Path("/proc") / name / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(status[1]) == parent and status[0] == "T":
                os.kill(int(name), signal.SIGKILL)
        time.sleep(0.05)


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
    """Only the coordinator's patience is short, and only once all ranks are connected."""
    if rank == 0:
        join = save_verb.join_group

        def join_and_hurry(*words, **options):
            group = join(*words, **options)
            group.timeout_seconds = SILENCE
            return group

        save_verb.join_group = join_and_hurry
    if rank == 1:
        kill_at(3, signal.SIGSTOP)
    save(rank, num_ranks, run)


def absent(rank, num_ranks, run):
    torch.distributed.barrier()  # the deadline is for the call, not for the start of a process
    if rank == 2:
        await_told(run.parent, [0, 1])
        raise fw.FlyweightError("did not call")
    save(rank, num_ranks, run, timeout_seconds=SILENCE)


def absent_coordinator(rank, num_ranks, run):
    if rank == 0:
        await_told(run.parent, [1, 2])
        raise fw.FlyweightError("did not call")
    save(rank, num_ranks, run, timeout_seconds=SILENCE)


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
    words = (shards(2, rank, num_ranks), run, None, 1)
    fw.save_state_dict(*words, version=2, timeout_seconds=SILENCE)


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
    "full_disk": ({1: "StoreError", 0: "PeerFailed", 2: "PeerFailed"}, "too large", "rank 1"),
    "full_disk_at_coordinator": ({0: "StoreError", 1: "PeerFailed", 2: "PeerFailed"}, "too large", "rank 0"),
    "silent": ({0: "TransferTimeout", 2: "TransferTimeout"}, "", "rank 1 was silent"),
    "absent": ({0: "TransferTimeout", 1: "TransferTimeout", 2: "FlyweightError"}, "", r"join.*\b2\]|rank 0 did not answer|did not call"),
    "absent_coordinator": ({1: "TransferTimeout", 2: "TransferTimeout", 0: "FlyweightError"}, "", "rank 0 did not answer|store|did not call"),
    "other_dtype": ({0: "DTypeMismatch", 1: "PeerFailed", 2: "PeerFailed"}, "'copied'.*rank 1", "rank 0"),
    "other_value": ({0: "PlanError", 1: "PeerFailed", 2: "PeerFailed"}, "'step'.*rank 1", "rank 0"),
    "hole": ({0: "PlanError", 1: "PeerFailed", 2: "PeerFailed"}, "800000.*1200000.*'w'", "rank 0"),
    "overlap": ({0: "PlanError", 1: "PeerFailed", 2: "PeerFailed"}, "'w'.*rank 1.*rank 0", "rank 0"),
    "other_version": ({0: "VersionError", 1: "PeerFailed", 2: "PeerFailed"}, "rank 2.*version 3.*rank 0.*version 2", "rank 0"),
    "no_model": ({1: "SpecError", 0: "PeerFailed", 2: "PeerFailed"}, "tensor", "rank 1"),
    "load_missing": ({1: "PlanError", 0: "PeerFailed", 2: "PeerFailed"}, "'more'", "rank 1"),
    "load_other_shape": ({2: "ShapeMismatch", 0: "PeerFailed", 1: "PeerFailed"}, r"'copied'.*50.*51", "rank 2"),
    "load_extra": ({0: "PlanError", 1: "PeerFailed", 2: "PeerFailed"}, "'copied'", "rank 0"),
    "load_killed": ({0: "PeerLost", 2: "PeerLost"}, "", "rank 1"),
    "other_paths": ({0: "PlanError", 1: "PeerFailed", 2: "PeerFailed"}, "rank 1.*other", "rank 0"),
    "store_stopped": ({1: "TransferTimeout", 2: "TransferTimeout"}, "", "store|join"),
    "damaged": ({0: "ChecksumMismatch PeerFailed", 1: "ChecksumMismatch PeerFailed", 2: "ChecksumMismatch PeerFailed"}, "", "checksum"),
}  # fmt: skip


@pytest.mark.check
@pytest.mark.parametrize("name", SCENES)
def test_what_goes_wrong_on_one_rank_is_told_to_all(tmp_path, name):
    kinds, own, others = EXPECTED[name]
    run_ranks(0, __file__, "scenes", tmp_path, name)
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
    run_ranks(0, __file__, "paddle_scene", tmp_path, framework="paddle")
    for each in told(tmp_path, [0, 2]).values():
        assert each["error"] == "PeerLost"
        assert "rank 1" in each["text"]
    assert check_newest(tmp_path / "run") == 1


def test_the_memory_of_a_rank_stays_within_its_budget(tmp_path):
    run_ranks(2, __file__, "measured", tmp_path)


def measured(rank, num_ranks, root):
    """Save and load 128 MiB a rank with 32 MiB of extra memory."""
    whole = 32 * num_ranks
    tensor = torch.zeros(32, 1 << 20)
    tensor.random_(generator=torch.Generator().manual_seed(rank))
    state = {"w": fw.Sharded(tensor, shape=(whole, 1 << 20), offset=(32 * rank, 0))}
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
        self._thread.join(LIMIT)

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
    with Peak() as peak:
        held = np.ones(8 << 20)
        until(lambda: peak.risen > 48 << 20)
        del held
    assert peak.risen > 48 << 20


def one_skips(rank, num_ranks, root):
    run = Path(root) / "run"
    if rank != 1:
        with pytest.raises(TransferTimeout, match="join|answer"):
            save(rank, num_ranks, run, version=1, timeout_seconds=0.5)
        Path(root, f"{rank}.json").touch()
    await_told(Path(root), [0, 2])
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
    with pytest.raises(fw.FlyweightError, match="(?s)'w'.*process_group"):
        fw.save({"w": half}, tmp_path / "run")
    assert not list(tmp_path.iterdir())
