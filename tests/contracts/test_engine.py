"""What every Engine promises to the machine that drives it."""

import threading
import time

import numpy as np
import pytest
import torch

from flyweight.errors import LifecycleError, TransferTimeout
from flyweight.lifecycle.engine import ModelEngine

ENGINES = {
    "a model of numpy": lambda: ModelEngine({"w": np.ones(1 << 20)}),
    "a model of torch": lambda: ModelEngine(torch.nn.Linear(512, 512)),
}
SOON, LATE = 0.05, 20.0


@pytest.fixture(params=ENGINES)
def engine(request):
    return ENGINES[request.param]()


@pytest.fixture
def running(engine):
    """A request that runs until it is told to end."""
    engine.resume(1)
    has_begun, may_end = threading.Event(), threading.Event()

    def answer():
        with engine.request():
            has_begun.set()
            may_end.wait(LATE)

    thread = threading.Thread(target=answer)
    thread.start()
    assert has_begun.wait(LATE)
    yield may_end
    may_end.set()
    thread.join(LATE)


def test_no_request_is_taken_before_it_is_told_to(engine):
    with pytest.raises(LifecycleError, match="took no requests"), engine.request(SOON):
        pass
    engine.resume(3)
    with engine.request(SOON) as version:
        assert (version, engine.num_running) == (3, 1)
    assert engine.num_running == 0


def test_a_pause_returns_once_nothing_runs_and_then_nothing_starts(engine, running):
    threading.Timer(SOON, running.set).start()
    engine.pause(time.monotonic() + LATE)
    assert engine.num_running == 0
    with pytest.raises(LifecycleError), engine.request(SOON):
        pass


def test_a_pause_that_cannot_be_is_told_at_its_deadline_and_resume_undoes_it(engine, running):
    began = time.monotonic()
    with pytest.raises(TransferTimeout, match="1 requests were still running"):
        engine.pause(began + SOON)
    assert time.monotonic() - began < LATE / 2
    engine.resume(1)
    with engine.request(SOON) as version:
        assert version == 1


def test_a_deadline_that_has_passed_asks_for_a_pause_only_if_nothing_runs(engine, running):
    with pytest.raises(TransferTimeout):
        engine.pause(time.monotonic() - 1)
    running.set()
    engine.pause(time.monotonic() + LATE)
    engine.pause(time.monotonic() - 1)


def test_release_and_restore_may_find_nothing_to_do(engine):
    engine.pause(time.monotonic())
    for step in (engine.restore_weights, engine.restore_cache, engine.restore_experts):
        step()
    for _ in range(2):
        engine.release_weights()
        engine.release_cache()
    for _ in range(2):
        engine.restore_weights()
        engine.restore_cache()
    engine.drop_cache()
    engine.abort_requests()
