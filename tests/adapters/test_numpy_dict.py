import ml_dtypes
import numpy as np
import pytest

import flyweight as fw
from conftest import odd_arrays, same, zeros_like
from flyweight.adapters.model import adapt
from flyweight.errors import SpecError


def test_odd_arrays_survive(tmp_path):
    arrays = odd_arrays()
    fw.save(arrays, tmp_path)
    target = zeros_like(arrays)
    fw.load(tmp_path, into=target)
    assert same(target, arrays)


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"]
)
def test_arrays_of_ml_dtypes_survive(tmp_path, name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    source = {"w": np.arange(12, dtype=np.uint8).view(dtype)}
    target = {"w": np.zeros(12 // dtype.itemsize, dtype)}
    fw.save(source, tmp_path)
    fw.load(tmp_path, into=target)
    assert target["w"].tobytes() == source["w"].tobytes()


def test_nested_dicts_lists_and_leaves_survive(tmp_path):
    def state(value):
        return {
            "model": {
                "w": np.full(3, value),
                "layers": [{"b": np.full(2, value)}, np.full(1, value)],
            },
            "step": int(value),
            "rate": value / 8,
            "name": f"run {value}",
            "done": value > 1,
            "none": None,
            "scale": np.float32(value),
        }

    fw.save(state(3.0), tmp_path)
    target = state(1.0)
    weights = target["model"]["w"]
    fw.load(tmp_path, into=target)
    assert target["model"]["w"] is weights
    assert weights.tolist() == [3.0] * 3
    assert target["model"]["layers"][0]["b"].tolist() == [3.0] * 2
    assert (target["step"], target["rate"], target["name"]) == (3, 0.375, "run 3.0")
    assert target["done"] is True
    assert target["none"] is None
    assert target["scale"] == 3.0


@pytest.mark.parametrize("mask", [[True, False, False], False, np.ma.nomask])
def test_a_masked_array_is_refused_by_save_publish_and_load(tmp_path, address, mask):
    """Its mask would be lost, and the values beneath it would be taken for weights."""
    masked = np.ma.array([1.0, 2.0, 3.0], mask=mask)
    fw.save({"w": np.zeros(3)}, tmp_path / "run")
    for act in (
        lambda: fw.save({"w": masked}, tmp_path / "out"),
        lambda: fw.save({"w": fw.Sharded(masked, (3,), (0,))}, tmp_path / "out"),
        lambda: fw.save_legacy({"w": masked}, tmp_path / "out", rank=0, legacy_id=0),
        lambda: fw.Publisher({"w": masked}, address),
        lambda: fw.load(tmp_path / "run", into={"w": masked}),
    ):
        with pytest.raises(SpecError, match=r"masked array.*\.filled\(value\)") as refusal:
            act()
        assert "tensor 'w'" in str(refusal.value)
    assert not (tmp_path / "out").exists()
    assert masked.data.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, [("a", "f4"), ("b", "f4")]),
        np.rec.array([(1.0, 2)], dtype=[("a", "f4"), ("b", "i4")]),
    ],
)
def test_an_array_of_records_is_refused(tmp_path, array):
    with pytest.raises(SpecError, match="has no place in a snapshot"):
        fw.save({"w": array}, tmp_path / "out")


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_a_matrix_and_a_mapped_file_are_plain_arrays(tmp_path):
    mapped = np.memmap(tmp_path / "file", np.float32, "w+", shape=(2, 3))
    mapped[:] = np.arange(6).reshape(2, 3)
    fw.save({"matrix": np.matrix([[1.0, 2.0]]), "mapped": mapped}, tmp_path / "run")
    target = {"matrix": np.zeros((1, 2)), "mapped": np.zeros((2, 3), np.float32)}
    fw.load(tmp_path / "run", into=target)
    assert target["matrix"].tolist() == [[1.0, 2.0]]
    assert target["mapped"].tobytes() == mapped.tobytes()


