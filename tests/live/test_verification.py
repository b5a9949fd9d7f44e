"""A version is what the trainer had when it published: bytes that differ are detected by digests."""

import threading

import numpy as np
import pytest

import flyweight as fw
from child_processes import Child
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
        future = threads.submit(replica.update, timeout_seconds=5)
        report = publisher.publish(2, num_replicas=1)
        with pytest.raises(
            DigestMismatch, match="other bytes than were published in 1 tensors: 'a'"
        ):
            future.result(10)
        assert isinstance(report.replicas[0].error, DigestMismatch)
        assert (replica.version, replica.state) == (None, "failed")
        with pytest.raises(VersionError, match="failed and holds no whole version"):
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
        for version in range(2, 22):  # on a busy machine no step may fall into a round
            future = threads.submit(replica.update, timeout_seconds=20)
            report = publisher.publish(version, num_replicas=1)
            error = future.exception(20)
            if error is not None:
                break
        stop.set()
        stepping.result(10)
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
        replica.update(1, timeout_seconds=10)
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
            future = threads.submit(replica.update, timeout_seconds=10)
            report = publisher.publish(1, num_replicas=1)
            assert isinstance(report.failed[0].error, DigestMismatch)
            with pytest.raises(DigestMismatch, match="other bytes than were published"):
                future.result(10)
            assert replica.state == "failed"
        future = threads.submit(replica.update, timeout_seconds=10)
        assert not publisher.publish(2, num_replicas=1).failed
        future.result(10)
        assert holds(engine, 2)


@pytest.mark.parametrize("size", SIZES)
def test_one_tensor_here_and_two_there_must_hold_the_same(address, threads, size):
    shared = np.zeros(size)
    source = {"a": np.full(size, 1.0), "b": np.full(size, 2.0)}
    with (
        fw.Publisher(source, address) as publisher,
        fw.Replica({"a": shared, "b": shared}, address) as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=10)
        assert publisher.publish(1, num_replicas=1).failed
        with pytest.raises(DigestMismatch):
            future.result(10)
        source["a"][:] = 2.0
        future = threads.submit(replica.update, timeout_seconds=10)
        assert not publisher.publish(2, num_replicas=1).failed
        assert future.result(10).version == 2
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
        future = threads.submit(replica.update, timeout_seconds=10)
        assert publisher.publish(1, num_replicas=1).failed
        with pytest.raises(PlanError, match="several at the publisher, and nothing is verified"):
            future.result(10)
        assert not shared.any(), "nothing was touched"


def test_sides_that_digest_in_two_ways_do_not_agree(address):
    engine = weights(50)
    with Child(publisher_that_lies, address, lambda b: {"digest_kind": "words"}) as child:
        with fw.Replica(engine, address) as replica:
            with pytest.raises(DigestMismatch):
                replica.update(timeout_seconds=10)
            assert replica.state == "failed"
        child.result()
