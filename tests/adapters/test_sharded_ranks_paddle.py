"""What each rank of Paddle holds of dist tensors: real processes, boxes and bytes against the whole."""

import pickle
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import flyweight as fw
from flyweight.adapters.model import adapt
from flyweight.adapters.parts import partial_names, undeclared_shards
from flyweight.plans.copy_table import BoxTable
from flyweight.plans.merged_source import HeldTable, merge_held
from rank_processes import run_ranks


def check(state, whole):
    """Check this rank's bytes, and return the model."""
    model = adapt(state, may_be_empty=True)
    for name in model.manifest.tensors:
        for box in model.boxes(name):
            where = tuple(slice(lo, hi) for lo, hi in zip(box.offset, box.end, strict=True))
            assert model.read(name, box).tobytes() == whole[name][where].tobytes(), (name, box)
    return model


def held_table(model):
    tensors = model.manifest.tensors
    rows = [(n, box) for n, name in enumerate(tensors) for box in model.boxes(name)]
    return HeldTable(tensors, {}, {}, BoxTable.of(rows))


def dist_tensors(rank, num_ranks, root):
    import paddle
    import paddle.distributed as dist

    places = {"r": dist.Replicate(), "0": dist.Shard(0), "1": dist.Shard(1)}
    one = dist.ProcessMesh(list(range(num_ranks)), dim_names=["x"])
    two = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
    whole, state = {}, {}
    for shape in ((8, 4), (7, 6), (3, 7)):  # Paddle cannot cut into more pieces than one too many
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for mesh, number in ((one, 1), (two, 2)):
            for cut in product(places, repeat=number):
                if cut in {("0", "0"), ("1", "1")} and shape != (8, 4):
                    continue  # Paddle itself cuts a dim over two axes only if the sizes divide it
                name = f"{shape} {cut}"
                whole[name] = array
                state[name] = dist.shard_tensor(
                    paddle.to_tensor(array), mesh, [places[each] for each in cut]
                )
    model = check(state, whole)
    Path(root, str(rank)).write_bytes(pickle.dumps((held_table(model), whole)))
    replicated = [name for name in whole if "0'" not in name and "1'" not in name]
    assert sorted(partial_names(model)) == sorted(whole.keys() - replicated)
    assert not partial_names(adapt({name: state[name] for name in replicated}))
    summed = dist.shard_tensor(paddle.ones([4]), one, [dist.Partial()])
    with pytest.raises(fw.FlyweightError, match=r"not summed yet; call paddle(.|\n)*'summed'"):
        adapt({"summed": summed})


def test_dist_tensors_are_read_by_boxes_and_partial_sums_refused(tmp_path):
    run_ranks(4, __file__, "dist_tensors", tmp_path, framework="paddle")
    told = [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(4)]
    merged = merge_held([table for table, _ in told])  # which proves that nothing is missing
    assert {name: each.shape for name, each in merged.tensors.items()} == {
        name: each.shape for name, each in told[0][1].items()
    }


def parallel_layers(rank, num_ranks):
    """Tensor parallel layers have plain tensors; what they are parts of, only the user knows."""
    from paddle import nn
    from paddle.distributed import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": num_ranks, "pp_degree": 1}
    fleet.init(is_collective=True, strategy=strategy)
    layers = fleet.meta_parallel
    layer = nn.Sequential(
        layers.VocabParallelEmbedding(8, 4),
        layers.ColumnParallelLinear(4, 6, has_bias=True, gather_output=False),
        layers.RowParallelLinear(6, 4, input_is_parallel=True),
        nn.Linear(4, 4),
    )
    marked = ["0.weight", "1.weight", "1.bias", "2.weight"]
    assert undeclared_shards({"model": layer}) == [f"model.{name}" for name in marked]
    state = layer.state_dict()
    for name in marked:
        tensor = state[name]
        shape, offset = list(tensor.shape), [0] * len(tensor.shape)
        offset[tensor.split_axis] = shape[tensor.split_axis] * rank
        shape[tensor.split_axis] *= num_ranks
        state[name] = fw.Sharded(tensor, shape, offset)
    assert undeclared_shards(state) == []
    assert partial_names(adapt(state)) == marked


def test_tensor_parallel_layers_are_noticed_until_they_are_told():
    run_ranks(2, __file__, "parallel_layers", framework="paddle")


def test_tensors_that_megatron_marks_are_noticed():
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(2, 2)
    assert undeclared_shards(module) == []
    module.weight.tensor_model_parallel = True
    assert undeclared_shards([module]) == ["0.weight"]
