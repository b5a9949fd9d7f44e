"""Weights on a GPU go to another host, and to its GPU, through pinned memory of both hosts.

NIXL can also read straight into memory of a device. Rounds do not do that yet.
"""

import os
from contextlib import closing

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flyweight as fw  # noqa: E402
from child_processes import LIMIT, SPAWN, Child  # noqa: E402
from flyweight.cuda import driver  # noqa: E402
from flyweight.cuda.pinned_memory import pinned  # noqa: E402
from flyweight.errors import TransportError  # noqa: E402
from flyweight.memory import Buffer, page_memory  # noqa: E402
from flyweight.transports.nixl_reads import CHUNK_BYTES, NixlReader  # noqa: E402
from flyweight.transports.read_server import ReadServer  # noqa: E402
from remote_processes import needs_nixl  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
SECONDS = LIMIT
HERE = "127.0.0.1"
STRATEGIES = {"sockets": "network", "nixl": "network:nixl"}
_MEMORY_TYPE, _HOST_MEMORY = 2, 1


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


def engine(address, device, versions, pipe):
    os.environ["FLYWEIGHT_HOST"] = "elsewhere"
    weights = model(device, 0)
    with fw.Replica(weights, address, token="secret", name="engine") as replica:
        for version in versions:
            report = replica.update(timeout_seconds=SECONDS)
            wanted = model(device, version)
            is_right = all(torch.equal(weights[name], wanted[name]) for name in wanted)
            pipe.send((report.version, report.strategy, report.verified, is_right))


@pytest.mark.parametrize("source", ["cuda", "cpu"])
@pytest.mark.parametrize("sink", ["cuda", "cpu"])
@pytest.mark.parametrize("by", ["sockets", pytest.param("nixl", marks=needs_nixl)])
def test_versions_arrive_on_another_host(monkeypatch, source, sink, by):
    monkeypatch.setenv("FLYWEIGHT_HOST", "here")
    weights, versions = model(source, 1), (1, 2, 3)
    options = {"token": "secret", "bucket_bytes": 1 << 20, "network_engine": by}
    with (
        fw.Publisher(weights, f"tcp://{HERE}:0", **options) as publisher,
        Child(engine, publisher.address, sink, versions, context=SPAWN) as child,
    ):
        for version in versions:
            for name, tensor in model(source, version).items():
                weights[name].copy_(tensor)
            report = publisher.publish(version, num_replicas=1, timeout_seconds=SECONDS)
            assert not report.failed
            assert child.told(SECONDS) == (version, STRATEGIES[by], "live", True)


@needs_nixl
def test_nixl_reads_into_memory_of_a_device_and_refuses_it_unless_asked_to():
    nbytes = 3 * CHUNK_BYTES + 5
    target = torch.zeros(nbytes + 64, dtype=torch.uint8, device="cuda")
    into = Buffer.flat_at(target.data_ptr() + 32, nbytes, target, device=0)
    with closing(ReadServer("nixl", address=HERE)) as server:
        source = server.allocate(nbytes)
        expected = torch.from_numpy(source.items())
        with closing(NixlReader(server.describe(), address=HERE, can_use_devices=True)) as reader:
            for version in (1, 2):
                expected[:] = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
                reader.read(server.place(source), 0, into, timeout_seconds=SECONDS)
                arrived = target.cpu()
                assert torch.equal(arrived[32:-32], expected), version
                assert not arrived[:32].any()
                assert not arrived[-32:].any()
        with (
            closing(NixlReader(server.describe(), address=HERE)) as reader,
            pytest.raises(TransportError, match="device 0"),
        ):
            reader.read(server.place(source), 0, into, timeout_seconds=SECONDS)


def test_memory_of_the_host_is_pinned_as_long_as_it_lives():
    data = page_memory(1 << 20)
    buffer = pinned(0, Buffer.of(data))
    kind = np.zeros(1, np.uint32)
    assert buffer.address == data.ctypes.data

    def memory_type():
        with driver.current_context(0):
            code = driver.function("cuPointerGetAttribute")(
                kind.ctypes.data, _MEMORY_TYPE, buffer_address
            )
        return int(kind[0]) if code == 0 else None

    buffer_address = buffer.address
    assert memory_type() == _HOST_MEMORY
    del buffer
    assert memory_type() is None
    again = pinned(0, Buffer.of(data))
    assert memory_type() == _HOST_MEMORY
    assert pinned(0, again).owner is again.owner  # what is refused stays as it is
