"""The seam between a round and what a replica writes: live parameters, or an engine's loader.

An `UpdateSink` says which tensors it wants. In a round it receives them, from memory that is
mapped and from buckets, and returns the digest of what it holds for each copy of the plan.
`MemorySink` and `LoaderSink` implement it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flyweight.cuda import driver
from flyweight.digest import DigestKind
from flyweight.errors import TransportError
from flyweight.live.messages import Begin, Want
from flyweight.live.remote_source import RemoteSource
from flyweight.spec.manifest import Leaf, TensorSpec


@dataclass(frozen=True)
class SinkResult:
    """What a sink received in a round, before the round is committed."""

    digests: tuple[int, ...]
    """The digest of each copy; empty if the round does not verify."""
    copy_seconds: float
    verify_seconds: float


class SinkRound(Protocol):
    """The round that a sink receives: what comes, from where, and whom to tell."""

    @property
    def source(self) -> RemoteSource: ...

    @property
    def begin(self) -> Begin: ...

    @property
    def deadline(self) -> float:
        """The time, by the monotonic clock, by which the next step must be done."""

    def next_bucket(self) -> int:
        """Wait for the next bucket and return its number."""

    def bucket_emptied(self, bucket: int) -> None:
        """Free the slot of a bucket, whose bytes are copied."""

    def copied(self) -> None:
        """Say that no memory of the publisher is read any more; digests may follow."""

    def touch(self) -> None:
        """Say that the old version is overwritten from now on."""

    def on_progress(self, nbytes: int) -> None:
        """Count bytes that were copied."""


class UpdateSink(Protocol):
    """What an update writes to."""

    verified: str
    """What its digests are computed from, for reports: 'live' or 'received'."""

    @property
    def has_devices(self) -> bool:
        """True if some of it is in device memory."""

    def is_current(self) -> bool:
        """True while the tensors are those that `want` returned."""

    def want(self, tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]) -> Want:
        """Return which boxes of the publisher's tensors it wants.

        Raises PlanError or SpecError if its own tensors cannot be written.
        """

    def synchronize(self, deadline: float) -> None:
        """Wait for work of devices that still reads the old weights."""

    def receive(self, round_: SinkRound) -> SinkResult:
        """Call `round_.touch`, then write all tensors; return their digests."""

    def touched(self) -> None:
        """Tell the framework that tensors were written, successfully or not."""

    def finish(self, values: Mapping[str, Leaf]) -> None:
        """Set the values that are not tensors, once the version is committed."""

    def close(self) -> None:
        """Free what was prepared. Safe to repeat."""


def checked_kind(sink: UpdateSink, begin: Begin) -> DigestKind:
    """Return the kind of digest of a round; raise if a device cannot compute it."""
    if sink.has_devices and begin.digest_kind != "words":
        raise TransportError(
            f"the publisher wants {begin.digest_kind} digests; device memory has 'words' only"
        )
    return begin.digest_kind


def visible_devices(devices: Sequence[int]) -> tuple[str, ...]:
    """Return the uuids of the GPUs that this process sees, if it uses any."""
    return tuple(map(driver.uuid, range(driver.num_devices()))) if devices else ()
