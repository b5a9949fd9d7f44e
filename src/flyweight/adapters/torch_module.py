"""Torch modules and tensors: on the CPU by address, on a GPU through pinned staging.

This does not import torch to move tensors: a caller that has one has imported it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import prod
from operator import attrgetter, eq
from typing import Any, TypeGuard, cast

from flyweight.adapters.sharded import Cut, cut_blocks
from flyweight.adapters.tensor import Tensor
from flyweight.errors import SpecError
from flyweight.memory import Buffer, Bytes, Staging
from flyweight.spec.box import Box
from flyweight.spec.dtype import BY_TORCH, DType
from flyweight.spec.manifest import TensorSpec

_GROUP = 512
_SHAPE_AND_DTYPE = attrgetter("shape", "dtype")
_PINNED_SHELF_BYTES = 128 << 20  # pinning is slow, and pinned memory is scarce: keep a little


def _torch() -> Any:
    """Return torch, or None if it is not imported, or still being imported by another thread."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "Tensor") and hasattr(torch, "nn") else None


def is_module(thing: object) -> TypeGuard[Any]:
    torch = _torch()
    return torch is not None and isinstance(thing, torch.nn.Module)


PARTS = attrgetter("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Returns a module's dicts of parameters, buffers and modules, and the buffers it does not save."""


def state_of(module: Any) -> Mapping[str, object]:
    """Return a module's own parameters and persistent buffers; of FSDP2 the shards."""
    reshard(module)  # first: a tied tensor may be read before the hook that replaces it
    state: dict[str, object] = module.state_dict(keep_vars=True)
    extra = [name for name in state if name.endswith("_extra_state")]
    if extra:
        raise SpecError(
            f"module keeps {len(extra)} extra states, which are not tensors but its own code's "
            f"({extra[0]!r}); pass a dict of its tensors"
        )
    return state


def has_fsdp() -> bool:
    """True if a module may be cut by FSDP2: something has imported it."""
    return hasattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule")


def reshard(module: Any) -> None:
    """Put FSDP2's shards back into a module, where whole tensors are since a forward.

    Those are rounded to the dtype of the forward, and stale after a step of the optimizer.
    """
    if has_fsdp() and any(
        isinstance(each, sys.modules["torch.distributed.fsdp"].FSDPModule)
        or "_is_fsdp_managed_module" in each.__dict__  # by an FSDP module around this one
        for each in module.modules()
    ):
        # By FSDP2's hooks: `FSDPModule.reshard` does nothing if a part of its group is amid a
        # forward. Nothing is gathered.
        module.state_dict(keep_vars=True)


def is_tensor(thing: object) -> TypeGuard[Any]:
    torch = _torch()
    return torch is not None and isinstance(thing, torch.Tensor)


def tensors_among(things: Iterable[object]) -> list[Any]:
    """Return those that are torch's tensors."""
    torch = _torch()
    return [] if torch is None else [each for each in things if isinstance(each, torch.Tensor)]


def plain_types() -> tuple[type, ...]:
    """Return the types of tensors that are neither cut nor wrapped."""
    torch = _torch()
    return () if torch is None else (torch.Tensor, torch.nn.Parameter)


def tensor_of(leaf: object) -> Tensor | None:
    if not is_tensor(leaf):
        return None
    if type(leaf) not in plain_types():
        _check_type(leaf)
    return plain_tensor(leaf)


def plain_tensor(tensor: Any) -> Tensor:
    """Return a tensor that has memory of its own; each call of torch counts, there may be many."""
    if tensor.is_nested:
        raise SpecError("nested tensor: its pieces have shapes of their own")
    if tensor.is_conj() or tensor.is_neg():
        raise SpecError("lazily conjugated or negated tensor; call .resolve_conj().resolve_neg()")
    spec, items, strides, width, device = _kind(
        tensor.dtype, tensor.layout, tensor.device, tensor.shape, tensor.stride()
    )
    address = tensor.data_ptr()
    if not address and spec.nbytes:
        raise SpecError("tensor whose memory was freed: its storage has no bytes")
    # Not the tensor itself: it drops its memory when its `data` is set to another tensor.
    owner, number = tensor.detach(), None if device is None else tensor.get_device()
    return Tensor(spec, Buffer(address, items, strides, width, owner, True, number), device)


def _check_type(tensor: Any) -> None:
    """Raise SpecError for a subclass of tensor that has no memory of its own."""
    torch = _torch()
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise SpecError("lazy parameter has no shape yet; run the module once first")
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise SpecError(f"{type(tensor).__name__} is not a plain tensor; pass its local tensor")


@dataclass(frozen=True)
class TorchDevice:
    """A device that the CPU cannot reach. Copies are queued on the current stream."""

    device: Any

    @cached_property
    def name(self) -> str:
        return str(self.device)

    @property
    def staging(self) -> Staging | None:
        return _pinned_staging()

    def read(self, block: Buffer, into: Bytes, *, should_wait: bool) -> None:
        there, here = _pair(block, into)
        here.copy_(there, non_blocking=self._is_cuda)
        if should_wait:
            self.settle()

    def write(self, block: Buffer, data: Bytes) -> None:
        there, here = _pair(block, data)
        there.copy_(here, non_blocking=self._is_cuda)

    def settle(self) -> None:
        torch = _torch()
        if self._is_cuda:
            # An event, not the stream: other threads keep queueing on that.
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(self.device))
            event.synchronize()

    @property
    def _is_cuda(self) -> bool:
        """True if copies are asynchronous, and an event can wait for them."""
        return bool(self.device.type == "cuda")


