"""All ranks commit together, or none does: two real processes of torch or Paddle, on gloo."""

import json
import os
import signal
import socket
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, until
from conftest import flip
from flyweight.errors import FlyweightError
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.engine import ModelEngine
from flyweight.lifecycle.states import Signal, State
from flyweight.lifecycle.worker import Worker
from flyweight.live.incoming import Incoming
from rank_processes import run_ranks

NAMES = ("first", "w", "norm")
LAYOUT = """{"mesh": {"tp": 2}, "rules": [
    {"names": ["first"], "cut": {"1": "tp"}}, {"names": ["w"], "cut": {"0": "tp"}}, {"names": ["**"]}
]}"""


def weights(version):
    """The whole tensors of a version."""
    rng = np.random.default_rng(version)
    shapes = ((6, 1000), (1000, 6), (6,))
    return {
        name: rng.random(shape).astype(np.float32)
        for name, shape in zip(NAMES, shapes, strict=True)
    }


def share(version, rank):
    """What a rank holds of a version."""
    whole = weights(version)
    return {
        "first": whole["first"][:, 500 * rank : 500 * (rank + 1)],
        "w": whole["w"][500 * rank : 500 * (rank + 1)],
        "norm": whole["norm"],
    }


class Faults:
    """What a test asks a rank to do wrong, by a file for each step."""

    def __init__(self, directory, rank):
        self._directory, self._rank = directory, rank

    def __call__(self, step):
        try:
            with open(f"{self._directory}/{step}.{self._rank}") as file:
                kind = file.read()
        except FileNotFoundError:
            return
        if kind == "raise":
            raise RuntimeError(f"{step} went wrong")
        open(f"{self._directory}/reached", "w").close()
        threading.Event().wait(3 * LIMIT)  # until this process is killed


class FaultyEngine(ModelEngine):
    def __init__(self, model, faults):
        super().__init__(model)
        self._faults = faults

    def drop_cache(self):
        self._faults("drop_cache")


def go_wrong_while_copying(faults):
    """Have updates of this process go wrong once everything is copied."""
    original = Incoming.copy

    def copy(self, *arguments):
        original(self, *arguments)
        faults("copy")

    Incoming.copy = copy


class Rank:
    """One rank: its tensors, and how a test asks it what it holds."""

    def __init__(self, framework, directory, rank):
        self.directory, self.rank = directory, rank
        self.faults = Faults(directory, rank)
        blank = {name: np.zeros_like(array) for name, array in share(0, rank).items()}
        if framework == "torch":
            import torch

            self.model = {name: torch.from_numpy(array) for name, array in blank.items()}
        else:
            import paddle

            self.model = paddle.nn.Layer()
            for name, array in blank.items():
                self.model.add_parameter(name, self.model.create_parameter(array.shape))
        self._tensors = self.model if framework == "torch" else self.model.state_dict()

    def load_weights(self, named):
        """Take whole tensors and keep this rank's share, as engines with loaders of their own do."""
        for name, tensor in named:
            mine = {"first": np.s_[:, :500], "w": np.s_[:500], "norm": np.s_[:]}
            if self.rank:
                mine |= {"first": np.s_[:, 500:], "w": np.s_[500:]}
            self.model[name].copy_(tensor[mine[name]])
            self.faults("copy")

    def holding(self):
        """Return the version that the tensors hold whole, byte by byte; None if they hold none."""
        mine = {name: tensor.detach().numpy() for name, tensor in self._tensors.items()}
        for version in range(1, 10):
            wanted = share(version, self.rank)
            if all(mine[name].tobytes() == wanted[name].tobytes() for name in NAMES):
                return version
        return None

    def obey(self, calls):
        """Do what the test asks for, by name, until it says that this is the end."""
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{self.directory}/.ask.{self.rank}")
            server.listen()
            os.rename(f"{self.directory}/.ask.{self.rank}", f"{self.directory}/ask.{self.rank}")
            while True:
                with server.accept()[0] as line:
                    word = line.recv(100).decode()
                    if word == "end":
                        return
                    line.sendall(json.dumps(calls[word]()).encode())


