"""Save: from a live model to files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter

from flyweight import __version__
from flyweight.adapters.model import adapt
from flyweight.errors import StoreError, VersionError
from flyweight.events import emit
from flyweight.formats import legacy, snapshot
from flyweight.formats.huggingface import PART_BYTES
from flyweight.formats.writer import write
from flyweight.memory import MEMORY_BYTES, check_memory_bytes
from flyweight.ports import Format, Source
from flyweight.spec.manifest import CHUNK_BYTES, Manifest
from flyweight.stores.draft import LocalDraft
from flyweight.stores.local import LocalStore, as_path
from flyweight.verbs.find import PathLike, versions


def default_threads() -> int:
    """Return how many threads keep disk and memory busy: while half of them wait, others hash."""
    return max(4, min(8, 2 * len(os.sched_getaffinity(0))))


@dataclass(frozen=True)
class SaveReport:
    """What a save did."""

    place: str
    version: int | None
    num_tensors: int
    num_files: int
    nbytes: int
    seconds: float
    left_out: list[str] = field(default_factory=list)
    """Values that are no tensors and that the format has no place for."""

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)


def save(
    model: object,
    path: PathLike,
    *,
    version: int | None = None,
    part_bytes: int = PART_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    num_threads: int | None = None,
) -> SaveReport:
    """Save a version of the model under `path`; durable and visible when this returns.

    Without a version, the next after the newest. A version is never overwritten, and numbers
    only grow. A save that is killed leaves the versions before it as they were.
    """
    source = adapt(model)
    source.settle()  # what this thread queued on a GPU may still be writing the weights
    return save_version(
        source,
        path,
        version=version,
        part_bytes=part_bytes,
        memory_bytes=memory_bytes,
        num_threads=num_threads,
    )


def save_version(
    source: Source,
    path: PathLike,
    *,
    version: int | None,
    part_bytes: int,
    memory_bytes: int,
    num_threads: int | None,
    verb: str = "save",
) -> SaveReport:
    """Save a version of any source."""
    root = as_path(path)
    committed = versions(root)
    newest = committed[-1] if committed else None
    version = _next_version(root) if version is None else snapshot.check_version(version)
    directory = root / snapshot.directory_name(version)
    if newest is not None and version <= newest:
        how = "is there already" if version in committed else f"is older than the newest, {newest}"
        raise VersionError(
            f"version {version} of {str(root)!r} {how}; versions only grow, none is overwritten"
        )
    if os.path.lexists(directory) and version not in committed:
        raise VersionError(
            f"{str(directory)!r} is there without a {snapshot.MANIFEST!r}, so it is no version; "
            f"remove it, or save another version"
        )
    manifest = replace(
        source.manifest,
        version=version,
        parent=newest,
        writer=_writer(),
        parts=(),
        extents=(),
        chunk_bytes=CHUNK_BYTES,
    )
    try:
        return save_files(
            source,
            manifest,
            snapshot.snapshot_format(part_bytes),
            lambda: LocalDraft(directory),
            memory_bytes=memory_bytes,
            num_threads=num_threads,
            verb=verb,
        )
    except StoreError as error:
        if error.errno != errno.EEXIST:
            raise
        raise VersionError(
            f"version {version} of {str(root)!r} was committed by another writer meanwhile"
        ) from error


def _next_version(root: Path) -> int:
    """Return the number after all that are there, also after what is no whole version."""
    names = os.listdir(root) if root.is_dir() else []
    taken = [found for name in names if (found := snapshot.version_of(name)) is not None]
    return max(taken, default=-1) + 1


def save_files(
    source: Source,
    manifest: Manifest,
    format: Format,
    begin: Callable[[], LocalDraft],
    *,
    memory_bytes: int,
    num_threads: int | None,
    verb: str = "save",
) -> SaveReport:
    """Write a manifest's tensors in a format, to a draft that is then committed."""
    started = perf_counter()
    check_memory_bytes(memory_bytes)
    with begin() as draft:
        whole = write(
            source,
            manifest,
            format,
            draft,
            num_threads=default_threads() if num_threads is None else num_threads,
            memory_bytes=memory_bytes,
            verb=verb,
        )
        draft.commit()
        report = SaveReport(
            draft.place,
            manifest.version,
            len(whole.tensors),
            len({extent.file for extent in whole.extents}),
            whole.nbytes,
            perf_counter() - started,
            [] if format.name == "snapshot" else sorted(manifest.values),
        )
    emit(
        f"{verb}.done",
        place=report.place,
        version=report.version,
        nbytes=report.nbytes,
        seconds=report.seconds,
    )
    return report


def save_legacy(
    model: object,
    directory: PathLike,
    *,
    rank: int,
    legacy_id: int | str,
    part_bytes: int | None = None,
    as_safetensors: bool = False,
    memory_bytes: int = MEMORY_BYTES,
) -> SaveReport:
    """Save under the names old engines look for: one file, or parts of at most `part_bytes`.

    The files of an earlier save go first: the old layout has no commit, and a reader must rather
    find files missing than two saves mixed. For a while, then, there is nothing to load.
    """
    source = adapt(model)
    source.settle()
    manifest = source.manifest.untied()
    names = legacy.LegacyNames(rank, legacy_id)
    format = legacy.legacy_format(
        rank=rank, legacy_id=legacy_id, part_bytes=part_bytes, as_safetensors=as_safetensors
    )
    format.layout(manifest)  # refuses what it cannot hold before anything is made
    directory = as_path(directory)
    present = LocalStore(directory).names() if directory.is_dir() else []
    stale = [*names.parts(present).values(), *({names.single} & set(present))]

    def begin() -> LocalDraft:
        draft = LocalDraft(directory, into=True)
        draft.stale = stale
        return draft

    return save_files(source, manifest, format, begin, memory_bytes=memory_bytes, num_threads=None)


def _writer() -> dict[str, str]:
    return {
        "flyweight": __version__,
        "host": platform.node(),
        "pid": str(os.getpid()),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
