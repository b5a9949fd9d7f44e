"""A member: a connected replica, what was agreed with it, and what its publisher knows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from flyweight.digest import DigestKind
from flyweight.live.lanes import HOST, Offers
from flyweight.live.messages import Ask, Block, Copy, Hello, ReplicaNews
from flyweight.live.round import MemberRound, Round
from flyweight.live.source import PublishedSource, Region


@dataclass(frozen=True, eq=False)
class Agreement:
    """The copies that a replica gets, and the blocks that they go to."""

    copies: tuple[Copy, ...]
    sinks: Sequence[Block]
    nbytes: int
    devices: frozenset[str]
    """The GPUs that the replica's process sees."""

    def digest_kind(self, source: PublishedSource) -> DigestKind:
        """Return 'xxh3' if both sides are on the host, else 'words', which a GPU can compute.

        Files have digests of kind 'words', which need not be computed from their bytes.
        """
        return "xxh3" if source.is_on_host and self._is_on_host else "words"

    def regions(self, kind: DigestKind) -> tuple[Region, ...]:
        """Return the region that each copy reads, with this kind of digest."""
        if kind not in self._regions:
            self._regions[kind] = tuple(
                Region(copy.source, copy.source_offset, copy.shape, kind) for copy in self.copies
            )
        return self._regions[kind]

    @cached_property
    def _is_on_host(self) -> bool:
        return all(sink.place == HOST for sink in self.sinks)

    @cached_property
    def _regions(self) -> dict[DigestKind, tuple[Region, ...]]:
        return {}


@dataclass(eq=False)
class Member:
    """A connected replica."""

    id: bytes
    hello: Hello
    last_seen: float
    """When its last message arrived."""
    agreement: Agreement | None = None
    request: Ask | None = None
    """The version that it waits for."""
    round: tuple[Round, MemberRound] | None = None
    """The round that it is in, and its progress there."""
    searched_request: int = 0
    """The number of the last request for which the store was searched."""
    is_busy: bool = False
    """True while it is in a round, or about to be."""
    request_in_round: int = 0
    """The number of the request that the round answers, even if it was withdrawn since."""
    lanes: tuple[Offers, dict[int, str]] | None = None
    lists_number: int = 0
    """The number of the lists of places, slots and buckets that it was sent last."""
    lists_sent: object = None
    """The lists that it was sent last, so that they are not sent again."""
    version: int | None = None
    state: str = "joined"
    error: str = ""
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def news(self) -> ReplicaNews:
        return ReplicaNews(
            self.name,
            self.hello.pid,
            self.state,
            self.version,
            self.nbytes,
            self.seconds,
            self.error,
        )

    def forget_lists(self) -> None:
        """Choose lanes and send lists again in the next round."""
        self.lanes = self.lists_sent = None
