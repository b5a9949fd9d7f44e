"""A model in memory, as a source and as a sink: for each full name, where its elements lie.

`adapt` makes a `Model` of a torch module, a Paddle layer or nested dicts. A tensor that
carries its layout (a `DTensor`, a dist tensor, a `Sharded` leaf) becomes boxes of the whole
tensor; so do all tensors if a layout is given. The model's own tensors are never replaced, so
optimizers and engines that hold them keep them. Two names for the same elements are one
tensor and a tie; tensors that overlap in part can be saved, but not filled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from flyweight.adapters import numpy_dict, paddle_layer, sharded, torch_module
from flyweight.adapters.sharded import Cut
from flyweight.adapters.tensor import Tensor
from flyweight.adapters.tree import Path, is_settable, plain_value, set_value, walk
from flyweight.errors import DTypeMismatch, PlanError, ShapeMismatch, SpecError, listed
from flyweight.memory import (
    STAGING,
    Buffer,
    Bytes,
    Items,
    bytes_for,
    first_overlap,
    items_of,
)
from flyweight.spec.box import Box, overlapping_pair
from flyweight.spec.manifest import MAX_NAME_CHARS, Leaf, Manifest, TensorSpec
from flyweight.spec.model_layout import Local


@dataclass(frozen=True)
class ModelBlock:
    """A box of a whole tensor, and the place of that box in one of the model's tensors."""

    spec: TensorSpec
    """Of the whole tensor."""
    box: Box
    """In elements of the whole tensor."""
    tensor: Tensor
    place: Box
    """In elements of `tensor`."""

    @cached_property
    def memory(self) -> Buffer:
        """The box's items where they lie, on any device."""
        memory, shape = self.tensor.memory, self.spec.stored(self.box).shape
        if memory.shape == shape:  # most blocks are whole tensors
            return memory
        block = memory.block(self.tensor.spec.stored(self.place))
        extra = len(block.shape) - len(shape)
        strides = block.strides[extra:] if extra >= 0 else (0,) * -extra + block.strides
        return replace(block, shape=shape, strides=strides)

    @property
    def buffer(self) -> Buffer | None:
        """The memory, on the host or on a CUDA device; None on other devices."""
        return None if self.tensor.buffer is None else self.memory

    def items(self) -> Items | None:
        """View the box's items where they lie, or None if the CPU cannot reach them."""
        return self.memory.items() if self.tensor.device is None else None

    def read(self, items: Box, into: Bytes | None, *, should_wait: bool = True) -> Bytes:
        """Return the bytes of items counted from this block's corner; see `Model.read`."""
        block, device = self.memory.block(items), self.tensor.device
        if device is None and (flat := block.flat()) is not None:
            return flat
        data = bytes_for(block.nbytes, into)
        if device is not None and len(data):
            device.read(block, data, should_wait=should_wait)
        elif len(data):
            np.copyto(items_of(data, block.item_bytes, block.shape), block.items())
        return data

    def write(self, items: Box, data: Bytes) -> None:
        block, device = self.memory.block(items), self.tensor.device
        if device is not None and len(data):
            device.write(block, data)
        elif len(data):
            np.copyto(block.items(), items_of(data, block.item_bytes, block.shape))


