"""Publishes by several ranks of torch and Paddle: real processes, byte for byte, every version.

A trainer of several ranks publishes to engines in processes of their own: one holds the whole
model, another is cut over two ranks. Rank 0 writes what the engines must hold to a file first.
"""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT, Child, until
from flyweight.errors import FlyweightError, PlanError
from rank_processes import launch, run_ranks

VERSIONS = (1, 2, 3)


# Engines.


def halved(array, rank):
    """Return the offset and the shape of a rank's half of a tensor, along its longest dim."""
    if array.ndim == 0 or max(array.shape) < 2:
        return (0,) * array.ndim, array.shape
    dim = int(np.argmax(array.shape))
    middle = array.shape[dim] // 2
    offset, shape = [0] * array.ndim, list(array.shape)
    offset[dim], shape[dim] = (0, middle) if rank == 0 else (middle, array.shape[dim] - middle)
    return tuple(offset), tuple(shape)


def expected(root, version):
    path = Path(root, f"{version}.pickle")
    return pickle.loads(path.read_bytes())


def follow(root, num_ranks, rank, pipe):
    """Take every version; compare each byte with what rank 0 of the trainer has written."""
    pipe.recv()
    zeros = expected(root, "shapes")
    tensors = {name: each for name, each in zeros.items() if isinstance(each, np.ndarray)}
    values = {name: each for name, each in zeros.items() if name not in tensors}
    if num_ranks == 1:
        target = {name: each.copy() for name, each in tensors.items()}
    else:
        cut = {name: halved(each, rank) for name, each in tensors.items()}
        target = {
            name: fw.Sharded(np.zeros(shape, tensors[name].dtype), tensors[name].shape, offset)
            for name, (offset, shape) in cut.items()
        }
    options = {"rank": rank, "world_size": num_ranks} if num_ranks > 1 else {}
    model = {**target, **{name: type(each)() for name, each in values.items()}}
    with fw.Replica(model, f"unix:{root}/at", name=f"tp{num_ranks}", **options) as replica:
        for version in VERSIONS:
            report = replica.update(version, timeout_seconds=LIMIT)
            assert report.version == version
            for name, whole in expected(root, version).items():
                if name in values:
                    assert model[name] == whole, (version, name)
                    continue
                if num_ranks > 1:
                    offset, shape = cut[name]
                    whole = whole[tuple(map(slice, offset, np.add(offset, shape)))]
                    found = target[name].tensor
                else:
                    found = target[name]
                assert found.tobytes() == whole.tobytes(), (version, name, num_ranks, rank)
            pipe.send(("held", version))
    return "done"


class Engines:
    """An engine with the whole model, and one of two ranks."""

    def __init__(self, root):
        ranks = [(1, 0), (2, 0), (2, 1)]
        self.children = [Child(follow, root, num_ranks, rank) for num_ranks, rank in ranks]

    def __enter__(self):
        for each in self.children:
            each.send("begin")
        return self

    def __exit__(self, *raised):
        for each in self.children:
            if raised[0] is None:
                assert each.result() == "done"
            each.__exit__()


# Trainers.


def pieces(model):
    """Return (name, whole shape, offset, array) of what this rank holds; collective for DTensors."""
    found = []
    items = model.items() if isinstance(model, dict) else model.state_dict(keep_vars=True).items()
    for name, leaf in items:
        if isinstance(leaf, fw.Sharded):
            array = np.asarray(leaf.tensor)
            found.append((name, tuple(leaf.shape), tuple(leaf.offset), array.copy()))
        elif isinstance(leaf, (int, str, float)):
            found.append((name, None, None, leaf))
        else:
            leaf = leaf.detach() if hasattr(leaf, "detach") else leaf
            leaf = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
            array = leaf if isinstance(leaf, np.ndarray) else leaf.numpy().copy()
            found.append((name, array.shape, (0,) * array.ndim, array))
    return found


def whole_model(model):
    """Return all tensors of all ranks, as arrays."""
    import torch.distributed as dist

    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces(model))
    found = {}
    for name, shape, offset, array in (piece for each in everyone for piece in each):
        if shape is None:
            found[name] = array
        else:
            whole = found.setdefault(name, np.zeros(shape, array.dtype))
            whole[tuple(map(slice, offset, np.add(offset, array.shape)))] = array
    return found


