"""Tensors that were replaced behind a module's back: nobody publishes, fills or serves old ones.

DeepSpeed's ZeRO-3 gives each module another dict of parameters; others swap modules, or write into
`__dict__`. None of that goes through the module's own `__setattr__`.
"""

from collections import OrderedDict

import pytest

import flyweight as fw
from child_processes import LIMIT
from flyweight.errors import VersionError
from flyweight.lifecycle.operations import Operations


def torch_model(value):
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    fill(model, value)
    return model


def paddle_model(value):
    paddle = pytest.importorskip("paddle")
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 3), paddle.nn.BatchNorm1D(3))
    fill(model, value)
    return model


def fill(model, value):
    for tensor in tensors(model):
        tensor.detach().fill_(value)


def tensors(model):
    """The tensors that a model has by now, whatever it had before."""
    return list(model.state_dict().values())


def holds(model, value):
    return all(bool((tensor == value).all()) for tensor in tensors(model))


def inner(model):
    """Where a model keeps the modules in it, by the framework's own name."""
    return "_modules" if hasattr(model, "_modules") else "_sub_layers"


def other_dict_of_parameters(model, other):
    model[0]._parameters = OrderedDict(other[0]._parameters)


def other_dict_of_buffers(model, other):
    model[1]._buffers = dict(other[1]._buffers)


def other_dict_of_modules(model, other):
    setattr(model, inner(model), dict(getattr(other, inner(other))))


def entries_of_dict(model, other):
    model[0].__dict__.update(_parameters=other[0]._parameters)


def whole_dict(model, other):
    model[0].__dict__ = dict(other[0].__dict__)


MODELS = pytest.mark.parametrize("make", [torch_model, paddle_model])
WAYS = pytest.mark.parametrize(
    "replace",
    [
        other_dict_of_parameters,
        other_dict_of_buffers,
        other_dict_of_modules,
        entries_of_dict,
        whole_dict,
    ],
)


@MODELS
@WAYS
@pytest.mark.parametrize("keep", [None, "memory"])
def test_a_publish_gives_the_tensors_that_the_model_has_by_now(
    make, replace, keep, address, threads
):
    """Old tensors were published as the new version, and verified."""
    trained, target = make(1), make(0)
    with fw.Publisher(trained, address, keep=keep) as publisher, fw.Replica(target, address) as got:
        for version in (1, 2, 3):
            if version == 2:
                replace(trained, make(9))
                fill(trained, 2)
            update = threads.submit(got.update, version, timeout_seconds=LIMIT)
            publisher.publish(version, num_replicas=1, timeout_seconds=LIMIT)
            update.result(LIMIT)
            assert holds(target, min(version, 2))


@MODELS
@WAYS
def test_an_engine_is_updated_in_the_tensors_that_it_has_by_now(make, replace, address):
    """An update was committed into tensors that the model no longer had."""
    trained, target = make(1), make(0)
    with (
        fw.Publisher(trained, address, keep="memory") as publisher,
        fw.Replica(target, address) as replica,
    ):
        engine = fw.ModelEngine(target)
        machine = Operations(engine, replica)
        publisher.publish(1)
        machine.update(timeout_seconds=LIMIT)
        replace(target, make(9))
        with pytest.raises(VersionError):
            replica.check_servable()
        fill(trained, 2)
        publisher.publish(2)
        machine.update(timeout_seconds=LIMIT)
        with engine.request(LIMIT) as version:
            assert version == 2
            assert holds(target, 2)
        replica.check_servable()


@MODELS
@pytest.mark.parametrize("kind", [lambda a, b: [a, b], lambda a, b: {"main": a, "draft": b}])
def test_modules_of_a_list_or_a_dict_are_watched_too(make, kind, address):
    """C19: a draft model beside the main one is of the same version."""
    parts, target = (make(1), make(1)), (make(0), make(0))
    with (
        fw.Publisher(kind(*parts), address, keep="memory") as publisher,
        fw.Replica(kind(*target), address) as replica,
    ):
        publisher.publish(1)
        replica.update(timeout_seconds=LIMIT)
        for models in (parts, target):
            other_dict_of_parameters(models[1], make(9))
        for each in parts:
            fill(each, 2)
        publisher.publish(2)
        replica.update(timeout_seconds=LIMIT)
        assert all(holds(each, 2) for each in target)


@MODELS
def test_a_buffer_that_is_saved_from_now_on_is_seen(make, address):
    model = make(1)
    name, keyword = (
        ("_non_persistent_buffers_set", "persistent")
        if make is torch_model
        else ("_non_persistable_buffer_names_set", "persistable")
    )
    model[1].register_buffer("cache", tensors(make(1))[0].clone(), **{keyword: False})
    with fw.Publisher(model, address) as publisher:
        publisher.publish(1)
        setattr(model[1], name, set())
        with pytest.raises(fw.FlyweightError, match="'1.cache'"):
            publisher.publish(2)


@MODELS
def test_a_dict_that_holds_the_same_tensors_changes_nothing(make, address):
    """As ZeRO-3 leaves it: another dict, the same parameters."""
    trained, target = make(1), make(0)
    with (
        fw.Publisher(trained, address, keep="memory") as publisher,
        fw.Replica(target, address) as replica,
    ):
        publisher.publish(1)
        replica.update(timeout_seconds=LIMIT)
        for model in (trained, target):
            model[0]._parameters = OrderedDict(model[0]._parameters)
        fill(trained, 2)
        publisher.publish(2)
        replica.update(timeout_seconds=LIMIT)
        assert holds(target, 2)


def scripted_model(value):
    torch = pytest.importorskip("torch")
    plain = torch.nn.Sequential(
        OrderedDict(layer=torch.nn.Linear(4, 3), norm=torch.nn.BatchNorm1d(3))
    )
    model = torch.jit.script(plain)
    fill(model, value)
    return model


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: [model]], ids=["bare", "list"])
def test_scripted_modules_are_published_filled_and_watched(wrap, address):
    torch = pytest.importorskip("torch")
    trained, target = scripted_model(1), scripted_model(0)
    with (
        fw.Publisher(wrap(trained), address, keep="memory") as publisher,
        fw.Replica(wrap(target), address) as replica,
    ):
        publisher.publish(1)
        replica.update(timeout_seconds=LIMIT)
        assert replica.version == 1
        for model in (trained, target):
            model.layer.weight = torch.nn.Parameter(torch.full((3, 4), 9.0))
        assert replica.version is None
        fill(trained, 2)
        publisher.publish(2)
        replica.update(timeout_seconds=LIMIT)
        assert holds(target, 2)