def serve(rank, num_ranks, framework, directory):
    """A rank that a status cell controls, and that a publisher fills."""
    self = Rank(framework, directory, rank)
    engine = FaultyEngine(self.model, self.faults)
    way = {"layout": fw.ModelLayout.from_json(LAYOUT)}
    target = self.model
    if framework == "torch":
        target, way = self.load_weights, {"framework": "torch"}
    else:
        go_wrong_while_copying(self.faults)

    def told():
        try:
            with engine.request(timeout_seconds=0.01) as version:
                return {"serves": version, "holds": self.holding()}
        except FlyweightError:
            return {"serves": None, "holds": self.holding()}

    replica = fw.Replica(
        target,
        f"unix:{directory}/policy",
        name="engine",
        rank=rank,
        world_size=num_ranks,
        **way,
    )
    with (
        replica,
        Worker(
            engine,
            replica,
            f"{directory}/cell",
            rank=rank,
            num_ranks=num_ranks,
            should_follow=False,
        ),
    ):
        self.obey({"tell": told})


def manage(rank, num_ranks, framework, directory, strategy="ipc_snapshot"):
    """A rank with FastDeploy's manager, on snapshots or a publisher that it takes its share of."""
    from paddle import distributed

    from flyweight.engines.fastdeploy import (
        DynamicWeightManager,
        FastDeployHooks,
        FastDeployOptions,
    )

    self = Rank(framework, directory, rank)
    config = SimpleNamespace(
        load_config=SimpleNamespace(load_strategy=strategy),
        model_config=SimpleNamespace(model=f"{directory}/run"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=num_ranks,
            tensor_parallel_rank=rank,
            tp_group=distributed.get_group(0),
        ),
    )

    class Hooks(FastDeployHooks):
        def drop_cache(self):
            faults("drop_cache")

    faults = self.faults
    options = FastDeployOptions(
        layout=fw.ModelLayout.from_json(LAYOUT),
        timeout_seconds=LIMIT,
        address=None if strategy == "ipc_snapshot" else f"unix:{directory}/policy",
    )
    manager = DynamicWeightManager(
        config, self.model, rank, options=options, hooks=Hooks(config.parallel_config)
    )

    def told(error=""):
        return {"health": manager.health, "version": manager.version, "holds": self.holding(), "error": error}  # fmt: skip

    def tried(*calls):
        try:
            for call in calls:
                call()
        except FlyweightError as error:
            return told(f"{type(error).__name__}: {error}")
        return told()

    with manager:
        self.obey(
            {
                "tell": told,
                "update": lambda: tried(manager.update_parameters, manager.finalize_update),
                "load 2": lambda: tried(lambda: manager.update_weights_by_rdma(2)),
                "load 3": lambda: tried(lambda: manager.update_weights_by_rdma(3)),
                "clear": lambda: tried(manager.clear_parameters),
                "clear with groups": lambda: tried(lambda: manager.clear_parameters(0, True)),
                "restart": lambda: tried(
                    lambda: manager.update_parameters(0, True), manager.finalize_update
                ),
            }
        )


# The tests' side.


def ask(directory, word, ranks=(0, 1)):
    """Ask ranks at once, and return their answers."""
    lines = []
    for rank in ranks:
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(2 * LIMIT)
        line.connect(f"{directory}/ask.{rank}")
        line.sendall(word.encode())
        lines.append(line)
    answers = []
    for line in lines:
        with line:
            data = b"".join(iter(lambda: line.recv(4096), b""))  # noqa: B023
            answers.append(json.loads(data) if data else None)
    return answers


@contextmanager
def running(function, framework, directory, threads, *more):
    """Two ranks in processes of their own, to the end of the block; yields whom to ask in the end."""
    words = function, framework, directory, *more
    done = threads.submit(run_ranks, 2, __file__, *words, framework=framework, check=False)
    alive = [0, 1]
    try:
        until(
            lambda: done.done() or all((directory / f"ask.{rank}").exists() for rank in alive), 60
        )
        assert not done.done(), done.result().stderr
        yield alive
    finally:
        if not done.done():
            ask(directory, "end", alive)
        ended = done.result(LIMIT)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def asked(control, signal_, **options):
    return control.wait(control.start(signal_, timeout_seconds=LIMIT, **options), 2 * LIMIT)


