"""What every Engine promises to the machine that drives it."""

import threading
import time

import numpy as np
import paddle
import pytest
import torch

from flyweight.engines.fastdeploy_engine import FastDeployEngine, FastDeployHooks
from flyweight.errors import LifecycleError, TransferTimeout
from flyweight.lifecycle.engine import ModelEngine


class GateHooks(FastDeployHooks):
    """Hooks of a FastDeploy engine that stops and takes requests at a gate of its own."""

    def __init__(self, gate):
        super().__init__(parallel_config=None)
        self.pause, self.resume, self._gate = gate.pause, gate.resume, gate

    @property
    def num_running(self):
        return self._gate.num_running


def fastdeploy():
    gate, state = ModelEngine({}), paddle.nn.Linear(512, 512).state_dict()
    return FastDeployEngine(
        GateHooks(gate), state, has_experts=False, check_filled=lambda: None
    ), gate.request


def model_engine(model):
    engine = ModelEngine(model)
    return engine, engine.request


ENGINES = {
    "a model of numpy": lambda: model_engine({"w": np.ones(1 << 20)}),
    "a model of torch": lambda: model_engine(torch.nn.Linear(512, 512)),
    "fastdeploy": fastdeploy,
}
SOON, LATE = 0.05, 20.0


@pytest.fixture(params=ENGINES)
def made(request):
    """An engine, and a function that makes a request to it."""
    return ENGINES[request.param]()


@pytest.fixture
def engine(made):
    return made[0]


@pytest.fixture
def request_to(made):
    return made[1]


@pytest.fixture
def running(engine, request_to):
    """A request that runs until it is told to end."""
    engine.resume(1)
    has_begun, may_end = threading.Event(), threading.Event()

    def answer():
        with request_to():
            has_begun.set()
            may_end.wait(LATE)

    thread = threading.Thread(target=answer)
    thread.start()
    assert has_begun.wait(LATE)
    yield may_end
    may_end.set()
    thread.join(LATE)


def test_no_request_is_taken_before_it_is_told_to(engine, request_to):
    with pytest.raises(LifecycleError, match="accepted no requests"), request_to(SOON):
        pass
    engine.resume(3)
    with request_to(SOON) as version:
        assert (version, engine.num_running) == (3, 1)
    assert engine.num_running == 0


def test_a_pause_returns_once_nothing_runs_and_then_nothing_starts(engine, request_to, running):
    threading.Timer(SOON, running.set).start()
    engine.pause(time.monotonic() + LATE)
    assert engine.num_running == 0
    with pytest.raises(LifecycleError), request_to(SOON):
        pass


def test_a_pause_that_cannot_be_is_told_at_its_deadline_and_resume_undoes_it(
    engine, request_to, running
):
    began = time.monotonic()
    with pytest.raises(TransferTimeout, match="1 requests were still running"):
        engine.pause(began + SOON)
    assert time.monotonic() - began < LATE / 2
    engine.resume(1)
    with request_to(SOON) as version:
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
