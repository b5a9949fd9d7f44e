"""vLLM's own reload of a model's weights, with what vLLM 0.32.0 leaves out of it.

Left as they are, these would be wrong weights without an error:
- A reload that failed is continued: the elements of half-loaded layers count twice.
- The kernel of experts that are not quantized is built at the first load only. On a CPU that is
  also when they are packed; a reload would put plain weights in the place of packed ones.
- What a model's loader writes by itself, and not by the loader of a parameter, is lost.
- A head that is tied to the embedding gets no tensor of its own, so nothing packs it again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
)

from flyweight.errors import LifecycleError, PlanError, listed

_PACK_NOTHING = ("FlashInferExperts",)
"""Experts whose step after a load concerns quantized weights only."""


def reload_weights(model: Any, model_config: Any, load: Callable[[Any], Any]) -> None:
    """Replace all weights of a model by those that `load` gives to its loader.

    load: returns what the loader does: the names of the parameters that it has loaded, or None.
    """
    _undo_half_load(model)
    for method, _ in _packed_experts(model):
        method.moe_kernel = None  # vLLM builds it as in the first load, and packs the weights
    initialize_layerwise_reload(model)
    _check_nothing_is_lost(model, load(model) or ())
    finalize_layerwise_reload(model, model_config)
    _pack_tied_heads(model)


def take_memory(model: Any) -> None:
    """Take the memory of all parameters away, until the next reload; a forward pass fails."""
    initialize_layerwise_reload(model)


def check_can_reload(model: Any) -> None:
    """Raise PlanError if a model has experts whose weights cannot be packed in a reload.

    On a GPU, graphs that were captured hold the addresses of packed weights, so the kernel cannot
    be built anew.
    """
    for method, layer in _packed_experts(model):
        if (device := layer.w13_weight.device.type) not in ("cpu", "meta"):
            experts = type(method.moe_kernel.fused_experts).__name__
            raise PlanError(
                f"vLLM packs the weights of {experts} on {device} at its start only, so they "
                f"cannot be updated; choose others with --moe-backend"
            )


def _packed_experts(model: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the method and the layer of experts that change their weights after a load."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if not isinstance(method, UnquantizedFusedMoEMethod) or method.moe_kernel is None:
            continue
        experts = type(method.moe_kernel.fused_experts)
        step, none = experts.process_weights_after_loading, FusedMoEExperts
        if step is not none.process_weights_after_loading and experts.__name__ not in _PACK_NOTHING:
            yield method, layer


def _check_nothing_is_lost(model: Any, loaded: Collection[str]) -> None:
    """Raise LifecycleError if the loader has named parameters of layers that got nothing."""
    lost: list[str] = []
    for at, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.load_numel <= 0:
            names = (f"{at}.{name}" for name in info.restore_metadata[0])
            lost += [name for name in names if name in loaded]
    if lost:
        raise LifecycleError(
            f"vLLM cannot reload {type(model).__name__}: {len(lost)} parameters that its loader "
            f"has written were lost: {listed(lost)}; restart vLLM"
        )


def _pack_tied_heads(model: Any) -> None:
    """Have embeddings and heads that share their weights packed again, from what is loaded now."""
    layers: dict[int, list[Any]] = {}
    for layer in model.modules():
        if isinstance(getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod):
            layers.setdefault(id(layer.weight), []).append(layer)
    for tied in layers.values():
        for layer in tied if len(tied) > 1 else ():
            layer.quant_method.process_weights_after_loading(layer)


def _undo_half_load(model: Any) -> None:
    """Put back the tensors of layers that a load which failed has left without memory."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
            info.reset()
