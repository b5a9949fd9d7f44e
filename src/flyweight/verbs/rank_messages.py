"""Together: what the ranks of one save or load tell each other, as messages that are checked.

What comes from another rank is read as a file would be: every number, name and box
is looked at before it is believed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from flyweight.errors import FormatError, SpecError
from flyweight.plans.shares import Holding
from flyweight.ports import Source
from flyweight.ranks.group import Group
from flyweight.ranks.process_group import rendezvous_of
from flyweight.ranks.rendezvous import Rendezvous, join_group
from flyweight.spec.box import Box
from flyweight.spec.manifest import Json, Manifest, Parcel, TensorSpec, check_name
from flyweight.spec.manifest_json import (
    decode_leaf,
    decode_numbers,
    decode_share,
    decode_spec,
    encode_leaf,
    encode_manifest,
)


def gather_ranks(
    process_group: object, coordinator_rank: int, timeout_seconds: float, *, may_default: bool
) -> Group:
    """Return the group of all ranks, there and connected; alone where there is no process group.

    `may_default`: without a process group, the one that was initialised, if one was.
    """
    is_alone = process_group is None and not may_default
    rendezvous = Rendezvous() if is_alone else rendezvous_of(process_group)
    return join_group(rendezvous, coordinator_rank, timeout_seconds=timeout_seconds)


def holding_of(source: Source) -> Holding:
    """Return what of each tensor this rank's source holds; tied names have boxes too."""
    manifest = source.manifest
    return Holding(
        {name: manifest.spec(name) for name in manifest.names},
        {name: source.boxes(name) for name in manifest.names},
        manifest.tied,
        manifest.values,
    )


def encode_holding(holding: Holding) -> Json:
    return {
        "tensors": {
            name: {
                "dtype": spec.dtype.name,
                "shape": list(spec.shape),
                "boxes": [_encode_box(box) for box in holding.boxes[name]],
            }
            for name, spec in holding.tensors.items()
        },
        "tied": dict(holding.tied),
        "values": {name: encode_leaf(value) for name, value in holding.values.items()},
    }


def decode_holding(message: Json) -> Holding:
    match message:
        case {"tensors": dict() as entries, "tied": dict() as ties, "values": dict() as values}:
            pass
        case _:
            raise FormatError(f"a rank tells {str(message)[:80]} of what it holds")
    tensors: dict[str, TensorSpec] = {}
    boxes: dict[str, list[Box]] = {}
    for name, entry in entries.items():
        match entry:
            case {"dtype": _, "shape": _, "boxes": list() as found}:
                tensors[check_name(name)] = spec = decode_spec(name, entry)
                boxes[name] = [_decode_box(each, name, spec) for each in found]
            case _:
                raise FormatError(f"a rank tells {str(entry)[:80]} of {name!r}")
    tied = {name: str(target) for name, target in ties.items()}
    return Holding(
        tensors, boxes, tied, {check_name(name): decode_leaf(name, v) for name, v in values.items()}
    )


def encode_parcels(parcels: Sequence[Parcel]) -> Json:
    return [[parcel.name, _encode_box(parcel.box)] for parcel in parcels]


def decode_parcels(message: Json, tensors: Mapping[str, TensorSpec]) -> list[Parcel]:
    parcels = []
    for each in message if isinstance(message, list) else ():
        match each:
            case [str() as name, box] if name in tensors:
                spec = tensors[name]
                parcels.append(Parcel(name, spec, _decode_box(box, name, spec)))
            case _:
                raise FormatError(f"the coordinator asks for {str(each)[:80]}, which is not here")
    return parcels


def _encode_box(box: Box) -> Json:
    return [list(box.offset), list(box.shape)]


def _decode_box(message: Json, name: str, spec: TensorSpec) -> Box:
    match message:
        case [offset, shape]:
            what = f"box of {name!r}"
            try:
                box = Box(decode_numbers(offset, what), decode_numbers(shape, what))
                if len(box.shape) == len(spec.shape) and Box.whole(spec.shape).contains(box):
                    return box
            except SpecError as cause:
                raise FormatError(f"{what}: {cause}") from cause
    raise FormatError(f"a rank holds {str(message)[:80]} of {name!r}, which is {spec.shape}")


def encode_written(manifest: Manifest) -> Json:
    """Return what a rank wrote: parts, and extents with their checksums and digests."""
    names = {extent.name for extent in manifest.extents}
    tensors = {name: spec for name, spec in manifest.tensors.items() if name in names}
    return encode_manifest(replace(manifest, tensors=tensors, tied={}, values={})).decode()


def decode_written(message: Json) -> Manifest:
    if not isinstance(message, str):
        raise FormatError(f"a rank tells {str(message)[:80]} of what it wrote")
    return decode_share(message.encode())
