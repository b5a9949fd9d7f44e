"""Sources: the ranks that publish a model together, as rank 0 sees them.

Every rank offers its own memory and digests. Rank 0 joins the offers and passes on the files of
the other ranks' memory, so a replica sees one publisher, with one list of blocks and buckets. A
publisher of one rank is the same, without followers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from flyweight.digest import DigestKind
from flyweight.errors import (
    FlyweightError,
    PeerLost,
    TransferTimeout,
    VersionError,
    error_named,
    listed_by_value,
    ranks_listed,
)
from flyweight.live import messages
from flyweight.live.bucket_slots import BucketSlots
from flyweight.live.frames import FromReplica
from flyweight.live.joined_copies import JoinedCopies
from flyweight.live.joined_offer import JoinedOffers, RoundOffer
from flyweight.live.lanes import Transports
from flyweight.live.messages import Memory, Message
from flyweight.live.options import PublisherOptions
from flyweight.live.published_model import PublishedVersion
from flyweight.live.rank_messages import Ended, HoldsCopy, Offered, Ready, ShareOffer, Start
from flyweight.live.running_round import RunningRound
from flyweight.live.source_blocks import Agreement, SourceBlocks
from flyweight.live.source_part import WantedShare, offer_shares
from flyweight.live.source_rank import SourceRank, failed_publish
from flyweight.plans.shares import agreed_values
from flyweight.spec.manifest import Leaf
from flyweight.transports.fd_passing import FdServer
from flyweight.transports.network_engines import Engines, common_engine, engines_here

GOING_SECONDS = 1.0


class Sources:
    """The source ranks of a publisher. The lock of its members guards all state."""

    def __init__(
        self,
        blocks: SourceBlocks,
        changed: threading.Condition,
        send: Callable[[Message, bytes], None],
        files: FdServer,
        transports: Transports,
        *,
        options: PublisherOptions,
    ) -> None:
        self.blocks, self.num_ranks = blocks, blocks.num_ranks
        self._changed, self._send = changed, send
        self._files = files
        self._options = options
        self.followers = [SourceRank(rank) for rank in range(1, self.num_ranks)]
        self.failure: FlyweightError | None = None
        """Why no version can be published any more: a rank is lost."""
        self.round: RunningRound | None = None
        """The round that reads the models of all ranks."""
        self._filled: list[tuple[int, int]] = []
        """The buckets, with their rounds, that were filled before their round began."""
        self._last_going = 0.0
        self._copies = JoinedCopies(blocks, files, transports)
        self._joined = JoinedOffers(self.num_ranks, blocks.boxes.num_dims, options.should_verify)

    # Joining.

    def follower(self, id: bytes) -> SourceRank | None:
        """Return the rank that has a connection."""
        return next((each for each in self.followers if each.id == id), None)

    def on_hello(self, id: bytes, hello: messages.Hello) -> FlyweightError | None:
        """Accept a rank; return why it is refused."""
        rank = hello.rank
        if hello.num_ranks != self.num_ranks or not 0 < rank < self.num_ranks:
            sizes = listed_by_value({0: self.num_ranks, rank: hello.num_ranks})
            return PeerLost(f"all ranks need the same num_ranks, not {sizes}")
        follower = self.followers[rank - 1]
        if follower.id:
            return PeerLost(f"rank {rank} has joined this publisher already")
        follower.id, follower.line, follower.engines = id, hello.line, hello.engines
        follower.last_seen = monotonic()
        return None

    def engine_for(self, theirs: Engines) -> str:
        """Return by what a replica on another host reads from all ranks; raise if it cannot."""
        ours = [engines_here(), *(each.engines for each in self.followers)]
        return common_engine(ours, theirs, self._options.network_engine).value

    def wait_joined(self, deadline: float, check: Callable[[], None]) -> None:
        """Return once every rank has connected; raise TransferTimeout naming the others.

        check: raises if a rank is gone that may not have connected yet.
        """
        self._wait(lambda each: bool(each.id), "joined", deadline, check)

    def on_message(self, follower: SourceRank, message: FromReplica) -> None:
        """Record what a follower says."""
        follower.last_seen = monotonic()
        rank, round_ = follower.rank, self.round
        match message:
            case Ready():
                self._on_ready(follower, message)
            case Offered():
                follower.offered = message
            case HoldsCopy():
                follower.copy = message
            case messages.Filled(round=number, bucket=bucket):
                bucket = bucket * self.num_ranks + rank
                if round_ is not None and round_.number == number:
                    round_.on_filled(bucket)
                else:  # a follower fills its buckets as soon as it has offered them
                    self._filled.append((number, bucket))
            case messages.Fault(kind=kind, text=text):
                self._on_fault(follower, error_named(kind, f"source rank {rank}: {text}"))
            case messages.Bye(text=text):
                self.lose(follower, PeerLost(f"it disconnected: {text}"))
            case _:
                pass

    def _on_ready(self, follower: SourceRank, ready: Ready) -> None:
        follower.ready, follower.values = ready.version, ready.values
        if follower.fault is not None and follower.fault[0] == ready.version:
            follower.fault = None
        if ready.has_new_tensors:
            follower.memory.clear()
            follower.pass_on_files(self._files)
        missed = follower.missed
        if missed is not None and ready.version >= missed.report.version:
            follower.missed = None
        if ready.kind:
            text = f"source rank {follower.rank}: {ready.text}"
            self._on_fault(follower, error_named(ready.kind, text))
        elif self.failure is not None:
            self._end_one(follower, failed_publish(ready.version, self.failure))
        elif missed is not None and ready.version <= missed.report.version:
            self._end_one(follower, missed)

    def _on_fault(self, follower: SourceRank, error: FlyweightError) -> None:
        """End the publish of a follower that does not go on with it."""
        if follower.ready is None:
            return  # its publish has ended meanwhile
        follower.fault = follower.ready, error
        self._fail(error)
        self._end_one(follower, failed_publish(follower.ready, error))

    def _end_one(self, follower: SourceRank, ended: Ended) -> None:
        """Answer the last `Ready` of a follower."""
        follower.ready = follower.offered = follower.copy = None
        follower.is_in = False
        self._send(ended, follower.id)

    def lose(self, follower: SourceRank, error: FlyweightError) -> None:
        """End every round that reads a rank which is gone."""
        text = f"source rank {follower.rank}: {error}; make new publishers on all ranks"
        self.stop(type(error)(text))

    def stop(self, error: FlyweightError) -> None:
        """Publish no more versions; what is published now ends by an error if it can."""
        with self._changed:
            if self.failure is None:
                self.failure = error
            for each in self.followers:
                if each.ready is not None and not each.is_in:
                    self._end_one(each, failed_publish(each.ready, self.failure))
            self._fail(error)

    def _fail(self, error: FlyweightError) -> None:
        with self._changed:
            self._publish_error = self._publish_error or error
            if self.round is not None:
                self.round.abort(error)
            self._changed.notify_all()

    _publish_error: FlyweightError | None = None
    """What a follower has reported since the publish began."""

    def check(self) -> None:
        """Raise what a follower has reported since the publish began, or that one is lost."""
        error = self.failure or self._publish_error
        if error is not None:
            raise error

    # A publish.

    def attach(self, round_: RunningRound) -> None:
        """Pass what the other ranks say on to a round, until `detach`."""
        with self._changed:
            self.round = round_
            for number, bucket in self._filled:
                if number == round_.number:
                    round_.on_filled(bucket)
            self._filled.clear()
            error = self.failure or self._publish_error
        if error is not None:
            round_.abort(error)

    def detach(self) -> None:
        with self._changed:
            self.round = None
            self._filled.clear()

    def wait_ready(self, version: int, deadline: float) -> None:
        """Return once every rank publishes this version; else note who missed it, and raise."""
        self._publish_error = None
        try:
            with self._changed:
                for each in self.followers:
                    if each.fault is not None and each.has_given_up(version):
                        raise each.fault[1]
                step = f"called publish({version})"
                self._wait(lambda each: each.ready is not None, step, deadline)
                self._check_same(version)
                for each in self.followers:
                    each.is_in = True
        except BaseException as error:
            with self._changed:
                for each in self.followers:
                    is_behind = each.ready is None or each.ready < version
                    if is_behind and not each.has_given_up(version):
                        each.missed = failed_publish(version, error)
                    # One that is ahead waits for a later publish, unless that is the error.
                    is_over = is_behind or each.ready == version or isinstance(error, VersionError)
                    each.is_in = each.ready is not None and is_over
            raise

    def _check_same(self, version: int) -> None:
        found = {0: version, **{each.rank: each.ready for each in self.followers}}
        if set(found.values()) != {version}:
            values = listed_by_value(found)
            raise VersionError(f"all ranks must publish the same version, not {values}")

    def agreed_values(self, own: Mapping[str, Leaf]) -> Mapping[str, Leaf]:
        """Return the values of all ranks; raise PlanError if they differ."""
        return agreed_values([own, *(each.values for each in self.followers)])

    def _wait(
        self,
        is_done: Callable[[SourceRank], bool],
        step: str,
        deadline: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        going_seconds = min(max((deadline - monotonic()) / 8, 0.01), GOING_SECONDS)
        with self._changed:
            while True:
                check()
                self.check()
                late = [each.rank for each in self.followers if not is_done(each)]
                if not late:
                    return
                left = deadline - monotonic()
                if left <= 0:
                    raise TransferTimeout(
                        f"{len(late)} of {self.num_ranks} source ranks have not {step} in time: "
                        f"{ranks_listed(late)}"
                    )
                self.send_going(going_seconds)
                self._changed.wait(min(left, going_seconds))

    def send_going(self, seconds: float) -> None:
        """Tell ranks that have begun to publish to wait on, unless that was done just now.

        They answer, which wakes the waiting thread.
        """
        now = monotonic()
        if now >= self._last_going + seconds:
            self._last_going = now
            for each in self.followers:
                if each.ready is not None:
                    self._send(messages.Going(0), each.id)

    def tell(self, message: Message) -> None:
        """Send a message to every rank that takes part in the publish."""
        for each in self.followers:
            if each.is_in:
                self._send(message, each.id)

    def tell_rank(self, rank: int, message: Message) -> None:
        """Send a message to a rank other than 0."""
        self._send(message, self.followers[rank - 1].id)

    def join_copies(self, own: PublishedVersion, deadline: float) -> PublishedVersion:
        """Return the copies that all ranks hold of a version as one, which this process can read.

        own: the copy that this process holds.
        """
        self._wait(
            lambda each: each.copy is not None and each.copy.version == own.version,
            f"copied version {own.version}",
            deadline,
        )
        return self._copies.join(own, self.followers)

    def end(self, version: int, ended: Ended) -> None:
        """Tell the other ranks how the publish of a version ended."""
        with self._changed:
            for each in self.followers:
                if each.is_in:
                    self._end_one(each, ended)
                if each.fault is not None and each.fault[0] <= version:
                    each.fault = None

    # Offers.

    def offer(
        self,
        number: int,
        version: PublishedVersion,
        agreements: Sequence[Agreement],
        slots: BucketSlots,
        timeout_seconds: float,
    ) -> tuple[Mapping[Agreement, RoundOffer], float]:
        """Return what all ranks offer for each agreement, and the seconds spent on digests here.

        number: the number of the round.
        version: read from the models of all ranks, or from memory or files of this process alone.
        """
        deadline = monotonic() + timeout_seconds
        is_shared = version.is_shared and bool(self.followers)
        is_on_host = version.source.is_on_host and (not is_shared or self._is_on_host)
        kinds = [each.digest_kind(is_source_on_host=is_on_host) for each in agreements]
        if is_shared:
            self._start(number, version.version, agreements, kinds, timeout_seconds)
        wanted = []
        for agreement, kind in zip(agreements, kinds, strict=True):
            found = agreement.shares.get(0) if is_shared else (None, agreement.whole)
            if found is not None:
                wanted.append((agreement, WantedShare(found[1], kind, 0)))
        offers, seconds = offer_shares(
            version,
            [each for _, each in wanted],
            slots,
            transport=self._options.transport,
            should_verify=self._options.should_verify,
            deadline=deadline,
        )
        parts: dict[Agreement, dict[int, ShareOffer]] = {each: {} for each in agreements}
        for (agreement, _), offer in zip(wanted, offers, strict=True):
            parts[agreement][0] = offer
        if is_shared:
            self._wait_offered(number, "offered their memory", deadline)
            for follower in self.followers:
                for agreement, offer in follower.take_offers(agreements).items():
                    parts[agreement][follower.rank] = offer
                follower.pass_on_files(self._files)
        joined = {
            each: self._joined.join(each, parts[each], kind, self._memory_of, is_shared=is_shared)
            for each, kind in zip(agreements, kinds, strict=True)
        }
        return joined, seconds

    def confirm(self, number: int, version: int, timeout_seconds: float) -> None:
        """Return once all ranks have said that they still publish a version that nobody reads.

        A rank may have given up just now; without this, rank 0 would succeed alone.
        """
        self._start(number, version, (), (), timeout_seconds)
        deadline = monotonic() + timeout_seconds
        self._wait_offered(number, f"confirmed version {version}", deadline)

    def _start(
        self,
        number: int,
        version: int,
        agreements: Sequence[Agreement],
        kinds: Sequence[DigestKind],
        timeout_seconds: float,
    ) -> None:
        for each in self.followers:
            each.offered = None
            shares = each.started_shares(agreements, kinds)
            self._send(Start(number, version, shares, timeout_seconds), each.id)

    def _wait_offered(self, number: int, step: str, deadline: float) -> None:
        self._wait(
            lambda each: each.offered is not None and each.offered.round == number, step, deadline
        )

    @property
    def _is_on_host(self) -> bool:
        return not any(self.blocks.place_names)

    def _memory_of(self, rank: int, agreement: Agreement) -> Memory:
        return self.followers[rank - 1].memory_of(agreement)

    def close(self) -> None:
        """Disconnect from the files of the other ranks. Safe to repeat."""
        self._copies.close()
        for each in self.followers:
            if each.files is not None:
                each.files.close()
