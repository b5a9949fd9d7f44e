"""Incoming: one version on its way into a model. Leases it, stages what must be fetched, copies.

`open` may fail without harm. After it, everything is here: mapped memory of the trainer, which the
lease keeps still, or verified staging. `copy` is the only step that writes to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

import numpy as np

from flyweight.digest import Words
from flyweight.errors import (
    DigestMismatch,
    FlyweightError,
    PlanError,
    TransferTimeout,
    TransportError,
    VersionError,
)
from flyweight.live.fetch import Fetch
from flyweight.live.loader import Loading
from flyweight.live.messages import Available, Done, Leased, Released, Staged
from flyweight.live.publish_id import PublishId
from flyweight.live.reader import HeldLease, Reader
from flyweight.live.ring import RingCopies
from flyweight.live.rows import check_digests, words_of
from flyweight.live.session import Session
from flyweight.live.staging import Staging
from flyweight.live.target import LoaderTarget, ModelTarget
from flyweight.memory_table import BufferTable
from flyweight.transports.address import Endpoint
from flyweight.worker_threads import run_on_threads

_RELEASE_SECONDS = 2.0
_DIGEST_SECONDS = 5.0
_SLOW_BYTES = 2 << 30
"""A copy is expected to do so many bytes in a second, at least."""
_LEAST_SECONDS = 0.01
FOREVER = float("inf")


@dataclass(frozen=True, eq=False)
class Arrived:
    """The rows of one source rank, in memory that keeps still until they are copied."""

    rows: BufferTable
    digests: bytes
    source: Reader | None
    """Where the memory is leased; None for staging of our own."""
    until: float
    """The memory keeps still until then."""


class Incoming:
    """One version for one model, until it is closed."""

    read_seconds = 0.0
    """How much longer than a copy in memory it may take."""

    def __init__(self, session: Session, id: PublishId) -> None:
        self.session, self.id, self.about = session, id, Available(id, None, {})
        self.arrived: dict[int, Arrived] = {}
        self._digests: dict[str, dict[int, bytes]] = {}
        """Those that came with leases, by kind and source rank."""
        self.staging: Staging | None = None
        self.ways: set[str] = set()
        self.overflows = 0
        self.verify_seconds = 0.0
        self.is_verified = False
        """True if digests came for everything."""
        self._loading: Loading | None = None
        self._rings: dict[int, RingCopies] = {}
        """For each rank whose rows come while the engine is paused."""

    @property
    def nbytes(self) -> int:
        return self.session.plan.nbytes

    @property
    def unused(self) -> tuple[str, ...]:
        """The trainer's tensors that are left out."""
        return self.session.target.unused

    @property
    def verified(self) -> str:
        """What is checked when it has been copied."""
        return self.session.target.verified if self.is_verified else "nothing"

    def tell(self, message: Staged | Done) -> None:
        """Let the trainer know, if it is still there."""
        self.session.tell(message)

    @property
    def progress(self) -> float:
        """How much has been fetched, and then how much the loader has taken, from 0 to 1."""
        if self._loading is not None and self._loading.has_begun:
            return self._loading.progress
        return 1.0 if self.staging is None else self.staging.progress

    @property
    def transport(self) -> str:
        return "+".join(sorted(self.ways))

    def open(self, available: Available, deadline: float) -> bool:
        """Lease the version; fetch into staging, and verify there, what cannot be mapped.

        Returns False if the trainer has withdrawn the version, and nobody else has it.
        """
        self.about, holders = available, available.holders
        ranks = list(self.session.plan.streams)
        beside = [rank for rank in ranks if self.session.beside(rank) is not None]
        leased = self._lease(beside, deadline)
        if not holders and len(leased) + len(self.arrived) < len(beside):
            return False
        wanted = self.session.ways.transport
        staged = [rank for rank in ranks if rank not in self.arrived]
        if staged and wanted == "mapped":
            raise TransportError(
                f"the memory of {len(staged)} ranks of the trainer cannot be mapped here, and "
                f"transport='mapped' was asked for; share it, or use transport='auto'"
            )
        if staged:
            self._stage(staged, leased, holders, deadline)
        else:
            self.session.pass_over(self.id)
        self.is_verified = all(each.digests for each in self.arrived.values())
        if self.session.has_doubles and not self.is_verified:
            raise PlanError(
                "tensors that are one here are several at the trainer, and nothing is verified, so "
                "they may differ; publish with verify=True, or tie them there too"
            )
        if self.is_verified:
            self._keep_digests(deadline)
        self._prepare_loading(deadline)
        if all(each.source is None for each in self.arrived.values()):
            self.tell(Staged(self.id))
        self.session.announce(available)
        return True

    def _keep_digests(self, deadline: float) -> None:
        """Keep all digests for `check_live`, which may come when the trainer has gone on."""
        session, soon = self.session, min(deadline, monotonic() + _DIGEST_SECONDS)
        self._digests[session.plan.kind] = {
            rank: each.digests for rank, each in self.arrived.items()
        }
        session.known = self.id, self._digests
        for plan in session.plans[1:]:  # of ranks that gave no lease of it, as on other hosts
            with suppress(FlyweightError):  # then `check_live` asks for a lease
                self._digests[plan.kind] = session.digests(plan, self.id, soon)

    def _prepare_loading(self, deadline: float) -> None:
        """Make what an engine's loader will get; if that is all of it, the trainer may go on."""
        session, target = self.session, self.session.target
        if isinstance(target, LoaderTarget):
            staged = 0 if self.staging is None else self.staging.memory.nbytes
            self._loading = Loading(target, session.plan, self.arrived, session.me.name)
            if self._loading.prepare(session.ways.room(staged), deadline):
                self.confirm(deadline)
                self._end_leases()

    def _lease(self, ranks: Sequence[int], deadline: float) -> dict[int, Leased]:
        """Lease the version at all ranks on this host at once, and map what can be mapped.

        Returns the leases of what must be filled, without ranks that have withdrawn the version.
        """
        session, plan = self.session, self.session.plan
        asked = {}
        for rank in ranks:
            source, can_map = session.beside(rank), session.can_map(rank)
            assert source is not None
            kinds = [each.kind for each in session.plans if rank in each.streams]
            asked[rank] = source, source.ask_lease(self.id, kinds, rank, deadline, can_map=can_map)
        filled: dict[int, Leased] = {}
        ringed: dict[int, tuple[Reader, HeldLease]] = {}
        for rank in ranks:
            source, request = asked.pop(rank)
            try:
                found = source.lease(request, deadline, session.blocks_of(rank))
            except VersionError:
                continue
            except BaseException:
                for other, _ in asked.values():  # a lease may be on its way
                    other.close()
                raise
            for kind, known in zip(request.lease.kinds, found.leased.digests, strict=True):
                self._digests.setdefault(kind, {})[rank] = known
            if found.blocks is None and session.ring_device(rank):
                ringed[rank] = source, found
                continue
            if found.blocks is None:
                filled[rank] = found.leased
                continue
            self.overflows += found.leased.overflows[0]
            rows, digests = source.rows_of(plan.streams[rank], found), found.leased.digests[0]
            self.arrived[rank] = Arrived(rows, digests, source, found.until)
            self.ways.add("mapped")
        for rank, (source, found) in ringed.items():
            self._take_ring(rank, source, found, deadline)
        return filled

    def _take_ring(self, rank: int, source: Reader, lease: HeldLease, deadline: float) -> None:
        """Let the rows of a rank come through a ring on its device, once the engine is paused."""
        memory = source.take_ring(self.session.ring_device(rank), deadline)
        self._rings[rank] = self.session.ring_copies(rank, memory)
        self.overflows += lease.leased.overflows[0]
        rows = BufferTable.of([])
        self.arrived[rank] = Arrived(rows, lease.leased.digests[0], source, lease.until)
        self.ways.add("filled")

    def _stage(
        self,
        ranks: Sequence[int],
        filled: dict[int, Leased],
        holders: Sequence[Endpoint],
        deadline: float,
    ) -> None:
        session = self.session
        staging = self.staging = session.stage(self.id, ranks, deadline)
        must_pull = session.ways.transport == "rdma"
        fetch = Fetch(staging, session.connections, deadline, session.puller, must_pull=must_pull)

        def run(todo: Iterator[int]) -> None:
            for rank in todo:
                if rank in filled:
                    self._fill(staging, rank, filled[rank], deadline)
                else:
                    fetch.run(rank, [*holders, session.endpoint_of(rank)])

        try:
            run_on_threads(ranks, run, len(ranks), "flyweight-fetch")
            for rank in ranks:
                self._verify_staged(staging, rank, holders, fetch, deadline)
                digests, overflows = staging.digests(session.plan, rank, deadline)
                self.overflows += overflows
                rows = staging.memory.rows[rank]
                self.arrived[rank] = Arrived(rows, digests, None, FOREVER)
                self.ways |= staging.ways(rank) or {"filled" if rank in filled else "read"}
        except BaseException as error:
            failure = error if isinstance(error, FlyweightError) else TransportError(repr(error))
            staging.fail(failure)
            raise
        staging.complete()

    def _fill(self, staging: Staging, rank: int, leased: Leased, deadline: float) -> None:
        """Have the trainer's rank write its stream into staging, and end the lease.

        If no answer comes, the connection is over, and with it the session and this memory: a late
        trainer writes where nobody reads.
        """
        source, plan = self.session.beside(rank), self.session.plan
        assert source is not None
        source.fill(plan.kind, staging.memory.segments[rank], deadline)
        staging.set_digests(rank, leased.digests[0], leased.overflows[0])
        for each in staging.missing(rank):
            staging.arrived(each, source.endpoint, "filled")
        source.release(deadline, is_proof=not leased.digests[0])

    def _verify_staged(
        self,
        staging: Staging,
        rank: int,
        holders: Sequence[Endpoint],
        fetch: Fetch,
        deadline: float,
    ) -> None:
        """Compare digests of what was staged; fetch rows that are wrong from the trainer again."""
        digests, _ = staging.digests(self.session.plan, rank, deadline)
        if not digests:
            return
        found, _ = staging.memory.digests[rank].run(deadline)
        try:
            self._check(rank, found, digests, "as they arrived")
        except DigestMismatch:
            wrong = np.flatnonzero(found != words_of(digests)).tolist()
            if not staging.spoiled(rank, wrong) & set(holders):
                raise  # the trainer's own memory has changed
            fetch.run(rank, [self.session.endpoint_of(rank)])
            found, _ = staging.memory.digests[rank].run(deadline)
            self._check(rank, found, digests, "as they arrived from the trainer itself")

    def check_time(self, deadline: float) -> None:
        """Raise unless the copy can begin: in time, and with leases that last for all of it."""
        now, seconds = monotonic(), _LEAST_SECONDS + self.session.plan.nbytes / _SLOW_BYTES
        if now > deadline:
            raise TransferTimeout(f"everything was here {now - deadline:.2g} s too late to begin")
        for rank, each in self.arrived.items():
            if each.source is None:
                continue
            each.source.check_lease()
            until = each.until
            if now + seconds > until:  # the pause took long
                until = self._renew_lease(each.source, rank, deadline)
            if now + seconds > until:
                raise TransferTimeout(
                    f"{each.source.channel.peer} keeps {self.id} for {until - now:.2g} s, and the "
                    f"copy may take {seconds:.2g} s; pause sooner, or publish with a longer "
                    f"timeout_seconds"
                )

    def _renew_lease(self, source: Reader, rank: int, deadline: float) -> float:
        """Go on with a lease, if the version is still offered; return until when it runs now."""
        session = self.session
        kinds, can_map = [session.plan.kind], session.can_map(rank)
        asked = source.ask_lease(self.id, kinds, rank, deadline, can_map=can_map)
        return source.lease(asked, deadline, session.blocks_of(rank)).until

    def copy(self, deadline: float, check: Callable[[], None]) -> None:
        """Copy everything into the model, and verify it where it was written.

        check: called while devices copy; if it raises, the copies are waited for first.
        """
        try:
            self._copy(deadline, check)
        except BaseException:
            self.session.throw_copies_away()
            raise

    def _copy(self, deadline: float, check: Callable[[], None]) -> None:
        if self._loading is not None:
            self._loading.run(deadline)
        else:
            self._copy_to_model(deadline, check)
        self.confirm(deadline, self._finish)

    def _finish(self) -> None:
        """Do what is left to do in this process once the bytes are there."""
        target = self.session.target
        if isinstance(target, ModelTarget):
            target.finish(self.about.values)
            target.touched()

    def _copy_to_model(self, deadline: float, check: Callable[[], None]) -> None:
        copies = {
            rank: self.session.copies(rank, each.rows, is_staged=each.source is None)
            for rank, each in self.arrived.items()
            if rank not in self._rings
        }
        started = {
            rank: each.start(should_digest=bool(self.arrived[rank].digests))
            for rank, each in copies.items()
        }
        failure = None
        try:
            check()
        except FlyweightError as error:
            failure = error
        for rank, finish in started.items():
            found = finish(deadline)
            self.verify_seconds += copies[rank].digest_seconds
            if found is not None:
                digests = self.arrived[rank].digests
                self._check(rank, found, digests, "where they were written")
        if failure is not None:
            raise failure
        for rank, ring in self._rings.items():
            self._copy_from_ring(rank, ring, deadline)

    def _copy_from_ring(self, rank: int, ring: RingCopies, deadline: float) -> None:
        arrived, kind = self.arrived[rank], self.session.plan.kind
        assert arrived.source is not None
        found = ring.run(arrived.source, kind, deadline, should_digest=bool(arrived.digests))
        if found is not None:
            self._check(rank, found, arrived.digests, "where they were written")

    def confirm(self, deadline: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Raise unless leases without digests ran until now: that is the proof.

        meanwhile: what to do while the holders answer.
        """
        unproved = {
            each.source: each.source.ask_release(deadline)
            for each in self.arrived.values()
            if not each.digests and each.source is not None
        }
        meanwhile()
        for source, number in unproved.items():
            source.channel.answer(number, Released, deadline).close()

    def _check(self, rank: int, found: Words, digests: bytes, where: str) -> None:
        session = self.session
        path = f"from rank {rank} of the trainer to replica {session.me.name!r}, {where}"
        tensor = session.plan.streams[rank].tensor
        check_digests(found, words_of(digests), tensor, session.catalog.names, path)

    def close(self) -> None:
        """End the leases of the trainer's memory. Staging is served until the next update."""
        self._end_leases()
        self._loading = None

    def _end_leases(self) -> None:
        for rank in self.session.plan.streams:
            source = self.session.beside(rank)
            if source is not None and source.has_lease:
                with suppress(FlyweightError):
                    source.release(monotonic() + _RELEASE_SECONDS, is_proof=False)
        self.arrived = {}
