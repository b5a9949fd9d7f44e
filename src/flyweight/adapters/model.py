"""A model in memory, whatever it is made of: modules, layers, dicts and lists of tensors.

`adapt` walks it once and keeps, per full name, where the elements lie. The model's own
tensors are never replaced, so optimizers and engines that hold them keep holding them.
Two names for the same elements are one tensor and a tie; a partial overlap can be saved,
and is refused as a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

import numpy as np

from flyweight.adapters import numpy_dict, paddle_layer, torch_module
from flyweight.errors import SpecError, listed
from flyweight.memory import STAGING, Buffer, Bytes, Staging, bytes_for, first_overlap
from flyweight.spec.box import Box
from flyweight.spec.manifest import MAX_NAME_CHARS, Leaf, Manifest, TensorSpec

MAX_NESTING = 64


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
        data = bytes_for(spec.box_bytes(box), into)
        if len(data):
            tensor.read(items, data)
        return data

    def write(self, name: str, items: Box, data: Bytes) -> None:
        self._tensors[self._manifest.tied.get(name, name)].write(items, data)

    def settle(self) -> None:
        for tensor in self._devices:
            tensor.settle()

    def check_writable(self) -> None:
        """Raise for what cannot be filled: frozen memory, overlapping tensors, tuples of values."""
        hosts = {name: host for name, t in self._tensors.items() if (host := t.host) is not None}
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
        fixed = [name for name, slot in self._slots.items() if not _is_settable(slot)]
        if fixed:
            raise SpecError(
                f"{len(fixed)} values hang in containers that cannot be changed, such as tuples: "
                f"{listed(fixed)}"
            )

    def touched(self) -> None:
        """Tell the frameworks that the tensors were written."""
        for tensor in self._tensors.values():
            tensor.touched()

    def finish(self, manifest: Manifest) -> None:
        for name, slot in self._slots.items():
            if name in manifest.values:
                slot.container[slot.key] = manifest.values[name]  # type: ignore[index]


def _is_settable(slot: _Slot) -> bool:
    return isinstance(slot.container, (MutableMapping, MutableSequence))


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
        if leaf is thing:
            raise SpecError(f"{type(thing).__name__} is no model: not a module, a layer or a dict")
        if name in tensors or name in slots:
            raise SpecError(f"two leaves are called {name!r}; join of nested names must be unique")
        if not name or not name.isprintable() or len(name) > MAX_NAME_CHARS:
            raise SpecError(
                f"a leaf is called {name[:80]!r} ({len(name)} characters); names are printable and "
                f"not empty, of at most {MAX_NAME_CHARS} characters"
            )
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
    name: str, thing: object, container: object, key: object, depth: int = 0
) -> Iterator[tuple[str, object, object, object]]:
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
        yield name, thing, container, key
        return
    for each, value in items:
        if not isinstance(each, (str, int)):
            raise SpecError(f"key {each!r} under {name!r} is a {type(each).__name__}, not text")
        yield from _walk(f"{name}.{each}" if name else str(each), value, thing, each, depth + 1)


def _plain(name: str, leaf: object) -> Leaf:
    if isinstance(leaf, np.generic):
        leaf = leaf.item()
    if isinstance(leaf, int) and abs(leaf) >= 2**63:
        raise SpecError(f"{name!r} is a number of {leaf.bit_length()} bits, at most 63")
    if isinstance(leaf, float) and not isfinite(leaf):
        raise SpecError(f"{name!r} is {leaf}; JSON has no such number, store it as text")
    if isinstance(leaf, str) and leaf != leaf.encode("utf-8", "ignore").decode():
        raise SpecError(f"{name!r} is text that UTF-8 cannot hold: {leaf[:80]!r}")
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    raise SpecError(
        f"{name!r} is a {type(leaf).__module__}.{type(leaf).__qualname__}: neither a tensor nor "
        f"a plain value"
    )
