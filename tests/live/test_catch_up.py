"""Replicas that ask between two publishes: from the held copy, a store, or an opened snapshot."""

import gc
import threading
import weakref

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, in_time, until
from flyweight.errors import (
    ChecksumMismatch,
    DigestMismatch,
    PeerFailed,
    PlanError,
    SpecError,
    TransferTimeout,
)
from flyweight.live import messages
from flyweight.live.rounds import Rounds
from flyweight.live.source import HeldCopy
from live_rounds import CONTENT, asking, call_before, refuse_catch_up_threads
from peers import FakeReplica
from versioned_models import assign, holds, weights

pytestmark = pytest.mark.usefixtures("collected")


def test_what_is_held_is_taken_at_once_whatever_the_trainer_did_since(address):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address, hold=True) as publisher:
        publisher.publish(1)
        assign(model, 33)  # the trainer steps on
        with fw.Replica(engine, address) as replica:
            report = replica.update(timeout_seconds=LIMIT)
            assert (report.version, report.origin) == (1, "held")
            assert holds(engine, 1)
            with pytest.raises(TransferTimeout):  # it has that one
                replica.update(timeout_seconds=0.1)
            assert replica.update(1).version == 1
            assign(model, 2)
            publisher.publish(2)
            assert replica.update(2, timeout_seconds=LIMIT).version == 2
            assert holds(engine, 2)


def test_a_store_gives_replicas_that_ask_late_its_newest_snapshot(address, tmp_path, threads):
    model, engine = weights(1), weights(50)
    fw.save(weights(8), tmp_path / "run", version=8)
    fw.save(weights(9), tmp_path / "run", version=9)
    with (
        fw.Publisher(model, address, store=tmp_path / "run") as publisher,
        fw.Replica(engine, address) as replica,
    ):
        report = replica.update(timeout_seconds=LIMIT)
        assert (report.version, report.origin, report.verified) == (9, "snapshot", "live")
        assert holds(engine, 9)
        assert replica.update(8, timeout_seconds=LIMIT).version == 8
        assert holds(engine, 8)
        future = threads.submit(replica.update, 10, timeout_seconds=LIMIT)
        asking(publisher)
        assign(model, 10)
        publisher.publish(10)
        assert future.result(LIMIT).version == 10
        assert holds(engine, 10)


def test_a_damaged_snapshot_is_not_served(address, tmp_path):
    engine = weights(50)
    fw.save(weights(8), tmp_path / "run", version=8)
    (part,) = (tmp_path / "run").glob("*/*.safetensors")
    data = bytearray(part.read_bytes())
    data[-100] ^= 1
    part.write_bytes(data)
    with (
        fw.Publisher(weights(1), address, store=tmp_path / "run"),
        fw.Replica(engine, address) as replica,
    ):
        with pytest.raises(ChecksumMismatch):
            replica.update(timeout_seconds=LIMIT)
        assert replica.version is None


@pytest.mark.parametrize("hold", [False, True])
def test_an_opened_snapshot_is_there_for_whoever_asks(address, tmp_path, hold):
    fw.save(weights(8), tmp_path / "run", version=8)
    with fw.open(tmp_path / "run") as stored, fw.Publisher(stored, address, hold=hold) as publisher:
        for _ in range(2):
            engine = weights(50)
            with fw.Replica(engine, address) as replica:
                assert replica.update(timeout_seconds=LIMIT).version == 8
                assert holds(engine, 8)
        with pytest.raises(SpecError, match="publish"):
            publisher.publish(9)


