"""Casts on the way: the bytes that arrive are those of torch's own casts."""

import pytest
import torch

from flyweight.errors import DTypeMismatch
from flyweight.live import Publisher, Replica
from live.one_process import TOKEN, taken

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def tensors(dtype, *, is_shared):
    torch.manual_seed(0)
    found = {
        "large": 3 * torch.randn(700, 500),
        "small": torch.tensor([1.0, -0.0, 65504.0, 3.3e38, float("inf"), float("nan"), 1e-40]),
        "strided": torch.randn(40, 30).T,
        "scalar": torch.tensor(0.1),
    }
    found = {name: each.to(dtype) for name, each in found.items()}
    found["steps"] = torch.arange(5)
    return {name: each.share_memory_() if is_shared else each for name, each in found.items()}


def same(found, wanted):
    """True if all bits are equal; a NaN is any NaN."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    is_nan = wanted.isnan() if wanted.is_floating_point() else torch.zeros_like(wanted, dtype=bool)
    equal = found.contiguous().view(bits) == wanted.contiguous().view(bits)
    return bool((equal | is_nan).all()) and bool((found.isnan() == is_nan).all())


@pytest.mark.parametrize("way", ["mapped", "filled", "read"])
@pytest.mark.parametrize("before", DTYPES)
@pytest.mark.parametrize("after", DTYPES)
def test_every_tensor_has_the_bits_of_the_cast(tmp_path, way, before, after):
    source = tensors(DTYPES[before], is_shared=way == "mapped")
    sink = {
        name: torch.zeros(each.shape, dtype=DTYPES[after] if name != "steps" else each.dtype)
        for name, each in source.items()
    }
    wanted = {name: each.to(sink[name].dtype) for name, each in source.items()}
    overflows = sum(
        int((wanted[name].isinf() & source[name].isfinite()).sum())
        for name in source
        if name != "steps"
    )
    address = "tcp://127.0.0.1:0" if way == "read" else f"unix:{tmp_path}/policy"
    transport = "read" if way == "read" else "auto"
    with (
        Publisher(source, address, token=TOKEN) as publisher,
        Replica(
            sink, publisher.address, token=TOKEN, name="engine", transport=transport, cast=True
        ) as replica,
    ):
        for version in (1, 2):
            _, (report,) = taken(publisher, version, replica)
            assert (report.transport, report.verified) == (way, "live")
            assert report.overflows == overflows
            assert all(same(sink[name], wanted[name]) for name in wanted)


def test_without_cast_another_dtype_is_refused_and_the_trainer_reads_why(tmp_path):
    source, sink = {"w": torch.zeros(3)}, {"w": torch.zeros(3, dtype=torch.bfloat16)}
    with Publisher(source, f"unix:{tmp_path}/policy") as publisher:
        with pytest.raises(DTypeMismatch) as refused:
            Replica(sink, publisher.address, name="engine")
        (failed,) = publisher.publish(1).failed
    assert "cast=True" in str(refused.value)
    assert failed.name == "engine"
    assert failed.error.startswith("DTypeMismatch")


def test_only_these_three_dtypes_are_cast(tmp_path):
    source, sink = {"w": torch.zeros(3)}, {"w": torch.zeros(3, dtype=torch.float64)}
    with (
        Publisher(source, f"unix:{tmp_path}/policy") as publisher,
        pytest.raises(DTypeMismatch, match="f64"),
    ):
        Replica(sink, publisher.address, name="engine", cast=True)
