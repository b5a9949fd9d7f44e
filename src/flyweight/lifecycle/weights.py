"""StoredWeights and NearestWeights: load an engine's weights from snapshots, or from both.

NearestWeights prefers a publisher and falls back to snapshots. A requested version stays the
same version on every fallback.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from time import monotonic, perf_counter, sleep
from typing import Any

from flyweight.adapters.identity import Identity
from flyweight.errors import (
    FlyweightError,
    FormatError,
    LifecycleError,
    PeerLost,
    PlanError,
    SpecError,
    TransferTimeout,
    VersionError,
    listed,
)
from flyweight.events import Event, listening
from flyweight.formats.stored import Stored
from flyweight.lifecycle.load_together import load_together
from flyweight.live import Replica, check_verified, unverified
from flyweight.ports import UpdateOptions, UpdateReport
from flyweight.ranks.agreement import raise_first
from flyweight.spec.manifest import Json
from flyweight.spec.model_layout import ModelLayout
from flyweight.verbs.find import PathLike, open_source, versions
from flyweight.verbs.load import Extra, LoadReport, load

_PATIENCE_SECONDS, _LOOK_SECONDS, _LEAST_SECONDS = 0.5, 0.5, 0.001


class StoredWeights:
    """The versions in one directory of snapshots or checkpoint files.

    Args:
        model: the model to load into.
        path: a directory of versions, or any checkpoint that `fw.load` reads.
        layout, rank, extra, partial_over: as in `fw.load`.
    """

    num_ranks = None
    """Any number of ranks load together."""
    rereads = False
    """True if files without a version number are read again for each update."""

    def __init__(
        self,
        model: object,
        path: PathLike,
        *,
        layout: ModelLayout | None = None,
        rank: int | None = None,
        extra: Extra = "refuse",
        partial_over: int | None = None,
    ) -> None:
        self._model, self._path = model, path
        self._layout, self._rank, self._extra = layout, rank, extra
        self._vouched = self._partial_over = partial_over
        self._written: frozenset[str] = frozenset()
        """Tensors that partial loads have replaced since `partial_over` was complete."""
        self._version: int | None = None
        self._number: int | None = None
        """The version number in the files, or None if they have none."""
        self._session = ""
        self._identity: Identity | None = None
        self._report: UpdateReport | None = None
        self.progress = 0.0
        self.has_written = False
        """True once an update has overwritten the model."""

    @property
    def version(self) -> int | None:
        """The version that the model holds; None if its tensors were replaced or moved."""
        identity = self._identity
        if self._version is not None and identity is not None and not identity.is_same():
            self.forget("its tensors were replaced, or have moved")
        return self._version

    @property
    def session(self) -> str:
        """Identifies the loaded files by content: equal on all ranks that loaded them."""
        return "" if self.version is None else self._session

    @property
    def newest(self) -> int:
        """The newest version in the directory, or -1."""
        return max(versions(self._path), default=-1)

    def take(self, options: UpdateOptions) -> UpdateReport:
        """Load a version, or the newest; wait for a newer one if the model holds the newest.

        Loads nothing if the model holds the version, or with `may_keep` the newest, and the files
        have not changed since. Raises PlanError or SpecError if the files do not fit the model,
        which then keeps its version.
        """
        if options.exchange is None:
            return self._take(options)
        return load_together(self, self._take, options, options.exchange)

    def _take(self, options: UpdateOptions) -> UpdateReport:
        version = options.version
        deadline = monotonic() + options.timeout_seconds
        while version is None and not self._has_newer():
            if options.may_keep and self._number == self.newest:
                version = self._number
                break
            if monotonic() > deadline or options.is_over():
                raise self._nothing_newer()
            sleep(max(min(_LOOK_SECONDS, deadline - monotonic()), 0.0))
        started = perf_counter()
        with ExitStack() as stack:
            held = self.version
            stored = stack.enter_context(self._opened(version))
            session = self._session_of(stored)
            number = stored.manifest.version
            is_held = held is not None and (number, session) == (self._number, self._session)
            if is_held and number is not None:  # files without a number may have changed
                if version is not None and self._report is not None:
                    check_verified(self._report, options.must_verify)
                    return self._report
                raise self._nothing_newer()
            if not stored.manifest.names:
                raise SpecError(f"{stored.store.place!r} holds no tensors")
            found = 0 if number is None else number
            if options.must_verify and any(
                each.checksums is None for each in stored.manifest.extents
            ):
                raise unverified(found, "snapshot")
            if options.before is not None:
                options.before(found)
            target = Identity(self._model)
            self.has_written = True
            try:
                report = self._loaded(stored)
            except (PlanError, SpecError):  # names, dtypes and shapes are matched before a write
                self.has_written = False
                raise
        filled = Identity(self._model)
        if not filled.has_tensors_of(target):
            self.forget("its tensors were replaced meanwhile")
            raise VersionError(
                f"tensors of the model were replaced, or have moved, while version {found} was "
                f"read into them; update again"
            )
        self._identity, self._number, self._session = filled, number, session
        self._version = found
        self._report = UpdateReport(
            found, None, report.nbytes, perf_counter() - started, 0.0, report.seconds, 0.0,
            "files", "snapshot", "checksums" if report.checked_bytes else "nothing",
        )  # fmt: skip
        return self._report

    def _loaded(self, stored: Stored) -> LoadReport:
        names, over = frozenset(stored.manifest.names), self._partial_over
        if over is not None and (gone := self._written - names):
            raise PlanError(
                f"{stored.store.place!r} lacks {len(gone)} tensors that no longer hold version "
                f"{over}, since other parts filled them: {listed(gone)}"
            )
        held, self._version, self.progress = self._version, None, 0.0
        self._partial_over = None  # after a failed load, some tensors may be of neither version
        try:
            with listening(self._advance):
                report = load(
                    stored,
                    into=self._model,
                    layout=self._layout,
                    rank=self._rank,
                    extra=self._extra,
                    partial_over=over,
                )
        except (PlanError, SpecError):  # nothing was written
            self._version, self._partial_over = held, over
            raise
        is_whole = self._vouched is not None and stored.manifest.version == self._vouched
        self._partial_over = self._vouched if is_whole or report.kept else None
        self._written = frozenset() if is_whole else names.difference(report.unused)
        return report

    def _has_newer(self) -> bool:
        held = self.version
        if held is None:
            return True
        newest = self.newest
        if newest < 0:
            return self.rereads
        return self._number is None or newest > held

    def _nothing_newer(self) -> TransferTimeout:
        return TransferTimeout(f"{str(self._path)!r} has nothing newer than version {self.version}")

    def _opened(self, version: int | None) -> Stored:
        return open_source(self._path, version=version)

    def _session_of(self, stored: Stored) -> str:
        # Not by paths and times: ranks on several machines may have copies of the files.
        return f"files {stored.fingerprint():016x}"

    def _advance(self, event: Event) -> None:
        # Events of any load in this process: two loads at once only show a wrong progress.
        if event.kind == "progress" and event.fields.get("verb") == "load":
            done, total = event.fields["done_bytes"], event.fields["total_bytes"]
            if isinstance(done, int) and isinstance(total, int) and total:
                self.progress = done / total

    def forget(self, reason: str) -> None:
        """Forget the version that is held, and `partial_over`."""
        self._version = self._identity = self._partial_over = None

    def wake(self) -> None:
        """Do nothing: `update` looks at the directory every half second."""


class NearestWeights:
    """Weights from a publisher while one can be reached, else from replicas or from snapshots.

    An engine without weights loads a snapshot instead of waiting for a trainer to come back. An
    engine with weights loads newer snapshots while no publisher can be reached. Other replicas that
    the connection knows are asked before the snapshots.

    Args:
        replica: the connection to the publisher.
        stored: the snapshots.
    """

    def __init__(self, replica: Replica, stored: StoredWeights) -> None:
        self._replica, self._stored = replica, stored

    @property
    def num_ranks(self) -> int:
        return self._replica.num_ranks

    @property
    def version(self) -> int | None:
        stored = self._stored.version
        if self._stored.has_written:
            return stored
        if self._replica.state in ("updating", "failed"):
            return None
        return self._replica.version if stored is None else stored

    @property
    def session(self) -> str:
        """The session of the source that was loaded last."""
        if self.version is None:
            return ""
        return self._replica.session if self._stored.version is None else self._stored.session

    @property
    def progress(self) -> float:
        source = self._stored if self._stored.has_written else self._replica
        return source.progress

    def take(self, options: UpdateOptions) -> UpdateReport:
        """Load a version from the publisher if it is there soon, else from files, else wait.

        Without a version: the publisher's next one, or, while no publisher can be reached, one of
        another replica, or else a snapshot, that is newer than the current version. If the
        publisher has nothing newer, wait for it.
        With `may_keep` the current version is enough if its source confirms that it is the newest.

        The ranks of an engine choose the source together, after each try of the publisher.
        """
        deadline, self._stored.has_written = monotonic() + options.timeout_seconds, False
        patience = min(_PATIENCE_SECONDS, options.timeout_seconds)
        begun: list[int] = []
        missing: FlyweightError | None = None

        def begin(found: int) -> None:
            begun.append(found)
            if options.before is not None:
                options.before(found)

        how = replace(options, before=begin)
        while True:
            try:
                return self._from_publisher(replace(how, timeout_seconds=patience), deadline)
            except Exception as error:  # a loader may raise anything, and the ranks must hear of it
                failure = error
            if options.is_over():
                raise failure
            may_go_on = isinstance(failure, (PeerLost, TransferTimeout, VersionError))
            is_refused = missing is not None and isinstance(failure, VersionError)
            is_late = monotonic() >= deadline
            said = self._hear_ranks(
                options, failure, is_end=bool(begun) or is_refused or not may_go_on, is_late=is_late
            )
            is_late = any(each["is_late"] for each in said)
            if _should_read(options.version, said) and not (is_late and missing):
                try:
                    return self._from_files(how)
                except (FormatError, VersionError, TransferTimeout) as error:
                    if begun:
                        raise
                    missing = error
            elif is_late:
                if missing is not None and isinstance(failure, FlyweightError):
                    failure.note(f"and no snapshot would do: {missing}")
                raise failure
            left = max(deadline - monotonic(), _LEAST_SECONDS)
            is_there = all(each["is_there"] for each in said)
            patience = left if is_there else min(_PATIENCE_SECONDS, left)

    def _hear_ranks(
        self, options: UpdateOptions, failure: Exception, *, is_end: bool, is_late: bool
    ) -> list[dict[str, Any]]:
        """Return what each rank knows; raise if the publisher's try has ended the update on one."""
        mine: dict[str, Json] = {
            "is_end": is_end,
            "is_late": is_late,
            "is_there": self._replica.is_connected,
            "held": self.version,
            "newest": self._stored.newest,
            "may_keep_file": options.may_keep and self._stored.version is not None,
        }
        said: list[dict[str, Any]] = [mine]
        if options.exchange is not None:
            try:
                said = options.exchange("choose a source", failure if is_end else None, **mine)
            except (LifecycleError, PeerLost) as lost:  # nobody reads files
                if isinstance(failure, FlyweightError):
                    failure.note(str(lost))
                raise failure from lost
            raise_first(said, failure if is_end else None)
        elif is_end:
            raise failure
        return said

    def _from_publisher(self, options: UpdateOptions, deadline: float) -> UpdateReport:
        # Others may take until the deadline to begin: they hold a version, and files may be older.
        left = max(deadline - monotonic() - options.timeout_seconds, 0.0)
        try:
            return self._replica.take(options, peer_seconds=left)
        finally:
            if self._replica.state != "empty":  # it wrote, or tried to
                self._stored.forget("a publisher's version was loaded over it")

    def _from_files(self, options: UpdateOptions) -> UpdateReport:
        options = replace(options, timeout_seconds=0)  # `take` waits for files that do not exist
        if options.exchange is None:
            return self._read(options)
        return load_together(self, self._read, options, options.exchange)

    def _read(self, options: UpdateOptions) -> UpdateReport:
        try:
            return self._stored.take(replace(options, exchange=None))
        finally:
            if self._stored.has_written:
                version = self._stored.version
                self._replica.forget("a snapshot was loaded over it", loaded=version)
                self._replica.last_version = version

    def forget(self, reason: str) -> None:
        self._replica.forget(reason)
        self._stored.forget(reason)

    def wake(self) -> None:
        self._replica.wake()


def _should_read(version: int | None, said: list[dict[str, Any]]) -> bool:
    """True if all ranks read files now; they all have the same answers. Pure."""
    held = [each["held"] for each in said if each["held"] is not None]
    newest = max(min(each["newest"] for each in said), 0)  # files without a number count as 0
    if version is not None or any(each["may_keep_file"] for each in said):
        return True
    if len(held) < len(said):  # a rank holds nothing, and no other has to go back for it
        return all(each <= newest for each in held)
    return not any(each["is_there"] for each in said) and all(each < newest for each in held)
