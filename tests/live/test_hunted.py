"""What hunting for faults has found, each as a test. Delays are put where a race was lost."""

import os
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest

import flyweight as fw
from flyweight.errors import (
    PeerLost,
    PlanError,
    SpecError,
    TransferTimeout,
    TransportError,
    VersionError,
)
from flyweight.events import listening
from flyweight.live.address import Address
from flyweight.live.lanes import BucketSlots
from flyweight.live.members import Members
from flyweight.live.replica_round import ReplicaRound
from flyweight.live.round import Round
from flyweight.live.rounds import Rounds
from live_models import Child, assign, holds, in_time, resources, settled, until, weights


def updated(threads, publisher, replica, version):
    future = threads.submit(replica.update, version, timeout_seconds=10)
    report = publisher.publish(version, num_replicas=1)
    assert report.failed == ()
    return future.result(10)


def delayed(monkeypatch, owner, name, seconds, when=lambda *args: True):
    """Let a method take longer, as it does when a machine is busy."""
    original = getattr(owner, name)

    def slow(self, *args, **options):
        if when(self, *args):
            time.sleep(seconds)
        return original(self, *args, **options)

    monkeypatch.setattr(owner, name, slow)


@pytest.mark.parametrize("should_verify", [True, False])
def test_a_replica_that_gives_up_while_a_round_is_made_gets_the_next_one_right(
    address, threads, monkeypatch, should_verify
):
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address, should_verify=should_verify) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        updated(threads, publisher, replica, 1)
        model["step"] = 1  # so that lists must be sent anew
        with monkeypatch.context() as patch:
            model.update(weights(2))
            delayed(patch, BucketSlots, "lay_out", 0.5)
            future = threads.submit(replica.update, timeout_seconds=0.2)
            until(lambda: publisher.waiting)
            started = time.monotonic()
            report = publisher.publish(2)
            assert time.monotonic() - started < 3
            assert isinstance(report.replicas[0].error, TransferTimeout)
            with pytest.raises(TransferTimeout):
                future.result(10)
        assert (replica.state, replica.version) == ("ready", 1)
        assert holds(engine, 1)
        for version in (3, 4):
            assign(model, version)
            updated(threads, publisher, replica, version)
            assert holds(engine, version)


@pytest.mark.parametrize("should_verify", [True, False])
def test_what_is_held_is_never_served_under_the_number_of_what_was_there_before(
    address, threads, monkeypatch, should_verify
):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address, hold=True, should_verify=should_verify) as publisher:
        publisher.publish(1)
        with fw.Replica(engine, address) as replica:
            begun = threading.Event()

            def is_first(self, version, *rest):
                begun.set()
                return version.version == 1

            delayed(monkeypatch, Rounds, "prepare", 1.0, is_first)
            future = threads.submit(replica.update, timeout_seconds=10)
            assert begun.wait(10)
            assign(model, 2)
            publisher.publish(2, timeout_seconds=0.5)
            assert future.result(10).version == 2
            assert holds(engine, 2)


def test_several_replicas_take_what_is_held_at_once(address, threads):
    model = weights(1)
    with fw.Publisher(model, address, hold=True) as publisher:
        publisher.publish(1)
        engines = [weights(50 + n) for n in range(6)]
        replicas = [fw.Replica(engine, address) for engine in engines]
        futures = [threads.submit(each.update, timeout_seconds=20) for each in replicas]
        assert [future.result(20).version for future in futures] == [1] * 6
        assert all(holds(engine, 1) for engine in engines)
        for each in replicas:
            each.close()


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
        with pytest.raises(PlanError, match="other tensors than when"):
            publisher.publish(1)


def test_a_replica_whose_tensors_were_replaced_holds_nothing(address):
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        publisher.publish(1)
        replica.update(1, timeout_seconds=10)
        engine.update(weights(60))
        with pytest.raises(fw.FlyweightError, match="holds no whole version"):
            replica.check_servable()
        assert replica.update(1, timeout_seconds=10).version == 1
        assert holds(engine, 1)


def asking(publisher):
    until(lambda: publisher.waiting)


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
        future = threads.submit(replica.update, timeout_seconds=20)
        asking(publisher)
        was = engine.weight.detach()
        before = was.clone()
        replaced(engine, how)
        assert len(publisher.publish(1, num_replicas=1).failed) == 1  # it declined, and came anew
        assert torch.equal(was, before)  # nobody's memory by now
        if not hold:
            asking(publisher)
            assert publisher.publish(2, num_replicas=1).failed == ()
        assert future.result(20).version == (1 if hold else 2)
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
        replica.update(1, timeout_seconds=10)
        publisher.publish(2)
        with pytest.raises(VersionError, match="were replaced, or have moved, before version 2"):
            replica.update(before=lambda version: replaced(engine, "data"), timeout_seconds=10)
        assert (engine.weight == -7).all()
        assert (replica.state, replica.version) == ("empty", None)
        assert replica.update(before=lambda version: None, timeout_seconds=10).version == 2
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
            delayed(patch, ReplicaRound, "wait_commit", 0, lambda *args: replaced(engine, "data"))
            with pytest.raises(VersionError, match="were replaced, or have moved, while version 1"):
                replica.update(timeout_seconds=10)
        assert (replica.state, replica.version) == ("failed", None)
        assert replica.update(timeout_seconds=10).version == 1
        assert torch.equal(engine.weight, model.weight)


