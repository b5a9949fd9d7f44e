"""A cleared engine gives its memory back to the system, and its tensors stay who they are."""

from importlib.util import find_spec

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, SPAWN, Child
from flyweight.lifecycle.engine import ModelEngine
from flyweight.lifecycle.operations import Operations
from flyweight.lifecycle.states import State


def anonymous_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def numpy_model(num):
    block = np.random.default_rng(1).integers(0, 255, (num, 2048, 1025), dtype=np.int32)
    model = {f"layer.{n}": block[n] for n in range(num - 1)}
    return {**model, "turned": block[-1].T, "odd": np.ones(7)}


def torch_model(num):
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 1024) for _ in range(num)])
    model.turned = torch.nn.Parameter(torch.rand(300, 500).T)
    model.tied = model[0].weight
    model.register_buffer("scale", torch.rand(3))
    return model


def paddle_model(num):
    import paddle

    paddle.set_device("cpu")
    paddle.seed(1)
    model = paddle.nn.Sequential(*[paddle.nn.Linear(1024, 2048) for _ in range(num)])
    model.register_buffer("scale", paddle.rand([3]))
    return model


def leaves(model):
    if isinstance(model, dict):
        return {name: (array, array.ctypes.data, array.strides) for name, array in model.items()}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: (leaf, leaf.data_ptr(), tuple(leaf.stride() if callable(leaf.stride) else leaf.strides))
        for name, leaf in found.items()
    }  # fmt: skip


def identity(model):
    return {
        name: (id(leaf), address, strides, tuple(leaf.shape), str(leaf.dtype))
        for name, (leaf, address, strides) in leaves(model).items()
    }


def as_bytes(model):
    found = {}
    for name, (leaf, _, _) in leaves(model).items():
        array = leaf if isinstance(leaf, np.ndarray) else leaf.detach().numpy()
        found[name] = array.tobytes()
    return found


def cleared_and_back(make, num, address, pipe):
    """Return how much memory a clear gave back, and what an update after it brought."""
    model = make(num)
    wanted, before = as_bytes(model), identity(model)
    nbytes = sum(map(len, wanted.values()))
    with fw.Publisher(model, address, keep="memory") as publisher:
        publisher.publish(1)
        with fw.Replica(model, address) as replica:
            operations = Operations(ModelEngine(model), replica)
            operations.update(1, timeout_seconds=LIMIT)
            full = anonymous_bytes()
            operations.clear()
            empty = anonymous_bytes()
            operations.restore()
            operations.update(1, timeout_seconds=LIMIT)
            again = anonymous_bytes()
            return {
                "nbytes": nbytes,
                "given": full - empty,
                "taken": again - empty,
                "state": operations.state,
                "is_same": identity(model) == before,
                "is_whole": as_bytes(model) == wanted,
            }


@pytest.mark.check
@pytest.mark.parametrize("make", [numpy_model, torch_model, paddle_model])
def test_a_clear_gives_resident_memory_back_and_tensors_stay_who_they_are(make, address):
    """C15, C16: by the process's own pages; then the same objects, addresses, strides and bytes."""
    if find_spec(make.__name__.removesuffix("_model")) is None:
        pytest.skip(f"{make.__name__} needs its framework")
    with Child(cleared_and_back, make, 12, address, context=SPAWN) as child:
        found = child.result(3 * LIMIT)
    assert found["nbytes"] > 95e6
    assert found["given"] > 0.97 * found["nbytes"]
    assert found["taken"] > 0.97 * found["nbytes"]
    assert found["state"] is State.SERVING
    assert found["is_same"]
    assert found["is_whole"]
