"""Requests that run, or come, while an engine is paused, cleared or updated."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from child_processes import LIMIT, until
from faulty_engines import KV_CACHE
from flyweight.errors import Busy, LifecycleError
from flyweight.lifecycle.states import State
from versioned_models import holds


def test_every_request_is_answered_with_one_whole_version(room):
    """C34: also those that run while versions come; compared byte by byte, at begin and end."""
    room.update(1)
    is_over, seen = threading.Event(), set()

    def ask():
        answered = []
        while not is_over.is_set():
            with room.engine.request(LIMIT) as version:
                assert holds(room.model, version)
                assert holds(room.model, version)
                answered.append(version)
            seen.add(version)
        assert answered == sorted(answered)  # never an older one after a newer

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        try:
            for version in range(2, 12):
                room.update(version)
                until(lambda version=version: version in seen)
        finally:
            is_over.set()
        for each in asking:
            each.result(LIMIT)
    assert room.operations.num_rounds == 11


def test_a_request_that_runs_is_finished_with_the_old_version_and_the_next_sees_the_new(
    serving, threads
):
    with serving.request(threads) as (answered, may_end):
        serving.publish(2)
        update = threads.submit(serving.operations.update, 2, timeout_seconds=LIMIT)
        until(lambda: serving.operations.state is State.PAUSING)
        after = threads.submit(serving.serves, 2)  # waits at the gate
        assert not answered.done()
        may_end.set()
        assert answered.result(LIMIT) == (1, True)
        assert update.result(LIMIT).version == 2
        assert after.result(LIMIT)


def test_an_update_that_may_not_drain_is_refused_while_requests_run(serving, threads):
    with serving.request(threads) as (answered, may_end):
        with pytest.raises(LifecycleError, match="running"):
            serving.update(2, may_drain=False)
        assert serving.operations.state is State.SERVING
        assert serving.serves(1)
        may_end.set()
        assert answered.result(LIMIT) == (1, True)
    serving.operations.update(2, may_drain=False)
    assert serving.serves(2)


def test_a_clear_that_may_not_drain_is_refused_while_requests_run(serving, threads):
    with serving.request(threads):
        with pytest.raises(LifecycleError, match="running"):
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
        pause = threads.submit(operations.pause, timeout_seconds=LIMIT)
        until(lambda: operations.state is State.PAUSING)
        with pytest.raises(Busy, match="pause is running"):
            operations.pause(timeout_seconds=0.05)
        with pytest.raises(Busy, match="pause is running"):
            operations.clear(timeout_seconds=0.05)
        assert operations.state is State.PAUSING
        may_end.set()
        pause.result(LIMIT)
    assert operations.state is State.PAUSED
    operations.pause()
    assert operations.state is State.PAUSED
