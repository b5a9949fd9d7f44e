"""What each rank of torch holds of sharded models: real processes, boxes and bytes against the whole."""

from itertools import product

import pytest
import torch
from torch import nn

import flyweight as fw
from flyweight.adapters.identity import Identity
from flyweight.adapters.model import adapt
from flyweight.adapters.parts import partial_names
from flyweight.plans.copy_table import BoxTable
from flyweight.plans.merged_source import HeldTable, merge_held
from rank_processes import run_ranks


def held_table(model):
    rows = [
        (number, spec.stored(box))
        for number, (name, spec) in enumerate(model.manifest.tensors.items())
        for box in model.boxes(name)
    ]
    manifest = model.manifest
    return HeldTable(manifest.tensors, manifest.tied, manifest.values, BoxTable.of(rows))


def check(thing, whole=None):
    """Check this rank's bytes, and that all ranks together hold everything; return the model."""
    model = adapt(thing, may_be_empty=True)
    whole = whole_of(thing) if whole is None else whole  # not before: it puts shards back itself
    for name in model.manifest.names:
        for box in model.boxes(name):
            where = tuple(slice(lo, hi) for lo, hi in zip(box.offset, box.end, strict=True))
            expected = whole[name][where].contiguous().numpy().tobytes()
            assert model.read(name, box).tobytes() == expected, (name, box)
    tables = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(tables, held_table(model))
    merged = merge_held(tables)
    found = {*merged.tensors, *merged.tied}
    assert found == whole.keys()
    for name, tensor in whole.items():
        assert merged.tensors[merged.tied.get(name, name)].shape == tuple(tensor.shape), name
    return model


def whole_of(module):
    """Return what all ranks hold together, by torch's own gathering of the shards."""
    state = module.state_dict()
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
        for name, tensor in state.items()
    }


