"""Session: everything that a replica has of one session of a trainer.

Catalog, plan, connections, staging and prepared copies are built completely or not at all, and die
together: after any error of a connection the replica builds another session and swaps it in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import monotonic
from typing import Literal, get_args

from flyweight.errors import PeerLost, PlanError, SpecError, TransferTimeout, TransportError
from flyweight.live.catalog import Catalog
from flyweight.live.holder import Holding
from flyweight.live.messages import Available, Confirmed, Declined
from flyweight.live.plan import Plan, Plans, make_plan
from flyweight.live.publish_id import PublishId
from flyweight.live.reader import Identity, Reader, with_newest_token
from flyweight.live.rows import doubles
from flyweight.live.shelf import Shelf
from flyweight.live.source_rank import SourceRank
from flyweight.live.staging import WITHDRAW_SECONDS, Staging, StreamMemory, staging_memory
from flyweight.live.target import ModelTarget, Target
from flyweight.memory import available_bytes
from flyweight.transports.address import (
    Address,
    Endpoint,
    TcpAddress,
    UnixAddress,
    local_host_for,
    parse_address,
)
from flyweight.transports.nixl import NixlPuller, check_nixl, nixl_here

TransportChoice = Literal["auto", "mapped", "filled", "read", "rdma"]
TRANSPORTS = get_args(TransportChoice)
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How bytes may come."""

    transport: TransportChoice = "auto"
    staging_bytes: int | None = None
    """The most memory for what comes before the pause; by default half of what is free."""

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise SpecError(f"transport is {self.transport!r}, not one of {', '.join(TRANSPORTS)}")
        if self.transport == "rdma":
            check_nixl()

    def room(self, staged: int = 0) -> int:
        """Return how much memory is left beside what is staged."""
        return available_bytes() // 2 if self.staging_bytes is None else self.staging_bytes - staged


def serving_place(address: Address, *, serve: str | bool) -> TcpAddress | None:
    """Return where others may fetch from here; None if everything can be mapped on this host."""
    if serve is False or isinstance(address, UnixAddress):
        return None
    if isinstance(serve, str):
        place = parse_address(serve)
        if not isinstance(place, TcpAddress) or place.is_any:
            raise SpecError(f"serve is {serve!r}, expected 'tcp://HOST:PORT' of this host")
        return place
    return TcpAddress(local_host_for(address.host), 0)


@dataclass(frozen=True)
class Receiver:
    """Who takes versions, into what, and how."""

    me: Identity
    target: Target
    ways: Ways
    shelf: Shelf
    """Offers what is staged to others of its kind."""


