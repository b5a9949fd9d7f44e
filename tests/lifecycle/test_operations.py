"""One engine through every step, each failing on purpose, with a real trainer beside it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec

import numpy as np
import pytest

import flyweight as fw
from child_processes import SPAWN, Child, resources, settled, until
from conftest import flip
from fakes import FakeRendezvousStore
from flyweight.errors import (
    Busy,
    ChecksumMismatch,
    FlyweightError,
    LifecycleError,
    SpecError,
    TransferTimeout,
    VersionError,
)
from flyweight.lifecycle.agreement import RankAgreement
from flyweight.lifecycle.control import Control
from flyweight.lifecycle.engine import ModelEngine
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import Signal, State, Tag
from flyweight.lifecycle.weights import StoredWeights
from flyweight.lifecycle.worker import Worker
from flyweight.ranks.rendezvous import Rendezvous, join_group
from versioned_models import assign, holds, weights

WEIGHTS, KV_CACHE = frozenset({Tag.WEIGHTS}), frozenset({Tag.KV_CACHE})
STEPS = (
    "pause", "abort_requests", "drop_cache", "release_cache", "restore_cache", "release_experts",
    "release_weights", "release_groups", "restore_groups", "restore_weights", "restore_experts",
)  # fmt: skip


class FaultyEngine(ModelEngine):
    """A plain engine that writes down what it is told, and fails where it is meant to."""

    def __init__(self, model):
        super().__init__(model)
        self.calls, self.faults = [], {}

    def resume(self, version):
        self.note(f"resume {version}", "resume")
        super().resume(version)

    def note(self, what, step):
        self.calls.append(what)
        if step in self.faults:
            raise self.faults[step]


def _noted(step):
    def method(self, *args):
        self.note(step, step)
        return getattr(super(FaultyEngine, self), step)(*args)

    return method


for _step in STEPS:
    setattr(FaultyEngine, _step, _noted(_step))


class Room:
    """A trainer, its publisher, and an engine that is driven by hand."""

    def __init__(self, stack, address, *, nbytes=1 << 16, **options):
        self.trainer, self.model = weights(0, nbytes), weights(0, nbytes)
        self.publisher = stack.enter_context(fw.Publisher(self.trainer, address, hold=True))
        self.replica = stack.enter_context(fw.Replica(self.model, address))
        self.engine = FaultyEngine(self.model)
        self.operations = Operations(self.engine, self.replica, **options)

    def publish(self, version):
        assign(self.trainer, version)
        self.publisher.publish(version)

    def update(self, version, **options):
        self.publish(version)
        return self.operations.update(version, timeout_seconds=20, **options)

    def serves(self, version):
        """True if a request is answered, with all of a version."""
        with self.engine.request(5) as answered:
            return answered == version and holds(self.model, version)

    def is_shut(self):
        """True if no request is answered."""
        try:
            with self.engine.request(0):
                return False
        except LifecycleError:
            return True

    def done(self, work):
        """Return what the engine is told in some work."""
        start = len(self.engine.calls)
        work()
        return self.engine.calls[start:]

    @contextmanager
    def request(self, threads):
        """A request that runs until the block ends; yields a future of what it was answered with."""
        began, may_end = threading.Event(), threading.Event()

        def answer():
            with self.engine.request(5) as version:
                began.set()
                assert may_end.wait(30)
                return version, holds(self.model, version)

        future = threads.submit(answer)
        assert began.wait(10)
        try:
            yield future, may_end
        finally:
            may_end.set()


@pytest.fixture
def room(address):
    with ExitStack() as stack:
        yield Room(stack, address)


@pytest.fixture
def serving(room):
    room.update(1)
    assert room.operations.state is State.SERVING
    return room


# How failures end: the table of operations.py.


def test_a_pause_that_runs_out_of_time_leaves_the_engine_serving(serving, threads):
    """C32: a pause that did not come about is no pause."""
    with serving.request(threads) as (answered, may_end):
        with pytest.raises(TransferTimeout, match="1 requests were still running"):
            serving.operations.pause(timeout_seconds=0.1)
        assert serving.operations.state is State.SERVING
        assert serving.serves(1)
        may_end.set()
        assert answered.result(10) == (1, True)
    serving.operations.pause()
    assert serving.operations.state is State.PAUSED
    assert serving.is_shut()


@pytest.mark.parametrize("step", ["pause", "abort_requests"])
def test_a_pause_that_raises_leaves_the_engine_serving(serving, step):
    serving.engine.faults = {step: RuntimeError("on purpose")}
    with pytest.raises(
        LifecycleError, match=f"the engine's {step} failed: RuntimeError: on purpose"
    ):
        serving.operations.pause(should_abort=True)
    assert serving.operations.state is State.SERVING
    assert serving.serves(1)


def test_an_engine_that_can_neither_pause_nor_go_on_has_failed(serving):
    serving.engine.faults = {"pause": RuntimeError("stuck"), "resume": RuntimeError("broken")}
    with pytest.raises(LifecycleError, match="broken"):
        serving.operations.pause()
    assert serving.operations.state is State.FAILED
    assert "broken" in str(serving.operations.failure)
    serving.engine.faults = {}
    serving.update(2)
    assert serving.serves(2)


def test_a_cache_that_is_not_dropped_leaves_the_old_version_served(serving):
    """C34: what was computed with old weights never meets new ones."""
    serving.engine.faults = {"drop_cache": RuntimeError("on purpose")}
    with pytest.raises(LifecycleError, match="the engine's drop_cache failed"):
        serving.update(2)
    assert serving.operations.condition.state is State.SERVING
    assert serving.operations.version == 1
    assert serving.serves(1)


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_clear_whose_cache_is_not_dropped_changes_nothing(serving, is_paused):
    if is_paused:
        serving.operations.pause()
    serving.engine.faults = {"drop_cache": RuntimeError("on purpose")}
    with pytest.raises(LifecycleError, match="the engine's drop_cache failed"):
        serving.operations.clear()
    assert serving.operations.state is (State.PAUSED if is_paused else State.SERVING)
    assert serving.operations.version == 1
    assert holds(serving.model, 1)


@pytest.mark.parametrize(
    "step", ["release_experts", "release_weights", "release_groups", "release_cache"]
)
def test_a_release_that_raises_fails_the_engine_and_all_of_it_is_restored(serving, step):
    """C24: some of it may be gone: nothing is served before every part of it is there again."""
    operations, engine = serving.operations, serving.engine
    engine.faults = {step: RuntimeError("on purpose")}
    with pytest.raises(
        LifecycleError, match=f"the engine's {step} failed: RuntimeError: on purpose"
    ):
        operations.clear()
    assert operations.state is State.FAILED
    assert operations.version is None
    assert serving.is_shut()
    engine.faults = {}
    with pytest.raises(LifecycleError, match="needs state"):
        operations.resume()
    restored = serving.done(lambda: (operations.restore(), serving.update(2)))
    assert operations.state is State.SERVING
    assert serving.serves(2)
    wanted = ["restore_groups", "restore_weights", "restore_experts"]
    assert [each for each in restored if each in wanted] == wanted
    assert ("restore_cache" in restored) == (step == "release_cache")


@pytest.mark.parametrize("step", ["restore_groups", "restore_weights", "restore_experts"])
def test_memory_that_does_not_come_back_fails_the_engine_until_it_does(serving, step):
    serving.operations.clear(WEIGHTS)
    serving.engine.faults = {step: MemoryError("on purpose")}
    with pytest.raises(LifecycleError, match=f"the engine's {step} failed: MemoryError"):
        serving.update(2)
    assert serving.operations.state is State.FAILED
    assert serving.is_shut()
    serving.engine.faults = {}
    serving.update(3)
    assert serving.serves(3)


def test_a_cache_that_does_not_come_back_stays_away_and_can_be_asked_for_again(serving):
    serving.operations.clear(KV_CACHE)
    serving.engine.faults = {"restore_cache": MemoryError("on purpose")}
    with pytest.raises(LifecycleError, match="the engine's restore_cache failed: MemoryError"):
        serving.operations.restore()
    assert serving.operations.condition.state is State.CLEARED
    assert serving.operations.condition.absent == KV_CACHE
    assert serving.is_shut()
    serving.engine.faults = {}
    serving.operations.restore()
    assert serving.serves(1)


def refused(error, work, *args, **options):
    with pytest.raises(error):
        work(*args, **options)


@pytest.mark.parametrize(("version", "error"), [(7, TransferTimeout), (0, VersionError)])
def test_an_update_that_finds_nothing_leaves_the_old_version_served_and_stops_no_request(
    serving, version, error
):
    """Waiting costs no request: they stand still only while a version is copied."""
    update = serving.operations.update
    assert serving.done(lambda: refused(error, update, version, timeout_seconds=0.3)) == []
    assert serving.operations.state is State.SERVING
    assert serving.serves(1)


def test_an_update_that_brings_nothing_new_fails_and_the_engine_serves_on(serving):
    """C24: a caller that waits for the next policy must not take the old one for it."""

    def update():
        with pytest.raises(TransferTimeout, match="a version after 1 from"):
            serving.operations.update(timeout_seconds=0.5)

    assert serving.done(update) == []
    assert (serving.operations.state, serving.operations.num_rounds) == (State.SERVING, 1)
    assert serving.serves(1)


def snapshots(tmp_path):
    store = tmp_path / "store"
    for version in (1, 2, 3):
        fw.save(weights(version), store, version=version)
    chunk = max((p for p in (store).rglob("*") if p.is_file() and "2" in str(p.relative_to(store).parts[0])), key=lambda p: p.stat().st_size)  # fmt: skip
    flip(chunk, chunk.stat().st_size // 2)
    return store


def test_weights_that_were_touched_are_not_served_until_a_whole_update_heals_them(tmp_path):
    """C24: FAILED with a reason, and no restart is needed."""
    model = weights(0)
    engine = FaultyEngine(model)
    operations = Operations(engine, StoredWeights(model, snapshots(tmp_path)))
    operations.update(1)
    with pytest.raises(ChecksumMismatch):
        operations.update(2)
    assert operations.state is State.FAILED
    assert operations.version is None
    assert isinstance(operations.failure, ChecksumMismatch)
    with pytest.raises(LifecycleError, match=r"engine is FAILED.*send UPDATE, then RESUME"):
        operations.resume()
    with pytest.raises(LifecycleError, match="accepted no requests"), engine.request(0):
        pass
    with pytest.raises(ChecksumMismatch):  # it does not heal by what broke it
        operations.update(2)
    operations.update(3)
    assert operations.state is State.SERVING
    assert operations.failure is None
    with engine.request(5) as version:
        assert version == 3
        assert holds(model, 3)


def test_a_loader_that_raises_anything_fails_the_engine_and_the_next_one_heals_it(address):
    """C24: an error that is not ours ends the round like any other."""
    model, trouble = weights(0), [True]

    def load(tensors):
        for name, tensor in tensors:
            if trouble and name != "embed":
                raise ZeroDivisionError("in the middle")
            model[name][...] = tensor

    with (
        fw.Publisher(weights(1), address, hold=True) as publisher,
        fw.Replica(load, address, framework="numpy") as replica,
    ):
        operations = Operations(ModelEngine(model), replica)
        publisher.publish(1)
        with pytest.raises(FlyweightError, match="ZeroDivisionError: in the middle"):
            operations.update(1, timeout_seconds=10)
        assert operations.state is State.FAILED
        trouble.clear()
        operations.update(1, timeout_seconds=10)
        assert operations.state is State.SERVING
        assert holds(model, 1)


def test_the_percent_of_an_update_grows_while_it_comes(address):
    """C26: what health tells meanwhile; from each version's beginning to its end."""
    model, seen = weights(0), []

    def load(tensors):
        for name, tensor in tensors:
            seen.append((operations.state, operations.percent))
            model[name][...] = tensor

    with (
        fw.Publisher(model, address, hold=True, bucket_bytes=1 << 14) as publisher,
        fw.Replica(load, address, framework="numpy") as replica,
    ):
        operations = Operations(ModelEngine(model), replica)
        for version in (1, 2):
            seen.clear()
            publisher.publish(version)
            assert operations.percent == 0
            operations.update(version, timeout_seconds=10)
            percents = [percent for _, percent in seen]
            assert {state for state, _ in seen} == {State.UPDATING}
            assert percents == sorted(percents)
            assert 0 < percents[0] < 100
            assert 50 < percents[-1] <= 100
        assert operations.percent == 0


