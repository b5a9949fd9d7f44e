"""Adapt: from whatever a model is made of to the boxes of whole tensors that it holds.

Which box a tensor is, it says itself (a `DTensor`, a dist tensor, a `Sharded` leaf), or a
layout says it of all of them; one that says nothing is whole. The model is walked once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from flyweight.adapters import numpy_dict, paddle_layer, sharded, torch_module
from flyweight.adapters.model import Model, ModelBlock, Tensor
from flyweight.adapters.sharded import Cut
from flyweight.adapters.tree import Slot, plain_value, walk
from flyweight.errors import DTypeMismatch, PlanError, ShapeMismatch, SpecError, listed
from flyweight.spec.box import Box, first_meeting
from flyweight.spec.manifest import MAX_NAME_CHARS, TensorSpec
from flyweight.spec.model_layout import Local

_TENSORS: tuple[Callable[[object], Tensor | None], ...] = (
    torch_module.tensor_of,
    paddle_layer.tensor_of,
    numpy_dict.tensor_of,
)
_CUTS: tuple[Callable[[object], Cut | None], ...] = (
    sharded.cut_of,
    torch_module.cut_of,
    paddle_layer.cut_of,
)


def adapt(
    thing: object,
    layout: Callable[[], Mapping[str, Local]] | None = None,
    *,
    may_be_empty: bool = False,
) -> Model:
    """Return the model that `thing` is: a torch module, a Paddle layer, nested dicts of tensors.

    Tensors that carry their layout are told as boxes of the whole; so are all, by `layout`, which
    is asked what the tensors of this rank hold. One of several ranks may have no tensor at all.
    """
    tensors: dict[str, Tensor] = {}
    cuts: dict[str, Cut] = {}
    slots: dict[str, Slot] = {}
    for name, leaf, hook in walk("", thing, None):
        if leaf is thing:
            raise SpecError(f"{type(thing).__name__} is no model: not a module, a layer or a dict")
        if name in tensors or name in slots:
            raise SpecError(f"two leaves are called {name!r}; join of nested names must be unique")
        if not name or not name.isprintable() or len(name) > MAX_NAME_CHARS:
            raise SpecError(
                f"a leaf is called {name[:80]!r} ({len(name)} characters); names are printable and "
                f"not empty, of at most {MAX_NAME_CHARS} characters"
            )
        try:
            cut = next((found for of in _CUTS if (found := of(leaf)) is not None), None)
            if cut is not None and not cut.blocks:
                continue
            local = leaf if cut is None else cut.local
            tensor = next((each for of in _TENSORS if (each := of(local)) is not None), None)
        except SpecError as error:
            error.note(f"tensor {name!r}")
            raise
        if tensor is not None:
            tensors[name] = tensor
            if cut is not None:
                cuts[name] = cut
        else:
            assert hook is not None
            slots[name] = Slot(hook, plain_value(name, leaf))
    if not tensors and not may_be_empty:
        raise SpecError(f"{type(thing).__name__} holds no tensors ({len(slots)} other leaves)")
    if layout is None:
        blocks = {name: _blocks(name, tensor, cuts.get(name)) for name, tensor in tensors.items()}
    elif cuts:
        raise SpecError(
            f"a layout is given, and {len(cuts)} tensors carry their own: {listed(cuts)}"
        )
    else:
        blocks = _laid_out(tensors, layout())
    return Model(tensors, blocks, slots)


def _blocks(name: str, tensor: Tensor, cut: Cut | None) -> list[ModelBlock]:
    spec = tensor.spec
    if cut is not None and spec.dtype.bits < 8:
        raise SpecError(f"{name!r} is a shard of packed {spec.dtype}; view it as uint8")
    if cut is None:
        whole = Box.whole(spec.shape)
        return [ModelBlock(spec, whole, tensor, whole)]
    try:
        whole_spec = TensorSpec(spec.dtype, cut.shape)
        blocks = [ModelBlock(whole_spec, box, tensor, place) for box, place in cut.blocks]
        for block in blocks:
            whole_spec.stored(block.box)
    except SpecError as error:
        error.note(f"tensor {name!r}")
        raise
    places = [block.place for block in blocks]
    is_tiled = sum(place.num_elements for place in places) == prod(spec.shape) and all(
        len(place.shape) == len(spec.shape) and Box.whole(spec.shape).contains(place)
        for place in places
        if place.num_elements
    )
    if not is_tiled or first_meeting(places):
        raise SpecError(f"{name!r} is {spec.shape} here, its layout speaks of {cut.blocks}")
    return blocks


def _laid_out(
    tensors: Mapping[str, Tensor], held: Mapping[str, Local]
) -> dict[str, list[ModelBlock]]:
    """Return the blocks of each whole tensor, as a layout tells them of the model's own."""
    if unknown := tensors.keys() - held.keys():
        raise PlanError(f"the layout does not speak of {len(unknown)} tensors: {listed(unknown)}")
    if missing := held.keys() - tensors.keys():
        raise PlanError(f"the model lacks {len(missing)} tensors of its layout: {listed(missing)}")
    blocks: dict[str, list[ModelBlock]] = {}
    for name, local in held.items():
        spec = tensors[name].spec
        if spec.dtype != local.spec.dtype:
            raise DTypeMismatch(f"{name!r} is {spec.dtype}, by the layout {local.spec.dtype}")
        if spec.shape != local.spec.shape:
            raise ShapeMismatch(f"{name!r} is {spec.shape}, by the layout {local.spec.shape}")
        for each in local.held:
            whole = local.wholes[each.name]
            block = ModelBlock(whole, each.box, tensors[name], each.place)
            blocks.setdefault(each.name, []).append(block)
    return blocks
