"""A trainer in its own process that is killed in the middle of a publish."""

import json
import subprocess
import sys

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
