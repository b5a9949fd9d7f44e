"""SourceRank: a rank of a publisher other than 0, as rank 0 sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flyweight.digest import DigestKind
from flyweight.errors import FlyweightError, PeerFailed
from flyweight.live.messages import Memory
from flyweight.live.rank_messages import (
    Ended,
    HoldsCopy,
    Offered,
    ShareOffer,
    ShareTable,
    StartedShare,
)
from flyweight.live.report import PublishReport
from flyweight.live.source import Share
from flyweight.live.source_blocks import Agreement
from flyweight.plans.tables import packed
from flyweight.spec.manifest import Leaf
from flyweight.transports.cuda_ipc import CudaIpcHandle
from flyweight.transports.fd_passing import FdConnection, FdServer
from flyweight.transports.network_engines import Engines
from flyweight.transports.shared_memory import SharedMemoryHandle

REMEMBERED_SHARES = 64
"""How many shares a follower remembers; rank 0 knows which, as both see the same messages."""


@dataclass(eq=False)
class SourceRank:
    """A rank other than 0."""

    rank: int
    id: bytes = b""
    """The id of its connection; empty before it has connected."""
    line: str = ""
    engines: Engines = field(default_factory=Engines)
    last_seen: float = 0.0
    files: FdConnection | None = None
    ready: int | None = None
    """The version that it is publishing; None between two publishes."""
    is_in: bool = False
    """True if it takes part in the publish under way."""
    values: Mapping[str, Leaf] = field(default_factory=dict)
    fault: tuple[int, FlyweightError] | None = None
    """The version that it could not publish, and why, until rank 0 publishes that version."""
    missed: Ended | None = None
    """The end of the last publish that failed before this rank was ready for it."""
    offered: Offered | None = None
    copy: HoldsCopy | None = None
    shares: dict[int, Share] = field(default_factory=dict)
    """The shares that it remembers, the latest last."""
    memory: dict[int, tuple[int, Memory]] = field(default_factory=dict)
    """The memory that it has offered for each share, and its number."""
    keys: set[str] = field(default_factory=set)
    """The files of its memory that this process passes on."""

    def started_shares(
        self, agreements: Sequence[Agreement], kinds: Sequence[DigestKind]
    ) -> tuple[StartedShare, ...]:
        """Return the shares of a round that read this rank, with tables of those it lacks."""
        wanted = [
            (agreement.shares[self.rank][1], kind)
            for agreement, kind in zip(agreements, kinds, strict=True)
            if self.rank in agreement.shares
        ]
        known = set(self.shares)
        for share, _ in wanted:
            remember(self.shares, share)
        for forgotten in self.memory.keys() - self.shares.keys():
            del self.memory[forgotten]
        return tuple(
            StartedShare(
                share.number,
                kind,
                self.memory.get(share.number, (0, None))[0],
                None if share.number in known else share_table(share),
            )
            for share, kind in wanted
        )

    def memory_of(self, agreement: Agreement) -> Memory:
        """Return the memory that it has offered for its share of an agreement."""
        _, share = agreement.shares[self.rank]
        return self.memory[share.number][1]

    def has_given_up(self, version: int) -> bool:
        """True if it could not publish a version, or gave up a later one."""
        return self.fault is not None and self.fault[0] >= version

    def take_offers(self, agreements: Sequence[Agreement]) -> dict[Agreement, ShareOffer]:
        """Return what it offers for each agreement that reads it, and keep the memory."""
        assert self.offered is not None
        found, offers = {}, iter(self.offered.offers)
        for agreement in agreements:
            if self.rank in agreement.shares:
                offer = next(offers, None)
                if offer is None:
                    raise PeerFailed(f"source rank {self.rank} offers less than the round needs")
                found[agreement] = offer
        if any(each.memory is not None for each in found.values()):
            # What it offered for replicas that are not in this round may be gone.
            numbers = {each.shares[self.rank][1].number for each in found}
            self.memory = {n: each for n, each in self.memory.items() if n in numbers}
        for agreement, offer in found.items():
            if offer.memory is not None:
                self.memory[agreement.shares[self.rank][1].number] = offer.lists, offer.memory
        return found

    def pass_on_files(self, server: FdServer) -> None:
        """Offer the files of this rank's memory under the keys that they have there."""
        if self.files is None:  # it is on another host, and is read over the network
            return
        needed = {key for _, memory in self.memory.values() for key in _keys(memory)}
        if self.copy is not None:
            needed.add(self.copy.handle.key)
        for key in needed - self.keys:
            server.offer(self.files.fetch(key), key)
        for key in self.keys - needed:
            server.release(key)
        self.keys = needed


def _keys(memory: Memory) -> set[str]:
    """Return the keys of the files that memory is fetched by."""
    found = set()
    for handle in (*memory.handles, *memory.slots.values()):
        if isinstance(handle, CudaIpcHandle):
            found |= {piece.key for piece in handle.pieces}
            found |= {handle.register} if handle.register else set()
        elif isinstance(handle, SharedMemoryHandle):
            found.add(handle.key)
    return found


def share_table(share: Share) -> ShareTable:
    """Return a share as a message."""
    regions = share.regions
    return ShareTable(
        share.number,
        regions.shape.shape[1],
        packed(regions.block),
        packed(regions.offset),
        packed(regions.shape),
        packed(share.source),
        tuple(share.places),
        packed(share.place),
        tuple(sorted(share.devices)),
        share.engine,
    )


def remember(shares: dict[int, Share], share: Share) -> None:
    """Remember a share as the latest; forget the one that was not used for longest.

    Rank 0 and a follower call it for the same shares in the same order.
    """
    shares.pop(share.number, None)
    shares[share.number] = share
    while len(shares) > REMEMBERED_SHARES:
        del shares[next(iter(shares))]


def failed_publish(version: int, error: BaseException, last: int | None = None) -> Ended:
    """Return the end of a publish that failed; `last` is the version that was published last."""
    if not isinstance(error, FlyweightError):
        error = PeerFailed(f"source rank 0: {type(error).__name__}: {error}")
    return Ended(PublishReport(version, 0, 0.0, 0.0), error, last)
