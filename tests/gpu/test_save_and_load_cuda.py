"""The same code on a GPU: bytes go through pinned staging, into the parameters that are there."""

import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flyweight as fw  # noqa: E402
from flyweight.adapters.model import adapt  # noqa: E402
from flyweight.errors import ChecksumMismatch, SpecError  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


def raw(tensor):
    tensor = tensor.detach().cpu().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def odd_tensors(seed=0, device="cuda"):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return {
        "weight": normal(3000, 1001).to(device).bfloat16(),
        "transposed": normal(40, 70).to(device).t(),
        "strided": normal(64, 64).to(device)[::2, 1::3],
        "scalar": normal().to(device),
        "empty": torch.empty(0, 4, device=device),
        "eight": normal(7, 9).to(device).to(torch.float8_e4m3fn),
        "ids": torch.arange(5, device=device),
        "flag": torch.tensor([True, False], device=device),
        "host": normal(10),
        "complex": torch.complex(normal(3), normal(3)).to(device),
    }


def blank(tensors):
    return {
        name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).zero_()
        if t.dtype != torch.float8_e4m3fn
        else torch.zeros(t.shape, device=t.device).to(t.dtype)
        for name, t in tensors.items()
    }


def test_odd_tensors_survive_on_the_device(tmp_path):
    source = odd_tensors()
    target = blank(odd_tensors(1))
    before = {name: (id(t), t.data_ptr(), t.stride()) for name, t in target.items()}
    fw.save(source, tmp_path)
    report = fw.load(tmp_path, into=target)
    assert {n: raw(t) for n, t in target.items()} == {n: raw(t) for n, t in source.items()}
    assert {name: (id(t), t.data_ptr(), t.stride()) for name, t in target.items()} == before
    assert report.checked_bytes == report.nbytes


def test_what_the_gpu_saved_the_cpu_loads_and_the_other_way_round(tmp_path):
    on_device, on_host = odd_tensors(0, "cuda"), odd_tensors(1, "cpu")
    fw.save(on_device, tmp_path / "a")
    target = blank(on_host)
    fw.load(tmp_path / "a", into=target)
    assert {n: raw(t) for n, t in target.items()} == {n: raw(t) for n, t in on_device.items()}
    fw.save(on_host, tmp_path / "b")
    target = blank(on_device)
    fw.load(tmp_path / "b", into=target)
    assert {n: raw(t) for n, t in target.items()} == {n: raw(t) for n, t in on_host.items()}


def test_a_module_keeps_its_parameters_and_its_ties(tmp_path):
    def net(seed):
        torch.manual_seed(seed)
        module = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100)).cuda()
        module[1].weight = module[0].weight
        return module

    source, target = net(0), net(1)
    held = [id(p) for p in target.parameters()]
    fw.save(source, tmp_path)
    fw.load(tmp_path, into=target)
    assert [id(p) for p in target.parameters()] == held
    assert all(
        torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True)
    )
    with fw.open(tmp_path) as opened:
        assert opened.manifest.tied == {"1.weight": "0.weight"}


def test_staging_is_pinned_and_reused(tmp_path):
    source = {"w": torch.randn(32 << 20, device="cuda")}
    staging = adapt(source).staging
    addresses = []
    for _ in range(40):
        with staging.lend(4 << 20) as block:
            assert torch.from_numpy(block).is_pinned()
            assert block.ctypes.data % 4096 == 0
            addresses.append(block.ctypes.data)
    assert len(set(addresses)) < 20  # blocks that earlier loads left, round and round


def test_rounds_leave_no_device_memory_behind(tmp_path):
    source = {"w": torch.randn(16 << 20, device="cuda"), "b": torch.randn(1000, device="cuda")}
    target = {name: torch.zeros_like(t) for name, t in source.items()}
    fw.save(source, tmp_path)
    fw.load(tmp_path, into=target)
    torch.cuda.synchronize()
    gc.collect()  # tensors of earlier tests, which the rounds would free
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        fw.load(tmp_path, into=target)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(source["w"], target["w"])


