"""Session: everything that a replica has of one session of a trainer.

Catalog, plan, connections, staging and prepared copies are built completely or not at all, and die
together: after any error of a connection the replica builds another session and swaps it in.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import monotonic
from typing import Literal, get_args

import numpy as np

from flyweight.errors import PeerLost, PlanError, SpecError, TransferTimeout, TransportError
from flyweight.live.catalog import Catalog
from flyweight.live.fetch import Connections
from flyweight.live.holder import Holding
from flyweight.live.messages import Available, Declined, Done, Planned, Staged
from flyweight.live.plan import Plan, Plans, make_plan
from flyweight.live.publish_id import PublishId
from flyweight.live.reader import Identity, Reader, with_newest_token
from flyweight.live.ring import RingCopies
from flyweight.live.rows import RowCopies, doubles
from flyweight.live.shelf import Shelf
from flyweight.live.staging import WITHDRAW_SECONDS, Staging, StagingMemory
from flyweight.live.target import LoaderTarget, ModelTarget, Target
from flyweight.memory import Buffer, available_bytes
from flyweight.memory_table import BufferTable, Integers
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

    def room(self, staged: int) -> int:
        """Return how much memory is left for tensors of a loader, beside what is staged."""
        if self.staging_bytes is None:
            return available_bytes() // 2
        return self.staging_bytes - staged


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


def _front_at(address: Address, deadline: float, me: Identity) -> Reader:
    return Reader.connect(address.endpoint, me, deadline)


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
        self.front, self._ranks = front, dict[int, Reader]()
        """The front, and the connections to ranks on this host."""
        self.me, self.ways = receiver.me, receiver.ways
        self.target = copy(receiver.target)
        """Of this session alone: it knows the boxes that were chosen from this catalog."""
        self._shelf, self.id = receiver.shelf, front.welcome.session
        self._memory: dict[tuple[int, ...], StagingMemory] = {}
        """What the shelf does not have, by the ranks that it is for."""
        self._staged: PublishId | None = None
        """What the shelf has of ours."""
        """True once holders may still write memory that was given up: they must let go of it."""
        self._copies: dict[int, tuple[BufferTable, RowCopies]] = {}
        self.puller = self._new_puller()
        """What brings bytes by RDMA, where both hosts can."""
        self.known: tuple[PublishId, dict[str, dict[int, bytes]]] | None = None
        """The version that was leased last, and its digests by kind and source rank."""
        self._ring_copies: dict[int, RingCopies] = {}
        try:
            self._plan_together(deadline)
            self.connections = Connections(self.me, self.id, self.plan)
            for rank in self.plan.streams:
                if (found := self._beside(rank, front.welcome.ranks, deadline)) is not None:
                    self._ranks[rank] = found
        except BaseException:
            for each in self._readers:
                each.close()
            raise

    def _new_puller(self) -> NixlPuller | None:
        may_pull = self.me.tls is None and self.ways.transport != "read"
        return NixlPuller() if self.front.endpoint.remote and may_pull and nixl_here() else None

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
        except (PlanError, SpecError) as error:  # the trainer's next report says so
            with suppress(TransportError):
                text = f"{type(error).__name__}: {error}"
                self.front.channel.call(Declined(text), Planned, deadline)
            raise
        for each in self.plans:
            self.front.want(each, deadline)

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

        The connections are new ones, so that no other lease of this session is touched.
        """
        last, known = self.known or (None, {})
        found = dict(known.get(plan.kind, {})) if last == id else {}
        asked = {}
        with ExitStack() as stack:
            for rank in plan.streams.keys() - found.keys():
                source = Reader.connect(self.endpoint_of(rank), self.me, deadline, session=self.id)
                stack.enter_context(closing(source))
                source.want(plan, deadline)
                request = source.ask_lease(id, [plan.kind], rank, deadline, can_map=False)
                asked[rank] = source, request
            for rank, (source, request) in asked.items():
                found[rank] = source.lease(request, deadline).leased.digests[0]
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
                known, front = with_newest_token(me, address, partial(_front_at, address, soon))
                if front.welcome.here == me.serves_at:
                    front.close()
                    raise PeerLost(f"{address} is this replica itself")
                return cls(front, replace(receiver, me=known), deadline)
            except (PeerLost, TransferTimeout) as error:
                reasons.append(str(error))
        raise PeerLost(f"replica {me.name!r} finds no holder: {'; '.join(reasons)}")

    def _beside(self, rank: int, ranks: Sequence[Endpoint], deadline: float) -> Reader | None:
        """Return a connection to a rank of the trainer on this host; None if it is on another."""
        if not ranks:
            return None
        if rank == 0:
            return self.front if self.front.channel.wire.is_local else None
        if rank >= len(ranks):
            raise TransportError(f"a block is of rank {rank}, the trainer has {len(ranks)} ranks")
        if self.me.is_remote or not ranks[rank].is_here:
            return None
        source = Reader.connect(ranks[rank], self.me, deadline, session=self.id)
        if not source.channel.wire.is_local:
            source.close()
            return None
        try:
            for each in self.plans:
                source.want(each, deadline)
        except BaseException:
            source.close()
            raise
        return source

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
        return {self.front, *self._ranks.values()}

    @property
    def holding(self) -> Holding:
        """What this replica serves to others of its kind."""
        return Holding(self.id, Plans(self.catalog, self.plan))

    def beside(self, rank: int) -> Reader | None:
        """Return the connection to a rank on this host."""
        return self._ranks.get(rank)

    def blocks_of(self, rank: int) -> tuple[Integers, Integers]:
        """Return the shapes and item bytes of the blocks of a rank of the trainer."""
        catalog, here = self.catalog, self.catalog.rank == rank
        return catalog.blocks.shape[here], catalog.item_bytes[catalog.blocks.tensor[here]]

    def endpoint_of(self, rank: int) -> Endpoint:
        """Return where the trainer's rank serves its stream, or else the holder that is joined."""
        ranks = self.front.welcome.ranks
        return ranks[rank] if ranks and rank else self.front.endpoint

    def can_map(self, rank: int) -> bool:
        """True unless rows must be cast on another device than the one that they come from."""
        stream, catalog = self.plan.streams[rank], self.catalog
        if self.ways.transport not in ("auto", "mapped"):
            return False
        if not stream.is_cast:
            return True
        rows = np.flatnonzero(stream.cast[:, 0] >= 0)
        wanted = self.plan.wanted.devices
        at = catalog.devices.index[catalog.rank == rank][stream.block[rows]]
        to = wanted.index[stream.sink[rows]]
        return bool((np.array(catalog.devices.names)[at] == np.array(wanted.names)[to]).all())

    def ring_device(self, rank: int) -> str:
        """Return the device of which the trainer's rank may fill a ring; "" if there is none.

        Its blocks, and all that they fill here, must be on one device, the same one.
        """
        if self.ways.transport not in ("auto", "filled") or isinstance(self.target, LoaderTarget):
            return ""
        catalog, wanted, stream = self.catalog, self.plan.wanted.devices, self.plan.streams[rank]
        at = np.unique(catalog.devices.index[catalog.rank == rank][stream.block]).tolist()
        to = np.unique(wanted.index[stream.sink]).tolist()
        names = {catalog.devices.names[n] for n in at} | {wanted.names[n] for n in to}
        return names.pop() if len(names) == 1 else ""

    @cached_property
    def has_doubles(self) -> bool:
        """True if tensors that are one in the model are several at the trainer."""
        target = self.target
        if not isinstance(target, ModelTarget):
            return False
        rows = [each.in_sink(target.table) for each in self.plan.streams.values()]
        return any(bool(doubles(each).any()) for each in rows)

    def copies(self, rank: int, rows: BufferTable, *, is_staged: bool) -> RowCopies:
        """Return prepared copies into the model: memory that is leased again lies as before.

        is_staged: whether the rows have been cast already.
        """
        assert isinstance(self.target, ModelTarget)
        known, copies = self._copies.get(rank, (None, None))
        if copies is None or known is not rows:
            if copies is not None:
                copies.close()
            sink = self.plan.streams[rank].in_sink(self.target.table)
            stream = self.plan.streams[rank]
            cast = None if is_staged or not stream.is_cast else stream.cast
            copies = RowCopies(sink, rows, self.plan.digest, cast)
            self._copies[rank] = rows, copies
        return copies

    def ring_copies(self, rank: int, memory: Buffer) -> RingCopies:
        """Return prepared copies from a ring of the trainer's rank, which stays where it is."""
        assert isinstance(self.target, ModelTarget)
        found = self._ring_copies.get(rank)
        if found is None or found.memory.address != memory.address:
            stream = self.plan.streams[rank]
            sink = stream.in_sink(self.target.table)
            found = RingCopies(stream, sink, memory, self.plan.digest)
            self._ring_copies[rank] = found
        return found

    def throw_copies_away(self) -> None:
        """Forget what was prepared for an attempt that failed: devices may still work on it."""
        for _, copies in self._copies.values():
            copies.close()
        for each in self._ring_copies.values():
            each.close()
        self._copies, self._ring_copies = {}, {}

    def stage(self, id: PublishId, ranks: Sequence[int], deadline: float) -> Staging:
        """Return staging for a version, from which others may fetch; nobody reads its memory."""
        self.withdraw(min(deadline, monotonic() + WITHDRAW_SECONDS))
        memory = self._memory.pop(tuple(ranks), None)
        self._memory.clear()
        if memory is None:
            is_writable = self.puller is not None or any(rank in self._ranks for rank in ranks)
            memory = StagingMemory(
                self.plan,
                ranks,
                limit_bytes=self.ways.staging_bytes,
                is_writable=is_writable,
                devices=self.target.devices,
            )
        staging, self._staged = Staging(id, memory), id
        self._shelf.offer(staging)  # from here on the memory is the shelf's
        return staging

    def pass_over(self, id: PublishId) -> None:
        """Let others know that this version is not staged here, so that they do not wait for it."""
        self.withdraw(monotonic() + WITHDRAW_SECONDS)
        self._shelf.pass_over(id)

    def announce(self, available: Available) -> None:
        """Let readers that know only this replica take what is staged."""
        if available.id == self._staged:
            self._shelf.announce(available)

    def withdraw(self, deadline: float) -> None:
        """Let nobody fetch what was staged last, whose memory the next version needs."""
        if self._staged is not None:
            found = self._shelf.reclaim(self._staged, deadline)
            if isinstance(found, Staging):
                self._memory[found.memory.ranks] = found.memory
            self._staged = None

    def tell(self, message: Staged | Done) -> None:
        with suppress(TransportError):  # the trainer may be gone; the version is here all the same
            self.front.tell(message)

    def close(self) -> None:
        for each in self._readers:
            each.close()
        self.connections.close()
        if self.puller is not None:
            self.puller.close()
        self.withdraw(monotonic())
        self.throw_copies_away()
