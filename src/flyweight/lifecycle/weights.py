"""StoredWeights and NearestWeights: load an engine's weights from snapshots, or from both.

NearestWeights prefers a publisher and falls back to snapshots. A requested version stays the
same version on every fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic, perf_counter, sleep

from flyweight.adapters.identity import Identity
from flyweight.errors import (
    FlyweightError,
    FormatError,
    PeerLost,
    PlanError,
    SpecError,
    TransferTimeout,
    VersionError,
    listed,
)
from flyweight.events import Event, listening
from flyweight.formats.stored import Stored
from flyweight.live.replica import Replica
from flyweight.live.report import check_verified, unverified
from flyweight.ports import UpdateReport
from flyweight.spec.model_layout import ModelLayout
from flyweight.verbs.find import PathLike, open_source, versions
from flyweight.verbs.load import Extra, LoadReport, load

_PATIENCE_SECONDS, _LOOK_SECONDS = 0.5, 0.5


class StoredWeights:
    """The versions in one directory of snapshots or checkpoint files.

    Args:
        model: the model to load into.
        path: a directory of versions, or any checkpoint that `fw.load` reads.
        layout, rank, extra, partial_over: as in `fw.load`.
    """

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

    @property
    def version(self) -> int | None:
        """The version that the model holds; None if its tensors were replaced or moved."""
        self._look()
        return self._version

    @property
    def session(self) -> str:
        """Identifies the loaded files by content: equal on all ranks that loaded them."""
        return "" if self.version is None else self._session

    @property
    def newest(self) -> int:
        """The newest version in the directory, or -1."""
        return max(versions(self._path), default=-1)

    def _look(self) -> None:
        if self._version is None or self._identity is None or self._identity.is_same():
            return
        self.forget("its tensors were replaced, or have moved")

    def update(
        self,
        version: int | None = None,
        *,
        timeout_seconds: float,
        before: Callable[[int], None],
        is_over: Callable[[], bool],
        may_keep: bool = False,
        must_verify: bool = False,
    ) -> UpdateReport:
        """Load a version, or the newest; wait for a newer one if the model holds the newest.

        Loads nothing if the model holds `version`, or with `may_keep` the newest, and the files
        have not changed since. Raises PlanError or SpecError if the files do not fit the model,
        which then keeps its version.
        """
        deadline = monotonic() + timeout_seconds
        while version is None and not self._has_newer():
            if may_keep and self._number == self.newest:
                version = self._number
                break
            if monotonic() > deadline or is_over():
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
                    check_verified(self._report, must_verify)
                    return self._report
                raise self._nothing_newer()
            if not stored.manifest.names:
                raise SpecError(f"{stored.store.place!r} holds no tensors")
            found = 0 if number is None else number
            if must_verify and any(each.checksums is None for each in stored.manifest.extents):
                raise unverified(found, "snapshot")
            before(found)
            target = Identity(self._model)
            report = self._loaded(stored)
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
        except (PlanError, SpecError):  # names, dtypes and shapes are matched before a write
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
    """Weights from a publisher while one can be reached, else from snapshots.

    An engine without weights loads a snapshot instead of waiting for a trainer to come back. An
    engine with weights loads newer snapshots while no publisher can be reached.

    Args:
        replica: the connection to the publisher.
        stored: the snapshots.
    """

    def __init__(self, replica: Replica, stored: StoredWeights) -> None:
        self._replica, self._stored, self._is_reading = replica, stored, False

    @property
    def version(self) -> int | None:
        stored = self._stored.version
        if self._is_reading:
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
        return self._stored.progress if self._is_reading else self._replica.progress

    def update(
        self,
        version: int | None = None,
        *,
        timeout_seconds: float,
        before: Callable[[int], None],
        is_over: Callable[[], bool],
        may_keep: bool = False,
        must_verify: bool = False,
    ) -> UpdateReport:
        """Load a version from the publisher if it is there soon, else from files, else wait.

        Without `version`: the publisher's next version, or, while no publisher can be reached, a
        snapshot newer than the current version. If the publisher has nothing newer, wait for it.
        With `may_keep` the current version is enough if its source confirms that it is the newest.
        """
        deadline, self._is_reading = monotonic() + timeout_seconds, False
        how = {"may_keep": may_keep, "must_verify": must_verify}
        patience = min(_PATIENCE_SECONDS, timeout_seconds)
        begun: list[int] = []
        missing: FlyweightError | None = None

        def begin(found: int) -> None:
            begun.append(found)
            before(found)

        while True:
            try:
                return self._from_publisher(version, patience, begin, is_over, **how)
            except (PeerLost, TransferTimeout, VersionError) as error:
                is_refused = missing is not None and isinstance(error, VersionError)
                if begun or is_over() or is_refused:
                    raise  # a round failed after it began: the caller must know
                failure, is_there = error, self._replica.is_connected
            held = self.version
            may_keep_file = may_keep and self._stored.version is not None
            is_requested = version is not None or held is None or may_keep_file
            if is_requested or (held is not None and not is_there and self._stored.newest > held):
                try:
                    return self._from_files(version, begin, is_over, **how)
                except (FormatError, VersionError, TransferTimeout) as error:
                    if begun:
                        raise
                    missing = error
            left = deadline - monotonic()
            if left <= 0:
                if missing is not None:
                    failure.note(f"and no snapshot would do: {missing}")
                raise failure
            patience = left if is_there else min(_PATIENCE_SECONDS, left)

    def _from_publisher(
        self,
        version: int | None,
        timeout_seconds: float,
        before: Callable[[int], None],
        is_over: Callable[[], bool],
        **how: bool,
    ) -> UpdateReport:
        try:
            return self._replica.update(
                version, timeout_seconds=timeout_seconds, before=before, is_over=is_over, **how
            )
        finally:
            if self._replica.state != "empty":  # it wrote, or tried to
                self._stored.forget("a publisher's version was loaded over it")

    def _from_files(
        self,
        version: int | None,
        before: Callable[[int], None],
        is_over: Callable[[], bool],
        **how: bool,
    ) -> UpdateReport:
        def begin(found: int) -> None:
            before(found)
            self._is_reading = True

        try:
            return self._stored.update(  # `update` waits for files that do not exist yet
                version, timeout_seconds=0, before=begin, is_over=is_over, **how
            )
        except (PlanError, SpecError):  # raised before the first write
            self._is_reading = False
            raise
        finally:
            if self._is_reading:
                self._replica.forget("a snapshot was loaded over it")
                self._replica.last_version = self._stored.version

    def forget(self, reason: str) -> None:
        self._replica.forget(reason)
        self._stored.forget(reason)

    def wake(self) -> None:
        self._replica.wake()
