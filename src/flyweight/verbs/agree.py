"""Agree: the ranks of a save decide together which of them writes what, and into which draft.

Every rank sends the coordinator what it holds. The coordinator assigns each box to one rank,
makes the draft, and answers each rank with its share. A message from another rank is checked
like a file: every name, number and box is validated before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from flyweight.errors import FormatError, PlanError, SpecError, VersionError
from flyweight.formats.snapshot import directory_name, share_format, snapshot_format
from flyweight.memory import collector_paused
from flyweight.plans.shares import Holding, share_out
from flyweight.ports import Source
from flyweight.ranks.group import Group
from flyweight.spec.box import Box
from flyweight.spec.dtype import dtype_named
from flyweight.spec.manifest import (
    CHUNK_BYTES,
    Manifest,
    Numbers,
    TensorBox,
    TensorSpec,
    check_name,
)
from flyweight.spec.manifest_json import decode_leaf, encode_leaf
from flyweight.spec.strict_json import convert
from flyweight.stores.draft import LocalDraft, check_hidden_name
from flyweight.stores.local import as_path
from flyweight.verbs.check_replicas import ReplicaDigests
from flyweight.verbs.commit import PendingCommit, SaveOptions, begin_draft
from flyweight.verbs.find import PathLike

BoxMessage = tuple[Numbers, Numbers]
"""Offset and shape of a box."""
TensorBoxMessage = tuple[str, BoxMessage]
"""A box of the tensor with this name."""


@dataclass(frozen=True)
class TensorMessage:
    """A tensor's whole spec, and the boxes of it that the rank holds."""

    dtype: str
    shape: Numbers
    boxes: tuple[BoxMessage, ...]


@dataclass(frozen=True)
class HoldingMessage:
    """What one rank holds."""

    tensors: dict[str, TensorMessage]
    tied: dict[str, str]
    values: dict[str, Any]


@dataclass(frozen=True)
class SaveRequest:
    """From each rank to the coordinator: what it holds, and how it was asked to save it."""

    run: str
    version: int | None
    check: str
    holding: HoldingMessage


@dataclass(frozen=True)
class ShareMessage:
    """From the coordinator to each rank: the draft to write into, and what to write there."""

    version: int
    draft: str
    share: tuple[TensorBoxMessage, ...]
    same: tuple[TensorBoxMessage, ...]
    """Boxes that other ranks hold too, to be compared before the commit."""


def begin_version(
    source: Source, path: PathLike, options: SaveOptions, group: Group
) -> PendingCommit:
    """Agree with all ranks on what each of them writes, and make the draft.

    Every rank of the group must call this.
    """
    started, root = perf_counter(), as_path(path)
    with group.working():
        with collector_paused():
            holding = _holding_of(source)
        if group.num_ranks == 1 and _is_whole(holding):
            draft, manifest = begin_draft(root, options.version, source.manifest)
            format = snapshot_format(options.part_bytes)
            pending = PendingCommit(
                options, draft, manifest, format, group, manifest.tensor_boxes()
            )
        else:
            encoded = _encode_holding(holding)
            request = SaveRequest(root.name, options.version, options.check_replicas, encoded)
            answers = group.gather("agree", msgspec.to_builtins(request))
            if group.is_coordinator:
                requests = [
                    convert(each, SaveRequest, f"the message of rank {rank}")
                    for rank, each in enumerate(answers)
                ]
                pending = _share_draft(source, root, options, group, requests)
            else:
                pending = _join_draft(source, root, options, group, holding)
    pending.started = started
    return pending


def _share_draft(
    source: Source, root: Path, options: SaveOptions, group: Group, requests: list[SaveRequest]
) -> PendingCommit:
    """As coordinator, decide what each rank writes, make the draft and tell all ranks of both."""
    _check_requests(root, options, group, requests)
    try:
        sharing = share_out([_decode_holding(each.holding) for each in requests])
    except PlanError as error:
        if group.num_ranks == 1:
            error.note("this is one rank of several: all must save together, by process_group")
        raise
    compared = sharing.replicas
    if options.check_replicas == "digest":  # the rank that writes a box has its checksums anyway
        compared = [
            [tensor_box for tensor_box in replicas if tensor_box not in own]
            for replicas, own in zip(compared, map(set, sharing.shares), strict=True)
        ]
    together = Manifest(sharing.tensors, tied=sharing.tied, values=sharing.values)
    draft, manifest = begin_draft(root, options.version, together)
    assert manifest.version is not None
    try:
        messages = [
            ShareMessage(
                manifest.version, draft.name, _encode_tensor_boxes(own), _encode_tensor_boxes(same)
            )
            for own, same in zip(sharing.shares, compared, strict=True)
        ]
        group.scatter("begin", [msgspec.to_builtins(each) for each in messages])
        share = sharing.shares[group.rank]
        format = share_format(group.rank, share, options.part_bytes)
        digests = ReplicaDigests(compared[group.rank], source, options.check_replicas)
        return PendingCommit(options, draft, manifest, format, group, share, digests, compared)
    except BaseException:
        draft.abort()
        raise


