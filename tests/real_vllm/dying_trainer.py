"""A trainer in its own process that is killed in the middle of a publish."""

import json
import signal
import sys

import pytest

from child_processes import LIMIT, Command
from flyweight.engines.vllm import VllmEngine
from flyweight.errors import LifecycleError, TransportError
from flyweight.lifecycle.states import State

DYING = """
import json, os, signal, sys
import numpy as np
import flyweight as fw
from flyweight.live.running_round import RunningRound
path, address, num_buckets, version = json.loads(sys.argv[1])
with fw.open(path) as source:
    model = {
        name: np.frombuffer(bytearray(source.read(name)), np.float32).reshape(
            source.manifest.spec(name).shape
        )
        for name in source.manifest.names
    }
filled = RunningRound.on_filled
def on_filled(round_, bucket):
    filled(round_, bucket)
    if bucket >= num_buckets:
        os.kill(os.getpid(), signal.SIGKILL)
RunningRound.on_filled = on_filled
with fw.Publisher(model, address, transport="host", bucket_bytes=65536, depth=1) as publisher:
    print("ready", flush=True)
    publisher.publish(version, num_replicas=1, timeout_seconds=60)
"""
NUM_BUCKETS = 27
"""How many buckets of 64 KiB a model has."""
MOMENTS = (1, 7, 13, 20, NUM_BUCKETS - 1)


def each_kill(*usual):
    """Have a test run for each moment of a kill: for these ones outside of the campaign, too."""
    rest = [n for n in MOMENTS if n not in usual]
    marked = [pytest.param(n, marks=pytest.mark.campaign) for n in rest]
    return pytest.mark.parametrize("num_buckets", [*usual, *marked])


def dying_trainer(path, address, num_buckets, version):
    """Start a trainer that is killed after it has filled some buckets."""
    given = json.dumps([str(path), address, num_buckets, version])
    process = Command(sys.executable, "-c", DYING, given)
    assert process.line() == "ready"
    return process


def check_dying_trainer(server, trainer, models, address, tmp_path, num_buckets):
    """Have a trainer die after some buckets: vLLM stays paused until a whole update."""
    good = VllmEngine(server.address, address, name="good")
    good.update(trainer.becomes("A"))
    before = server.tokens()
    elsewhere = f"unix:{tmp_path}/dying"
    with dying_trainer(models / "B", elsewhere, num_buckets, 7) as process:
        bad = VllmEngine(server.address, elsewhere, name="bad", staging_bytes=0)
        with pytest.raises(TransportError):
            bad.update(7, timeout_seconds=LIMIT)
        assert process.join() == -signal.SIGKILL
    assert bad.operations.state is State.FAILED
    assert bad.version is None
    assert server.is_paused()
    for resume in (lambda: bad.resume(7), bad.operations.resume):
        with pytest.raises(LifecycleError):
            resume()
    assert server.is_paused()
    assert server.version() == str(trainer.version), "the version that failed has no name"
    trainer.becomes("A")
    again = VllmEngine(server.address, address, name="again")
    assert again.operations.state is not State.SERVING
    again.update(trainer.version)
    assert not server.is_paused()
    assert server.tokens() == before
