"""Manifests as JSON, both ways. What is not well-formed is refused here.

A manifest that comes out of `decode_manifest` has had its names, numbers and boxes checked
against each other, so that no reader has to do it again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from math import isfinite
from typing import NoReturn

from flyweight.errors import FormatError, SpecError, listed
from flyweight.spec.box import Box
from flyweight.spec.dtype import dtype_named
from flyweight.spec.manifest import (
    MAX_DIMS,
    MAX_NUMBER,
    Extent,
    Json,
    Leaf,
    Manifest,
    Part,
    TensorSpec,
    check_coverage,
    check_file_name,
    check_files,
    check_name,
    check_names,
)

FORMAT, FORMAT_VERSION = "flyweight-snapshot", 1
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 4096, 64 << 20


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
        "values": {name: encode_leaf(value) for name, value in manifest.values.items()},
    }
    try:
        text = json.dumps(record, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")
    except ValueError as cause:  # NaN, infinity, half a surrogate pair
        raise SpecError(f"a value of the manifest has no place in JSON: {cause}") from cause


def decode_manifest(text: bytes) -> Manifest:
    """Return the manifest that `encode_manifest` wrote; anything else raises FormatError."""
    manifest = decode_share(text)
    check_coverage(manifest)
    return manifest


def decode_share(text: bytes) -> Manifest:
    """Return a manifest that may speak of some boxes of its tensors only: one rank's share."""
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
        tensors[check_name(name)] = spec = decode_spec(name, fields)
        for shard in _list(fields["shards"], f"shards of {name!r}"):
            extents.append(_extent(name, spec, shard, parts, chunk_bytes))
    writer, values = _dict(top["writer"], "writer"), _dict(top["values"], "values")
    manifest = Manifest(
        tensors=tensors,
        version=version,
        parent=parent,
        tied={
            check_name(k): _text(v, f"tie of {k!r}") for k, v in _dict(top["tied"], "tied").items()
        },
        values={check_name(name): decode_leaf(name, value) for name, value in values.items()},
        writer={key: _text(value, f"writer {key!r}") for key, value in writer.items()},
        parts=parts,
        extents=extents,
        chunk_bytes=chunk_bytes,
    )
    check_names(manifest)
    check_files(manifest)
    return manifest


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


def encode_leaf(value: Leaf) -> Json:
    """Return a value as JSON, which has no word for infinity and for what is no number."""
    if isinstance(value, float) and not isfinite(value):
        return {"float": str(value)}
    return value


def decode_leaf(name: str, value: Json) -> Leaf:
    """Return a plain value."""
    match value:
        case {"float": "inf" | "-inf" | "nan" as text, **others} if not others:
            return float(text)
    if isinstance(value, (dict, list)):
        raise FormatError(f"value {name!r} is a {type(value).__name__}, expected a plain leaf")
    return value


def decode_numbers(value: Json, what: str) -> tuple[int, ...]:
    """Return a shape or an offset."""
    numbers = tuple(_number(each, what) for each in _list(value, what))
    if len(numbers) > MAX_DIMS:
        raise FormatError(f"{what} has {len(numbers)} dims, at most {MAX_DIMS}")
    return numbers


def decode_spec(name: str, fields: dict[str, Json]) -> TensorSpec:
    """Return a dtype and a shape."""
    try:
        return TensorSpec(
            dtype_named(fields["dtype"]), decode_numbers(fields["shape"], f"shape of {name!r}")
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
        box = Box(decode_numbers(fields["offset"], what), decode_numbers(fields["shape"], what))
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