_Kind = tuple[TensorSpec, tuple[int, ...], tuple[int, ...], int, TorchDevice | None]


@lru_cache(maxsize=1024)  # models have many tensors, and few kinds of them
def _kind(dtype: Any, layout: Any, device: Any, shape: Any, strides: tuple[int, ...]) -> _Kind:
    """Return a tensor's spec, its shape in items with their strides and width in bytes, its device.

    The device is None if the CPU can reach the memory.
    """
    found = BY_TORCH.get(str(dtype).removeprefix("torch."))
    if layout != _torch().strided or found is None:
        raise SpecError(f"torch tensor of layout {layout} and dtype {dtype}")
    if device.type == "meta":
        raise SpecError("tensor on the meta device has no memory; call .to_empty(device=...)")
    items = tuple(shape)
    spec = TensorSpec(found, _elements(found, items))
    strides = tuple([spec.item_bytes * stride for stride in strides])
    return spec, items, strides, spec.item_bytes, _device(device)


def _elements(dtype: DType, items: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape in elements: torch counts packed bytes."""
    if dtype.bits >= 8:
        return items
    if not items:
        raise SpecError(f"scalar of packed dtype {dtype}")
    return (*items[:-1], items[-1] * 8 // dtype.bits)


@cache
def _device(device: Any) -> TorchDevice | None:
    return None if device.type == "cpu" else TorchDevice(device)


def empty(spec: TensorSpec, device: str) -> Any:
    """Return a new tensor with any content. Imports torch."""
    torch = importlib.import_module("torch")
    dtype = getattr(torch, spec.dtype.torch or "", None)
    if dtype is None:
        raise SpecError(f"torch has no dtype for {spec.dtype}")
    items = spec.stored(Box.whole(spec.shape))  # torch counts packed bytes, we count elements
    return torch.empty(items.shape, dtype=dtype, device=device)


def cut_of(leaf: object) -> Cut | None:
    """Return the boxes of the whole that a DTensor's local tensor holds, for FSDP2 and TP."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None or not isinstance(leaf, kind):
        return None
    tensor: Any = leaf
    local = tensor.to_local() if not tensor.requires_grad else tensor.detach().to_local()
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return Cut(local, shape, ())
    cuts: list[tuple[int, int, int, int]] = []
    after: list[tuple[int, int, int, int]] = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise SpecError(
                f"DTensor with placements {tensor.placements} over {mesh.size(axis)} ranks: its "
                f"values are not summed yet; call .redistribute(placements=...) with Replicate() "
                f"or Shard(dim) in place of {placement}"
            )
        if not hasattr(placement, "dim"):
            continue
        dim, turns = placement.dim, int(getattr(placement, "split_factor", 1))
        later = [
            (mesh.size(other), int(getattr(each, "split_factor", 1)))
            for other, each in enumerate(tensor.placements)
            if other > axis and getattr(each, "dim", None) == dim
        ]
        if any(theirs > 1 for _, theirs in later):
            raise SpecError(
                f"DTensor with placements {tensor.placements}: of a strided shard after another "
                f"cut of its dim torch does not say what it holds"
            )
        if turns > 1 and turns == prod(size for size, _ in later):
            # FSDP over TP: listed first, but cut last, from what TP has cut already.
            after.insert(0, (dim, mesh.size(axis), coordinate[axis], 1))
        else:
            cuts.append((dim, mesh.size(axis), coordinate[axis], turns))
    return Cut(local, shape, cut_blocks(shape, cuts + after))


def _pair(block: Buffer, data: Bytes) -> tuple[Any, Any]:
    """Return a block of a tensor on its device, and the bytes on the host in the same shape."""
    tensor, here, width = cast(Any, block.owner), _torch().from_numpy(data), block.item_bytes
    start = tensor.storage_offset() + (block.address - tensor.data_ptr()) // width
    if block.is_contiguous:  # one plain copy of bytes
        return tensor.as_strided((len(data) // width,), (1,), start).view(here.dtype), here
    strides = [stride // width for stride in block.strides]
    there = tensor.as_strided(block.shape, strides, start)
    return there, here.view(tensor.dtype).reshape(block.shape)


class PlainTensors:
    """Where plain tensors lie, very many of them, to be compared in every round.

    Goes through them in groups that stay in a core's cache from one question to the next.
    """

    def __init__(self, tensors: Iterable[Any]) -> None:
        found = list({id(each): each for each in tensors}.values())
        self._groups = [tuple(found[n : n + _GROUP]) for n in range(0, len(found), _GROUP)]
        self._addresses = list(map(_addresses, self._groups))
        kinds: dict[object, object] = {}  # few: no need to keep one for each tensor
        self._layouts = [
            [kinds.setdefault(each, each) for each in _layouts(group)] for group in self._groups
        ]
        self._guards: list[Callable[..., bool] | None] = [None] * len(self._groups)
        self._num_checks = 0

    @property
    def places(self) -> object:
        """Equal for tensors with the same elements at the same addresses."""
        return self._addresses, self._layouts

    def have_same_addresses(self) -> bool:
        return all(map(eq, map(_addresses, self._groups), self._addresses))

    def have_same_layouts(self) -> bool:
        """True if all tensors still have their shapes, strides and dtypes."""
        for n, (group, guard) in enumerate(zip(self._groups, self._guards, strict=True)):
            if guard is None or not guard(*group):
                if _layouts(group) != self._layouts[n]:
                    return False
                if self._num_checks > 1:  # not while a replica joins
                    self._guards[n] = _guard(group)
        self._num_checks += 1
        return True


def _addresses(tensors: Sequence[Any]) -> list[int]:
    return list(map(_torch().Tensor.data_ptr, tensors))


def _layouts(tensors: Sequence[Any]) -> list[object]:
    kind = _torch().Tensor
    return [*map(kind.stride, tensors), *map(_SHAPE_AND_DTYPE, tensors)]


def _guard(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """Return a function that is True only for these tensors with their layouts; None without one.

    It is False also for what does not matter, as a new `requires_grad`.
    """
    guards = _tensor_guards()
    if guards is None:
        return None
    sizes = [_as_list(each.shape) for each in tensors]
    strides = [_as_list(each.stride()) for each in tensors]
    check: Callable[..., bool] = guards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    return check


@lru_cache(maxsize=1024)
def _as_list(sizes: tuple[int, ...]) -> list[int]:
    """Return one list for all tensors of a shape: the collector of cycles would visit each."""
    return list(sizes)


@cache
def _tensor_guards() -> Any:
    """Return torch's own class for such functions, if it sees every change that matters.

    The class is torch.compile's. It is several times as fast as questions to each tensor.
    """
    torch = _torch()
    try:
        guards = torch._C._dynamo.guards.TensorGuards
        for change in ("t", "flatten", "int", "clone"):
            tensor = torch.zeros(2, 2)
            check = guards(tensor, dynamic_dims_sizes=[[2, 2]], dynamic_dims_strides=[[2, 1]]).check
            if not check(tensor):
                return None
            tensor.data = getattr(tensor, change)()
            if check(tensor) != (change == "clone"):
                return None
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return guards


def touched(tensors: Sequence[object]) -> None:
    """Tell autograd about a write, so that it notices if it saved an old value."""
    if not tensors:
        return
    increment = _torch().autograd.graph.increment_version
    try:
        increment(tensors)
    except TypeError:  # torch before 2.6 takes them one by one
        for tensor in tensors:
            increment(tensor)


@cache
def _pinned_staging() -> Staging:
    torch = _torch()

    def allocate(nbytes: int) -> Bytes:
        # torch's pinned memory starts on a page, which unbuffered reads need.
        data: Bytes = torch.empty(
            nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
        ).numpy()
        return data

    return Staging(shelf_bytes=_PINNED_SHELF_BYTES, allocate=allocate)


def gpus() -> list[str]:
    """Return the names of the GPUs that torch sees. Imports torch, unlike the rest of the file."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