CYCLE = {"b": np.zeros(1)}
CYCLE["a"] = CYCLE


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        ({}, "dict holds no tensors"),
        ({"step": 3}, "dict holds no tensors .1 other leaves"),
        ([], "list holds no tensors"),
        ({"a": {"b": np.zeros(1)}, "a.b": np.zeros(1)}, "two leaves are called 'a.b'"),
        ({"a": object(), "b": np.zeros(1)}, "'a' is a builtins.object"),
        ({"a": {1, 2}, "b": np.zeros(1)}, "'a' is a builtins.set"),
        ({(1, 2): np.zeros(1)}, "is a tuple, not text"),
        ({"a": np.array([object()])}, "numpy dtype"),
        ({"a": np.array(["text"])}, "numpy dtype"),
        ({"a": np.zeros(2, ">f4")}, "numpy dtype"),
        ({"": np.zeros(2)}, "names are printable and not empty"),
        ({"a\n": np.zeros(2)}, "names are printable and not empty"),
        ({"a" * 5000: np.zeros(2)}, "at most 4096 characters"),
        ({"a": "\ud800", "b": np.zeros(2)}, "text that UTF-8 cannot hold"),
        ({"a": 10**5000, "b": np.zeros(2)}, "number of 16610 bits"),
        (CYCLE, "nests more than 64 deep, or holds itself"),
        (np.zeros(3), "ndarray is no model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_model_is_refused(thing, message):
    with pytest.raises(SpecError, match=message):
        adapt(thing)


def test_c13_an_empty_dict_is_a_value_error():
    with pytest.raises(ValueError, match="holds no tensors"):
        adapt({})


def test_read_only_arrays_are_no_targets(tmp_path):
    fw.save({"w": np.zeros(3)}, tmp_path)
    frozen = np.ones(3)
    frozen.flags.writeable = False
    with pytest.raises(SpecError, match="1 tensors are read-only memory: 'w'"):
        fw.load(tmp_path, into={"w": frozen})
    assert frozen.tolist() == [1, 1, 1]


def test_values_in_a_tuple_come_back_in_a_new_tuple(tmp_path):
    """C37: an optimizer's betas."""
    fw.save({"w": np.zeros(3), "betas": (0.9, 0.99), "deep": [(1, (2, 3))]}, tmp_path)
    target = {"w": np.ones(3), "betas": (0.0, 0.0), "deep": [(0, (0, 0))]}
    fw.load(tmp_path, into=target)
    assert target["betas"] == (0.9, 0.99)
    assert target["deep"] == [(1, (2, 3))]
    target = {"w": np.ones(3), "betas": [0.0, 0.0], "deep": [[0, [0, 0]]]}
    fw.load(tmp_path, into=target)
    assert target["betas"] == [0.9, 0.99]
    assert target["deep"] == [[1, [2, 3]]]


def test_values_in_a_tuple_that_hangs_nowhere_are_no_target(tmp_path):
    fw.save((np.zeros(3), 0.9), tmp_path)
    with pytest.raises(SpecError, match="cannot be changed, such as tuples: '1'"):
        fw.load(tmp_path, into=(np.ones(3), 0.0))


def test_empty_arrays_of_absurd_shape_survive(tmp_path):
    import torch

    source = {"e": torch.empty(0, 2**60, 2, dtype=torch.float64), "w": torch.ones(2)}
    fw.save(source, tmp_path)
    fw.load(tmp_path, into=source)
    with fw.open(tmp_path) as opened:
        assert len(opened.read("e")) == 0


def test_one_memory_told_as_parts_of_two_tensors_is_no_tie(tmp_path):
    from flyweight.adapters.model import adapt

    memory = np.arange(4.0)
    model = {
        "a": fw.Sharded(memory, shape=(8,), offset=(0,)),
        "b": fw.Sharded(memory, shape=(16,), offset=(0,)),
    }
    assert adapt(model).manifest.tied == {}
    assert adapt(model).manifest.tensors["b"].shape == (16,)
