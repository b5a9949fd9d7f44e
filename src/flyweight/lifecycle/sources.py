"""Sources of weights beside a publisher: snapshots, and the nearest of both.

The version that was asked for never changes on the way from one source to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, perf_counter, sleep

from flyweight.errors import (
    FlyweightError,
    FormatError,
    PeerLost,
    PlanError,
    SpecError,
    TransferTimeout,
    VersionError,
)
from flyweight.events import Event, listening
from flyweight.spec.rules import ModelLayout
from flyweight.sync.replica import Replica
from flyweight.sync.report import UpdateReport
from flyweight.verbs.find import PathLike, open_source, versions
from flyweight.verbs.load import Extra, load

_PATIENCE_SECONDS, _LOOK_SECONDS = 0.5, 0.5


class StoredWeights:
    """Versions at rest in one directory."""

    def __init__(
        self,
        model: object,
        path: PathLike,
        *,
        layout: ModelLayout | None = None,
        rank: int | None = None,
        extra: Extra = "refuse",
    ) -> None:
        self._model, self._path = model, path
        self._layout, self._rank, self._extra = layout, rank, extra
        self.version: int | None = None
        self.session = ""
        self.progress = 0.0
        self._report: UpdateReport | None = None

    def update(
        self,
        version: int | None = None,
        *,
        timeout_seconds: float,
        before: Callable[[int], None],
        is_over: Callable[[], bool],
    ) -> UpdateReport:
        """Load a version, or the newest; wait for one if the newest is held already."""
        deadline = monotonic() + timeout_seconds
        while version is None and self.version is not None and self._newest() <= self.version:
            if monotonic() > deadline or is_over():
                raise TransferTimeout(
                    f"{str(self._path)!r} has nothing newer than version {self.version}"
                )
            sleep(max(min(_LOOK_SECONDS, deadline - monotonic()), 0.0))
        started = perf_counter()
        if version is not None and version == self.version and self._report is not None:
            return self._report
        with open_source(self._path, version=version) as stored:
            found = 0 if stored.manifest.version is None else stored.manifest.version
            self.progress = 0.0
            before(found)
            held, self.version = self.version, None
            try:
                with listening(self._advance):
                    report = load(
                        stored,
                        into=self._model,
                        layout=self._layout,
                        rank=self._rank,
                        extra=self._extra,
                        timeout_seconds=timeout_seconds,
                    )
            except (PlanError, SpecError):  # found before the first byte was written
                self.version = held
                raise
        self.version = found
        self._report = UpdateReport(
            found, None, report.nbytes, perf_counter() - started, 0.0, report.seconds, 0.0,
            "files", "snapshot", "checksums" if report.checked_bytes else "nothing",
        )  # fmt: skip
        return self._report

    def _newest(self) -> int:
        return max(versions(self._path), default=-1)

    def _advance(self, event: Event) -> None:
        # Of any load in this process: a second one at the same time would only be seen wrongly.
        if event.kind == "progress" and event.fields.get("verb") == "load":
            done, total = event.fields["done_bytes"], event.fields["total_bytes"]
            if isinstance(done, int) and isinstance(total, int) and total:
                self.progress = done / total

    def forget(self, reason: str) -> None:
        self.version = None

    def rouse(self) -> None:
        """Nothing waits here."""


class NearestWeights:
    """A publisher's versions while there is a publisher, and snapshots while there is none.

    An engine that holds nothing does not wait for a trainer that may be long in coming back.
    """

    def __init__(self, replica: Replica, stored: StoredWeights) -> None:
        self._replica, self._stored, self._is_reading = replica, stored, False

    @property
    def version(self) -> int | None:
        if self._replica.state in ("updating", "failed"):
            return None
        return self._replica.version if self._stored.version is None else self._stored.version

    @property
    def session(self) -> str:
        return self._replica.session

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
    ) -> UpdateReport:
        """Take a version from the publisher if one is there soon, else from files, else wait."""
        deadline, self._is_reading = monotonic() + timeout_seconds, False
        begun: list[int] = []
        missing: FlyweightError | None = None

        def begin(found: int) -> None:
            begun.append(found)
            before(found)

        def touch(found: int) -> None:
            self._is_reading = True
            begin(found)
            self._replica.forget("a snapshot was loaded over it")

        if self.version is None or version is not None:
            try:
                patience = min(_PATIENCE_SECONDS, timeout_seconds)
                return self._from_publisher(version, patience, begin, is_over)
            except (PeerLost, TransferTimeout, VersionError):
                if begun or is_over():
                    raise  # a round that began and did not end well: whoever asked must know
            left = max(deadline - monotonic(), 0.001)
            try:
                return self._stored.update(
                    version, timeout_seconds=left, before=touch, is_over=is_over
                )
            except (FormatError, VersionError, TransferTimeout) as error:
                if begun or monotonic() > deadline:
                    raise
                missing = error
        left = max(deadline - monotonic(), 0.001)
        try:
            return self._from_publisher(version, left, begin, is_over)
        except TransferTimeout as error:
            if missing is not None:
                error.note(f"and no snapshot would do: {missing}")
            raise

    def _from_publisher(
        self,
        version: int | None,
        timeout_seconds: float,
        before: Callable[[int], None],
        is_over: Callable[[], bool],
    ) -> UpdateReport:
        try:
            return self._replica.update(
                version, timeout_seconds=timeout_seconds, before=before, is_over=is_over
            )
        finally:
            if self._replica.state != "empty":  # it was written over, well or not
                self._stored.forget("a publisher's version came")

    def forget(self, reason: str) -> None:
        self._replica.forget(reason)
        self._stored.forget(reason)

    def rouse(self) -> None:
        self._replica.rouse()
