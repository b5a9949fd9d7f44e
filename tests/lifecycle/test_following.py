"""An engine that takes versions as they come, and what an operator asks of it meanwhile."""

import gc
import threading
from contextlib import ExitStack
from time import monotonic

import pytest

import flyweight as fw
from child_processes import LIMIT, resources, settled, until
from faulty_engines import KV_CACHE, FaultyEngine, Room
from flyweight.errors import Busy, FlyweightError, LifecycleError
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.engine import ModelEngine
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import Signal, State
from flyweight.lifecycle.weights import StoredWeights
from flyweight.lifecycle.worker import Worker
from versioned_models import assign, holds, weights


class Follower:
    """Follows in a thread, as a worker does."""

    def __init__(self, operations, pool):
        self._machine, self._is_over = operations, threading.Event()
        self._future = pool.submit(self._follow)
        self.errors = []

    def _follow(self):
        taken = 0
        while not self._is_over.is_set():
            try:
                taken += self._machine.follow(
                    timeout_seconds=3 * LIMIT, is_over=self._is_over.is_set
                )
            except FlyweightError as error:
                self.errors.append(error)
        return taken

    @property
    def is_done(self):
        return self._future.done()

    def end(self, weights):
        self._is_over.set()
        weights.wake()
        return self._future.result(LIMIT)


@pytest.fixture
def followed(room, threads):
    room.follower = Follower(room.operations, threads)
    yield room
    if not room.follower.is_done:
        room.follower.end(room.replica)


def publish_to_one(room, version):
    assign(room.trainer, version)
    return room.publisher.publish(version, num_replicas=1, timeout_seconds=LIMIT)


def test_versions_are_taken_as_they_are_published(followed):
    for version in (1, 2, 3):
        publish_to_one(followed, version)
        until(lambda version=version: followed.operations.version == version)
        until(lambda: followed.operations.state is State.SERVING)
        assert followed.serves(version)
    assert followed.follower.end(followed.replica) == 3


def test_an_operators_pause_is_respected_by_versions_that_come(followed):
    """Taken over, so that it is there at the resume, and not served before."""
    publish_to_one(followed, 1)
    until(lambda: followed.operations.state is State.SERVING)
    followed.operations.pause()
    publish_to_one(followed, 2)
    until(lambda: followed.operations.version == 2)
    until(lambda: followed.operations.state is State.PAUSED)
    assert followed.is_shut()
    followed.operations.resume()
    assert followed.serves(2)


def test_an_explicit_update_has_the_source_while_a_follower_waits(followed):
    publish_to_one(followed, 1)
    until(lambda: followed.operations.state is State.SERVING)
    assert followed.operations.update(timeout_seconds=LIMIT).version == 1  # it came by following
    assert followed.operations.update(1, timeout_seconds=LIMIT).version == 1
    followed.publish(2)
    assert followed.operations.update(timeout_seconds=LIMIT).version == 2  # and nothing is pinned
    publish_to_one(followed, 3)
    until(lambda: followed.operations.version == 3)


def test_a_cleared_engine_is_not_filled_by_versions_that_come(followed):
    """Memory that an operator took back stays with whoever has it now."""
    publish_to_one(followed, 1)
    until(lambda: followed.operations.state is State.SERVING)
    followed.operations.clear()
    followed.publish(2)  # offered to the follower, who declines
    assert all("released meanwhile" in str(each) for each in followed.follower.errors)
    assert followed.follower.end(followed.replica) == 1
    assert followed.operations.state is State.CLEARED
    assert not followed.operations._steps.has_weights_memory


def test_a_pinned_version_is_not_left_for_a_newer_one(followed):
    publish_to_one(followed, 1)
    until(lambda: followed.operations.state is State.SERVING)
    followed.operations.update(1, timeout_seconds=LIMIT)
    followed.publish(2)
    assert followed.serves(1)
    followed.operations.update(timeout_seconds=LIMIT)
    assert followed.serves(2)


def test_a_drain_may_take_longer_than_the_wait_for_a_version(serving, threads):
    serving.publish(2)
    serving.operations.update(timeout_seconds=LIMIT)  # no pin
    serving.publish(3)
    with serving.request(threads) as (answered, may_end):
        way = {"timeout_seconds": 0.5, "is_over": lambda: False}
        following = threads.submit(serving.operations.follow, **way)
        until(lambda: serving.operations.state is State.PAUSING)
        end = monotonic() + 1.0
        until(lambda: monotonic() > end)
        may_end.set()
        assert answered.result(LIMIT) == (2, True)
        assert following.result(LIMIT)
    assert serving.serves(3)


