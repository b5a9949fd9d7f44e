"""An engine's own function that loads named tensors: vLLM's, SGLang's, FastDeploy's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from flyweight.adapters import numpy_dict, paddle_layer, torch_module
from flyweight.adapters.model import Tensor
from flyweight.cuda import driver
from flyweight.errors import MissingDependency, SpecError
from flyweight.memory import Buffer
from flyweight.spec.box import Box
from flyweight.spec.dtype import DTYPES
from flyweight.spec.manifest import TensorSpec

Framework = Literal["torch", "paddle", "numpy"]
Load = Callable[[Iterator[tuple[str, Any]]], object]


class Loader:
    """Makes tensors of a framework, and passes them to a function one by one."""

    def __init__(self, load: Load, framework: Framework, device: str) -> None:
        self.load, self._device = load, device
        kinds: dict[str, tuple[Callable[[TensorSpec], Any], Callable[[object], Tensor | None]]] = {
            "torch": (self._torch, torch_module.tensor_of),
            "paddle": (self._paddle, paddle_layer.tensor_of),
            "numpy": (self._numpy, numpy_dict.tensor_of),
        }
        if framework not in kinds:
            raise SpecError(f"framework is {framework!r}, not 'torch', 'paddle' or 'numpy'")
        self._make, self._tensor_of = kinds[framework]
        if framework == "numpy" and device != "cpu":
            raise SpecError(f"device is {device!r}; numpy arrays are on the 'cpu'")
        _, buffer = self.fresh(TensorSpec(DTYPES["u8"], (1,)))
        self.place = "" if buffer.device is None else driver.uuid(buffer.device)

    def fresh(self, spec: TensorSpec) -> tuple[Any, Buffer]:
        """Return a new tensor, and its memory, to be filled."""
        tensor = self._make(spec)
        found = self._tensor_of(tensor)
        assert found is not None
        found.settle()  # reused memory may still be read on the framework's stream
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

    def _paddle(self, spec: TensorSpec) -> Any:
        try:
            paddle = importlib.import_module("paddle")
        except ImportError as cause:
            raise MissingDependency(
                "tensors of paddle need it; pip install paddlepaddle"
            ) from cause
        if spec.dtype.paddle is None:
            raise SpecError(f"paddle has no dtype for {spec.dtype}")
        tensor = paddle.empty(list(spec.shape), spec.dtype.paddle)
        return tensor if paddle.get_device() == self._device else tensor.to(self._device)

    def _numpy(self, spec: TensorSpec) -> Any:
        try:
            return np.empty(spec.shape, spec.dtype.numpy or spec.dtype.torch)
        except TypeError as cause:
            raise SpecError(
                f"numpy has no dtype for {spec.dtype}; import ml_dtypes, which adds some"
            ) from cause
