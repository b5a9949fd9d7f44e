"""The memory of parameters: copied, given, cleared and filled again (C13 to C15, C17)."""

import os

import paddle
import pytest
from fastdeploy_nets import (
    FROM_BOTH,
    Net,
    bare_net,
    config,
    content,
    holds,
    save_state,
    shape_of,
)

import flyweight as fw
from child_processes import LIMIT, SPAWN, Child
from flyweight.engines.fastdeploy import DynamicWeightManager
from flyweight.engines.fastdeploy_models import Models
from flyweight.errors import (
    LifecycleError,
    PlanError,
    SpecError,
)

pytest_plugins = ["fastdeploy_fixtures"]


def test_weights_are_copied_not_shared(address, tmp_path, open_manager):  # C14
    trainer, target = Net(1), Net()
    with fw.Publisher(trainer, address, keep="memory") as publisher:
        publisher.publish(1)
        open_manager(config(tmp_path, "ipc", address=address), target)
        trainer.up.weight.set_value(paddle.zeros([4, 8]))  # the optimizer steps
    assert holds(target, 1)


@FROM_BOTH
def test_tensors_of_other_strides_are_filled_and_keep_them(
    address, tmp_path, open_manager, strategy
):  # C14
    rows = paddle.arange(12).reshape([3, 4])
    fw.save({"t": rows}, tmp_path, version=1)
    target = paddle.nn.Layer()
    target.register_buffer("t", paddle.zeros([4, 3], "int64").t())
    assert target.t.strides == [1, 3]
    with fw.Publisher({"t": rows}, address, keep="memory") as publisher:
        publisher.publish(1)
        manager = open_manager(config(tmp_path, strategy, address=address), target)
        manager.clear_parameters()
        manager.update_parameters()
    assert (target.t.tolist(), target.t.strides) == (rows.tolist(), [1, 3])


@FROM_BOTH
def test_parameters_that_have_no_memory_get_some_and_are_filled(
    source, open_manager, strategy
):  # C14
    target = bare_net()
    before = {name: id(p) for name, p in target.state_dict().items()}
    manager = open_manager(source(strategy), target)
    assert holds(target, 1)
    assert {name: id(p) for name, p in target.state_dict().items()} == before
    assert (
        target.up(target.embed(paddle.arange(8))) == Net(1).up(Net(1).embed(paddle.arange(8)))
    ).all()
    manager.clear_parameters()
    manager.update_parameters()
    manager.finalize_update()
    assert holds(target, 1)


def test_only_tensors_without_memory_are_given_some():  # C14
    layer = paddle.nn.Layer()
    with paddle.LazyGuard():
        layer.bare = layer.tied = paddle.create_parameter([2, 3], "float32")
        layer.none = paddle.create_parameter([0, 3], "float32")
    layer.register_buffer("filled", paddle.ones([4]))
    models, there = Models(layer, process=lambda model: None), layer.filled.data_ptr()
    assert (models.give_memory(), models.give_memory()) == (1, 0)
    assert (layer.filled.data_ptr(), layer.filled.tolist()) == (there, [1, 1, 1, 1])
    assert models.state["bare"] is models.state["tied"]
    layer.bare.set_value(paddle.full([2, 3], 2.0))
    assert layer.tied.tolist() == [[2] * 3] * 2


def test_a_parameter_without_memory_cannot_be_vouched_for(tmp_path):  # C13, C14
    save_state({"up.weight": Net(2).up.weight}, tmp_path)
    with pytest.raises(PlanError, match="target wants 4 tensors"):
        DynamicWeightManager(config(tmp_path, partial_over=1), bare_net(), 0)


@pytest.mark.parametrize("is_cleared_first", [True, False])
def test_a_parameter_that_was_cleared_is_not_vouched_for(
    tmp_path, open_manager, is_cleared_first
):  # C13, C15
    save_state({"up.weight": Net(2).up.weight}, tmp_path)
    target, where = Net(1), config(tmp_path, partial_over=1)
    if is_cleared_first:
        target.head._clear_data()
        with pytest.raises(PlanError, match="target wants 4 tensors"):
            open_manager(where, target)
        return
    manager = open_manager(where, target)
    target.head._clear_data()
    with pytest.raises(PlanError, match="target wants 4 tensors"):
        manager.update_parameters()
    assert (manager.version, manager.health) == (None, "failed")