def test_an_update_whose_resume_raises_stays_paused_with_the_new_version(serving):
    serving.engine.faults = {"resume": RuntimeError("on purpose")}
    with pytest.raises(LifecycleError, match="the engine's resume failed"):
        serving.update(2)
    assert serving.operations.state is State.PAUSED
    assert serving.operations.version == 2
    assert serving.is_shut()
    serving.engine.faults = {}
    serving.operations.resume()
    assert serving.serves(2)


def test_an_interrupted_step_leaves_no_state_that_nobody_ends(serving):
    """C24: Ctrl-C in the middle of a step."""
    serving.engine.faults = {"release_weights": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        serving.operations.clear()
    assert serving.operations.state is State.FAILED
    serving.engine.faults = {}
    serving.operations.restore()
    serving.update(2)
    assert serving.serves(2)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "5", True])
def test_a_time_that_is_none_is_refused_before_anything_is_done(serving, timeout):
    operations = serving.operations
    for work in (
        operations.pause,
        operations.resume,
        operations.clear,
        operations.restore,
        operations.update,
    ):
        told = serving.done(lambda work=work: refused(SpecError, work, timeout_seconds=timeout))
        assert told == []
    assert operations.state is State.SERVING


# Requests.


def test_every_request_is_answered_with_one_whole_version(room):
    """C34: also those that run while versions come; compared byte by byte, at begin and end."""
    room.update(1)
    is_over = threading.Event()

    def ask():
        answered = []
        while not is_over.is_set():
            with room.engine.request(20) as version:
                assert holds(room.model, version)
                assert holds(room.model, version)
                answered.append(version)
        assert answered == sorted(answered)  # never an older one after a newer
        return set(answered)

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        try:
            for version in range(2, 12):
                room.update(version)
        finally:
            is_over.set()
        seen = set().union(*(each.result(20) for each in asking))
    assert len(seen) > 5
    assert room.operations.num_rounds == 11


