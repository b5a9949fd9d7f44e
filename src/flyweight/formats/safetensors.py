"""Safetensors: eight bytes of length, a JSON head, then the tensors without a hole.

A head is believed only after every number in it has been checked against the
others and against the size of the file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec import Struct

from flyweight.errors import FormatError, SpecError, listed
from flyweight.formats.stored import Stored, join_files
from flyweight.ports import FilePlan, Store
from flyweight.spec.box import Box
from flyweight.spec.dtype import BY_SAFETENSORS, DTYPES
from flyweight.spec.manifest import (
    Extent,
    Json,
    Manifest,
    Numbers,
    TensorBox,
    TensorSpec,
    check_name,
)
from flyweight.spec.strict_json import Number, convert, parse_json

MAX_HEAD_BYTES = 100_000_000  # the format's own limit
_HEAD_ALIGN = 4096  # tensors start on a page, which unbuffered reads and mappings like


def looks_like_safetensors(head: bytes) -> bool:
    """True if a file that starts with these nine bytes can only be safetensors."""
    length = int.from_bytes(head[:8], "little")
    return len(head) >= 9 and head[8:9] == b"{" and 2 <= length <= MAX_HEAD_BYTES


@dataclass(frozen=True)
class Head:
    """What the head of one file says, after it was checked."""

    tensors: dict[str, TensorSpec]
    extents: list[Extent]
    nbytes: int
    notes: dict[str, Json]
    """Whatever else its writer noted down."""


def read_head(store: Store, file: str) -> Head:
    """Return the head of one file."""
    size, what = store.size(file), f"{file!r} in {store.place!r}"
    if size < 8:
        raise FormatError(f"{what} has {size} bytes, a safetensors file at least 8")
    length = int.from_bytes(store.read(file, 0, 8), "little")
    if length > min(size - 8, MAX_HEAD_BYTES):
        raise FormatError(
            f"{what} claims a head of {length} bytes; the file has {size}, a head at most "
            f"{MAX_HEAD_BYTES}"
        )
    record = parse_json(store.read(file, 8, length), f"head of {what}")
    if not isinstance(record, dict):
        raise FormatError(f"head of {what} is a {type(record).__name__}, expected an object")
    notes = record.pop("__metadata__", {})
    tensors, extents = {}, []
    for name, entry in record.items():
        spec, begin, end = _entry(check_name(name), entry, what)
        if end - begin != spec.nbytes:
            raise FormatError(
                f"{name!r} of {what} is {spec}, {spec.nbytes} bytes, and has room for {end - begin}"
            )
        tensors[name] = spec
        extents.append(Extent(name, Box.whole(spec.shape), file, 8 + length + begin))
    at = 8 + length
    for extent in sorted(extents, key=lambda each: (each.offset, tensors[each.name].nbytes)):
        if extent.offset != at:
            raise FormatError(f"{extent.name!r} of {what} starts at {extent.offset}, expected {at}")
        at += tensors[extent.name].nbytes
    if at != size:
        cut = [e.name for e in extents if e.offset + tensors[e.name].nbytes > size]
        text = f"; cut short: {listed(cut)}" if cut else ""
        raise FormatError(f"{what} has {size} bytes, its head accounts for {at}{text}")
    return Head(tensors, extents, 8 + length, notes if isinstance(notes, dict) else {})


class _Entry(Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Numbers
    data_offsets: tuple[Number, Number]


def _entry(name: str, value: Json, what: str) -> tuple[TensorSpec, int, int]:
    what = f"{name!r} of {what}"
    entry = convert(value, _Entry, what)
    if entry.dtype not in BY_SAFETENSORS:
        known = ", ".join(BY_SAFETENSORS)
        raise FormatError(f"{what} has dtype {entry.dtype[:80]!r}, known are {known}")
    try:
        return TensorSpec(BY_SAFETENSORS[entry.dtype], entry.shape), *entry.data_offsets
    except SpecError as cause:
        raise FormatError(f"{what}: {cause}") from cause


def open_files(store: Store, files: Iterable[str], *, format: str = "safetensors") -> Stored:
    """Open files that together hold one model; a name in two of them is refused."""
    heads = ((file, read_head(store, file)) for file in files)
    found = ((file, Manifest(head.tensors, extents=head.extents)) for file, head in heads)
    return Stored(join_files(found, store.place), store, format=format)


def file_plan(
    file: str,
    tensor_boxes: Iterable[TensorBox],
    *,
    may_tell_as_bytes: bool = False,
    notes: Mapping[str, str] | None = None,
) -> FilePlan:
    """Lay one file out: widest items first, so that every tensor is aligned to its items.

    A dtype that safetensors lacks is refused, unless somebody else remembers what it was.
    """
    head: dict[str, Json] = {"__metadata__": {"format": "pt", **(notes or {})}}
    at, places = 0, []
    order = sorted(tensor_boxes, key=lambda each: -each.spec.item_bytes)
    boxes = Counter(tensor_box.name for tensor_box in order)
    for tensor_box in order:
        name, spec, box = tensor_box.name, tensor_box.spec, tensor_box.box
        # A file's only box of a tensor has its name, so that others find it by that.
        key = name if boxes[name] == 1 else tensor_box.key
        if key == "__metadata__":
            raise SpecError("a tensor is called '__metadata__', which safetensors keeps for itself")
        if key in head:
            raise SpecError(f"two tensors would be {key!r} in {file!r}")
        dtype, shape = spec.dtype, box.shape
        if dtype.safetensors is None:
            if not may_tell_as_bytes:
                raise SpecError(f"{name!r} is {dtype}, which safetensors has no name for")
            shape = spec.stored(box).shape + ((spec.item_bytes,) if dtype.bits > 8 else ())
            dtype = DTYPES["u8"]
        nbytes = tensor_box.nbytes
        head[key] = {
            "dtype": dtype.safetensors,
            "shape": list(shape),
            "data_offsets": [at, at + nbytes],
        }
        places.append((name, box, at))
        at += nbytes
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(8 + len(text)) % _HEAD_ALIGN)
    if len(text) > MAX_HEAD_BYTES:
        raise SpecError(f"head of {file!r} has {len(text)} bytes, at most {MAX_HEAD_BYTES}")
    start = 8 + len(text)
    return FilePlan(
        file,
        start + at,
        [(0, len(text).to_bytes(8, "little") + text)],
        [Extent(name, box, file, start + offset) for name, box, offset in places],
    )
