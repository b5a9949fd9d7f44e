"""torch's distributed checkpoints as safetensors: each rank writes its own files.

The head of each file says where its tensors start in the whole ones. No file says how large
the whole tensors are, nor how many ranks there were: a tensor ends where its last shard does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from flyweight.errors import FormatError, SnapshotIncomplete
from flyweight.formats.records import Records, as_format_errors, shown
from flyweight.formats.safetensors import read_head
from flyweight.formats.stored import Stored
from flyweight.ports import Store
from flyweight.spec.box import Box
from flyweight.spec.manifest import Extent, Json, Manifest, TensorBox, TensorSpec, check_coverage
from flyweight.spec.strict_json import parse_json

_SHARDED = re.compile(r"shard-([0-9]{1,9})-model-[0-9]+-of-[0-9]+\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"


def has_safetensors(names: Sequence[str]) -> bool:
    """True if there is a file of any rank."""
    return any(_SHARDED.fullmatch(name) for name in names)


def open_safetensors_shards(store: Store) -> Stored:
    """Open files whose heads say where each tensor starts in the whole one.

    A missing file of the last rank is not noticed, because no file says how large the whole is.
    """
    files = sorted(name for name in store.names() if _SHARDED.fullmatch(name))
    ranks = {int(match[1]) for name in files if (match := _SHARDED.fullmatch(name))}
    if ranks != set(range(1, len(ranks) + 1)):
        raise SnapshotIncomplete(f"{store.place!r} has files of ranks {sorted(ranks)[:20]}")
    with as_format_errors(repr(store.place)):
        return _open_shards(store, files)


def _open_shards(store: Store, files: Sequence[str]) -> Stored:
    tensors: dict[str, TensorSpec] = {}
    extents: list[Extent] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        head, what = read_head(store, file), f"{file!r} in {store.place!r}"
        offsets = _sharding_offsets(head.notes, what)
        for extent in head.extents:
            name, spec = extent.name, head.tensors[extent.name]
            if len(offsets.get(name, ())) != len(spec.shape) or name not in offsets:
                raise FormatError(
                    f"{name!r} of {what} is {spec.shape} and starts at {offsets.get(name)}"
                )
            box = Box(offsets[name], spec.shape)
            known = tensors.setdefault(name, spec)
            if known.dtype != spec.dtype or len(known.shape) != len(spec.shape):
                raise FormatError(f"{name!r} is {known} in one file and {spec} in {file!r}")
            shapes[name] = tuple(map(max, shapes.get(name, (0,) * len(box.shape)), box.end))
            if box.num_elements:
                extents.append(Extent(name, box, file, extent.offset))
    whole = {name: TensorSpec(spec.dtype, shapes[name]) for name, spec in tensors.items()}
    manifest = Manifest(whole, extents=extents)
    check_coverage(manifest)
    return Stored(manifest, store, format="dcp safetensors")


def _sharding_offsets(notes: Mapping[str, Json], what: str) -> dict[str, tuple[int, ...]]:
    """Return where the tensors of a file start in the whole ones, as its head says."""
    text = notes.get(_SHARDING)
    record = parse_json(text.encode(), f"{_SHARDING} of {what}") if isinstance(text, str) else None
    if not isinstance(record, dict):
        raise FormatError(f"head of {what} has no {_SHARDING}, which says where its tensors start")
    offsets: dict[str, tuple[int, ...]] = {}
    for name, entry in record.items():
        match entry:
            case {"saved_offsets": list() as numbers}:
                offsets[name] = Records(f"{_SHARDING} of {what}").numbers(numbers, name)
            case _:
                raise FormatError(f"{_SHARDING} of {what} has {shown(entry)} for {name!r}")
    return offsets


def sharding_notes(tensor_boxes: Sequence[TensorBox]) -> dict[str, str]:
    """Return what torch's reader of this variant looks for in a head: where each tensor starts.

    It expects one box of a tensor in a file, and cannot read a file with more of them.
    """
    offsets: dict[str, Json] = {p.name: {"saved_offsets": list(p.box.offset)} for p in tensor_boxes}
    if len(offsets) != len(tensor_boxes):
        return {}
    return {_SHARDING: json.dumps(offsets, separators=(",", ":")), "DCP_VERSION": "1.0"}
