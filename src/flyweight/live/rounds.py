"""Rounds: makes a round of a published version and the members that take it, and runs it.

Each round names the memory that it goes through; only a member that does not know it gets its list.
The rounds of a publish run in the thread that publishes. A replica that asks between two publishes
is served by a catch-up round, from memory or from a snapshot. That round has a thread and bucket
slots of its own, so that the next publish need not wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from logging import getLogger
from time import monotonic, perf_counter

from flyweight.errors import (
    FlyweightError,
    PeerFailed,
    PeerLost,
    PlanError,
    TransferTimeout,
)
from flyweight.live.bucket_slots import BucketSlots
from flyweight.live.holders import addresses_elsewhere
from flyweight.live.joined_offer import RoundOffer
from flyweight.live.lanes import MAPPED, Offers, Transports
from flyweight.live.member import (
    Member,
    MemberRound,
    by_replica,
    different_requests,
    joined_request,
    too_late,
)
from flyweight.live.members import Members
from flyweight.live.messages import Begin
from flyweight.live.options import PublisherOptions
from flyweight.live.published_model import PublishedModel, PublishedVersion
from flyweight.live.running_round import RunningRound
from flyweight.live.source_blocks import Agreement
from flyweight.live.sources import Sources
from flyweight.verbs.find import open_source, versions

_log = getLogger("flyweight.live")


class Rounds:
    """Makes and runs the rounds of one publisher."""

    def __init__(
        self,
        members: Members,
        options: PublisherOptions,
        transports: Transports,
        model: PublishedModel,
        sources: Sources,
    ) -> None:
        self._members, self._options = members, options
        self._transports, self._model, self._sources = transports, model, sources
        self._running: set[RunningRound] = set()
        self._threads: dict[threading.Thread, PublishedVersion | None] = {}
        """The threads of catch-up rounds, and the available version that each one serves."""
        self._is_open = True
        self._has_warned = False
        self.last_number = 0
        """The number of the last round."""
        self.available: PublishedVersion | None = None
        """The version that replicas can take at once, between two publishes."""
        self.coming: int | None = None
        """The version that is published now and stays available: requests for it wait."""

    def new_number(self) -> int:
        """Return the number of the next round."""
        with self._members.changed:
            self.last_number += 1
            return self.last_number

    def prepare(
        self,
        version: PublishedVersion,
        members: Sequence[Member],
        slots: BucketSlots,
        timeout_seconds: float,
        on_release: Callable[[], None] = lambda: None,
    ) -> RunningRound:
        """Return a round that `run` runs; `RunningRound` explains `on_release`."""
        sources, number = self._sources, self.new_number()
        # Only once: a replica may want something else meanwhile.
        agreed = {member: _agreement(member) for member in members}
        agreements = list(dict.fromkeys(agreed.values()))
        offers, digest_seconds = sources.offer(number, version, agreements, slots, timeout_seconds)
        taking, refused = [], []
        for ranks in by_replica(members):
            found = [offers[agreed[each]] for each in ranks]
            errors = [each.error for each in found if each.error is not None]
            if errors:  # the transport is impossible for this replica only
                self._members.deny(ranks, errors[0])
                refused.append(ranks[0].refused(errors[0]))
                continue
            for member, offer in zip(ranks, found, strict=True):
                begin = self._begin(number, version, member, offer)
                taking.append(MemberRound(member, agreed[member], offer, begin))
        round_ = RunningRound(
            number,
            version,
            taking,
            self._members.connection,
            fills=slots.fills,
            num_ranks=sources.num_ranks,
            tell_rank=sources.tell_rank,
            name_of=sources.blocks.name_of,
            beginning=self._members.changed,
            on_release=on_release,
            timeout_seconds=timeout_seconds,
        )
        round_.digest_seconds, round_.refused = digest_seconds, refused
        self._warn_if_unmapped(version)
        self._members.join_round(taking)
        return round_

    def _warn_if_unmapped(self, version: PublishedVersion) -> None:
        if (reason := version.offers.refusal) and not self._has_warned:
            self._has_warned = True
            _log.warning("tensors go through buckets instead of being mapped: %s", reason)
            self._members.events.emit("publish.unmapped", reason=reason)

    def _begin(
        self, number: int, version: PublishedVersion, member: Member, offer: RoundOffer
    ) -> Begin:
        assert member.request_in_round is not None  # it is reserved
        memory = None
        should_verify = self._options.should_verify
        may_commit_alone = version.digests is not None and should_verify
        has_digests = may_commit_alone or (member.checks_digests and should_verify)
        if member.lists_sent != offer.lists:
            member.lists_sent, memory = offer.lists, offer.memory
        return Begin(
            round=number,
            ask=member.request_in_round,
            version=version.version,
            parent=version.parent,
            origin=version.origin,
            strategy=offer.strategy,
            should_verify=should_verify,
            digest_kind=offer.digest_kind,
            digests=offer.digests if has_digests else None,
            lists=offer.lists,
            memory=memory,
            values=dict(version.values),
            may_commit_alone=may_commit_alone,
        )

    def choose_sources(
        self, live: PublishedVersion, held: PublishedVersion | None, members: Sequence[Member]
    ) -> tuple[list[Member], list[Member]]:
        """Split members: those that read the model, and those that read the held copy.

        If a copy is held, only replicas that map the whole model on a device read the model.
        """
        if held is None:
            return list(members), []
        from_model: list[Member] = []
        if live.source.devices and not self._sources.followers:
            for ranks in by_replica(members):  # all ranks of a replica are in one round
                with suppress(PlanError):  # the transport is impossible for this replica
                    shares = [_agreement(each).whole for each in ranks]
                    lanes = [live.offers.lanes(each, self._options.transport) for each in shares]
                    if all(set(each) == {MAPPED} for each in lanes):
                        from_model += ranks
        return from_model, [member for member in members if member not in from_model]

    def run(self, round_: RunningRound) -> None:
        """Run a round; `abort` ends it early."""
        with self._members.changed:
            self._running.add(round_)
        try:
            if not self._is_open:
                round_.abort(PeerLost("the publisher was closed"))
            round_.run()
        finally:
            with self._members.changed:
                self._running.discard(round_)

    def release_members(self, members: Sequence[Member]) -> None:
        """Take members out of their rounds, and serve those that have sent requests meanwhile."""
        with self._members.changed:
            for member in members:
                self._members.leave_round(member)
            for ranks in self._members.waiting():
                self.serve(ranks)

    def close(self) -> None:
        """Start no more rounds; those that run go on."""
        self._is_open = False

    def abort(self, error: FlyweightError) -> None:
        """End the rounds that still run."""
        with self._members.changed:
            rounds = list(self._running)
        for round_ in rounds:
            round_.abort(error)

    # Between two publishes.

    def serve(self, ranks: Sequence[Member]) -> None:
        """Serve the request of a replica now if possible; otherwise it waits for a publish.

        ranks: all ranks of the replica, each of which has sent a request.
        """
        available = self.available
        if not self._is_open:
            return
        request = joined_request(ranks)
        if request is None:
            self._members.deny(ranks, different_requests(ranks))
            return
        last = self._members.version
        is_searched = all(each.is_searched for each in ranks)
        has_store = self._options.store is not None and not is_searched
        newest = last if request.version is None else request.version
        may_be_newer = has_store and available is None and request.version is None
        is_newest = request.have is not None and request.have == newest and not may_be_newer
        if request.may_keep and is_newest:
            self._members.confirm(ranks)
        elif elsewhere := self._elsewhere(ranks, is_available=available is not None):
            assert last is not None
            self._members.point_elsewhere(ranks[0], last, elsewhere)
        elif available is not None and request.version in (None, available.version):
            have = request.have
            is_older = request.version is None and have is not None and available.version < have
            if available.version != have and not is_older:
                self._start_thread(ranks, available)
        elif has_store:
            for each in ranks:
                each.is_searched = True  # once: later versions come by a publish
            self._start_thread(ranks, None)
        elif request.version is None or last is None or request.version == self.coming:
            pass  # it waits
        elif request.version <= last:
            self._members.deny(ranks, too_late(request, last))

    def _elsewhere(self, ranks: Sequence[Member], *, is_available: bool) -> list[str]:
        """Return where a replica should take the newest version, if that is nearer than here."""
        members = self._members
        asker, last = ranks[0], members.version
        return addresses_elsewhere(
            asker,
            last,
            members.by_id.values(),
            only_near=is_available,
            is_remote=members.admission.is_remote(asker.hello.line),
        )

    def withdraw_available(
        self, reason: str, timeout_seconds: float, *, may_begin: bool = False
    ) -> None:
        """Withdraw the available version, so that its memory can be overwritten.

        A replica that still reads it after half of the time is given up, for this reason: the
        bytes that it copies from then on are of no version, and its digests will show that.

        may_begin: others may begin to read during the wait: an engine that reads may wait for
            another one to do so too.
        """
        changed, seconds = self._members.changed, timeout_seconds / 2
        with changed:
            old = self.available
            if old is None:
                return
            if may_begin:
                changed.wait_for(lambda: not self._readers(old), seconds)
            self.available, old.is_replaced = None, True  # nobody begins to read it from now on
            if not may_begin:
                changed.wait_for(lambda: not self._readers(old), seconds)
            readers = self._readers(old)
        for round_ in readers:
            round_.abort(TransferTimeout(reason))
        if not may_begin:  # the memory may be freed next, so no thread here should read it
            with changed:
                changed.wait_for(lambda: old not in self._threads.values(), seconds)

    def _readers(self, version: PublishedVersion) -> list[RunningRound]:
        """Return the rounds that have begun to read a version."""
        return [
            each
            for each in self._running
            if each.version is version and any(member.has_begun for member in each.members)
        ]

    def _start_thread(self, ranks: Sequence[Member], version: PublishedVersion | None) -> None:
        self._members.reserve(ranks)
        thread = threading.Thread(
            target=self._catch_up, args=(ranks, version), name="flyweight-catch-up", daemon=True
        )
        self._threads[thread] = version
        try:
            thread.start()
        except RuntimeError as cause:  # the system's limit of threads is reached
            del self._threads[thread]
            text = f"the publisher cannot start a thread: {cause}; raise the limit, ulimit -u"
            self._members.deny(ranks, PeerFailed(text))
            for member in ranks:
                self._members.leave_round(member)

    def _catch_up(self, ranks: Sequence[Member], version: PublishedVersion | None) -> None:
        """Run a round for one replica, from the available version or from the store."""
        started = perf_counter()
        slots = BucketSlots(self._transports, self._options.bucket_bytes, self._options.depth)
        try:
            with ExitStack() as stack:
                stack.callback(slots.close)
                if version is None:
                    version = self._from_store(ranks, stack)
                if version is not None:
                    self._run_catch_up(ranks, version, slots, started)
        except FlyweightError as error:
            self._members.deny(ranks, error)
        except BaseException as error:
            self._members.deny(ranks, PeerFailed(f"{type(error).__name__}: {error}"))
            raise
        finally:
            with self._members.changed:
                for member in ranks:
                    member.lists_sent = None  # the slots are closed
                self._threads.pop(threading.current_thread(), None)
                self.release_members(ranks)

    def _run_catch_up(
        self,
        ranks: Sequence[Member],
        version: PublishedVersion,
        slots: BucketSlots,
        started: float,
    ) -> None:
        members = self._members
        round_ = self.prepare(version, ranks, slots, self._options.timeout_seconds)
        members.set_state(round_.number, version.version, "serving", round_.members, 0.0)
        self.run(round_)
        seconds = perf_counter() - started
        members.set_state(round_.number, members.version, "idle", round_.members, seconds)
        progress = round_.members[0] if round_.members else None
        if progress is not None and progress.has_begun:
            members.events.emit(
                "serve.done",
                name=ranks[0].name,
                pid=ranks[0].hello.pid,
                version=version.version,
                origin=version.origin,
                nbytes=sum(each.agreement.nbytes for each in round_.members),
                seconds=seconds,
                error=None if progress.error is None else str(progress.error),
            )

    def _from_store(self, ranks: Sequence[Member], stack: ExitStack) -> PublishedVersion | None:
        """Open the requested snapshot, or the newest if it is newer than what the replica has."""
        store, request = self._options.store, joined_request(ranks)
        assert store is not None
        if request is None:
            return None
        found = versions(store)
        if request.version is not None:
            if request.version not in found:
                return None
        elif not found or (request.held is not None and request.held >= found[-1]):
            last = self._members.version
            newest = max([*found[-1:], -1 if last is None else last])
            if request.may_keep and request.have == newest:
                self._members.confirm(ranks)
            return None
        stored = stack.enter_context(open_source(store, version=request.version))
        source = self._sources.blocks.read_from(stored, self._model.source)
        offers = Offers(source, self._transports)
        stack.callback(offers.close)
        manifest = stored.manifest
        assert manifest.version is not None
        return PublishedVersion(
            manifest.version, manifest.parent, source, offers, "snapshot", manifest.values
        )

    def join(self, deadline: float) -> bool:
        """Wait for the catch-up rounds that run; return whether all are over."""
        with self._members.changed:  # a thread that is not started yet cannot be joined
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(deadline - monotonic(), 0))
        return not self._threads


def _agreement(member: Member) -> Agreement:
    assert member.agreement is not None  # members cannot request a version before they agree
    return member.agreement