class Net(nn.Module):
    """Has tied weights, a buffer, and dims that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(
            nn.Linear(6, 7), nn.Linear(7, 6), nn.Linear(6, 1), nn.Linear(1, 6)
        )
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


STATES = ["new", "unsharded", "forward", "backward", "step", "step, then forward", "kept"]


def train(module, optimizer, state):
    """Bring a module into one of the states in which a trainer may publish."""
    tokens = torch.arange(4)
    if state == "unsharded":
        module.unshard()
    if state == "forward":
        module(tokens)
    if state in {"backward", "step", "step, then forward", "kept"}:
        module.set_reshard_after_backward(state != "kept")
        module(tokens).square().sum().backward()
    if state in {"step", "step, then forward", "kept"}:
        optimizer.step()
    if state == "step, then forward":
        with torch.no_grad():
            module(tokens)


def fsdp_states(rank, num_ranks):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    afters = [True, False, None] + ([2] if num_ranks == 4 else [])
    for after in afters:
        for state in STATES:
            torch.manual_seed(3)
            module = Net()
            for layer in module.body:
                fully_shard(layer, reshard_after_forward=after, mp_policy=policy)
            fully_shard(module, reshard_after_forward=after)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            train(module, optimizer, state)
            wholes = [type(p) for p in module.parameters() if type(p) is nn.Parameter]
            if after is False and state in {"forward", "step, then forward", "kept"}:
                assert wholes, state  # otherwise this shows nothing
            model = check(module)
            assert model.manifest.spec("body.0.weight").dtype.name == "f32"
            assert model.manifest.tied == {"head.weight": "embed.weight"}
            assert partial_names(model)


@pytest.mark.check
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fsdp2_modules_are_read_by_their_shards_in_every_state_of_training(num_ranks):
    run_ranks(num_ranks, __file__, "fsdp_states")


def fsdp_truth(rank, num_ranks):
    """What is read after a step is what the optimizer has written, not what a forward has used."""
    from torch.distributed.fsdp import fully_shard

    module = nn.Linear(4, 6, bias=False)
    fully_shard(module, reshard_after_forward=False)
    shard = module.weight  # which an optimizer holds
    module(torch.ones(1, 4))
    with torch.no_grad():
        shard.to_local().fill_(rank + 5)
    expected = torch.cat([torch.full((3, 4), 5.0), torch.full((3, 4), 6.0)])
    assert type(module.weight) is nn.Parameter
    assert not torch.equal(module.weight, expected)
    check(module, {"weight": expected})


def test_a_step_while_whole_tensors_are_there_is_read():
    run_ranks(2, __file__, "fsdp_truth")


def fsdp_around(rank, num_ranks):
    """The FSDP module lies around the one that is passed; some of a group ran their forward."""
    from torch.distributed.fsdp import fully_shard

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(module, reshard_after_forward=False)
    module(torch.ones(1, 4))
    assert type(module[1].weight) is nn.Parameter
    check(module[1])
    module(torch.ones(1, 4))
    identity = Identity({"inner": module[1]})
    assert not any(type(p) is nn.Parameter for p in module.parameters())
    module(torch.ones(1, 4))
    assert not identity.is_same()
    # The group lists first what the model has last: the tied tensor is met before its hook.
    net = Net()
    fully_shard([net.head, net.embed], reshard_after_forward=False)
    fully_shard(net)
    net(torch.arange(4))
    assert type(net.embed.weight) is nn.Parameter
    net.embed(torch.arange(4))  # half of the group is amid a forward
    check(net)


def test_fsdp2_around_a_module_and_amid_a_forward():
    run_ranks(2, __file__, "fsdp_around")


def fsdp_identity(rank, num_ranks):
    from torch.distributed.fsdp import fully_shard

    module = Net()
    fully_shard(module, reshard_after_forward=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    train(module, optimizer, "step")  # the first forward may move shards
    first, model = Identity(module), adapt(module)
    for state in ("backward", "step", "kept", "forward", "step, then forward"):
        train(module, optimizer, state)
        is_whole = type(module.embed.weight) is nn.Parameter
        assert first.is_same() is not is_whole
        again = Identity(module)  # and it is sharded again
        assert again.has_tensors_of(first)
        assert first.is_same()
        assert again.is_same()
        found = adapt(module)
        for name in found.manifest.tensors:
            old, new = (each.blocks(name)[0].memory.address for each in (model, found))
            assert old == new, name
    module(torch.arange(4))
    identity = Identity(module)  # of a module with whole tensors
    with torch.no_grad():
        local = module.embed.weight.to_local()
        module.embed.weight._local_tensor = local.clone()
    module(torch.arange(4))
    assert not identity.is_same()


def test_a_module_that_is_whole_between_two_checks_has_the_same_shards_after():
    run_ranks(2, __file__, "fsdp_identity")


def meshes(rank, num_ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def parallel(wide, mesh):
        torch.manual_seed(5)
        module = nn.Sequential(nn.Linear(5, wide), nn.Linear(wide, 7))
        whole = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        return parallelize_module(module, mesh["tp"], plan), whole

    shapes = [(2, 2)] if num_ranks == 4 else [(2, 2, 2), (4, 2)]
    for shape, wide in product(shapes, (8, 9, 7, 6, 3, 1)):
        axes = ("dp", "fsdp", "tp")[-len(shape) :]
        mesh, names = init_device_mesh("cpu", shape, mesh_dim_names=axes), axes[:-1]
        module, whole = parallel(wide, mesh)
        fully_shard(module, mesh=mesh[names], reshard_after_forward=False)
        check(module, whole)
        if wide == 8:  # others are too uneven for torch's own forward
            module(torch.ones(2, 5))
            check(module, whole)
    if num_ranks == 4:
        hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
        for place in (Shard(0), Shard(1)):
            torch.manual_seed(5)
            module = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 2, bias=False))
            whole = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
            fully_shard(module, mesh=hybrid, shard_placement_fn=lambda _, place=place: place)
            check(module, whole)


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_fsdp2_over_replicas_and_tensor_parallel_is_read_by_boxes(num_ranks):
    run_ranks(num_ranks, __file__, "meshes")


def dtensors(rank, num_ranks):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (num_ranks,))
    whole = torch.arange(21.0).reshape(7, 3)
    uneven = distribute_tensor(whole, mesh, [Shard(0)])
    few = distribute_tensor(whole[:2], mesh, [Shard(0)])
    same = distribute_tensor(whole, mesh, [Replicate()])
    pair = DeviceMesh("cpu", [0, 1])  # the others have nothing of it
    part = distribute_tensor(whole, pair, [Shard(1)])
    state = {"uneven": uneven, "few": few, "same": same, "part": part}
    model = check(state, {**dict.fromkeys(state, whole), "few": whole[:2]})
    assert sorted(partial_names(model)) == ["few", "part", "uneven"]
    assert not partial_names(adapt({"same": same}))
    # A view of padded memory, as FSDP2 keeps it.
    padded = torch.full((2, 3), -1.0)
    length = uneven.to_local().shape[0]
    padded[:length] = uneven.to_local()
    view = DTensor.from_local(
        padded[:length], mesh, [Shard(0)], run_check=False, shape=(7, 3), stride=(3, 1)
    )
    check({"w": view}, {"w": whole})
    summed = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    with pytest.raises(
        fw.FlyweightError, match=r"not summed yet; call .redistribute.*\n.*'summed'"
    ):
        adapt({"summed": summed})


def test_dtensors_of_uneven_empty_and_padded_shards_are_read_and_partial_sums_refused():
    run_ranks(4, __file__, "dtensors")


def test_what_is_whole_and_what_is_a_part():
    whole = torch.zeros(4, 2)
    assert not partial_names(
        adapt({"w": whole, "scalar": torch.tensor(1.0), "empty": torch.zeros(0, 3)})
    )
    model = adapt({"w": whole, "part": fw.Sharded(torch.zeros(2), shape=(4,), offset=(2,))})
    assert partial_names(model) == ["part"]
    assert not partial_names(adapt({"w": fw.Sharded(whole, shape=(4, 2), offset=(0, 0))}))
