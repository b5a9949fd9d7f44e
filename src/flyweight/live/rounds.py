"""Rounds: makes a round of a published version and the members that take it, and runs it.

A member that was told of lanes, slots and buckets in its last round, and still holds those
lists, is not told again. Rounds of a publish and catch-up rounds run beside each other, each in
the thread that wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import getLogger
from time import monotonic, perf_counter

from flyweight.checks import check_seconds
from flyweight.errors import FlyweightError, PeerLost, SpecError
from flyweight.live.connection import spin_seconds
from flyweight.live.lanes import (
    MAPPED,
    TRANSPORTS,
    BucketSlots,
    TransportChoice,
    bucketed_blocks,
    lane_names,
)
from flyweight.live.member import Agreement, Member
from flyweight.live.members import Members
from flyweight.live.messages import Begin
from flyweight.live.published_model import PublishedVersion
from flyweight.live.report import ReplicaReport
from flyweight.live.round import MemberRound, Round
from flyweight.verbs.find import PathLike

_log = getLogger("flyweight.live")


@dataclass(frozen=True, kw_only=True)
class PublisherOptions:
    """The options of a publisher; `Publisher` explains them."""

    hold: bool
    store: PathLike | None
    transport: TransportChoice
    bucket_bytes: int | None
    depth: int | None
    should_verify: bool
    timeout_seconds: float
    silence_seconds: float

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise SpecError(f"transport is {self.transport!r}, not one of {', '.join(TRANSPORTS)}")
        if self.depth is not None and (type(self.depth) is not int or self.depth < 1):
            raise SpecError(f"depth is {self.depth!r}, at least 1 bucket is needed")
        size = self.bucket_bytes
        if size is not None and (type(size) is not int or size < 4096):
            raise SpecError(f"bucket_bytes is {size!r}, at least 4096 are needed")
        check_seconds("timeout_seconds", self.timeout_seconds)
        if check_seconds("silence_seconds", self.silence_seconds) <= 0:
            raise SpecError("silence_seconds is 0, it must be greater: every replica would be lost")


class Rounds:
    """Makes and runs the rounds of one publisher."""

    def __init__(self, members: Members, options: PublisherOptions) -> None:
        self._members, self._options = members, options
        self._running: set[Round] = set()
        self._is_open = True
        self._has_warned = False
        self.last_number = 0
        """The number of the last round."""

    def lanes(self, version: PublishedVersion, member: Member) -> dict[int, str]:
        """Return the lane of each block for a member; raise if the transport is impossible."""
        if member.lanes is None or member.lanes[0] is not version.offers:
            agreed = _agreement(member)
            found = version.offers.lanes(
                agreed.copies, agreed.sinks, agreed.devices, self._options.transport
            )
            member.lanes = version.offers, found
            if (reason := version.offers.refusal) and not self._has_warned:
                self._has_warned = True
                _log.warning("tensors go through buckets instead of being mapped: %s", reason)
                self._members.announce("publish.unmapped", reason=reason)
        return member.lanes[1]

    def choose_sources(
        self, live: PublishedVersion, held: PublishedVersion | None, members: Sequence[Member]
    ) -> tuple[list[Member], list[Member], list[ReplicaReport]]:
        """Split members: those that read the model, those that read the held copy, and failures.

        If a copy is held, only members that map the whole model on a device read the model.
        """
        from_model: list[Member] = []
        from_copy: list[Member] = []
        failed: list[ReplicaReport] = []
        for member in members:
            try:
                lanes = None
                if held is None or live.source.devices:
                    lanes = self.lanes(live, member)
                if held is None or (lanes and set(lanes.values()) == {MAPPED}):
                    from_model.append(member)
                else:
                    self.lanes(held, member)
                    from_copy.append(member)
            except FlyweightError as error:  # the transport is impossible for this member only
                self._members.fail(member, error)
                pid = member.hello.pid
                failed.append(ReplicaReport(member.name, pid, 0, 0.0, 0.0, 0.0, "nothing", error))
        return from_model, from_copy, failed

    def prepare(
        self,
        version: PublishedVersion,
        members: Sequence[Member],
        slots: BucketSlots,
        timeout_seconds: float,
        *,
        start: Callable[[Round], bool] | None = None,
        on_release: Callable[[], None] = lambda: None,
    ) -> Round:
        """Return a round that `run` runs; `Round` explains `start` and `on_release`."""
        all_lanes = [self.lanes(version, member) for member in members]
        slots.lay_out(version.source, bucketed_blocks(all_lanes))
        digest_seconds = self._add_digests(version, members, timeout_seconds)
        with self._members.changed:
            self.last_number += 1
            number = self.last_number
        spin = spin_seconds(bool(version.source.devices))
        round_ = Round(
            number,
            version.source,
            [self._member_round(version, member, slots, number) for member in members],
            fills=slots.fills,
            should_verify=self._options.should_verify,
            digests=version.digests,
            has_mapped=any(MAPPED in lanes.values() for lanes in all_lanes),
            start=_begin_at_once if start is None else start,
            on_release=on_release,
            spin=lambda is_done: self._members.connection.spin(is_done, spin),
            timeout_seconds=timeout_seconds,
        )
        round_.digest_seconds = digest_seconds
        self._members.join_round(members, round_)
        return round_

    def _add_digests(
        self, version: PublishedVersion, members: Sequence[Member], timeout_seconds: float
    ) -> float:
        """Compute the digests that a version which keeps them does not have yet."""
        if version.digests is None or not self._options.should_verify:
            return 0.0
        agreed = [(each, each.digest_kind(version.source)) for each in map(_agreement, members)]
        regions = dict.fromkeys(region for each, kind in agreed for region in each.regions(kind))
        new = [region for region in regions if region not in version.digests]
        started = perf_counter()
        version.digests.update(version.source.digests(new, monotonic() + timeout_seconds))
        return perf_counter() - started

    def _member_round(
        self, version: PublishedVersion, member: Member, slots: BucketSlots, number: int
    ) -> MemberRound:
        lanes, agreed = self.lanes(version, member), _agreement(member)
        buckets = slots.buckets_for(lanes)
        lists = version.offers, slots, slots.generation, tuple(each.number for each in buckets)
        has_lists = member.lists_sent == lists
        if not has_lists:
            member.lists_sent = lists
            member.lists_number += 1
        kind = agreed.digest_kind(version.source)
        regions, digests = agreed.regions(kind), None
        if version.digests is not None and self._options.should_verify:
            digests = tuple(version.digests[region] for region in regions)
        places = None
        if not has_lists:
            places = version.offers.places([n for n, lane in lanes.items() if lane == MAPPED])
        begin = Begin(
            round=number,
            ask=member.request_in_round,
            version=version.version,
            parent=version.parent,
            origin=version.origin,
            strategy=lane_names(lanes),
            should_verify=self._options.should_verify,
            digest_kind=kind,
            digests=digests,
            lists=member.lists_number,
            places=places,
            slots=None if has_lists else {each.slot: slots.handles[each.slot] for each in buckets},
            buckets=None if has_lists else buckets,
            values=dict(version.values),
        )
        return MemberRound(
            member.name,
            member.hello.pid,
            agreed.copies,
            regions,
            frozenset(each.number for each in buckets),
            agreed.nbytes,
            begin,
            lambda message: self._members.connection.send(message, member.id),
        )

    def run(self, round_: Round) -> None:
        """Run a round; `abort` ends it early."""
        self._running.add(round_)
        try:
            if not self._is_open:
                round_.abort(PeerLost("the publisher was closed"))
            round_.run()
        finally:
            self._running.discard(round_)

    def close(self) -> None:
        """Start no more rounds; those that run go on."""
        self._is_open = False

    def abort(self, error: FlyweightError) -> None:
        """End the rounds that still run."""
        for round_ in list(self._running):
            round_.abort(error)


def _begin_at_once(round_: Round) -> bool:
    round_.begin()
    return True


def _agreement(member: Member) -> Agreement:
    assert member.agreement is not None  # members cannot request a version before they agree
    return member.agreement