def test_no_memory_to_be_had_is_named(tmp_path, monkeypatch):  # C14
    target = bare_net()

    def full(shape, dtype):
        raise MemoryError("out of memory")

    monkeypatch.setattr(paddle, "empty", full)
    with pytest.raises(LifecycleError, match="give_memory failed: MemoryError: out of memory"):
        DynamicWeightManager(config(tmp_path), target, 0)


@FROM_BOTH
def test_parameters_that_others_cleared_are_not_served_until_they_are_filled_again(
    source, open_manager, strategy
):  # C14, C15, C17
    target = Net()
    manager = open_manager(source(strategy), target)
    target.head._clear_data()
    target.up.weight._clear_data()
    with pytest.raises(LifecycleError, match="or lost their memory; update"):
        manager.finalize_update()
    assert (manager.version, manager.health) == (None, "failed")
    manager.clear_parameters()  # what is gone already does not stand in its way
    assert manager.health == "cleared"
    manager.update_parameters()
    manager.finalize_update()
    assert (manager.version, manager.health, holds(target, 1)) == (1, "serving", True)


@FROM_BOTH
@pytest.mark.parametrize("is_cleared_first", [True, False])
def test_a_dist_parameter_that_was_cleared_is_not_served(
    source, open_manager, strategy, is_cleared_first
):  # C14, C15
    target, where = Net(), source(strategy)
    mesh = paddle.distributed.ProcessMesh([0], dim_names=["x"])
    shard = [paddle.distributed.Shard(0)]
    target.up.weight = paddle.distributed.shard_tensor(target.up.weight, mesh, shard)
    refusal = r"dist tensor has no memory(.|\n)*tensor 'up.weight'"
    if is_cleared_first:
        target.up.weight._clear_data()
        with pytest.raises(SpecError, match=refusal):
            open_manager(where, target)
        return
    manager = open_manager(where, target)
    assert holds(target, 1)
    target.up.weight._clear_data()
    with pytest.raises(LifecycleError, match="or lost their memory; update"):
        manager.finalize_update()
    with pytest.raises(SpecError, match=refusal):
        manager.update_parameters()
    assert (manager.version, manager.health) == (None, "failed")


@FROM_BOTH
def test_parameters_that_were_given_other_memory_are_not_served(
    source, open_manager, strategy
):  # C17
    target = Net()
    manager = open_manager(source(strategy), target)
    Net(2).head._share_buffer_to(target.head)
    with pytest.raises(LifecycleError, match="parameters were replaced after they were filled"):
        manager.finalize_update()
    assert (manager.version, manager.health) == (None, "failed")
    manager.update_parameters()
    manager.finalize_update()
    assert (manager.version, holds(target, 1)) == (1, True)


@pytest.mark.parametrize("is_served", [True, False])
def test_memory_that_comes_back_at_the_same_address_is_not_served(
    tmp_path, open_manager, is_served
):  # C17
    fw.save(Net(1), tmp_path, version=1)
    target = Net()
    manager = open_manager(config(tmp_path), target)
    if not is_served:
        fw.save(Net(1), tmp_path, version=2)
        manager.update_parameters()
    target.head._clear_data()
    paddle.zeros([4, 8])._share_buffer_to(target.head)  # the allocator has just the place for it
    with pytest.raises(LifecycleError, match="parameters were replaced after they were filled"):
        manager.finalize_update()
    assert manager.health == "failed"
    manager.update_parameters()
    manager.finalize_update()
    assert holds(target, 1)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def clear_and_fill(directory, pipe):
    """Return how much memory went, whether tensors stayed who they are, and came back whole."""
    paddle.set_device("cpu")
    target = Net(0, size=1 << 19)
    with DynamicWeightManager(config(directory), target, 0) as manager:
        wanted, shape = content(target), shape_of(target)
        full = resident_bytes()
        manager.clear_parameters()
        empty = resident_bytes()
        manager.clear_parameters()
        again = resident_bytes()
        manager.update_parameters()
        manager.finalize_update()
        nbytes = sum(len(each) for each in wanted[0].values())
        return {
            "given": (full - empty) / nbytes,
            "given_again": (empty - again) / nbytes,
            "is_same": shape_of(target) == shape and content(target) == wanted,
            "cache": bool((target.cache == 3).all()),
        }


def test_a_clear_gives_memory_back_and_an_update_fills_the_same_tensors(tmp_path):  # C15
    fw.save(Net(1, size=1 << 19), tmp_path, version=1)
    with Child(clear_and_fill, tmp_path, context=SPAWN) as child:
        found = child.result(3 * LIMIT)
    assert found["given"] > 0.9
    assert abs(found["given_again"]) < 0.1
    assert found["is_same"]
    assert found["cache"]
