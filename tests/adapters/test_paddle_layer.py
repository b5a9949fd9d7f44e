import paddle
import pytest
from paddle import distributed as dist

import flyweight as fw
from flyweight.adapters import paddle_layer
from flyweight.adapters.memory_release import ModelMemory
from flyweight.adapters.model import adapt
from flyweight.errors import SpecError


class Net(paddle.nn.Layer):
    def __init__(self, seed=0):
        super().__init__()
        paddle.seed(seed)
        self.embed = paddle.nn.Embedding(11, 4)
        self.norm = paddle.nn.BatchNorm1D(4)
        self.tied = self.embed.weight
        self.register_buffer("steps", paddle.arange(6) + seed)
        self.register_buffer("cache", paddle.randn([2]), persistable=False)


def content(layer):
    model = adapt(layer)
    return {name: model.read(name).tobytes() for name in model.manifest.names}


def test_a_layer_survives_and_keeps_its_own_tensors(tmp_path):
    source, target = Net(0), Net(1)
    before = {name: (id(p), p.data_ptr()) for name, p in target.named_parameters()}
    cache = target.cache.numpy().copy()
    assert content(source) != content(target)
    fw.save(source, tmp_path, version=1)
    fw.load(tmp_path, into=target)
    assert content(target) == content(source)
    assert {name: (id(p), p.data_ptr()) for name, p in target.named_parameters()} == before
    assert (target.embed.weight.numpy() == source.embed.weight.numpy()).all()
    assert (target.cache.numpy() == cache).all()
    assert target.tied is target.embed.weight


def test_tied_layers_are_stored_once(tmp_path):
    fw.save(Net(), tmp_path)
    with fw.open(tmp_path) as source:
        assert set(source.manifest.tied.values()) <= {"embed.weight", "tied"}
        assert len(source.manifest.tied) == 1


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64",
     "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"],
)  # fmt: skip
def test_every_dtype_survives(tmp_path, dtype):
    source = {"w": (paddle.randn([5, 3]) * 9).astype(dtype)}
    target = {"w": paddle.zeros([5, 3]).astype(dtype)}
    fw.save(source, tmp_path)
    fw.load(tmp_path, into=target)
    assert content(target) == content(source)


def test_strided_views_survive_and_their_neighbours_are_not_touched(tmp_path):
    source = paddle.randn([6, 4])
    fw.save({"w": source.t().contiguous().t()}, tmp_path)
    base = paddle.zeros([6, 8])
    view = base[:, ::2]
    fw.load(tmp_path, into={"w": view})
    assert (view.numpy() == source.numpy()).all()
    assert (base[:, 1::2].numpy() == 0).all()


def test_paddle_and_torch_trade_weights(tmp_path):
    import torch

    source = {"w": paddle.randn([4, 5]).astype("bfloat16")}
    target = {"w": torch.zeros(4, 5, dtype=torch.bfloat16)}
    fw.save(source, tmp_path)
    fw.load(tmp_path, into=target)
    assert content(target) == content(source)


def test_a_parameter_whose_memory_was_given_back_is_refused():
    layer = paddle.nn.Linear(2, 2)
    layer.weight._clear_data()
    with pytest.raises(SpecError, match="paddle tensor has no memory"):
        adapt(layer)


def dist_tensor(*shape, rank=0):
    mesh = dist.ProcessMesh([rank], dim_names=["x"])
    return dist.shard_tensor(paddle.ones(shape), mesh, [dist.Shard(0)])


def test_a_dist_tensor_whose_memory_was_given_back_is_refused_by_name(tmp_path, address):
    state = {"a": paddle.ones([2]), "b": dist_tensor(4, 4)}
    fw.save(state, tmp_path / "run", version=1)
    state["b"]._clear_data()
    refusal = r"dist tensor has no memory for its 16 elements; initialise(.|\n)*tensor 'b'"
    with pytest.raises(SpecError, match=refusal):
        fw.save(state, tmp_path / "run", version=2)
    with pytest.raises(SpecError, match=refusal):
        fw.load(tmp_path / "run", into=state, extra="report")
    with pytest.raises(SpecError, match=refusal):
        fw.Publisher(state, address)
    assert fw.versions(tmp_path / "run") == [1]


def test_dist_tensors_that_have_nothing_here_are_left_to_others():
    state = {"a": paddle.ones([2]), "empty": dist_tensor(0, 4), "elsewhere": dist_tensor(4, rank=1)}
    assert not state["empty"]._is_initialized()
    assert not state["elsewhere"]._is_initialized()
    assert adapt(state).manifest.names == ["a"]


