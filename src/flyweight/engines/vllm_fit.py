"""Whether vLLM's own loader takes some tensors: tried on a copy of the model that has no memory.

vLLM matches names, fuses and cuts tensors inside `load_weights`, so nothing but that function knows
what fits. The copy has the same modules, with parameters on torch's meta device as they were before
vLLM processed them, so a loader that writes to them writes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from flyweight.adapters import torch_module
from flyweight.errors import PlanError, listed
from flyweight.spec.manifest import TensorSpec

_REMEDY = "VllmEngine(..., should_check_fit=False) loads it without this check"


def check_fit(
    model: Any, tensors: Mapping[str, TensorSpec], *, load: Callable[[Any, Any], object]
) -> None:
    """Raise PlanError unless vLLM's loader takes these tensors; the model is not touched.

    load: calls the loader of a model with named tensors.
    """
    filled = _Filled()
    shadow = _shadow_of(model, filled)
    last = ""

    def named() -> Iterator[tuple[str, Any]]:
        nonlocal last
        for name, spec in tensors.items():
            last = name
            whole = torch_module.empty(spec, "meta")
            # One element, seen as many: a real tensor of that shape without its memory.
            yield name, torch.zeros((), dtype=whole.dtype).expand(whole.shape)

    try:
        with torch.no_grad(), filled:
            load(shadow, named())
    except Exception as cause:  # the loaders are vLLM's: they raise anything
        what = (
            f"vLLM's loader refuses {last!r}, {_words(tensors.get(last))}"
            if last
            else ("vLLM's loader does not start")
        )
        raise PlanError(f"{what}: {type(cause).__name__}: {cause}; {_REMEDY}") from cause
    if lost := [name for name, each in shadow.named_parameters() if filled.has_lost(each)]:
        raise PlanError(
            f"vLLM cannot reload {type(model).__name__}: its loader writes {len(lost)} parameters "
            f"by itself, which a reload does not see: {listed(lost)}"
        )
    missing = {
        name: (filled.count(parameter), get_tensor_load_numel(parameter))
        for name, parameter in shadow.named_parameters()
        if filled.count(parameter) < get_tensor_load_numel(parameter)
    }
    if missing:
        first = min(missing)
        found, wanted = missing[first]
        raise PlanError(
            f"{len(missing)} of vLLM's parameters would not be filled: {listed(missing)}; "
            f"{len(tensors)} tensors fill {found} of the {wanted} elements of {first!r}; {_REMEDY}"
        )


class _Filled(TorchDispatchMode):  # type: ignore[misc]
    """Counts the elements of each tensor that are written.

    A reload gets what is written by the loader of a parameter; what a model's loader writes by
    itself is lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[int, int] = {}
        self._loaded: set[int] = set()
        """The memory of parameters whose own loaders must write them."""
        self._lost: set[int] = set()
        self._is_in_loader = False
        self._writes = (
            torch.ops.aten.copy_.default,
            torch.ops.aten.fill_.Scalar,
            torch.ops.aten.zero_.default,
        )

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in self._writes:
            memory = args[0].untyped_storage()._cdata
            if memory in self._loaded and not self._is_in_loader:
                self._lost.add(memory)
            self._counts[memory] = self._counts.get(memory, 0) + args[0].numel()
        return function(*args, **(kwargs or {}))

    def count_in_loader(self, parameter: Any) -> None:
        """Give a parameter a loader that counts, around the one that it had before any reload."""
        load = _get_original_loader(parameter)

        @wraps(load)
        def counting(*args: Any, **kwargs: Any) -> Any:
            self._is_in_loader = True
            try:
                return load(*args, **kwargs)
            finally:
                self._is_in_loader = False

        self._loaded.add(parameter.untyped_storage()._cdata)
        parameter.weight_loader = counting

    def has_lost(self, tensor: Any) -> bool:
        return tensor.untyped_storage()._cdata in self._lost

    def count(self, tensor: Any) -> int:
        return self._counts.get(tensor.untyped_storage()._cdata, 0)


def _shadow_of(model: Any, filled: _Filled) -> Any:
    """Return the model with parameters that have no memory, as they are before they are loaded."""
    made: dict[int, Any] = {}
    metas: dict[int, Any] = {}
    """The parameters without memory by the real ones: layers may share one, as tied heads do."""

    def shadow(layer: Any) -> Any:
        if id(layer) not in made:
            found = made[id(layer)] = copy.copy(layer)
            found.__dict__["_modules"] = {
                name: None if child is None else shadow(child)
                for name, child in layer._modules.items()
            }
            before, _ = get_layerwise_info(layer).restore_metadata
            real = _real_parameters(layer)
            # Biases are never replaced, so they were not recorded. Others that were not recorded
            # are made from loaded ones, as those of multi-head latent attention.
            never = {name: real[name] for name in SKIP_TENSORS & real.keys()}
            parameters = found.__dict__["_parameters"] = {}
            for name, each in {**never, **before}.items():
                key = id(real.get(name, each))
                if each is not None and key not in metas:
                    metas[key] = _meta(each, layer)
                    if name in before:
                        filled.count_in_loader(metas[key])
                parameters[name] = None if each is None else metas[key]
            found.__dict__["_buffers"] = {
                name: None if each is None else each.to("meta")
                for name, each in layer._buffers.items()
            }
        return made[id(layer)]

    return shadow(model)


def _real_parameters(layer: Any) -> dict[str, Any]:
    """Return the parameters of a layer that have memory, also while a reload has put them aside."""
    aside = get_layerwise_info(layer).kernel_tensors
    return dict(layer._parameters if aside is None else aside[0])


def _meta(parameter: Any, layer: Any) -> Any:
    meta = restore_layer_refs(to_meta_tensor(parameter), layer)
    if hasattr(meta, "weight_loader"):  # not the one that collects tensors during a reload
        meta.weight_loader = _get_original_loader(meta)
    return meta


def _words(spec: TensorSpec | None) -> str:
    return "" if spec is None else f"{spec.dtype.name} of shape {spec.shape}"
