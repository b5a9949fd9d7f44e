"""Tensors that a model replaces between, before and during rounds."""

from contextlib import nullcontext, suppress

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT
from flyweight.errors import (
    PlanError,
    TransferTimeout,
    VersionError,
)
from flyweight.live.replica_round import ReplicaRound
from live_rounds import asking, delayed, updated
from versioned_models import holds, weights


def test_a_model_whose_tensors_were_replaced_is_published_as_it_is_now(address, threads):
    model, engine = weights(1), weights(9)
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        updated(threads, publisher, replica, 1)
        model.update(weights(2))
        updated(threads, publisher, replica, 2)
        assert holds(engine, 2)
        engine.update(weights(77))  # and so are the engine's
        model.update(weights(3))
        updated(threads, publisher, replica, 3)
        assert holds(engine, 3)
        model["more"] = np.zeros(3)
        with pytest.raises(PlanError, match="'more'"):
            publisher.publish(4)


def test_a_transposed_weight_is_published_as_it_is_now(address, threads):
    torch = pytest.importorskip("torch")
    model, engine = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        updated(threads, publisher, replica, 1)
        model.weight.data = model.weight.data.t()  # the same place, shape and dtype
        updated(threads, publisher, replica, 2)
        assert torch.equal(engine.weight, model.weight)
        engine.weight.data = engine.weight.data.t()
        updated(threads, publisher, replica, 3)
        assert torch.equal(engine.weight, model.weight)


def test_an_array_that_was_reshaped_in_place_is_another(address):
    model = {"w": np.arange(6.0)}
    with fw.Publisher(model, address) as publisher:
        model["w"].shape = (2, 3)
        with pytest.raises(PlanError, match="other tensors"):
            publisher.publish(1)


def test_a_replica_whose_tensors_were_replaced_holds_nothing(address):
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        publisher.publish(1)
        replica.update(1, timeout_seconds=LIMIT)
        engine.update(weights(60))
        with pytest.raises(fw.FlyweightError, match="no whole version"):
            replica.check_servable()
        assert replica.update(1, timeout_seconds=LIMIT).version == 1
        assert holds(engine, 1)


def replaced(module, how):
    """Put other memory in the place of a parameter, as an engine that packs or casts one does."""
    torch = pytest.importorskip("torch")
    fresh = torch.full_like(module.weight, -7, requires_grad=False)
    if how == "data":
        module.weight.data = fresh
    else:
        module.weight = torch.nn.Parameter(fresh)


@pytest.mark.parametrize("how", ["data", "parameter"])
@pytest.mark.parametrize("hold", [True, False])
def test_tensors_replaced_while_an_update_waits_are_asked_for_anew(address, threads, how, hold):
    torch = pytest.importorskip("torch")
    model, engine = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    with (
        fw.Publisher(model, address, hold=hold) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        asking(publisher)
        was = engine.weight.detach()
        before = was.clone()
        replaced(engine, how)
        assert len(publisher.publish(1, num_replicas=1).failed) == 1  # it declined, and came anew
        assert torch.equal(was, before)  # nobody's memory by now
        if not hold:
            asking(publisher)
            assert publisher.publish(2, num_replicas=1).failed == ()
        assert future.result(LIMIT).version == (1 if hold else 2)
        assert torch.equal(engine.weight, model.weight)
        replica.check_servable()


def test_tensors_replaced_under_who_stands_still_are_not_written_and_the_next_update_is_right(
    address,
):
    torch = pytest.importorskip("torch")
    model, engine = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        publisher.publish(1)
        replica.update(1, timeout_seconds=LIMIT)
        publisher.publish(2)
        with pytest.raises(VersionError, match="replaced.* before version 2"):
            replica.update(before=lambda version: replaced(engine, "data"), timeout_seconds=LIMIT)
        assert (engine.weight == -7).all()
        assert (replica.state, replica.version) == ("empty", None)
        assert replica.update(before=lambda version: None, timeout_seconds=LIMIT).version == 2
        assert torch.equal(engine.weight, model.weight)


def test_tensors_replaced_while_a_round_runs_fail_it(address, monkeypatch):
    torch = pytest.importorskip("torch")
    model, engine = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        publisher.publish(1)
        with monkeypatch.context() as patch:
            delayed(patch, ReplicaRound, "commit", 0.1)
            delayed(patch, ReplicaRound, "commit", 0, lambda *args: replaced(engine, "data"))
            with pytest.raises(VersionError, match="replaced.* while version 1"):
                replica.update(timeout_seconds=LIMIT)
        assert (replica.state, replica.version) == ("failed", None)
        assert replica.update(timeout_seconds=LIMIT).version == 1
        assert torch.equal(engine.weight, model.weight)


def test_a_version_is_not_claimed_for_tensors_that_were_replaced(address):
    torch = pytest.importorskip("torch")
    model, engine = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        publisher.publish(1)
        replica.update(timeout_seconds=LIMIT)
        replaced(engine, "data")
        assert (replica.state, replica.version) == ("empty", None)
        with pytest.raises(VersionError, match="replaced"):
            replica.check_servable()
        for update in range(2):  # in a second one nothing has to be agreed anew
            with pytest.raises(TransferTimeout) if update else nullcontext():
                replica.update(timeout_seconds=0.3 if update else LIMIT)
            assert (replica.state, replica.version) == ("ready", 1)


def test_a_version_is_held_whatever_a_request_does_to_buffers_that_are_not_saved(address):
    torch = pytest.importorskip("torch")

    class Rotary(torch.nn.Linear):
        def forward(self, x):
            self.register_buffer("cos", torch.ones(len(x)), persistent=False)
            return super().forward(x)

    model, engine = Rotary(4, 4), Rotary(4, 4)
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        publisher.publish(1)
        replica.update(timeout_seconds=LIMIT)
        for length in (2, 3):
            engine(torch.ones(length, 4))
            replica.check_servable()


def test_tensors_replaced_in_a_short_round_are_not_claimed_either(address, monkeypatch):
    """They are looked at once in such a round, and again whenever the version is asked for."""
    torch = pytest.importorskip("torch")
    model, engine = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        publisher.publish(1)
        with monkeypatch.context() as patch:
            delayed(patch, ReplicaRound, "commit", 0, lambda *args: replaced(engine, "data"))
            with suppress(VersionError):  # if the round was not so short
                replica.update(timeout_seconds=LIMIT)
        assert replica.version is None
        with pytest.raises(VersionError, match="replaced"):
            replica.check_servable()
        assert replica.update(timeout_seconds=LIMIT).version == 1
        assert torch.equal(engine.weight, model.weight)
        replica.check_servable()
