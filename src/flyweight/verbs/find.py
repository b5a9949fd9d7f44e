"""Find: the versions of a run, and any format behind one `open`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from logging import getLogger
from pathlib import Path
from typing import Any

from flyweight.checks import check_version
from flyweight.errors import (
    FlyweightError,
    FormatError,
    SnapshotIncomplete,
    SnapshotNotFound,
    SpecError,
    StoreError,
    VersionError,
    listed,
)
from flyweight.events import emit
from flyweight.formats import (
    huggingface,
    legacy,
    paddle_dist,
    pdparams,
    safetensors,
    snapshot,
    torch_dcp,
)
from flyweight.formats.stored import Stored
from flyweight.ports import Store
from flyweight.stores.draft import remove, sweep
from flyweight.stores.local import LocalStore, as_path, refused

_log = getLogger("flyweight.verbs")
PathLike = str | os.PathLike[str]
_MAX_LISTINGS = 100
"""How often a run is listed again because its versions were pruned after the last listing."""


def versions(path: PathLike) -> list[int]:
    """Return the committed versions of a run, oldest first.

    Args:
        path: The directory of the run. If there is none, it has no versions.
    """
    root = as_path(path)
    found: list[int] = []
    for _ in range(_MAX_LISTINGS):
        places = {version: root / snapshot.directory_name(version) for version in numbered(root)}
        found = [version for version, place in places.items() if is_committed(place)]
        if found or all(os.path.lexists(place) for place in places.values()):
            break
    return sorted(found)


def numbered(root: Path) -> list[int]:
    """Return the versions that have a directory in a run, committed or not, in no order."""
    found = (snapshot.version_of(name) for name in _listing(root))
    return [version for version in found if version is not None]


def is_committed(directory: Path) -> bool:
    """True if a version is there, or if the operating system refuses to say: opening raises."""
    try:
        return stat.S_ISREG(os.stat(directory / snapshot.MANIFEST).st_mode)
    except OSError as cause:
        return cause.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class Pruned(list[int]):
    """The versions that were removed, oldest first."""

    damaged: Mapping[int, str]
    """The versions that do not open, and why not."""


def prune(path: PathLike, *, keep: int, should_remove_damaged: bool = False) -> Pruned:
    """Remove old versions of a run, and the drafts of writers that were killed.

    Opening a version compares sizes, file heads and the manifest; `verify` reads everything.

    Args:
        path: The directory of the run.
        keep: How many of the newest versions to keep. Versions that do not open do not count.
        should_remove_damaged: Also remove versions that do not open. A version that the operating
            system refuses to read stays even then.
    """
    if type(keep) is not int or keep < 1:
        raise SpecError(f"keep is {keep!r}, at least 1 version stays")
    root, damaged, wrong = as_path(path), dict[int, str](), list[int]()
    whole = []
    for version in versions(root):
        directory = root / snapshot.directory_name(version)
        try:
            with open_source(directory, version=version):
                whole.append(version)
        except FlyweightError as error:
            if os.path.lexists(directory):  # else another process pruned it meanwhile
                damaged[version] = str(error)
                if not isinstance(error, StoreError):
                    wrong.append(version)
    gone = Pruned(sorted(whole[:-keep] + (wrong if should_remove_damaged else [])))
    gone.damaged = damaged
    refusals = []
    for version in gone:
        try:
            remove(root / snapshot.directory_name(version))
        except StoreError as error:  # perhaps another user's; remove the others all the same
            refusals.append(error)
    if root.is_dir():
        sweep(root)
    if refusals:
        raise refusals[0]
    return gone


def open_source(
    path: PathLike,
    *,
    version: int | None = None,
    rank: int | None = None,
    legacy_id: int | str | None = None,
    shared_directory: PathLike = legacy.SHARED_DIRECTORY,
    unbuffered: bool = True,
) -> Stored:
    """Open a checkpoint of any format. Reads only file heads, manifests and plain values.

    Args:
        path: The directory of a run or of a checkpoint, or one file.
        version: The version to open; by default the newest of the run.
        rank: The rank in the file names of older FastDeploy engines. Such files are opened only
            if the directory has no version. Needs `legacy_id`.
        legacy_id: The id in those names.
        shared_directory: Where such an engine shares files with others on this machine.
        unbuffered: Read past the page cache. False leaves the bytes there, for other readers.
    """
    if (rank is None) != (legacy_id is None):
        raise SpecError(f"rank is {rank} and legacy_id {legacy_id}; legacy names need both")
    place, version = as_path(path), None if version is None else check_version(version)
    legacy_names = None
    if rank is not None and legacy_id is not None:
        legacy_names = legacy.LegacyNames(rank, legacy_id)
    with ExitStack() as on_failure:

        def store_at(directory: Path) -> LocalStore:
            store = LocalStore(directory, unbuffered=unbuffered)
            on_failure.callback(store.close)
            return store

        try:
            if os.path.exists(place) and not os.path.isdir(place):
                stored = _open_file(place, version, store_at)
            elif snapshot.MANIFEST in _listing(place):
                stored = snapshot.open_snapshot(store_at(place), version=version)
            elif version is not None or versions(place):
                stored = _open_run(place, version, store_at)
            elif legacy_names is not None:
                stored = _open_legacy(place, as_path(shared_directory), legacy_names, store_at)
            else:
                stored = _opener(place)(store_at(place))
        except FormatError as error:
            if str(place) not in str(error):
                error.note(f"in {str(place)!r}")
            raise
        if version is not None and stored.manifest.version is None:
            raise VersionError(
                f"{str(place)!r} is {stored.format} and has no versions; {version} was wanted"
            )
        if legacy_names is not None and stored.format == "snapshot":
            _warn_newer_legacy_files(place, stored, legacy_names)
        on_failure.pop_all()
        return stored


def opened(
    source: PathLike | Stored, *, version: int | None = None, **options: Any
) -> AbstractContextManager[Stored]:
    """Open a path for a `with` block. Weights that are open already stay open after it.

    `options` are those of `open_source`.
    """
    if not isinstance(source, Stored):
        return open_source(source, version=version, **options)
    if version not in (None, source.manifest.version):
        raise VersionError(
            f"{source.store.place!r} holds version {source.manifest.version}, not {version}"
        )
    return nullcontext(source)


def _warn_newer_legacy_files(place: Path, stored: Stored, names: legacy.LegacyNames) -> None:
    """Warn about legacy files that are newer than the version that was opened instead."""
    try:
        committed = os.stat(Path(stored.store.place) / snapshot.MANIFEST).st_mtime_ns
        files = names.all(_listing(place))
        newer = [name for name in files if os.stat(place / name).st_mtime_ns > committed]
    except OSError:  # pruned or saved again meanwhile
        return
    if newer:
        version, text = stored.manifest.version, listed(newer)
        emit("legacy.hidden", place=str(place), version=version, files=text, num_files=len(newer))
        line = "%r: opened version %s, not the %d legacy files that are newer: %s"
        _log.warning(line, str(place), version, len(newer), text)


_KINDS: dict[str, tuple[Callable[[Sequence[str]], bool], Callable[[Store], Stored]]] = {
    "Hugging Face": (huggingface.has_checkpoint, huggingface.open_huggingface),
    "torch distributed": (torch_dcp.has_checkpoint, torch_dcp.open_dcp),
    "torch distributed safetensors": (huggingface.has_shards, huggingface.open_shards),
    "Paddle distributed": (paddle_dist.has_checkpoint, paddle_dist.open_paddle),
}


def _opener(place: Path) -> Callable[[Store], Stored]:
    """Return the function that opens a directory of another framework, by its files' names."""
    names = _listing(place)
    fitting = {name: opener for name, (is_there, opener) in _KINDS.items() if is_there(names)}
    if not fitting:
        raise _not_found(place)
    if len(fitting) > 1:
        raise FormatError(
            f"{str(place)!r} has checkpoints of {len(fitting)} kinds: {listed(fitting)}; open one "
            f"by its file: '.metadata', '0.metadata', {huggingface.INDEX!r}, {huggingface.SINGLE!r}"
        )
    return next(iter(fitting.values()))