def test_a_version_is_not_claimed_for_tensors_that_were_replaced(address):
    torch = pytest.importorskip("torch")
    model, engine = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        publisher.publish(1)
        replica.update(timeout_seconds=10)
        replaced(engine, "data")
        assert (replica.state, replica.version) == ("empty", None)
        with pytest.raises(VersionError, match="is empty .*: tensors of the model were replaced"):
            replica.check_servable()
        for update in range(2):  # in a second one nothing has to be agreed anew
            with pytest.raises(TransferTimeout) if update else nullcontext():
                replica.update(timeout_seconds=0.5)
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
        replica.update(timeout_seconds=10)
        for length in (2, 3):
            engine(torch.ones(length, 4))
            replica.check_servable()


def test_values_are_those_of_their_version_also_where_it_is_held(address):
    model, engine = {"w": np.ones(3), "step": 1}, {"w": np.zeros(3), "step": 0}
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        for step in (1, 2, 3):
            model["step"] = step
            publisher.publish(step)
            replica.update(step, timeout_seconds=10)
            assert engine["step"] == step


def test_a_snapshot_that_does_not_share_what_the_model_shares_is_refused(address, tmp_path):
    fw.save({"a": np.full(4, 1.0), "b": np.full(4, 2.0)}, tmp_path / "run", version=6)
    one = np.zeros(4)
    target = {"a": np.zeros(4), "b": np.zeros(4)}
    with (
        fw.Publisher({"a": one, "b": one}, address, store=tmp_path / "run"),
        fw.Replica(target, address) as replica,
        pytest.raises(PlanError, match="differ in the snapshot"),
    ):
        replica.update(timeout_seconds=10)


def slow_loader(address, seconds, pipe):
    def load(named):
        for _ in named:
            pipe.send(("took", None))
            time.sleep(seconds)

    with fw.Replica(load, address, name="slow", framework="numpy") as replica:
        replica.update(timeout_seconds=30)


def test_a_slow_replica_does_not_keep_a_fast_one_from_its_commit(address, threads):
    model, engine = weights(1), weights(50)
    with (
        Child(slow_loader, address, 0.5),
        fw.Publisher(model, address) as publisher,
        fw.Replica(engine, address, name="fast") as replica,
    ):
        until(lambda: len(publisher.replicas) == 2)
        future = threads.submit(replica.update, timeout_seconds=1)
        started = time.monotonic()
        lease = publisher.publish(1, num_replicas=2, background=True)
        assert future.result(5).version == 1
        assert time.monotonic() - started < 2
        assert not lease.is_done
        assert lease.wait(30).failed == ()


def stopped_replica(address, pipe):
    with fw.Replica(weights(50), address, name="stopped") as replica:
        replica.update(timeout_seconds=20)


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 16384, "depth": 1}], ids=str)
def test_a_stopped_replica_does_not_fail_the_others(address, threads, options):
    model, engine = weights(1), weights(51)
    with (
        Child(stopped_replica, address) as child,
        fw.Publisher(model, address, **options) as publisher,
        fw.Replica(engine, address, name="other") as replica,
    ):
        until(lambda: len(publisher.replicas) == 2)
        future = threads.submit(replica.update, timeout_seconds=1)  # less than the publisher's
        until(lambda: len(publisher.waiting) == 2)
        child.stop()
        report = publisher.publish(1, timeout_seconds=2)
        assert future.result(5).version == 1
        assert holds(engine, 1)
        assert [each.name for each in report.failed] == ["stopped"]


def test_a_listener_that_raises_does_not_make_the_publisher_deaf(address, threads):
    def listener(event):
        if event.kind.startswith("replica."):
            raise RuntimeError("a listener of the user's")

    model, engine = weights(1), weights(50)
    with listening(listener), fw.Publisher(model, address) as publisher:
        fw.Replica(weights(51), address).close()
        with fw.Replica(engine, address) as replica:
            updated(threads, publisher, replica, 1)
            assert holds(engine, 1)


