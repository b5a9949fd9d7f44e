"""Loaders that take tensors on a GPU: from a trainer's memory there, and from the host's."""

import pytest

torch = pytest.importorskip("torch")

from child_processes import LIMIT, SPAWN, Child, until  # noqa: E402
from flyweight.errors import FlyweightError  # noqa: E402
from flyweight.live import Publisher, Replica  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
TOKEN = "a token that nobody guesses"


def model(seed, device):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    small = {f"layer.{n}.weight": normal(9, 7) for n in range(1500)}
    return {
        "embed": normal(1000, 257).bfloat16(),
        **small,
        "large": normal(20 << 20),  # a batch of its own
        "transposed": normal(300, 400).t(),
        "empty": torch.empty(0, 4, device=device),
    }


def engine(address, transport, pipe):
    """Take a version for each word, and tell what the loader got of it."""
    kept = {}

    def load(named):
        kept.clear()
        for name, tensor in named:
            assert tensor.is_cuda
            kept[name] = tensor

    options = {"framework": "torch", "device": "cuda", "transport": transport, "token": TOKEN}
    with Replica(load, address, **options) as replica:
        while pipe.recv() == "update":
            try:
                report = replica.update(timeout_seconds=LIMIT)
                found = report.transport, report.verified
            except FlyweightError as error:
                found = f"{type(error).__name__}: {error}", str(replica.state)
            wanted = model(int(replica.version or 0), "cpu")
            same = [name for name in kept if torch.equal(kept[name].cpu(), wanted[name])]
            pipe.send((*found, same == list(wanted)))


@pytest.mark.parametrize(
    ("device", "transport", "way"),
    [("cuda", "auto", "mapped"), ("cuda", "filled", "filled"), ("cpu", "read", "read")],
)
def test_a_loader_on_a_device_gets_whole_verified_tensors_there(device, transport, way):
    tensors = model(1, device)
    with (
        Publisher(tensors, "tcp://127.0.0.1:0", token=TOKEN, timeout_seconds=LIMIT) as publisher,
        Child(engine, publisher.address, transport, context=SPAWN) as sink,
    ):
        for version in (1, 2):
            for name, tensor in model(version, device).items():
                tensors[name].copy_(tensor)
            sink.send("update")
            until(lambda: publisher.waiting)
            assert not publisher.publish(version).failed
            assert sink.told() == (way, "received", True)
        sink.send("end")


def test_a_loader_on_a_device_gets_no_tensor_that_changed(monkeypatch):
    tensors = model(1, "cuda")
    with (
        Publisher(tensors, "tcp://127.0.0.1:0", token=TOKEN, timeout_seconds=LIMIT) as publisher,
        Child(engine, publisher.address, "mapped", context=SPAWN) as sink,
    ):
        announce = publisher.shelf.announce

        def spoil(*arguments):  # after the digests, before any replica copies
            tensors["large"][-1] += 1
            torch.cuda.synchronize()
            announce(*arguments)

        monkeypatch.setattr(publisher.shelf, "announce", spoil)
        sink.send("update")
        until(lambda: publisher.waiting)
        assert publisher.publish(1).failed
        text, state, _ = sink.told()
        assert text.startswith("DigestMismatch")
        assert "'large'" in text
        assert state == "FAILED"
        sink.send("end")
