"""Small Paddle models, configs, hooks and runners for the tests of the FastDeploy drop-in."""

from contextlib import contextmanager
from types import SimpleNamespace

import paddle
import pytest

from child_processes import LIMIT
from flyweight.adapters.model import adapt
from flyweight.engines.fastdeploy import ModelWeightsStatus
from flyweight.engines.fastdeploy_engine import FastDeployHooks

NORMAL, UPDATING, CLEARING, CLEARED = ModelWeightsStatus


class Net(paddle.nn.Layer):
    """Every byte depends on the version; `cache` is the engine's own, and is never saved."""

    def __init__(self, version=0, size=8, dtype="float32"):
        super().__init__()
        paddle.seed(version)
        self.embed = paddle.nn.Embedding(size, 4)
        self.up = paddle.nn.Linear(4, size)
        self.head = self.create_parameter([4, size], dtype=dtype)
        self.head.set_value(paddle.randn([4, size]).astype(dtype))
        self.register_buffer("steps", paddle.arange(6) + version)
        self.register_buffer("cache", paddle.full([5000], 3.0), persistable=False)


def content(*layers):
    models = [adapt(layer) for layer in layers]
    return [{name: model.read(name).tobytes() for name in model.manifest.names} for model in models]


def holds(layer, version):
    return content(layer) == content(Net(version)) and bool((layer.cache == 3).all())


def shape_of(layer):
    """What must stay as it is when memory goes and comes."""
    return {
        name: (id(p), p.data_ptr(), tuple(p.shape), p.dtype, tuple(p.strides))
        for name, p in layer.state_dict().items()
    }


def config(directory, strategy="ipc_snapshot", **flyweight):
    flyweight.setdefault("timeout_seconds", LIMIT)
    return SimpleNamespace(
        load_config=SimpleNamespace(load_strategy=strategy, rsync_config=None),
        model_config=SimpleNamespace(model=str(directory)),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, tensor_parallel_rank=0),
        flyweight=flyweight,
    )


class Hooks(FastDeployHooks):
    """Writes down what it is asked for."""

    def __init__(self):
        self.did = []
        self.faults = {}

    def note(self, name):
        self.did.append(name)
        if name in self.faults:
            raise self.faults.pop(name)

    def clear_expert_buffer(self):
        self.note("clear_expert_buffer")

    def recreate_expert_buffer(self):
        self.note("recreate_expert_buffer")

    def shut_groups_down(self):
        self.note("shut_groups_down")

    def restart_groups(self):
        self.note("restart_groups")

    def drop_cache(self):
        self.note("drop_cache")


@contextmanager
def little_time(manager):
    """Give a manager little time for what must fail; what came before had enough."""
    before, manager._seconds = manager._seconds, 0.5
    yield
    manager._seconds = before


def still_hooks():
    hooks = Hooks()
    hooks.pause = lambda deadline: None
    return hooks


class Runner:
    """FastDeploy's runner, as far as weights are concerned."""

    def __init__(self, manager):
        self.dynamic_weight_manager = manager
        self.num_cleared = 0

    def clear_requests(self):
        self.num_cleared += 1

    def update_parameters(self, pid):
        self.dynamic_weight_manager.update_parameters(pid, False)
        self.dynamic_weight_manager.finalize_update(pid)
        self.dynamic_weight_manager._log_memory("updated")

    def clear_parameters(self, pid):
        self.dynamic_weight_manager.clear_parameters(pid, False)


def bare_net():
    """A model as FastDeploy makes it: most of its parameters have no memory yet."""
    with paddle.LazyGuard():
        layer = Net()
    assert not layer.up.weight._is_initialized()
    return layer


def save_state(state, directory):
    directory.mkdir(exist_ok=True)
    paddle.save(state, str(directory / "model_state.tp0.0.pdparams"))


def asked(control, signal, **options):
    return control.wait(control.start(signal, timeout_seconds=LIMIT, **options), LIMIT)


FROM_BOTH = pytest.mark.parametrize("strategy", ["ipc_snapshot", "ipc"])