def test_a_request_that_runs_is_finished_with_the_old_version_and_the_next_sees_the_new(
    serving, threads
):
    with serving.request(threads) as (answered, may_end):
        serving.publish(2)
        update = threads.submit(serving.operations.update, 2, timeout_seconds=20)
        until(lambda: serving.operations.state is State.PAUSING)
        after = threads.submit(serving.serves, 2)  # waits at the gate
        assert not answered.done()
        may_end.set()
        assert answered.result(10) == (1, True)
        assert update.result(20).version == 2
        assert after.result(10)


def test_an_update_that_may_not_drain_is_refused_while_requests_run(serving, threads):
    with serving.request(threads) as (answered, may_end):
        with pytest.raises(
            LifecycleError,
            match="1 requests are running and the caller does not allow to drain them",
        ):
            serving.update(2, may_drain=False)
        assert serving.operations.state is State.SERVING
        assert serving.serves(1)
        may_end.set()
        assert answered.result(10) == (1, True)
    serving.operations.update(2, may_drain=False)
    assert serving.serves(2)


def test_a_clear_that_may_not_drain_is_refused_while_requests_run(serving, threads):
    with serving.request(threads):
        with pytest.raises(
            LifecycleError,
            match="1 requests are running and the caller does not allow to drain them",
        ):
            serving.operations.clear(may_drain=False)
        assert serving.serves(1)


def test_requests_that_run_are_aborted_before_the_pause_if_asked(serving):
    told = serving.done(lambda: serving.operations.pause(should_abort=True))
    assert told == ["abort_requests", "pause"]


def test_a_pause_that_should_resume_goes_on_as_before(serving):
    operations = serving.operations
    told = serving.done(lambda: operations.pause(should_abort=True, should_resume=True))
    assert told == ["abort_requests", "pause", "resume 1"]
    assert serving.serves(1)
    operations.clear(KV_CACHE)
    operations.pause(should_resume=True)
    assert (operations.state, operations.is_paused_by_hand) == (State.CLEARED, False)
    operations.restore()
    assert serving.serves(1)
    operations.pause()
    operations.pause(should_resume=True)
    assert (operations.state, operations.is_paused_by_hand) == (State.PAUSED, True)


def test_pausing_is_not_paused_and_a_second_pause_meanwhile_is_busy(serving, threads):
    """C32: the old way said 'already paused' while requests ran on."""
    operations = serving.operations
    with serving.request(threads) as (_, may_end):
        pause = threads.submit(operations.pause, timeout_seconds=20)
        until(lambda: operations.state is State.PAUSING)
        with pytest.raises(Busy, match="pause is running, pause was not begun; wait until it ends"):
            operations.pause(timeout_seconds=0.05)
        with pytest.raises(Busy, match="pause is running, clear was not begun"):
            operations.clear(timeout_seconds=0.05)
        assert operations.state is State.PAUSING
        may_end.set()
        pause.result(10)
    assert operations.state is State.PAUSED
    operations.pause()
    assert operations.state is State.PAUSED


