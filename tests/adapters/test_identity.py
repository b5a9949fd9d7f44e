"""Whether a model is still the one that was adapted: anything put in its place must be seen."""

import sys

import numpy as np
import pytest

import flyweight as fw
from flyweight.adapters import torch_module
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


def resized(tensor):
    tensor.untyped_storage().resize_(0)


def other_data(change):
    return lambda tensor: setattr(tensor, "data", change(tensor.data))


@pytest.mark.parametrize("num_tensors", [1, 600])  # in one group of tensors, and in two
@pytest.mark.parametrize("num_checks", [0, 1, 3, 4])  # later ones go through torch's guards
@pytest.mark.parametrize(
    ("change", "is_in_place"),
    [
        (other_data(lambda data: data.clone()), False),
        (other_data(lambda data: data[1:]), False),
        (other_data(lambda data: data[:1]), True),
        (other_data(lambda data: data.t()), True),
        (other_data(lambda data: data.reshape(1, 4)), True),
        (other_data(lambda data: data.view(sys.modules["torch"].int32)), True),
        (lambda tensor: tensor.t_(), True),
        (resized, False),
    ],
    ids=["clone", "row", "first", "transposed", "reshaped", "cast", "in_place", "freed"],
)
def test_a_torch_tensor_with_other_memory_or_another_layout(
    change, is_in_place, num_checks, num_tensors
):
    torch = pytest.importorskip("torch")
    model = {f"{n}": torch.full((2, 2), float(n)) for n in range(num_tensors)}
    with torch.no_grad():
        identity = Identity(model)
        assert all(identity.is_same() for _ in range(num_checks))
        change(model[f"{num_tensors - 1}"])
        assert (identity.is_same(), identity.is_in_place()) == (False, is_in_place)


@pytest.mark.parametrize("num_tensors", [2, 600])
def test_entries_of_large_and_small_dicts(num_tensors):
    torch = pytest.importorskip("torch")

    def last(model):
        return f"{num_tensors - 1}"

    changes = [
        lambda model: model.update({last(model): torch.zeros(2)}),
        lambda model: model.update({"new": model.pop(last(model))}),
        lambda model: model.update(new=torch.zeros(2)),
        lambda model: model.pop(last(model)),
    ]
    for change in changes:
        model = {f"{n}": torch.zeros(2) for n in range(num_tensors)}
        identity = Identity(model)
        assert identity.is_same()
        change(model)
        assert not identity.is_in_place()


def test_what_autograd_is_asked_for_changes_no_tensor():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2, 2)
    identity = Identity({"a": tensor, "b": tensor, "c": [tensor]})
    for is_wanted in (True, False):
        tensor.requires_grad = is_wanted
        assert identity.is_same()
        with torch.inference_mode():
            assert identity.is_same()


def test_the_guards_of_this_torch_are_used():
    pytest.importorskip("torch")
    assert torch_module._tensor_guards() is not None
