"""Weights on a GPU go to another host, and to its GPU, through pinned memory of the engine's host."""

import os

import pytest

torch = pytest.importorskip("torch")

import flyweight as fw  # noqa: E402
from child_processes import LIMIT, SPAWN, Child, until  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
TOKEN = "a token that nobody guesses"


def model(device, version):
    """Return tensors of every kind: large, small, strided, empty, and of another dtype."""
    large = torch.arange(3 << 20, dtype=torch.int32).reshape(1024, -1) + version
    return {
        "large": large.to(device),
        "strided": (large[:96].float().t()).to(device),
        "half": torch.full((1000, 33), version, dtype=torch.bfloat16, device=device),
        "scalar": torch.tensor(float(version), device=device),
        "empty": torch.empty(0, 4, device=device),
    }


def engine(address, name, device, versions, pipe):
    os.environ["FLYWEIGHT_HOST"] = f"host of {name}"
    weights = model(device, 0)
    with fw.Replica(weights, address, token=TOKEN, name=name) as replica:
        for version in versions:
            pipe.recv()
            report = replica.update(version, timeout_seconds=2 * LIMIT)
            wanted = model(device, version)
            is_right = all(torch.equal(weights[name], wanted[name]) for name in wanted)
            pipe.send((report.version, report.transport, report.verified, is_right))
        pipe.recv()


@pytest.mark.parametrize("source", ["cuda", "cpu"])
@pytest.mark.parametrize("sink", ["cuda", "cpu"])
@pytest.mark.parametrize("keep", [None, "memory"])
def test_versions_arrive_on_other_hosts_in_a_chain(monkeypatch, source, sink, keep):
    monkeypatch.setenv("FLYWEIGHT_HOST", "here")
    weights, versions = model(source, 1), (1, 2, 3)
    options = {"token": TOKEN, "keep": keep, "timeout_seconds": 2 * LIMIT}
    with (
        fw.Publisher(weights, "tcp://127.0.0.1:0", **options) as publisher,
        Child(engine, publisher.address, "a", sink, versions, context=SPAWN) as first,
        Child(engine, publisher.address, "b", sink, versions, context=SPAWN) as second,
    ):
        for version in versions:
            for name, tensor in model(source, version).items():
                weights[name].copy_(tensor)
            for each in (first, second):
                each.send("update")
            until(lambda: len(publisher.waiting) == 2, 2 * LIMIT)
            before = publisher.shelf.all_sent_bytes()
            report = publisher.publish(version, num_replicas=2)
            assert not report.failed
            for each in (first, second):
                assert each.told(2 * LIMIT) == (version, "read", "live", True)
            nbytes = sum(each.nbytes for each in weights.values())
            assert publisher.shelf.all_sent_bytes() - before < 1.5 * nbytes
        for each in (first, second):
            each.send("end")
