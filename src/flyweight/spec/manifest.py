"""Manifests: the names and specs of one version, and where its bytes rest.

A manifest that this module hands out is well-formed: names, numbers and boxes
have been checked against each other, so no reader checks them again. What it
cannot know, whether the files are there and hold these bytes, a format checks.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import NoReturn

from flyweight.errors import FormatError, SpecError, listed
from flyweight.spec.box import Box, block_lengths, blocks, first_meeting, num_blocks
from flyweight.spec.dtype import DType, dtype_named

Leaf = bool | int | float | str | None
Json = dict[str, "Json"] | list["Json"] | Leaf

MAX_NUMBER = 2**63 - 1
MAX_DIMS = 64
MAX_NAME_CHARS = 4096
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 4096, 64 << 20
CHUNK_BYTES = 4 << 20
FORMAT, FORMAT_VERSION = "flyweight-snapshot", 1
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's dtype and whole shape, in elements."""

    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if max(self.shape, default=0) > MAX_NUMBER:
            raise SpecError(f"shape {self.shape} has a dim of more than 2**63-1")
        if min(self.shape, default=0) < 0 or len(self.shape) > MAX_DIMS:
            raise SpecError(f"shape {self.shape} has a negative or more than {MAX_DIMS} dims")
        if self.dtype.bits * prod(self.shape) > 8 * MAX_NUMBER:
            raise SpecError(f"shape {self.shape} of {self.dtype} has more than 2**63 bytes")
        if self.dtype.bits < 8 and (not self.shape or self.shape[-1] * self.dtype.bits % 8):
            raise SpecError(f"rows of {self.dtype} in shape {self.shape} do not fill whole bytes")

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return self.dtype.nbytes(prod(self.shape))

    @property
    def item_bytes(self) -> int:
        """Bytes of the smallest piece that can be addressed: an element, or one packed byte."""
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
        """Return how many items a chunk may have: six-bit elements come four to three bytes."""
        together = 3 if self.dtype.bits == 6 else 1
        return max(together, chunk_bytes // self.item_bytes // together * together)


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a box of a tensor rests: row-major in `file` from byte `offset` on."""

    name: str
    box: Box
    file: str
    offset: int
    checksums: tuple[int, ...] | None = None
    """One per chunk of `TensorSpec.chunks`; None where the format keeps none."""
    digest: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One data file of a snapshot: its exact size, and its head before the first tensor."""

    file: str
    nbytes: int
    head_bytes: int
    head_checksum: int


@dataclass(frozen=True)
class Manifest:
    """What one version holds. Models in memory have no parts and no extents."""

    tensors: Mapping[str, TensorSpec]
    version: int | None = None
    """None where nobody gave one: a model in memory, or somebody else's format."""
    parent: int | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that share another name's memory, to that name."""
    values: Mapping[str, Leaf] = field(default_factory=dict)
    """Leaves that are no tensors, by their full name: steps, rates, strings."""
    writer: Mapping[str, str] = field(default_factory=dict)
    parts: Sequence[Part] = ()
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

    def untied(self) -> Manifest:
        """Return the same manifest with bytes of its own for every name."""
        copies = {name: self.tensors[target] for name, target in self.tied.items()}
        return replace(self, tensors={**self.tensors, **copies}, tied={})


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, the same bytes for the same manifest."""
    part_index = {part.file: index for index, part in enumerate(manifest.parts)}
    shards: dict[str, list[Json]] = {name: [] for name in manifest.tensors}
    for extent in manifest.extents:
        shards[extent.name].append(
            {
                "offset": list(extent.box.offset),
                "shape": list(extent.box.shape),
                "part": part_index[extent.file],
                "at": extent.offset,
                "digest": None if extent.digest is None else f"{extent.digest:016x}",
                "checksums": "".join(f"{each:016x}" for each in extent.checksums or ()),
            }
        )
    record: dict[str, Json] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "version": manifest.version,
        "parent": manifest.parent,
        "writer": dict(manifest.writer),
        "chunk_bytes": manifest.chunk_bytes,
        "parts": [
            {
                "file": part.file,
                "bytes": part.nbytes,
                "head_bytes": part.head_bytes,
                "head_checksum": f"{part.head_checksum:016x}",
            }
            for part in manifest.parts
        ],
        "tensors": {
            name: {"dtype": spec.dtype.name, "shape": list(spec.shape), "shards": shards[name]}
            for name, spec in manifest.tensors.items()
        },
        "tied": dict(manifest.tied),
        "values": dict(manifest.values),
    }
    try:
        text = json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")
    except ValueError as cause:  # NaN, infinity, half a surrogate pair
        raise SpecError(f"a value of the manifest has no place in JSON: {cause}") from cause


def decode_manifest(text: bytes) -> Manifest:
    """Return the manifest that `encode_manifest` wrote; anything else raises FormatError."""
    record = parse_json(text, "manifest")
    top = _fields(
        record,
        "manifest",
        "format format_version version parent writer chunk_bytes parts tensors tied values",
    )
    if (top["format"], top["format_version"]) != (FORMAT, FORMAT_VERSION):
        found = f"{top['format']!r} version {top['format_version']!r}"
        raise FormatError(f"manifest is {found}; this reads {FORMAT!r} version {FORMAT_VERSION}")
    version = _number(top["version"], "version")
    parent = None if top["parent"] is None else _number(top["parent"], "parent")
    if parent is not None and parent >= version:
        raise FormatError(f"manifest of version {version} has parent {parent}; a parent is older")
    chunk_bytes = _number(top["chunk_bytes"], "chunk_bytes")
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise FormatError(
            f"manifest has chunks of {chunk_bytes} bytes, expected {MIN_CHUNK_BYTES} to "
            f"{MAX_CHUNK_BYTES}"
        )
    parts = [_part(each) for each in _list(top["parts"], "parts")]
    if len({part.file for part in parts}) != len(parts):
        raise FormatError(f"manifest lists a part twice: {[part.file for part in parts]}")
    tensors, extents = {}, []
    for name, entry in _dict(top["tensors"], "tensors").items():
        fields = _fields(entry, f"tensor {name!r}", "dtype shape shards")
        tensors[check_name(name)] = spec = _spec(name, fields)
        for shard in _list(fields["shards"], f"shards of {name!r}"):
            extents.append(_extent(name, spec, shard, parts, chunk_bytes))
    writer = _dict(top["writer"], "writer")
    manifest = Manifest(
        tensors=tensors,
        version=version,
        parent=parent,
        tied={
            check_name(k): _text(v, f"tie of {k!r}") for k, v in _dict(top["tied"], "tied").items()
        },
        values={check_name(k): _leaf(k, v) for k, v in _dict(top["values"], "values").items()},
        writer={key: _text(value, f"writer {key!r}") for key, value in writer.items()},
        parts=parts,
        extents=extents,
        chunk_bytes=chunk_bytes,
    )
    _check_names(manifest)
    check_files(manifest)
    check_coverage(manifest)
    return manifest


def check_files(manifest: Manifest) -> None:
    """Raise unless the extents of each part follow its head without a hole or an overlap."""
    by_file = defaultdict(list)
    for extent in manifest.extents:
        spec = manifest.tensors[extent.name]
        end = extent.offset + spec.box_bytes(extent.box)
        by_file[extent.file].append((extent.offset, end, extent.name))
    for part in manifest.parts:
        spans = sorted([(0, part.head_bytes, ""), *by_file[part.file], (part.nbytes,) * 2 + ("",)])
        for (_, end, before), (start, _, after) in pairwise(spans):
            if end != start:
                raise FormatError(
                    f"part {part.file!r} has {'a hole' if start > end else 'an overlap'} between "
                    f"byte {end}, where {before or 'head'!r} ends, and {start}, where "
                    f"{after or 'end'!r} starts"
                )


def check_coverage(manifest: Manifest) -> None:
    """Raise unless the boxes at rest cover every tensor exactly once."""
    boxes: dict[str, list[Box]] = {name: [] for name in manifest.tensors}
    for extent in manifest.extents:
        boxes[extent.name].append(extent.box)
    for name, spec in manifest.tensors.items():
        held, wanted = sum(box.num_elements for box in boxes[name]), prod(spec.shape)
        # Disjoint boxes of the right volume inside the tensor leave no hole.
        if len(boxes[name]) > 1 and (meeting := first_meeting(boxes[name])):
            one, other = meeting
            raise FormatError(
                f"tensor {name!r} holds elements {one.offset}..{one.end} twice: also in "
                f"{other.offset}..{other.end}"
            )
        if held != wanted:
            raise FormatError(f"tensor {name!r} has {held} of its {wanted} elements at rest")


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


def parse_json(text: bytes, what: str) -> Json:
    """Parse strict JSON: UTF-8, no duplicate keys, no NaN, no absurd depth or number."""

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        record = dict(pairs)
        if len(record) != len(pairs):
            twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
            raise FormatError(f"{what} names {listed(twice)} twice")
        return record

    def constant(word: str) -> NoReturn:
        raise FormatError(f"{what} holds {word}, which is not JSON")

    try:
        parsed: Json = json.loads(
            text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant
        )
    except (ValueError, RecursionError) as cause:
        raise FormatError(f"{what} of {len(text)} bytes is not JSON: {cause}") from cause
    return parsed


def _fields(value: Json, what: str, names: str) -> dict[str, Json]:
    record = _dict(value, what)
    if set(record) != set(names.split()):
        raise FormatError(f"{what} has fields {sorted(record)}, expected {sorted(names.split())}")
    return record


def _dict(value: Json, what: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise FormatError(f"{what} is a {type(value).__name__}, expected an object")
    return value


def _list(value: Json, what: str) -> list[Json]:
    if not isinstance(value, list):
        raise FormatError(f"{what} is a {type(value).__name__}, expected a list")
    return value


def _text(value: Json, what: str) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{what} is {value!r}, expected text")
    return value


def _number(value: Json, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise FormatError(f"{what} is {str(value)[:80]}, expected a whole number from 0 to 2**63-1")
    return value


def _hex(value: Json, what: str) -> int:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{16}", value):
        raise FormatError(f"{what} is {str(value)[:80]!r}, expected 16 hexadecimal digits")
    return int(value, 16)


def _leaf(name: str, value: Json) -> Leaf:
    if isinstance(value, (dict, list)):
        raise FormatError(f"value {name!r} is a {type(value).__name__}, expected a plain leaf")
    return value


def _numbers(value: Json, what: str) -> tuple[int, ...]:
    numbers = tuple(_number(each, what) for each in _list(value, what))
    if len(numbers) > MAX_DIMS:
        raise FormatError(f"{what} has {len(numbers)} dims, at most {MAX_DIMS}")
    return numbers


def _spec(name: str, fields: dict[str, Json]) -> TensorSpec:
    try:
        return TensorSpec(
            dtype_named(fields["dtype"]), _numbers(fields["shape"], f"shape of {name!r}")
        )
    except SpecError as cause:
        raise FormatError(f"tensor {name!r}: {cause}") from cause


def _part(value: Json) -> Part:
    fields = _fields(value, "part", "file bytes head_bytes head_checksum")
    part = Part(
        check_file_name(fields["file"]),
        _number(fields["bytes"], "part bytes"),
        _number(fields["head_bytes"], "part head_bytes"),
        _hex(fields["head_checksum"], "part head_checksum"),
    )
    if part.head_bytes > part.nbytes:
        raise FormatError(
            f"part {part.file!r} has {part.nbytes} bytes and a head of {part.head_bytes}"
        )
    return part


def _extent(
    name: str, spec: TensorSpec, value: Json, parts: Sequence[Part], chunk_bytes: int
) -> Extent:
    what = f"shard of {name!r}"
    fields = _fields(value, what, "offset shape part at digest checksums")
    try:
        box = Box(_numbers(fields["offset"], what), _numbers(fields["shape"], what))
        is_whole = box.shape == spec.shape and not any(box.offset)
        if not is_whole and (
            len(box.shape) != len(spec.shape) or not Box.whole(spec.shape).contains(box)
        ):
            raise SpecError(f"box {box.offset}..{box.end} leaves a tensor of {spec.shape}")
        nbytes = spec.box_bytes(box)
    except SpecError as cause:
        raise FormatError(f"{what}: {cause}") from cause
    index, at = _number(fields["part"], what), _number(fields["at"], what)
    if index >= len(parts):
        raise FormatError(f"{what} is in part {index} of {len(parts)}")
    if at + nbytes > parts[index].nbytes:
        raise FormatError(
            f"{what} ends at byte {at + nbytes} of part {parts[index].file!r}, which has "
            f"{parts[index].nbytes}"
        )
    text = _text(fields["checksums"], what)
    expected = spec.num_chunks(box, chunk_bytes)
    if len(text) != 16 * expected or not re.fullmatch("[0-9a-f]*", text):
        raise FormatError(f"{what} has {len(text)} checksum digits, expected {16 * expected}")
    return Extent(
        name,
        box,
        parts[index].file,
        at,
        tuple(int(text[i : i + 16], 16) for i in range(0, len(text), 16)),
        None if fields["digest"] is None else _hex(fields["digest"], f"digest of {name!r}"),
    )


def _check_names(manifest: Manifest) -> None:
    doubled = [name for name in manifest.tied if name in manifest.tensors]
    doubled += [
        name for name in manifest.values if name in manifest.tensors or name in manifest.tied
    ]
    if doubled:
        raise FormatError(f"manifest uses {len(doubled)} names twice: {listed(doubled)}")
    lost = [name for name, target in manifest.tied.items() if target not in manifest.tensors]
    if lost:
        raise FormatError(
            f"{len(lost)} names are tied to tensors that are not there: {listed(lost)}"
        )
