"""A version is what the trainer had when it published: bytes that differ are detected by digests."""

import threading

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child
from flyweight.errors import (
    DigestMismatch,
    PlanError,
    VersionError,
)
from flyweight.live import messages
from flyweight.live.connection import Connection
from flyweight.live.running_round import RunningRound
from live_rounds import SIZES, call_before, publisher_that_lies, updated
from versioned_models import assign, holds, weights


def test_one_tensor_here_and_two_that_differ_there_are_not_served(address, threads):
    shared = np.zeros(4)
    source = {"a": np.ones(4), "b": np.ones(4)}
    with (
        fw.Publisher(source, address) as publisher,
        fw.Replica({"a": shared, "b": shared}, address) as replica,
    ):
        updated(threads, publisher, replica, 1)
        source["b"][2] = 3
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        report = publisher.publish(2, num_replicas=1)
        with pytest.raises(DigestMismatch, match="1 tensors: 'a'"):
            future.result(LIMIT)
        assert isinstance(report.replicas[0].error, DigestMismatch)
        assert (replica.version, replica.state) == (None, "failed")
        with pytest.raises(VersionError, match="no whole version"):
            replica.check_servable()
        source["b"][:] = source["a"][:]  # a whole update makes it good again
        updated(threads, publisher, replica, 3)
        replica.check_servable()


def test_a_trainer_that_steps_under_its_own_publish_is_found_out(address, threads):
    """C29: sharing the trainer's memory must not let a step tear what is served."""
    torch = pytest.importorskip("torch")
    model = {"w": torch.zeros(64 << 20, dtype=torch.uint8).share_memory_()}
    engine = {"w": torch.zeros(64 << 20, dtype=torch.uint8)}
    stop = threading.Event()

    def step():
        while not stop.is_set():
            model["w"].add_(1)

    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        updated(threads, publisher, replica, 1)
        stepping = threads.submit(step)
        try:
            for version in range(2, 1000):  # on a busy machine no step may fall into a round
                future = threads.submit(replica.update, timeout_seconds=LIMIT)
                report = publisher.publish(version, num_replicas=1)
                error = future.exception(LIMIT)
                if error is not None:
                    break
        finally:
            stop.set()
        stepping.result(LIMIT)
        assert isinstance(error, DigestMismatch)
        assert report.failed
        assert replica.state == "failed"


def test_memory_of_the_host_is_digested_by_xxh3_and_files_by_what_they_have(
    address, threads, tmp_path, monkeypatch
):
    kinds, send = [], Connection.send

    def watched(self, message, to=b""):
        if isinstance(message, messages.Begin):
            kinds.append(message.digest_kind)
        send(self, message, to)

    monkeypatch.setattr(Connection, "send", watched)
    engine = weights(5)
    fw.save(weights(1), tmp_path, version=1)
    with (
        fw.Publisher(weights(2), address, store=tmp_path) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        replica.update(1, timeout_seconds=LIMIT)
        assert holds(engine, 1)
        updated(threads, publisher, replica, 2)
        assert holds(engine, 2)
    assert kinds == ["words", "xxh3"]


@pytest.mark.parametrize("transport", ["host", "auto"])
def test_a_step_between_digest_and_copy_is_found_out(address, threads, monkeypatch, transport):
    """C29: one tensor is the old one, another the new one, and no single copy is torn."""
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address, transport=transport) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        with monkeypatch.context() as patch:
            call_before(patch, RunningRound, "begin", lambda: assign(model, 2))
            future = threads.submit(replica.update, timeout_seconds=LIMIT)
            report = publisher.publish(1, num_replicas=1)
            assert isinstance(report.failed[0].error, DigestMismatch)
            with pytest.raises(DigestMismatch, match="other bytes"):
                future.result(LIMIT)
            assert replica.state == "failed"
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        assert not publisher.publish(2, num_replicas=1).failed
        future.result(LIMIT)
        assert holds(engine, 2)


@pytest.mark.parametrize("num_between", [0, 400], ids=["neighbours", "apart"])
@pytest.mark.parametrize("size", SIZES)
def test_one_tensor_here_and_two_there_must_hold_the_same(address, threads, size, num_between):
    """Small tensors are digested many at a time, and those apart not together."""
    shared = np.zeros(size)
    between = {f"aa.{number}": np.ones(1000) for number in range(num_between)}
    source = {"a": np.full(size, 1.0), **between, "b": np.full(size, 2.0)}
    target = {"a": shared, **{name: np.zeros(1000) for name in between}, "b": shared}
    with fw.Publisher(source, address) as publisher, fw.Replica(target, address) as replica:
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        assert publisher.publish(1, num_replicas=1).failed
        with pytest.raises(DigestMismatch):
            future.result(LIMIT)
        source["a"][:] = 2.0
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        assert not publisher.publish(2, num_replicas=1).failed
        assert future.result(LIMIT).version == 2
        assert (shared == 2.0).all()


@pytest.mark.parametrize("size", SIZES)
def test_one_tensor_here_and_two_there_are_refused_where_nothing_is_verified(
    address, threads, size
):
    shared = np.zeros(size)
    source = {"a": np.full(size, 1.0), "b": np.full(size, 2.0)}
    with (
        fw.Publisher(source, address, should_verify=False) as publisher,
        fw.Replica({"a": shared, "b": shared}, address) as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        assert publisher.publish(1, num_replicas=1).failed
        with pytest.raises(PlanError, match="nothing is verified"):
            future.result(LIMIT)
        assert not shared.any(), "nothing was touched"


def test_sides_that_digest_in_two_ways_do_not_agree(address):
    engine = weights(50)
    with Child(publisher_that_lies, address, lambda b: {"digest_kind": "words"}) as child:
        with fw.Replica(engine, address) as replica:
            with pytest.raises(DigestMismatch):
                replica.update(timeout_seconds=LIMIT)
            assert replica.state == "failed"
        child.result()
