"""Find: what a path holds. Versions of a run, and any format behind one `open`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from logging import getLogger
from pathlib import Path

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
    torch_dcp_safetensors,
)
from flyweight.formats.stored import Stored
from flyweight.ports import Store
from flyweight.stores.draft import remove, sweep
from flyweight.stores.local import LocalStore, as_path, refused

_log = getLogger("flyweight.verbs")
PathLike = str | os.PathLike[str]


_MAX_LISTINGS = 100
"""How often a run is listed again because the versions in the last listing were pruned since."""


def versions(path: PathLike) -> list[int]:
    """Return the committed versions of a run, oldest first; a path that is not there has none."""
    root, found = as_path(path), dict[str, int]()
    for _ in range(_MAX_LISTINGS):
        names = {
            name: version
            for name in _listing(root)
            if (version := snapshot.version_of(name)) is not None
        }
        found = {name: names[name] for name in names if _is_committed(root / name)}
        if found or all(os.path.lexists(root / name) for name in names):
            break
    return sorted(found.values())


def _is_committed(directory: Path) -> bool:
    """True if a version is there; also if the operating system refuses to say, as opening will."""
    try:
        return stat.S_ISREG(os.stat(directory / snapshot.MANIFEST).st_mode)
    except OSError as cause:
        return cause.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class Pruned(list[int]):
    """The versions that were removed, oldest first."""

    damaged: Mapping[int, str]
    """The versions that do not open, and why not."""


def prune(path: PathLike, *, keep: int, should_remove_damaged: bool = False) -> Pruned:
    """Remove all but the newest `keep` versions that open, and what killed writers left.

    Opening compares sizes, heads and the manifest; `verify` reads everything. A version that does
    not open does not count, and stays unless its removal is asked for. One that the operating
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
            if os.path.lexists(directory):  # and was not pruned by another meanwhile
                damaged[version] = str(error)
                if not isinstance(error, StoreError):
                    wrong.append(version)
    gone = Pruned(sorted(whole[:-keep] + (wrong if should_remove_damaged else [])))
    gone.damaged = damaged
    refusals = []
    for version in gone:
        try:
            remove(root / snapshot.directory_name(version))
        except StoreError as error:  # another user's, perhaps: the others go all the same
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
    """Open weights at rest, whatever their format; reads heads, manifests and values only.

    A run's directory gives its newest version, or the one asked for. `rank` and `legacy_id`
    ask for the old names of FastDeploy's snapshots where a directory has none of ours.
    """
    if (rank is None) != (legacy_id is None):
        raise SpecError(f"rank is {rank} and legacy_id {legacy_id}; the old names need both")
    place = as_path(path)
    old_names = None
    if rank is not None and legacy_id is not None:
        old_names = legacy.LegacyNames(rank, legacy_id)
    version = None if version is None else check_version(version)
    with ExitStack() as on_failure:

        def store_at(directory: Path) -> LocalStore:
            store = LocalStore(directory, unbuffered=unbuffered)
            on_failure.callback(store.close)
            return store

        try:
            if _is_there(place) and not place.is_dir():
                stored = _open_file(place, store_at)
            else:
                names = _listing(place)
                if snapshot.MANIFEST in names:
                    stored = snapshot.open_snapshot(store_at(place), version=version)
                elif version is not None or versions(place):
                    stored = _open_run(place, version, store_at)
                elif old_names is not None:
                    stored = _open_legacy(place, as_path(shared_directory), old_names, store_at)
                elif (opener := _opener(place, names)) is not None:
                    stored = opener(store_at(place))
                else:
                    raise _nothing(place, names)
        except FormatError as error:
            if str(place) not in str(error):
                error.note(f"in {str(place)!r}")
            raise
        if version is not None and stored.manifest.version != version:
            raise VersionError(
                f"{str(place)!r} is {stored.format} and has no versions; {version} was wanted"
                if stored.manifest.version is None
                else f"{str(place)!r} holds version {stored.manifest.version}, not {version}"
            )
        if old_names is not None and stored.format == "snapshot":
            _tell_hidden(place, stored, old_names)
        on_failure.pop_all()
        return stored


def _tell_hidden(place: Path, stored: Stored, old_names: legacy.LegacyNames) -> None:
    """Warn of files under the old names that are newer than the version opened instead of them."""
    try:
        committed = os.stat(Path(stored.store.place) / snapshot.MANIFEST).st_mtime_ns
        names = old_names.all(_listing(place))
        newer = [name for name in names if os.stat(place / name).st_mtime_ns > committed]
    except OSError:  # pruned or saved anew meanwhile: what is newer cannot be said
        return
    if newer:
        version, text = stored.manifest.version, listed(newer)
        emit("legacy.hidden", place=str(place), version=version, files=text, num_files=len(newer))
        _log.warning(
            "%r: version %s is opened, and not the %d files under the old names that are newer: %s",
            str(place),
            version,
            len(newer),
            text,
        )


