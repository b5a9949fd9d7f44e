"""Convert: from any format to any writable one, streaming, without the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

from flyweight.errors import SpecError, StoreError
from flyweight.formats.huggingface import PART_BYTES, huggingface_format
from flyweight.formats.legacy import pickle_plan
from flyweight.formats.paddle_dist import PADDLE_FORMAT
from flyweight.formats.pdparams import RAW_MEANINGS
from flyweight.formats.safetensors import file_plan
from flyweight.formats.snapshot import directory_name
from flyweight.formats.stored import Stored
from flyweight.formats.torch_dcp_writer import DCP_FORMAT
from flyweight.memory import MEMORY_BYTES
from flyweight.ports import FilePlan, Format
from flyweight.ranks.group import Group
from flyweight.spec.manifest import Manifest
from flyweight.stores.draft import LocalDraft
from flyweight.stores.legacy_draft import legacy_draft
from flyweight.stores.local import as_path
from flyweight.verbs.commit import SaveReport
from flyweight.verbs.find import PathLike, check_no_version, check_unmixed, open_source, versions
from flyweight.verbs.save import save_files, save_version

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
    """Write the source's tensors in another format; every byte is checked where it can be.

    `snapshot` adds a version to the run at `destination`; `hf`, `dcp` and `paddle` make that
    directory, `safetensors` and `pdparams` that file. `assume` tells dtypes that a pickle cannot:
    {"u16": "bf16"}. Formats without ties get bytes of their own for each name.
    """
    if not isinstance(source, Stored):
        with open_source(source) as stored:
            return convert(
                stored,
                destination,
                to=to,
                version=version,
                assume=assume,
                part_bytes=part_bytes,
                memory_bytes=memory_bytes,
            )
    stored = source.assuming(assume or {}) if assume else source
    unclear = [n for n in stored.raw_names if stored.manifest.spec(n).dtype.name in RAW_MEANINGS]
    place = as_path(destination)
    check_no_version(place.parent)
    if to == "snapshot":
        check_no_version(place)
        if not versions(place):
            check_unmixed(place, directory_name(0))
        report = save_version(
            stored,
            destination,
            version=stored.manifest.version if version is None else version,
            part_bytes=part_bytes,
            memory_bytes=memory_bytes,
            num_threads=None,
            group=Group(),
            verb="convert",
        )
        return replace(report, told_as_integers=sorted(unclear))
    if version is not None:
        raise SpecError(f"version {version} for {to}, which has no versions")
    if os.path.lexists(place):
        raise StoreError(f"{str(place)!r} is there already; convert never overwrites")
    directories = {"hf": huggingface_format(part_bytes), "dcp": DCP_FORMAT, "paddle": PADDLE_FORMAT}
    into_directory = to not in directories
    if into_directory:
        check_unmixed(place.parent, place.name)
    report = save_files(
        stored,
        replace(stored.manifest.untied(), version=None, parts=(), extents=()),
        directories[to] if to in directories else _single_file(to, place.name),
        lambda: legacy_draft(place.parent) if into_directory else LocalDraft(place),
        memory_bytes=memory_bytes,
        num_threads=None,
        verb="convert",
    )
    # A pickle cannot say it better, and who reads it knows.
    unclear = [] if to == "pdparams" else unclear
    return replace(report, place=str(place), told_as_integers=sorted(unclear))


def _single_file(to: str, name: str) -> Format:
    if to not in get_args(Writable):
        raise SpecError(f"format {to!r} is not one of {', '.join(get_args(Writable))}")

    def layout(manifest: Manifest) -> list[FilePlan]:
        parcels = manifest.parcels()
        return [file_plan(name, parcels) if to == "safetensors" else pickle_plan(name, parcels)]

    return Format(to, layout, lambda manifest, plans: {})
