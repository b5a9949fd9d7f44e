"""Sinks: what a replica's weights go to, whichever it is, and what a round feeds it.

A taker says what it wants, then takes it in as it comes: from memory that is mapped, and
from buckets. It gives the digest of what it holds for each copy of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flyweight.cuda import driver
from flyweight.digest import DigestKind
from flyweight.errors import TransportError
from flyweight.live.intake import Intake
from flyweight.live.messages import Begin, Want
from flyweight.spec.manifest import Leaf, TensorSpec


@dataclass
class Taken:
    """What came of a round, before it is committed."""

    digests: tuple[int, ...]
    copy_seconds: float
    verify_seconds: float


class Feed(Protocol):
    """The buckets of a round, as they are filled."""

    def next(self) -> int:
        """Wait for the next bucket and return its number."""

    def emptied(self, bucket: int) -> None:
        """Give a bucket back."""

    def copied(self) -> None:
        """Tell that nothing is read any more; digests may follow."""

    def touch(self) -> None:
        """From now on what was there is no longer whole."""

    def advance(self, nbytes: int) -> None:
        """Tell that so many more bytes have come."""

    @property
    def deadline(self) -> float: ...


class Taker(Protocol):
    """Where weights go."""

    verified: str
    """What its digests are of, in a word."""

    @property
    def has_devices(self) -> bool:
        """True if some of it is a device's memory."""

    def is_current(self) -> bool:
        """False if what was wanted is no longer what is there, and must be wanted anew."""

    def want(self, tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]) -> Want: ...

    def settle(self, deadline: float) -> None:
        """Wait for what still reads the old weights, before a round may begin."""

    def take(self, intake: Intake, begin: Begin, feed: Feed) -> Taken: ...

    def touched(self) -> None:
        """Tell the framework that weights were written, however that ended."""

    def finish(self, values: Mapping[str, Leaf]) -> None:
        """Take over what is no tensor, once the version is committed."""

    def close(self) -> None: ...


def checked_kind(taker: Taker, begin: Begin) -> DigestKind:
    """Return how to digest; raise for a way that a device has not."""
    if taker.has_devices and begin.digest_kind != "words":
        raise TransportError(
            f"the publisher wants {begin.digest_kind} digests of a device's memory"
        )
    return begin.digest_kind


def seen_devices(devices: Sequence[int]) -> tuple[str, ...]:
    """Return the GPUs that this process sees, if it has anything on one."""
    return tuple(map(driver.uuid, range(driver.num_devices()))) if devices else ()