@pytest.mark.parametrize("should_verify", [True, False])
def test_what_is_held_is_never_served_under_the_number_of_what_was_there_before(
    address, threads, monkeypatch, should_verify
):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address, hold=True, should_verify=should_verify) as publisher:
        publisher.publish(1)
        with fw.Replica(engine, address) as replica:
            is_preparing, may_prepare = threading.Event(), threading.Event()

            def wait_for_the_next():
                is_preparing.set()
                assert may_prepare.wait(LIMIT)

            call_before(monkeypatch, Rounds, "prepare", wait_for_the_next)
            future = threads.submit(replica.update, timeout_seconds=LIMIT)
            assert is_preparing.wait(LIMIT)
            assign(model, 2)
            publisher.publish(2, timeout_seconds=0.5)
            may_prepare.set()
            assert future.result(LIMIT).version == 2
            assert holds(engine, 2)


def test_several_replicas_take_what_is_held_at_once(address, threads):
    model = weights(1)
    with fw.Publisher(model, address, hold=True) as publisher:
        publisher.publish(1)
        engines = [weights(50 + n) for n in range(6)]
        replicas = [fw.Replica(engine, address) for engine in engines]
        futures = [threads.submit(each.update, timeout_seconds=LIMIT) for each in replicas]
        assert [future.result(LIMIT).version for future in futures] == [1] * 6
        assert all(holds(engine, 1) for engine in engines)
        for each in replicas:
            each.close()


def test_values_are_those_of_their_version_also_where_it_is_held(address):
    model, engine = {"w": np.ones(3), "step": 1}, {"w": np.zeros(3), "step": 0}
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        for step in (1, 2, 3):
            model["step"] = step
            publisher.publish(step)
            replica.update(step, timeout_seconds=LIMIT)
            assert engine["step"] == step


def test_a_snapshot_that_does_not_share_what_the_model_shares_is_refused(address, tmp_path):
    fw.save({"a": np.full(4, 1.0), "b": np.full(4, 2.0)}, tmp_path / "run", version=6)
    one = np.zeros(4)
    target = {"a": np.zeros(4), "b": np.zeros(4)}
    with (
        fw.Publisher({"a": one, "b": one}, address, store=tmp_path / "run"),
        fw.Replica(target, address) as replica,
        pytest.raises(PlanError, match="snapshot"),
    ):
        replica.update(timeout_seconds=LIMIT)


def test_a_publisher_that_came_back_does_not_set_a_replica_back_to_an_older_snapshot(
    address, tmp_path
):
    store = tmp_path / "store"
    fw.save(weights(3), store, version=3)
    target = weights(0)
    with fw.Replica(target, address) as replica:
        with fw.Publisher(weights(5), address, hold=True) as first:
            first.publish(5)
            replica.update(timeout_seconds=LIMIT)
        with fw.Publisher(weights(6), address, store=store) as second:
            with pytest.raises(TransferTimeout):
                replica.update(timeout_seconds=0.5)
            assert (replica.version, replica.state) == (5, "ready")
            assert holds(target, 5)
            replica.update(version=3, timeout_seconds=LIMIT)  # unless it is asked for
            assert holds(target, 3)
            assert second.version is None


def test_a_step_while_the_held_copy_is_made_is_an_error_of_the_publish(
    address, threads, monkeypatch
):
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        with monkeypatch.context() as patch:
            call_before(patch, HeldCopy, "refill", lambda: model["norm"].__setitem__(3, 7.0))
            future = threads.submit(replica.update, timeout_seconds=LIMIT)
            with pytest.raises(DigestMismatch, match="'norm'"):
                publisher.publish(1, num_replicas=1)
            assert publisher.version is None
            assert not future.done(), "nobody was given anything"
        assign(model, 1)
        publisher.publish(1)
        assert future.result(LIMIT).version == 1
        assert holds(engine, 1)