def test_a_pause_waits_for_a_round_that_nobody_asked_for(followed, threads):
    publish_to_one(followed, 1)
    until(lambda: followed.operations.state is State.SERVING)
    with followed.request(threads) as (answered, may_end):
        publish = threads.submit(publish_to_one, followed, 2)
        until(lambda: followed.operations.state is State.PAUSING)
        with pytest.raises(Busy, match="update is running"):
            followed.operations.pause(timeout_seconds=0.05)
        pause = threads.submit(followed.operations.pause, timeout_seconds=LIMIT)
        may_end.set()
        assert answered.result(LIMIT) == (1, True)
        pause.result(LIMIT)
        publish.result(LIMIT)
    assert followed.operations.state is State.PAUSED
    assert followed.operations.version == 2


def test_a_round_that_has_no_turn_leaves_what_runs_alone(serving, threads, monkeypatch):
    """An engine that stands still for a clear is not told to go on beside it."""
    monkeypatch.setattr("flyweight.lifecycle.operations.ROUND_SECONDS", 0.1)
    serving.publish(2)
    serving.operations.update(timeout_seconds=LIMIT)  # no pin
    began, may_end = threading.Event(), threading.Event()

    def hold():
        began.set()
        assert may_end.wait(LIMIT)

    serving.engine.drop_cache = hold
    clear = threads.submit(serving.operations.clear, KV_CACHE)
    assert began.wait(LIMIT)
    serving.publish(3)
    with pytest.raises(Busy, match="clear is running"):
        serving.operations.follow(timeout_seconds=LIMIT, is_over=lambda: False)
    assert serving.operations.state is State.PAUSED
    assert serving.is_shut()
    may_end.set()
    clear.result(LIMIT)
    assert serving.operations.state is State.CLEARED


def follow_and_close(address, cell):
    with ExitStack() as stack:
        room = Room(stack, address)
        with Worker(room.engine, room.replica, cell) as worker:
            publish_to_one(room, 1)
            until(lambda: worker.operations.state is State.SERVING)
            with Control(cell) as control:
                operation = control.wait(control.start(Signal.PAUSE), LIMIT)
                assert operation.ending == "done", operation.reason
        worker.close()
        threads = [t.name for t in threading.enumerate()]
        assert not {"flyweight-worker", "flyweight-follow", "flyweight-beat"} & set(threads)
        assert worker.operations.state is State.PAUSED  # the engine stays as it is


def test_a_closed_worker_leaves_no_thread_and_no_file(address, tmp_path):
    gc.collect()  # what other tests have left
    before = resources()
    follow_and_close(address, tmp_path / "cell")
    gc.collect()
    assert settled(before) == before


def test_a_worker_whose_engine_cannot_stand_still_leaves_its_rank_free(address, tmp_path):
    model = weights(0)
    engine = FaultyEngine(model)
    engine.faults = {"pause": RuntimeError("on purpose")}
    with fw.Replica(model, address) as replica:
        with pytest.raises(LifecycleError, match="pause"):
            Worker(engine, replica, tmp_path / "cell")
        engine.faults = {}
        Worker(engine, replica, tmp_path / "cell").close()


def test_a_pinned_version_is_the_one_that_wakes_up_again(address, tmp_path):
    """C32: sleep and wake change nothing of what an operator asked for."""
    with ExitStack() as stack:
        room = Room(stack, address)
        path = tmp_path / "cell"
        worker = stack.enter_context(Worker(room.engine, room.replica, path))
        control = stack.enter_context(Control(path))
        room.publish(1)
        for signal, version in (
            (Signal.UPDATE, 1),
            (Signal.CLEAR, None),
            (Signal.RESTORE, None),
        ):
            operation = control.wait(control.start(signal, version=version), LIMIT)
            assert operation.ending == "done", operation.reason
        assert worker.operations.pinned == 1
        assert room.serves(1)


def test_an_engine_that_follows_a_store_never_goes_back(tmp_path):
    """Versions only grow, also where the newest was removed."""
    model, store = weights(0), tmp_path / "store"
    fw.save(weights(5), store, version=5)
    operations = Operations(ModelEngine(model), StoredWeights(model, store))
    operations.update(timeout_seconds=LIMIT)
    for path in list(store.iterdir()):
        path.rename(tmp_path / path.name)
    fw.save(weights(3), store, version=3)
    assert not operations.follow(timeout_seconds=0.3, is_over=lambda: False)
    assert operations.state is State.SERVING
    assert holds(model, 5)
