import numpy as np
import pytest
import torch
from torch import nn

import flyweight as fw
from flyweight.adapters import torch_module
from flyweight.adapters.model import adapt
from flyweight.errors import PlanError, SpecError
from flyweight.spec.box import Box
from flyweight.spec.dtype import BY_TORCH


class Net(nn.Module):
    """Tied, frozen, buffered, scalar, empty, strided: what real modules have."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0 + seed))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.columns = nn.Parameter(torch.randn(3, 5).t())
        self.register_buffer("steps", torch.arange(6).reshape(2, 3)[:, ::2] + seed)
        self.register_buffer("cache", torch.randn(2), persistent=False)


def state_bytes(module):
    return {n: t.detach().contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else
            t.detach().reshape(1).view(torch.uint8).numpy().tobytes()
            for n, t in module.state_dict().items()}  # fmt: skip


def test_a_module_survives_and_keeps_its_own_tensors(tmp_path):
    source, target = Net(0), Net(1)
    before = {name: (id(p), p.data_ptr(), p.stride()) for name, p in target.named_parameters()}
    cache = target.cache.clone()
    fw.save(source, tmp_path, version=1)
    fw.load(tmp_path, into=target)
    assert state_bytes(target) == state_bytes(source)
    after = {name: (id(p), p.data_ptr(), p.stride()) for name, p in target.named_parameters()}
    assert after == before
    assert torch.equal(target.cache, cache)
    assert target.head.weight is target.embed.weight


def test_an_optimizer_still_steps_the_loaded_parameters(tmp_path):
    source, target = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(target.parameters(), lr=1.0)
    fw.save(source, tmp_path)
    fw.load(tmp_path, into=target)
    target(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(target.bias, source.bias - 1)


def test_tied_weights_are_stored_once(tmp_path):
    fw.save(Net(), tmp_path)
    with fw.open(tmp_path) as source:
        assert source.manifest.tied == {"head.weight": "embed.weight"}
        assert source.read("head.weight").tobytes() == source.read("embed.weight").tobytes()


def test_a_tie_at_rest_fills_an_untied_model(tmp_path):
    fw.save(Net(), tmp_path)
    target = Net(1)
    target.head.weight = nn.Parameter(torch.zeros(11, 4))
    fw.load(tmp_path, into=target)
    assert torch.equal(target.head.weight, Net().embed.weight)
    assert target.head.weight is not target.embed.weight


def test_a_tied_model_takes_equal_copies_and_refuses_different_ones(tmp_path):
    untied = Net()
    untied.head.weight = nn.Parameter(untied.embed.weight.detach().clone())
    fw.save(untied, tmp_path / "equal")
    target = Net(1)
    fw.load(tmp_path / "equal", into=target)
    assert torch.equal(target.head.weight, untied.embed.weight)
    with torch.no_grad():
        untied.head.weight[0, 0] += 1
    fw.save(untied, tmp_path / "different")
    with pytest.raises(PlanError, match="are one tensor in the target and differ"):
        fw.load(tmp_path / "different", into=target)
    fw.convert(tmp_path / "different", tmp_path / "hf", to="hf")
    with pytest.raises(PlanError, match="are one tensor in the target and differ"):
        fw.load(tmp_path / "hf", into=target)


def test_one_name_of_a_tied_pair_is_enough(tmp_path):
    source = Net().state_dict()
    del source["embed.weight"]
    fw.save(dict(source), tmp_path)
    target = Net(1)
    fw.load(tmp_path, into=target)
    assert torch.equal(target.embed.weight, Net().embed.weight)


@pytest.mark.parametrize("name", sorted(BY_TORCH))
def test_every_dtype_survives_bit_for_bit(tmp_path, name):
    dtype = getattr(torch, name)
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (6, 32), dtype=np.uint8))
    source, target = data.view(dtype), torch.zeros_like(data).view(dtype)
    fw.save({"w": source}, tmp_path)
    fw.load(tmp_path, into={"w": target})
    assert torch.equal(target.view(torch.uint8), data)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[::2],
        lambda t: t.t(),
        lambda t: t[:, 1:3],
        lambda t: t.unsqueeze(1).transpose(0, 2),
        lambda t: t[3:4, 2:3].squeeze(),
        lambda t: t.as_strided((2, 2), (3, 5), 1),
    ],
)
def test_strided_tensors_survive_and_their_neighbours_are_not_touched(tmp_path, view):
    source = torch.randn(6, 4)
    fw.save({"w": view(source)}, tmp_path)
    base = torch.full((6, 4), 7.0)
    fw.load(tmp_path, into={"w": view(base)})
    assert torch.equal(view(base), view(source))
    expected = torch.full((6, 4), 7.0)
    view(expected).copy_(view(source))
    assert torch.equal(base, expected)


def test_autograd_notices_a_load_under_its_feet(tmp_path):
    weight = torch.ones(3, requires_grad=True)
    fw.save({"w": torch.full((3,), 2.0)}, tmp_path)
    loss = (weight * weight).sum()
    fw.load(tmp_path, into={"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, device="meta"), "meta device has no memory"),
        (torch.zeros(2, 2).to_sparse(), "layout torch.sparse_coo"),
        (torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "torch.qint8"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch.zeros(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
    ],
    ids=["meta", "sparse", "quantised", "conjugated", "negated"],
)
def test_tensors_without_plain_memory_are_refused_by_name(tensor, message):
    with pytest.raises(SpecError, match=message) as refusal:
        adapt({"layer": {"weight": tensor}})
    assert "tensor 'layer.weight'" in str(refusal.value)


def test_one_element_shown_many_times_is_no_target(tmp_path):
    fw.save({"w": torch.zeros(1).expand(4)}, tmp_path)
    with pytest.raises(SpecError, match="more than once by their strides: 'w'"):
        fw.load(tmp_path, into={"w": torch.zeros(1).expand(4)})


@pytest.mark.parametrize("kind", ["freed", "lazy", "nested", "none"])
def test_what_has_no_memory_of_its_own_is_refused(kind):
    if kind == "freed":
        thing = torch.ones(1000)
        thing.untyped_storage().resize_(0)
        thing, message = {"w": thing}, "memory was freed"
    elif kind == "lazy":
        thing, message = nn.LazyLinear(3), "lazy parameter has no shape"
    elif kind == "nested":
        pieces = [torch.ones(2), torch.ones(3)]
        thing, message = {"w": torch.nested.nested_tensor(pieces)}, "nested tensor"
    else:
        thing, message = None, "NoneType is no model"
    with pytest.raises(SpecError, match=message):
        adapt(thing)


def test_a_hooks_copies_are_refused_since_filling_them_fills_nothing():
    module = nn.Linear(2, 2)

    def clone(module, state, prefix, metadata):
        for name in state:
            state[name] = state[name].clone()

    module._register_state_dict_hook(clone)
    with pytest.raises(SpecError, match="2 entries of the module's state are not its own tensors"):
        adapt(module)


def test_tensors_that_share_some_memory_are_no_target(tmp_path):
    base = torch.zeros(4, 4)
    fw.save({"a": torch.ones(4, 4), "b": torch.zeros(4, 4)}, tmp_path / "ab")
    with pytest.raises(SpecError, match="'a' and 'b' share some of their memory"):
        fw.load(tmp_path / "ab", into={"a": base, "b": base.t()})
    fw.save({"x": torch.arange(8.0).reshape(4, 2)}, tmp_path / "x")
    with pytest.raises(SpecError, match="more than once by their strides"):
        fw.load(tmp_path / "x", into={"x": torch.zeros(5).as_strided((4, 2), (1, 1))})
    assert not base.any()


def test_interleaved_tensors_that_share_no_element_are_a_target(tmp_path):
    base = torch.zeros(4, 6)
    source = {"even": torch.ones(4, 3), "odd": torch.full((4, 3), 2.0)}
    fw.save(source, tmp_path)
    fw.load(tmp_path, into={"even": base[:, ::2], "odd": base[:, 1::2]})
    assert torch.equal(base[:, ::2], source["even"])
    assert torch.equal(base[:, 1::2], source["odd"])


def test_every_name_of_a_tied_pair_must_fit(tmp_path):
    fw.save({"a": torch.zeros(2, 3), "b": torch.zeros(3, 2)}, tmp_path)
    shared = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"'b' is \(3, 2\) in .* and \(2, 3\) in the target"):
        fw.load(tmp_path, into={"a": shared, "b": shared})


def test_a_tie_at_rest_fills_an_untied_large_model_unchecked(tmp_path):
    shared = torch.randn(3 << 20)
    fw.save({"a": shared, "b": shared}, tmp_path)
    target = {"a": torch.zeros(3 << 20), "b": torch.zeros(3 << 20)}
    fw.load(tmp_path, into=target, should_verify=False)
    assert torch.equal(target["a"], shared)
    assert torch.equal(target["b"], shared)


def test_extra_state_is_refused_rather_than_dropped():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"scale": 1}

        def set_extra_state(self, state):
            pass

    with pytest.raises(SpecError, match="1 extra states"):
        adapt(Extra(2, 2))


def test_modules_may_hang_in_dicts(tmp_path):
    fw.save({"actor": nn.Linear(2, 2), "critic": [nn.Linear(2, 1)], "step": 7}, tmp_path)
    with fw.open(tmp_path) as source:
        names = ["actor.bias", "actor.weight", "critic.0.bias", "critic.0.weight"]
        assert sorted(source.manifest.names) == names
        assert source.manifest.values == {"step": 7}


def test_an_optimizers_state_dict_survives_in_place(tmp_path):
    def trained(steps):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(3)
    state = {"model": model, "moments": optimizer.state_dict()["state"], "step": 3}
    fw.save(state, tmp_path)
    other, other_optimizer = trained(1)
    target = {"model": other, "moments": other_optimizer.state_dict()["state"], "step": 1}
    fw.load(tmp_path, into=target)
    assert target["step"] == 3
    ours = other_optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(ours, optimizer.state_dict()["state"][0]["exp_avg"])


def test_memory_is_held_while_it_is_pointed_to():
    parameter = torch.nn.Parameter(torch.full((64, 64), 3.0), requires_grad=False)
    tensor = torch_module.tensor_of(parameter)
    parameter.data = torch.zeros(64, 64)
    others = [torch.zeros(64, 64) for _ in range(20)]
    assert all(other.data_ptr() != tensor.buffer.address for other in others)
    assert (tensor.buffer.items().view("<f4") == 3).all()


TENSORS = {
    "rows": lambda: torch.arange(60, dtype=torch.float32).reshape(6, 10),
    "turned": lambda: torch.arange(60).reshape(6, 10).t(),
    "part": lambda: torch.arange(600, dtype=torch.int16).reshape(20, 30)[3:, 1::3],
    "half": lambda: torch.randn(5, 4, 3).bfloat16(),
    "scalar": lambda: torch.arange(3.0)[1],
    "empty": lambda: torch.zeros(0, 4),
}


@pytest.mark.parametrize("name", TENSORS)
def test_any_block_is_copied_to_and_from_a_device(name):
    """A device's copies use the tensor's own storage; here that of the CPU stands for it."""
    tensor, target = TENSORS[name](), torch.zeros_like(TENSORS[name]())
    device = torch_module.TorchDevice(tensor.device)
    source, sink = (torch_module.tensor_of(each).memory for each in (tensor, target))
    boxes = [Box.whole(tuple(tensor.shape))]
    boxes += [
        Box((1, *box.offset[1:]), (2, *box.shape[1:])) for box in boxes if box.num_elements > 1
    ]
    boxes += [
        Box((*box.offset[:-1], 1), (*box.shape[:-1], 2)) for box in boxes if box.num_elements > 1
    ]
    for box in boxes:
        block = tensor[(Ellipsis, *box.slices)]
        data = np.empty(block.numel() * tensor.element_size(), np.uint8)
        device.read(source.block(box), data, should_wait=True)
        assert data.tobytes() == block.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        target.zero_()
        device.write(sink.block(box), data)
        expected = torch.zeros_like(target)
        expected[(Ellipsis, *box.slices)] = block
        assert torch.equal(target, expected)