# Rounds.


def test_every_round_drops_the_cache_and_tells_the_engine_the_version(room):
    """C34: the version is what caches are keyed by; the cache goes while nothing runs."""
    assert room.done(lambda: room.update(4)) == ["drop_cache", "resume 4"]
    for version in (5, 9):
        wanted = ["pause", "drop_cache", f"resume {version}"]
        assert room.done(lambda version=version: room.update(version)) == wanted
        assert room.engine.version == version


def test_an_update_of_a_paused_engine_stays_paused(serving):
    serving.operations.pause()
    serving.update(2)
    assert serving.operations.state is State.PAUSED
    assert serving.is_shut()
    serving.operations.resume()
    assert serving.serves(2)


def test_an_engine_that_should_not_serve_waits_to_be_told(address):
    with ExitStack() as stack:
        room = Room(stack, address, should_serve=False)
        room.update(1)
        assert room.operations.state is State.PAUSED
        assert room.is_shut()
        room.operations.resume()
        assert room.serves(1)


def test_an_engine_without_weights_serves_nothing_from_the_beginning(room):
    assert room.operations.state is State.CLEARED
    assert room.is_shut()
    with pytest.raises(LifecycleError, match="engine is CLEARED without weights.*send UPDATE"):
        room.operations.resume()


# Tags.


def test_tags_are_cleared_one_by_one_and_twice_is_once(serving):
    """C32: a sleep of one tag does not make a later sleep of both return early."""
    operations = serving.operations
    weights_go = ["release_experts", "release_weights", "release_groups"]
    assert serving.done(lambda: operations.clear(WEIGHTS)) == ["pause", "drop_cache", *weights_go]
    assert serving.done(lambda: operations.clear(WEIGHTS)) == []
    assert operations.condition.absent == WEIGHTS
    assert serving.done(operations.clear) == ["drop_cache", "release_cache"]
    assert operations.condition.absent == WEIGHTS | KV_CACHE
    assert serving.done(operations.clear) == []
    assert operations.state is State.CLEARED
    assert operations.version is None
    assert serving.replica.version is None


def test_a_tag_that_there_is_not_is_refused_before_anything_is_done(serving):
    """C32: it would otherwise seem to be cleared."""
    with pytest.raises(SpecError, match="tag is 'wieghts', expected 'weights' or 'kv_cache'"):
        serving.operations.clear(["wieghts"])
    assert serving.operations.state is State.SERVING
    serving.operations.clear(["weight"])  # as FastDeploy says it
    assert serving.operations.condition.absent == {Tag.WEIGHTS}


def test_clearing_nothing_is_nothing(serving):
    assert serving.done(lambda: serving.operations.clear(())) == []
    assert serving.serves(1)


@pytest.mark.parametrize("is_cache_first", [True, False])
def test_an_engine_serves_once_both_weights_and_cache_are_back(serving, is_cache_first):
    """C32: waking only one of them serves nothing, whichever comes first."""
    operations = serving.operations
    operations.clear()
    wakes = [operations.restore, lambda: serving.update(2)]
    first, second = wakes if is_cache_first else wakes[::-1]
    first()
    assert operations.state is State.CLEARED
    assert operations.condition.absent == (WEIGHTS if is_cache_first else KV_CACHE)
    assert serving.is_shut()
    second()
    assert operations.state is State.SERVING
    assert operations.version == 2
    assert serving.serves(2)


def test_a_restore_of_what_is_there_is_nothing(serving):
    assert serving.done(serving.operations.restore) == []
    serving.operations.clear(KV_CACHE)
    assert serving.done(serving.operations.restore) == ["restore_cache", "resume 1"]
    assert serving.done(serving.operations.restore) == []
    assert serving.serves(1)


def test_an_engine_that_was_paused_stays_so_through_sleep_and_wake(serving):
    operations = serving.operations
    operations.pause()
    operations.clear()
    operations.restore()
    serving.update(2)
    assert operations.state is State.PAUSED
    assert serving.is_shut()


def test_an_update_that_finds_nothing_gives_the_memory_of_a_cleared_engine_back(serving):
    operations = serving.operations
    operations.clear()
    with pytest.raises(TransferTimeout):
        operations.update(9, timeout_seconds=0.3)
    assert operations.state is State.CLEARED
    assert not operations.has_weights_memory
    operations.restore()
    serving.update(10)
    assert serving.serves(10)


# Memory.


def anonymous_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def numpy_model(num):
    block = np.random.default_rng(1).integers(0, 255, (num, 2048, 1025), dtype=np.int32)
    model = {f"layer.{n}": block[n] for n in range(num - 1)}
    return {**model, "turned": block[-1].T, "odd": np.ones(7)}


def torch_model(num):
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 1024) for _ in range(num)])
    model.turned = torch.nn.Parameter(torch.rand(300, 500).T)
    model.tied = model[0].weight
    model.register_buffer("scale", torch.rand(3))
    return model


def paddle_model(num):
    import paddle

    paddle.set_device("cpu")
    paddle.seed(1)
    model = paddle.nn.Sequential(*[paddle.nn.Linear(1024, 2048) for _ in range(num)])
    model.register_buffer("scale", paddle.rand([3]))
    return model


def leaves(model):
    if isinstance(model, dict):
        return {name: (array, array.ctypes.data, array.strides) for name, array in model.items()}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (leaf, leaf.data_ptr(), tuple(leaf.stride() if callable(leaf.stride) else leaf.strides))
        for name, leaf in found.items()
    }  # fmt: skip


