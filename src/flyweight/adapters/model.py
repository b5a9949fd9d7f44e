"""A model in memory, whatever it is made of: modules, layers, dicts and lists of tensors.

`adapt` walks it once and keeps, per full name, where the elements lie. The model's own
tensors are never replaced, so optimizers and engines that hold them keep holding them.
Two names for the same elements are one tensor and a tie; a partial overlap can be saved,
and is refused as a target.
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Protocol

import numpy as np

from flyweight.adapters import numpy_dict, paddle_layer, sharded, torch_module
from flyweight.adapters.sharded import Cut
from flyweight.errors import DTypeMismatch, PlanError, ShapeMismatch, SpecError, listed
from flyweight.memory import (
    STAGING,
    Buffer,
    Bytes,
    Items,
    Staging,
    block_of,
    bytes_for,
    empty_shape,
    first_overlap,
    item_dtype,
)
from flyweight.spec.box import Box, first_meeting
from flyweight.spec.manifest import MAX_NAME_CHARS, Leaf, Manifest, TensorSpec, check_leaf
from flyweight.spec.rules import Local

MAX_NESTING = 64
_PLAIN = (bool, int, float, str, type(None))


class Tensor(Protocol):
    """One framework's tensor, as far as moving its bytes goes. Boxes count items."""

    @property
    def spec(self) -> TensorSpec: ...

    @property
    def host(self) -> Buffer | None:
        """Its memory, if the CPU can reach it."""

    @property
    def buffer(self) -> Buffer | None:
        """Its memory, on the host or on a CUDA device; None on other devices."""

    @property
    def memory_key(self) -> tuple[object, ...]:
        """Equal for two tensors that are the same elements of the same memory."""

    @property
    def staging(self) -> Staging | None:
        """Where its bytes should stand on their way; None if any memory is as good."""

    def read(self, items: Box, into: Bytes, *, should_wait: bool = True) -> None:
        """Copy a box; without waiting the bytes have arrived only after `settle`."""

    def write(self, items: Box, data: Bytes) -> None: ...

    def settle(self) -> None:
        """Wait until what this thread wrote to the tensor's device has arrived."""

    @property
    def versioned(self) -> object:
        """What torch must be told of when elements change behind its back; None for others."""


@dataclass(frozen=True)
class _Hook:
    """Where something hangs: in a container, which hangs somewhere itself unless it is the root."""

    container: Any
    key: Any
    above: _Hook | None

    @property
    def is_settable(self) -> bool:
        """True for dicts and lists, and for tuples in them: those are replaced as a whole."""
        if isinstance(self.container, (MutableMapping, MutableSequence)):
            return True
        return type(self.container) is tuple and self.above is not None and self.above.is_settable

    def set(self, value: object) -> None:
        if not isinstance(self.container, tuple):
            self.container[self.key] = value
            return
        assert self.above is not None
        current = self.above.current()
        self.above.set((*current[: self.key], value, *current[self.key + 1 :]))

    def current(self) -> Any:
        """Return what hangs here by now: a tuple that was there may have been replaced."""
        if not isinstance(self.container, tuple):
            return self.container[self.key]
        assert self.above is not None
        return self.above.current()[self.key]


@dataclass(frozen=True)
class _Slot:
    """A leaf that is no tensor, and where it hangs, to be set again."""

    hook: _Hook
    value: Leaf


