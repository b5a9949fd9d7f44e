"""An engine's own function that loads named tensors: vLLM's, SGLang's, FastDeploy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from flyweight.adapters import numpy_dict, paddle_layer, torch_module
from flyweight.adapters.rows import Rows
from flyweight.adapters.tensor import Tensor
from flyweight.cuda import driver
from flyweight.errors import MissingDependency, SpecError
from flyweight.memory import Buffer
from flyweight.spec.dtype import DTYPES
from flyweight.spec.manifest import TensorSpec

Framework = Literal["torch", "paddle", "numpy"]
Load = Callable[[Iterator[tuple[str, Any]]], object]
_FRAMEWORKS = {
    "torch": (torch_module, "torch"),
    "paddle": (paddle_layer, "paddlepaddle"),
    "numpy": (numpy_dict, "numpy"),
}


class Loader:
    """Makes tensors of a framework, and passes them to a function one by one."""

    def __init__(
        self, load: Load, framework: Framework, device: str, *, rows: Rows | None = None
    ) -> None:
        """Make tensors of a framework on a device for a function.

        rows: where the function puts them, for `Replica.check_live`.
        """
        if framework not in _FRAMEWORKS:
            raise SpecError(f"framework is {framework!r}, not 'torch', 'paddle' or 'numpy'")
        self.load, self.rows, self._device = load, rows, device
        self._framework, package = _FRAMEWORKS[framework]
        try:
            _, buffer = self.fresh(TensorSpec(DTYPES["u8"], (1,)))
        except ImportError as cause:
            raise MissingDependency(
                f"tensors of {framework} need it; pip install {package}"
            ) from cause
        self.place = "" if buffer.device is None else driver.uuid(buffer.device)

    def choose(self, tensors: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """Return all tensors in the order in which they are loaded: the publisher's.

        A subclass may order them, and raise PlanError for tensors that cannot be loaded.
        """
        return tensors

    def fresh(self, spec: TensorSpec) -> tuple[Any, Buffer]:
        """Return a new tensor, and its memory, to be filled."""
        tensor = self._framework.empty(spec, self._device)
        found: Tensor = self._framework.tensor_of(tensor)
        if found.device is not None:
            found.device.settle()  # reused memory may still be read on the framework's stream
        if found.buffer is None:
            raise SpecError(f"device {self._device!r} cannot be written in place")
        return tensor, found.buffer
