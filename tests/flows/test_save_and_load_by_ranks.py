"""Saves and loads by several ranks of torch: real processes, all pairs of layouts, byte for byte."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flyweight as fw
from child_processes import LIMIT
from rank_processes import run_ranks

SHAPES = {
    "even": (16, 12),
    "odd": (7, 5),
    "row": (3,),
    "cube": (4, 6, 5),
    "scalar": (),
    "empty": (0, 4),
}


def model(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
        for name, shape in SHAPES.items()
    }


def placements():
    """Every kind of cut over one axis, and over two."""
    from torch.distributed.tensor import Replicate, Shard

    one = {"replicate": [Replicate()], "rows": [Shard(0)], "columns": [Shard(1)]}
    two = {
        "rows x columns": [Shard(0), Shard(1)],
        "columns x rows": [Shard(1), Shard(0)],
        "rows x rows": [Shard(0), Shard(0)],
        "replicate x rows": [Replicate(), Shard(0)],
        "columns x replicate": [Shard(1), Replicate()],
    }
    return one, two


def fitting(places, tensor):
    """Replace cuts of dims that a tensor does not have."""
    from torch.distributed.tensor import Replicate

    return [p if p.is_replicate() or p.dim < tensor.dim() else Replicate() for p in places]


def distributed(mesh, places):
    from torch.distributed.tensor import distribute_tensor

    return {
        name: distribute_tensor(t.clone(), mesh, fitting(places, t)) for name, t in model().items()
    }


def blank(state):
    for tensor in state.values():
        tensor.to_local().fill_(3)


def check_same(state):
    for name, whole in model().items():
        found = state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
        assert torch.equal(
            found.view(torch.uint8) if found.dim() else found,
            whole.view(torch.uint8) if whole.dim() else whole,
        ), name


def layouts(num_ranks):
    from torch.distributed.device_mesh import init_device_mesh

    one, two = placements()
    mesh = init_device_mesh("cpu", (num_ranks,))
    found = {name: (mesh, places) for name, places in one.items()}
    if num_ranks == 4:
        mesh2 = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        found |= {name: (mesh2, places) for name, places in two.items()}
    return found


def save_all(rank, num_ranks, root):
    for name, (mesh, places) in layouts(num_ranks).items():
        state = {"model": distributed(mesh, places), "step": 4, "lr": 0.5, "name": "policy"}
        fw.save_state_dict(state, Path(root) / f"{num_ranks} {name}", version=3)


def load_all(rank, num_ranks, root):
    for mesh, places in layouts(num_ranks).values():
        for saved in sorted(Path(root).iterdir()):
            state = {"model": distributed(mesh, places), "step": 0, "lr": 0.0, "name": ""}
            blank(state["model"])
            report = fw.load_state_dict(state, saved)
            assert report.version == 3
            check_same(state["model"])
            assert (state["step"], state["lr"], state["name"]) == (4, 0.5, "policy")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    for num_ranks in (2, 3, 4):
        run_ranks(num_ranks, __file__, "save_all", root)
    return root


@pytest.mark.check
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_any_layout_loads_into_any_other_byte_for_byte(saved, num_ranks):
    """C35, C36, C37."""
    assert len(list(saved.iterdir())) == 3 + 3 + 8
    if num_ranks > 1:
        run_ranks(num_ranks, __file__, "load_all", saved)
        return
    for each in saved.iterdir():
        state = {
            "model": {n: torch.full_like(t, 3) for n, t in model().items()},
            "step": 0,
            "lr": 0.0,
            "name": "",
        }
        fw.load_state_dict(state, each)
        check_same(state["model"])
        assert fw.verify(each).is_whole


def test_every_rank_writes_its_own_and_a_replica_is_written_once(saved):
    """C35."""
    with fw.open(saved / "4 rows") as opened:
        files = {extent.file for extent in opened.manifest.extents if extent.name == "model.even"}
        assert files == {f"rank-{rank:05d}-00001.safetensors" for rank in range(4)}
    with fw.open(saved / "4 replicate") as opened:
        assert len(opened.manifest.extents) == len(SHAPES) - 1  # the empty tensor has no bytes
        assert len({extent.file for extent in opened.manifest.extents}) == 4


def fsdp_over_tp(rank, num_ranks, root):
    """FSDP2 over tensor parallel: torch tells the cut that was made last first."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for wide in (8, 12, 6, 7, 5):
        torch.manual_seed(5)
        module = nn.Sequential(nn.Linear(5, wide), nn.Linear(wide, 7))
        whole = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(module, mesh=mesh["dp"])
        fw.save(module, Path(root) / str(wide), process_group=torch.distributed.group.WORLD)
        with fw.open(Path(root) / str(wide)) as opened:
            for name, tensor in whole.items():
                assert opened.read(name).tobytes() == tensor.numpy().tobytes(), (wide, name)
        parameters = [id(p) for p in module.parameters()]
        with torch.no_grad():
            for p in module.parameters():
                p.to_local().fill_(9)
        fw.load(Path(root) / str(wide), into=module, process_group=torch.distributed.group.WORLD)
        assert [id(p) for p in module.parameters()] == parameters
        for name, tensor in module.state_dict().items():
            found = tensor.redistribute(
                placements=[Replicate()] * tensor.device_mesh.ndim
            ).to_local()
            assert torch.equal(found, whole[name]), (wide, name)


def test_fsdp2_over_tensor_parallel_modules_are_read_by_themselves(tmp_path):
    run_ranks(4, __file__, "fsdp_over_tp", tmp_path)


