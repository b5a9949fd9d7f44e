"""Conduct: from an edition and the replicas that take it to a round, and to its end.

A round is made of lanes, slots and lists; what a replica was told in the round before and
still holds is not told again. Rounds of a publish and of replicas that come late run beside
each other, each in the thread that wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from logging import getLogger
from time import monotonic, perf_counter

from flyweight.errors import FlyweightError, PeerLost
from flyweight.live.connection import spin_of
from flyweight.live.lanes import MAPPED, Ring, homes_of, told
from flyweight.live.members import Agreement, Peer, Roll
from flyweight.live.messages import Begin
from flyweight.live.published_version import Edition, Options
from flyweight.live.round import Part, Round

_log = getLogger("flyweight.live")


class Conductor:
    """Makes the rounds of one publisher, and runs them so that they can be cut short."""

    def __init__(self, roll: Roll, options: Options) -> None:
        self._roll, self._options = roll, options
        self._running: set[Round] = set()
        self._is_open = True
        self._has_told_refusal = False
        self.last = 0
        """The number of the last round."""

    def lanes(self, edition: Edition, peer: Peer) -> dict[int, str]:
        """Return how each block goes to a replica; raise if it cannot go as was asked."""
        if peer.lanes is None or peer.lanes[0] is not edition.offers:
            agreement = _agreement(peer)
            copies, sinks, seen = agreement.copies, agreement.sinks, agreement.devices
            found = edition.offers.lanes(copies, sinks, seen, self._options.strategy)
            peer.lanes = edition.offers, found
            if (why := edition.offers.refusal) and not self._has_told_refusal:
                self._has_told_refusal = True
                _log.warning("tensors go through buckets instead of being mapped: %s", why)
                self._roll.announce("publish.unmapped", reason=why)
        return peer.lanes[1]

    def round_of(
        self,
        edition: Edition,
        peers: Sequence[Peer],
        ring: Ring,
        timeout: float,
        *,
        admit: Callable[[Round], bool],
        on_release: Callable[[], None],
    ) -> Round:
        """Return a round, with the lists that each replica still has to be told."""
        all_lanes = [self.lanes(edition, peer) for peer in peers]
        ring.lay_out(edition.stock, homes_of(all_lanes))
        digest_seconds = self._know_digests(edition, peers, timeout)
        with self._roll.changed:
            self.last += 1
            number = self.last
        round_ = Round(
            number,
            edition.stock,
            [self._part(edition, peer, ring, number) for peer in peers],
            packings=ring.packings,
            should_verify=self._options.should_verify,
            digests=edition.digests,
            has_readers=any(MAPPED in lanes.values() for lanes in all_lanes),
            admit=admit,
            on_release=on_release,
            spin=lambda is_done: self._roll.spin(is_done, spin_of(bool(edition.stock.devices))),
            timeout_seconds=timeout,
        )
        round_.digest_seconds = digest_seconds
        self._roll.take(peers, round_)
        return round_

    def _know_digests(self, edition: Edition, peers: Sequence[Peer], timeout: float) -> float:
        """Make the digests of an edition that keeps them, as far as they are new."""
        if edition.digests is None or not self._options.should_verify:
            return 0.0
        agreed = [(each, each.digest_kind(edition.stock)) for each in map(_agreement, peers)]
        regions = dict.fromkeys(region for each, kind in agreed for region in each.regions(kind))
        new = [region for region in regions if region not in edition.digests]
        started = perf_counter()
        edition.digests.update(edition.stock.digests(new, monotonic() + timeout))
        return perf_counter() - started

    def _part(self, edition: Edition, peer: Peer, ring: Ring, number: int) -> Part:
        lanes, agreement = self.lanes(edition, peer), _agreement(peer)
        buckets = ring.buckets_for(lanes)
        lists = edition.offers, ring, ring.generation, tuple(each.number for each in buckets)
        is_told = peer.sent == lists
        if not is_told:
            peer.sent = lists
            peer.lists += 1
        kind = agreement.digest_kind(edition.stock)
        regions, digests = agreement.regions(kind), None
        if edition.digests is not None and self._options.should_verify:
            digests = tuple(edition.digests[region] for region in regions)
        places = None
        if not is_told:
            places = edition.offers.places([n for n, lane in lanes.items() if lane == MAPPED])
        begin = Begin(
            round=number,
            ask=peer.taken,
            version=edition.version,
            parent=edition.parent,
            origin=edition.origin,
            strategy=told(lanes),
            should_verify=self._options.should_verify,
            digest_kind=kind,
            digests=digests,
            lists=peer.lists,
            places=places,
            slots=None if is_told else {each.slot: ring.handles[each.slot] for each in buckets},
            buckets=None if is_told else buckets,
            values=dict(edition.values),
        )
        needed = frozenset(each.number for each in buckets)
        return Part(
            peer.id,
            peer.name,
            peer.hello.pid,
            agreement.copies,
            regions,
            needed,
            agreement.nbytes,
            begin,
            lambda message: self._roll.send(peer.id, message),
        )

    def run(self, round_: Round) -> None:
        """Run a round that `cut` can end."""
        self._running.add(round_)
        try:
            if not self._is_open:
                round_.cut(PeerLost("the publisher was closed"))
            round_.run()
        finally:
            self._running.discard(round_)

    def end(self) -> None:
        """Let no round begin any more; those that run go on to their own ends."""
        self._is_open = False

    def cut(self, error: FlyweightError) -> None:
        """End the rounds that still run."""
        for round_ in list(self._running):
            round_.cut(error)


def _agreement(peer: Peer) -> Agreement:
    assert peer.agreement is not None  # nobody asks before it has one
    return peer.agreement
