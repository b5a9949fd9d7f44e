"""A model in memory, whatever it is made of: modules, layers, dicts and lists of tensors.

`adapt` walks it once and keeps, per full name, where the elements lie. The model's own
tensors are never replaced, so optimizers and engines that hold them keep holding them.
Two names for the same memory are one tensor and a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

import numpy as np

from flyweight.adapters import numpy_dict, paddle_layer, torch_module
from flyweight.errors import SpecError, listed
from flyweight.memory import STAGING, Buffer, Bytes, Staging
from flyweight.spec.box import Box
from flyweight.spec.manifest import Leaf, Manifest, TensorSpec


class Tensor(Protocol):
    """One framework's tensor, as far as moving its bytes goes. Boxes count items."""

    @property
    def spec(self) -> TensorSpec: ...

    @property
    def host(self) -> Buffer | None:
        """Its memory, if the CPU can reach it."""

    @property
    def memory_key(self) -> tuple[object, ...]:
        """Equal for two tensors that are the same elements of the same memory."""

    @property
    def staging(self) -> Staging | None:
        """Where its bytes should stand on their way; None if any memory is as good."""

    def read(self, items: Box, into: Bytes) -> None: ...

    def write(self, items: Box, data: Bytes) -> None: ...

    def settle(self) -> None:
        """Wait until what this thread wrote to the tensor's device has arrived."""

    def touched(self) -> None:
        """Tell the framework that the elements changed behind its back."""


Container = MutableMapping[object, object] | MutableSequence[object]


@dataclass(frozen=True)
class _Slot:
    """Where a leaf that is no tensor hangs, to be set again."""

    container: object
    key: object
    value: Leaf


class Model:
    """Both a source and a sink: the tensors of a live model."""

    def __init__(self, tensors: Mapping[str, Tensor], slots: Mapping[str, _Slot]) -> None:
        first: dict[tuple[object, ...], str] = {}
        self._tensors: dict[str, Tensor] = {}
        tied = {}
        for name, tensor in tensors.items():
            key = tensor.memory_key
            if tensor.spec.nbytes and key in first:
                tied[name] = first[key]
            else:
                first[key] = name
                self._tensors[name] = tensor
        self._slots = slots
        self._manifest = Manifest(
            {name: tensor.spec for name, tensor in self._tensors.items()},
            tied=tied,
            values={name: slot.value for name, slot in slots.items()},
        )
        devices = {t.memory_key[0]: t for t in self._tensors.values() if t.host is None}
        self._devices = list(devices.values())
        stagings = (tensor.staging for tensor in self._tensors.values())
        self._staging = next((each for each in stagings if each), STAGING)

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def staging(self) -> Staging:
        return self._staging

    def host(self, name: str) -> Buffer | None:
        return self._tensors[self._manifest.tied.get(name, name)].host

    def read(self, name: str, box: Box | None = None, *, into: Bytes | None = None) -> Bytes:
        tensor = self._tensors[self._manifest.tied.get(name, name)]
        spec = tensor.spec
        box = Box.whole(spec.shape) if box is None else box
        items, buffer = spec.stored(box), tensor.host
        if buffer is not None and (flat := buffer.flat()) is not None:
            runs = list(items.runs(buffer.shape)) if items.shape != buffer.shape else None
            if runs is None:
                return flat
            if len(runs) == 1:
                start, length = runs[0]
                return flat[start * spec.item_bytes : (start + length) * spec.item_bytes]
        nbytes = spec.box_bytes(box)
        data = np.empty(nbytes, np.uint8) if into is None else into[:nbytes]
        if nbytes:
            tensor.read(items, data)
        return data

    def write(self, name: str, items: Box, data: Bytes) -> None:
        self._tensors[self._manifest.tied.get(name, name)].write(items, data)

    def settle(self) -> None:
        for tensor in self._devices:
            tensor.settle()

    def check_writable(self) -> None:
        """Raise for tensors that cannot be filled: read-only, or one element shown many times."""
        hosts = ((name, tensor.host) for name, tensor in self._tensors.items())
        frozen = [name for name, host in hosts if host and not host.is_writable]
        if frozen:
            raise SpecError(f"{len(frozen)} tensors are read-only memory: {listed(frozen)}")
        hosts = ((name, tensor.host) for name, tensor in self._tensors.items())
        folded = [name for name, host in hosts if host and _is_folded(host)]
        if folded:
            raise SpecError(
                f"{len(folded)} tensors show one element many times (stride 0): {listed(folded)}"
            )

    def finish(self, manifest: Manifest) -> None:
        for tensor in self._tensors.values():
            tensor.touched()
        for name, slot in self._slots.items():
            if name in manifest.values and isinstance(slot.container, (dict, list)):
                slot.container[slot.key] = manifest.values[name]  # type: ignore[call-overload]


def _is_folded(buffer: Buffer) -> bool:
    pairs = zip(buffer.shape, buffer.strides, strict=True)
    return buffer.nbytes > 0 and any(size > 1 and stride == 0 for size, stride in pairs)


_STATES: tuple[Callable[[object], Mapping[str, object] | None], ...] = (
    torch_module.state_of,
    paddle_layer.state_of,
)
_TENSORS: tuple[Callable[[object], Tensor | None], ...] = (
    torch_module.tensor_of,
    paddle_layer.tensor_of,
    numpy_dict.tensor_of,
)


def adapt(thing: object) -> Model:
    """Return the model that `thing` is: a torch module, a Paddle layer, nested dicts of tensors."""
    tensors: dict[str, Tensor] = {}
    slots: dict[str, _Slot] = {}
    for name, leaf, container, key in _walk("", thing, None, None):
        if name in tensors or name in slots:
            raise SpecError(f"two leaves are called {name!r}; join of nested names must be unique")
        if not name or not name.isprintable():
            raise SpecError(f"a leaf is called {name!r}; names are printable and not empty")
        for tensor_of in _TENSORS:
            try:
                tensor = tensor_of(leaf)
            except SpecError as error:
                error.note(f"tensor {name!r}")
                raise
            if tensor is not None:
                tensors[name] = tensor
                break
        else:
            slots[name] = _Slot(container, key, _plain(name, leaf))
    if not tensors:
        raise SpecError(f"{type(thing).__name__} holds no tensors ({len(slots)} other leaves)")
    return Model(tensors, slots)


def _walk(
    name: str, thing: object, container: object, key: object
) -> Iterator[tuple[str, object, object, object]]:
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
        yield name, thing, container, key
        return
    for each, value in items:
        if not isinstance(each, (str, int)):
            raise SpecError(f"key {each!r} under {name!r} is a {type(each).__name__}, not text")
        yield from _walk(f"{name}.{each}" if name else str(each), value, thing, each)


def _plain(name: str, leaf: object) -> Leaf:
    if isinstance(leaf, np.generic):
        leaf = leaf.item()
    if isinstance(leaf, float) and not isfinite(leaf):
        raise SpecError(f"{name!r} is {leaf}; JSON has no such number, store it as text")
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    raise SpecError(
        f"{name!r} is a {type(leaf).__module__}.{type(leaf).__qualname__}: neither a tensor nor "
        f"a plain value"
    )