@dataclass(frozen=True)
class ModelBlock:
    """A box of a tensor, and the place in some tensor of the model where it stands."""

    spec: TensorSpec
    """Of the whole tensor."""
    box: Box
    tensor: Tensor
    place: Box

    def items(self) -> Items | None:
        """View the box's items where they lie, if the CPU can reach them, else None."""
        buffer = self.tensor.host
        if buffer is None:
            return None
        items = self.spec.stored(self.box)
        # Whole tensors are most tensors: no view of a view for them.
        if self.place.shape == self.tensor.spec.shape and items.shape == buffer.shape:
            return buffer.items()
        if not items.num_elements:
            return np.empty(empty_shape(items.shape), item_dtype(self.spec.item_bytes))
        return block_of(buffer.items(), self.tensor.spec.stored(self.place)).reshape(items.shape)

    @cached_property
    def buffer(self) -> Buffer | None:
        """The box's items where they lie, on the host or on a CUDA device."""
        buffer, shape = self.tensor.buffer, self.spec.stored(self.box).shape
        if buffer is None:
            return None
        place = buffer.block(self.tensor.spec.stored(self.place))
        extra = len(place.shape) - len(shape)
        strides = place.strides[extra:] if extra >= 0 else (0,) * -extra + place.strides
        return replace(place, shape=shape, strides=strides)

    def _local(self, items: Box) -> Box:
        """Return where items counted from this block's corner stand in the rank's own tensor."""
        corner = self.tensor.spec.stored(self.place).offset
        extra = len(corner) - len(items.offset)
        offset, shape = items.offset[max(-extra, 0) :], items.shape[max(-extra, 0) :]
        ones = max(extra, 0)
        return Box((0,) * ones + offset, (1,) * ones + shape).moved(corner)

    def read(self, items: Box, into: Bytes | None, *, should_wait: bool = True) -> Bytes:
        """Return the bytes of items counted from this block's corner; see `Model.read`."""
        local, buffer, width = self._local(items), self.tensor.host, self.spec.item_bytes
        if buffer is not None and (flat := buffer.flat()) is not None:
            runs = list(local.runs(buffer.shape)) if local.shape != buffer.shape else None
            if runs is None:
                return flat
            if len(runs) == 1:
                start, length = runs[0]
                return flat[start * width : (start + length) * width]
        data = bytes_for(items.num_elements * width, into)
        if len(data):
            self.tensor.read(local, data, should_wait=should_wait)
        return data

    def write(self, items: Box, data: Bytes) -> None:
        self.tensor.write(self._local(items), data)


