"""Many ranks, layouts and saves in the background, with the tensors on a GPU."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flyweight as fw  # noqa: E402
from child_processes import LIMIT  # noqa: E402
from rank_processes import run_ranks  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


def test_a_save_in_the_background_keeps_what_was_on_the_device(tmp_path):
    """C40: the copy goes to pinned memory, and the next kernel may overwrite the weights."""
    model = {
        "w": torch.full((512, 70_001), 3.0, device="cuda").bfloat16(),
        "t": torch.arange(12.0, device="cuda").reshape(3, 4).t(),
    }
    expected = {name: tensor.cpu().contiguous() for name, tensor in model.items()}
    for version in range(3):
        handle = fw.save(model, tmp_path, background=True)
        for tensor in model.values():
            tensor.zero_()
        handle.wait(LIMIT)
        with fw.open(tmp_path, version=version) as opened:
            for name, tensor in expected.items():
                data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                assert opened.read(name).tobytes() == data, name
        for name, tensor in model.items():
            tensor.copy_(expected[name])


def test_fused_and_stacked_tensors_on_the_device_are_filled_in_place(tmp_path):
    rng = np.random.default_rng(0)
    whole = {f"layers.0.{n}": rng.random((8, 512), np.float32) for n in "qkv"}
    whole |= {
        f"layers.0.experts.{e}.{n}": rng.random((40, 512), np.float32)
        for e in range(4)
        for n in ("w1", "w3")
    }
    fw.save(whole, tmp_path)
    layout = fw.ModelLayout.from_json(
        '{"mesh": {"tp": 2}, "rules": [{"names": ["layers.*.q", "layers.*.k", "layers.*.v"], "cut": {"0": "tp"}, '
        '"local": "layers.{0}.qkv", "groups": 4}, {"names": ["layers.*.experts.*.w1", "layers.*.experts.*.w3"], '
        '"spread": {"1": "tp"}, "stack": 1, "local": "w13.{0}"}]}'
    )
    for rank in range(2):
        engine = {
            "layers.0.qkv": torch.zeros(12, 512, device="cuda"),
            "w13.0": torch.zeros(2, 80, 512, device="cuda"),
        }
        places = {name: tensor.data_ptr() for name, tensor in engine.items()}
        fw.load(tmp_path, into=engine, layout=layout, rank=rank)
        groups = [np.split(whole[f"layers.0.{n}"], 4) for n in "qkv"]
        qkv = np.concatenate([part[g] for g in (2 * rank, 2 * rank + 1) for part in groups])
        w13 = np.stack(
            [
                np.concatenate([whole[f"layers.0.experts.{e}.{n}"] for n in ("w1", "w3")])
                for e in (2 * rank, 2 * rank + 1)
            ]
        )
        assert engine["layers.0.qkv"].cpu().numpy().tobytes() == qkv.tobytes()
        assert engine["w13.0"].cpu().numpy().tobytes() == w13.tobytes()
        assert {name: tensor.data_ptr() for name, tensor in engine.items()} == places


def ranks_on_one_device(rank, num_ranks, root):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (num_ranks,))
    whole = torch.arange(301.0 * 40).reshape(301, 40).bfloat16()
    rows = distribute_tensor(whole, mesh, [Shard(0)]).to_local().cuda()
    low = [0, 151][rank]
    state = {
        "w": fw.Sharded(rows, shape=(301, 40), offset=(low, 0)),
        "copy": whole.cuda(),
        "step": 4,
    }
    handle = fw.save_state_dict(state, Path(root) / "run", background=True)
    rows.zero_()
    handle.wait(LIMIT)
    columns = torch.zeros(301, 20, device="cuda", dtype=torch.bfloat16)
    target = {
        "w": fw.Sharded(columns, shape=(301, 40), offset=(0, 20 * rank)),
        "copy": torch.zeros(301, 40, device="cuda").bfloat16(),
        "step": 0,
    }
    fw.load_state_dict(target, Path(root) / "run")
    assert torch.equal(columns.cpu(), whole[:, 20 * rank : 20 * rank + 20])
    assert torch.equal(target["copy"].cpu(), whole)
    assert target["step"] == 4


def test_two_ranks_save_and_load_another_cut_on_one_device(tmp_path):
    run_ranks(2, __file__, "ranks_on_one_device", tmp_path)


def replicas_on_one_device(rank, num_ranks, root):
    run = Path(root) / "run"
    for background in (False, True):
        for odd in (None, 0, 1):
            state = {
                "w": torch.arange(12 << 20, device="cuda").float(),
                "t": torch.arange(12 << 20, device="cuda").reshape(3 << 10, 4 << 10).t(),
            }
            if rank == odd:
                state["w"][777_777] = 0.5
            refusal = pytest.raises(fw.FlyweightError, match="'w' .*digest")
            with nullcontext() if odd is None else refusal:
                handle = fw.save_state_dict(state, run, background=background)
                if background:
                    for tensor in state.values():
                        tensor.add_(1 + rank)  # the next step, while the save still writes
                    handle.wait(LIMIT)
            torch.distributed.barrier()
    assert fw.versions(run) == [0, 1]


def test_replicas_on_the_device_are_compared(tmp_path):
    run_ranks(2, __file__, "replicas_on_one_device", tmp_path)


def dtensors_on_the_device(rank, num_ranks, root):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (1,))
    whole = torch.arange(35.0, device="cuda").reshape(7, 5)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)])}
    fw.save_state_dict(state, Path(root) / "run")
    target = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)])}
    fw.load_state_dict(target, Path(root) / "run")
    assert torch.equal(target["w"].to_local(), whole)


def test_dtensors_on_the_device_tell_their_layout(tmp_path):
    run_ranks(1, __file__, "dtensors_on_the_device", tmp_path)
