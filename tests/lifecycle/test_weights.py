"""Weights at rest as a source: told apart by content, believed only as long as they are there."""

import shutil
from contextlib import ExitStack

import numpy as np
import pytest
import safetensors.numpy
import torch

import flyweight as fw
from child_processes import LIMIT, until
from conftest import flip
from fakes import FakeRendezvousStore
from flyweight.engines.strategies import FileWeights
from flyweight.errors import (
    ChecksumMismatch,
    PeerLost,
    PlanError,
    ShapeMismatch,
    TransferTimeout,
    VersionError,
)
from flyweight.events import listening
from flyweight.lifecycle.engine import ModelEngine
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import State
from flyweight.lifecycle.weights import StoredWeights
from flyweight.ports import UpdateOptions
from flyweight.ranks.agreement import RankAgreement
from flyweight.ranks.rendezvous import Rendezvous

WAY = {"timeout_seconds": LIMIT, "before": lambda version: None, "is_over": lambda: False}
SOON = {"timeout_seconds": 0.6}
"""For what is waited for in vain."""


def take(weights, version=None, **how):
    """Take a version as an engine's update does."""
    return weights.take(UpdateOptions(version=version, **how))


def model(value=0, shape=(64, 64)):
    return {"w": np.full(shape, value, np.float32)}


def put(directory, value, shape=(64, 64)):
    """Write files that have no version."""
    directory.mkdir(exist_ok=True)
    safetensors.numpy.save_file(model(value, shape), directory / "model.safetensors")


KINDS = pytest.mark.parametrize("make", [StoredWeights, FileWeights])


@KINDS
@pytest.mark.parametrize("version", [None, 3])
def test_a_session_is_of_what_was_loaded_and_the_same_for_copies(tmp_path, make, version):
    def loaded(directory, value):
        if version is None:
            put(directory, value)
        else:
            fw.save(model(value), directory, version=version)
        weights = make(model(), directory)
        assert weights.session == ""
        take(weights, **WAY)
        assert weights.version == (0 if version is None else version)
        return weights.session

    first, copy, other = loaded(tmp_path / "a", 1), loaded(tmp_path / "b", 1), loaded(tmp_path / "c", 2)  # fmt: skip
    assert first == copy
    assert first not in ("", other)


def test_ranks_do_not_keep_different_files_that_have_no_version(tmp_path, threads):
    """Both held version 0; one has loaded the new files, also as 0, and the other could not."""
    store, models, machines = FakeRendezvousStore(), [model(), model()], []
    with ExitStack() as stack:
        for rank in range(2):
            put(tmp_path / str(rank), 1)
            ranks = RankAgreement(Rendezvous(rank, 2, store, "pair"))
            stack.callback(threads.submit, ranks.close)  # at once: each waits for the other
            weights = FileWeights(models[rank], tmp_path / str(rank))
            machines.append(Operations(ModelEngine(models[rank]), weights, ranks))

        def update():
            futures = [threads.submit(m.update, timeout_seconds=LIMIT) for m in machines]
            return [future.exception(LIMIT) for future in futures]

        assert update() == [None, None]
        assert [operations.state for operations in machines] == [State.SERVING] * 2
        put(tmp_path / "0", 2)
        put(tmp_path / "1", 2, (32, 64))
        assert "ShapeMismatch" in str(update()[0])
        assert [operations.state for operations in machines] == [State.FAILED] * 2
        put(tmp_path / "1", 2)
        assert update() == [None, None]
        assert [operations.state for operations in machines] == [State.SERVING] * 2
        assert all((each["w"] == 2).all() for each in models)


@KINDS
def test_a_version_is_not_held_by_tensors_that_came_later(tmp_path, make):
    layer = torch.nn.Linear(8, 8)
    torch.nn.init.ones_(layer.weight)
    fw.save(layer, tmp_path, version=7)
    state = dict(layer.state_dict(keep_vars=True))
    weights = make(state, tmp_path)
    take(weights, 7, **WAY)
    assert weights.version == 7
    state["weight"] = torch.nn.Parameter(torch.zeros(8, 8))
    assert (weights.version, weights.session) == (None, "")
    take(weights, 7, **WAY)
    assert (state["weight"] == 1).all()
    state["weight"].data = torch.zeros(8, 8)  # the same parameter, at another place
    assert weights.version is None
    take(weights, **WAY)
    assert (state["weight"] == 1).all()


def test_a_machine_fills_a_parameter_that_was_replaced(tmp_path):
    layer = torch.nn.Linear(8, 8)
    torch.nn.init.ones_(layer.weight)
    fw.save(layer, tmp_path, version=7)
    operations = Operations(ModelEngine(layer), StoredWeights(layer, tmp_path))
    operations.update(7)
    layer.weight = torch.nn.Parameter(torch.zeros(8, 8))
    operations.update(7)
    assert (operations.state, operations.version) == (State.SERVING, 7)
    assert (layer.weight == 1).all()