class Session:
    """One session of a trainer, as the replica `me` sees it."""

    def __init__(self, front: Reader, receiver: Receiver, deadline: float) -> None:
        """Choose what to take and connect to the ranks that have it.

        front: a new connection to the trainer's rank 0, or to a holder of what the trainer had.
        """
        self.front, self.id = front, front.welcome.session
        self.me, self.ways, self._shelf = receiver.me, receiver.ways, receiver.shelf
        self.target = copy(receiver.target)
        """Of this session alone: it knows the boxes that were chosen from this catalog."""
        self.sources: dict[int, SourceRank] = {}
        """The ranks of the trainer that something is taken from."""
        self._idle: dict[Endpoint, list[Reader]] = {}
        """Connections for bytes, which are kept from one update to the next."""
        self._lending = threading.Lock()
        self._memory: dict[int, StreamMemory] = {}
        """What was allocated last, unless the shelf has it."""
        self._staged: Staging | None = None
        """What the shelf has of ours."""
        may_pull = front.endpoint.remote and self.me.tls is None and self.ways.transport != "read"
        self.puller = NixlPuller() if may_pull and nixl_here() else None
        """What brings bytes by RDMA, where both hosts can."""
        self.known: tuple[PublishId, dict[str, dict[int, bytes]]] | None = None
        """The version that was leased last, and its digests by kind and source rank."""
        try:
            self._plan_together(deadline)
            for rank in self.plan.streams:
                self.sources[rank] = self._source(rank, deadline)
        except BaseException:
            for each in self._readers:
                each.close()
            raise

    def _plan_together(self, deadline: float) -> None:
        table = self.front.welcome.catalog
        if table is None:
            raise TransportError(f"{self.front.channel.peer} sent no catalog")
        self.catalog = Catalog.received(table)
        try:
            self.plan = make_plan(self.catalog, self.target.choose(self.catalog))
            self.plans = [self.plan]
            """What is leased together: what is taken, and where a loader puts it."""
            if self.target.live not in (None, self.target) and self.front.welcome.ranks:
                self.plans.append(self.look()[1])  # other replicas serve only what they take
            for each in self.plans:
                self.front.want(each, deadline)
        except (PlanError, SpecError) as error:  # the trainer's next report says so
            with suppress(TransportError):
                text = f"{type(error).__name__}: {error}"
                self.front.channel.call(Declined(text), Confirmed, deadline)
            raise

    def _source(self, rank: int, deadline: float) -> SourceRank:
        """Return a rank of the trainer; connect to it if it is on this host."""
        ranks, endpoint, reader = self.front.welcome.ranks, self._endpoint_of(rank), None
        if ranks and rank == 0:
            reader = self.front
        elif ranks and endpoint.is_here and not self.me.is_remote:
            reader = Reader.connect(endpoint, self.me, deadline, session=self.id, plans=self.plans)
        if reader is not None and not reader.channel.wire.is_local:
            if reader is not self.front:
                reader.close()
            reader = None
        return SourceRank(
            rank=rank,
            endpoint=endpoint,
            reader=reader,
            catalog=self.catalog,
            plan=self.plan,
            kinds=[each.kind for each in self.plans if rank in each.streams],
            target=self.target,
            transport=self.ways.transport,
            replica=self.me.name,
        )

    def _endpoint_of(self, rank: int) -> Endpoint:
        """Return where the trainer's rank serves its stream, or else the holder that is joined."""
        ranks = self.front.welcome.ranks
        if ranks and rank >= len(ranks):
            raise TransportError(f"a block is of rank {rank}, the trainer has {len(ranks)} ranks")
        return ranks[rank] if ranks and rank else self.front.endpoint

    def look(self) -> tuple[ModelTarget, Plan]:
        """Return where a version lies once it is taken, as it is now, and the plan of that."""
        live = self.target.live
        if live is None:
            raise SpecError("nobody knows where a loader puts tensors; give it rows=")
        if live is self.target:
            return live, self.plan
        live = copy(live)
        return live, make_plan(self.catalog, live.choose(self.catalog))

    def digests(self, plan: Plan, id: PublishId, deadline: float) -> dict[int, bytes]:
        """Return the digests of a version for each source rank of a plan; lease what is not known.

        The connections are those for bytes, so that no other lease of this session is touched.
        """
        last, known = self.known or (None, {})
        found = dict(known.get(plan.kind, {})) if last == id else {}
        with self.lending() as lend:
            ranks = plan.streams.keys() - found.keys()
            asked = {rank: lend(self._endpoint_of(rank), deadline) for rank in ranks}
            for rank, reader in asked.items():
                reader.want(plan, deadline)
                reader.ask_lease(id, [plan.kind], rank, deadline)
            for rank, reader in asked.items():
                found[rank] = reader.lease(deadline).digests[0]
                reader.release(deadline, is_proof=False)
        return found

    @classmethod
    def open(
        cls,
        addresses: Sequence[Address],
        receiver: Receiver,
        deadline: float,
        connect_seconds: float = _CONNECT_SECONDS,
    ) -> Session:
        """Return a session of the first holder that answers."""
        me, reasons = receiver.me, []
        for address in addresses:
            soon = min(deadline, monotonic() + connect_seconds)
            try:
                connect = partial(Reader.connect, address.endpoint, deadline=soon)
                known, front = with_newest_token(me, address, connect)
                if front.welcome.here == me.serves_at:
                    front.close()
                    raise PeerLost(f"{address} is this replica itself")
                return cls(front, replace(receiver, me=known), deadline)
            except (PeerLost, TransferTimeout) as error:
                reasons.append(str(error))
        raise PeerLost(f"replica {me.name!r} finds no holder: {'; '.join(reasons)}")

    @property
    def has_failed(self) -> bool:
        """True after anything failed on a connection, as far as it was heard."""
        return any(each.channel.has_failed for each in self._readers)

    @property
    def is_alive(self) -> bool:
        """False after anything failed on a connection, or once a holder has ended one."""
        is_fenced = self.puller is None or self.puller.is_fenced
        return is_fenced and not any(each.channel.is_broken for each in self._readers)

    @property
    def _readers(self) -> set[Reader]:
        found = {each.reader for each in self.sources.values() if each.reader is not None}
        return found | {self.front}

    @property
    def holding(self) -> Holding:
        """What this replica serves to others of its kind."""
        return Holding(self.id, Plans(self.catalog, self.plan))

    @contextmanager
    def lending(self) -> Iterator[Callable[[Endpoint, float], Reader]]:
        """Lend connections for bytes, which are kept for the next time unless there is an error."""
        lent: list[Reader] = []

        def lend(endpoint: Endpoint, deadline: float) -> Reader:
            with self._lending:
                kept = self._idle.get(endpoint)
                found = kept.pop() if kept else None
            if found is not None and found.channel.is_broken:
                found.close()
                found = None
            if found is None:
                me, session, plans = self.me, self.id, [self.plan]
                found = Reader.connect(endpoint, me, deadline, session=session, plans=plans)
            lent.append(found)
            return found

        try:
            yield lend
        except BaseException:
            for each in lent:
                each.close()
            raise
        with self._lending:
            for each in lent:
                self._idle.setdefault(each.endpoint, []).append(each)

    @cached_property
    def has_doubles(self) -> bool:
        """True if tensors that are one in the model are several at the trainer."""
        is_model = isinstance(self.target, ModelTarget)
        return is_model and any(doubles(each.sink).any() for each in self.sources.values())

    def stage(self, id: PublishId, ranks: Sequence[int], deadline: float) -> Staging:
        """Return staging for a version, from which others may fetch; nobody reads its memory."""
        self.withdraw(min(deadline, monotonic() + WITHDRAW_SECONDS))
        memory, self._memory = self._memory, {}
        if list(memory) != list(ranks):
            del memory  # before more is allocated
            has_local = any(self.sources[rank].reader is not None for rank in ranks)
            memory = staging_memory(
                self.plan,
                ranks,
                self.ways.room(),
                self.target.devices,
                is_writable=self.puller is not None or has_local,
            )
        self._staged = Staging(id, self.plan, memory)
        self._shelf.offer(self._staged)  # from here on the memory is the shelf's
        return self._staged

    def pass_over(self, id: PublishId) -> None:
        """Let others know that this version is not staged here, so that they do not wait for it."""
        self.withdraw(monotonic() + WITHDRAW_SECONDS)
        self._shelf.pass_over(id)

    def announce(self, available: Available) -> None:
        """Let readers that know only this replica take what is staged."""
        if self._staged is not None and self._staged.id == available.id:
            self._shelf.announce(available)

    def withdraw(self, deadline: float) -> None:
        """Let nobody fetch what was staged last, whose memory the next version needs."""
        if self._staged is not None:
            if self._shelf.reclaim(self._staged.id, deadline) is self._staged:
                self._memory = self._staged.memory
            self._staged = None

    def throw_copies_away(self) -> None:
        for each in self.sources.values():
            each.throw_copies_away()

    def close(self) -> None:
        idle = [each for kept in self._idle.values() for each in kept]
        for each in (*self._readers, *idle):
            each.close()
        if self.puller is not None:
            self.puller.close()
        self.withdraw(monotonic())
        self.throw_copies_away()
