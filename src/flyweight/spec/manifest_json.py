"""Manifests as JSON, both ways; `docs/format.md` explains each member.

A manifest that `decode_manifest` returns is consistent: its names, numbers and boxes have been
checked against each other, so that no reader has to check them again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import isfinite
from typing import Any

from msgspec import Struct, to_builtins

from flyweight.errors import FormatError, SpecError
from flyweight.spec.box import Box
from flyweight.spec.dtype import dtype_named
from flyweight.spec.manifest import (
    Extent,
    Manifest,
    Numbers,
    SnapshotFile,
    TensorSpec,
    check_coverage,
    check_files,
    check_name,
    check_names,
)
from flyweight.spec.strict_json import Hash, Json, Leaf, Number, convert, parse_json

FORMAT, FORMAT_VERSION = "flyweight-snapshot", 1
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 4096, 64 << 20


class _Shard(Struct, forbid_unknown_fields=True):
    """Where a box is stored: an extent without its name, and with its file by number."""

    offset: Numbers
    shape: Numbers
    part: Number
    at: Number
    digest: Hash | None
    checksums: str


class _Tensor(Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Numbers
    shards: list[_Shard]


class _Record(Struct, forbid_unknown_fields=True):
    format: str
    format_version: int
    version: Number
    parent: Number | None
    writer: dict[str, str]
    chunk_bytes: Number
    parts: list[SnapshotFile]
    tensors: dict[str, Any]
    """Converted one by one, so that an error names its tensor."""
    tied: dict[str, str]
    values: dict[str, Any]


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, the same bytes for the same manifest."""
    assert manifest.version is not None
    part_index = {part.file: index for index, part in enumerate(manifest.files)}
    shards: dict[str, list[_Shard]] = {name: [] for name in manifest.tensors}
    for extent in manifest.extents:
        shard = _Shard(
            extent.box.offset,
            extent.box.shape,
            part_index[extent.file],
            extent.offset,
            None if extent.digest is None else Hash(extent.digest),
            "".join([f"{each:016x}" for each in extent.checksums or ()]),
        )
        shards[extent.name].append(shard)
    record = _Record(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        version=manifest.version,
        parent=manifest.parent,
        writer=dict(manifest.writer),
        chunk_bytes=manifest.chunk_bytes,
        parts=list(manifest.files),
        tensors={
            name: _Tensor(spec.dtype.name, spec.shape, shards[name])
            for name, spec in manifest.tensors.items()
        },
        tied=dict(manifest.tied),
        values={name: encode_leaf(value) for name, value in manifest.values.items()},
    )
    try:
        text = json.dumps(
            to_builtins(record, enc_hook="{:016x}".format),
            separators=(",", ":"),
            ensure_ascii=False,
            allow_nan=False,
        )
        return text.encode("utf-8")
    except ValueError as cause:  # NaN, infinity, half a surrogate pair
        raise SpecError(f"a value of the manifest has no place in JSON: {cause}") from cause


def decode_manifest(text: bytes) -> Manifest:
    """Return the manifest that `encode_manifest` wrote; anything else raises FormatError."""
    manifest = decode_share(text)
    check_coverage(manifest)
    return manifest


def decode_share(text: bytes) -> Manifest:
    """Return a manifest that may have only some boxes of its tensors: one rank's share."""
    record = convert(parse_json(text, "manifest"), _Record, "manifest")
    if (record.format, record.format_version) != (FORMAT, FORMAT_VERSION):
        raise FormatError(
            f"manifest is {record.format!r} version {record.format_version}; this reads {FORMAT!r} "
            f"version {FORMAT_VERSION}"
        )
    if record.parent is not None and record.parent >= record.version:
        raise FormatError(
            f"manifest of version {record.version} has parent {record.parent}; a parent is older"
        )
    if not MIN_CHUNK_BYTES <= record.chunk_bytes <= MAX_CHUNK_BYTES:
        raise FormatError(
            f"manifest has chunks of {record.chunk_bytes} bytes, expected {MIN_CHUNK_BYTES} to "
            f"{MAX_CHUNK_BYTES}"
        )
    if len({part.file for part in record.parts}) != len(record.parts):
        raise FormatError(f"manifest lists a part twice: {[part.file for part in record.parts]}")
    tensors, extents = {}, []
    for name, entry in record.tensors.items():
        what = f"tensor {check_name(name)!r}"
        tensor = convert(entry, _Tensor, what)
        try:
            tensors[name] = spec = TensorSpec(dtype_named(tensor.dtype), tensor.shape)
            for shard in tensor.shards:
                extents.append(_extent(name, spec, shard, record.parts, record.chunk_bytes))
        except SpecError as cause:
            raise FormatError(f"{what}: {cause}") from cause
    manifest = Manifest(
        tensors=tensors,
        version=record.version,
        parent=record.parent,
        tied={check_name(name): target for name, target in record.tied.items()},
        values={check_name(name): decode_leaf(name, each) for name, each in record.values.items()},
        writer=record.writer,
        files=record.parts,
        extents=extents,
        chunk_bytes=record.chunk_bytes,
    )
    check_names(manifest)
    check_files(manifest)
    return manifest


def _extent(
    name: str, spec: TensorSpec, shard: _Shard, parts: Sequence[SnapshotFile], chunk_bytes: int
) -> Extent:
    box = whole = Box.whole(spec.shape)
    if shard.shape != spec.shape or any(shard.offset) or len(shard.offset) != len(spec.shape):
        box = Box(shard.offset, shard.shape)
        if len(box.shape) != len(spec.shape) or not whole.contains(box):
            raise SpecError(f"box {box.offset}..{box.end} leaves a tensor of {spec.shape}")
    if shard.part >= len(parts):
        raise SpecError(f"a shard is in part {shard.part} of {len(parts)}")
    part, end = parts[shard.part], shard.at + spec.box_bytes(box)
    if end > part.nbytes:
        raise SpecError(f"a shard ends at byte {end} of {part.file!r}, which has {part.nbytes}")
    digits, expected = shard.checksums, 16 * spec.num_chunks(box, chunk_bytes)
    if len(digits) != expected or not re.fullmatch("[0-9a-f]*", digits):
        raise SpecError(f"a shard has {len(digits)} checksum digits, expected {expected}")
    checksums = tuple(int(digits[i : i + 16], 16) for i in range(0, len(digits), 16))
    digest = None if shard.digest is None else int(shard.digest)
    return Extent(name, box, part.file, shard.at, checksums, digest)


def encode_leaf(value: Leaf) -> Json:
    """Return a value as JSON; infinities and NaN, which JSON lacks, become objects."""
    if isinstance(value, float) and not isfinite(value):
        return {"float": str(value)}
    return value


def decode_leaf(name: str, value: Json) -> Leaf:
    """Return the value that `encode_leaf` was given."""
    match value:
        case {"float": "inf" | "-inf" | "nan" as text, **others} if not others:
            return float(text)
    if isinstance(value, (dict, list)):
        raise FormatError(f"value {name!r} is a {type(value).__name__}, expected a plain leaf")
    return value