def test_close_ends_an_update_that_waits_in_another_thread(address, threads):
    before = resources()
    with fw.Publisher(weights(1), address) as publisher:
        replica = fw.Replica(weights(50), address)
        future = threads.submit(replica.update, timeout_seconds=20)
        until(lambda: publisher.waiting)
        started = time.monotonic()
        replica.close()
        with pytest.raises(TransportError):
            future.result(5)
        assert time.monotonic() - started < 3
        until(lambda: publisher.replicas == [])
        assert publisher.publish(1).replicas == ()
    threads.shutdown()
    assert settled(before)["threads"] == before["threads"]


def test_close_wakes_a_publish_that_waits_for_replicas(address, threads):
    publisher = fw.Publisher(weights(1), address)
    future = threads.submit(publisher.publish, 1, num_replicas=1, timeout_seconds=20)
    time.sleep(0.1)
    publisher.close()
    with pytest.raises(TransportError, match="is closed"):
        future.result(5)


def use_inherited(publisher, replica, pipe):
    told = []
    for use in (lambda: publisher.publish(9), lambda: replica.update(timeout_seconds=1)):
        try:
            use()
        except TransportError as error:
            told.append(str(error))
    publisher.close()
    replica.close()
    return told


def test_what_a_child_inherits_by_fork_is_not_its_own(address, threads):
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        publisher.publish(1)
        replica.update(timeout_seconds=10)
        with Child(use_inherited, publisher, replica) as child:
            told = child.result(10)
        assert len(told) == 2
        assert all(f"belongs to process {os.getpid()}" in each for each in told)
        assign(model, 2)
        publisher.publish(2)
        assert replica.update(timeout_seconds=10).version == 2


def test_an_iterator_that_a_loader_keeps_is_over(address, threads):
    kept = []

    def load(named):
        kept.append(named)
        if len(kept) == 1:
            raise ValueError("no")
        list(named)

    with (
        fw.Publisher(weights(1), address, bucket_bytes=4096) as publisher,
        fw.Replica(load, address, framework="numpy") as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=10)
        publisher.publish(1, num_replicas=1)
        with pytest.raises(ValueError, match="no"):
            future.result(10)
        assert list(kept[0]) == []
        updated(threads, publisher, replica, 2)


class Fixed(dict):
    def __setitem__(self, key, value):
        raise RuntimeError("values of mine are mine")


def test_values_that_cannot_be_set_fail_the_replica_by_name(address, threads):
    engine = Fixed(w=np.zeros(3), step=0)
    with (
        fw.Publisher({"w": np.ones(3), "step": 1}, address) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=10)
        publisher.publish(1, num_replicas=1)
        with pytest.raises(RuntimeError, match="values of mine"):
            future.result(10)
        assert replica.state == "failed"
        assert "values of mine" in str(replica.failure)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1, None, "3", True])
def test_a_time_that_is_none_is_refused(address, seconds):
    with fw.Publisher(weights(1), address) as publisher, fw.Replica(weights(2), address) as replica:
        with pytest.raises(SpecError, match="timeout_seconds is"):
            replica.update(timeout_seconds=seconds)
        if seconds is not None:
            with pytest.raises(SpecError, match="timeout_seconds is"):
                publisher.publish(1, timeout_seconds=seconds)
            with pytest.raises(SpecError, match="silence_seconds is"):
                fw.Publisher(weights(1), address + "2", silence_seconds=seconds)


@pytest.mark.parametrize(
    "options",
    [{"depth": 1.5}, {"depth": 0}, {"bucket_bytes": 5000.5}, {"transport": "best"}, {"token": 5}],
    ids=str,
)
def test_options_of_no_sense_are_refused_and_leave_nothing(address, options):
    before = resources()
    with pytest.raises(SpecError):
        fw.Publisher(weights(1), address, **options)
    assert settled(before) == before
    fw.Publisher(weights(1), address).close()


def test_what_is_no_model_is_refused_alike_on_both_sides(address):
    with pytest.raises(SpecError, match="is no model"):
        fw.Publisher(5, address)
    with pytest.raises(SpecError, match="is no model"):
        fw.Replica(5, address)


def test_a_token_of_its_own_is_asked_for(address):
    with (
        fw.Publisher(weights(1), address, token="ours"),
        pytest.raises(fw.FlyweightError, match="pass it as token="),
    ):
        fw.Replica(weights(2), address)


def test_a_second_publisher_in_a_new_directory_survives_the_first(address, tmp_path):
    first = fw.Publisher(weights(1), address)
    os.rename(tmp_path / "policy", tmp_path / "moved")
    engine = weights(50)
    with fw.Publisher(weights(2), address, hold=True) as second:
        first.close()
        second.publish(2)
        with fw.Replica(engine, address) as replica:
            assert replica.update(timeout_seconds=10).version == 2
    assert holds(engine, 2)