def identity(model):
    return {
        name: (id(leaf), address, strides, tuple(leaf.shape), str(leaf.dtype))
        for name, (leaf, address, strides) in leaves(model).items()
    }


def as_bytes(model):
    found = {}
    for name, (leaf, _, _) in leaves(model).items():
        array = leaf if isinstance(leaf, np.ndarray) else leaf.detach().numpy()
        found[name] = array.tobytes()
    return found


def cleared_and_back(make, num, address, pipe):
    """Return how much memory a clear gave back, and what an update after it brought."""
    model = make(num)
    wanted, before = as_bytes(model), identity(model)
    nbytes = sum(map(len, wanted.values()))
    with fw.Publisher(model, address, hold=True) as publisher:
        publisher.publish(1)
        with fw.Replica(model, address) as replica:
            operations = Operations(ModelEngine(model), replica)
            operations.update(1, timeout_seconds=30)
            full = anonymous_bytes()
            operations.clear()
            empty = anonymous_bytes()
            operations.restore()
            operations.update(1, timeout_seconds=30)
            again = anonymous_bytes()
            return {
                "nbytes": nbytes,
                "given": full - empty,
                "taken": again - empty,
                "state": operations.state,
                "is_same": identity(model) == before,
                "is_whole": as_bytes(model) == wanted,
            }


@pytest.mark.parametrize("make", [numpy_model, torch_model, paddle_model])
def test_a_clear_gives_resident_memory_back_and_tensors_stay_who_they_are(make, address):
    """C15, C16: by the process's own pages; then the same objects, addresses, strides and bytes."""
    if find_spec(make.__name__.removesuffix("_model")) is None:
        pytest.skip(f"{make.__name__} needs its framework")
    with Child(cleared_and_back, make, 24, address, context=SPAWN) as child:
        found = child.result(60)
    assert found["nbytes"] > 190e6
    assert found["given"] > 0.97 * found["nbytes"]
    assert found["taken"] > 0.97 * found["nbytes"]
    assert found["state"] is State.SERVING
    assert found["is_same"]
    assert found["is_whole"]


# Following.


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
                taken += self._machine.follow(timeout_seconds=30, is_over=self._is_over.is_set)
            except FlyweightError as error:
                self.errors.append(error)
        return taken

    @property
    def is_done(self):
        return self._future.done()

    def end(self, weights):
        self._is_over.set()
        weights.wake()
        return self._future.result(10)


@pytest.fixture
def followed(room, threads):
    room.follower = Follower(room.operations, threads)
    yield room
    if not room.follower.is_done:
        room.follower.end(room.replica)


def publish_to_one(room, version):
    assign(room.trainer, version)
    return room.publisher.publish(version, num_replicas=1, timeout_seconds=20)


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
    started = time.monotonic()
    assert followed.operations.update(timeout_seconds=20).version == 1  # it came by following
    assert followed.operations.update(1, timeout_seconds=20).version == 1
    assert time.monotonic() - started < 10
    followed.publish(2)
    assert followed.operations.update(timeout_seconds=20).version == 2  # and nothing is pinned
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
    assert not followed.operations.has_weights_memory


def test_a_pinned_version_is_not_left_for_a_newer_one(followed):
    publish_to_one(followed, 1)
    until(lambda: followed.operations.state is State.SERVING)
    followed.operations.update(1, timeout_seconds=20)
    followed.publish(2)
    assert followed.serves(1)
    followed.operations.update(timeout_seconds=20)
    assert followed.serves(2)


def test_a_pause_waits_for_a_round_that_nobody_asked_for(followed, threads):
    publish_to_one(followed, 1)
    until(lambda: followed.operations.state is State.SERVING)
    with followed.request(threads) as (answered, may_end):
        publish = threads.submit(publish_to_one, followed, 2)
        until(lambda: followed.operations.state is State.PAUSING)
        with pytest.raises(Busy, match="update is running, pause was not begun"):
            followed.operations.pause(timeout_seconds=0.05)
        pause = threads.submit(followed.operations.pause, timeout_seconds=20)
        may_end.set()
        assert answered.result(10) == (1, True)
        pause.result(20)
        publish.result(20)
    assert followed.operations.state is State.PAUSED
    assert followed.operations.version == 2


def test_a_round_that_has_no_turn_leaves_what_runs_alone(serving, threads, monkeypatch):
    """An engine that stands still for a clear is not told to go on beside it."""
    monkeypatch.setattr("flyweight.lifecycle.operations.ROUND_SECONDS", 0.1)
    serving.publish(2)
    serving.operations.update(timeout_seconds=20)  # no pin
    began, may_end = threading.Event(), threading.Event()

    def hold():
        began.set()
        assert may_end.wait(30)

    serving.engine.drop_cache = hold
    clear = threads.submit(serving.operations.clear, KV_CACHE)
    assert began.wait(10)
    serving.publish(3)
    with pytest.raises(Busy, match="clear is running, update was not begun"):
        serving.operations.follow(timeout_seconds=20, is_over=lambda: False)
    assert serving.operations.state is State.PAUSED
    assert serving.is_shut()
    may_end.set()
    clear.result(20)
    assert serving.operations.state is State.CLEARED


def test_a_closed_worker_leaves_no_thread_and_no_file(address, tmp_path):
    before = resources()
    with ExitStack() as stack:
        room = Room(stack, address)
        with Worker(room.engine, room.replica, tmp_path / "cell") as worker:
            publish_to_one(room, 1)
            until(lambda: worker.operations.state is State.SERVING)
            with Control(tmp_path / "cell") as control:
                operation = control.wait(control.start(Signal.PAUSE), 20)
                assert operation.ending == "done", operation.reason
        worker.close()
        threads = [t.name for t in threading.enumerate()]
        assert not {"flyweight-worker", "flyweight-follow", "flyweight-beat"} & set(threads)
        assert worker.operations.state is State.PAUSED  # the engine stays as it is
    assert settled(before) == before


