"""Hugging Face checkpoints: one `model.safetensors`, numbered files and an index, or shards.

Shards are what torch's distributed checkpoints write as safetensors: each rank writes its own
files, whose heads say where their tensors start in the whole ones. No file says how large the
whole tensors are, nor how many ranks there were: a tensor ends where its last shard does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from flyweight.errors import FormatError, SnapshotIncomplete, SnapshotNotFound, listed
from flyweight.formats.records import Records, as_format_errors, shown
from flyweight.formats.safetensors import file_plan, open_files, read_head
from flyweight.formats.stored import Stored
from flyweight.ports import FilePlan, Format, Store
from flyweight.spec.box import Box
from flyweight.spec.manifest import (
    Extent,
    Json,
    Manifest,
    TensorBox,
    TensorSpec,
    check_coverage,
    check_file_name,
)
from flyweight.spec.strict_json import parse_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20
PART_BYTES = 4 << 30
_SHARDS = re.compile(r"shard-([0-9]{1,9})-model-[0-9]+-of-[0-9]+\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"


def has_checkpoint(names: Sequence[str]) -> bool:
    return SINGLE in names or INDEX in names


def has_shards(names: Sequence[str]) -> bool:
    return any(_SHARDS.fullmatch(name) for name in names)


def open_huggingface(store: Store) -> Stored:
    """Open the directory's checkpoint; the index and the files must agree tensor by tensor."""
    names = store.names()
    if INDEX not in names:
        if SINGLE not in names:
            raise SnapshotNotFound(f"{store.place!r} has neither {SINGLE!r} nor {INDEX!r}")
        return open_files(store, [SINGLE], format="huggingface")
    if SINGLE in names and SINGLE not in read_index(store).values():
        raise FormatError(
            f"{store.place!r} has {SINGLE!r} and {INDEX!r}, which does not name it: two "
            f"checkpoints; open one by its path"
        )
    return open_index(store)


def open_index(store: Store) -> Stored:
    """Open the checkpoint that the index describes, whatever else is in the directory."""
    names = store.names()
    files = sorted({check_file_name(file) for file in read_index(store).values()})
    if missing := [file for file in files if file not in names]:
        raise SnapshotIncomplete(
            f"{store.place!r} lacks {len(missing)} of the {len(files)} files its index names: "
            f"{listed(missing)}"
        )
    stored = open_files(store, files, format="huggingface")
    read_index(store, stored.manifest.extents)
    return stored


def read_index(store: Store, extents: Sequence[Extent] | None = None) -> dict[str, Json]:
    """Return the file of each tensor; raise if `extents` are given and have another one."""
    size, what = store.size(INDEX), f"{INDEX!r} in {store.place!r}"
    if size > MAX_INDEX_BYTES:
        raise FormatError(f"{what} has {size} bytes, at most {MAX_INDEX_BYTES}")
    record = parse_json(store.read(INDEX, 0, size), what)
    places = record.get("weight_map") if isinstance(record, dict) else None
    if not isinstance(places, dict):
        raise FormatError(f"{what} has no weight_map")
    found = {extent.name: extent.file for extent in extents or ()}
    astray = {name for name in {*found, *places} if found.get(name) != places.get(name)}
    if extents is not None and astray:
        raise FormatError(
            f"index and files of {store.place!r} disagree on {len(astray)} tensors: "
            f"{listed(astray)}"
        )
    return places


