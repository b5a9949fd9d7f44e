"""Fetch: brings a stream into staging from a list of holders, best first.

If a holder dies, refuses or makes no progress, the next one is asked for what is missing. Nothing
waits beyond the deadline of the update. Where both hosts have NIXL, ranges are pulled by RDMA; once
that fails, the rest comes over sockets, unless the user asked for RDMA.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from logging import getLogger
from time import monotonic

import numpy as np

from flyweight.errors import (
    DigestMismatch,
    FlyweightError,
    PeerLost,
    TransferTimeout,
    TransportError,
)
from flyweight.live.messages import Data, Later, Pull, Read
from flyweight.live.reader import Reader
from flyweight.live.rows import words_of
from flyweight.live.session import Session
from flyweight.live.source_rank import Arrived, SourceRank
from flyweight.live.staging import Range, Staging
from flyweight.transports.address import Endpoint
from flyweight.transports.nixl import NUM_SLOTS
from flyweight.worker_threads import run_on_threads

_log = getLogger("flyweight.live")
NUM_CONNECTIONS = 2
_SEVERAL_BYTES = 32 << 20
"""Below this, more connections than one cost more than they save."""
_AHEAD = NUM_SLOTS
"""How many ranges are asked for before the first of them has arrived."""
STALL_SECONDS = 3.0
"""A holder that makes no progress for this long is left."""


class Fetch:
    """Fetches the streams of one version; safe to use from one thread for each rank."""

    def __init__(
        self, session: Session, staging: Staging, holders: Sequence[Endpoint], deadline: float
    ) -> None:
        """holders: other readers that have the version, best first; the trainer comes last."""
        self._session, self._staging, self._deadline = session, staging, deadline
        self._holders = holders
        self._must_pull, self._puller = session.ways.transport == "rdma", session.puller
        self._can_pull = session.puller is not None
        """False once NIXL has failed."""

    def run(self, source: SourceRank) -> Arrived:
        """Have the trainer write a stream that it has leased here, or fetch it; then verify it."""
        staging, rank, deadline = self._staging, source.rank, self._deadline
        if source.leased is not None:
            source.fill(staging, source.leased, deadline)
        else:
            self._fetch(rank, [*self._holders, source.endpoint])
        digests, overflows = staging.digests(source.plan, rank, deadline)
        memory = staging.memory[rank]
        if digests:
            found, _ = memory.digests.run(deadline)
            try:
                source.check(found, digests, "as they arrived")
            except DigestMismatch:
                wrong = np.flatnonzero(found != words_of(digests)).tolist()
                if not staging.spoiled(rank, wrong) & set(self._holders):
                    raise  # the trainer's own memory has changed
                self._fetch(rank, [source.endpoint])
                found, _ = memory.digests.run(deadline)
                source.check(found, digests, "as they arrived from the trainer itself")
        ways = staging.ways(rank)
        return Arrived(source, memory.rows, digests, overflows, ways, is_staged=True)

    def _fetch(self, rank: int, holders: Sequence[Endpoint]) -> None:
        """Fetch what is missing; raise PeerLost, with all reasons, if no holder gives it."""
        reasons = []
        for number, endpoint in enumerate(holders, 1):
            try:
                self._fetch_from(endpoint, rank, is_last=number == len(holders))
                return
            except FlyweightError as error:
                reasons.append(f"{endpoint}: {error}")
                if self._puller is not None and not self._puller.is_fenced:
                    raise  # the staging is still written, so nothing else may be
                if self._staging.is_unproven(rank):
                    raise PeerLost(
                        f"{'; '.join(reasons)}; nothing is verified, so what came from there "
                        f"proves nothing: update again, or publish with verify=True"
                    ) from error
            if monotonic() > self._deadline:
                raise TransferTimeout(f"fetching took too long; {'; '.join(reasons)}")
        raise PeerLost(
            f"no holder gave all of {self._staging.id}: {'; '.join(reasons)}; the old version "
            f"stays, update again"
        )

    def _fetch_from(self, endpoint: Endpoint, rank: int, *, is_last: bool) -> None:
        missing = self._staging.missing(rank)
        total = sum(each.nbytes for each in missing)
        num_connections = NUM_CONNECTIONS if total > _SEVERAL_BYTES else 1
        with self._session.lending() as lend:
            readers = []
            for _ in range(num_connections):
                soon = min(self._deadline, monotonic() + STALL_SECONDS)
                readers.append(lend(endpoint, soon))
                # The last one is the trainer, which may have to compute the digests first.
                is_verified = self._lease(readers[-1], rank, self._deadline if is_last else soon)
            waiting = deque(readers)

            def fetch(ranges: Iterator[Range]) -> None:
                self._fetch_ranges(waiting.popleft(), ranges)

            run_on_threads(missing, fetch, num_connections, "flyweight-fetch")
            for each in readers:  # without digests, only the holder's word is the proof
                each.release(self._deadline, is_proof=not is_verified)

    def _lease(self, reader: Reader, rank: int, deadline: float) -> bool:
        """Lease the version; return True if its digests came with the lease."""
        staging, plan = self._staging, self._staging.plan
        can_pull = self._pulls_from(reader)
        if can_pull and self._puller is not None:
            self._puller.begin()  # while the holder starts its own
        reader.ask_lease(staging.id, [plan.kind], rank, deadline, can_pull=can_pull)
        leased = reader.lease(deadline)
        staging.set_digests(rank, leased.digests[0], leased.overflows[0])
        return bool(leased.digests[0])

    def _pulls_from(self, reader: Reader) -> bool:
        """True if ranges are pulled by NIXL; raise if the user asked for that, and it cannot be."""
        theirs, ours = reader.welcome.nixl, self._puller.way if self._puller is not None else ""
        if self._must_pull and theirs != ours:
            raise TransportError(
                f"transport='rdma' was asked for, and {reader.channel.peer} has NIXL {theirs!r}, "
                f"this host {ours!r}; make them the same, or use transport='auto'"
            )
        is_remote = not reader.channel.wire.is_local
        return self._can_pull and theirs == ours and is_remote

    def _fetch_ranges(self, reader: Reader, ranges: Iterator[Range]) -> None:
        staging, coming, progress = self._staging, deque[tuple[int, Range, bool]](), -1
        channel, kind, slots = reader.channel, staging.plan.kind, count()

        def ask(each: Range) -> None:
            slot = next(slots) % NUM_SLOTS if self._pulls_from(reader) else None
            read = Read(kind, each.start, each.nbytes, STALL_SECONDS, slot)
            coming.append((channel.ask(read, self._deadline), each, slot is not None))

        def receive() -> None:
            nonlocal progress
            number, first, can_pull = coming.popleft()
            soon = min(self._deadline, monotonic() + 2 * STALL_SECONDS)
            kinds = (Data, Later, Pull) if can_pull else (Data, Later)
            frame = channel.answer(number, kinds, soon)
            frame.close()
            match frame.message:
                case Data() if self._must_pull:
                    raise TransportError(
                        f"{channel.peer} sends bytes over sockets, since NIXL does not work there, "
                        f"or still starts; update again"
                    )
                case Data():
                    channel.receive_bytes(staging.space(first), self._deadline, STALL_SECONDS)
                    staging.arrived(first, reader.endpoint, "read")
                case Pull() as found if self._pull(first, found):
                    staging.arrived(first, reader.endpoint, "rdma")
                case Later(arrived) if arrived <= progress:
                    raise TransferTimeout(f"{channel.peer} has made no progress")
                case Later(arrived):
                    progress = arrived
                    ask(first)
                case Pull():
                    ask(first)

        for each in ranges:
            ask(each)
            if len(coming) >= _AHEAD:
                receive()
        while coming:
            receive()

    def _pull(self, each: Range, found: Pull) -> bool:
        """Pull a range; return False if NIXL does not work, and sockets may be used instead."""
        if self._puller is None or not self._can_pull:
            return False
        try:
            self._puller.pull(
                found.keys,
                found.pieces,
                self._staging.memory[each.rank].segment,
                each.start,
                each.stop,
                stall_seconds=STALL_SECONDS,
                deadline=self._deadline,
            )
        except FlyweightError as error:
            if self._must_pull or not self._puller.is_fenced:
                raise
            self._can_pull = False
            _log.warning("bytes come over sockets, since NIXL failed: %s", error)
            return False
        return True
