"""Snapshots: a directory per version, safetensors parts, and a manifest that says what is true.

`docs/format.md` has it byte by byte. A snapshot's directory appears by one rename,
manifest included, so a version is there whole or not at all. The manifest's own
checksum stands in its last line, around the exact bytes it covers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from flyweight.checks import check_version
from flyweight.digest import checksum
from flyweight.errors import (
    ChecksumMismatch,
    FormatError,
    SnapshotIncomplete,
    VersionError,
    listed,
)
from flyweight.formats import huggingface
from flyweight.formats.safetensors import file_plan, read_head
from flyweight.formats.stored import Stored
from flyweight.memory import bytes_of
from flyweight.ports import FilePlan, Format, Store
from flyweight.spec.manifest import Manifest, SnapshotFile, TensorBox
from flyweight.spec.manifest_json import decode_manifest, encode_manifest
from flyweight.spec.strict_json import Hash

MANIFEST = "flyweight.json"
MAX_MANIFEST_BYTES = 1 << 30
_OPENING, _MIDDLE = b'{"manifest":', b',\n"xxh3_64":"'
_ENVELOPE = re.compile(rb',\n"xxh3_64":"([0-9a-f]{16})"}\n')
_ENVELOPE_BYTES = len(_MIDDLE) + 16 + len(b'"}\n')
_NUMBER = re.compile(r"(?<![0-9])(?<![0-9]\.)[0-9]{1,18}\Z")
_DIRECTORY = re.compile(r"v([0-9]{10,19})")


def number_in(text: str) -> int | None:
    """Return the number that ends a version's text, 5 of 'step-5'; None if it ends without one.

    A decimal ('1.0') and a negative number end without one.
    """
    found = _NUMBER.search(text)
    return None if found is None or re.fullmatch(r"-[0-9]+", text) else int(found[0])


def directory_name(version: int) -> str:
    return f"v{check_version(version):010d}"


def version_of(name: str) -> int | None:
    """Return the version a directory of this name holds, or None if it is no version's name."""
    match = _DIRECTORY.fullmatch(name)
    version = int(match[1]) if match else 2**63
    return version if version < 2**63 and directory_name(version) == name else None


def encode_envelope(manifest: Manifest) -> bytes:
    text = encode_manifest(manifest)
    return b'%s%s%s%016x"}\n' % (_OPENING, text, _MIDDLE, checksum(bytes_of(text)))


def decode_envelope(data: bytes, place: str) -> Manifest:
    """Return the manifest in a `flyweight.json`, every byte of which has been accounted for."""
    tail = _ENVELOPE.fullmatch(data, max(len(data) - _ENVELOPE_BYTES, 0))
    if not data.startswith(_OPENING) or not tail:
        raise SnapshotIncomplete(
            f"{MANIFEST!r} in {place!r} has {len(data)} bytes and does not end as a manifest does"
        )
    text = data[len(_OPENING) : tail.start()]
    found, expected = checksum(bytes_of(text)), int(tail[1], 16)
    if found != expected:
        raise ChecksumMismatch(
            f"{MANIFEST!r} in {place!r} has checksum {found:016x}, {expected:016x} was written"
        )
    try:
        return decode_manifest(text)
    except FormatError as error:
        error.note(f"in {MANIFEST!r} of {place!r}")
        raise


def open_snapshot(store: Store, *, version: int | None = None) -> Stored:
    """Open a version's directory: manifest decoded, parts there, whole in size, heads checked."""
    size = store.size(MANIFEST)
    if size > MAX_MANIFEST_BYTES:
        raise FormatError(
            f"{MANIFEST!r} in {store.place!r} has {size} bytes, at most {MAX_MANIFEST_BYTES}"
        )
    manifest = decode_envelope(store.read(MANIFEST, 0, size), store.place)
    if version is not None and manifest.version != version:
        raise VersionError(f"{store.place!r} holds version {manifest.version}, not {version}")
    check_parts(manifest, store)
    return Stored(manifest, store, format="snapshot")


def check_parts(manifest: Manifest, store: Store) -> None:
    """Raise unless the directory's parts are just those of the manifest, size and head right."""
    here = {name for name in store.names() if name.endswith(".safetensors")}
    listed_parts = {part.file for part in manifest.files}
    if missing := listed_parts - here:
        raise SnapshotIncomplete(
            f"{store.place!r} has {len(listed_parts) - len(missing)} of {len(listed_parts)} parts; "
            f"missing: {listed(missing)}"
        )
    if extra := here - listed_parts:
        raise FormatError(
            f"{store.place!r} has {len(extra)} parts its manifest does not know: {listed(extra)}"
        )
    for part in manifest.files:
        size = store.size(part.file)
        if size != part.nbytes:
            raise SnapshotIncomplete(
                f"{part.file!r} in {store.place!r} has {size} bytes, {part.nbytes} were written"
            )
        found = checksum(bytes_of(store.read(part.file, 0, part.head_bytes)))
        if found != part.head_checksum:
            raise ChecksumMismatch(
                f"head of {part.file!r} in {store.place!r} has checksum {found:016x}, "
                f"{part.head_checksum:016x} was written"
            )


def check_for_others(stored: Stored) -> None:
    """Raise unless heads and index tell other people's tools what the manifest tells us."""
    if len(stored.manifest.files) > 1 and huggingface.is_whole(stored.manifest):
        huggingface.read_index(stored.store, stored.manifest.extents)
    for part in stored.manifest.files:
        head = read_head(stored.store, part.file)
        ours = {e.offset for e in stored.manifest.extents if e.file == part.file}
        if head.nbytes != part.head_bytes or {extent.offset for extent in head.extents} != ours:
            raise FormatError(
                f"head of {part.file!r} in {stored.store.place!r} places tensors at other bytes "
                f"than the manifest"
            )


def seal(manifest: Manifest, plans: Sequence[FilePlan]) -> Mapping[str, bytes]:
    """Return the index, for other people's tools, and the manifest, for ours."""
    whole = replace(manifest, files=[*manifest.files, *files_of(plans)])
    return {**huggingface.seal(whole, plans), MANIFEST: encode_envelope(whole)}


def files_of(plans: Sequence[FilePlan]) -> list[SnapshotFile]:
    """Return what a manifest says of these files."""
    parts = []
    for plan in plans:
        (_, head), *_ = plan.literals
        parts.append(
            SnapshotFile(plan.name, plan.nbytes, len(head), Hash(checksum(bytes_of(head))))
        )
    return parts


def share_format(rank: int, tensor_boxes: Sequence[TensorBox], part_bytes: int) -> Format:
    """Return the format of one rank's share: its own files, which somebody else will seal."""

    def layout(manifest: Manifest) -> list[FilePlan]:
        parts = huggingface.split_parts(tensor_boxes, part_bytes) if tensor_boxes else []
        return [
            file_plan(
                f"rank-{rank:05d}-{number:05d}.safetensors",
                part,
                may_tell_as_bytes=True,
                notes=huggingface.sharding_notes(part),
            )
            for number, part in enumerate(parts, 1)
        ]

    return Format("snapshot", layout, seal, has_checksums=True, has_values=True)


def snapshot_format(part_bytes: int = huggingface.PART_BYTES) -> Format:
    """Return the format; where tensors are whole, its files are a Hugging Face checkpoint too."""
    return Format(
        "snapshot",
        lambda manifest: huggingface.layout(manifest, part_bytes, may_tell_as_bytes=True),
        seal,
        has_checksums=True,
        has_values=True,
    )
