"""A trainer in its own process that is killed while an engine takes a version from it."""

import json
import signal
import sys

import pytest

import flyweight as fw
from child_processes import Command
from flyweight.engines.vllm import VllmEngine
from flyweight.errors import LifecycleError, TransportError
from flyweight.lifecycle.states import State

DYING = """
import json, os, signal, sys
import numpy as np
import flyweight as fw
from live.live_processes import at, once
path, address, point, number, is_shared, version = json.loads(sys.argv[1])
with fw.open(path) as source:
    model = {
        name: np.frombuffer(bytearray(source.read(name)), np.float32).reshape(
            source.manifest.spec(name).shape
        )
        for name in source.manifest.names
    }
if is_shared:
    import torch
    model = {name: torch.from_numpy(each).share_memory_() for name, each in model.items()}
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
with fw.Publisher(model, address) as publisher, at(point, once(die, number)):
    print("ready", flush=True)
    publisher.publish(version, num_replicas=1, timeout_seconds=60)
"""
MOMENTS = {
    "announcing": ("announcing", False),
    "leasing": ("leasing", False),
    "leasing, mapped": ("leasing", True),
    "filling": ("fill", False),
    "filled": ("filled", False),
}
"""Points of `live_processes.POINTS`, and whether the trainer's memory can be mapped."""


def each_kill(*usual):
    """Have a test run for each moment of a kill: for these ones outside of the campaign, too."""
    rest = [each for each in MOMENTS if each not in usual]
    marked = [pytest.param(each, marks=pytest.mark.campaign) for each in rest]
    return pytest.mark.parametrize("moment", [*usual, *marked])


def dying_trainer(path, address, moment, version, number=0):
    """Start a trainer that is killed at a moment, once it came there `number` times before."""
    point, is_shared = MOMENTS[moment]
    given = json.dumps([str(path), address, point, number, is_shared, version])
    process = Command(sys.executable, "-c", DYING, given)
    assert process.line() == "ready"
    return process


def check_dying_trainer(server, trainer, models, address, tmp_path, moment, number=0):
    """Have a trainer die while workers take a version: vLLM never stops to serve the last one."""
    good = VllmEngine(server.address, address, name="good")
    good.update(trainer.becomes("A"))
    before = server.tokens()
    elsewhere = f"unix:{tmp_path}/dying"
    with dying_trainer(models / "B", elsewhere, moment, 7, number) as process:
        bad = VllmEngine(server.address, elsewhere, name="bad")
        with pytest.raises(TransportError):
            bad.update(7, timeout_seconds=10)
        assert process.join() == -signal.SIGKILL
    assert (bad.operations.state, server.is_paused()) == (State.SERVING, False)
    assert (server.tokens(), server.version()) == (before, str(trainer.version))
    again = VllmEngine(server.address, address, name="again")
    again.update(trainer.becomes("A"))
    assert server.tokens() == before


def check_failed_load(server, trainer, address, tmp_path):
    """Have a load fail after it has begun: vLLM stays paused until a whole update."""
    good = VllmEngine(server.address, address, name="good")
    good.update(trainer.becomes("A"))
    before = server.tokens()
    elsewhere = f"unix:{tmp_path}/wrong"
    wrong = dict(trainer.model)
    wrong["model.norm.weight"] = wrong["model.norm.weight"][:-1].clone()
    with fw.Publisher(wrong, elsewhere, keep="in_place") as publisher:
        publisher.publish(7)
        bad = VllmEngine(server.address, elsewhere, name="bad", should_check_fit=False)
        with pytest.raises(LifecycleError):
            bad.update(7)
    assert bad.operations.state is State.FAILED
    assert bad.version is None
    assert server.is_paused()
    for resume in (lambda: bad.resume(7), bad.operations.resume):
        with pytest.raises(LifecycleError):
            resume()
    assert server.is_paused()
    assert server.version() == str(trainer.version), "the version that failed has no name"
    again = VllmEngine(server.address, address, name="again")
    assert again.operations.state is not State.SERVING
    again.update(trainer.becomes("A"))
    assert not server.is_paused()
    assert server.tokens() == before
