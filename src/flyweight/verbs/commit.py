"""Commit: the one path by which every writer puts files in place, all of them or none.

A `PendingCommit` has a hidden draft, which is filled, made durable and committed by a rename.
Ranks that save together commit in two phases: every rank writes and flushes its own files; the
coordinator waits for all of them, writes the manifest and commits. Until that rename
nothing is visible, whichever process dies.
"""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import get_args

from flyweight import __version__
from flyweight.checks import check_memory_bytes, check_version
from flyweight.errors import PeerLost, SpecError, StoreError, TransferTimeout, VersionError
from flyweight.events import emit
from flyweight.formats import snapshot
from flyweight.formats.huggingface import PART_BYTES
from flyweight.formats.writer import Beside, seal, write
from flyweight.memory import MEMORY_BYTES
from flyweight.ports import Format, Source
from flyweight.ranks.group import Group
from flyweight.spec.manifest import (
    Manifest,
    TensorBox,
    check_coverage,
    check_files,
    check_leaf,
    check_names,
)
from flyweight.spec.manifest_json import decode_share, encode_manifest
from flyweight.stores.draft import LocalDraft
from flyweight.verbs.check_replicas import CheckReplicas, check_same, digest_of
from flyweight.verbs.find import check_no_version, is_committed, numbered, versions
from flyweight.worker_threads import default_threads


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How to write. A verb builds this once, and every step receives it unchanged."""

    version: int | None = None
    """The version to write; None for one more than the newest."""
    check_replicas: CheckReplicas = "digest"
    part_bytes: int = PART_BYTES
    """The most bytes of one file."""
    memory_bytes: int = MEMORY_BYTES
    num_threads: int | None = None
    verb: str = "save"
    """Names the events: progress of this verb, and `<verb>.done`."""

    def __post_init__(self) -> None:
        if self.version is not None:
            object.__setattr__(self, "version", check_version(self.version))
        how = self.check_replicas
        if not isinstance(how, str) or how not in get_args(CheckReplicas):
            raise SpecError(f"check_replicas is {how!r}, not 'digest' or 'sampled'")
        check_memory_bytes(self.memory_bytes)

    @property
    def threads(self) -> int:
        return default_threads() if self.num_threads is None else self.num_threads


@dataclass(frozen=True)
class SaveReport:
    """What a save wrote; with a process group, what this rank wrote."""

    place: str
    """The directory or file that was written."""
    version: int | None
    """None for formats without versions."""
    num_tensors: int
    num_files: int
    nbytes: int
    seconds: float
    left_out: list[str] = field(default_factory=list)
    """Values that are not tensors and that the format cannot hold."""
    told_as_integers: list[str] = field(default_factory=list)
    """Tensors of a pickle that may be bf16 or fp8, written as the integers that it has."""

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class WrittenMessage:
    """From each rank to the coordinator: its files are durable."""

    written: str
    """The manifest of these files, as JSON."""
    replicas: tuple[int, ...]
    """The digests of the boxes in `ShareMessage.same`."""


@dataclass
class PendingCommit:
    """Files that are planned and not committed yet; `write_and_commit` ends it."""

    source: Source
    options: SaveOptions
    draft: LocalDraft
    manifest: Manifest
    """All ranks' tensors at the coordinator and in a process alone, else this rank's."""
    format: Format
    group: Group = field(default_factory=Group)
    share: Sequence[TensorBox] = ()
    """What this rank writes of a version."""
    beside: Sequence[Beside] = ()
    """Jobs that compute `checksums`, done while some threads wait for the disk."""
    checksums: Sequence[Sequence[int]] | None = None
    """Of this rank's boxes that other ranks hold too. None if one process writes everything."""
    compared: Sequence[Sequence[TensorBox]] = ()
    """At the coordinator: the boxes that each rank sends a digest of."""
    started: float = field(default_factory=perf_counter)

    def write(self, progress: Callable[[int], None]) -> SaveReport:
        """Write this rank's files and return once they are committed."""
        draft, options = self.draft, self.options

        def tick(nbytes: int) -> None:
            self.group.tick()
            progress(nbytes)

        written, plans = write(
            self.source,
            self.manifest,
            self.format,
            draft,
            num_threads=options.threads,
            memory_bytes=options.memory_bytes,
            verb=options.verb,
            tick=tick,
            beside=self.beside,
        )
        with _telling_of_another_writer(self.manifest.version, Path(draft.place).parent):
            if self.checksums is None:
                seal(written, plans, self.format, draft)
                draft.commit()
            else:
                with self.group.working():
                    self._commit_together(replace(written, files=snapshot.files_of(plans)))
        return SaveReport(
            draft.place,
            self.manifest.version,
            len({extent.name for extent in written.extents}),
            len({extent.file for extent in written.extents}),
            sum(written.tensors[e.name].box_bytes(e.box) for e in written.extents),
            perf_counter() - self.started,
            [] if self.format.has_values else sorted(self.manifest.values),
        )

    def _commit_together(self, written: Manifest) -> None:
        """Tell the coordinator what this rank wrote; commit once every rank's files are durable."""
        group, draft = self.group, self.draft
        names = {extent.name for extent in written.extents}
        tensors = {name: spec for name, spec in written.tensors.items() if name in names}
        text = encode_manifest(replace(written, tensors=tensors, tied={}, values={}))
        message = WrittenMessage(text.decode(), tuple(map(digest_of, self.checksums or ())))
        draft.flush()
        draft.is_handed_over = True  # from here on the coordinator may commit at any moment
        messages = group.gather_typed("written", message)
        if group.is_coordinator:
            self._seal_together(messages)
            draft.commit()
        try:
            group.broadcast("commit", None)
        except (PeerLost, TransferTimeout) as error:
            state = "committed all the same" if draft.has_appeared() else "not committed yet"
            error.note(f"version {self.manifest.version} in {draft.place!r} is {state}")
            raise

    def _seal_together(self, messages: Sequence[WrittenMessage]) -> None:
        """Check what all ranks wrote, and write the manifest of all of it."""
        shares = [decode_share(each.written.encode()) for each in messages]
        is_sampled = self.options.check_replicas == "sampled"
        replicas = [each.replicas for each in messages]
        check_same(self.compared, replicas, () if is_sampled else shares)
        whole = replace(
            self.manifest,
            files=[part for share in shares for part in share.files],
            extents=[extent for share in shares for extent in share.extents],
        )
        check_files(whole)
        check_coverage(whole)
        seal(whole, (), self.format, self.draft)