@contextmanager
def trained(framework, directory, threads):
    """Two ranks, their controller, and a function that publishes a version for them."""
    trainer = weights(0)

    def publish(version):
        for name, array in weights(version).items():
            trainer[name][...] = array
        publisher.publish(version, timeout_seconds=LIMIT)

    with (
        fw.Publisher(trainer, f"unix:{directory}/policy", keep="memory") as publisher,
        running("serve", framework, directory, threads) as alive,
        Control(directory / "cell", 2) as control,
    ):
        publish(1)
        assert asked(control, Signal.UPDATE).ending == "done"
        yield publish, control, alive


def killed(directory, control, alive, step, gone):
    """Kill a rank inside a step of an update; return the state of the other one after it."""
    (left,) = {0, 1} - {gone}
    (directory / f"{step}.{gone}").write_text("hang")
    operation = control.start(Signal.UPDATE, timeout_seconds=3 * LIMIT)
    until((directory / "reached").exists)
    alive.remove(gone)
    os.kill(control.status().ranks[gone].pid, signal.SIGKILL)
    ended = control.wait(operation, LIMIT)
    assert ended.ending == "failed"
    assert f"rank {gone}" in ended.reason
    until(lambda: control.status().ranks[left].step == "")
    assert (control.status().state, control.status().version) == (State.FAILED, None)
    return control.status().ranks[left]


@pytest.mark.parametrize(("framework", "gone"), [("torch", 1), ("paddle", 0)])
def test_two_ranks_commit_together_or_not_at_all(framework, gone, tmp_path, threads):
    with trained(framework, tmp_path, threads) as (publish, control, alive):
        # A good update is committed on both.
        assert (control.status().state, control.status().version) == (State.SERVING, 1)
        assert ask(tmp_path, "tell") == [{"serves": 1, "holds": 1}] * 2

        # A restore finds both as they should be; it does not wait for a newer version.
        assert asked(control, Signal.RESTORE).ending == "done"

        # One rank cannot even begin: both keep the old version, and serve it.
        publish(2)
        (tmp_path / "drop_cache.1").write_text("raise")
        ended = asked(control, Signal.UPDATE)
        assert ended.ending == "failed"
        assert "rank 1" in ended.reason
        assert "drop_cache went wrong" in ended.reason
        assert ask(tmp_path, "tell") == [{"serves": 1, "holds": 1}] * 2
        (tmp_path / "drop_cache.1").unlink()
        assert asked(control, Signal.UPDATE).ending == "done"
        assert ask(tmp_path, "tell") == [{"serves": 2, "holds": 2}] * 2

        # One rank fails half-way: nobody serves, though the other holds the new version whole.
        publish(3)
        (tmp_path / "copy.1").write_text("raise")
        ended = asked(control, Signal.UPDATE)
        assert ended.ending == "failed"
        assert "copy went wrong" in ended.reason
        status = control.status()
        assert [each.state for each in status.ranks] == [State.FAILED] * 2
        assert all("copy went wrong" in each.reason for each in status.ranks)
        first, second = ask(tmp_path, "tell")
        assert (first["serves"], second["serves"]) == (None, None)
        assert second["holds"] == (None if framework == "torch" else 3)  # a loader was interrupted
        (tmp_path / "copy.1").unlink()
        assert asked(control, Signal.UPDATE).ending == "done"
        assert ask(tmp_path, "tell") == [{"serves": 3, "holds": 3}] * 2

        publish(4)
        left = killed(tmp_path, control, alive, "copy", gone)
        assert (left.state, left.version) == (State.FAILED, None)
        assert f"rank {gone}" in left.reason
        assert ask(tmp_path, "tell", alive)[0]["serves"] is None


def test_a_rank_killed_before_anything_was_touched_leaves_the_other_its_version(tmp_path, threads):
    """It holds version 1 whole. The engine has failed all the same: one of its ranks is gone."""
    with trained("torch", tmp_path, threads) as (publish, control, alive):
        publish(2)
        left = killed(tmp_path, control, alive, "drop_cache", 1)
        assert (left.state, left.version) == (State.SERVING, 1)
        assert ask(tmp_path, "tell", alive) == [{"serves": 1, "holds": 1}]


