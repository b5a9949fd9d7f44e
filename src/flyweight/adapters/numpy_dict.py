"""Numpy arrays, also of the dtypes that ml_dtypes adds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyweight.adapters.tensor import Tensor
from flyweight.errors import SpecError
from flyweight.memory import Buffer
from flyweight.spec.dtype import BY_NUMPY
from flyweight.spec.manifest import TensorSpec


def tensor_of(leaf: object) -> Tensor | None:
    if not isinstance(leaf, np.ndarray):
        return None
    if isinstance(leaf, np.ma.MaskedArray):
        raise SpecError(
            "a masked array, whose mask has no place beside its values; pass .filled(value), or "
            ".data and np.ma.getmaskarray() as two tensors"
        )
    dtype = BY_NUMPY.get(leaf.dtype.name)
    if dtype is None or leaf.dtype.byteorder == ">":
        raise SpecError(f"numpy dtype {leaf.dtype!r} has no place in a snapshot")
    buffer = Buffer(
        leaf.__array_interface__["data"][0],
        leaf.shape,
        leaf.strides,
        leaf.dtype.itemsize,
        leaf,
        bool(leaf.flags.writeable),
    )
    return Tensor(TensorSpec(dtype, leaf.shape), buffer)


def empty(spec: TensorSpec, device: str) -> NDArray[Any]:
    """Return a new array with any content."""
    if device != "cpu":
        raise SpecError(f"device is {device!r}; numpy arrays are on the 'cpu'")
    try:
        return np.empty(spec.shape, spec.dtype.numpy or spec.dtype.torch)
    except TypeError as cause:
        raise SpecError(
            f"numpy has no dtype for {spec.dtype}; import ml_dtypes, which adds some"
        ) from cause
