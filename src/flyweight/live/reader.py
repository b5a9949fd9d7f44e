"""Reader: one connection to a holder, and what can be asked there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeVar

from flyweight.errors import (
    HandleGone,
    PeerLost,
    PeerRefused,
    PlanError,
    SpecError,
    TransportError,
)
from flyweight.live import messages
from flyweight.live.plan import Plan, Stream
from flyweight.live.publish_id import PublishId
from flyweight.memory import Buffer
from flyweight.memory_table import BufferTable, Integers
from flyweight.transports.address import (
    Address,
    Endpoint,
    UnixAddress,
    connected,
    connected_tcp,
    this_host,
)
from flyweight.transports.channel import Channel, Message, introduce
from flyweight.transports.device_segments import open_segments
from flyweight.transports.segments import Segment, mapped_rows
from flyweight.transports.tls import Tls, TlsWire
from flyweight.transports.wire import Wire

_GRACE_SECONDS = 2.0
"""How long a message may take for which there is no answer to wait for."""
_LOCAL_SECONDS = 5.0


@dataclass(frozen=True)
class Identity:
    """Who a reader is."""

    name: str
    rank: int = 0
    num_ranks: int = 1
    token: str = ""
    tls: Tls | None = None
    serves_at: Endpoint | None = None
    is_remote: bool = False
    """True to fetch everything over sockets, as a reader on another host does."""


def with_token(me: Identity, address: Address) -> Identity:
    """Return the same reader with the token of an address, which may be in a file there."""
    if me.token:
        return me
    if isinstance(address, UnixAddress):
        return replace(me, token=address.token())
    raise SpecError(f"{address} needs the token of its publisher: token=")


Found = TypeVar("Found")


def with_newest_token(
    me: Identity, address: Address, connect: Callable[[Identity], Found]
) -> tuple[Identity, Found]:
    """Connect with the token of an address; once more if it was that of an earlier publisher."""
    known = with_token(me, address)
    try:
        return known, connect(known)
    except PeerRefused:
        again = with_token(me, address)
        if again.token == known.token:
            raise
        return again, connect(again)


@dataclass(frozen=True, eq=False)
class HeldLease:
    """A lease, as its reader sees it."""

    leased: messages.Leased
    until: float
    """The holder keeps the memory still until then, at least."""
    blocks: BufferTable | None
    """Where the holder's blocks lie in memory that is mapped here; None if it cannot be mapped."""


@dataclass(frozen=True)
class AskedLease:
    number: int
    lease: messages.Lease
    at: float


def open_channel(
    endpoint: Endpoint, me: Identity, deadline: float, *, is_remote: bool = False
) -> Channel:
    """Return a connection to a holder that has proved the token, and to which it was proved.

    It goes by the holder's Unix socket if that can be reached, since memory can be mapped then.
    """
    if endpoint.is_here and not is_remote:
        soon = min(deadline, monotonic() + _LOCAL_SECONDS) if endpoint.remote else deadline
        try:
            channel = Channel(
                Wire(connected(endpoint.local, soon)), f"holder at {endpoint}", messages.MESSAGES
            )
            return _introduced(channel, me, deadline)
        except (PeerLost, PeerRefused):
            if not endpoint.remote:  # from another container, say, it can be read all the same
                raise
    if not endpoint.remote:
        raise PeerLost(f"{endpoint.local!r} is on another host, or cannot be reached from here")
    connection, host = connected_tcp(endpoint.remote, deadline)
    wire = Wire(connection) if me.tls is None else TlsWire(connection, me.tls.reader, hostname=host)
    return _introduced(Channel(wire, f"holder at {endpoint}", messages.MESSAGES), me, deadline)


def _introduced(channel: Channel, me: Identity, deadline: float) -> Channel:
    try:
        if isinstance(channel.wire, TlsWire):
            channel.wire.shake_hands(deadline)
        introduce(channel, me.name, me.token, deadline)
    except BaseException as error:
        channel.close()
        if isinstance(error, PeerLost) and not channel.wire.is_local and me.tls is None:
            error.note("if it encrypts connections, give tls= here too, a command --tls-authority")
        raise
    return channel


