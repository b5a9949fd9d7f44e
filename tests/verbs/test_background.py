"""Saves that go on while the model changes."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import flyweight as fw
from child_processes import LIMIT, run_python
from flyweight.errors import SpecError, StoreError, TransferTimeout
from flyweight.events import listening
from rank_processes import run_ranks


def weights(value, rows=64):
    return {
        "w": torch.full((rows, 50_000), float(value)),
        "v": torch.arange(7.0) + value,
        "step": value,
    }


def holding(run, version):
    target = {**weights(0), "step": 0}
    fw.load(run, into=target, version=version)
    return target


class Gate:
    """Holds every writer of a save back until it is opened."""

    def __init__(self):
        self._open = threading.Event()

    def __call__(self, event):
        if event.kind == "progress" and event.fields["verb"] == "save":
            assert self._open.wait(LIMIT)

    def open(self):
        self._open.set()


def test_what_is_saved_is_what_was_there_when_it_began(tmp_path):
    """C40."""
    model = weights(1)
    gate = Gate()
    with listening(gate):
        handle = fw.save(model, tmp_path, background=True)
        model["w"].fill_(9)
        model["v"].fill_(9)
        assert not handle.is_done
        assert fw.versions(tmp_path) == []
        gate.open()
        report = handle.wait(LIMIT)
    assert handle.is_done
    assert handle.done_bytes == handle.total_bytes == report.nbytes == 64 * 50_000 * 4 + 28
    found = holding(tmp_path, 0)
    assert found["w"].unique().tolist() == [1.0]
    assert found["v"].tolist() == (torch.arange(7.0) + 1).tolist()
    assert found["step"] == 1


def test_a_second_save_waits_or_refuses_as_asked(tmp_path):
    gate = Gate()
    with listening(gate):
        first = fw.save(weights(1), tmp_path, background=True)
        with pytest.raises(StoreError, match=r"version 0 .* 12800028 bytes"):
            fw.save(weights(2), tmp_path, background=True, when_busy="refuse")
        with pytest.raises(StoreError, match="saved"):
            fw.save(weights(2), tmp_path, when_busy="refuse")
        with pytest.raises(TransferTimeout, match="version 0"):
            first.wait(0.01)
        threading.Timer(0.1, gate.open).start()  # the next save waits by then, or need not wait
        second = fw.save(weights(2), tmp_path, background=True)
        assert first.is_done
    assert second.wait(LIMIT).version == 1
    assert fw.save(weights(3), tmp_path, when_busy="refuse").version == 2
    assert [int(holding(tmp_path, v)["w"][0, 0]) for v in fw.versions(tmp_path)] == [1, 2, 3]
    with pytest.raises(SpecError, match="when_busy is 'hope'"):
        fw.save(weights(1), tmp_path, when_busy="hope")


def test_a_save_that_waits_for_one_that_hangs_gives_up(tmp_path):
    gate = Gate()
    with listening(gate):
        first = fw.save(weights(1), tmp_path, background=True)
        with pytest.raises(StoreError, match="version 0"):
            fw.save(weights(2), tmp_path, timeout_seconds=0.02)
        gate.open()
        assert first.wait(LIMIT).version == 0


def test_a_failure_is_told_by_the_handle_and_the_next_save_goes_on(tmp_path):
    fw.save(weights(1), tmp_path, version=1)
    gate = Gate()
    with listening(gate):
        handle = fw.save(weights(2), tmp_path, background=True, version=5)
        (draft,) = [each for each in tmp_path.iterdir() if each.name.startswith(".draft-")]
        (tmp_path / "v0000000005").mkdir()
        (tmp_path / "v0000000005" / "in the way").write_text("x")
        gate.open()
        with pytest.raises(fw.FlyweightError, match="version 5"):
            handle.wait(LIMIT)
    assert not draft.exists()
    assert fw.versions(tmp_path) == [1]
    assert fw.save(weights(3), tmp_path, background=True, version=6).wait(LIMIT).version == 6


def test_staging_is_used_again_and_does_not_grow(tmp_path):
    def anonymous_bytes():
        fields = dict(
            line.split(":") for line in Path("/proc/self/status").read_text().splitlines()
        )
        return int(fields["RssAnon"].split()[0]) << 10

    model = weights(1, rows=640)
    fw.save(model, tmp_path, background=True).wait(LIMIT)
    base = anonymous_bytes()
    for _ in range(3):
        fw.save(model, tmp_path, background=True).wait(LIMIT)
    assert anonymous_bytes() - base < 48 << 20, "a second staging area would be 128 MB"


def test_strided_scalar_and_empty_tensors_are_staged_too(tmp_path):
    model = {
        "t": torch.arange(12.0).reshape(3, 4).t(),
        "s": torch.tensor(3.0),
        "e": torch.empty(0, 2),
        "c": np.arange(6).reshape(2, 3)[:, ::2],
    }
    expected = {name: np.ascontiguousarray(np.asarray(t)).tobytes() for name, t in model.items()}
    handle = fw.save(model, tmp_path, background=True)
    model["t"].zero_()
    handle.wait(LIMIT)
    with fw.open(tmp_path) as opened:
        for name, data in expected.items():
            assert opened.read(name).tobytes() == data, name


def test_a_process_that_ends_at_once_saves_to_the_end(tmp_path):
    code = "import sys, numpy as np, flyweight as fw\nfw.save({'w': np.arange(3e6)}, sys.argv[1], background=True)\n"
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert fw.versions(tmp_path) == [0]
    assert fw.verify(tmp_path).is_whole


def test_a_child_that_is_forked_meanwhile_ends_and_saves_on_its_own(tmp_path):
    """As workers of a data loader are."""
    code = (
        "import multiprocessing, sys, threading, numpy as np, flyweight as fw\n"
        "from flyweight.events import listening\n"
        "gate = threading.Event()\n"
        "with listening(lambda event: event.kind == 'progress' and event.fields['verb'] == 'save' and gate.wait(60)):\n"
        "    handle = fw.save({'w': np.arange(3e6)}, sys.argv[1] + '/a', background=True)\n"
        "    def work():\n"
        "        gate.set()\n"
        "        fw.save({'w': np.arange(4)}, sys.argv[1] + '/b')\n"
        "    child = multiprocessing.get_context('fork').Process(target=work)\n"
        "    child.start(); child.join(60)\n"
        "    assert child.exitcode == 0, child.exitcode\n"
        "    gate.set()\n"
        "    handle.wait(60)\n"
    )
    done = run_python(code, tmp_path, flags=("-W", "ignore"))
    assert done.returncode == 0, done.stderr
    assert fw.versions(tmp_path / "a") == fw.versions(tmp_path / "b") == [0]


def test_a_thread_that_cannot_start_is_told_and_keeps_nobody_waiting(tmp_path, monkeypatch):
    start = threading.Thread.start

    def refuse(self):
        if self.name == "flyweight-save":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        fw.save(weights(1), tmp_path, background=True)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert fw.save(weights(1), tmp_path, background=True).wait(LIMIT).version == 0


def ranks_save(rank, num_ranks, root):
    group = torch.distributed.group.WORLD
    tensor = torch.full((4, 1000), float(rank))
    state = {
        "w": fw.Sharded(tensor, shape=(4 * num_ranks, 1000), offset=(4 * rank, 0)),
        "copy": torch.ones(5),
    }
    handles = []
    for version in range(3):
        tensor.fill_(10 * version + rank)
        handles.append(fw.save(state, root, process_group=group, background=True, version=version))
        tensor.fill_(-1)
        torch.distributed.barrier()  # training goes on, with collectives of its own
    assert [handle.wait(LIMIT).version for handle in handles] == [0, 1, 2]


def test_ranks_save_together_in_the_background(tmp_path):
    run_ranks(3, __file__, "ranks_save", tmp_path)
    for version in range(3):
        with fw.open(tmp_path, version=version) as opened:
            rows = opened.read("w").view("f4").reshape(12, 1000)[:, 0].tolist()
            assert rows == [10 * version + rank for rank in range(3) for _ in range(4)]