def write_and_commit(
    pending: PendingCommit, progress: Callable[[int], None] = lambda nbytes: None
) -> SaveReport:
    """Write and commit, then emit the event that says so; remove the draft if that fails.

    `progress` is called with the bytes of each write.
    """
    with pending.draft:
        report = pending.write(progress)
    emit(
        f"{pending.options.verb}.done",
        place=report.place,
        version=report.version,
        nbytes=report.nbytes,
        seconds=report.seconds,
    )
    return report


@contextmanager
def _telling_of_another_writer(version: int | None, root: Path) -> Iterator[None]:
    """Raise a name that is taken as a VersionError: when the save began, it was free."""
    try:
        yield
    except StoreError as error:
        if error.errno != errno.EEXIST or version is None:
            raise
        raise VersionError(
            f"version {version} of {str(root)!r} was committed by another writer meanwhile"
        ) from error


def begin_draft(root: Path, version: int | None, manifest: Manifest) -> tuple[LocalDraft, Manifest]:
    """Return a draft for the version, and its manifest; raise if it may not be written."""
    check_names(manifest)
    for name, value in manifest.values.items():
        check_leaf(name, value)
    check_no_version(root)
    committed = versions(root)
    newest = committed[-1] if committed else None
    version = max(numbered(root), default=-1) + 1 if version is None else version
    directory = root / snapshot.directory_name(version)
    if newest is not None and version <= newest:
        how = "is there already" if version in committed else f"is older than the newest, {newest}"
        raise VersionError(
            f"version {version} of {str(root)!r} {how}; versions only grow, none is overwritten"
        )
    if os.path.lexists(directory) and not is_committed(directory):
        raise VersionError(
            f"{str(directory)!r} is there without a {snapshot.MANIFEST!r}, so it is no version; "
            f"remove it, or save another version"
        )
    writer = {
        "flyweight": __version__,
        "host": platform.node(),
        "pid": str(os.getpid()),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    # A manifest of its own: that of an opened checkpoint has the files of another version.
    tensors, tied, values = manifest.tensors, manifest.tied, manifest.values
    with _telling_of_another_writer(version, root):
        draft = LocalDraft(directory)
    return draft, Manifest(tensors, version, newest, tied, values, writer)
