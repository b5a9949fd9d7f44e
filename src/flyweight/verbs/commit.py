"""Pending: a save that all ranks agreed on, from then until it is committed or gone.

Two phases. Every rank writes its share under the draft's hidden name and makes it
durable; then the coordinator, who has heard that from all of them, writes the
manifest and commits. Until that rename there is nothing to be seen, whoever dies.
"""

from __future__ import annotations

import errno
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter

from flyweight import __version__
from flyweight.checks import check_version
from flyweight.errors import (
    FormatError,
    PeerLost,
    PlanError,
    SpecError,
    StoreError,
    TransferTimeout,
    VersionError,
)
from flyweight.events import emit
from flyweight.formats import snapshot
from flyweight.formats.writer import Beside, seal, write
from flyweight.memory import collector_paused
from flyweight.plans.shares import Holding, share_out
from flyweight.ports import FilePlan, Format, Source
from flyweight.ranks.group import Group
from flyweight.spec.manifest import (
    CHUNK_BYTES,
    Json,
    Manifest,
    Parcel,
    check_coverage,
    check_files,
    check_leaf,
    check_names,
)
from flyweight.stores.draft import LocalDraft, check_hidden_name
from flyweight.stores.local import as_path
from flyweight.verbs.check_replicas import (
    CheckReplicas,
    ReplicaDigests,
    check_same,
    digests_of,
    unwritten,
)
from flyweight.verbs.find import PathLike, check_no_version, versions
from flyweight.verbs.rank_messages import (
    decode_holding,
    decode_parcels,
    decode_written,
    encode_holding,
    encode_parcels,
    encode_written,
    holding_of,
)
from flyweight.worker_threads import default_threads


@dataclass(frozen=True)
class SaveReport:
    """What a save did; of the ranks of a group, what this rank did."""

    place: str
    version: int | None
    num_tensors: int
    num_files: int
    nbytes: int
    seconds: float
    left_out: list[str] = field(default_factory=list)
    """Values that are no tensors and that the format has no place for."""
    told_as_integers: list[str] = field(default_factory=list)
    """Tensors of a pickle that may be bf16 or fp8, written as the integers that it has."""

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)


def emit_done(verb: str, report: SaveReport) -> None:
    emit(
        f"{verb}.done",
        place=report.place,
        version=report.version,
        nbytes=report.nbytes,
        seconds=report.seconds,
    )


@dataclass
class PendingSave:
    """A save that all ranks agreed on, before the first byte is written."""

    group: Group
    draft: LocalDraft
    manifest: Manifest
    """Of all ranks together at the coordinator; elsewhere of this rank."""
    format: Format
    share: Sequence[Parcel]
    """What this rank writes."""
    is_whole: bool = False
    """True if this rank is alone and holds whole tensors, so that its files are for others too."""
    replicas: Sequence[Sequence[Parcel]] = ()
    """At the coordinator, what each rank compares with others."""
    check_replicas: CheckReplicas = "digest"
    found: ReplicaDigests = field(default_factory=ReplicaDigests)
    """What this rank finds of its replicas; its jobs are done before the commit."""

    def __enter__(self) -> PendingSave:
        return self

    def __exit__(self, *raised: object) -> None:
        self.draft.abort()

    def write(
        self,
        source: Source,
        *,
        memory_bytes: int,
        num_threads: int | None,
        started: float,
        verb: str = "save",
        progress: Callable[[int], None] | None = None,
        beside: Sequence[Beside] = (),
    ) -> SaveReport:
        """Write this rank's share, have the coordinator commit, and return when it has.

        `beside` is other work, done by the same threads while some of them wait for the disk.
        """
        group, draft = self.group, self.draft

        def tick(nbytes: int) -> None:
            group.tick()
            if progress is not None:
                progress(nbytes)

        written, plans = write(
            source,
            self.manifest,
            self.format,
            draft,
            num_threads=default_threads() if num_threads is None else num_threads,
            memory_bytes=memory_bytes,
            verb=verb,
            tick=tick,
            beside=beside,
        )
        try:
            if self.is_whole:
                seal(written, plans, self.format, draft)
                draft.commit()
            else:
                with group.working():
                    written = self._commit_together(written, plans)
        except StoreError as error:
            if error.errno != errno.EEXIST:
                raise
            raise VersionError(
                f"version {self.manifest.version} of {str(Path(draft.place).parent)!r} was "
                f"committed by another writer meanwhile"
            ) from error
        return SaveReport(
            draft.place,
            self.manifest.version,
            len({extent.name for extent in written.extents}),
            len({extent.file for extent in written.extents}),
            sum(written.tensors[e.name].box_bytes(e.box) for e in written.extents),
            perf_counter() - started,
        )

    def _commit_together(self, written: Manifest, plans: Sequence[FilePlan]) -> Manifest:
        """Commit once every rank's files are durable; returns what this rank wrote."""
        group, draft = self.group, self.draft
        written = replace(written, parts=snapshot.parts_of(plans))
        draft.flush()
        message: Json = {
            "written": encode_written(written),
            "replicas": list(self.found.values()),
        }
        draft.is_handed_over = True  # from here on the coordinator may commit at any moment
        answers = group.gather("written", message)
        if group.is_coordinator:
            shares = [
                decode_written(each["written"] if isinstance(each, dict) else None)
                for each in answers
            ]
            check_same(
                self.replicas,
                [each.get("replicas") if isinstance(each, dict) else None for each in answers],
                digests_of(shares) if self.check_replicas == "digest" else {},
            )
            whole = replace(
                self.manifest,
                parts=[part for share in shares for part in share.parts],
                extents=[extent for share in shares for extent in share.extents],
            )
            check_files(whole)
            check_coverage(whole)
            seal(whole, (), self.format, draft)
            draft.commit()
        try:
            group.broadcast("commit", None)
        except (PeerLost, TransferTimeout) as error:
            state = "there all the same: it had been" if draft.has_appeared() else "not yet"
            error.note(f"version {self.manifest.version} in {draft.place!r} is {state} committed")
            raise
        return written


