"""Manifests: the names and specs of one version, and where its bytes are stored.

`manifest_json.py` calls the `check_*` functions on everything it reads, so no reader has to check
again. Whether the files exist and hold these bytes is checked by a format.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Annotated

import msgspec

from flyweight.errors import FormatError, SpecError, listed
from flyweight.spec.box import Box, block_lengths, blocks, num_blocks, overlapping_pair
from flyweight.spec.dtype import DType
from flyweight.spec.strict_json import MAX_NUMBER, Hash, Number
from flyweight.spec.strict_json import Json as Json  # noqa: PLC0414
from flyweight.spec.strict_json import Leaf as Leaf  # noqa: PLC0414

MAX_DIMS = 64
Numbers = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_DIMS)]
"""A shape or an offset in a file."""
MAX_NAME_CHARS = 4096
CHUNK_BYTES = 4 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's dtype and whole shape, in elements."""

    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_DIMS:
            raise SpecError(f"a shape has {len(self.shape)} dims, at most {MAX_DIMS}")
        most = max(max(self.shape, default=0), self.dtype.bits * prod(self.shape) // 8)
        if most > MAX_NUMBER or min(self.shape, default=0) < 0:
            raise SpecError(
                f"shape {self.shape} of {self.dtype} has a dim outside of 0..2**63-1, or more than "
                f"2**63 bytes"
            )
        if self.dtype.bits < 8 and (not self.shape or self.shape[-1] * self.dtype.bits % 8):
            raise SpecError(f"rows of {self.dtype} in shape {self.shape} do not fill whole bytes")

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(prod(self.shape))

    @property
    def item_bytes(self) -> int:
        """Bytes of the smallest addressable item: an element, or one byte of packed elements."""
        return max(self.dtype.bits // 8, 1)

    def stored(self, box: Box) -> Box:
        """Return `box` counted in addressable items; differs only for dtypes below a byte."""
        if self.dtype.bits >= 8:
            return box
        lo, length = self.dtype.bits * box.offset[-1], self.dtype.bits * box.shape[-1]
        if lo % 8 or length % 8:
            raise SpecError(f"box {box.offset}..{box.end} cuts {self.dtype} inside a byte")
        return Box((*box.offset[:-1], lo // 8), (*box.shape[:-1], length // 8))

    def elements(self, items: Box) -> Box:
        """Return a box of items counted in elements again; the inverse of `stored`."""
        if self.dtype.bits >= 8:
            return items
        lo, length = 8 * items.offset[-1] // self.dtype.bits, 8 * items.shape[-1] // self.dtype.bits
        return Box((*items.offset[:-1], lo), (*items.shape[:-1], length))

    def box_bytes(self, box: Box) -> int:
        return self.stored(box).num_elements * self.item_bytes

    def chunks(self, box: Box, chunk_bytes: int) -> Iterator[Box]:
        """Cut `box` into the items of each checksummed chunk, offsets counted from its corner."""
        return blocks(self.stored(box).shape, self._chunk_items(chunk_bytes))

    def chunk_sizes(self, box: Box, chunk_bytes: int) -> Iterator[int]:
        """Yield the bytes of each chunk, without making their boxes."""
        for length in block_lengths(self.stored(box).shape, self._chunk_items(chunk_bytes)):
            yield length * self.item_bytes

    def num_chunks(self, box: Box, chunk_bytes: int) -> int:
        return num_blocks(self.stored(box).shape, self._chunk_items(chunk_bytes))

    def _chunk_items(self, chunk_bytes: int) -> int:
        """Return how many items a chunk has at most: four six-bit elements share three bytes."""
        together = 3 if self.dtype.bits == 6 else 1
        return max(together, chunk_bytes // self.item_bytes // together * together)


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a box of a tensor is stored: row-major in `file` from byte `offset` on."""

    name: str
    box: Box
    file: str
    offset: int
    checksums: tuple[int, ...] | None = None
    """One per chunk of `TensorSpec.chunks`; None where the format keeps none."""
    digest: int | None = None


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A box of a tensor that is to be written to a file."""

    name: str
    spec: TensorSpec
    box: Box

    @property
    def is_whole(self) -> bool:
        return self.box.shape == self.spec.shape

    @property
    def nbytes(self) -> int:
        return self.spec.box_bytes(self.box)

    @property
    def key(self) -> str:
        """Its name in a file: the tensor's, with the box's offset unless it is the whole tensor."""
        return self.name if self.is_whole else f"{self.name}@{','.join(map(str, self.box.offset))}"


class SnapshotFile(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"nbytes": "bytes"}
):
    """One data file of a snapshot: its exact size, and its head before the first tensor."""

    file: str
    nbytes: Number
    head_bytes: Number
    head_checksum: Hash

    def __post_init__(self) -> None:
        check_file_name(self.file)
        if self.head_bytes > self.nbytes:
            raise FormatError(
                f"part {self.file!r} has {self.nbytes} bytes and a head of {self.head_bytes}"
            )


@dataclass(frozen=True)
class Manifest:
    """What one version holds. The manifest of a model in memory has no files and no extents."""

    tensors: Mapping[str, TensorSpec]
    version: int | None = None
    """None for a model in memory and for formats without versions."""
    parent: int | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    """Maps each name that shares another tensor's memory to that tensor's name."""
    values: Mapping[str, Leaf] = field(default_factory=dict)
    """Leaves that are not tensors, by their full name: steps, rates, strings."""
    writer: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[SnapshotFile] = ()
    extents: Sequence[Extent] = ()
    chunk_bytes: int = CHUNK_BYTES

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors.values())

    def spec(self, name: str) -> TensorSpec:
        """Return the spec of a tensor or of a name tied to one."""
        return self.tensors[self.tied.get(name, name)]

    @property
    def names(self) -> list[str]:
        return [*self.tensors, *self.tied]

    def tensor_boxes(self) -> list[TensorBox]:
        """Return every tensor, whole."""
        return [TensorBox(name, spec, Box.whole(spec.shape)) for name, spec in self.tensors.items()]

    def untied(self) -> Manifest:
        """Return the same manifest with bytes of its own for every name."""
        copies = {name: self.tensors[target] for name, target in self.tied.items()}
        return replace(self, tensors={**self.tensors, **copies}, tied={})


def check_files(manifest: Manifest) -> None:
    """Raise unless the extents of each part follow its head without a gap or an overlap."""
    by_file = defaultdict(list)
    for extent in manifest.extents:
        spec = manifest.tensors[extent.name]
        end = extent.offset + spec.box_bytes(extent.box)
        by_file[extent.file].append((extent.offset, end, extent.name))
    for part in manifest.files:
        spans = sorted([(0, part.head_bytes, ""), *by_file[part.file], (part.nbytes,) * 2 + ("",)])
        for (_, end, before), (start, _, after) in pairwise(spans):
            if end != start:
                raise FormatError(
                    f"part {part.file!r} has {'a gap' if start > end else 'an overlap'} between "
                    f"byte {end}, where {before or 'head'!r} ends, and {start}, where "
                    f"{after or 'end'!r} starts"
                )


def check_coverage(manifest: Manifest) -> None:
    """Raise unless the stored boxes cover every tensor exactly once."""
    boxes: dict[str, list[Box]] = {name: [] for name in manifest.tensors}
    for extent in manifest.extents:
        boxes[extent.name].append(extent.box)
    for name, spec in manifest.tensors.items():
        held, wanted = sum(box.num_elements for box in boxes[name]), prod(spec.shape)
        # Disjoint boxes of the right volume inside the tensor leave no gap.
        if len(boxes[name]) > 1 and (pair := overlapping_pair(boxes[name])):
            one, other = pair
            raise FormatError(
                f"tensor {name!r} holds elements {one.offset}..{one.end} twice: also in "
                f"{other.offset}..{other.end}"
            )
        if held != wanted:
            raise FormatError(f"tensor {name!r} has {held} of its {wanted} elements stored")


def check_leaf(name: str, value: Leaf) -> Leaf:
    """Return a value, after a check that a manifest can hold it."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise SpecError(f"{name!r} is a number of {value.bit_length()} bits, at most 63")
    if isinstance(value, str) and value != value.encode("utf-8", "ignore").decode():
        raise SpecError(f"{name!r} is text that UTF-8 cannot hold: {value[:80]!r}")
    return value


def is_same_leaf(one: Leaf, other: Leaf) -> bool:
    """True if two values have one type and one text: 1 is not True, and NaN equals NaN."""
    return type(one) is type(other) and repr(one) == repr(other)


def check_name(name: str) -> str:
    if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise FormatError(
            f"tensor name {name[:80]!r} of {len(name)} characters; 1 to {MAX_NAME_CHARS}, printable"
        )
    return name


def check_file_name(name: object) -> str:
    """Return a plain base name; a path, a hidden file or an empty name raises FormatError."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise FormatError(f"file name {name!r} is not a plain name inside the directory")
    return name


def check_names(manifest: Manifest) -> None:
    doubled = [name for name in manifest.tied if name in manifest.tensors]
    doubled += [
        name for name in manifest.values if name in manifest.tensors or name in manifest.tied
    ]
    if doubled:
        raise FormatError(f"manifest uses {len(doubled)} names twice: {listed(doubled)}")
    lost = [name for name, target in manifest.tied.items() if target not in manifest.tensors]
    if lost:
        raise FormatError(
            f"{len(lost)} names are tied to tensors that do not exist: {listed(lost)}"
        )
