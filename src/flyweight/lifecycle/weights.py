"""StoredWeights: an engine's weights from snapshots or checkpoints, where nobody publishes.

A `Replica` with `fallback=` takes what a publisher has, and files while there is none.
"""

from __future__ import annotations

from contextlib import ExitStack
from time import monotonic, perf_counter, sleep

from flyweight.adapters.identity import Identity
from flyweight.errors import PlanError, SpecError, TransferTimeout, VersionError, listed
from flyweight.formats.stored import Stored
from flyweight.lifecycle.load_together import load_together
from flyweight.ports import UpdateOptions, UpdateReport
from flyweight.spec.model_layout import ModelLayout
from flyweight.verbs.find import PathLike, open_source, versions
from flyweight.verbs.load import LoadReport, load
from flyweight.verbs.load_by import showing_progress

_LOOK_SECONDS = 0.5


class StoredWeights:
    """The versions in one directory of snapshots or checkpoint files.

    Args:
        model: the model to load into.
        path: a directory of versions, or any checkpoint that `fw.load` reads.
        layout, rank, partial_over: as in `fw.load`.
        strict: refuse files with tensors that the model lacks; else they are in `unused`.
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
        strict: bool = True,
        partial_over: int | None = None,
    ) -> None:
        self._model, self._path = model, path
        self._layout, self._rank, self._is_strict = layout, rank, strict
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
        self.unused: tuple[str, ...] = ()
        """Tensors of the files that were loaded last, which the model lacks."""

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
        version, asked = options.version, perf_counter()
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
                    options.check_verified(self._report.version, self._report.verified)
                    return self._report
                raise self._nothing_newer()
            if not stored.manifest.names:
                raise SpecError(f"{stored.store.place!r} holds no tensors")
            found = 0 if number is None else number
            is_checked = all(each.checksums is not None for each in stored.manifest.extents)
            options.check_verified(found, "checksums" if is_checked else "nothing")
            if options.before is not None:
                options.before(found)
            paused, target = perf_counter(), Identity(self._model)
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
        ended = perf_counter()
        self._report = UpdateReport(
            version=found,
            parent=None,
            nbytes=report.nbytes,
            seconds=ended - started,
            wait_seconds=started - asked,
            fetch_seconds=0.0,
            drain_seconds=paused - started,
            copy_seconds=ended - paused,
            verify_seconds=0.0,
            transport="files",
            verified="checksums" if report.checked_bytes else "nothing",
        )
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
            with showing_progress(self._show):
                report = load(
                    stored,
                    into=self._model,
                    layout=self._layout,
                    rank=self._rank,
                    extra="refuse" if self._is_strict else "report",
                    partial_over=over,
                )
        except (PlanError, SpecError):  # nothing was written
            self._version, self._partial_over = held, over
            raise
        is_whole = self._vouched is not None and stored.manifest.version == self._vouched
        self._partial_over = self._vouched if is_whole or report.kept else None
        self._written = frozenset() if is_whole else names.difference(report.unused)
        self.unused = tuple(report.unused)
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

    def _show(self, done: float) -> None:
        self.progress = done

    def forget(self, reason: str) -> None:
        """Forget the version that is held, and `partial_over`."""
        self._version = self._identity = self._partial_over = None

    def wake(self) -> None:
        """Do nothing: `update` looks at the directory every half second."""