def optimizer_state(rank, num_ranks, root):
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    def trained(seed):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 3))
        fully_shard(module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=seed / 100)
        module(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        return module, optimizer

    def flat(state):
        parts = get_state_dict(*state)
        return {"model": parts[0], "optimizer": parts[1]}

    first = trained(1)
    fw.save_state_dict(flat(first), Path(root) / "run")
    second = flat(trained(2))
    fw.load_state_dict(second, Path(root) / "run")
    expected = flat(first)
    for key, moments in expected["optimizer"]["state"].items():
        for kind, tensor in moments.items():
            ours = second["optimizer"]["state"][key][kind]
            whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in (tensor, ours)]
            assert torch.equal(*whole), (key, kind)
    assert second["optimizer"]["param_groups"][0]["lr"] == 0.01


def test_the_state_of_model_and_optimizer_comes_back(tmp_path):
    """C37."""
    run_ranks(2, __file__, "optimizer_state", tmp_path)


def plain_shards(rank, num_ranks, root):
    state = {"w": torch.arange(8.0) + rank}
    with pytest.raises(fw.FlyweightError, match="different"):
        fw.save_state_dict(state, Path(root) / "run")
    assert fw.versions(Path(root) / "run") == []
    whole = fw.Sharded(state["w"], shape=(8 * num_ranks,), offset=(8 * rank,))
    fw.save_state_dict({"w": whole}, Path(root) / "run")


def test_shards_that_are_not_told_are_noticed_and_those_that_are_told_are_saved(tmp_path):
    run_ranks(2, __file__, "plain_shards", tmp_path)
    with fw.open(tmp_path / "run") as opened:
        assert opened.read("w").view("f4").tolist() == [*range(8), *range(1, 9)]


def stages(rank, num_ranks, root):
    """Each rank wants a stage of its own, and nobody wants the head."""
    from flyweight.events import listening

    names = [f"stage{each}" for each in range(num_ranks)]
    saved = {name: torch.full((4,), 1.0 + n) for n, name in enumerate([*names, "head"])}
    fw.save_state_dict(state_dict=saved, path=Path(root) / "run")
    target = {names[rank]: torch.zeros(4)}
    events = []
    with listening(events.append):
        report = fw.load_state_dict(state_dict=target, path=Path(root) / "run")
    assert target[names[rank]].tolist() == [1.0 + rank] * 4
    assert report.unused == sorted({*names, "head"} - {names[rank]})
    told = [each.fields["names"] for each in events if each.kind == "load.unused"]
    assert told == (["'head'"] if rank == 0 else [])


def test_what_no_rank_has_a_use_for_is_left_out_and_told_once(tmp_path):
    """C36."""
    run_ranks(3, __file__, "stages", tmp_path)


def columns_of_rows(rank, num_ranks, root):
    """Large enough for many windows, so that ranks start at different places and share their reads."""
    group = torch.distributed.group.WORLD
    whole = torch.arange(2048 * 8192, dtype=torch.int32).reshape(2048, 8192)
    rows = fw.Sharded(
        whole[1024 * rank :][:1024].clone(), shape=whole.shape, offset=(1024 * rank, 0)
    )
    fw.save({"w": rows}, Path(root) / "run", process_group=group)
    for path in (Path(root) / "run" / "v0000000000").glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    columns = fw.Sharded(
        torch.zeros(2048, 4096, dtype=torch.int32), shape=whole.shape, offset=(0, 4096 * rank)
    )
    report = fw.load(Path(root) / "run", into={"w": columns}, process_group=group)
    assert torch.equal(columns.tensor, whole[:, 4096 * rank :][:, :4096])
    assert report.checked_bytes == report.read_bytes == whole.nbytes
    assert report.nbytes == whole.nbytes // 2


def test_ranks_that_want_columns_of_rows_share_their_reads_and_check_them_all(tmp_path):
    run_ranks(2, __file__, "columns_of_rows", tmp_path)


def strided_twice(rank, num_ranks, root):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    places = [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2)]
    odd = DTensor.from_local(torch.arange(6.0) + 6 * rank, mesh, places, run_check=False)
    with pytest.raises(fw.FlyweightError, match="strided|rank ."):
        fw.save_state_dict({"w": odd}, Path(root) / "run", timeout_seconds=LIMIT)


def test_a_cut_that_torch_itself_cannot_tell_is_refused(tmp_path):
    run_ranks(4, __file__, "strided_twice", tmp_path)
    assert fw.versions(tmp_path / "run") == []


@pytest.mark.check
def test_torchrun_starts_it_too(tmp_path):
    """No tensor goes through a collective: gloo's threads abort a process that ends while they hold one."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "from torch.distributed.tensor import init_device_mesh, distribute_tensor, Shard\n"
        "import flyweight as fw\n"
        "dist.init_process_group('gloo')\n"
        "mesh = init_device_mesh('cpu', (2,))\n"
        "w = distribute_tensor(torch.arange(10.), mesh, [Shard(0)], src_data_rank=None)\n"
        "fw.save_state_dict({'w': w}, sys.argv[1])\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        script,
    ]
    done = subprocess.run(
        [*command, tmp_path / "run"], capture_output=True, text=True, timeout=4 * LIMIT
    )
    assert done.returncode == 0, done.stderr
    target = {"w": torch.zeros(10)}
    fw.load(tmp_path / "run", into=target)
    assert torch.equal(target["w"], torch.arange(10.0))
