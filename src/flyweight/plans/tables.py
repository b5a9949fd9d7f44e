"""Tables of a plan as messages carry them: many thousand rows, packed as columns of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from flyweight.errors import SpecError
from flyweight.plans.copy_table import BoxTable, Integers, kinds_of
from flyweight.spec.dtype import dtype_named
from flyweight.spec.manifest import MAX_DIMS, MAX_NAME_CHARS, TensorSpec


class Table(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Columns of 64-bit little-endian integers: many thousand rows need no object each."""


class Kind(Table, frozen=True):
    """What many tensors have in common."""

    dtype: str
    shape: tuple[int, ...]


class Tensors(Table, frozen=True):
    """Whole tensors, in order: a model has very many names, and few kinds of tensors."""

    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    kind: bytes
    """The index of the kind of each tensor."""

    @classmethod
    def of(cls, tensors: Mapping[str, TensorSpec]) -> Tensors:
        kinds, kind = kinds_of(tensors.values())
        return cls(tuple(tensors), tuple(Kind(e.dtype.name, e.shape) for e in kinds), packed(kind))

    def specs(self) -> dict[str, TensorSpec]:
        """Return the spec of each tensor by name; raise SpecError for absurd ones."""
        kind = numbers(self.kind)
        if len(kind) != len(self.names):
            raise SpecError(f"{len(self.names)} tensors have {len(kind)} kinds")
        if len(kind) and not 0 <= kind.min() <= kind.max() < len(self.kinds):
            raise SpecError(f"a tensor is of kind {kind.max()} of {len(self.kinds)}")
        for name in self.names:
            if len(name) > MAX_NAME_CHARS or not name.isprintable():
                raise SpecError(f"name {name[:80]!r} has {len(name)} characters")
        kinds = [TensorSpec(dtype_named(each.dtype), each.shape) for each in self.kinds]
        found = dict(zip(self.names, map(kinds.__getitem__, kind.tolist()), strict=True))
        if len(found) != len(self.names):
            raise SpecError(f"{len(self.names)} tensors have {len(found)} names")
        return found


class Boxes(Table, frozen=True):
    """Boxes of tensors, in items."""

    num_dims: int
    tensor: bytes
    """The index of each box's tensor in the list of tensors."""
    offset: bytes
    shape: bytes
    """`num_dims` numbers for each box; boxes with fewer dims have leading dims of size 1."""

    @classmethod
    def of(cls, table: BoxTable) -> Boxes:
        return cls(table.num_dims, packed(table.tensor), packed(table.offset), packed(table.shape))

    def table(self, whole: BoxTable) -> BoxTable:
        """Return the boxes; raise SpecError unless each lies in its tensor.

        whole: one box for each tensor, which is all of it.
        """
        tensor, offset = numbers(self.tensor), numbers(self.offset, self.num_dims)
        shape = numbers(self.shape, self.num_dims)
        if not len(tensor) == len(offset) == len(shape):
            raise SpecError(f"{len(tensor)} boxes have {len(offset)} offsets, {len(shape)} shapes")
        if len(tensor) and not 0 <= tensor.min() <= tensor.max() < len(whole):
            raise SpecError(f"a box is of tensor {tensor.max()} of {len(whole)}")
        if self.num_dims > whole.num_dims:  # every other table would become as wide
            raise SpecError(f"boxes have {self.num_dims} dims, the tensors {whole.num_dims}")
        found = BoxTable(tensor, offset, shape).widened(whole.num_dims)
        is_outside = (found.offset < 0) | (found.shape < 0) | (found.shape > whole.shape[tensor])
        is_outside |= found.offset > whole.shape[tensor] - found.shape
        if is_outside.any():
            row = int(np.flatnonzero(is_outside.any(axis=1))[0])
            raise SpecError(
                f"box {found.shape[row].tolist()} at {found.offset[row].tolist()} is not inside of "
                f"tensor {tensor[row]}, {whole.shape[tensor[row]].tolist()}"
            )
        return found


def packed(table: Integers | Sequence[int]) -> bytes:
    """Return numbers as bytes of a message."""
    return np.ascontiguousarray(table, "<i8").tobytes()


def numbers(data: bytes, num_columns: int | None = None) -> Integers:
    """Return the numbers of a message, in rows of `num_columns` if that is given."""
    columns = 1 if num_columns is None else num_columns
    if not 1 <= columns <= MAX_DIMS or len(data) % (8 * columns):
        raise SpecError(f"{len(data)} bytes are not rows of {columns} numbers")
    found: Integers = np.frombuffer(data, "<i8").astype(np.int64, copy=False)
    return found if num_columns is None else found.reshape(-1, columns)
