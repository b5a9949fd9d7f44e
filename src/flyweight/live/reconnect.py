"""Reconnect: keeps a replica joined to the publisher at its address, also if that one restarts.

Between two publishes it may join another replica for one round, which holds the version that it
needs and is nearer, or still there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic, sleep

from flyweight.errors import FlyweightError, PeerLost, SpecError, TransferTimeout
from flyweight.live.address import Address
from flyweight.live.curve_keys import CurveClient
from flyweight.live.held_version import HeldVersion
from flyweight.live.holders import MAX_ADDRESSES
from flyweight.live.line import opened_line
from flyweight.live.messages import Begin, Elsewhere
from flyweight.live.replica_connection import ChooseTensors, ReplicaConnection
from flyweight.live.tcp_address import TcpAddress, parse_address
from flyweight.ports import UpdateOptions

_RETRY_SECONDS = 0.02
_ABSENT_SECONDS = 1.0
"""How long a publisher that is gone is waited for before others are asked for the version."""
_PEER_SECONDS = 5.0
"""How long another replica may take to begin a round."""
_READ_SECONDS = 10.0
"""How long replicas that still read the last version from this one are waited for."""
Begun = tuple[ReplicaConnection, Begin | None]


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
        peers: Sequence[str] = (),
    ) -> None:
        """Remember what to connect with.

        ranks: which rank of the replica this is, and how many there are.
        choose: says which tensors to request; `is_current`, whether that is still right.
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
        self._choose, self._is_current = choose, is_current
        self._joining: ReplicaConnection | None = None
        self._is_open = True
        self.connection: ReplicaConnection | None = None
        """The connection that has joined last, if it was not closed since."""

    @property
    def is_joined(self) -> bool:
        """True while there is a connection that has joined and is not lost."""
        connection = self.connection  # another thread may close it
        return connection is not None and not connection.is_lost

    def joined(self, deadline: float, is_over: Callable[[], bool]) -> ReplicaConnection:
        """Return a connection that has joined; wait for a publisher if necessary."""
        while True:
            connection = self.connection
            is_usable = connection is not None and not connection.is_lost and self._is_current()
            if connection is not None and is_usable and not self._is_at_peer:
                return connection
            self.disconnect()
            try:
                return self.connect(deadline, is_over)
            except (PeerLost, TransferTimeout) as error:
                is_late = monotonic() + _RETRY_SECONDS > deadline
                if is_late or is_over() or not self._is_open:
                    raise TransferTimeout(f"no publisher came in time: {error}") from error
                sleep(_RETRY_SECONDS)

    def begun(
        self,
        options: UpdateOptions,
        held: HeldVersion,
        deadline: float,
        synchronize: Callable[[], None],
    ) -> Begun:
        """Request a version; return the start of its round, or None if `held` is that version.

        It comes from the publisher, or from a replica that the publisher names. If there is no
        publisher, replicas that are known are asked before it is waited for.

        synchronize: called before each request.
        """
        # After a round with another replica that did not succeed, the publisher itself is asked.
        has_failed, self._offered = self._offered == held.num_taken, None
        may_be_elsewhere = self._ranks[1] == 1 and not has_failed
        while True:
            if may_be_elsewhere and self._peers and self._is_absent(deadline, options):
                may_be_elsewhere = False
                found = self._from_peers(self._peers, options, held, deadline, synchronize)
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
                self._peers, exact, held, deadline, synchronize, session=connection.session
            )
            if found is not None:
                return found

    def _is_absent(self, deadline: float, options: UpdateOptions) -> bool:
        """True if no publisher can be joined now."""
        try:
            self.joined(min(deadline, monotonic() + _ABSENT_SECONDS), options.is_over)
        except TransferTimeout:
            return True
        return False

    def _from_peers(
        self,
        addresses: Sequence[str],
        options: UpdateOptions,
        held: HeldVersion,
        deadline: float,
        synchronize: Callable[[], None],
        *,
        session: str = "",
    ) -> Begun | None:
        """Request a version from other replicas, in turn; None if all of them fail.

        session: the session that the version must be of, if it matters.
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
    ) -> ReplicaConnection:
        """Join the publisher, or another replica; raise PeerLost if there is none."""

        def is_ended() -> bool:
            return is_over() or not self._is_open

        line = opened_line(
            self._address if peer is None else peer,
            self._token,
            self._curve,
            deadline,
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
        try:
            connection.join(self._choose, deadline, is_ended)
        except BaseException:
            connection.disconnect("could not agree")
            raise
        finally:
            self._joining = None
        self.connection, self._is_at_peer = connection, peer is not None
        return connection

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
