"""A model in memory, as a source and as a sink: for each full name, where its elements lie.

`adapt` makes a `Model` of a torch module, a Paddle layer or nested dicts. A tensor that
carries its layout (a `DTensor`, a dist tensor, a `Sharded` leaf) becomes boxes of the whole
tensor; so do all tensors if a layout is given. The model's own tensors are never replaced, so
optimizers and engines that hold them keep them. Two names for the same elements are one
tensor and a tie; tensors that overlap in part can be saved, but not filled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as replace_columns
from functools import cached_property
from operator import is_

import numpy as np

from flyweight.adapters import numpy_dict, paddle_layer, sharded, torch_module
from flyweight.adapters.model_block import ModelBlock
from flyweight.adapters.sharded import Cut
from flyweight.adapters.tensor import Tensor
from flyweight.adapters.tree import Path, is_settable, plain_value, set_value, walk
from flyweight.errors import DTypeMismatch, PlanError, ShapeMismatch, SpecError, listed
from flyweight.memory import (
    STAGING,
    Bytes,
    first_overlap,
)
from flyweight.memory_table import NOWHERE, BufferTable
from flyweight.plans.copy_table import BoxTable
from flyweight.spec.box import Box, overlapping_pair
from flyweight.spec.manifest import MAX_NAME_CHARS, Leaf, Manifest, TensorSpec
from flyweight.spec.model_layout import Local

Held = Tensor | Sequence[ModelBlock]
"""What is here of a whole tensor: all of it, as a tensor of the model, or blocks of it."""


class Model:
    """Both a source and a sink: the tensors of a live model, or one rank's share of them."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        held: Mapping[str, Held],
        values: Mapping[str, Leaf],
        paths: Mapping[str, Path],
        thing: object,
        *,
        absent: Sequence[str] = (),
        has_layout: bool = False,
    ) -> None:
        """Describe a model.

        tensors: the model's own tensors.
        held: what is here of each whole tensor, by its full name.
        absent: the names of leaves of which nothing is on this rank.
        has_layout: True if some leaves say themselves how they are cut over ranks.
        """
        self.absent, self.has_layout = absent, has_layout
        self._tensors, self._paths, self._thing = tensors, paths, thing
        tied = _ties(held)
        self._held = {name: each for name, each in held.items() if name not in tied}
        specs = {
            name: each.spec if isinstance(each, Tensor) else each[0].spec
            for name, each in self._held.items()
        }
        self.manifest = Manifest(specs, tied=tied, values=values)
        devices = {id(each.device): each.device for each in tensors.values()}
        self._devices = [device for device in set(devices.values()) if device is not None]
        stagings = (device.staging for device in self._devices)
        self.staging = next((each for each in stagings if each), STAGING)

    @cached_property
    def _versioned(self) -> list[object]:
        """The tensors whose versions torch counts."""
        return torch_module.tensors_among(each.memory.owner for each in self._tensors.values())

    def blocks(self, name: str) -> Sequence[ModelBlock]:
        held = self._held[self.manifest.tied.get(name, name)]
        return [_whole_block(held)] if isinstance(held, Tensor) else held

    def is_whole(self, name: str) -> bool:
        """True if a tensor is here as a whole, without a layout of its own."""
        return isinstance(self._held[name], Tensor)

    def tables(self, names: Sequence[str]) -> tuple[BoxTable, BufferTable]:
        """Return the blocks of tensors, in items, and where each one lies.

        A block refers to its tensor by the tensor's number in `names`. One that cannot be copied by
        its address is NOWHERE.
        """
        tied, held = self.manifest.tied, self._held
        found = [held[tied.get(name, name)] for name in names]
        tensors = [each for each in found if isinstance(each, Tensor)]
        if len(tensors) == len(found):
            is_all = all(map(is_, tensors, self._tensors.values()))
            is_all = is_all and len(tensors) == len(self._tensors)
            memory = self._memory if is_all else BufferTable.of([each.memory for each in tensors])
            boxes = BoxTable(np.arange(len(found)), np.zeros_like(memory.shape), memory.shape)
        else:
            blocks = [(n, block) for n, name in enumerate(names) for block in self.blocks(name)]
            tensors = [block.tensor for _, block in blocks]
            boxes = BoxTable.of([(n, block.spec.stored(block.box)) for n, block in blocks])
            memory = BufferTable.of([block.memory for _, block in blocks], boxes.shape)
        is_lost = [not each.is_addressable for each in tensors]
        return boxes, replace_columns(memory, device=np.where(is_lost, NOWHERE, memory.device))

    @cached_property
    def _memory(self) -> BufferTable:
        """Where the model's own tensors lie."""
        return BufferTable.of([each.memory for each in self._tensors.values()])

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
        buffers = {name: tensor.memory for name, tensor in self._tensors.items()}
        frozen = [name for name, buffer in buffers.items() if not buffer.is_writable]
        if frozen:
            raise SpecError(f"{len(frozen)} tensors are read-only memory: {listed(frozen)}")
        names = list(buffers)
        strided = [names[row] for row in np.flatnonzero(~self._memory.is_contiguous).tolist()]
        folded = [name for name in strided if buffers[name].is_folded]
        if folded:
            raise SpecError(
                f"{len(folded)} tensors show an element more than once by their strides: "
                f"{listed(folded)}"
            )
        near = [names[row] for row in np.flatnonzero(self._memory.has_neighbour_inside).tolist()]
        first: dict[object, str] = {}  # a second name for the same elements is a tie, no overlap
        for name in near:
            first.setdefault(self._tensors[name].memory_key, name)
        meeting = {name: buffers[name] for name in first.values()}
        if overlap := first_overlap(meeting) or self._filled_twice():
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
        if all(isinstance(each, Tensor) for each in self._held.values()):
            return None  # two whole tensors at one place are a tie
        held: dict[tuple[object, ...], list[tuple[str, Box]]] = {}
        for name in self._held:
            for block in self.blocks(name):
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
    if isinstance(leaf, Tensor):  # memory without a framework
        return leaf
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
    held: dict[str, Held] = {}
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
            if type(leaf) in plain:
                tensors[name] = held[name] = torch_module.plain_tensor(leaf)
                continue
            cut = _cut_of(leaf)
            if cut is not None and not cut.blocks:
                absent.append(name)
                continue
            tensor = tensor_of(leaf if cut is None else cut.local)
            if tensor is not None:
                tensors[name] = tensor
                held[name] = tensor if cut is None else _blocks(tensor, cut)
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
        held = _laid_out(tensors, layout())
    return Model(
        tensors,
        held,
        values,
        paths,
        thing,
        absent=absent,
        has_layout=bool(cut_names or absent),
    )