def test_two_ranks_of_the_old_manager_commit_together_or_not_at_all(tmp_path, threads):  # C15, C24
    run = tmp_path / "run"

    def told(health, version, holds):
        return {"health": health, "version": version, "holds": holds, "error": ""}

    fw.save(weights(1), run, version=1)
    with running("manage", "paddle", tmp_path, threads):
        assert ask(tmp_path, "tell") == [told("serving", 1, 1)] * 2
        fw.save(weights(2), run, version=2)
        assert ask(tmp_path, "update") == [told("serving", 2, 2)] * 2

        fw.save(weights(3), run, version=3)
        (tmp_path / "drop_cache.1").write_text("raise")
        answers = ask(tmp_path, "update")
        assert all("drop_cache went wrong" in each.pop("error") for each in answers)
        assert answers == [{"health": "serving", "version": 2, "holds": 2}] * 2

        # What only the second rank reads is damaged: the first has read all of its share.
        (tmp_path / "drop_cache.1").unlink()
        (data,) = (run / "v0000000003").glob("*.safetensors")
        last = weights(3)["w"][-1].tobytes()
        at = data.read_bytes().index(last)
        flip(data, at)
        answers = ask(tmp_path, "update")
        assert all("ChecksumMismatch" in each["error"] for each in answers)
        assert [(each["health"], each["version"]) for each in answers] == [("failed", None)] * 2
        flip(data, at)
        assert ask(tmp_path, "update") == [told("serving", 3, 3)] * 2

        # A clear that fails on one rank has failed on both.
        (tmp_path / "drop_cache.1").write_text("raise")
        answers = ask(tmp_path, "clear")
        assert all("drop_cache went wrong" in each["error"] for each in answers)
        (tmp_path / "drop_cache.1").unlink()
        assert ask(tmp_path, "tell") == [told("serving", 3, 3)] * 2

        # C16: gloo's groups have no shutdown; a clear with groups passes them over.
        answers = ask(tmp_path, "clear with groups")
        assert [(each["health"], each["error"]) for each in answers] == [("cleared", "")] * 2
        assert ask(tmp_path, "restart") == [told("serving", 3, 3)] * 2

        assert ask(tmp_path, "clear") == [told("cleared", None, None)] * 2
        assert ask(tmp_path, "update") == [told("serving", 3, 3)] * 2


def test_two_ranks_of_the_old_manager_take_a_round_or_a_snapshot_together(tmp_path, threads):
    """One replica of two ranks at the publisher; without the publisher both read the same files."""

    def told(version):
        return {"health": "serving", "version": version, "holds": version, "error": ""}

    def load_after_a_failure(version, rank):
        """Load a version; before that, one rank fails, and both keep the version before it."""
        hook = tmp_path / f"drop_cache.{rank}"
        hook.write_text("raise")
        answers = ask(tmp_path, f"load {version}")
        assert all("drop_cache went wrong" in each.pop("error") for each in answers)
        assert answers == [{"health": "serving", "version": version - 1, "holds": version - 1}] * 2
        hook.unlink()
        assert ask(tmp_path, f"load {version}") == [told(version)] * 2

    run = tmp_path / "run"
    run.mkdir()
    (run / "version.yaml").write_text("step: 1\n")
    trainer = weights(1)
    with ExitStack() as stack:
        publisher = fw.Publisher(trainer, f"unix:{tmp_path}/policy", keep="memory")
        with publisher:
            publisher.publish(1)
            stack.enter_context(running("manage", "paddle", tmp_path, threads, "rsync"))
            assert ask(tmp_path, "tell") == [told(1)] * 2
            assert len(publisher.replicas) == 1  # of two ranks
            for name, array in weights(2).items():
                trainer[name][...] = array
            publisher.publish(2)
            load_after_a_failure(2, rank=0)
        fw.save(weights(3), run, version=3)
        load_after_a_failure(3, rank=1)
    # Started again without a trainer, they meet in their process group.
    for rank in range(2):
        (tmp_path / f"ask.{rank}").unlink()
    (run / "version.yaml").write_text("step: 3\n")
    with running("manage", "paddle", tmp_path, threads, "rsync"):
        assert ask(tmp_path, "tell") == [told(3)] * 2