def write(root, name, found):
    draft = Path(root, f"{name}.draft")
    draft.write_bytes(pickle.dumps(found))
    draft.rename(Path(root, f"{name}.pickle"))


def train(rank, num_ranks, root, make, options, publish_options, *, is_mapped):
    """Publish some versions of a model; every rank gets the same report."""
    import torch.distributed as dist

    model, step = make(rank, num_ranks)
    with fw.Publisher(model, f"unix:{root}/at", timeout_seconds=LIMIT, **options) as publisher:
        for version in VERSIONS:
            step(version)
            found = whole_model(model)
            if rank == 0:
                write(root, version, found)
                if version == 1:
                    zeros = {
                        n: np.zeros_like(e) if isinstance(e, np.ndarray) else e
                        for n, e in found.items()
                    }
                    write(root, "shapes", zeros)
            if hasattr(step, "after"):
                step.after()
            report = publisher.publish(version, num_replicas=2, **publish_options)
            if publish_options.get("background"):
                report.wait_copied(LIMIT)
                report = report.wait(LIMIT)
            assert report.failed == (), report
            assert sorted(each.name for each in report.replicas) == ["tp1", "tp2"]
            assert publisher.version == report.version == version
            nbytes = sum(e.nbytes for e in found.values() if isinstance(e, np.ndarray))
            assert report.nbytes >= 2 * nbytes
            ways = {each.transport for each in report.replicas}
            assert ways == {"mapped" if is_mapped or options.get("keep") == "memory" else "filled"}
            publisher.withdraw()  # nothing is read while the model changes
        dist.barrier()  # the engines may still be at work when another rank is done