def _join_draft(
    source: Source, root: Path, options: SaveOptions, group: Group, holding: Holding
) -> PendingCommit:
    """Join the coordinator's draft, to write the boxes that it assigned to this rank."""
    message = convert(group.scatter("begin", ()), ShareMessage, "the message of the coordinator")
    share = _decode_tensor_boxes(message.share, holding.tensors)
    compared = _decode_tensor_boxes(message.same, holding.tensors)
    digests = ReplicaDigests(compared, source, options.check_replicas)
    directory = root / directory_name(message.version)
    draft = LocalDraft(directory, member_of=check_hidden_name(message.draft))
    manifest = Manifest(holding.tensors, version=message.version, chunk_bytes=CHUNK_BYTES)
    format = share_format(group.rank, share, options.part_bytes)
    return PendingCommit(options, draft, manifest, format, group, share, digests)


def _check_requests(
    root: Path, options: SaveOptions, group: Group, requests: Sequence[SaveRequest]
) -> None:
    """Raise unless all ranks save the same version to the same place in the same way."""
    for rank, each in enumerate(requests):
        if each.run != root.name:
            raise SpecError(
                f"rank {rank} saves to {each.run!r}, rank {group.rank} to {root.name!r}"
            )
        if each.version != options.version:
            raise VersionError(
                f"rank {rank} saves version {each.version}, rank {group.rank} version "
                f"{options.version}"
            )
        if each.check != options.check_replicas:
            raise SpecError(
                f"rank {rank} checks replicas by {each.check!r}, rank {group.rank} by "
                f"{options.check_replicas!r}; check_replicas is the same on every rank"
            )


def _holding_of(source: Source) -> Holding:
    """Return what this rank holds of each tensor; tied names have boxes too."""
    manifest = source.manifest
    return Holding(
        {name: manifest.spec(name) for name in manifest.names},
        {name: source.boxes(name) for name in manifest.names},
        manifest.tied,
        manifest.values,
    )


def _is_whole(holding: Holding) -> bool:
    return all(
        len(boxes) == 1 and boxes[0].shape == holding.tensors[name].shape
        for name, boxes in holding.boxes.items()
    )


def _encode_holding(holding: Holding) -> HoldingMessage:
    return HoldingMessage(
        {
            name: TensorMessage(
                spec.dtype.name,
                spec.shape,
                tuple((box.offset, box.shape) for box in holding.boxes[name]),
            )
            for name, spec in holding.tensors.items()
        },
        dict(holding.tied),
        {name: encode_leaf(value) for name, value in holding.values.items()},
    )


def _decode_holding(message: HoldingMessage) -> Holding:
    tensors: dict[str, TensorSpec] = {}
    boxes: dict[str, list[Box]] = {}
    for name, each in message.tensors.items():
        try:
            spec = TensorSpec(dtype_named(each.dtype), each.shape)
        except SpecError as cause:
            raise FormatError(f"tensor {name[:80]!r}: {cause}") from cause
        tensors[check_name(name)] = spec
        boxes[name] = [_decode_box(box, name, spec) for box in each.boxes]
    values = {check_name(name): decode_leaf(name, value) for name, value in message.values.items()}
    return Holding(tensors, boxes, message.tied, values)


def _encode_tensor_boxes(tensor_boxes: Sequence[TensorBox]) -> tuple[TensorBoxMessage, ...]:
    return tuple((each.name, (each.box.offset, each.box.shape)) for each in tensor_boxes)


def _decode_tensor_boxes(
    message: Sequence[TensorBoxMessage], tensors: Mapping[str, TensorSpec]
) -> list[TensorBox]:
    """Return the boxes that the coordinator names, all of tensors that this rank holds."""
    tensor_boxes = []
    for name, box in message:
        if name not in tensors:
            raise FormatError(
                f"the coordinator asks for {name[:80]!r}, which this rank does not hold"
            )
        tensor_boxes.append(TensorBox(name, tensors[name], _decode_box(box, name, tensors[name])))
    return tensor_boxes


def _decode_box(message: BoxMessage, name: str, spec: TensorSpec) -> Box:
    try:
        box = Box(*message)
        if Box.whole(spec.shape).contains(box):
            return box
    except SpecError as cause:
        raise FormatError(f"box of {name!r}: {cause}") from cause
    raise FormatError(f"box {box.offset}..{box.end} leaves {name!r}, which has shape {spec.shape}")
