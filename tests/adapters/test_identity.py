"""Whether a model is still the one that was adapted: anything put in its place must be seen."""

import numpy as np
import pytest

import flyweight as fw
from flyweight.adapters.identity import Identity


def test_dicts_lists_and_values():
    leaf = np.zeros(3)
    model = {"a": leaf, "b": [np.ones(2), {"c": 1}], "step": 5}
    identity = Identity(model)
    assert identity.is_same()
    leaf += 1
    assert identity.is_same()
    changes = [
        lambda: model.update(a=np.zeros(3)),
        lambda: model["b"].append(1),
        lambda: model["b"][1].update(c=2),
        lambda: model.update(step=6),
        lambda: model.update(more=1),
        lambda: model.pop("more"),
    ]
    for change in changes:
        identity = Identity(model)
        change()
        assert not identity.is_same()


def test_a_renamed_leaf_is_another():
    model = {"a": np.zeros(3)}
    identity = Identity(model)
    model["b"] = model.pop("a")
    assert not identity.is_same()


def test_sharded_leaves():
    local = np.zeros((2, 2))
    model = {"a": fw.Sharded(local, (4, 2), (0, 0))}
    identity = Identity(model)
    assert identity.is_same()
    model["a"] = fw.Sharded(local, (4, 2), (2, 0))
    assert not identity.is_same()


def test_torch_modules():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        identity = Identity(model)
        model[0].weight.add_(1)
        assert identity.is_same()
        changes = [
            lambda: setattr(model[0], "weight", torch.nn.Parameter(torch.zeros(3, 3))),
            lambda: setattr(model[0].weight, "data", torch.zeros(3, 3)),
            lambda: model[0].weight.t_(),
            lambda: model[1].register_buffer("more", torch.zeros(1)),
            lambda: model.append(torch.nn.Linear(2, 2)),
            lambda: model.__setitem__(0, torch.nn.Linear(3, 3)),
        ]
        for change in changes:
            identity = Identity(model)
            assert identity.is_same()
            change()
            assert not identity.is_same()


def test_paddle_layers():
    paddle = pytest.importorskip("paddle")
    layer = paddle.nn.Linear(3, 3)
    identity = Identity(layer)
    assert identity.is_same()
    layer.weight = layer.create_parameter([3, 3])
    assert not identity.is_same()


def test_a_model_that_holds_itself_is_refused():
    model = {}
    model["self"] = model
    with pytest.raises(fw.FlyweightError, match="nests more than 64 deep"):
        Identity(model)


def test_buffers_that_are_not_saved_may_come_and_go():
    torch, paddle = pytest.importorskip("torch"), pytest.importorskip("paddle")
    module, layer = torch.nn.BatchNorm1d(3), paddle.nn.BatchNorm1D(3)
    kinds = [(module, torch.ones, "persistent"), (layer, paddle.ones, "persistable")]
    for model, ones, saved in kinds:
        model.register_buffer("cache", ones([2]), **{saved: False})
        identity = Identity(model)
        model.register_buffer("cache", ones([4]), **{saved: False})
        assert identity.is_same()
        model.register_buffer("more", ones([4]), **{saved: False})
        assert identity.is_same()
        del model.cache
        assert identity.is_same()
        model.register_buffer("kept", ones([4]), **{saved: True})
        assert not identity.is_same()


def test_tensors_are_the_same_whatever_values_are_beside_them():
    tensor = np.zeros(3)
    model = {"a": tensor, "b": (np.ones(2), 5000), "step": 5000}
    before = Identity(model)
    model.update(b=(model["b"][0], 6000), step=6000)
    assert not before.is_same()
    assert Identity(model).has_tensors_of(before)
    for change in (
        lambda: model.update(a=np.zeros(3)),
        lambda: model.update(b=(np.ones(2), 6000)),
        lambda: model.update(c=model.pop("a")),
        lambda: model.pop("c"),
    ):
        before = Identity(model)
        change()
        assert not Identity(model).has_tensors_of(before)
