"""Reports: the result of a publish, now or in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import msgspec

from flyweight.errors import TransferTimeout
from flyweight.live.messages import Result
from flyweight.plans.tables import Table
from flyweight.spec.box import Box

TIMEOUT_SECONDS = 30.0
_MAX_REASONS = 5


class PublishReport(Table, frozen=True):
    """The result of a publish, the same on all ranks."""

    version: int
    seconds: float
    """From the call to its end, without the time before the ranks and the memory were ready."""
    digest_seconds: float
    """The time spent on digests of the published weights, before replicas copy them."""
    replicas: tuple[Result, ...] = ()
    """One for each replica that is done, or was refused since the last publish."""
    pending: tuple[str, ...] = ()
    """The replicas that have fetched the version, or were too late, and are not done."""

    @property
    def nbytes(self) -> int:
        """The bytes that all replicas received together."""
        return sum(each.nbytes for each in self.replicas)

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / 1e9 / max(self.seconds, 1e-9)

    @property
    def failed(self) -> tuple[Result, ...]:
        """The replicas that did not get the version."""
        return tuple(each for each in self.replicas if each.error)

    def __str__(self) -> str:
        if not self.replicas:
            return f"version {self.version}: no replica was waiting"
        ways = "+".join(sorted({each.transport for each in self.replicas if each.transport}))
        failed = f", {len(self.failed)} failed" if self.failed else ""
        text = (
            f"version {self.version}: {self.nbytes} bytes to {len(self.replicas)} replicas{failed} "
            f"in {1000 * self.seconds:.1f} ms, {self.gb_per_second:.1f} GB/s, {ways or 'nothing'}"
        )
        reasons = [f"{each.name!r}: {each.error}" for each in self.failed[:_MAX_REASONS]]
        more = len(self.failed) - len(reasons)
        return "; ".join([text, *reasons, *([f"and {more} more"] if more else [])])


class LiveRow(msgspec.Struct, frozen=True):
    """A box of a tensor of the trainer, and whether the live memory holds its bytes."""

    name: str
    box: Box
    is_equal: bool
    digests: tuple[int, ...]
    """Of the trainer's bytes, for each part of the box that lies in one block of the trainer."""


class LiveReport(msgspec.Struct, frozen=True):
    """What `Replica.check_live` has found."""

    version: int
    """The version that the memory was compared with."""
    session: str
    """An id of the publisher that the version is from."""
    nbytes: int
    seconds: float
    rows: tuple[LiveRow, ...]

    @property
    def different(self) -> tuple[str, ...]:
        """The names of the tensors that differ anywhere."""
        return tuple(dict.fromkeys(each.name for each in self.rows if not each.is_equal))

    @property
    def equal(self) -> tuple[str, ...]:
        """The names of the tensors of which everything that lies here is equal."""
        different = set(self.different)
        names = (each.name for each in self.rows if each.name not in different)
        return tuple(dict.fromkeys(names))


class Publication:
    """A publish that runs in the background, while it reads the trainer's memory and after."""

    def __init__(self, version: int) -> None:
        self.version = version
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
        """Return once nobody reads the trainer's memory, so that it may change.

        Raises TransferTimeout after `timeout_seconds`.
        """
        if not self._copied.wait(timeout_seconds):
            raise TransferTimeout(
                f"version {self.version} is still being copied after {timeout_seconds:g} s"
            )

    def wait(self, timeout_seconds: float = TIMEOUT_SECONDS) -> PublishReport:
        """Return the report, once every replica that was waiting is done or has failed.

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

    def copied(self) -> None:
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