class Reader:
    """A connection that has been welcomed."""

    def __init__(self, channel: Channel, welcome: messages.Welcome, endpoint: Endpoint) -> None:
        self.channel, self.welcome, self.endpoint = channel, welcome, endpoint
        self.newest: PublishId | None = welcome.newest
        """The newest version that the holder has announced."""
        self._mapped: dict[str, BufferTable] = {}
        """The holder's blocks, by layout."""
        self._rows: dict[str, BufferTable] = {}
        self._filled: dict[str, Segment] = {}
        """The memory that the holder has filled last, by the kind that it is for."""
        self.has_lease = False
        channel.on_push = self._take_push

    @classmethod
    def connect(
        cls, endpoint: Endpoint, me: Identity, deadline: float, *, session: str = ""
    ) -> Reader:
        """Connect to a holder and join it.

        session: the session that the holder must serve; "" if that is not known yet.
        """
        join = messages.Join(
            me.name, os.getpid(), me.rank, me.num_ranks, this_host(), me.serves_at, session
        )
        channel = open_channel(endpoint, me, deadline, is_remote=me.is_remote)
        try:
            welcome = channel.call(join, messages.Welcome, deadline)
            here = welcome.here
            if not channel.wire.is_local and here.is_here and not me.is_remote:
                with suppress(PeerLost, PeerRefused):
                    local = open_channel(Endpoint(here.host, here.local), me, deadline)
                    channel.close()
                    channel = local
                    welcome = channel.call(join, messages.Welcome, deadline)
            if session and welcome.session != session:
                raise TransportError(
                    f"{channel.peer} serves session {welcome.session}, not {session}"
                )
        except BaseException:
            channel.close()
            raise
        return cls(channel, welcome, endpoint)

    def _take_push(self, message: Message) -> None:
        if isinstance(message, messages.Announced):
            self.newest = message.id

    def want(self, plan: Plan, deadline: float) -> None:
        """Say what this reader takes; raise PlanError unless the holder works out the same plan."""
        planned = self.channel.call(plan.wanted.message, messages.Planned, deadline)
        if planned.kind != plan.kind:
            raise PlanError(
                f"{self.channel.peer} has plan {planned.kind}, this reader {plan.kind}; install "
                f"the same version of flyweight"
            )

    def wait(
        self,
        wait: messages.Wait,
        deadline: float,
        bell: int,
        is_over: Callable[[], bool],
        *others: int,
    ) -> messages.Available | messages.Current:
        """Wait for a version; `is_over` ends that early if it is true when the bell rings.

        Raises TransferTimeout if none comes in time, and VersionError if it cannot come any more.

        others: files that ring it, too. An error of `is_over` ends the connection.
        """
        kinds = messages.Available, messages.Current
        number = self.channel.ask(wait, deadline)
        while not self.channel.wire.has_input(bell, *others, deadline=deadline):
            if monotonic() >= deadline:
                break
            with suppress(BlockingIOError):
                os.eventfd_read(bell)
            try:
                is_to_end = is_over()
            except BaseException:
                self.channel.shut()  # a request is open
                raise
            if is_to_end:
                self.channel.send(messages.Cancel(), monotonic() + _GRACE_SECONDS)
                deadline = monotonic() + _GRACE_SECONDS
                break
        frame = self.channel.answer(number, kinds, deadline)
        frame.close()
        found = frame.message
        assert isinstance(found, kinds)
        if isinstance(found, messages.Available):  # which is not announced once more
            self.newest = found.id
        return found

    def ask_lease(
        self,
        id: PublishId,
        kinds: Sequence[str],
        rank: int,
        deadline: float,
        *,
        can_map: bool = False,
        can_pull: bool = False,
    ) -> AskedLease:
        """Ask for a lease; several holders can be asked before the first one answers."""
        layouts, seconds = tuple(self._mapped), seconds_for_holder(deadline)
        lease = messages.Lease(id, tuple(kinds), rank, can_map, layouts, seconds, can_pull)
        now = monotonic()
        return AskedLease(self.channel.ask(lease, deadline), lease, now)

    def lease(
        self,
        asked: AskedLease,
        deadline: float,
        blocks: tuple[Integers, Integers] | None = None,
    ) -> HeldLease:
        """Take the lease that was asked for; map its memory.

        blocks: the shapes and item bytes of the holder's blocks, if its memory may be mapped.
        """
        frame, lease = self.channel.answer(asked.number, messages.Leased, deadline), asked.lease
        leased = frame.message
        assert isinstance(leased, messages.Leased)
        try:
            is_right = (leased.id, leased.rank) == (lease.id, lease.rank)
            if not is_right or not len(leased.digests) == len(leased.overflows) == len(lease.kinds):
                raise TransportError(f"{self.channel.peer} leased {leased.id}, not {lease.id}")
            if leased.mapped is not None and blocks is not None:
                last = _mapped(leased.mapped, frame.files, *blocks)
                self._mapped, self._rows = {leased.layout: last}, {}  # others are not used again
            found = self._mapped[leased.layout] if leased.layout else None
        except BaseException:  # the end of the connection is the end of the lease
            self.close()
            raise
        finally:
            frame.close()
        self.has_lease = True
        return HeldLease(leased, asked.at + leased.seconds, found)

    def rows_of(self, stream: Stream, lease: HeldLease) -> BufferTable:
        """Return where the rows of a stream lie in leased memory; the same table for the same."""
        assert lease.blocks is not None
        layout = lease.leased.layout
        if layout not in self._rows:
            self._rows[layout] = stream.in_source(lease.blocks)
        return self._rows[layout]

    def check_lease(self) -> None:
        """Raise HandleGone if the holder has ended the lease, and PeerLost if it died."""
        while self.channel.wire.has_input(deadline=0.0):
            try:
                self.channel.hear(monotonic() + _GRACE_SECONDS)
            except HandleGone as error:
                raise HandleGone(
                    f"{self.channel.peer} ended the lease: {error}; update again"
                ) from error

    def fill(self, kind: str, segment: Segment, deadline: float) -> None:
        """Have the holder write the leased stream of a kind into memory of this process."""
        files = () if self._filled.pop(kind, None) is segment else segment.files
        fill = messages.Fill(kind, segment.nbytes, seconds_for_holder(deadline))
        self.channel.call(fill, messages.Confirmed, deadline, files)
        self._filled[kind] = segment

    def take_ring(self, device: str, deadline: float) -> Buffer:
        """Take the holder's ring on a device until the lease ends, and map it."""
        number = self.channel.ask(messages.TakeRing(device, seconds_for_holder(deadline)), deadline)
        frame = self.channel.answer(number, messages.Ringed, deadline)
        try:
            assert isinstance(frame.message, messages.Ringed)
            (found,) = open_segments([frame.message.segment], frame.files)
            assert isinstance(found, Buffer)
            return found
        finally:
            frame.close()

    def release(self, deadline: float, *, is_proof: bool) -> None:
        """End the lease; with `is_proof`, raise HandleGone unless it ran until now."""
        if is_proof:
            self.channel.answer(self.ask_release(deadline), messages.Confirmed, deadline).close()
        else:
            self.has_lease = False
            self.channel.send(messages.Release(0.0), deadline)  # no request, so no answer comes

    def ask_release(self, deadline: float) -> int:
        """End the lease, and ask whether it ran until now; return the number of the request."""
        self.has_lease = False
        return self.channel.ask(messages.Release(seconds_for_holder(deadline)), deadline)

    def tell(self, message: messages.Staged | messages.Done) -> None:
        self.channel.send(message, monotonic() + _GRACE_SECONDS)

    def close(self) -> None:
        self.channel.close()
        self._mapped, self._rows, self._filled = {}, {}, {}  # not only once it is collected


def seconds_for_holder(deadline: float) -> float:
    """Return how long a holder may take, so that its answer is here before the deadline."""
    left = max(deadline - monotonic(), 0.0)
    return left - min(left / 5, 1.0)


def _mapped(
    layout: messages.Layout, files: Sequence[int], shape: Integers, item_bytes: Integers
) -> BufferTable:
    """Map the segments of a holder, and return where its blocks lie in them."""
    mapped = open_segments(layout.segments, files)
    return mapped_rows(layout.places, mapped, shape, item_bytes)
