"""Sources of weights beside a publisher: snapshots, and the nearest of both.

The version that was asked for never changes on the way from one source to the next.
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
    """Versions at rest in one directory."""

    rereads = False
    """Whether files that have no version are read each time, or taken once and held."""

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
        """What parts have filled since then, and no longer holds the version vouched for."""
        self._version: int | None = None
        self._number: int | None = None
        """What the files say of the version; they may say nothing."""
        self._session = ""
        self._identity: Identity | None = None
        self._report: UpdateReport | None = None
        self.progress = 0.0

    @property
    def version(self) -> int | None:
        """The version that the model's tensors hold; None once they are others, or have moved."""
        self._look()
        return self._version

    @property
    def session(self) -> str:
        """Tells apart what was loaded, by its content: the same on all ranks that loaded it."""
        return "" if self.version is None else self._session

    @property
    def newest(self) -> int:
        """The newest version that is there; -1 if none is."""
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
        """Load a version, or the newest; wait for one if the newest is held already.

        What is held is enough if it is the version that is named, or with `may_keep` the newest,
        and its files still are what was loaded. What does not fit the model raises PlanError or
        SpecError, and what was held stays.
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
            if is_held and number is not None:  # files without one may be others by now
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
        self._partial_over = None  # what fails half-way leaves tensors that nobody vouches for
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
        # Not by paths and times: ranks of several machines may have copies of their own.
        return f"files {stored.fingerprint():016x}"

    def _advance(self, event: Event) -> None:
        # Of any load in this process: a second one at the same time would only be seen wrongly.
        if event.kind == "progress" and event.fields.get("verb") == "load":
            done, total = event.fields["done_bytes"], event.fields["total_bytes"]
            if isinstance(done, int) and isinstance(total, int) and total:
                self.progress = done / total

    def forget(self, reason: str) -> None:
        """Hold no version any more; what files lack is gone as well."""
        self._version = self._identity = self._partial_over = None

    def wake(self) -> None:
        """Nothing waits here for longer than a look at the directory."""


class NearestWeights:
    """A publisher's versions while there is a publisher, and snapshots while there is none.

    An engine that holds nothing does not wait for a trainer that may be long in coming back; one
    that holds something takes snapshots that are newer, as long as no publisher can be reached.
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
        """That of whichever was written last."""
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
        """Take a version from the publisher if one is there soon, else from files, else wait.

        Without a number: the publisher's next, or, while no publisher can be reached, a snapshot
        that is newer than what is held. A publisher that has nothing newer is waited for. With
        `may_keep` what is held is enough if the side that it came from says that it is the newest.
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
                    raise  # a round that began and did not end well: whoever asked must know
                failure, is_there = error, self._replica.is_connected
            held = self.version
            may_keep_file = may_keep and self._stored.version is not None
            is_asked = version is not None or held is None or may_keep_file
            if is_asked or (held is not None and not is_there and self._stored.newest > held):
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
            if self._replica.state != "empty":  # it was written over, well or not
                self._stored.forget("a publisher's version came")

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
            return self._stored.update(  # files that are not there yet are waited for in `update`
                version, timeout_seconds=0, before=begin, is_over=is_over, **how
            )
        except (PlanError, SpecError):  # found before the first byte was written
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
