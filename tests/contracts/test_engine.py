"""What every Engine promises to the worker that drives it. A new one joins by a line in ENGINES."""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import paddle
import pytest
import torch

from child_processes import LIMIT, in_time, until
from fake_vllm import FakeVllm
from fakes import FakeEngine
from flyweight.engines.fastdeploy_engine import FastDeployEngine, FastDeployHooks
from flyweight.engines.vllm import VllmEngine
from flyweight.errors import LifecycleError, TransferTimeout
from flyweight.lifecycle.engine import ModelEngine
from flyweight.ports import Engine

SOON, LATE = 0.05, 2 * LIMIT


@dataclass(frozen=True)
class Driven:
    """An engine, and how a request of a user reaches it."""

    engine: Engine
    request: Callable
    """Takes seconds to wait while the engine is paused; a context that gives the version."""
    can_release: bool = True
    """False if it refuses to release memory."""
    names_versions: bool = True
    """False if requests learn the version from an update, not from `resume`."""

    def knows(self, found, version):
        """True if a request was answered with a version, as far as it can know."""
        return found == (version if self.names_versions else None)


def model_engine(model):
    engine = ModelEngine(model)
    return Driven(engine, engine.request)


def fastdeploy():
    """FastDeploy's engine, with hooks that pause and resume another engine."""
    inner = FakeEngine()

    class Hooks(FastDeployHooks):
        def pause(self, deadline):
            inner.pause(deadline)

        def resume(self, version):
            inner.resume(version)

        @property
        def num_running(self):
            return inner.num_running

    state = paddle.nn.Linear(512, 512).state_dict()
    engine = FastDeployEngine(Hooks(None), state, has_experts=False, check_filled=lambda: None)
    return Driven(engine, inner.request)


def vllm():
    """A stand-in for a vLLM server, controlled over HTTP; paused, as engines start here."""
    server = FakeVllm()
    server.is_paused = True
    engine = VllmEngine(server.address, "unix:nowhere")
    weakref.finalize(engine, server.close)
    return Driven(engine, server.request, can_release=False, names_versions=False)


def third_party():
    engine = FakeEngine()
    return Driven(engine, engine.request)


ENGINES = {
    "a model of numpy": lambda: model_engine({"w": np.ones(1 << 20)}),
    "a model of torch": lambda: model_engine(torch.nn.Linear(512, 512)),
    "FastDeploy's runner": fastdeploy,
    "vLLM's server": vllm,
    "a third party's": third_party,
}


@pytest.fixture(params=ENGINES)
def driven(request):
    return ENGINES[request.param]()


@pytest.fixture
def engine(driven):
    return driven.engine


@pytest.fixture
def running(driven):
    """A request that runs until it is told to end."""
    driven.engine.resume(1)
    has_begun, may_end = threading.Event(), threading.Event()

    def answer():
        with driven.request(LATE):
            has_begun.set()
            may_end.wait(LATE)

    thread = threading.Thread(target=answer)
    thread.start()
    assert has_begun.wait(LATE)
    yield may_end
    may_end.set()
    thread.join(LATE)


def test_no_request_is_taken_before_it_is_told_to(driven):
    with pytest.raises(LifecycleError), driven.request(SOON):
        pass
    driven.engine.resume(3)
    with driven.request(LATE) as version:
        assert driven.knows(version, 3)
        assert driven.engine.num_running == 1
    assert driven.engine.num_running == 0


def refuses(driven):
    """True if an engine takes no request."""
    try:
        with driven.request(SOON):
            return False
    except LifecycleError:
        return True


def test_a_pause_returns_once_nothing_runs_and_then_nothing_starts(driven, running, threads):
    pausing = threads.submit(driven.engine.pause, time.monotonic() + LATE)
    until(lambda: refuses(driven))
    assert not pausing.done()
    running.set()
    pausing.result(LIMIT)
    assert driven.engine.num_running == 0
    assert refuses(driven)


def test_a_pause_that_cannot_be_is_told_at_its_deadline_and_resume_undoes_it(driven, running):
    with in_time(SOON), pytest.raises(TransferTimeout, match="running|answer"):
        driven.engine.pause(time.monotonic() + SOON)
    driven.engine.resume(1)
    with driven.request(LATE) as version:
        assert driven.knows(version, 1)


def test_a_deadline_that_has_passed_asks_for_a_pause_only_if_nothing_runs(engine, running):
    with pytest.raises(TransferTimeout):
        engine.pause(time.monotonic() - 1)
    running.set()
    engine.pause(time.monotonic() + LATE)
    engine.pause(time.monotonic() - 1)


def test_release_and_restore_may_find_nothing_to_do(driven):
    engine = driven.engine
    engine.resume(1)
    engine.pause(time.monotonic())
    restores = (
        engine.restore_groups,
        engine.restore_weights,
        engine.restore_experts,
        engine.restore_cache,
    )
    releases = (
        engine.release_cache,
        engine.release_experts,
        engine.release_weights,
        engine.release_groups,
    )
    if not driven.can_release:
        for step in (engine.release_cache, engine.release_weights):
            with pytest.raises(LifecycleError, match="not released"):
                step()
        releases = ()
    for step in (*restores, *releases, *releases, *restores, *restores):
        step()
    engine.drop_cache()
    engine.abort_requests()
    engine.resume(2)