def test_a_worker_whose_engine_cannot_stand_still_leaves_its_rank_free(address, tmp_path):
    model = weights(0)
    engine = FaultyEngine(model)
    engine.faults = {"pause": RuntimeError("on purpose")}
    with fw.Replica(model, address) as replica:
        with pytest.raises(LifecycleError, match="the engine's pause failed"):
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
            operation = control.wait(control.start(signal, version=version), 20)
            assert operation.ending == "done", operation.reason
        assert worker.operations.pinned == 1
        assert room.serves(1)


def test_an_engine_that_follows_a_store_never_goes_back(tmp_path):
    """Versions only grow, also where the newest was removed."""
    model, store = weights(0), tmp_path / "store"
    fw.save(weights(5), store, version=5)
    operations = Operations(ModelEngine(model), StoredWeights(model, store))
    operations.update(timeout_seconds=5)
    for path in list(store.iterdir()):
        path.rename(tmp_path / path.name)
    fw.save(weights(3), store, version=3)
    assert not operations.follow(timeout_seconds=0.3, is_over=lambda: False)
    assert operations.state is State.SERVING
    assert holds(model, 5)


# Several ranks.


class SlowWeights:
    """A replica whose copies wait while a test holds them."""

    def __init__(self, replica):
        self._replica = replica
        self.has_begun, self.may_copy = threading.Event(), threading.Event()
        self.may_copy.set()

    def __getattr__(self, name):
        return getattr(self._replica, name)

    def update(self, version=None, *, before, **options):
        def hold(found):
            before(found)
            self.has_begun.set()
            assert self.may_copy.wait(30)

        return self._replica.update(version, before=hold, **options)


class Pair:
    """Two ranks of one replica, in threads."""

    def __init__(self, stack, address, threads, **options):
        self._threads, store = threads, FakeRendezvousStore()
        self.trainer = weights(0)
        self.publisher = stack.enter_context(fw.Publisher(self.trainer, address, **options))
        self.models = [weights(0), weights(0)]
        self.engines = [FaultyEngine(model) for model in self.models]
        self.ranks = [RankAgreement(Rendezvous(rank, 2, store, "pair")) for rank in range(2)]
        self.operations, self.replicas, self.weights = [], [], []
        for model, engine, ranks in zip(self.models, self.engines, self.ranks, strict=True):
            self.replicas.append(stack.enter_context(fw.Replica(model, address)))
            self.weights.append(SlowWeights(self.replicas[-1]))
            self.operations.append(Operations(engine, self.weights[-1], ranks))
        stack.callback(self.part)

    def part(self):
        """Have both ranks leave at once: each waits a while for the other to leave too."""
        for future in [self._threads.submit(ranks.close) for ranks in self.ranks]:
            future.result(10)

    def both(self, work):
        """Have both ranks do something at once; return what each raised."""
        return [future.exception(30) for future in [self.one(work, rank) for rank in range(2)]]

    def one(self, work, rank):
        return self._threads.submit(work, self.operations[rank])

    @contextmanager
    def held(self, rank, step="drop_cache"):
        """Have a step of one rank's engine last to the end of the block; yields whether it began."""
        began, may_end = threading.Event(), threading.Event()

        def hold(*args):
            began.set()
            assert may_end.wait(30)

        setattr(self.engines[rank], step, hold)
        try:
            yield began
        finally:
            delattr(self.engines[rank], step)
            may_end.set()

    @contextmanager
    def request(self, rank):
        """A request that runs on one rank to the end of the block."""
        began, may_end = threading.Event(), threading.Event()

        def answer(_):
            with self.engines[rank].request(5):
                began.set()
                assert may_end.wait(30)

        future = self.one(answer, rank)
        assert began.wait(10)
        try:
            yield
        finally:
            may_end.set()
            future.result(10)

    def publish(self, version, **options):
        assign(self.trainer, version)
        self.publisher.publish(version, **options)

    def update(self, version):
        self.publish(version)
        return self.both(lambda operations: operations.update(version, timeout_seconds=20))

    @property
    def states(self):
        return [operations.state for operations in self.operations]

    @property
    def versions(self):
        return [operations.version for operations in self.operations]


@pytest.fixture
def pair(address, threads):
    with ExitStack() as stack:
        found = Pair(stack, address, threads, hold=True)
        assert found.update(1) == [None, None]
        assert found.states == [State.SERVING, State.SERVING]
        yield found


def test_ranks_take_a_version_together(pair):
    assert pair.update(2) == [None, None]
    assert pair.versions == [2, 2]
    assert all(holds(model, 2) for model in pair.models)