def test_who_asks_while_the_held_copy_is_made_does_not_wait_for_a_slow_one(
    address, threads, monkeypatch
):
    model, engine = weights(1), weights(50)
    may_go_on, asked, is_copying = threading.Event(), threading.Event(), threading.Event()

    def wait_for_the_other():
        is_copying.set()
        asked.wait(LIMIT)

    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(weights(51), address, name="slow") as slow,
        fw.Replica(engine, address, name="other") as other,
    ):
        call_before(monkeypatch, HeldCopy, "refill", wait_for_the_other)
        slowed = threads.submit(
            slow.update, timeout_seconds=LIMIT, before=lambda version: may_go_on.wait(LIMIT)
        )
        published = threads.submit(publisher.publish, 1, num_replicas=1)
        assert is_copying.wait(LIMIT)
        future = threads.submit(other.update, timeout_seconds=LIMIT)
        until(lambda: publisher.waiting == ["other"])
        asked.set()
        assert future.result(LIMIT).version == 1
        assert holds(engine, 1)
        assert not slowed.done()
        may_go_on.set()
        slowed.result(LIMIT)
        assert not published.result(LIMIT).failed


def test_ranks_that_wait_for_each_other_all_get_what_is_held_before_the_next_takes_its_place(
    address, threads, monkeypatch
):
    """One has begun and waits for the other to; the trainer publishes; then the other asks."""
    model, engines = weights(1), [weights(50), weights(51)]
    has_begun, may_go_on, is_publishing = (threading.Event() for _ in range(3))

    def wait(version):
        has_begun.set()
        assert may_go_on.wait(LIMIT)

    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engines[0], address) as first,
        fw.Replica(engines[1], address) as second,
    ):
        publisher.publish(1)
        waiting = threads.submit(first.update, timeout_seconds=LIMIT, before=wait)
        assert has_begun.wait(LIMIT)
        call_before(monkeypatch, Rounds, "withdraw_available", is_publishing.set)
        publishing = threads.submit(publisher.publish, 2)
        assert is_publishing.wait(LIMIT)
        other = second.update(timeout_seconds=LIMIT, before=lambda version: may_go_on.set())
        assert (other.version, waiting.result(LIMIT).version) == (1, 1)
        assert publishing.result(LIMIT).version == 2
        for engine, replica in zip(engines, (first, second), strict=True):
            assert replica.update(timeout_seconds=LIMIT).version == 2
            assert holds(engine, 1), "of the tensors nothing was changed"


def test_what_is_held_does_not_keep_tensors_that_were_replaced(address):
    torch = pytest.importorskip("torch")
    model = {"w": torch.zeros(1000)}
    with fw.Publisher(model, address, hold=True) as publisher:
        publisher.publish(1)
        old = weakref.ref(model["w"])
        model["w"] = torch.ones(1000)
        publisher.publish(2)
        gc.collect()
        until(lambda: old() is None)


def test_a_catch_up_round_whose_thread_cannot_start_is_denied_and_the_next_one_served(
    address, monkeypatch
):
    engine = weights(50)
    with fw.Publisher(weights(1), address, hold=True) as publisher:
        publisher.publish(1)
        refuse_catch_up_threads(monkeypatch, 1)
        with fw.Replica(engine, address) as replica:
            with pytest.raises(PeerFailed, match="can't start new thread; .*ulimit -u"):
                replica.update(timeout_seconds=LIMIT)
            assert replica.update(timeout_seconds=LIMIT).version == 1
        assert holds(engine, 1)
        publisher.publish(2)
    fw.Publisher(weights(1), address).close()


def test_a_late_reader_is_given_up_after_half_of_what_the_next_publish_may_take(address):
    with (
        fw.Publisher({"w": CONTENT}, address, hold=True, silence_seconds=2 * LIMIT) as publisher,
        FakeReplica(address) as reader,
    ):
        publisher.publish(1)
        reader.join()
        reader.say(messages.Ask(1, None, None))
        begin = reader.hear_of(messages.Begin)
        assert begin.origin == "held"
        with in_time(0.5):
            publisher.publish(2, timeout_seconds=1)
        abort = reader.hear_of(messages.Abort, messages.Commit)
        assert (abort.round, abort.kind) == (begin.round, "TransferTimeout")