def check_no_version(directory: Path) -> None:
    """Raise StoreError if the directory is a committed version, which never changes."""
    if snapshot.MANIFEST in _listing(directory):
        raise StoreError(
            f"{str(directory)!r} holds a committed version, which nothing is written into; choose "
            f"another directory"
        )


def check_unmixed(directory: Path, name: str) -> None:
    """Raise StoreError if a new file or version of this name would hide a checkpoint there."""
    there = [kind for kind, (is_there, _) in _KINDS.items() if is_there(_listing(directory))]
    is_marker = snapshot.version_of(name) is not None or name == snapshot.MANIFEST
    if there and (is_marker or any(is_there([name]) for is_there, _ in _KINDS.values())):
        raise StoreError(
            f"{str(directory)!r} holds a {there[0]} checkpoint, which {name!r} beside it would "
            f"hide or confuse; choose another directory"
        )


StoreAt = Callable[[Path], LocalStore]


def _open_file(place: Path, version: int | None, store_at: StoreAt) -> Stored:
    store = store_at(place.parent)
    if place.name == snapshot.MANIFEST:
        return snapshot.open_snapshot(store, version=version)
    if place.name == huggingface.INDEX:
        return huggingface.open_index(store)
    if place.name == torch_dcp.METADATA:
        return torch_dcp.open_dcp(store)
    if place.name.endswith(".metadata"):
        return paddle_dist.open_paddle(store)
    head = store.read(place.name, 0, min(store.size(place.name), 9))
    if safetensors.looks_like_safetensors(head):
        return safetensors.open_files(store, [place.name])
    return pdparams.open_pdparams(store, [place.name])


