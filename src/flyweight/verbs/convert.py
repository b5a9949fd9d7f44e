"""Convert: from any format to any writable one, streaming, without the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from flyweight.errors import SpecError, StoreError
from flyweight.formats.huggingface import PART_BYTES, huggingface_format
from flyweight.formats.paddle_dist import PADDLE_FORMAT
from flyweight.formats.pdparams import RAW_MEANINGS, pickle_plan
from flyweight.formats.safetensors import file_plan
from flyweight.formats.snapshot import directory_name
from flyweight.formats.stored import Stored
from flyweight.formats.torch_dcp import DCP_FORMAT
from flyweight.memory import MEMORY_BYTES
from flyweight.ports import Format
from flyweight.ranks.group import Group
from flyweight.stores.draft import LegacyDraft, LocalDraft
from flyweight.stores.local import as_path
from flyweight.verbs.agree import begin_version
from flyweight.verbs.commit import PendingCommit, SaveOptions, SaveReport, write_and_commit
from flyweight.verbs.find import PathLike, check_no_version, check_unmixed, opened, versions

Writable = Literal["snapshot", "hf", "dcp", "paddle", "safetensors", "pdparams"]


def convert(
    source: PathLike | Stored,
    destination: PathLike,
    *,
    to: Writable,
    version: int | None = None,
    assume: Mapping[str, str] | None = None,
    part_bytes: int = PART_BYTES,
    memory_bytes: int = MEMORY_BYTES,
) -> SaveReport:
    """Write a checkpoint in another format. Bytes are checked where the source has checksums.

    Args:
        source: A path that `open` accepts, or weights that are open already.
        destination: Where to write; nothing there is overwritten. "snapshot" adds a version to
            the run in this directory, "hf", "dcp" and "paddle" make this directory, "safetensors"
            and "pdparams" make this file.
        to: The format to write. One that has no ties writes the bytes for each name.
        version: The version to write, for "snapshot" only; by default that of the source, else
            one more than the newest.
        assume: Dtypes that a pickle cannot name, by the dtype it uses instead: {"u16": "bf16"}.
        part_bytes: The most bytes of one file, for "snapshot" and "hf".
        memory_bytes: The most memory to use.
    """
    if to not in get_args(Writable):
        raise SpecError(f"format {to!r} is not one of {', '.join(get_args(Writable))}")
    place = as_path(destination)
    check_no_version(place.parent)
    with opened(source) as found:
        stored = found.assuming(assume) if assume else found
        if version is None and to == "snapshot":
            version = stored.manifest.version
        options = SaveOptions(
            version=version, part_bytes=part_bytes, memory_bytes=memory_bytes, verb="convert"
        )
        if to == "snapshot":
            check_no_version(place)
            if not versions(place):
                check_unmixed(place, directory_name(0))
            report = write_and_commit(begin_version(stored, place, options, Group()))
        else:
            report = write_and_commit(_begin_files(stored, place, to, options))
            report = replace(report, place=str(place))
        specs = {name: stored.manifest.spec(name) for name in stored.raw_names}
    if to == "pdparams":  # a pickle has the same integers, and its readers know what they mean
        return report
    unclear = sorted(name for name, spec in specs.items() if spec.dtype.name in RAW_MEANINGS)
    return replace(report, told_as_integers=unclear)


def _begin_files(stored: Stored, place: Path, to: Writable, options: SaveOptions) -> PendingCommit:
    """Make the draft of a format without versions."""
    if options.version is not None:
        raise SpecError(f"version {options.version} for {to}, which has no versions")
    if os.path.lexists(place):
        raise StoreError(f"{str(place)!r} is there already; convert never overwrites")
    directories = {
        "hf": huggingface_format(options.part_bytes),
        "dcp": DCP_FORMAT,
        "paddle": PADDLE_FORMAT,
    }
    manifest = replace(stored.manifest.untied(), version=None, files=(), extents=())
    if to in directories:
        return PendingCommit(stored, options, LocalDraft(place), manifest, directories[to])
    check_unmixed(place.parent, place.name)
    plan = file_plan if to == "safetensors" else pickle_plan
    format = Format(
        to,
        lambda manifest: [plan(place.name, manifest.tensor_boxes())],
        lambda manifest, plans: {},
    )
    return PendingCommit(stored, options, LegacyDraft(place.parent), manifest, format)