_KINDS: dict[str, tuple[Callable[[Sequence[str]], bool], Callable[[Store], Stored]]] = {
    "Hugging Face": (huggingface.has_checkpoint, huggingface.open_huggingface),
    "torch distributed": (torch_dcp.has_checkpoint, torch_dcp.open_dcp),
    "torch distributed safetensors": (
        torch_dcp_safetensors.has_safetensors,
        torch_dcp_safetensors.open_safetensors_shards,
    ),
    "Paddle distributed": (paddle_dist.has_checkpoint, paddle_dist.open_paddle),
}


def _opener(place: Path, names: Sequence[str]) -> Callable[[Store], Stored] | None:
    """Return what opens a directory of other people's files, going by their names."""
    fitting = {name: opener for name, (is_there, opener) in _KINDS.items() if is_there(names)}
    if len(fitting) > 1:
        raise FormatError(
            f"{str(place)!r} has checkpoints of {len(fitting)} kinds: {listed(fitting)}; open one "
            f"by its file: '.metadata', '0.metadata', {huggingface.INDEX!r}, {huggingface.SINGLE!r}"
        )
    return next(iter(fitting.values()), None)


def check_no_version(directory: Path) -> None:
    """Raise if a directory is that of a committed version, which never changes."""
    if snapshot.MANIFEST in _listing(directory):
        raise StoreError(
            f"{str(directory)!r} holds a committed version, which nothing is written into; choose "
            f"another directory"
        )


def check_unmixed(directory: Path, name: str) -> None:
    """Raise if a new file or version of this name would hide or confuse a checkpoint there."""
    there = [kind for kind, (is_there, _) in _KINDS.items() if is_there(_listing(directory))]
    is_marker = snapshot.version_of(name) is not None or name == snapshot.MANIFEST
    if there and (is_marker or any(is_there([name]) for is_there, _ in _KINDS.values())):
        raise StoreError(
            f"{str(directory)!r} holds a {there[0]} checkpoint, which {name!r} beside it would "
            f"hide or confuse; choose another directory"
        )


StoreAt = Callable[[Path], LocalStore]


def _is_there(place: Path) -> bool:
    try:
        return place.exists()
    except OSError as cause:
        raise refused(cause, f"cannot look at {str(place)!r}") from cause


def _open_file(place: Path, store_at: StoreAt) -> Stored:
    store = store_at(place.parent)
    if place.name == snapshot.MANIFEST:
        return snapshot.open_snapshot(store)
    if place.name == huggingface.INDEX:
        return huggingface.open_index(store)
    if place.name == torch_dcp.METADATA:
        return torch_dcp.open_dcp(store)
    if place.name.endswith(".metadata"):
        return paddle_dist.open_paddle(store)
    head = store.read(place.name, 0, min(store.size(place.name), 9))
    if safetensors.looks_like_safetensors(head):
        return safetensors.open_files(store, [place.name])
    if pdparams.looks_like_pickle(head):
        return pdparams.open_pdparams(store, [place.name])
    raise FormatError(
        f"{str(place)!r} has {store.size(place.name)} bytes and starts with {head!r}: neither "
        f"safetensors nor a pickle"
    )


def _open_run(place: Path, version: int | None, store_at: StoreAt) -> Stored:
    """Open a version; the newest, if none is asked for, is looked for again if it was pruned."""
    for tries_left in reversed(range(_MAX_LISTINGS)):
        committed = versions(place)
        if version is None and not committed:
            raise _nothing(place, _listing(place))
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
    raise AssertionError("unreachable")


def _open_legacy(place: Path, shared: Path, names: legacy.LegacyNames, store_at: StoreAt) -> Stored:
    model, other = (store_at(each) if each.is_dir() else None for each in (place, shared))
    looked_at = (str(place), str(shared))
    store, files = legacy.find_legacy(model, other, names, looked_at=looked_at)
    stored = pdparams.open_pdparams(store, files)
    # The old layout has no commit. But a save removes every old part before its first new one
    # appears, so parts that all are in place after the last was opened are of one save; and it is
    # all of them if none comes after the last. They count from 0 or from 1.
    replaced = [name for each in (model, other) if each is not None for name in each.replaced()]
    more = {names.part(len(files)), names.part(len(files) + 1)} - set(files)
    if replaced or (store is model and more & set(store.names())):
        raise SnapshotIncomplete(
            f"the files of rank {names.rank}, id {names.legacy_id} in {store.place!r} were saved "
            f"anew while they were opened ({len(replaced)} of {len(files)} are others); open again"
        )
    return stored


def _nothing(place: Path, names: Sequence[str]) -> SnapshotNotFound | SnapshotIncomplete:
    if not _is_there(place):
        return SnapshotNotFound(f"{str(place)!r} is not there")
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