@pytest.mark.parametrize("is_gone", [False, True], ids=["there", "gone"])
def test_a_rank_that_was_given_an_older_version_catches_up(address, threads, tmp_path, is_gone):
    """One rank takes the newest snapshot just before the other takes what is published next."""
    asked, has_begun, store = [], threading.Event(), tmp_path / "store"
    fw.save(weights(2), store, version=2)
    with ExitStack() as stack:
        pair = Pair(stack, address, threads, store=store)
        first, second = (replica.update for replica in pair.replicas)
        publishing = []

        def newer(version=None, **options):
            asked.append((0, version))
            if not publishing:
                assert has_begun.wait(20)
                publishing.append(threads.submit(pair.publish, 3, num_replicas=1))
                version = 3
            return first(version, **options)

        def older(version=None, *, before, **options):
            def begun(found):
                has_begun.set()
                before(found)

            asked.append((1, version))
            if version == 3:
                last = 4 if is_gone else 3
                fw.save(weights(last), store, version=last)
            return second(version, before=begun, **options)

        pair.replicas[0].update, pair.replicas[1].update = newer, older
        assert pair.both(lambda operations: operations.update(timeout_seconds=20)) == [None, None]
        publishing[0].result(20)
        last = 4 if is_gone else 3
        assert pair.versions == [last, last]
        assert all(holds(model, last) for model in pair.models)
        assert pair.states == [State.SERVING, State.SERVING]
        ways = [(0, None), (1, None), (1, 3), *[(0, None), (1, None)][: 2 * is_gone]]
        assert sorted(map(str, asked)) == sorted(map(str, ways))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_prepare_keeps_all_at_the_old_version_at_once(pair, rank):
    """C24: the reason reaches every rank, and none was touched."""
    pair.engines[rank].faults = {"drop_cache": RuntimeError("on purpose")}
    started = time.monotonic()
    raised = pair.update(2)
    assert time.monotonic() - started < 10
    assert all("drop_cache failed: RuntimeError: on purpose" in str(each) for each in raised)
    assert pair.states == [State.SERVING, State.SERVING]
    assert pair.versions == [1, 1]
    assert all(holds(model, 1) for model in pair.models)
    pair.engines[rank].faults = {}
    assert pair.update(3) == [None, None]
    assert pair.versions == [3, 3]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_memory_does_not_come_back_does_not_leave_the_other_waiting(pair, rank):
    """C24: on every rank, at once; peers do not wait for a deadline."""
    assert pair.both(lambda operations: operations.clear()) == [None, None]
    pair.engines[rank].faults = {"restore_weights": MemoryError("on purpose")}
    started = time.monotonic()
    raised = pair.update(2)
    assert time.monotonic() - started < 10
    assert all("restore_weights failed: MemoryError" in str(each) for each in raised)
    assert State.SERVING not in pair.states
    pair.engines[rank].faults = {}
    assert pair.both(lambda operations: operations.restore()) == [None, None]
    assert pair.update(3) == [None, None]
    assert pair.states == [State.SERVING, State.SERVING]
    assert pair.versions == [3, 3]


def test_a_rank_that_refuses_to_resume_keeps_the_other_from_serving(pair):
    """C32: on all ranks or on none."""
    assert pair.both(lambda operations: operations.pause()) == [None, None]
    pair.operations[1].retire(LifecycleError("gone wrong"))
    raised = pair.both(lambda operations: operations.resume(timeout_seconds=10))
    assert all("engine is FAILED" in str(each) for each in raised)
    assert pair.states == [State.PAUSED, State.FAILED]
    assert pair.update(2) == [None, None]
    assert pair.both(lambda operations: operations.resume(timeout_seconds=10)) == [None, None]
    assert pair.states == [State.SERVING, State.SERVING]


# One rank at something that the others are not at.


@pytest.mark.parametrize("rank", [0, 1])
def test_a_second_pause_that_is_asked_of_one_rank_alone_does_not_end_the_first(pair, rank):
    """It is Busy by itself: what it said would be taken for a word on the one that runs."""
    with pair.held(rank, "pause") as is_held:
        first = [
            pair.one(lambda operations: operations.pause(timeout_seconds=20), n) for n in (0, 1)
        ]
        assert is_held.wait(10)
        second = pair.one(lambda operations: operations.pause(timeout_seconds=0.3), rank)
        assert isinstance(second.exception(10), Busy)
    assert [each.exception(20) for each in first] == [None, None]
    assert pair.states == [State.PAUSED, State.PAUSED]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("other", ["clear", "resume"])
def test_ranks_that_were_asked_for_different_things_stop_by_one_verdict(pair, other, rank):
    """C32: when the time of the first is over; nothing has changed, on any."""
    one = pair.one(lambda operations: operations.pause(timeout_seconds=0.5), rank)
    two = pair.one(lambda operations: getattr(operations, other)(timeout_seconds=20), 1 - rank)
    raised = [one.exception(10), two.exception(10)]
    assert all("the ranks were asked for different things" in str(each) for each in raised)
    assert (pair.states, pair.versions) == ([State.SERVING] * 2, [1, 1])
    assert pair.both(lambda operations: operations.pause(timeout_seconds=20)) == [None, None]


def test_a_time_that_ran_out_is_no_fault_of_what_the_ranks_decide_next(threads, monkeypatch):
    """The time of rank 1 alone ran out, some time ago; rank 2 hears of it from rank 0."""
    store, groups = FakeRendezvousStore(), {}

    def joined(rendezvous, **options):
        return groups.setdefault(rendezvous.rank, join_group(rendezvous, **options))

    monkeypatch.setattr("flyweight.lifecycle.agreement.join_group", joined)
    ranks = [RankAgreement(Rendezvous(rank, 3, store, "three")) for rank in range(3)]

    def all_prepared():
        futures = [threads.submit(each.prepared, None, time.monotonic() + 20) for each in ranks]
        return [future.result(30) for future in futures]

    assert all(verdict.is_agreed for verdict in all_prepared())
    monkeypatch.undo()
    assert ranks[1].agreed(1, "", None, time.monotonic() + 0.1, what="resume").is_lost
    until(lambda: groups[0].can_rejoin and groups[2].can_rejoin)
    assert all(verdict.is_agreed for verdict in all_prepared())
    for parting in [threads.submit(each.close) for each in ranks]:
        parting.result(10)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hears_nobody_ends_within_what_its_controller_waits(pair, rank):
    """It does not wait for the others to leave as well, who know nothing of it."""
    started = time.monotonic()
    verdict = pair.ranks[rank].prepared(None, started + 0.1)
    assert verdict.is_lost
    assert time.monotonic() - started < 2.4