def test_hundreds_of_shared_tensors_are_offered_in_no_time(address, threads):
    torch = pytest.importorskip("torch")
    model = {f"w{n}": torch.full((100,), float(n)).share_memory_() for n in range(300)}
    engine = {name: torch.zeros(100) for name in model}
    started = time.monotonic()
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:
        update = updated(threads, publisher, replica, 1)
    assert update.strategy == "mapped"
    assert time.monotonic() - started < 5
    assert all(torch.equal(engine[name], model[name]) for name in model)


def test_a_token_that_was_read_just_before_another_publisher_came_is_read_again(
    address, threads, monkeypatch
):
    with fw.Publisher(weights(1), address):
        stale, token = [Address.parse(address).token()], Address.token
    engine = weights(50)
    with fw.Publisher(weights(2), address) as publisher:
        monkeypatch.setattr(Address, "token", lambda self: stale.pop() if stale else token(self))
        with fw.Replica(engine, address) as replica:
            future = threads.submit(replica.update, timeout_seconds=10)
            publisher.publish(2, num_replicas=1)
            assert future.result(10).version == 2
            assert holds(engine, 2)


def test_a_publisher_that_is_gone_before_it_answers_is_lost_and_not_unwilling(address, threads):
    with fw.Replica(weights(2), address) as replica:
        future = threads.submit(replica.update, timeout_seconds=15)
        stop = threading.Event()

        def come_and_go():
            while not stop.is_set():
                fw.Publisher(weights(1), address).close()

        coming = threads.submit(come_and_go)
        time.sleep(1.0)
        stop.set()
        coming.result(10)
        assert not future.done()
        with fw.Publisher(weights(1), address, hold=True) as publisher:
            publisher.publish(1)
            assert future.result(15).version == 1


def test_a_publisher_closed_in_mid_round_ends_it_for_the_replica(address, threads):
    with Child(slow_loader, address, 5.0) as child:
        publisher = fw.Publisher(weights(1), address, timeout_seconds=3)
        until(lambda: publisher.replicas == ["slow"])
        lease = publisher.publish(1, num_replicas=1, background=True, timeout_seconds=60)
        child.told()
        with in_time(3):  # the publisher's own time, and not the round's
            publisher.close()
        (failed,) = lease.wait(5).failed
        assert isinstance(failed.error, (PeerLost, TransferTimeout))
        child.kill()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_ours_in_the_wire_is_told_and_leaves_nobody_waiting(
    address, threads, monkeypatch
):
    model, engine = weights(1), weights(50)
    with fw.Publisher(model, address) as publisher, fw.Replica(engine, address) as replica:

        def fault(self, peer, message):
            raise RuntimeError("an error of ours")

        with monkeypatch.context() as patch:
            patch.setattr(Members, "_on_message", fault)
            future = threads.submit(replica.update, timeout_seconds=3)
            until(lambda: publisher.replicas == [])
        with pytest.raises(TransportError, match="has ended by an error"):
            publisher.publish(1, num_replicas=1)
        with pytest.raises(TransferTimeout, match="no publisher came in time"):
            future.result(10)
        publisher.close()
        with fw.Publisher(model, address, hold=True) as another:
            another.publish(1)
            assert replica.update(timeout_seconds=10).version == 1


def test_a_short_wait_for_a_version_is_no_short_wait_for_its_bytes(address, monkeypatch):
    """To give up in the middle of a round costs the version that was there."""
    model, engine = weights(1), weights(50)
    with (
        fw.Publisher(model, address, hold=True) as publisher,
        fw.Replica(engine, address) as replica,
    ):
        publisher.publish(1)
        delayed(monkeypatch, Round, "_commit_done", 0.3, lambda self: self._has_done())
        assert replica.update(timeout_seconds=0.2).version == 1
        with pytest.raises(TransferTimeout):
            replica.update(timeout_seconds=0)
        assert (replica.state, replica.version) == ("ready", 1)


def test_a_publisher_that_came_back_does_not_set_a_replica_back_to_an_older_snapshot(
    address, tmp_path
):
    store = tmp_path / "store"
    fw.save(weights(3), store, version=3)
    target = weights(0)
    with fw.Replica(target, address) as replica:
        with fw.Publisher(weights(5), address, hold=True) as first:
            first.publish(5)
            replica.update(timeout_seconds=10)
        with fw.Publisher(weights(6), address, store=store) as second:
            with pytest.raises(TransferTimeout):
                replica.update(timeout_seconds=0.5)
            assert (replica.version, replica.state) == (5, "ready")
            assert holds(target, 5)
            replica.update(version=3, timeout_seconds=10)  # unless it is asked for
            assert holds(target, 3)
            assert second.version is None
