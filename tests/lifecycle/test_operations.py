"""One engine through every step, each failing on purpose, with a real trainer beside it."""

from contextlib import ExitStack

import pytest

import flyweight as fw
from child_processes import LIMIT
from conftest import flip
from faulty_engines import KV_CACHE, WEIGHTS, FaultyEngine, Room
from flyweight.errors import (
    ChecksumMismatch,
    FlyweightError,
    LifecycleError,
    PeerLost,
    SpecError,
    TransferTimeout,
    VersionError,
)
from flyweight.lifecycle.engine import ModelEngine
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import State, Tag
from flyweight.lifecycle.weights import StoredWeights
from versioned_models import holds, weights

# How failures end: the table of operations.py.


def test_a_pause_that_runs_out_of_time_leaves_the_engine_serving(serving, threads):
    """C32: a pause that did not come about is no pause."""
    with serving.request(threads) as (answered, may_end):
        with pytest.raises(TransferTimeout, match="still running"):
            serving.operations.pause(timeout_seconds=0.1)
        assert serving.operations.state is State.SERVING
        assert serving.serves(1)
        may_end.set()
        assert answered.result(LIMIT) == (1, True)
    serving.operations.pause()
    assert serving.operations.state is State.PAUSED
    assert serving.is_shut()


@pytest.mark.parametrize("step", ["pause", "abort_requests"])
def test_a_pause_that_raises_leaves_the_engine_serving(serving, step):
    serving.engine.faults = {step: RuntimeError("on purpose")}
    with pytest.raises(LifecycleError, match=f"{step} .*on purpose"):
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
    with pytest.raises(LifecycleError, match="drop_cache"):
        serving.update(2)
    assert serving.operations.condition.state is State.SERVING
    assert serving.operations.version == 1
    assert serving.serves(1)


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_clear_whose_cache_is_not_dropped_changes_nothing(serving, is_paused):
    if is_paused:
        serving.operations.pause()
    serving.engine.faults = {"drop_cache": RuntimeError("on purpose")}
    with pytest.raises(LifecycleError, match="drop_cache"):
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
    with pytest.raises(LifecycleError, match=f"{step} .*on purpose"):
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
    with pytest.raises(LifecycleError, match=f"{step} .*MemoryError"):
        serving.update(2)
    assert serving.operations.state is State.FAILED
    assert serving.is_shut()
    serving.engine.faults = {}
    serving.update(3)
    assert serving.serves(3)


def test_a_cache_that_does_not_come_back_stays_away_and_can_be_asked_for_again(serving):
    serving.operations.clear(KV_CACHE)
    serving.engine.faults = {"restore_cache": MemoryError("on purpose")}
    with pytest.raises(LifecycleError, match="restore_cache .*MemoryError"):
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


@pytest.mark.parametrize(
    ("version", "error", "seconds"), [(7, TransferTimeout, 0.3), (0, VersionError, LIMIT)]
)
def test_an_update_that_finds_nothing_leaves_the_old_version_served_and_stops_no_request(
    serving, version, error, seconds
):
    """Waiting costs no request: they stand still only while a version is copied."""
    update = serving.operations.update
    assert serving.done(lambda: refused(error, update, version, timeout_seconds=seconds)) == []
    assert serving.operations.state is State.SERVING
    assert serving.serves(1)


def test_an_update_that_brings_nothing_new_fails_and_the_engine_serves_on(serving):
    """C24: a caller that waits for the next policy must not take the old one for it."""

    def update():
        with pytest.raises(TransferTimeout):
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
    with pytest.raises(LifecycleError, match="FAILED"):
        operations.resume()
    with pytest.raises(LifecycleError, match="accepted no requests"), engine.request(0):
        pass
    with pytest.raises(ChecksumMismatch):  # it does not heal by what broke it
        operations.update(2)
    operations.update(3)
    assert operations.state is State.SERVING
    assert operations.failure is None
    with engine.request(LIMIT) as version:
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
        fw.Publisher(weights(1), address, keep="memory") as publisher,
        fw.Replica(load, address, framework="numpy") as replica,
    ):
        operations = Operations(ModelEngine(model), replica)
        publisher.publish(1)
        with pytest.raises(FlyweightError, match="in the middle"):
            operations.update(1, timeout_seconds=LIMIT)
        assert operations.state is State.FAILED
        trouble.clear()
        operations.update(1, timeout_seconds=LIMIT)
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
        fw.Publisher(model, address, keep="memory") as publisher,
        fw.Replica(load, address, framework="numpy") as replica,
    ):
        operations = Operations(ModelEngine(model), replica)
        for version in (1, 2):
            seen.clear()
            publisher.publish(version)
            assert operations.percent == 0
            operations.update(version, timeout_seconds=LIMIT)
            percents = [percent for _, percent in seen]
            assert {state for state, _ in seen} == {State.UPDATING}
            assert percents == sorted(percents)
            assert 0 < percents[0] < 100
            assert 50 < percents[-1] <= 100
        assert operations.percent == 0


def test_an_update_whose_resume_raises_stays_paused_with_the_new_version(serving):
    serving.engine.faults = {"resume": RuntimeError("on purpose")}
    with pytest.raises(LifecycleError, match="resume"):
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
    with pytest.raises(LifecycleError, match="CLEARED"):
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
    with pytest.raises(SpecError, match="wieghts"):
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
    assert not operations._steps.has_weights_memory
    operations.restore()
    serving.update(10)
    assert serving.serves(10)


def test_an_engine_that_serves_already_goes_on_until_its_first_update(address, threads):
    model, target = weights(1), weights(50)
    engine = ModelEngine(target)
    engine.resume(None)
    with (
        fw.Publisher(model, address) as publisher,
        fw.Replica(target, address) as replica,
        engine.request(LIMIT),
    ):
        operations = Operations(engine, replica, is_serving=True)
        assert (operations.state, operations.version) == (State.SERVING, None)
        with engine.request(LIMIT) as version:
            assert version is None
        with pytest.raises(TransferTimeout):
            operations.update(9, timeout_seconds=0.2)
        assert operations.state is State.SERVING
    with (
        fw.Publisher(model, address, keep="memory") as publisher,
        fw.Replica(target, address) as replica,
    ):
        operations = Operations(engine, replica, is_serving=True)
        publisher.publish(1)
        operations.update(1)
        assert (operations.state, operations.version) == (State.SERVING, 1)
        with engine.request(LIMIT) as version:
            assert (version, holds(target, 1)) == (1, True)


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_engine_that_loses_its_version_while_it_follows_has_failed(
    serving, monkeypatch, is_lost
):
    """It is paused, and serves nothing until a complete update succeeds."""
    serving.operations.pinned = None  # it follows

    def take(options):
        if is_lost:
            serving.replica.forget("the engine was restarted")
        raise PeerLost("the engine is gone")

    with monkeypatch.context() as patch:
        patch.setattr(serving.replica, "take", take)
        with pytest.raises(PeerLost):
            serving.operations.follow(timeout_seconds=LIMIT, is_over=lambda: False)
    if not is_lost:
        assert serving.serves(1)
        return
    assert serving.operations.state is State.FAILED
    assert serving.is_shut()
    serving.update(2)
    assert serving.serves(2)