class Model:
    """Both a source and a sink: the tensors of a live model, or one rank's share of them."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        blocks: Mapping[str, Sequence[ModelBlock]],
        values: Mapping[str, Leaf],
        paths: Mapping[str, Path],
        thing: object,
        *,
        absent: Sequence[str] = (),
        has_layout: bool = False,
    ) -> None:
        """Describe a model.

        absent: the names of leaves of which nothing is on this rank.
        has_layout: True if some leaves say themselves how they are cut over ranks.
        """
        self.absent, self.has_layout = absent, has_layout
        self._tensors, self._paths, self._thing = tensors, paths, thing
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
        specs = {name: held[0].spec for name, held in self._blocks.items()}
        self.manifest = Manifest(specs, tied=tied, values=values)
        devices = {tensor.device for tensor in tensors.values()}
        self._devices = [device for device in devices if device is not None]
        stagings = (device.staging for device in self._devices)
        self.staging = next((each for each in stagings if each), STAGING)
        owners = [tensor.memory.owner for tensor in tensors.values()]
        self._versioned = [owner for owner in owners if torch_module.is_tensor(owner)]

    def blocks(self, name: str) -> Sequence[ModelBlock]:
        return self._blocks[self.manifest.tied.get(name, name)]

    def boxes(self, name: str) -> Sequence[Box]:
        return [block.box for block in self.blocks(name)]

    def is_on_host(self, name: str) -> bool:
        """True if the CPU can reach what is here of a tensor."""
        return all(block.tensor.device is None for block in self.blocks(name))

    def read(
        self,
        name: str,
        box: Box | None = None,
        *,
        into: Bytes | None = None,
        should_wait: bool = True,
    ) -> Bytes:
        """Return the bytes of a box, as `Source` says.

        Unless it waits, bytes of a tensor on a device are there only after the same thread has
        called `settle`.
        """
        spec, blocks = self.manifest.spec(name), self.blocks(name)
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
        """Wait until everything that this thread wrote to the devices has arrived."""
        for device in self._devices:
            device.settle()

    def check_writable(self) -> None:
        """Raise SpecError for read-only memory, overlapping tensors, and values in tuples."""
        buffers: dict[str, Buffer] = {}
        keys: set[tuple[object, ...]] = set()
        for name, tensor in self._tensors.items():
            buffer, key = tensor.memory, tensor.memory_key
            if not buffer.nbytes or key not in keys:
                keys.add(key)  # a second name for the same elements is a tie, no overlap
                buffers[name] = buffer
        frozen = [name for name, buffer in buffers.items() if not buffer.is_writable]
        if frozen:
            raise SpecError(f"{len(frozen)} tensors are read-only memory: {listed(frozen)}")
        folded = [name for name, buffer in buffers.items() if buffer.is_folded]
        if folded:
            raise SpecError(
                f"{len(folded)} tensors show an element more than once by their strides: "
                f"{listed(folded)}"
            )
        if overlap := first_overlap(buffers) or self._filled_twice():
            raise SpecError(
                f"{overlap[0]!r} and {overlap[1]!r} share some of their memory and are not the "
                f"same tensor; filling one would change the other"
            )
        fixed = [name for name, path in self._paths.items() if not is_settable(self._thing, path)]
        if fixed:
            raise SpecError(
                f"{len(fixed)} values hang in containers that cannot be changed, such as tuples: "
                f"{listed(fixed)}"
            )

    def _filled_twice(self) -> tuple[str, str] | None:
        """Return two names, not a tie, that share memory of one tensor; None if there are none."""
        held: dict[tuple[object, ...], list[tuple[str, Box]]] = {}
        for name, blocks in self._blocks.items():
            for block in blocks:
                if block.place.num_elements:
                    held.setdefault(block.tensor.memory_key, []).append((name, block.place))
        for each in held.values():
            if len(each) > 1 and (meeting := overlapping_pair([place for _, place in each])):
                names = [name for name, place in each if place in meeting]
                return names[0], names[-1]
        return None

    def touched(self) -> None:
        """Tell torch that its tensors were written; other frameworks do not keep track."""
        torch_module.touched(self._versioned)

    def finish(self, manifest: Manifest) -> None:
        for name, path in self._paths.items():
            if name in manifest.values:
                set_value(self._thing, path, manifest.values[name])


def tensor_of(leaf: object) -> Tensor | None:
    """Return a leaf of any framework as a tensor; None if it is not a tensor."""
    for framework in (torch_module, paddle_layer, numpy_dict):
        tensor: Tensor | None = framework.tensor_of(leaf)
        if tensor is not None:
            return tensor
    return None


def adapt(
    thing: object,
    layout: Callable[[], Mapping[str, Local]] | None = None,
    *,
    may_be_empty: bool = False,
) -> Model:
    """Return a torch module, a Paddle layer, or nested dicts of tensors, as a model.

    `layout` returns what each tensor of this rank holds of the whole tensors; without it a tensor
    that does not carry its own layout is whole. With `may_be_empty`, as for one of several ranks,
    the model may have no tensor at all.
    """
    tensors: dict[str, Tensor] = {}
    blocks: dict[str, list[ModelBlock]] = {}
    cut_names, absent = [], []
    values: dict[str, Leaf] = {}
    paths: dict[str, Path] = {}
    plain = torch_module.plain_types()
    for name, leaf, path in walk(thing):
        if leaf is thing:
            raise SpecError(f"{type(thing).__name__} is no model: not a module, a layer or a dict")
        if name in tensors or name in values:
            raise SpecError(f"two leaves are called {name!r}; join of nested names must be unique")
        if not name or not name.isprintable() or len(name) > MAX_NAME_CHARS:
            raise SpecError(
                f"a leaf is called {name[:80]!r} ({len(name)} characters); names are printable and "
                f"not empty, of at most {MAX_NAME_CHARS} characters"
            )
        try:
            cut = None if type(leaf) in plain else _cut_of(leaf)
            if cut is not None and not cut.blocks:
                absent.append(name)
                continue
            tensor = tensor_of(leaf if cut is None else cut.local)
            if tensor is not None:
                tensors[name], blocks[name] = tensor, _blocks(tensor, cut)
        except SpecError as error:
            error.note(f"tensor {name!r}")
            raise
        if tensor is None:
            values[name], paths[name] = plain_value(name, leaf), path
        elif cut is not None:
            cut_names.append(name)
    if not tensors and not may_be_empty:
        raise SpecError(f"{type(thing).__name__} holds no tensors ({len(values)} other leaves)")
    if layout is not None:
        if cut_names:
            raise SpecError(
                f"a layout is given, and {len(cut_names)} tensors carry their own: "
                f"{listed(cut_names)}"
            )
        blocks = _laid_out(tensors, layout())
    return Model(
        tensors,
        blocks,
        values,
        paths,
        thing,
        absent=absent,
        has_layout=bool(cut_names or absent),
    )


def is_partial(model: Model) -> bool:
    """True if this rank does not hold some tensor as a whole: others must publish with it."""
    return bool(partial_names(model))


def partial_names(model: Model) -> list[str]:
    """Return the names of tensors of which this rank holds a part, or nothing."""
    found = [
        name
        for name, spec in model.manifest.tensors.items()
        if (blocks := model.blocks(name))[0].box.shape != spec.shape
        and sum(block.box.num_elements for block in blocks) < prod(spec.shape)
    ]
    return [*found, *model.absent]


def undeclared_shards(thing: object) -> list[str]:
    """Return the names of tensors that are marked as one rank's part, and do not say which part.

    Tensor parallel layers of Paddle's fleet and of Megatron mark their plain tensors so. Of
    several ranks that hold such a tensor, each seems to hold a replica of it.
    """
    return [
        name
        for name, leaf, _ in walk(thing)
        # torch has a function of this name
        if getattr(leaf, "is_distributed", False) is True
        or getattr(leaf, "tensor_model_parallel", False) is True
    ]


def _cut_of(leaf: object) -> Cut | None:
    found = (each.cut_of(leaf) for each in (sharded, torch_module, paddle_layer))
    return next((each for each in found if each is not None), None)


def _blocks(tensor: Tensor, cut: Cut | None) -> list[ModelBlock]:
    spec, here = tensor.spec, Box.whole(tensor.spec.shape)
    if cut is None:
        return [ModelBlock(spec, here, tensor, here)]
    if spec.dtype.bits < 8:
        raise SpecError(f"a shard of packed {spec.dtype}; view it as uint8")
    places = [place for _, place in cut.blocks if place.num_elements]
    # Places of a cut do not overlap, so the right volume leaves no gap.
    num_elements = sum(place.num_elements for place in places)
    if num_elements != here.num_elements or not all(map(here.contains, places)):
        raise SpecError(f"the tensor is {spec.shape} here, its layout speaks of {cut.blocks}")
    whole = TensorSpec(spec.dtype, cut.shape)
    return [ModelBlock(whole, box, tensor, place) for box, place in cut.blocks]


def _laid_out(
    tensors: Mapping[str, Tensor], held: Mapping[str, Local]
) -> dict[str, list[ModelBlock]]:
    """Return the blocks of each whole tensor, by a layout of the model's own tensors."""
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
            block = ModelBlock(each.spec, each.box, tensors[name], each.place)
            blocks.setdefault(each.name, []).append(block)
    return blocks
