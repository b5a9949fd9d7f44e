"""A trainer in its own process that is killed in the middle of a publish."""

import json
import signal
import subprocess
import sys

import pytest

from flyweight.engines.vllm import VllmEngine
from flyweight.errors import LifecycleError, TransportError
from flyweight.lifecycle.states import State

DYING = """
import json, os, signal, sys
import flyweight as fw
from flyweight.live.running_round import RunningRound
path, address, num_buckets, version = json.loads(sys.argv[1])
with fw.open(path) as source:
    model = {name: memoryview(bytearray(source.read(name))) for name in source.manifest.names}
import torch
with fw.open(path) as source:
    for name in model:
        spec = source.manifest.spec(name)
        model[name] = torch.frombuffer(model[name], dtype=torch.float32).view(spec.shape)
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


def dying_trainer(path, address, num_buckets, version):
    """Start a trainer that is killed after it has filled some buckets."""
    given = json.dumps([str(path), address, num_buckets, version])
    process = subprocess.Popen(
        [sys.executable, "-c", DYING, given], stdout=subprocess.PIPE, text=True
    )
    with process.stdout:
        assert process.stdout.readline() == "ready\n"
    return process


def check_dying_trainer(server, trainer, models, address, tmp_path, num_buckets):
    """Have a trainer die after some buckets: vLLM stays paused until a whole update."""
    good = VllmEngine(server.address, address, name="good")
    good.update(trainer.becomes("A"))
    before = server.tokens()
    elsewhere = f"unix:{tmp_path}/dying"
    process = dying_trainer(models / "B", elsewhere, num_buckets, 7)
    bad = VllmEngine(server.address, elsewhere, name="bad", staging_bytes=0)
    with pytest.raises(TransportError):
        bad.update(7, timeout_seconds=30)
    assert process.wait(20) == -signal.SIGKILL
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