def open_shards(store: Store) -> Stored:
    """Open files whose heads say where each tensor starts in the whole one.

    A missing file of the last rank is not noticed, because no file says how large the whole is.
    """
    files = {name: match for name in store.names() if (match := _SHARDS.fullmatch(name))}
    ranks = {int(match[1]) for match in files.values()}
    if ranks != set(range(1, len(ranks) + 1)):
        raise SnapshotIncomplete(f"{store.place!r} has files of ranks {sorted(ranks)[:20]}")
    tensors: dict[str, TensorSpec] = {}
    extents: list[Extent] = []
    with as_format_errors(repr(store.place)):
        for file in files:
            head, what = read_head(store, file), f"{file!r} in {store.place!r}"
            offsets = _sharding_offsets(head.notes, what)
            for extent in head.extents:
                name, spec = extent.name, head.tensors[extent.name]
                if name not in offsets or len(offsets[name]) != len(spec.shape):
                    raise FormatError(
                        f"{name!r} of {what} is {spec.shape} and starts at {offsets.get(name)}"
                    )
                box = Box(offsets[name], spec.shape)
                known = tensors.setdefault(name, spec)
                if known.dtype != spec.dtype or len(known.shape) != len(spec.shape):
                    raise FormatError(f"{name!r} is {known} in one file and {spec} in {file!r}")
                tensors[name] = TensorSpec(spec.dtype, tuple(map(max, known.shape, box.end)))
                if box.num_elements:
                    extents.append(Extent(name, box, file, extent.offset))
        manifest = Manifest(tensors, extents=extents)
        check_coverage(manifest)
    return Stored(manifest, store, format="dcp safetensors")


def _sharding_offsets(notes: Mapping[str, Json], what: str) -> dict[str, tuple[int, ...]]:
    """Return where the tensors of a file start in the whole ones, as its head says."""
    records, text = Records(f"{_SHARDING} of {what}"), notes.get(_SHARDING)
    found = parse_json(text.encode(), records.what) if isinstance(text, str) else None
    if not isinstance(found, dict):
        raise FormatError(f"head of {what} has no {_SHARDING}, which says where its tensors start")
    offsets: dict[str, tuple[int, ...]] = {}
    for name, entry in found.items():
        if not isinstance(entry, dict):
            raise records.refused(f"has {shown(entry)} for {name!r}")
        offsets[name] = records.numbers(entry.get("saved_offsets"), name)
    return offsets


def sharding_notes(tensor_boxes: Sequence[TensorBox]) -> dict[str, str]:
    """Return what torch's reader of shards looks for in a head: where each tensor starts.

    It expects one box of a tensor in a file, and cannot read a file with more of them.
    """
    offsets = {each.name: {"saved_offsets": list(each.box.offset)} for each in tensor_boxes}
    if len(offsets) != len(tensor_boxes):
        return {}
    return {_SHARDING: json.dumps(offsets, separators=(",", ":")), "DCP_VERSION": "1.0"}


def split_parts(
    tensor_boxes: Iterable[TensorBox], part_bytes: int = PART_BYTES
) -> list[list[TensorBox]]:
    """Split boxes, in order, over files of at most `part_bytes`; a larger one is alone."""
    parts: list[list[TensorBox]] = [[]]
    held_bytes = 0
    for tensor_box in tensor_boxes:
        if parts[-1] and held_bytes + tensor_box.nbytes > part_bytes:
            parts.append([])
            held_bytes = 0
        parts[-1].append(tensor_box)
        held_bytes += tensor_box.nbytes
    return parts


def layout(
    manifest: Manifest, part_bytes: int = PART_BYTES, *, may_tell_as_bytes: bool = False
) -> list[FilePlan]:
    parts = split_parts(manifest.tensor_boxes(), part_bytes)
    names = [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]
    return [
        file_plan(name, part, may_tell_as_bytes=may_tell_as_bytes)
        for name, part in zip(names if len(parts) > 1 else [SINGLE], parts, strict=True)
    ]


def seal(manifest: Manifest, plans: Sequence[FilePlan]) -> Mapping[str, bytes]:
    """Return the index, where there is more than one file and every tensor is whole in one."""
    if len({extent.file for extent in manifest.extents}) <= 1 or not is_whole(manifest):
        return {}
    index = {
        "metadata": {"total_size": manifest.nbytes},
        "weight_map": {extent.name: extent.file for extent in manifest.extents},
    }
    return {INDEX: json.dumps(index, indent=1, ensure_ascii=False).encode("utf-8")}


def is_whole(manifest: Manifest) -> bool:
    """True if every tensor is one extent."""
    return all(
        extent.box.shape == manifest.tensors[extent.name].shape for extent in manifest.extents
    )


def huggingface_format(part_bytes: int = PART_BYTES) -> Format:
    return Format("huggingface", lambda manifest: layout(manifest, part_bytes), seal)