@pytest.mark.parametrize("is_cleared", [True, False])
def test_memory_is_held_while_it_is_pointed_to(is_cleared):
    parameter = paddle.full([64, 64], 3.0)
    tensor = paddle_layer.tensor_of(parameter)
    if is_cleared:
        parameter._clear_data()
    else:
        paddle.zeros([64, 64])._share_buffer_to(parameter)
    others = [paddle.zeros([64, 64]) for _ in range(20)]
    assert all(other.data_ptr() != tensor.buffer.address for other in others)
    assert (tensor.buffer.items().view("<f4") == 3).all()


# On a GPU. Paddle says where a tensor is; the rest of it is real, in host memory.


class Place:
    def __init__(self, kind, number=0):
        self._kind, self._number = kind, number

    def __str__(self):
        return f"Place({self._kind}:{self._number})"

    def is_gpu_place(self):
        return self._kind == "gpu"

    def is_cpu_place(self):
        return self._kind == "cpu"

    def is_cuda_pinned_place(self):
        return self._kind == "gpu_pinned"

    def gpu_device_id(self):
        return self._number


@pytest.fixture
def be_at(monkeypatch):
    def at(kind, number=0):
        monkeypatch.setattr(paddle.Tensor, "place", property(lambda tensor: Place(kind, number)))

    return at


def test_a_tensor_on_a_gpu_is_taken_by_its_device_address_and_strides(be_at):
    """C11, C28: from there on torch's and Paddle's tensors go the same way."""
    rows = paddle.arange(12, dtype="float32").reshape([3, 4])
    turned = rows.astype("bfloat16").t()
    be_at("gpu", 3)
    for tensor, strides in ((rows, (16, 4)), (turned, (2, 8)), (paddle.zeros([]), ())):
        found = paddle_layer.tensor_of(tensor)
        assert (found.device.name, found.buffer.device) == ("cuda:3", 3)
        assert (found.buffer.address, found.buffer.strides) == (tensor.data_ptr(), strides)
        assert found.buffer.shape == found.spec.shape == tuple(tensor.shape)
        assert found.memory_key[0] == "cuda:3"
    tied = adapt({"a": rows, "b": rows, "c": turned}).manifest
    assert (list(tied.tensors), tied.tied) == (["a", "c"], {"b": "a"})
    be_at("gpu_pinned")
    pinned = paddle_layer.tensor_of(rows)
    assert (pinned.device, pinned.memory.address) == (None, rows.data_ptr())
    be_at("xpu")
    with pytest.raises(SpecError, match=r"paddle tensor on Place\(xpu:0\); tensors in host memory"):
        adapt({"a": rows})


def test_a_clear_frees_tensors_on_a_gpu_and_a_restore_gives_them_memory(be_at):
    """C15: the tensors, their shapes and what they share stay; views of others are left alone."""
    be_at("gpu")
    layer = Net()
    whole = paddle.arange(8)
    other = paddle.zeros([11, 4])
    layer.embed.weight._share_buffer_to(other)
    model = {"net": layer, "again": other, "whole": whole, "part": whole[2:4]}
    before = {name: (id(t), tuple(t.shape), t.dtype) for name, t in layer.state_dict().items()}
    memory = ModelMemory(model)
    nbytes = sum(t.size * t.element_size() for t in layer.state_dict().values())
    nbytes -= layer.tied.size * layer.tied.element_size()  # which is the embedding
    assert memory.release() == nbytes
    assert memory.release() == 0
    tensors = [*layer.state_dict().values(), other]
    assert not any(tensor._is_initialized() for tensor in tensors)
    assert (whole.tolist(), model["part"].tolist()) == ([*range(8)], [2, 3])
    memory.restore()
    memory.restore()
    assert all(tensor._is_initialized() for tensor in tensors)
    assert {
        name: (id(t), tuple(t.shape), t.dtype) for name, t in layer.state_dict().items()
    } == before
    assert other.data_ptr() == layer.embed.weight.data_ptr()  # shared as before
    layer.embed.weight.copy_(paddle.ones([11, 4]), True)
    assert (other == 1).all()
    assert memory.release() == nbytes


def test_nothing_keeps_the_memory_of_a_tensor_on_a_gpu_that_is_cleared(be_at):
    """C15: to free it is the point; whoever wanted it looks again before it writes."""
    be_at("gpu")
    tensor = paddle.ones([4])
    found = paddle_layer.tensor_of(tensor)
    memory = paddle_layer.memory_of(tensor)
    assert found.buffer.owner is tensor
    tensor._clear_data()
    assert memory._is_initialized()
    assert not found.buffer.owner._is_initialized()