def test_damage_is_seen_before_it_reaches_the_device(tmp_path):
    fw.save({"w": torch.randn(1000, device="cuda")}, tmp_path)
    part = tmp_path / "v0000000000" / "model.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    target = {"w": torch.zeros(1000, device="cuda")}
    with pytest.raises(ChecksumMismatch, match="not touched"):
        fw.load(tmp_path, into=target)
    assert not target["w"].any()


def test_work_queued_before_a_load_sees_the_old_weights(tmp_path):
    fw.save({"w": torch.full((1 << 20,), 5.0, device="cuda")}, tmp_path)
    weight = torch.ones(1 << 20, device="cuda")
    big = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        big = big @ big / 64  # keeps the device busy while the load is asked for
    seen = weight.clone()
    fw.load(tmp_path, into={"w": weight})
    assert bool((seen == 1).all())
    assert bool((weight == 5).all())


def test_a_save_waits_for_what_its_own_stream_still_computes(tmp_path):
    weight = torch.zeros(8 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(500_000_000)  # about a quarter of a second
        weight.fill_(7)
        fw.save({"w": weight}, tmp_path)
    target = {"w": torch.zeros(8 << 20)}
    fw.load(tmp_path, into=target)
    assert bool((target["w"] == 7).all())


def test_a_load_waits_for_what_its_own_stream_still_reads(tmp_path):
    fw.save({"w": torch.full((8 << 20,), 5.0)}, tmp_path)
    weight = torch.ones(8 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(500_000_000)
        seen = weight.clone()
        fw.load(tmp_path, into={"w": weight})
    torch.cuda.synchronize()
    assert bool((seen == 1).all())
    assert bool((weight == 5).all())


def test_freed_memory_is_refused():
    weight = torch.ones(1000, device="cuda")
    weight.untyped_storage().resize_(0)
    with pytest.raises(fw.FlyweightError, match="freed"):
        adapt({"w": weight})


def overlapping():
    """Targets of which filling one would change another, or itself."""
    memory = torch.zeros(20, device="cuda")
    square = torch.zeros(4, 6, device="cuda")
    return [
        ({"a": memory[:12], "b": memory[8:]}, "'a' and 'b' share some of their memory"),
        ({"b": square, "a": square[:, 2:4]}, "'b' and 'a' share some of their memory"),
        ({"w": torch.zeros(4, 1, device="cuda").expand(4, 3)}, "more than once by their strides"),
    ]


@pytest.mark.parametrize("number", range(3))
def test_tensors_of_the_device_that_overlap_are_refused_as_targets(number, tmp_path, address):
    target, told = overlapping()[number]
    fw.save({name: torch.ones(each.shape) for name, each in target.items()}, tmp_path / "run")
    with pytest.raises(SpecError, match=told):
        fw.load(tmp_path / "run", into=target)
    with pytest.raises(SpecError, match=told):
        fw.Replica(target, address)
    assert not any(bool(each.any()) for each in target.values())


def test_tensors_of_the_device_that_lie_side_by_side_or_are_tied_are_filled(tmp_path):
    memory, square = torch.zeros(20, device="cuda"), torch.zeros(4, 6, device="cuda")
    target = {
        "a": memory[:12],
        "b": memory[12:],
        "tied": memory[12:],
        "left": square[:, :3],
        "right": square[:, 3:],
        "host": torch.zeros(20),
    }
    fw.save({name: torch.ones(each.shape) for name, each in target.items()}, tmp_path)
    fw.load(tmp_path, into=target)
    assert all(bool((each == 1).all()) for each in (memory, square, target["host"]))


def test_numpy_dtypes_of_the_device_are_those_of_the_host():
    assert str(adapt({"w": torch.zeros(2, device="cuda")}).manifest.spec("w")) == "f32[2]"
    assert np.dtype("float32").itemsize == 4