class Model:
    """Both a source and a sink: the tensors of a live model, or one rank's share of them."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        blocks: Mapping[str, Sequence[ModelBlock]],
        slots: Mapping[str, _Slot],
    ) -> None:
        self._tensors = tensors
        first: dict[object, str] = {}
        self._blocks: dict[str, Sequence[ModelBlock]] = {}
        tied = {}
        for name, held in blocks.items():
            key = (
                held[0].spec.shape,
                *((each.box, each.place, *each.tensor.memory_key) for each in held),
            )
            if any(each.box.num_elements for each in held) and key in first:
                tied[name] = first[key]
            else:
                first[key] = name
                self._blocks[name] = held
        self._slots = slots
        self._manifest = Manifest(
            {name: held[0].spec for name, held in self._blocks.items()},
            tied=tied,
            values={name: slot.value for name, slot in slots.items()},
        )
        devices = {t.memory_key[0]: t for t in self._tensors.values() if t.host is None}
        self._devices = list(devices.values())
        self._versioned = [t.versioned for t in tensors.values() if t.versioned is not None]
        stagings = (tensor.staging for tensor in self._tensors.values())
        self._staging = next((each for each in stagings if each), STAGING)

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def staging(self) -> Staging:
        return self._staging

    def blocks(self, name: str) -> Sequence[ModelBlock]:
        return self._blocks[self._manifest.tied.get(name, name)]

    def boxes(self, name: str) -> Sequence[Box]:
        return [block.box for block in self.blocks(name)]

    def is_on_host(self, name: str) -> bool:
        """True if the CPU can reach what is here of a tensor."""
        return all(block.tensor.host is not None for block in self.blocks(name))

    def read(
        self,
        name: str,
        box: Box | None = None,
        *,
        into: Bytes | None = None,
        should_wait: bool = True,
    ) -> Bytes:
        """Return the bytes of a box, see `Source`.

        Without waiting, those of a tensor on a device have arrived only after `settle`, called by
        the same thread.
        """
        spec, blocks = self._manifest.spec(name), self.blocks(name)
        box = Box.whole(spec.shape) if box is None else box
        for block in blocks:
            if box == block.box or block.box.contains(box):
                items = spec.stored(box)
                within = items.within(spec.stored(block.box))
                return block.read(within, into, should_wait=should_wait)
        held = ", ".join(f"{block.box.offset}..{block.box.end}" for block in blocks[:5])
        raise PlanError(
            f"{name!r} is here in {held}; {box.offset}..{box.end} does not lie in one of them"
        )

    def settle(self) -> None:
        for tensor in self._devices:
            tensor.settle()

    def check_writable(self) -> None:
        """Raise for what cannot be filled: frozen memory, overlapping tensors, tuples of values."""
        hosts: dict[str, Buffer] = {}
        keys: set[tuple[object, ...]] = set()
        for name, tensor in self._tensors.items():
            host, key = tensor.host, tensor.memory_key
            if host is not None and (not host.nbytes or key not in keys):
                keys.add(key)  # a second name for the same elements is a tie, no overlap
                hosts[name] = host
        frozen = [name for name, host in hosts.items() if not host.is_writable]
        if frozen:
            raise SpecError(f"{len(frozen)} tensors are read-only memory: {listed(frozen)}")
        folded = [name for name, host in hosts.items() if host.is_folded]
        if folded:
            raise SpecError(
                f"{len(folded)} tensors show an element more than once by their strides: "
                f"{listed(folded)}"
            )
        if overlap := first_overlap(hosts):
            raise SpecError(
                f"{overlap[0]!r} and {overlap[1]!r} share some of their memory and are not the "
                f"same tensor; filling one would change the other"
            )
        fixed = [name for name, slot in self._slots.items() if not slot.hook.is_settable]
        if fixed:
            raise SpecError(
                f"{len(fixed)} values hang in containers that cannot be changed, such as tuples: "
                f"{listed(fixed)}"
            )

    def touched(self) -> None:
        """Tell torch that its tensors were written; other frameworks need not know."""
        torch_module.touched(self._versioned)

    def finish(self, manifest: Manifest) -> None:
        for name, slot in self._slots.items():
            if name in manifest.values:
                slot.hook.set(manifest.values[name])


_STATES: tuple[Callable[[object], Mapping[str, object] | None], ...] = (
    torch_module.state_of,
    paddle_layer.state_of,
)
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
    slots: dict[str, _Slot] = {}
    for name, leaf, hook in _walk("", thing, None):
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
            slots[name] = _Slot(hook, _plain(name, leaf))
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


def is_model(thing: object) -> bool:
    """True for modules, layers and containers of tensors, False for anything else."""
    return isinstance(thing, (Mapping, list, tuple)) or any(
        is_one(thing) for is_one in (torch_module.is_module, paddle_layer.is_layer)
    )


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


def _walk(
    name: str, thing: object, hook: _Hook | None, depth: int = 0
) -> Iterator[tuple[str, object, _Hook | None]]:
    if depth > MAX_NESTING:
        raise SpecError(f"{name[:80]!r} nests more than {MAX_NESTING} deep, or holds itself")
    for state_of in _STATES:
        state = state_of(thing)
        if state is not None:
            thing = state
            break
    items: Iterator[tuple[object, object]]
    if isinstance(thing, Mapping):
        items = iter(thing.items())
    elif isinstance(thing, (list, tuple)):
        items = iter(enumerate(thing))
    else:
        yield name, thing, hook
        return
    for each, value in items:
        if not isinstance(each, (str, int)):
            raise SpecError(f"key {each!r} under {name!r} is a {type(each).__name__}, not text")
        path = f"{name}.{each}" if name else str(each)
        yield from _walk(path, value, _Hook(thing, each, hook), depth + 1)


def _plain(name: str, leaf: object) -> Leaf:
    if isinstance(leaf, np.generic):
        leaf = leaf.item()
    if isinstance(leaf, _PLAIN):
        return check_leaf(name, leaf)
    raise SpecError(
        f"{name!r} is a {type(leaf).__module__}.{type(leaf).__qualname__}: neither a tensor nor "
        f"a plain value"
    )
