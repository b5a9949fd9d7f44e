"""Incoming: one version on its way into a model. Leases it, stages what must be fetched, copies.

`open` may fail without harm. After it, everything is here: mapped memory of the trainer, which the
lease keeps still, or verified staging. `copy` is the only step that writes to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import monotonic

from flyweight.errors import (
    FlyweightError,
    PlanError,
    TransferTimeout,
    TransportError,
    VersionError,
)
from flyweight.live.fetch import Fetch
from flyweight.live.loader import Loading
from flyweight.live.messages import Available, Confirmed, Done, Staged
from flyweight.live.publish_id import PublishId
from flyweight.live.session import Session
from flyweight.live.source_rank import Arrived, SourceRank
from flyweight.live.staging import Staging
from flyweight.live.target import LoaderTarget, ModelTarget
from flyweight.transports.address import Endpoint
from flyweight.worker_threads import run_on_threads

_DIGEST_SECONDS = 5.0
_SLOW_BYTES = 2 << 30
"""A copy is expected to do so many bytes in a second, at least."""
_LEAST_SECONDS = 0.01


class Incoming:
    """One version for one model, until it is closed."""

    read_seconds = 0.0
    """How much longer than a copy in memory it may take."""

    def __init__(self, session: Session, id: PublishId) -> None:
        self.session, self.id, self.about = session, id, Available(id, None, {})
        self.arrived: dict[int, Arrived] = {}
        """What is here, by source rank."""
        self.staging: Staging | None = None
        self.verify_seconds = 0.0
        self._loading: Loading | None = None

    @property
    def nbytes(self) -> int:
        return self.session.plan.nbytes

    @property
    def unused(self) -> tuple[str, ...]:
        """The trainer's tensors that are left out."""
        return self.session.target.unused

    @property
    def is_verified(self) -> bool:
        """True if digests came for everything."""
        return all(each.digests for each in self.arrived.values())

    @property
    def verified(self) -> str:
        """What is checked when it has been copied."""
        return self.session.target.verified if self.is_verified else "nothing"

    @property
    def overflows(self) -> int:
        return sum(each.overflows for each in self.arrived.values())

    @property
    def transport(self) -> str:
        return "+".join(sorted({way for each in self.arrived.values() for way in each.ways}))

    @property
    def progress(self) -> float:
        """How much has been fetched, and then how much the loader has taken, from 0 to 1."""
        if self._loading is not None and self._loading.has_begun:
            return self._loading.progress
        return 1.0 if self.staging is None else self.staging.progress

    def tell(self, message: Staged | Done) -> None:
        self.session.front.tell(message)

    def open(self, available: Available, deadline: float) -> bool:
        """Lease the version; fetch into staging, and verify there, what cannot be mapped.

        Returns False if the trainer has withdrawn the version, and nobody else has it.
        """
        session, holders, sources = self.session, available.holders, self.session.sources
        self.about = available
        asked = [each for each in sources.values() if each.reader is not None]
        for each in asked:  # all at once
            each.ask_lease(self.id, deadline)
        for each in asked:
            with suppress(VersionError):  # others may have what was withdrawn
                each.lease(deadline)
        if not holders and any(each.leased is None for each in asked):
            return False
        known: dict[str, dict[int, bytes]] = {each.kind: {} for each in session.plans}
        for each in asked:
            if each.leased is not None:
                for kind, digests in zip(each.kinds, each.leased.digests, strict=True):
                    known[kind][each.rank] = digests
            if (found := each.arrived(deadline)) is not None:
                self.arrived[each.rank] = found
        staged = [each for rank, each in sources.items() if rank not in self.arrived]
        if staged and session.ways.transport == "mapped":
            raise TransportError(
                f"the memory of {len(staged)} ranks of the trainer cannot be mapped here, and "
                f"transport='mapped' was asked for; share it, or use transport='auto'"
            )
        if staged:
            self._stage(staged, holders, deadline)
        else:
            session.pass_over(self.id)
        if self.is_verified:
            self._keep_digests(known, deadline)
        elif session.has_doubles:
            raise PlanError(
                "tensors that are one here are several at the trainer, and nothing is verified, so "
                "they may differ; publish with verify=True, or tie them there too"
            )
        self._prepare_loading(deadline)
        if all(each.lease is None for each in self.arrived.values()):
            self.tell(Staged(self.id))
        session.announce(available)
        return True

    def _keep_digests(self, known: dict[str, dict[int, bytes]], deadline: float) -> None:
        """Keep all digests for `check_live`, which may come when the trainer has gone on.

        known: those that came with leases, by kind and source rank.
        """
        session, soon = self.session, min(deadline, monotonic() + _DIGEST_SECONDS)
        known[session.plan.kind] = {rank: each.digests for rank, each in self.arrived.items()}
        session.known = self.id, known
        for plan in session.plans[1:]:  # of ranks that gave no lease of it, as on other hosts
            with suppress(FlyweightError):  # then `check_live` asks for a lease
                known[plan.kind] = session.digests(plan, self.id, soon)

    def _prepare_loading(self, deadline: float) -> None:
        """Make what an engine's loader will get; if that is all of it, the trainer may go on."""
        session, target = self.session, self.session.target
        if isinstance(target, LoaderTarget):
            staged = 0 if self.staging is None else self.staging.nbytes
            self._loading = Loading(
                target, session.plan, list(self.arrived.values()), session.me.name
            )
            if self._loading.prepare(session.ways.room(staged), deadline):
                self.confirm(deadline)
                self._end_leases()

    def _stage(
        self, sources: Sequence[SourceRank], holders: Sequence[Endpoint], deadline: float
    ) -> None:
        session, ranks = self.session, [each.rank for each in sources]
        staging = self.staging = session.stage(self.id, ranks, deadline)
        fetch = Fetch(session, staging, holders, deadline)

        def run(todo: Iterator[SourceRank]) -> None:
            for each in todo:
                self.arrived[each.rank] = fetch.run(each)

        try:
            run_on_threads(sources, run, len(sources), "flyweight-fetch")
        except BaseException as error:
            staging.end(error if isinstance(error, FlyweightError) else TransportError(repr(error)))
            raise
        staging.end()

    def check_time(self, deadline: float) -> None:
        """Raise unless the copy can begin: in time, and with leases that last for all of it."""
        now, seconds = monotonic(), _LEAST_SECONDS + self.session.plan.nbytes / _SLOW_BYTES
        if now > deadline:
            raise TransferTimeout(f"everything was here {now - deadline:.2g} s too late to begin")
        for each in self.arrived.values():
            if (reader := each.lease) is None:
                continue
            reader.check_lease()
            if now + seconds > reader.until:  # the pause took long
                each.source.ask_lease(self.id, deadline)
                each.source.lease(deadline)
            if now + seconds > reader.until:
                raise TransferTimeout(
                    f"{reader.channel.peer} keeps {self.id} for {reader.until - now:.2g} s, and "
                    f"the copy may take {seconds:.2g} s; pause sooner, or publish with a longer "
                    f"timeout_seconds"
                )

    def copy(self, deadline: float, check: Callable[[], None]) -> None:
        """Copy everything into the model, and verify it where it was written.

        check: called while devices copy; if it raises, the copies are waited for first.
        """
        try:
            if self._loading is not None:
                self._loading.run(deadline)
            else:
                self._copy_to_model(deadline, check)
            self.confirm(deadline, self._finish)
        except BaseException:
            self.session.throw_copies_away()
            raise

    def _finish(self) -> None:
        """Do what is left to do in this process once the bytes are there."""
        target = self.session.target
        if isinstance(target, ModelTarget):
            target.finish(self.about.values)
            target.touched()

    def _copy_to_model(self, deadline: float, check: Callable[[], None]) -> None:
        started, where = [], "where they were written"
        for each in self.arrived.values():
            if each.ring is None:
                copies = each.source.copies(each)
                started.append((each, copies, copies.start(should_digest=bool(each.digests))))
        failure = None
        try:
            check()
        except FlyweightError as error:
            failure = error
        for each, copies, finish in started:
            found = finish(deadline)
            self.verify_seconds += copies.digest_seconds
            if found is not None:
                each.source.check(found, each.digests, where)
        if failure is not None:
            raise failure
        for each in self.arrived.values():
            if each.ring is not None:
                assert each.lease is not None
                kind, has_digests = each.source.plan.kind, bool(each.digests)
                found = each.ring.run(each.lease, kind, deadline, should_digest=has_digests)
                if found is not None:
                    each.source.check(found, each.digests, where)

    def confirm(self, deadline: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Raise unless leases without digests ran until now: that is the proof.

        meanwhile: what to do while the holders answer.
        """
        unproved = {
            each.lease: each.lease.ask_release(deadline)
            for each in self.arrived.values()
            if not each.digests and each.lease is not None
        }
        meanwhile()
        for reader, number in unproved.items():
            reader.channel.answer(number, Confirmed, deadline).close()

    def close(self) -> None:
        """End the leases of the trainer's memory. Staging is served until the next update."""
        self._end_leases()
        self.arrived, self._loading = {}, None

    def _end_leases(self) -> None:
        for each in self.session.sources.values():
            if each.reader is not None:
                each.reader.end_lease()
