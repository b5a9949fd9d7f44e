"""Reports: what a publish did, for the trainer, and what an update did, for the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from flyweight.errors import FlyweightError, TransferTimeout, VersionError
from flyweight.ports import UpdateReport

TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class ReplicaReport:
    """How a publish ended for one replica."""

    name: str
    pid: int
    nbytes: int
    seconds: float
    copy_seconds: float
    verify_seconds: float
    """What the digest of its live parameters took, beside or after the copy."""
    strategy: str
    error: FlyweightError | None = None
    is_touched: bool = False
    """True if it failed and no longer holds the version it had."""

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class PublishReport:
    """What a publish did. `nbytes` counts what all replicas took together."""

    version: int
    nbytes: int
    seconds: float
    digest_seconds: float
    """What it took to digest the published weights; replicas copy meanwhile."""
    replicas: tuple[ReplicaReport, ...] = ()

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)

    @property
    def failed(self) -> tuple[ReplicaReport, ...]:
        return tuple(each for each in self.replicas if each.error is not None)

    def __str__(self) -> str:
        if not self.replicas:
            return f"version {self.version}: no replica was listening"
        ways = "+".join(sorted({each.strategy for each in self.replicas}))
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return (
            f"version {self.version}: {self.nbytes} bytes to {len(self.replicas)} replicas{failed} "
            f"in {1000 * self.seconds:.1f} ms, {self.gb_per_second:.1f} GB/s, {ways}"
        )


class Lease:
    """A publish that goes on behind the trainer's back."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._released = threading.Event()
        self._report: Future[PublishReport] = Future()

    @property
    def is_copied(self) -> bool:
        return self._released.is_set()

    @property
    def is_done(self) -> bool:
        return self._report.done()

    def wait_copied(self, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Return once nothing reads the trainer's memory any more, so that it may step."""
        if not self._released.wait(timeout_seconds):
            raise TransferTimeout(
                f"version {self.version} is still being copied after {timeout_seconds:g} s"
            )

    def wait(self, timeout_seconds: float = TIMEOUT_SECONDS) -> PublishReport:
        """Return the report, once every replica has come to its end."""
        try:
            return self._report.result(timeout_seconds)
        except FutureTimeout as cause:
            if self._report.done():
                raise
            raise TransferTimeout(
                f"version {self.version} is still under way after {timeout_seconds:g} s"
            ) from cause

    def release(self) -> None:
        self._released.set()

    def end(self, work: Callable[[], PublishReport]) -> None:
        """Do the work, and tell whoever waits how it ended, whatever that was."""
        try:
            self._report.set_result(work())
        except BaseException as error:  # raised again by `wait`
            self._report.set_exception(error)
        finally:
            self._released.set()


def check_verified(report: UpdateReport, must_verify: bool) -> None:
    """Raise VersionError if checksums were to be compared, and the version came without."""
    if must_verify and report.verified == "nothing":
        raise unverified(report.version, report.origin)


def unverified(version: int, origin: str) -> VersionError:
    return VersionError(
        f"version {version} comes from a {origin} without checksums, and they were to be compared; "
        f"publish with should_verify=True, or save it with flyweight"
    )
