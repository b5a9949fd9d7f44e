"""The life cycle on a GPU: memory that is cleared is the device's again, and comes back in place."""

import gc

import pytest

torch = pytest.importorskip("torch")

from device_memory import used_bytes  # noqa: E402

import flyweight as fw  # noqa: E402
from child_processes import LIMIT, SPAWN, Child, until  # noqa: E402
from flyweight.errors import LifecycleError  # noqa: E402
from flyweight.lifecycle.control import Control  # noqa: E402
from flyweight.lifecycle.operations import Operations  # noqa: E402
from flyweight.lifecycle.states import Signal, State, Tag  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
WIDTH, LAYERS = 4096, 8
NBYTES = WIDTH * WIDTH * 4 * LAYERS


def policy(value):
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    fill(model, value)
    return model


def fill(model, value):
    with torch.no_grad():
        for number, each in enumerate(model.parameters()):
            each.fill_(value + number)


def holds(model, value):
    return all(bool((each == value + n).all()) for n, each in enumerate(model.parameters()))


def trainer(address, pipe):
    model = policy(1.0)
    with fw.Publisher(model, address, keep="memory") as publisher:
        pipe.send("ready")
        while (version := pipe.recv()) is not None:
            fill(model, float(version))
            report = publisher.publish(version, num_replicas=1, timeout_seconds=LIMIT)
            pipe.send(str(report))


@pytest.fixture
def training(address):
    with Child(trainer, address, context=SPAWN) as child:
        assert child.told(2 * LIMIT) == "ready"
        yield child
        child.send(None)
        child.result()


def looks(parameters):
    return [(id(p), p.shape, p.dtype, p.stride()) for p in parameters]


def test_clear_returns_device_memory_and_an_update_brings_it_back_in_place(address, training):
    """C15: measured by the driver's own count, with a trainer of another process mapped in."""
    gc.collect()
    torch.cuda.empty_cache()  # a clear gives back what torch kept of other tests as well
    model = policy(0.0)
    view, before = model[0].weight.t(), looks(model.parameters())
    with fw.Replica(model, address) as replica:
        machine = Operations(fw.ModelEngine(model), replica)
        training.send(5)
        machine.update(timeout_seconds=LIMIT)
        training.told()
        assert machine.state is State.SERVING
        assert holds(model, 5.0)
        for _ in range(3):
            full = used_bytes()
            machine.clear(timeout_seconds=LIMIT)
            assert machine.state is State.CLEARED
            assert full - used_bytes() >= 0.95 * NBYTES
            machine.clear(timeout_seconds=LIMIT)
            with pytest.raises(LifecycleError, match="kv_cache"):
                machine.resume()
            machine.restore()
            assert machine.state is State.CLEARED
            machine.update(timeout_seconds=LIMIT)
            assert machine.state is State.SERVING
            assert machine.version == 5
            assert holds(model, 5.0)
            assert looks(model.parameters()) == before
            assert bool((view == model[0].weight.t()).all())
            assert abs(used_bytes() - full) <= 0.05 * NBYTES


def serves(control, version):
    status = control.status()
    return status.is_serving and status.version == version


def test_a_worker_follows_and_obeys_on_a_gpu(address, training, tmp_path):
    model = policy(0.0)
    engine = fw.ModelEngine(model)
    with (
        fw.Replica(model, address) as replica,
        fw.Worker(engine, replica, tmp_path / "engine.cell"),
        Control(tmp_path / "engine.cell") as control,
    ):
        for version in (7, 8):
            training.send(version)
            training.told()
            until(lambda version=version: serves(control, version))
            with engine.request() as served:
                assert served == version
                assert holds(model, float(version))
        for signal, tags in ((Signal.CLEAR, (Tag.WEIGHTS,)), (Signal.RESTORE, (Tag.WEIGHTS,))):
            operation = control.start(signal, tags=tags, timeout_seconds=LIMIT)
            assert control.wait(operation, 2 * LIMIT).ending == "done", operation
        assert control.status().version == 8
        assert control.status().is_serving
        assert holds(model, 8.0)
