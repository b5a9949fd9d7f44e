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
from flyweight.spec.manifest import Manifest, Numbers, TensorBox, TensorSpec, check_name
from flyweight.spec.manifest_json import decode_leaf, encode_leaf
from flyweight.spec.strict_json import convert
from flyweight.stores.draft import LocalDraft, check_hidden_name
from flyweight.stores.local import as_path
from flyweight.verbs.check_replicas import checksum_jobs
from flyweight.verbs.commit import PendingCommit, SaveOptions, begin_draft
from flyweight.verbs.find import PathLike


@dataclass(frozen=True)
class HeldTensor:
    """A tensor's whole spec, and the boxes of it that a rank holds."""

    dtype: str
    shape: Numbers
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class SaveRequest:
    """From each rank to the coordinator: how it was asked to save, and what it holds."""

    run: str
    version: int | None
    check: str
    tensors: dict[str, HeldTensor]
    tied: dict[str, str]
    values: dict[str, Any]

    def __str__(self) -> str:
        return f"saves to {self.run!r}, version {self.version}, check_replicas={self.check!r}"

    def holding(self) -> Holding:
        """Return what the rank holds; raise FormatError if that describes nothing."""
        specs: dict[str, TensorSpec] = {}
        for name, each in self.tensors.items():
            try:
                specs[check_name(name)] = TensorSpec(dtype_named(each.dtype), each.shape)
            except SpecError as cause:
                raise FormatError(f"tensor {name!r}: {cause}") from cause
            for box in each.boxes:
                _check_inside(name, box, each.shape)
        values = {check_name(name): decode_leaf(name, each) for name, each in self.values.items()}
        boxes = {name: each.boxes for name, each in self.tensors.items()}
        return Holding(specs, boxes, self.tied, values)


@dataclass(frozen=True)
class ShareMessage:
    """From the coordinator to each rank: the draft to write into, and what to write there."""

    version: int
    draft: str
    share: tuple[tuple[str, Box], ...]
    same: tuple[tuple[str, Box], ...]
    """Boxes that other ranks hold too, to be compared before the commit."""


def begin_version(
    source: Source, path: PathLike, options: SaveOptions, group: Group
) -> PendingCommit:
    """Agree with all ranks on what each of them writes, and make the draft.

    Every rank of the group must call this.
    """
    started, root = perf_counter(), as_path(path)
    with group.working():
        if group.num_ranks == 1 and _is_whole(source):
            draft, manifest = begin_draft(root, options.version, source.manifest)
            format, share = snapshot_format(options.part_bytes), manifest.tensor_boxes()
            pending = PendingCommit(source, options, draft, manifest, format, group, share)
        else:
            with collector_paused():
                request = _request(source, root, options)
            requests = group.gather_typed("agree", request)
            if group.is_coordinator:
                pending = _share_draft(source, root, options, group, requests)
            else:
                pending = _join_draft(source, root, options, group)
    pending.started = started
    return pending


def _is_whole(source: Source) -> bool:
    """True if every tensor is here in one box."""
    manifest = source.manifest
    return all(
        [box.shape for box in source.boxes(name)] == [manifest.spec(name).shape]
        for name in manifest.names
    )


def _request(source: Source, root: Path, options: SaveOptions) -> SaveRequest:
    """Return the message about this rank; names that share memory have boxes too."""
    manifest = source.manifest
    tensors = {
        name: HeldTensor(spec.dtype.name, spec.shape, tuple(source.boxes(name)))
        for name, spec in manifest.untied().tensors.items()
    }
    values = {name: encode_leaf(value) for name, value in manifest.values.items()}
    how = options.check_replicas
    return SaveRequest(root.name, options.version, how, tensors, dict(manifest.tied), values)


def _share_draft(
    source: Source,
    root: Path,
    options: SaveOptions,
    group: Group,
    requests: Sequence[SaveRequest],
) -> PendingCommit:
    """As coordinator, decide what each rank writes, make the draft and tell all ranks of both."""
    ours = requests[group.rank]
    for rank, each in enumerate(requests):
        if str(each) != str(ours):
            kind = SpecError if each.version == ours.version else VersionError
            raise kind(
                f"rank {rank} {each}; rank {group.rank} {ours}; all ranks must be asked for the "
                f"same"
            )
    try:
        sharing = share_out([each.holding() for each in requests])
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
    share = sharing.shares[group.rank]
    format = share_format(group.rank, share, options.part_bytes)
    jobs = checksum_jobs(source, compared[group.rank], options.check_replicas)
    together = Manifest(sharing.tensors, tied=sharing.tied, values=sharing.values)
    draft, manifest = begin_draft(root, options.version, together)
    assert manifest.version is not None
    try:
        messages = [
            ShareMessage(manifest.version, draft.name, _named(own), _named(same))
            for own, same in zip(sharing.shares, compared, strict=True)
        ]
        group.scatter("begin", msgspec.to_builtins(messages))
    except BaseException:
        draft.abort()
        raise
    return PendingCommit(source, options, draft, manifest, format, group, share, *jobs, compared)


def _join_draft(source: Source, root: Path, options: SaveOptions, group: Group) -> PendingCommit:
    """Join the coordinator's draft, to write the boxes that it assigned to this rank."""
    message = convert(group.scatter("begin", ()), ShareMessage, "the message of the coordinator")
    tensors = source.manifest.untied().tensors
    share = _tensor_boxes(message.share, tensors)
    format = share_format(group.rank, share, options.part_bytes)
    jobs = checksum_jobs(source, _tensor_boxes(message.same, tensors), options.check_replicas)
    manifest = Manifest(tensors, message.version)
    place = root / directory_name(message.version)
    draft = LocalDraft(place, member_of=check_hidden_name(message.draft))
    return PendingCommit(source, options, draft, manifest, format, group, share, *jobs)


def _named(tensor_boxes: Sequence[TensorBox]) -> tuple[tuple[str, Box], ...]:
    return tuple((each.name, each.box) for each in tensor_boxes)


def _tensor_boxes(
    message: Sequence[tuple[str, Box]], tensors: Mapping[str, TensorSpec]
) -> list[TensorBox]:
    """Return the boxes that the coordinator names, all of tensors that this rank holds."""
    tensor_boxes = []
    for name, box in message:
        if name not in tensors:
            raise FormatError(
                f"the coordinator asks for {name[:80]!r}, which this rank does not hold"
            )
        _check_inside(name, box, tensors[name].shape)
        tensor_boxes.append(TensorBox(name, tensors[name], box))
    return tensor_boxes


def _check_inside(name: str, box: Box, shape: tuple[int, ...]) -> None:
    if len(box.shape) != len(shape) or not Box.whole(shape).contains(box):
        raise FormatError(f"box {box.offset}..{box.end} leaves {name!r}, which has shape {shape}")