def _ties(held: Mapping[str, Held]) -> dict[str, str]:
    """Return the names that show the same elements as an earlier name, with that name."""
    firsts = [each if isinstance(each, Tensor) else each[0].tensor for each in held.values()]
    addresses = [each.memory.address for each in firsts]
    times = Counter(addresses)
    first: dict[object, str] = {}
    tied = {}
    for (name, each), address in zip(held.items(), addresses, strict=True):
        if times[address] == 1:
            continue
        blocks = [_whole_block(each)] if isinstance(each, Tensor) else each
        key = (
            blocks[0].spec.shape,
            *((block.box, block.place, *block.tensor.memory_key) for block in blocks),
        )
        if any(block.box.num_elements for block in blocks) and key in first:
            tied[name] = first[key]
        else:
            first[key] = name
    return tied


def _whole_block(tensor: Tensor) -> ModelBlock:
    here = Box.whole(tensor.spec.shape)
    return ModelBlock(tensor.spec, here, tensor, here)


def _cut_of(leaf: object) -> Cut | None:
    found = (each.cut_of(leaf) for each in (sharded, torch_module, paddle_layer))
    return next((each for each in found if each is not None), None)


def _blocks(tensor: Tensor, cut: Cut) -> list[ModelBlock]:
    spec, here = tensor.spec, Box.whole(tensor.spec.shape)
    if spec.dtype.bits < 8:
        raise SpecError(f"a shard of packed {spec.dtype}; view it as uint8")
    places = [place for _, place in cut.blocks if place.num_elements]
    # Places of a cut do not overlap, so the right volume leaves no gap.
    num_elements = sum(place.num_elements for place in places)
    if num_elements != here.num_elements or not all(map(here.contains, places)):
        raise SpecError(f"the tensor is {spec.shape} here, its layout speaks of {cut.blocks}")
    whole = TensorSpec(spec.dtype, cut.shape)
    return [ModelBlock(whole, box, tensor, place) for box, place in cut.blocks]


def _laid_out(tensors: Mapping[str, Tensor], held: Mapping[str, Local]) -> dict[str, Held]:
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
    return dict(blocks)