@KINDS
def test_what_does_not_fit_leaves_the_version_that_is_held(tmp_path, make):
    fw.save(model(1), tmp_path, version=1)
    target = model()
    weights = make(target, tmp_path)
    take(weights, **WAY)
    held = weights.version, weights.session
    fw.save(model(2, (32, 64)), tmp_path, version=2)
    with pytest.raises(ShapeMismatch):
        take(weights, **WAY)
    assert (weights.version, weights.session) == held
    assert (target["w"] == 1).all()


@KINDS
def test_a_version_that_is_held_is_not_read_again_unless_it_is_another(tmp_path, make):
    fw.save(model(1), tmp_path / "run", version=1)
    target, begun = model(), []
    weights, way = make(target, tmp_path / "run"), {**WAY, "before": begun.append}
    report = take(weights, 1, **way)
    assert take(weights, 1, **way) is report
    with pytest.raises(TransferTimeout, match="newer"):
        take(weights, **way | SOON)
    assert take(weights, may_keep=True, **way) is report
    shutil.rmtree(tmp_path / "run")
    with pytest.raises((VersionError, FileNotFoundError)):  # nothing confirms it
        take(weights, 1, **way)
    with pytest.raises((TransferTimeout, FileNotFoundError)):
        take(weights, may_keep=True, **way | SOON)
    assert weights.version == 1
    fw.save(model(5), tmp_path / "run", version=1)  # another run, of the same numbers
    take(weights, 1, **way)
    assert (begun, target["w"][0, 0]) == ([1, 1], 5)


def test_a_tensor_replaced_while_it_is_read_is_not_held(tmp_path):
    fw.save(model(1), tmp_path, version=1)
    target = model()
    weights = StoredWeights(target, tmp_path, partial_over=1)

    def swap(event):
        if event.kind == "load.done":
            target.update(model(7))

    with listening(swap), pytest.raises(VersionError, match="replaced"):
        take(weights, **WAY)
    assert weights.version is None
    take(weights, **WAY)
    assert (weights.version, target["w"][0, 0]) == (1, 1)


def test_values_that_are_read_beside_tensors_do_not_make_them_others(tmp_path):
    fw.save({**model(1), "step": 5000}, tmp_path, version=1)
    target = {**model(), "step": 0}
    weights = StoredWeights(target, tmp_path)
    take(weights, **WAY)
    assert (weights.version, target["step"]) == (1, 5000)


def test_a_tensor_replaced_while_a_machine_follows_is_not_served(address, threads):
    target, source = model(), model(1)
    with (
        fw.Publisher(source, address, keep="memory") as publisher,
        fw.Replica(target, address) as replica,
    ):
        publisher.publish(1)
        operations = Operations(ModelEngine(target), replica)
        operations.update(timeout_seconds=LIMIT)
        way = {"timeout_seconds": 20, "is_over": lambda: False}
        future = threads.submit(operations.follow, **way)
        until(lambda: publisher.waiting)
        target.update(model(7))
        source["w"][...] = 2
        publisher.publish(2)
        with pytest.raises(VersionError, match="replaced"):
            future.result(LIMIT)
        assert (operations.state, operations.version) == (State.FAILED, None)
        assert operations.follow(**way)
        assert (operations.state, operations.version) == (State.SERVING, 2)
        assert (target["w"] == 2).all()


def test_a_machine_does_not_serve_what_its_update_found_replaced(tmp_path):
    fw.save(model(1), tmp_path, version=1)
    target = model()
    operations = Operations(ModelEngine(target), StoredWeights(target, tmp_path))
    operations.update()
    target.update(model(7))
    with pytest.raises(VersionError, match="version 9"):
        operations.update(9)
    assert (operations.state, operations.version) == (State.FAILED, None)
    operations.update()
    assert (operations.state, target["w"][0, 0]) == (State.SERVING, 1)


# Parts, laid over a version that the caller vouches for.


def pair(value):
    return {"a": np.full(1 << 18, value, np.float32), "b": np.full(64, value, np.float32)}


def part(name, value):
    return {name: pair(value)[name]}


def test_tensors_that_a_load_tore_are_not_vouched_for(tmp_path):
    fw.save(pair(1), tmp_path, version=1)
    target = pair(0)
    weights = StoredWeights(target, tmp_path, partial_over=1)
    take(weights, **WAY)
    fw.save(pair(2), tmp_path, version=2)
    (data,) = (tmp_path / "v0000000002").glob("*.safetensors")
    flip(data, 1 << 19)
    with pytest.raises(ChecksumMismatch):
        take(weights, **WAY)
    fw.save(part("b", 3), tmp_path, version=3)
    with pytest.raises(PlanError, match="'a'"):
        take(weights, **WAY)
    assert weights.version is None
    take(weights, 1, **WAY)  # all of it is what is vouched for
    take(weights, 3, **WAY)
    assert (weights.version, target["a"][0], target["b"][0]) == (3, 1, 3)