def begin_version(
    source: Source,
    path: PathLike,
    *,
    version: int | None,
    part_bytes: int,
    group: Group,
    check_replicas: CheckReplicas,
) -> PendingSave:
    """Have all ranks agree on what will be written, where and by whom; every rank must call."""
    with group.working():
        return _begun(
            source,
            as_path(path),
            version=version,
            part_bytes=part_bytes,
            group=group,
            check_replicas=check_replicas,
        )


def _begun(
    source: Source,
    root: Path,
    *,
    version: int | None,
    part_bytes: int,
    group: Group,
    check_replicas: CheckReplicas,
) -> PendingSave:
    version = None if version is None else check_version(version)
    with collector_paused():
        holding = holding_of(source)
    if group.num_ranks == 1 and _is_whole(holding):
        draft, manifest = _begin_draft(root, version, source.manifest)
        format = snapshot.snapshot_format(part_bytes)
        return PendingSave(group, draft, manifest, format, manifest.parcels(), is_whole=True)
    message: Json = {
        "run": root.name,
        "version": version,
        "check": check_replicas,
        "holding": encode_holding(holding),
    }
    answers = group.gather("agree", message)
    if not group.is_coordinator:
        order = group.scatter("begin", ())
        match order:
            case {"version": int() as number, "draft": str() as name, "share": share, "same": same}:
                pass
            case _:
                raise FormatError(f"the coordinator orders {str(order)[:80]}")
        parcels = decode_parcels(share, holding.tensors)
        same = decode_parcels(same, holding.tensors)
        found = ReplicaDigests.begun(same, source, check_replicas)
        directory = root / snapshot.directory_name(number)
        draft = LocalDraft(directory, member_of=check_hidden_name(name))
        manifest = Manifest(holding.tensors, version=number, chunk_bytes=CHUNK_BYTES)
        format = snapshot.share_format(group.rank, parcels, part_bytes)
        return PendingSave(group, draft, manifest, format, parcels, found=found)
    for rank, each in enumerate(answers):
        run = each.get("run") if isinstance(each, dict) else None
        if run != root.name:
            raise SpecError(f"rank {rank} saves to {run!r}, rank {group.rank} to {root.name!r}")
        theirs = each.get("version") if isinstance(each, dict) else None
        if theirs != version:
            raise VersionError(
                f"rank {rank} saves version {theirs}, rank {group.rank} version {version}"
            )
        theirs = each.get("check") if isinstance(each, dict) else None
        if theirs != check_replicas:
            raise SpecError(
                f"rank {rank} checks replicas by {theirs!r}, rank {group.rank} by "
                f"{check_replicas!r}; check_replicas is the same on every rank"
            )
    holdings = [
        decode_holding(each.get("holding") if isinstance(each, dict) else None) for each in answers
    ]
    try:
        sharing = share_out(holdings)
    except PlanError as error:
        if group.num_ranks == 1:
            error.note("this is one rank of several: all must save together, by process_group")
        raise
    compared = sharing.replicas
    if check_replicas == "digest":  # who writes a box has its checksums anyway
        compared = [unwritten(*each) for each in zip(compared, sharing.shares, strict=True)]
    together = Manifest(sharing.tensors, tied=sharing.tied, values=sharing.values)
    draft, manifest = _begin_draft(root, version, together)
    try:
        orders: list[Json] = [
            {
                "version": manifest.version,
                "draft": draft.name,
                "share": encode_parcels(share),
                "same": encode_parcels(same),
            }
            for share, same in zip(sharing.shares, compared, strict=True)
        ]
        group.scatter("begin", orders)
        mine = sharing.shares[group.rank]
        return PendingSave(
            group,
            draft,
            manifest,
            snapshot.share_format(group.rank, mine, part_bytes),
            mine,
            replicas=compared,
            check_replicas=check_replicas,
            found=ReplicaDigests.begun(compared[group.rank], source, check_replicas),
        )
    except BaseException:
        draft.abort()
        raise


def _is_whole(holding: Holding) -> bool:
    return all(
        len(boxes) == 1 and boxes[0].shape == holding.tensors[name].shape
        for name, boxes in holding.boxes.items()
    )


def _begin_draft(
    root: Path, version: int | None, manifest: Manifest
) -> tuple[LocalDraft, Manifest]:
    """Return a draft for the version, and its manifest; raise if it may not be written."""
    check_names(manifest)
    for name, value in manifest.values.items():
        check_leaf(name, value)
    check_no_version(root)
    committed = versions(root)
    newest = committed[-1] if committed else None
    version = _next_version(root) if version is None else version
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
    return LocalDraft(directory), replace(
        manifest,
        version=version,
        parent=newest,
        writer=_writer(),
        parts=(),
        extents=(),
        chunk_bytes=CHUNK_BYTES,
    )


def _next_version(root: Path) -> int:
    """Return the number after all that are there, also after what is no whole version."""
    names = os.listdir(root) if root.is_dir() else []
    taken = [found for name in names if (found := snapshot.version_of(name)) is not None]
    return max(taken, default=-1) + 1


def _writer() -> dict[str, str]:
    return {
        "flyweight": __version__,
        "host": platform.node(),
        "pid": str(os.getpid()),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
