"""Find: what a path holds. Versions of a run, and any format behind one `open`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flyweight.errors import (
    FormatError,
    SnapshotIncomplete,
    SnapshotNotFound,
    SpecError,
    VersionError,
)
from flyweight.formats import huggingface, pdparams, safetensors, snapshot
from flyweight.formats.stored import Stored
from flyweight.stores.local import LocalStore, refused, remove, sweep

PathLike = str | os.PathLike[str]


def versions(path: PathLike) -> list[int]:
    """Return the committed versions of a run, oldest first; a path that is not there has none."""
    root = Path(path)
    return sorted(
        version
        for name in _listing(root)
        if (version := snapshot.version_of(name)) is not None
        and (root / name / snapshot.MANIFEST).is_file()
    )


def prune(path: PathLike, *, keep: int) -> list[int]:
    """Remove all but the newest `keep` versions and what killed writers left; return those gone."""
    if keep < 1:
        raise SpecError(f"keep is {keep}, at least 1 version stays")
    root = Path(path)
    gone = versions(root)[:-keep]
    for version in gone:
        remove(root / snapshot.directory_name(version))
    if root.is_dir():
        sweep(root)
    return gone


def open_source(
    path: PathLike,
    *,
    version: int | None = None,
    rank: int | None = None,
    legacy_id: int | str | None = None,
    shared_directory: PathLike = pdparams.SHARED_DIRECTORY,
    unbuffered: bool = True,
) -> Stored:
    """Open weights at rest, whatever their format; reads heads and manifests only.

    A run's directory gives its newest version, or the one asked for. `rank` and `legacy_id`
    ask for the old names of FastDeploy's snapshots where a directory has none of ours.
    """
    if (rank is None) != (legacy_id is None):
        raise SpecError(f"rank is {rank} and legacy_id {legacy_id}; the old names need both")
    place = Path(path)
    try:
        is_file, is_directory = place.is_file(), place.is_dir()
    except OSError as cause:
        raise refused(cause, f"cannot look at {str(place)!r}") from cause
    if is_file:
        stored = _open_file(place, unbuffered)
    elif is_directory:
        names = _listing(place)
        if snapshot.MANIFEST in names:
            return _open_version(place, version, unbuffered)
        committed = versions(place)
        if committed or version is not None:
            return _open_run(place, committed, version, unbuffered)
        store = LocalStore(place, unbuffered=unbuffered)
        if rank is not None and legacy_id is not None:
            shared_place = Path(shared_directory)
            shared = (
                LocalStore(shared_place, unbuffered=unbuffered) if shared_place.is_dir() else None
            )
            legacy = pdparams.LegacyNames(rank, legacy_id)
            return pdparams.open_pdparams(*pdparams.find_legacy(store, shared, legacy))
        if not huggingface.has_checkpoint(names):
            raise _nothing(place, names)
        stored = huggingface.open_huggingface(store)
    else:
        raise SnapshotNotFound(f"{str(place)!r} is not there")
    if version is not None:
        stored.close()
        raise VersionError(
            f"{str(place)!r} is {stored.format} and has no versions; version {version} was wanted"
        )
    return stored


def _open_file(place: Path, unbuffered: bool) -> Stored:
    store = LocalStore(place.parent, unbuffered=unbuffered)
    if place.name == snapshot.MANIFEST:
        return snapshot.open_snapshot(store)
    if place.name == huggingface.INDEX:
        return huggingface.open_huggingface(store)
    head = store.read(place.name, 0, min(store.size(place.name), 9))
    if head[:1] == b"\x80":
        return pdparams.open_pdparams(store, [place.name])
    if safetensors.looks_like_safetensors(head):
        return safetensors.open_files(store, [place.name])
    raise FormatError(
        f"{str(place)!r} has {store.size(place.name)} bytes and starts with {head!r}: neither "
        f"safetensors nor a pickle"
    )


def _open_version(place: Path, version: int | None, unbuffered: bool) -> Stored:
    store = LocalStore(place, unbuffered=unbuffered)
    try:
        return snapshot.open_snapshot(store, version=version)
    except BaseException:
        store.close()
        raise


def _open_run(
    place: Path, committed: Sequence[int], version: int | None, unbuffered: bool
) -> Stored:
    wanted = committed[-1] if version is None else version
    if wanted not in committed:
        directory = place / snapshot.directory_name(wanted)
        if directory.is_dir():
            raise SnapshotIncomplete(f"{str(directory)!r} has no {snapshot.MANIFEST!r}")
        newest = f"newest is {committed[-1]}" if committed else "there is none"
        raise VersionError(
            f"version {wanted} is not one of the {len(committed)} versions of {str(place)!r}; "
            f"{newest}"
        )
    try:
        return _open_version(place / snapshot.directory_name(wanted), wanted, unbuffered)
    except FormatError as error:
        older = [each for each in committed if each < wanted]
        if older:
            error.note(f"the version before it is {older[-1]}: ask for version={older[-1]}")
        raise


def _nothing(place: Path, names: Sequence[str]) -> SnapshotNotFound | SnapshotIncomplete:
    drafts = [name for name in names if name.startswith(".draft-")]
    if drafts:
        return SnapshotIncomplete(
            f"{str(place)!r} has {len(drafts)} saves that never committed and no version"
        )
    old = [name for name in names if name.endswith((".safetensors", ".pdparams"))]
    hint = f"; it has {len(old)} files like {sorted(old)[0]!r}, open one by its path" if old else ""
    return SnapshotNotFound(
        f"{str(place)!r} has no version directory, no {snapshot.MANIFEST!r}, no "
        f"{huggingface.SINGLE!r} and no {huggingface.INDEX!r}{hint}"
    )


def _listing(place: Path) -> list[str]:
    try:
        return os.listdir(place)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as cause:
        raise refused(cause, f"cannot list {str(place)!r}") from cause
