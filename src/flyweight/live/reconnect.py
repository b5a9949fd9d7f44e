"""Reconnect: keeps a replica joined to the publisher at its address, also if that one restarts.

Between two publishes it may join another replica for one round, which holds the version that it
needs and is nearer, or still there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from time import monotonic, sleep

from flyweight.checks import check_text
from flyweight.errors import FlyweightError, PeerLost, SpecError, TransferTimeout
from flyweight.live.address import Address
from flyweight.live.curve_keys import CurveClient
from flyweight.live.held_version import HeldVersion
from flyweight.live.holders import MAX_ADDRESSES
from flyweight.live.line import opened_line
from flyweight.live.messages import Begin, Elsewhere, Want
from flyweight.live.replica_connection import ChooseTensors, ReplicaConnection
from flyweight.live.tcp_address import TcpAddress, parse_address
from flyweight.ports import UpdateOptions
from flyweight.spec.manifest import TensorSpec

_RETRY_SECONDS = 0.02
_ABSENT_SECONDS = 1.0
"""How long a publisher that is gone is waited for before others are asked for the version.

It is half of the time that an update has, if that is less.
"""
_PEER_SECONDS = 5.0
"""How long another replica may take to begin a round."""
_READ_SECONDS = 10.0
"""How long replicas that still read the last version from this one are waited for."""
Begun = tuple[ReplicaConnection, Begin | None]


def replica_name(name: str | None, num_ranks: int) -> str:
    """Return the name of a replica: by default that of its host, with the process id."""
    check_text("name", name)
    if num_ranks > 1 and name is None:
        raise SpecError(f"the {num_ranks} ranks of a replica need a common name: name=")
    return f"{os.uname().nodename}:{os.getpid()}" if name is None else name


class Reconnect:
    """Keeps a replica joined: makes another connection when one is lost."""

    def __init__(
        self,
        address: Address | TcpAddress,
        token: str | None,
        curve: CurveClient | None,
        name: str,
        ranks: tuple[int, int],
        *,
        choose: ChooseTensors,
        is_current: Callable[[], bool],
        takes_all: bool = False,
        peers: Sequence[str] = (),
    ) -> None:
        """Remember what to connect with.

        ranks: which rank of the replica this is, and how many there are.
        choose: says which tensors to request; `is_current`, whether that is still right.
        takes_all: whether it requests all tensors that there are.
        peers: the addresses of replicas that serve others, for when the publisher is gone.
        """
        if peers and ranks[1] > 1:
            raise SpecError("peers= is for replicas of one rank; all ranks would have to ask one")
        self.serves_at = ""
        """Where this replica serves others."""
        self._peers = [str(parse_address(each)) for each in peers]
        self._is_at_peer = False
        """True if the connection is to another replica, for one round."""
        self._offered: int | None = None
        """How many updates had succeeded when another replica began a round for this one."""
        self._address, self._token, self._curve = address, token, curve
        self._name, self._ranks = name, ranks
        self._choose, self._is_current, self._takes_all = choose, is_current, takes_all
        self._published: tuple[str, Mapping[str, TensorSpec]] = ("", {})
        """The session of the publisher that was joined last, and its tensors."""
        self._joining: ReplicaConnection | None = None
        self._is_open = True
        self.connection: ReplicaConnection | None = None
        """The connection that has joined last, if it was not closed since."""

    @property
    def is_joined(self) -> bool:
        """True while there is a connection that has joined and is not lost."""
        connection = self.connection  # another thread may close it
        return connection is not None and not connection.is_lost

    def joined(
        self, deadline: float, is_over: Callable[[], bool], *, accepted_by: float = inf
    ) -> ReplicaConnection:
        """Return a connection that has joined; wait for a publisher if necessary.

        accepted_by: when the wait for one that accepts connections ends, if that is earlier.
        """
        accepted_by = min(accepted_by, deadline)
        while True:
            connection = self.connection
            is_usable = connection is not None and not connection.is_lost and self._is_current()
            if connection is not None and is_usable and not self._is_at_peer:
                return connection
            self.disconnect()
            try:
                return self.connect(deadline, is_over, accepted_by=accepted_by)
            except (PeerLost, TransferTimeout) as error:
                is_late = monotonic() + _RETRY_SECONDS > accepted_by
                if is_late or is_over() or not self._is_open:
                    raise TransferTimeout(f"no publisher came in time: {error}") from error
                sleep(_RETRY_SECONDS)

    def begun(
        self,
        options: UpdateOptions,
        held: HeldVersion,
        deadline: float,
        synchronize: Callable[[], None],
        *,
        peer_seconds: float = 0.0,
    ) -> Begun:
        """Request a version; return the start of its round, or None if `held` is that version.

        It comes from the publisher, or from a replica that the publisher names. If there is no
        publisher, replicas that are known are asked before it is waited for.

        synchronize: called before each request.
        peer_seconds: how much longer than to the deadline other replicas may take to begin.
        """
        peers_until = deadline + peer_seconds
        # After a round with another replica that did not succeed, the publisher itself is asked.
        has_failed, self._offered = self._offered == held.num_taken, None
        may_be_elsewhere = self._ranks[1] == 1 and not has_failed
        while True:
            if may_be_elsewhere and self._peers and self._is_absent(deadline, options):
                may_be_elsewhere = False
                newest = "" if options.version is not None else self._newest_session(held)
                found = self._from_peers(
                    self._peers, options, held, peers_until, synchronize, session=newest
                )
                if found is not None:
                    return found
            connection = self.joined(deadline, options.is_over)
            synchronize()
            try:
                answer = connection.request(
                    options,
                    held.version,
                    held.session,
                    deadline,
                    may_be_elsewhere=may_be_elsewhere,
                )
            except (PeerLost, TransferTimeout) as error:
                # If the publisher is still connected, nobody has published in time.
                is_lost = isinstance(error, PeerLost) or connection.is_lost
                if not is_lost or monotonic() > deadline or not self._is_open:
                    raise
                self.disconnect()  # connect again: a restarted publisher will do
                continue
            if not isinstance(answer, Elsewhere):
                return connection, answer
            may_be_elsewhere, self._peers = False, list(answer.addresses[:MAX_ADDRESSES])
            exact = replace(options, version=answer.version)
            found = self._from_peers(
                self._peers,
                exact,
                held,
                peers_until,
                synchronize,
                session=connection.session,
                is_named=True,
            )
            if found is not None:
                return found

    def _is_absent(self, deadline: float, options: UpdateOptions) -> bool:
        """True if no publisher accepts connections now. One that does may plan for long."""
        seconds = min(_ABSENT_SECONDS, (deadline - monotonic()) / 2)
        try:
            self.joined(deadline, options.is_over, accepted_by=monotonic() + seconds)
        except TransferTimeout:
            return True
        return False

    def _newest_session(self, held: HeldVersion) -> str:
        """Return the session that versions must be of not to be older than `held`."""
        return "" if held.version is None else self._published[0] or held.session

    def _from_peers(
        self,
        addresses: Sequence[str],
        options: UpdateOptions,
        held: HeldVersion,
        deadline: float,
        synchronize: Callable[[], None],
        *,
        session: str,
        is_named: bool = False,
    ) -> Begun | None:
        """Request a version from other replicas, in turn; None if all of them fail.

        session: the session that the version must be of, "" if it does not matter.
        is_named: the publisher says that they have it, so it may be there in a moment.
        """
        for address in addresses:
            if address == self.serves_at or options.is_over() or not self._is_open:
                continue
            until = min(deadline, monotonic() + _PEER_SECONDS)
            self.disconnect()  # joining another one changes which tensors are wanted
            try:
                connection = self.connect(until, options.is_over, parse_address(address))
                if session not in ("", connection.session):
                    raise PeerLost(f"the replica at {address} follows another publisher")
                if not is_named and _is_useless(connection, options, held):
                    raise PeerLost(f"the replica at {address} has nothing for us")
                synchronize()
                begin = connection.request(options, held.version, held.session, until)
            except FlyweightError:
                self.disconnect()
                continue
            assert not isinstance(begin, Elsewhere)
            self._offered = None if begin is None else held.num_taken
            return connection, begin
        return None

    def connect(
        self,
        deadline: float,
        is_over: Callable[[], bool],
        peer: Address | TcpAddress | None = None,
        *,
        accepted_by: float = inf,
    ) -> ReplicaConnection:
        """Join the publisher, or another replica; raise PeerLost if there is none.

        accepted_by: the deadline for the other side to accept, if that is earlier than `deadline`.
        """

        def is_ended() -> bool:
            return is_over() or not self._is_open

        line = opened_line(
            self._address if peer is None else peer,
            self._token,
            None if isinstance(peer, Address) else self._curve,  # nothing leaves this host to it
            min(deadline, accepted_by),
            is_ended,
            can_forward=peer is None,
        )
        connection = self._joining = ReplicaConnection(
            line,
            self._name,
            rank=self._ranks[0],
            num_ranks=self._ranks[1],
            serves_at=self.serves_at if peer is None else "",
        )

        def choose(tensors: Mapping[str, TensorSpec], tied: Mapping[str, str]) -> Want:
            if peer is None:
                self._published = connection.session, tensors
            elif self._takes_all:
                tensors = self._all_published(connection.session, tensors)
            return self._choose(tensors, tied)

        try:
            connection.join(choose, deadline, is_ended)
        except BaseException:
            connection.disconnect("could not agree")
            raise
        finally:
            self._joining = None
        self.connection, self._is_at_peer = connection, peer is not None
        return connection

    def _all_published(
        self, session: str, found: Mapping[str, TensorSpec]
    ) -> Mapping[str, TensorSpec]:
        """Return a publisher's tensors, in its order; raise PeerLost unless these are the same.

        A replica that serves others may have left out tensors, or tied some. Only the publisher
        itself says which ones there are.
        """
        joined, published = self._published
        if session != joined or found != published:
            raise PeerLost("the replica has other tensors than a publisher that was joined before")
        return published

    def wake(self) -> None:
        """Make a thread that waits for a message call its `is_over`."""
        for connection in (self._joining, self.connection):
            if connection is not None:
                connection.wake()

    def disconnect(self) -> None:
        """Close the connection, if there is one; its memory is unmapped."""
        if self.connection is not None:
            connection, self.connection = self.connection, None
            connection.close()

    def end(self) -> None:
        """Make no more connections, and end waits in other threads; memory stays mapped.

        Replicas that still read the last version from this one get some seconds first.
        """
        self._is_open = False
        self.wake()
        if (connection := self.connection) is not None:
            try:
                connection.wait_read(_READ_SECONDS)
            finally:
                connection.disconnect()


def _is_useless(peer: ReplicaConnection, options: UpdateOptions, held: HeldVersion) -> bool:
    """True if another replica lacks the version, or all that it has is held already, or older."""
    newest = -1 if peer.newest is None else peer.newest
    if options.version is not None:
        return options.version != newest
    if held.version is None:  # files have a number, and no session
        return held.loaded is not None and newest <= held.loaded
    if held.session != peer.session:
        return False
    return newest < held.version or (newest == held.version and not options.may_keep)