def fsdp(rank, num_ranks, *, made_after_forward=False):
    import torch
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    module = torch.nn.Sequential(
        torch.nn.Linear(6, 9), torch.nn.ReLU(), torch.nn.Linear(9, 3, bias=False)
    )
    fully_shard(module[0])
    fully_shard(module, reshard_after_forward=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(version):
        module(torch.ones(2, 6) * version).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    # The root stays unsharded after a forward: its plain tensors are stale by a step, or not.
    step.after = lambda: module(torch.ones(2, 6))
    if made_after_forward:
        step.after()
    return module, step


def stepping(model):
    """Return a model with a step that changes every element of it in place."""

    def step(version):
        for leaf in model.values():
            if isinstance(leaf, (int, str)):
                continue
            leaf = leaf.tensor if isinstance(leaf, fw.Sharded) else leaf
            leaf = leaf.to_local() if hasattr(leaf, "to_local") else leaf
            leaf += version

    return model, step


def placed(rank, num_ranks, *kinds, mesh_shape=None):
    """A dict of DTensors with uneven shards, some of them empty."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", mesh_shape or (num_ranks,))
    generator = torch.Generator().manual_seed(4)
    shapes = {"even": (8, 4), "odd": (7, 5), "row": (3,), "one": (1, 6), "empty": (0, 4)}
    places = [Replicate() if kind is None else Shard(kind) for kind in kinds]
    found = {}
    for name, shape in shapes.items():
        whole = torch.randn(shape, generator=generator)
        fitting = [p if p.is_replicate() or p.dim < len(shape) else Replicate() for p in places]
        found[name] = distribute_tensor(whole, mesh, fitting)
    return stepping(found)


def fsdp_over_tp(rank, num_ranks):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 6))
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])

    def step(version):
        with torch.no_grad():
            for each in module.parameters():
                each.to_local().add_(version)

    return module, step


def stages(rank, num_ranks):
    """Pipeline stages and experts: names of its own on each rank; the last one holds nothing."""
    import torch

    whole = np.arange(35.0).reshape(7, 5)
    model = {}
    if rank < num_ranks - 1:
        model = {
            f"stage{rank}.w": torch.full((4, rank + 2), 1.0 + rank),
            f"expert{rank}": np.full(9, rank, "i4"),
        }
    if rank == 0:
        model |= {
            "uneven": fw.Sharded(whole[:1].copy(), (7, 5), (0, 0)),
            "step": 7,
            "name": "policy",
        }
    if rank == 1:
        model |= {"uneven": fw.Sharded(whole[1:].copy(), (7, 5), (1, 0)), "only_1": "text"}
    _, change = stepping(model)

    def step(version):
        change(version)
        if rank == 1:
            model["only_1"] = f"text of version {version}"

    return model, step


def tied(rank, num_ranks):
    """The first and the last stage share their embedding, each has a copy; ties within a rank."""
    import torch

    torch.manual_seed(6)
    shared = torch.randn(6, 4)
    if rank == 0:
        model = {"embed": shared, "body": torch.ones(3)}
    else:
        model = {"embed": shared.clone(), "tail": torch.ones(5)}
        model["head"] = model["embed"]

    def step(version):
        for each in {id(e): e for e in model.values()}.values():
            each += version

    return model, step


def in_shared_memory(rank, num_ranks):
    """Tensors that replicas can map, some of them on one rank only."""
    import torch

    whole = torch.arange(9 * 512.0).reshape(9, 512)
    rows = slice(0, 4) if rank == 0 else slice(4, 9)
    part = whole[rows].clone().share_memory_()
    model = {"w": fw.Sharded(part, whole.shape, (rows.start, 0))}
    if rank == 1:
        model["only_1"] = torch.zeros(1000).share_memory_()
    return stepping(model)


MAKERS = {
    "shared": in_shared_memory,
    "fsdp": fsdp,
    "fsdp after forward": partial(fsdp, made_after_forward=True),
    "rows": lambda r, n: placed(r, n, 0),
    "columns": lambda r, n: placed(r, n, 1),
    "replicas of rows": lambda r, n: placed(r, n, None, 0, mesh_shape=(2, 2)),
    "rows x columns": lambda r, n: placed(r, n, 0, 1, mesh_shape=(2, 2)),
    "all replicas": lambda r, n: placed(r, n, None),
    "fsdp over tp": fsdp_over_tp,
    "stages": stages,
    "tied": tied,
}
CASES = {
    2: [
        ("fsdp", {}, {}),
        ("fsdp", {"keep": "memory"}, {"background": True}),
        ("fsdp after forward", {}, {"background": True}),
        ("rows", {"keep": "in_place"}, {}),
        ("all replicas", {"verify": False}, {}),
        ("shared", {}, {"background": True}),
        ("tied", {"is_grouped": True}, {}),
        ("tied", {"is_grouped": True, "keep": "memory"}, {}),
    ],
    4: [
        ("fsdp", {"verify": False}, {"background": True}),
        ("columns", {"keep": "memory"}, {}),
        ("replicas of rows", {}, {}),
        ("rows x columns", {}, {"background": True}),
        ("fsdp over tp", {}, {}),
        ("stages", {"is_grouped": True}, {}),
        ("stages", {"is_grouped": True, "keep": "memory"}, {}),
    ],
}


def all_cases(root, num_ranks):
    """Run every case, one after the other, by the same ranks."""
    num_ranks = int(num_ranks)
    cases = [(Path(root, str(n)), *case) for n, case in enumerate(CASES[num_ranks])]
    for place, *_ in cases:
        place.mkdir()
    engines = [Engines(place) for place, *_ in cases]

    def trainer(rank, num_ranks):
        import torch.distributed as dist

        for place, maker, options, publish_options in cases:
            options = dict(options)
            if options.pop("is_grouped", False):
                options["process_group"] = dist.group.WORLD
            try:
                is_mapped = maker == "shared"
                train(
                    rank, num_ranks, place, MAKERS[maker], options, publish_options,
                    is_mapped=is_mapped,
                )  # fmt: skip
            except BaseException as error:
                raise AssertionError(f"case {maker!r} {options}") from error

    started = os.fork()
    if started == 0:
        os._exit(0 if launch(num_ranks, "torch", trainer) == [0] * num_ranks else 1)
    for place, each in zip([c[0] for c in cases], engines, strict=True):
        until((place / "shapes.pickle").exists)
        with each:
            pass
    assert os.waitpid(started, 0)[1] == 0


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_engines_hold_every_version_byte_for_byte(tmp_path, num_ranks):
    run_ranks(0, __file__, "all_cases", tmp_path, num_ranks)


def paddle_tensors(root):
    """Two ranks of Paddle publish dist tensors, a value of rank 1 and a plain tensor of both."""
    engines = Engines(root)

    def trainer(rank, num_ranks):
        import paddle
        import paddle.distributed as dist

        mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
        arrays = {
            "rows": np.random.default_rng(1).random((7, 5)).astype("f4"),
            "columns": np.eye(6, 4, dtype="f4"),
        }
        model = {
            "rows": dist.shard_tensor(paddle.to_tensor(arrays["rows"]), mesh, [dist.Shard(0)]),
            "columns": dist.shard_tensor(
                paddle.to_tensor(arrays["columns"]), mesh, [dist.Shard(1)]
            ),
            "both": paddle.zeros([5]),
        }
        arrays["both"] = np.zeros(5, "f4")
        if rank == 1:
            model["step"] = 0
        with fw.Publisher(model, f"unix:{root}/at", timeout_seconds=LIMIT) as publisher:
            for version in VERSIONS:
                for name, array in arrays.items():
                    array += version
                    leaf = model[name]
                    (leaf._local_value() if leaf.is_dist() else leaf).add_(
                        paddle.to_tensor(float(version))
                    )
                if rank == 1:
                    model["step"] = version
                if rank == 0:
                    write(root, version, {**arrays, "step": version})
                    if version == 1:
                        write(
                            root,
                            "shapes",
                            {**{n: np.zeros_like(e) for n, e in arrays.items()}, "step": 0},
                        )
                report = publisher.publish(version, num_replicas=2)
                assert report.failed == (), report
            dist.barrier()

    started = os.fork()
    if started == 0:
        os._exit(0 if launch(2, "paddle", trainer) == [0, 0] else 1)
    until(Path(root, "shapes.pickle").exists)
    with engines:
        pass
    assert os.waitpid(started, 0)[1] == 0


def test_engines_hold_what_ranks_of_paddle_publish(tmp_path):
    run_ranks(0, __file__, "paddle_tensors", tmp_path, framework="paddle")


def alone_in_a_job(rank, num_ranks, root):
    """A whole model without a process group is published alone, also inside a job."""
    import torch
    import torch.distributed as dist

    model = torch.nn.Linear(3, 2)
    if rank == 0:
        engine = torch.nn.Linear(3, 2)
        with (
            fw.Publisher(model, f"unix:{root}/at", timeout_seconds=LIMIT) as publisher,
            fw.Replica(engine, f"unix:{root}/at") as replica,
            ThreadPoolExecutor(1) as pool,
        ):
            update = pool.submit(replica.update, timeout_seconds=LIMIT)
            publisher.publish(1, num_replicas=1)
            assert update.result(LIMIT).version == 1
            assert torch.equal(engine.weight, model.weight)
    dist.barrier()
    half = fw.Sharded(torch.zeros(2, 3), (4, 3), (2 * rank, 0))
    with pytest.raises(PlanError, match="'w'"):
        fw.Publisher({"w": half}, f"unix:{root}/at", rank=0, world_size=1)


def test_a_whole_model_in_a_job_is_published_alone(tmp_path):
    run_ranks(2, __file__, "alone_in_a_job", tmp_path)


def two_publishers(rank, num_ranks, root):
    """Two models of the same names, whose publishers the ranks make in different orders."""
    half = fw.Sharded(np.full((2, 3), rank), (4, 3), (2 * rank, 0))
    address = f"unix:{root}/{('policy', 'reference')[rank]}"
    with pytest.raises(FlyweightError, match=(r"\[1\]", "no publisher is at .*reference")[rank]):
        fw.Publisher({"w": half}, address, timeout_seconds=1)


def test_publishers_of_different_addresses_do_not_meet(tmp_path):
    run_ranks(2, __file__, "two_publishers", tmp_path)
