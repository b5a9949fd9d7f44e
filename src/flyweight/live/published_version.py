"""Editions: one version of a stock as it can be read, how it is published, and how that ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flyweight.checks import check_seconds
from flyweight.errors import FlyweightError, SpecError
from flyweight.live.lanes import STRATEGIES, Offers, Strategy
from flyweight.live.members import Peer
from flyweight.live.report import PublishReport, ReplicaReport
from flyweight.live.round import Part, Round
from flyweight.live.source import Region, Stock
from flyweight.spec.manifest import Leaf
from flyweight.verbs.find import PathLike


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a publisher works. All that a replica must know of it is told in messages."""

    hold: bool
    store: PathLike | None
    strategy: Strategy
    bucket_bytes: int | None
    depth: int | None
    should_verify: bool
    timeout_seconds: float
    silence_seconds: float

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise SpecError(f"strategy is {self.strategy!r}, not one of {', '.join(STRATEGIES)}")
        if self.depth is not None and (type(self.depth) is not int or self.depth < 1):
            raise SpecError(f"depth is {self.depth!r}, at least 1 bucket is needed")
        size = self.bucket_bytes
        if size is not None and (type(size) is not int or size < 4096):
            raise SpecError(f"bucket_bytes is {size!r}, at least 4096 are needed")
        check_seconds("timeout_seconds", self.timeout_seconds)
        if check_seconds("silence_seconds", self.silence_seconds) <= 0:
            raise SpecError("silence_seconds is 0; who may never be silent is always given up")


@dataclass(eq=False)
class Edition:
    """A version, and where it can be read."""

    version: int
    parent: int | None
    stock: Stock
    offers: Offers
    origin: str
    values: Mapping[str, Leaf]
    digests: dict[Region, int] | None = None
    """Of what outlives the publisher they are told at once, and kept; of others, None."""
    digest_seconds: float = 0.0
    """What it took to see that nothing changed while it was made."""
    is_gone: bool = False
    """True once something else is about to take its place in memory."""


def no_release() -> None:
    """What is to be done when nothing of the trainer's was lent."""


def at_once(round_: Round) -> bool:
    round_.begin()
    return True


def failed_report(peer: Peer, error: FlyweightError) -> ReplicaReport:
    return ReplicaReport(peer.name, peer.hello.pid, 0, 0.0, 0.0, 0.0, "nothing", error)


def report_of(
    version: int,
    parts: Sequence[Part],
    failed: Sequence[ReplicaReport],
    seconds: float,
    digest_seconds: float,
) -> PublishReport:
    replicas = (
        *failed,
        *(_ended(part) for part in parts),
    )
    return PublishReport(
        version, sum(each.nbytes for each in replicas), seconds, digest_seconds, replicas
    )


def _ended(part: Part) -> ReplicaReport:
    return ReplicaReport(
        part.name,
        part.pid,
        part.nbytes if part.is_committed else 0,
        part.seconds,
        0.0 if part.done is None else part.done.copy_seconds,
        0.0 if part.done is None else part.done.verify_seconds,
        part.begin.strategy,
        part.error,
        part.error is not None and part.is_touched,
    )
