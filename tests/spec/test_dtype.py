import numpy as np
import paddle
import pytest
import torch

from flyweight.errors import SpecError
from flyweight.spec.dtype import BY_NUMPY, BY_PADDLE, BY_SAFETENSORS, BY_TORCH, DTYPES, dtype_named


@pytest.mark.parametrize("name", sorted(BY_TORCH))
def test_torch_has_this_dtype_of_this_width(name):
    width = getattr(torch, name).itemsize
    assert BY_TORCH[name].bits * (2 if name.endswith("_x2") else 1) == 8 * width


@pytest.mark.parametrize("name", sorted(BY_PADDLE))
def test_paddle_has_this_dtype_of_this_width(name):
    if name in ("uint16", "uint32", "uint64"):  # paddle 3.3 makes no such tensors
        assert BY_PADDLE[name].numpy == name
        return
    tensor = paddle.zeros([1]).astype(name)
    assert tensor.element_size() * 8 == BY_PADDLE[name].bits


@pytest.mark.parametrize("name", sorted(n for n, d in BY_NUMPY.items() if d.numpy == n))
def test_numpy_has_this_dtype_of_this_width(name):
    assert np.dtype(name).itemsize * 8 == BY_NUMPY[name].bits


def test_every_dtype_that_safetensors_writes_is_known():
    import safetensors.torch

    tensors = {
        name: torch.zeros(2, 4).to(getattr(torch, name))
        for name in BY_TORCH
        if not name.endswith(("complex128", "_x2", "e8m0fnu"))
    }
    head = safetensors.torch.save(tensors)
    import json

    length = int.from_bytes(head[:8], "little")
    entries = json.loads(head[8 : 8 + length])
    for name, entry in entries.items():
        if name != "__metadata__":
            assert BY_SAFETENSORS[entry["dtype"]] is BY_TORCH[name]


def test_an_unknown_dtype_lists_the_known_ones():
    with pytest.raises(SpecError, match=r"dtype 'f128' is not one of bool, u8"):
        dtype_named("f128")


def test_elements_that_do_not_fill_bytes_are_refused():
    assert DTYPES["i4"].nbytes(4) == 2
    with pytest.raises(SpecError, match="3 elements of i4 do not fill whole bytes"):
        DTYPES["i4"].nbytes(3)