def _open_run(place: Path, version: int | None, store_at: StoreAt) -> Stored:
    """Open a version. If the newest is pruned before it is open, look for the newest again."""
    for tries_left in reversed(range(_MAX_LISTINGS)):
        committed = versions(place)
        if version is None and not committed:
            break
        wanted = committed[-1] if version is None else version
        directory = place / snapshot.directory_name(wanted)
        if wanted not in committed:
            if directory.is_dir():
                raise SnapshotIncomplete(f"{str(directory)!r} has no {snapshot.MANIFEST!r}")
            newest = f"newest is {committed[-1]}" if committed else "there is none"
            raise VersionError(
                f"version {wanted} is not one of the {len(committed)} versions of {str(place)!r}; "
                f"{newest}"
            )
        try:
            return snapshot.open_snapshot(store_at(directory), version=wanted)
        except FlyweightError as error:
            if version is None and tries_left and not os.path.lexists(directory):
                continue
            older = [each for each in committed if each < wanted]
            if older and isinstance(error, FormatError):
                error.note(f"the version before it is {older[-1]}: ask for version={older[-1]}")
            raise
    raise _not_found(place)


def _open_legacy(place: Path, shared: Path, names: legacy.LegacyNames, store_at: StoreAt) -> Stored:
    model, other = (store_at(each) if each.is_dir() else None for each in (place, shared))
    looked_at = (str(place), str(shared))
    store, files = legacy.find_legacy(model, other, names, looked_at=looked_at)
    stored = pdparams.open_pdparams(store, files)
    # Legacy files have no commit. But a save removes all files of the save before it, and only then
    # do its own appear: files that are all still there after the last one was opened are of one
    # save. They are complete if no file follows the last. Numbers start at 0 or at 1.
    replaced = [name for each in (model, other) if each is not None for name in each.replaced()]
    more = {names.part(len(files)), names.part(len(files) + 1)} - set(files)
    if replaced or (store is model and more & set(store.names())):
        raise SnapshotIncomplete(
            f"the files of rank {names.rank}, id {names.legacy_id} in {store.place!r} were saved "
            f"again while they were opened ({len(replaced)} of {len(files)} changed); open again"
        )
    return stored


def _not_found(place: Path) -> SnapshotNotFound | SnapshotIncomplete:
    if not os.path.exists(place):
        return SnapshotNotFound(f"{str(place)!r} is not there")
    names = _listing(place)
    drafts = [name for name in names if name.startswith(".draft-")]
    if drafts:
        return SnapshotIncomplete(
            f"{str(place)!r} has {len(drafts)} saves that never committed and no version"
        )
    old = [name for name in names if name.endswith((".safetensors", ".pdparams"))]
    hint = f"; it has {len(old)} files like {sorted(old)[0]!r}, open one by its path" if old else ""
    return SnapshotNotFound(
        f"{str(place)!r} has no version directory, no {snapshot.MANIFEST!r}, no "
        f"{huggingface.SINGLE!r}, no {huggingface.INDEX!r} and no '.metadata'{hint}"
    )


def _listing(place: Path) -> list[str]:
    try:
        return os.listdir(place)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as cause:
        raise refused(cause, f"cannot list {str(place)!r}") from cause
