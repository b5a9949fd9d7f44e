"""Loader: an engine's own function that takes named tensors, as vLLM's and SGLang's do."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from flyweight import cuda
from flyweight.adapters import numpy_dict, torch_module
from flyweight.errors import MissingDependency, SpecError
from flyweight.memory import Buffer
from flyweight.spec.box import Box
from flyweight.spec.dtype import DTYPES
from flyweight.spec.manifest import TensorSpec

Framework = Literal["torch", "numpy"]
Load = Callable[[Iterator[tuple[str, Any]]], object]


class Loader:
    """Makes tensors of a framework, and hands them to a function one by one."""

    def __init__(self, load: Load, framework: Framework, device: str) -> None:
        self.load, self._framework, self._device = load, framework, device
        if framework not in ("torch", "numpy"):
            raise SpecError(f"framework is {framework!r}, not 'torch' or 'numpy'")
        if framework == "numpy" and device != "cpu":
            raise SpecError(f"device is {device!r}; numpy arrays are on the 'cpu'")
        _, buffer = self.fresh(TensorSpec(DTYPES["u8"], (1,)))
        self.place = "" if buffer.device is None else cuda.uuid(buffer.device)

    def fresh(self, spec: TensorSpec) -> tuple[Any, Buffer]:
        """Return a new tensor, and its memory to be filled."""
        tensor = self._torch(spec) if self._framework == "torch" else self._numpy(spec)
        found = (
            torch_module.tensor_of(tensor)
            if self._framework == "torch"
            else numpy_dict.tensor_of(tensor)
        )
        assert found is not None
        found.settle()  # memory that torch gives again may still be read on its stream
        if found.buffer is None:
            raise SpecError(f"device {self._device!r} cannot be written in place")
        return tensor, found.buffer

    def _torch(self, spec: TensorSpec) -> Any:
        try:
            torch = importlib.import_module("torch")
        except ImportError as cause:
            raise MissingDependency("tensors of torch need it; pip install torch") from cause
        dtype = getattr(torch, spec.dtype.torch or "", None)
        if dtype is None:
            raise SpecError(f"torch has no dtype for {spec.dtype}")
        items = spec.stored(Box.whole(spec.shape))  # torch counts packed bytes, we count elements
        return torch.empty(items.shape, dtype=dtype, device=self._device)

    def _numpy(self, spec: TensorSpec) -> Any:
        try:
            return np.empty(spec.shape, spec.dtype.numpy or spec.dtype.torch)
        except TypeError as cause:
            raise SpecError(
                f"numpy has no dtype for {spec.dtype}; import ml_dtypes, which adds some"
            ) from cause
