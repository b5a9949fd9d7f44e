"""Reader: one connection to a holder, and what can be asked there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeVar

from flyweight.errors import (
    FlyweightError,
    HandleGone,
    PeerLost,
    PeerRefused,
    PlanError,
    SpecError,
    TransportError,
)
from flyweight.live import messages
from flyweight.live.plan import Plan
from flyweight.live.publish_id import PublishId
from flyweight.memory_table import BufferTable
from flyweight.transports.address import (
    Address,
    Endpoint,
    UnixAddress,
    connected,
    connected_tcp,
    this_host,
)
from flyweight.transports.channel import Channel, Message, introduce
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


def open_channel(endpoint: Endpoint, me: Identity, deadline: float) -> Channel:
    """Return a connection to a holder that has proved the token, and to which it was proved.

    It goes by the holder's Unix socket if that can be reached, since memory can be mapped then.
    """
    if endpoint.is_here and not me.is_remote:
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
        self.mapped: dict[str, BufferTable] = {}
        """The rows that lie in memory of the holder, by its layout: the last one alone."""
        self.leased: messages.Leased | None = None
        """The lease, until its end."""
        self.until = 0.0
        """The holder keeps what is leased still until then, at least."""
        self._asked: tuple[int, messages.Lease, float] | None = None
        """A lease that was asked for: the number of the request, and when that was."""
        channel.on_push = self._take_push

    @classmethod
    def connect(
        cls,
        endpoint: Endpoint,
        me: Identity,
        deadline: float,
        *,
        session: str = "",
        plans: Sequence[Plan] = (),
    ) -> Reader:
        """Connect to a holder and join it.

        session: the session that the holder must serve; "" if that is not known yet.
        plans: what this reader takes, unless that is said later.
        """
        join = messages.Join(
            me.name, os.getpid(), me.rank, me.num_ranks, this_host(), me.serves_at, session
        )
        channel = open_channel(endpoint, me, deadline)
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
            made = cls(channel, welcome, endpoint)
            for each in plans:
                made.want(each, deadline)
        except BaseException:
            channel.close()
            raise
        return made

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
    ) -> None:
        """Ask for a lease; several holders can be asked before the first one answers."""
        layouts, seconds = tuple(self.mapped), seconds_for_holder(deadline)
        lease = messages.Lease(id, tuple(kinds), rank, can_map, layouts, seconds, can_pull)
        now = monotonic()
        self._asked = self.channel.ask(lease, deadline), lease, now

    def lease(
        self,
        deadline: float,
        rows_in: Callable[[messages.Layout, Sequence[int]], BufferTable] | None = None,
    ) -> messages.Leased:
        """Take the lease that was asked for; `mapped` has its rows if it has a layout.

        rows_in: maps memory of the holder with its open files, and returns where the rows lie.
        """
        assert self._asked is not None
        (number, lease, asked), self._asked = self._asked, None
        frame = self.channel.answer(number, messages.Leased, deadline)
        leased = frame.message
        assert isinstance(leased, messages.Leased)
        try:
            is_right = (leased.id, leased.rank) == (lease.id, lease.rank)
            if not is_right or not len(leased.digests) == len(leased.overflows) == len(lease.kinds):
                raise TransportError(f"{self.channel.peer} leased {leased.id}, not {lease.id}")
            if leased.mapped is not None and rows_in is not None:
                self.mapped = {leased.layout: rows_in(leased.mapped, frame.files)}
            if leased.layout and leased.layout not in self.mapped:
                raise TransportError(f"{self.channel.peer} did not send the memory that it leased")
        except BaseException:  # the end of the connection is the end of the lease
            self.close()
            raise
        finally:
            frame.close()
        self.leased, self.until = leased, asked + leased.seconds
        return leased

    def check_lease(self) -> None:
        """Raise HandleGone if the holder has ended the lease, and PeerLost if it died."""
        while self.channel.wire.has_input(deadline=0.0):
            try:
                self.channel.hear(monotonic() + _GRACE_SECONDS)
            except HandleGone as error:
                raise HandleGone(
                    f"{self.channel.peer} ended the lease: {error}; update again"
                ) from error

    def release(self, deadline: float, *, is_proof: bool) -> None:
        """End the lease; with `is_proof`, raise HandleGone unless it ran until now."""
        if is_proof:
            self.channel.answer(self.ask_release(deadline), messages.Confirmed, deadline).close()
        else:
            self.leased = None
            self.channel.send(messages.Release(0.0), deadline)  # no request, so no answer comes

    def ask_release(self, deadline: float) -> int:
        """End the lease, and ask whether it ran until now; return the number of the request."""
        self.leased = None
        return self.channel.ask(messages.Release(seconds_for_holder(deadline)), deadline)

    def end_lease(self) -> None:
        """End a lease that still runs; if it was asked for and did not come, the connection too."""
        if self._asked is not None:
            self.close()
        elif self.leased is not None:
            with suppress(FlyweightError):
                self.release(monotonic() + _GRACE_SECONDS, is_proof=False)

    def tell(self, message: messages.Staged | messages.Done) -> None:
        """Let the holder know, if it is still there."""
        with suppress(TransportError):  # the version is here all the same
            self.channel.send(message, monotonic() + _GRACE_SECONDS)

    def close(self) -> None:
        self.channel.close()
        self.mapped = {}  # not only once it is collected


def seconds_for_holder(deadline: float) -> float:
    """Return how long a holder may take, so that its answer is here before the deadline."""
    left = max(deadline - monotonic(), 0.0)
    return left - min(left / 5, 1.0)
