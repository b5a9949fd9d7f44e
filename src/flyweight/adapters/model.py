"""A model in memory, as a source and as a sink: per full name, where the elements lie.

The model's own tensors are never replaced, so optimizers and engines that hold them keep
holding them. Two names for the same elements are one tensor and a tie; a partial overlap
can be saved, and is refused as a target. `adapt.py` makes a `Model` of what a user has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from flyweight.adapters import torch_module
from flyweight.adapters.tree import Slot
from flyweight.errors import PlanError, SpecError, listed
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
from flyweight.spec.manifest import Manifest, TensorSpec


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
    def memory(self) -> Buffer:
        """Where its elements lie, on whatever device: to compare, not to read."""

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
        slots: Mapping[str, Slot],
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
        if overlap := first_overlap(buffers):
            raise SpecError(
                f"{overlap[0]!r} and {overlap[1]!r} share some of their memory and are not the "
                f"same tensor; filling one would change the other"
            )
        if double := self._filled_twice():
            raise SpecError(
                f"{double[0]!r} and {double[1]!r} are in the same memory and are different parts "
                f"of what is whole; filling one would change the other"
            )
        fixed = [name for name, slot in self._slots.items() if not slot.hook.is_settable]
        if fixed:
            raise SpecError(
                f"{len(fixed)} values hang in containers that cannot be changed, such as tuples: "
                f"{listed(fixed)}"
            )

    def _filled_twice(self) -> tuple[str, str] | None:
        """Return two names, no tie, that some of one tensor's memory stands for."""
        held: dict[tuple[object, ...], list[tuple[str, Box]]] = {}
        for name, blocks in self._blocks.items():
            for block in blocks:
                if block.place.num_elements:
                    held.setdefault(block.tensor.memory_key, []).append((name, block.place))
        for each in held.values():
            if len(each) > 1 and (meeting := first_meeting([place for _, place in each])):
                names = [name for name, place in each if place in meeting]
                return names[0], names[-1]
        return None

    def touched(self) -> None:
        """Tell torch that its tensors were written; other frameworks need not know."""
        torch_module.touched(self._versioned)

    def finish(self, manifest: Manifest) -> None:
        for name, slot in self._slots.items():
            if name in manifest.values:
                slot.hook.set(manifest.values[name])
