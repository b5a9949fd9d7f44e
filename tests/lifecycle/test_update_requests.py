"""What an update request answers when there is nothing to transfer: never success by default."""

import shutil
import signal
import threading
from contextlib import ExitStack
from time import monotonic

import numpy as np
import pytest
import safetensors.numpy

import flyweight as fw
from child_processes import LIMIT, Child, in_time, until
from control_site import serving
from fakes import FakeRendezvousStore, FakeWeights
from flyweight.errors import TransferTimeout, VersionError
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import Signal, State
from flyweight.lifecycle.weights import StoredWeights
from flyweight.ports import UpdateOptions
from flyweight.ranks.agreement import RankAgreement
from flyweight.ranks.rendezvous import Rendezvous
from versioned_models import assign, holds, weights


class Fleet:
    """A trainer, an engine with its worker, and whoever sends it requests."""

    def __init__(self, address, cell, model, source, worker):
        self.trainer = weights(0)
        self.publisher = fw.Publisher(self.trainer, address, keep="memory")
        self.model, self.source, self.worker = model, source, worker
        self.control, self.address = Control(cell), address

    def publish(self, version):
        assign(self.trainer, version)
        self.publisher.publish(version)

    def ask(self, version=None, seconds=LIMIT, signal=Signal.UPDATE):
        operation = self.control.start(signal, version=version, timeout_seconds=seconds)
        return self.control.wait(operation, seconds + LIMIT)

    @property
    def rank(self):
        return self.control.status().ranks[0]

    def serves(self, version):
        return (self.rank.state, self.rank.version) == (State.SERVING, version)

    def took(self, version):
        until(lambda: self.serves(version))


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Let controllers and ranks hear each other after a deadline, however slow the machine is."""
    monkeypatch.setattr("flyweight.lifecycle.control.ANSWER_SECONDS", LIMIT)
    monkeypatch.setattr("flyweight.ranks.agreement._LATE_SECONDS", LIMIT)


@pytest.fixture
def make(address, tmp_path):
    """Makes an engine that follows, or does not, and the trainer that it follows."""
    with ExitStack() as stack:

        def made(*, should_follow, store=None):
            model = weights(0)
            fallback = [] if store is None else [store]
            source = stack.enter_context(fw.Replica(model, address, fallback=fallback))
            cell = tmp_path / "engine.cell"
            worker = stack.enter_context(
                fw.Worker(fw.ModelEngine(model), source, cell, should_follow=should_follow)
            )
            fleet = Fleet(address, cell, model, source, worker)
            stack.enter_context(fleet.publisher)
            stack.enter_context(fleet.control)
            return fleet

        yield made


def test_a_version_that_came_by_following_answers_one_request_and_not_the_next(make):
    fleet = make(should_follow=True)
    fleet.publish(1)
    fleet.took(1)
    rounds = fleet.rank.num_rounds
    assert fleet.ask().ending == "done"
    assert fleet.rank.num_rounds == rounds  # nothing was transferred
    with in_time(1.0, early=0.3):  # it waits for one; the answer must be here in time
        ended = fleet.ask(seconds=1.0)
    assert (ended.ending, ended.error) == ("failed", "TransferTimeout")
    assert fleet.serves(1)
    fleet.publish(2)
    fleet.took(2)
    assert fleet.ask().ending == "done"


def test_a_request_that_waits_is_answered_by_the_version_that_comes(make, threads):
    fleet = make(should_follow=False)
    fleet.publish(1)
    assert fleet.ask().ending == "done"
    waiting = threads.submit(fleet.ask)
    until(lambda: fleet.publisher.replicas and fleet.control.status().operation is not None)
    assert not waiting.done()
    assert fleet.serves(1)  # meanwhile the engine serves
    fleet.publish(2)
    assert waiting.result(LIMIT).ending == "done"
    assert fleet.serves(2)
    assert holds(fleet.model, 2)


def test_a_version_that_is_named_and_held_is_confirmed_and_not_transferred(make):
    fleet = make(should_follow=False)
    fleet.publish(1)
    assert fleet.ask(1).ending == "done"
    rounds = fleet.rank.num_rounds
    assert [fleet.ask(1).ending for _ in range(3)] == ["done"] * 3
    assert fleet.rank.num_rounds == rounds
    fleet.publish(2)
    assert fleet.ask(1).ending == "done"  # the publisher is past it, and it was its version
    assert fleet.serves(1)


def test_asking_for_the_newest_ends_a_pin_though_nothing_is_newer_yet(make):
    fleet = make(should_follow=True)
    fleet.publish(1)
    assert fleet.ask(1).ending == "done"
    assert fleet.rank.pinned == 1
    assert fleet.ask(seconds=0.5).ending == "failed"  # it was answered with this one
    assert fleet.rank.pinned is None
    fleet.publish(2)
    fleet.took(2)


@pytest.mark.parametrize("version", [None, 1])
def test_a_publisher_that_has_gone_confirms_nothing(make, version):
    fleet = make(should_follow=True)
    fleet.publish(1)
    fleet.took(1)
    fleet.publisher.close()
    ended = fleet.ask(version, seconds=1.5)
    assert (ended.ending, ended.error) == ("failed", "PeerLost")
    assert fleet.serves(1)


def silent_trainer(address, pipe):
    model = weights(1)
    with fw.Publisher(model, address, keep="memory") as publisher:
        publisher.publish(1)
        pipe.send("published")
        pipe.recv()


@pytest.mark.parametrize("version", [None, 1])
def test_a_publisher_that_is_silent_confirms_nothing(address, tmp_path, version):
    model = weights(0)
    with (
        Child(silent_trainer, address) as trainer,
        fw.Replica(model, address) as replica,
        fw.Worker(fw.ModelEngine(model), replica, tmp_path / "cell"),
        Control(tmp_path / "cell") as control,
    ):
        assert trainer.told() == "published"
        until(lambda: control.status().version == 1)
        trainer.stop()
        operation = control.start(Signal.UPDATE, version=version, timeout_seconds=0.5)
        assert control.wait(operation, LIMIT).ending == "failed"
        assert control.status().version == 1


def test_a_version_of_another_publisher_is_not_the_one_that_is_held(make, address):
    """A trainer that was started again publishes its own version 1: it is transferred."""
    fleet = make(should_follow=False)
    fleet.publish(1)
    assert fleet.ask(1).ending == "done"
    fleet.publisher.close()
    other = weights(7)
    with fw.Publisher(other, address, keep="memory") as publisher:
        publisher.publish(1)
        assert fleet.ask(1).ending == "done"
        assert holds(fleet.model, 7)


def test_what_another_publisher_wrote_under_the_same_number_is_not_what_is_served(make):
    """Somebody updates the replica beside its worker: an update then stops requests for it."""
    fleet = make(should_follow=False)
    fleet.publish(1)
    assert fleet.ask(1).ending == "done"
    fleet.publisher.close()
    with fw.Publisher(weights(7), fleet.address, keep="memory") as publisher:
        publisher.publish(1)
        fleet.source.update(1, timeout_seconds=LIMIT)
        rounds = fleet.rank.num_rounds
        assert fleet.ask(1).ending == "done"
        assert fleet.rank.num_rounds == rounds + 1  # what was cached of the other is dropped
        assert fleet.serves(1)


def test_the_store_confirms_what_came_from_it(make, tmp_path):
    store = tmp_path / "store"
    fw.save(weights(4), store, version=4)
    fleet = make(should_follow=True, store=store)
    fleet.publisher.close()
    fleet.took(4)
    rounds = fleet.rank.num_rounds
    assert fleet.ask().ending == "done"
    assert fleet.rank.num_rounds == rounds
    assert fleet.ask(seconds=0.5).ending == "failed"
    assert fleet.ask(4).ending == "done"
    shutil.rmtree(store / "v0000000004")
    assert fleet.ask(4, seconds=0.5).ending == "failed"
    assert fleet.serves(4)


def test_a_store_that_was_pruned_does_not_hide_a_publisher_that_comes(make, tmp_path, threads):
    """The version that is held is no longer there to be confirmed: a newer one is waited for."""
    store = tmp_path / "store"
    fw.save(weights(4), store, version=4)
    fleet = make(should_follow=True, store=store)
    fleet.publisher.close()
    fleet.took(4)
    shutil.rmtree(store / "v0000000004")
    asked = threads.submit(fleet.ask)
    until(lambda: fleet.control.cell.record(0).taken > fleet.control.cell.record(0).done)
    with fw.Publisher(weights(5), fleet.address, keep="memory") as publisher:
        publisher.publish(5)
        assert asked.result(LIMIT).ending == "done"
        assert fleet.serves(5)


def test_a_restore_keeps_what_is_held_and_needs_no_newer_version(make):
    fleet = make(should_follow=False)
    fleet.publish(1)
    assert fleet.ask().ending == "done"
    assert fleet.ask(signal=Signal.RESTORE).ending == "done"
    assert fleet.ask(signal=Signal.CLEAR).ending == "done"
    assert fleet.ask(signal=Signal.RESTORE).ending == "done"
    assert fleet.serves(1)
    assert holds(fleet.model, 1)


def test_a_version_that_arrives_after_the_deadline_of_its_request_is_not_taken():
    """The caller was told that the request has failed."""
    model, end = weights(0), monotonic() + 0.5
    late = FakeWeights(lambda version: assign(model, version))
    late.add(1)
    take = late.take

    def take_late(options):
        until(lambda: monotonic() > end)
        return take(options)

    late.take = take_late
    operations = Operations(fw.ModelEngine(model), late)
    with pytest.raises(TransferTimeout, match="deadline"):
        operations.update(1, timeout_seconds=end - monotonic())
    assert (operations.state, late.version) == (State.CLEARED, None)
    late.take = take
    operations.update(1, timeout_seconds=LIMIT)
    assert holds(model, 1)


def test_closing_a_worker_ends_a_request_that_waits(make):
    fleet = make(should_follow=False)
    fleet.publish(1)
    assert fleet.ask().ending == "done"
    fleet.control.start(Signal.UPDATE, timeout_seconds=3 * LIMIT)
    until(lambda: fleet.control.cell.record(0).taken > fleet.control.cell.record(0).done)
    fleet.worker.close()
    until(lambda: not [t for t in threading.enumerate() if t.name == "flyweight-worker"])


def test_a_replica_keeps_its_version_only_if_told_so(address):
    trainer, model = weights(1), weights(0)
    with (
        fw.Publisher(trainer, address, keep="memory") as publisher,
        fw.Replica(model, address) as it,
    ):
        publisher.publish(1)
        report = it.update(timeout_seconds=LIMIT)
        assert it.update(may_keep=True, timeout_seconds=LIMIT) is report
        with pytest.raises(TransferTimeout):
            it.update(timeout_seconds=0.3)
        assign(trainer, 2)
        publisher.publish(2)
        assert it.update(may_keep=True, timeout_seconds=LIMIT).version == 2
        assert holds(model, 2)


def test_tensors_replaced_while_the_publisher_confirms_are_filled_again(address, threads):
    model = weights(0)
    with Child(silent_trainer, address) as trainer, fw.Replica(model, address) as replica:
        assert trainer.told() == "published"
        replica.update(timeout_seconds=LIMIT)
        trainer.stop()
        is_waiting = threading.Event()
        updating = threads.submit(replica.update, 1, timeout_seconds=LIMIT, is_over=is_waiting.set)
        until(lambda: replica.wake() or is_waiting.is_set())
        model.update(weights(5))
        trainer.kill(signal.SIGCONT)
        assert updating.result(LIMIT).version == 1
        assert holds(model, 1)


def test_checksums_that_are_asked_for_are_never_skipped(address, tmp_path):
    """C18: a version without digests is refused before a byte of it is written."""
    trainer, model = weights(1), weights(0)
    with (
        fw.Publisher(trainer, address, keep="memory", verify=False) as publisher,
        fw.Replica(model, address) as replica,
        fw.Worker(fw.ModelEngine(model), replica, tmp_path / "engine.cell", should_follow=False),
        serving([Control(tmp_path / "engine.cell", 1, name="engine")]) as site,
    ):
        publisher.publish(1)
        site.good("POST", "/v1/update_weights", {"version": 1, "verify_checksum": False})
        assign(trainer, 2)
        publisher.publish(2)
        for version in (1, 2):
            body = {"version": version, "verify_checksum": True}
            code, told = site.ask("POST", "/v1/update_weights", body)
            assert code != 200
            assert "checksums" in str(told["result"])
            assert (site.state, site.replica()["version"]) == ("SERVING", 1)
            assert holds(model, 1)
        site.good("POST", "/v1/update_weights", {"version": 2})
        assert holds(model, 2)


def test_a_checkpoint_without_checksums_is_refused_where_they_are_to_be_compared(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": np.ones(8, np.float32)}, path)
    model = {"w": np.zeros(8, np.float32)}
    stored = StoredWeights(model, path)
    way = {"timeout_seconds": LIMIT, "before": lambda version: None, "is_over": lambda: False}
    with pytest.raises(VersionError, match="checksums"):
        stored.take(UpdateOptions(verify=True, **way))
    assert not model["w"].any()
    stored.take(UpdateOptions(**way))
    assert model["w"].all()


def test_a_rank_that_was_started_again_takes_what_the_others_serve(address, threads, monkeypatch):
    """No newer version is needed: of the replica as a whole, none is served."""
    monkeypatch.setattr("flyweight.ranks.group._LINGER_SECONDS", 0.1)  # as if it was killed
    store, trainer = FakeRendezvousStore(), weights(1)
    with ExitStack() as stack:
        publisher = stack.enter_context(fw.Publisher(trainer, address, keep="memory"))
        publisher.publish(1)

        def started(rank):
            model = weights(0)
            replica = stack.enter_context(
                fw.Replica(model, address, name="pair", rank=rank, world_size=2)
            )
            ranks = RankAgreement(Rendezvous(rank, 2, store, "pair"))
            return model, replica, ranks, Operations(fw.ModelEngine(model), replica, ranks)

        def update(seconds):
            asked = [
                threads.submit(operations.update, timeout_seconds=seconds)
                for *_, operations in ranks
            ]
            return [each.exception(seconds + LIMIT) for each in asked]

        ranks = [started(0), started(1)]
        try:
            assert update(LIMIT) == [None, None]
            assert isinstance(update(0.5)[0], TransferTimeout)  # it was answered with that one
            assert [operations.state for *_, operations in ranks] == [State.SERVING] * 2
            for number in range(2):
                ranks[number][1].close()
                ranks[number][2].close()
                ranks[number] = started(number)
                assert update(LIMIT) == [None, None]
                assert [operations.state for *_, operations in ranks] == [State.SERVING] * 2
                assert all(holds(model, 1) for model, *_ in ranks)
            assert isinstance(update(0.5)[0], TransferTimeout)
        finally:
            for closing in [threads.submit(each[2].close) for each in ranks]:
                closing.result(LIMIT)