def test_a_part_is_not_laid_over_another_version_than_the_one_vouched_for(tmp_path):
    fw.save(pair(2), tmp_path, version=2)
    fw.save(part("b", 3), tmp_path, version=3)
    target = pair(1)
    weights = StoredWeights(target, tmp_path, partial_over=1)
    take(weights, 2, **WAY)
    with pytest.raises(PlanError, match="'a'"):
        take(weights, 3, **WAY)
    assert (weights.version, target["b"][0]) == (2, 2)


def test_parts_follow_each_other_unless_one_would_keep_what_another_filled(tmp_path):
    for version, name in ((2, "b"), (3, "b"), (4, "a")):
        fw.save(part(name, version), tmp_path, version=version)
    target = pair(1)
    weights = StoredWeights(target, tmp_path, partial_over=1)
    take(weights, 2, **WAY)
    take(weights, 3, **WAY)
    with pytest.raises(PlanError, match="'b'"):
        take(weights, 4, **WAY)
    assert (weights.version, target["a"][0], target["b"][0]) == (3, 1, 3)


def test_files_without_a_version_are_not_answered_by_one_that_they_never_had(tmp_path):
    put(tmp_path / "run", 1)
    weights = StoredWeights(model(), tmp_path / "run")
    take(weights, **WAY)
    put(tmp_path / "run", 2)
    with pytest.raises(VersionError):
        take(weights, 0, **WAY)


# A publisher's, or else files.


@pytest.fixture
def replica(address, tmp_path):
    """A replica that falls back on snapshots, and its model."""
    target = model()
    with fw.Replica(target, address, fallback=[tmp_path / "store"]) as replica:
        yield replica, target


def test_a_newer_snapshot_is_taken_while_no_publisher_is_there(replica, address, tmp_path):
    weights, target = replica
    fw.save(model(1), tmp_path / "store", version=1)
    operations = Operations(ModelEngine(target), weights)
    operations.update()
    fw.save(model(2), tmp_path / "store", version=2)
    operations.update()  # by a request
    assert (operations.version, target["w"][0, 0]) == (2, 2)
    fw.save(model(3), tmp_path / "store", version=3)
    assert operations.follow(timeout_seconds=LIMIT, is_over=lambda: False)  # or without one
    assert (operations.version, target["w"][0, 0]) == (3, 3)
    with pytest.raises(PeerLost, match="publisher"):
        operations.follow(timeout_seconds=0.4, is_over=lambda: False)
    with fw.Publisher(model(6), address, keep="memory") as publisher:
        publisher.publish(6)
        operations.update()
        assert (operations.version, target["w"][0, 0]) == (6, 6)
        fw.save(model(7), tmp_path / "store", version=7)
        # The publisher decides while it is there.
        assert not operations.follow(timeout_seconds=0.4, is_over=lambda: False)
    assert operations.follow(timeout_seconds=LIMIT, is_over=lambda: False)
    assert (operations.version, target["w"][0, 0]) == (7, 7)


def test_an_older_snapshot_is_not_taken_over_a_publishers_version(replica, address, tmp_path):
    weights, target = replica
    with fw.Publisher(model(6), address, keep="memory") as publisher:
        publisher.publish(6)
        take(weights, **WAY)
    fw.save(model(5), tmp_path / "store", version=5)
    with pytest.raises(PeerLost):
        take(weights, **WAY | SOON)
    assert (weights.version, target["w"][0, 0]) == (6, 6)


def test_the_session_is_that_of_what_was_written_last(replica, address, tmp_path):
    weights, _ = replica
    plain = StoredWeights(model(), tmp_path / "store")
    fw.save(model(1), tmp_path / "store", version=1)
    take(plain, **WAY)
    take(weights, **WAY)
    assert weights.session == plain.session
    with (
        fw.Publisher(model(2), address, keep="memory") as publisher,
        fw.Replica(model(), address) as other,
    ):
        publisher.publish(2)
        other.update(timeout_seconds=LIMIT)
        take(weights, **WAY)
        assert weights.session == other.session != ""
    fw.save(model(3), tmp_path / "store", version=3)
    take(plain, **WAY)
    take(weights, **WAY)
    assert (weights.version, weights.session) == (3, plain.session)


def test_a_snapshot_that_does_not_fit_leaves_a_publishers_version_served(
    replica, address, tmp_path
):
    weights, target = replica
    operations = Operations(ModelEngine(target), weights)
    with fw.Publisher(model(1), address, keep="memory") as publisher:
        publisher.publish(1)
        operations.update(timeout_seconds=LIMIT)
    fw.save(model(2, (32, 64)), tmp_path / "store", version=2)
    with pytest.raises(ShapeMismatch):
        operations.update(timeout_seconds=LIMIT)
    assert (operations.state, operations.version) == (State.SERVING, 1)
    assert (target["w"] == 1).all()