def test_a_restore_that_one_rank_is_not_at_brings_nothing_back(pair):
    assert pair.both(lambda operations: operations.clear(KV_CACHE)) == [None, None]
    calls = len(pair.engines[0].calls)
    lone = pair.one(lambda operations: operations.restore(timeout_seconds=0.1), 0)
    assert "the ranks did not decide" in str(lone.exception(20))
    assert "restore_cache" not in pair.engines[0].calls[calls:]
    assert Tag.KV_CACHE in pair.operations[0].condition.absent


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cache_that_one_rank_lacks_keeps_the_other_from_serving(pair, rank):
    assert pair.both(lambda operations: operations.clear(KV_CACHE)) == [None, None]
    pair.engines[rank].faults = {"restore_cache": MemoryError("on purpose")}
    raised = pair.both(lambda operations: operations.restore(timeout_seconds=20))
    assert all("restore_cache failed: MemoryError" in str(each) for each in raised)
    assert State.SERVING not in pair.states
    pair.engines[rank].faults = {}
    assert pair.both(lambda operations: operations.restore(timeout_seconds=20)) == [None, None]
    assert pair.states == [State.SERVING, State.SERVING]


def test_a_pause_that_should_resume_brings_ranks_that_stand_apart_together(pair):
    pair.engines[1].faults = {"resume": RuntimeError("on purpose")}
    assert isinstance(pair.update(2)[1], LifecycleError)
    assert pair.states == [State.SERVING, State.PAUSED]
    pair.engines[1].faults = {}
    aborted = pair.both(lambda operations: operations.pause(should_abort=True, should_resume=True))
    assert aborted == [None, None]
    assert pair.states == [State.SERVING, State.SERVING]


def test_a_pause_that_should_resume_stays_on_all_ranks_where_one_was_paused_by_hand(pair):
    pair.operations[1].is_paused_by_hand = True  # as a worker does that takes over
    paused = pair.both(lambda operations: operations.pause(should_abort=True, should_resume=True))
    assert paused == [None, None]
    assert pair.states == [State.PAUSED, State.PAUSED]
    assert all(operations.is_paused_by_hand for operations in pair.operations)
    assert pair.both(lambda operations: operations.resume()) == [None, None]
    assert pair.states == [State.SERVING, State.SERVING]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_round_that_one_rank_has_no_turn_for_ends_on_the_other_too(pair, rank, monkeypatch):
    """The pause that has the turn there drains for long; the other rank joins it afterwards."""
    for module in ("operations", "update"):
        monkeypatch.setattr(f"flyweight.lifecycle.{module}.ROUND_SECONDS", 0.5)

    def follow(operations):
        return operations.follow(timeout_seconds=20, is_over=lambda: False)

    pair.publish(2)
    pair.both(lambda operations: operations.update(timeout_seconds=20))  # no pin
    with pair.request(rank):
        pauses = [pair.one(lambda operations: operations.pause(timeout_seconds=20), rank)]
        until(lambda: pair.states[rank] is State.PAUSING)
        pair.publish(3)
        raised = pair.both(follow)
        assert [type(each) for each in raised] == [
            (Busy, LifecycleError)[rank],
            (LifecycleError, Busy)[rank],
        ]
        assert all("pause is running, update was not begun" in str(each) for each in raised)
        assert pair.states[1 - rank] is State.SERVING
        pauses.append(pair.one(lambda operations: operations.pause(timeout_seconds=20), 1 - rank))
    assert [each.exception(20) for each in pauses] == [None, None]
    assert (pair.states, pair.versions) == ([State.PAUSED] * 2, [2, 2])


def test_an_engine_that_must_stop_waits_for_what_one_rank_is_at_alone(pair):
    """Nothing may be left serving because something else ran."""
    with pair.held(1) as is_held:
        lone = pair.one(lambda operations: operations.clear(timeout_seconds=20), 1)
        assert is_held.wait(10)
        retired = pair.one(lambda operations: operations.retire(LifecycleError("gone wrong")), 1)
        other = pair.one(lambda operations: operations.clear(timeout_seconds=20), 0)
        assert not wait([retired], 0.3).done
    assert [each.exception(20) for each in (lone, other, retired)] == [None] * 3
    assert pair.states == [State.CLEARED, State.FAILED]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pause_that_one_rank_has_no_time_for_leaves_all_serving(pair, rank):
    """C32: the rank that drained at once hears why, and does not take the other for lost."""
    with pair.request(rank):
        raised = pair.both(lambda operations: operations.pause(timeout_seconds=0.6))
        assert isinstance(raised[rank], TransferTimeout)
        assert "1 requests were still running" in str(raised[1 - rank])
        assert pair.states == [State.SERVING, State.SERVING]
    assert pair.both(lambda operations: operations.pause(timeout_seconds=20)) == [None, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_round_that_all_ranks_are_in_is_not_ended_by_what_they_refuse_meanwhile(pair, rank):
    """One rank holds the version already and waits for the other, which is still copying."""
    slow = pair.weights[rank]
    slow.has_begun.clear()
    slow.may_copy.clear()
    pair.publish(2)
    updates = [
        pair.one(lambda operations: operations.update(2, timeout_seconds=20), n) for n in (0, 1)
    ]
    assert slow.has_begun.wait(10)
    until(lambda: pair.states[1 - rank] is State.VERIFYING)
    for seconds in (0.3, 0.1):
        raised = pair.both(lambda operations: operations.pause(timeout_seconds=seconds))  # noqa: B023
        assert [type(each) for each in raised] == [Busy, Busy]
    only = pair.one(lambda operations: operations.pause(timeout_seconds=0.1), rank)
    assert isinstance(only.exception(10), Busy)
    slow.may_copy.set()
    assert [update.exception(20) for update in updates] == [None, None]
    assert (pair.states, pair.versions) == ([State.SERVING] * 2, [2, 2])
