"""Reports: the results of a publish, for the trainer, and of an update, for the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from logging import getLogger

from flyweight.errors import FlyweightError, TransferTimeout, VersionError
from flyweight.events import announce
from flyweight.plans.tables import Table
from flyweight.ports import UpdateReport

TIMEOUT_SECONDS = 30.0
_MAX_REASONS = 5
_MAX_REFUSED = 100
_log = getLogger("flyweight.live")


class ReplicaReport(Table, frozen=True):
    """The result of a publish for one replica."""

    name: str
    """The name that the replica was made with."""
    pid: int
    nbytes: int = 0
    """The bytes that it received; 0 if it failed."""
    seconds: float = 0.0
    """From the start of the round to its commit."""
    copy_seconds: float = 0.0
    """The time that it spent copying."""
    verify_seconds: float = 0.0
    """The time that it spent on digests of its parameters, during or after the copy."""
    strategy: str = "nothing"
    """How the tensors got there: 'mapped', 'bucketed', 'host', or several joined by '+'."""
    error: FlyweightError | None = None
    """Why it failed; None if it holds the version."""
    is_touched: bool = False
    """True if it failed and no longer holds the version that it had before."""

    @classmethod
    def joined(cls, ranks: Sequence[ReplicaReport]) -> ReplicaReport:
        """Return the report of a replica from those of its ranks; the slowest counts."""
        first, errors = ranks[0], [each.error for each in ranks if each.error is not None]
        if len(ranks) == 1:
            return first
        return cls(
            first.name,
            first.pid,
            sum(each.nbytes for each in ranks),
            max(each.seconds for each in ranks),
            max(each.copy_seconds for each in ranks),
            max(each.verify_seconds for each in ranks),
            "+".join(sorted({each.strategy for each in ranks})),
            errors[0] if errors else None,
            any(each.is_touched for each in ranks),
        )

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)


class PublishReport(Table, frozen=True):
    """The result of a publish."""

    version: int
    nbytes: int
    """The bytes that all replicas received together."""
    seconds: float
    """The time of the rounds; the wait for replicas before them is not included."""
    digest_seconds: float
    """The time spent on digests of the published weights, before replicas copy them."""
    replicas: tuple[ReplicaReport, ...] = ()
    """One report for each replica that took part, or was refused since the last publish."""

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)

    @property
    def failed(self) -> tuple[ReplicaReport, ...]:
        """The replicas that did not get the version."""
        return tuple(each for each in self.replicas if each.error is not None)

    def __str__(self) -> str:
        if not self.replicas:
            return f"version {self.version}: no replica was waiting"
        lanes = "+".join(sorted({each.strategy for each in self.replicas}))
        failed = f", {len(self.failed)} failed" if self.failed else ""
        text = (
            f"version {self.version}: {self.nbytes} bytes to {len(self.replicas)} replicas{failed} "
            f"in {1000 * self.seconds:.1f} ms, {self.gb_per_second:.1f} GB/s, {lanes}"
        )
        reasons = [f"{each.name!r}: {each.error}" for each in self.failed[:_MAX_REASONS]]
        more = len(self.failed) - len(reasons)
        return "; ".join([text, *reasons, *([f"and {more} more"] if more else [])])


class Lease:
    """A publish that runs in the background, while it reads the trainer's memory and after."""

    def __init__(self, version: int, *, stays: bool = False) -> None:
        self.version = version
        self.stays = stays
        """True if replicas may read the memory after the publish too."""
        self._copied = threading.Event()
        self._report: Future[PublishReport] = Future()

    @property
    def is_copied(self) -> bool:
        """True once the trainer may change its weights."""
        return self._copied.is_set()

    @property
    def is_done(self) -> bool:
        """True once `wait` returns at once."""
        return self._report.done()

    def wait_copied(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Return once no replica reads the trainer's memory, so that it may change.

        Raises TransferTimeout after `timeout_seconds`.
        """
        if not self._copied.wait(timeout_seconds):
            raise TransferTimeout(
                f"version {self.version} is still being copied after {timeout_seconds:g} s"
            )

    def wait(self, timeout_seconds: float = TIMEOUT_SECONDS) -> PublishReport:
        """Return the report, once every replica has committed or failed.

        Raises what ended the publish, or TransferTimeout after `timeout_seconds`.
        """
        try:
            return self._report.result(timeout_seconds)
        except FutureTimeout as cause:
            if self._report.done():
                raise
            raise TransferTimeout(
                f"version {self.version} is still under way after {timeout_seconds:g} s"
            ) from cause

    def release(self) -> None:
        """Let the trainer change its weights; called by the publisher."""
        self._copied.set()

    def run(self, publish: Callable[[], PublishReport]) -> None:
        """Call `publish`, and hand what it returns or raises to `wait`."""
        try:
            self._report.set_result(publish())
        except BaseException as error:
            self._report.set_exception(error)
        finally:
            self._copied.set()


def check_verified(report: UpdateReport, must_verify: bool) -> None:
    """Raise VersionError if `must_verify` and the version came without checksums."""
    if must_verify and report.verified == "nothing":
        raise unverified(report.version, report.origin)


class RefusedReplicas:
    """The replicas that were refused since the last publish, by name; the latest are kept."""

    def __init__(self) -> None:
        self._reports: dict[str, ReplicaReport] = {}

    def add(self, report: ReplicaReport) -> None:
        self.forget(report.name)
        self._reports[report.name] = report
        if len(self._reports) > _MAX_REFUSED:
            del self._reports[next(iter(self._reports))]

    def forget(self, name: str) -> None:
        self._reports.pop(name, None)

    def take(self) -> list[ReplicaReport]:
        """Return all, and forget them."""
        found, self._reports = list(self._reports.values()), {}
        return found


def unverified(version: int, origin: str) -> VersionError:
    return VersionError(
        f"version {version} comes from a {origin} without checksums, and must_verify is set; "
        f"publish with should_verify=True, or save it with flyweight"
    )


def announce_update(name: str, report: UpdateReport, last: int | None) -> None:
    """Emit the events of an update that succeeded; `last` is the version of the one before."""
    version = report.version
    if last is not None and version < last:  # a trainer that was restarted may do so
        announce("update.went_back", version=version, before=last, name=name)
        _log.warning("replica %s went back from version %d to %d", name, last, version)
    done = {"version": version, "nbytes": report.nbytes, "seconds": report.seconds}
    announce("update.done", name=name, **done)
