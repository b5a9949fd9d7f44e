"""Reconnect: keeps a replica joined to the publisher at its address, also if that one restarts."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

from flyweight.errors import PeerLost, TransferTimeout
from flyweight.live.address import Address
from flyweight.live.curve_keys import CurveClient
from flyweight.live.line import opened_line
from flyweight.live.replica_connection import ChooseTensors, ReplicaConnection
from flyweight.live.tcp_address import TcpAddress

_RETRY_SECONDS = 0.02


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
    ) -> None:
        """Remember what to connect with.

        ranks: which rank of the replica this is, and how many there are.
        choose: says which tensors to request; `is_current`, whether that is still right.
        """
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
            if connection is not None and not connection.is_lost and self._is_current():
                return connection
            self.disconnect()
            try:
                return self.connect(deadline, is_over)
            except (PeerLost, TransferTimeout) as error:
                is_late = monotonic() + _RETRY_SECONDS > deadline
                if is_late or is_over() or not self._is_open:
                    raise TransferTimeout(f"no publisher came in time: {error}") from error
                sleep(_RETRY_SECONDS)

    def connect(self, deadline: float, is_over: Callable[[], bool]) -> ReplicaConnection:
        """Join the publisher; raise PeerLost if there is none."""

        def is_ended() -> bool:
            return is_over() or not self._is_open

        line = opened_line(
            self._address, self._token, self._curve, deadline, is_ended, can_forward=True
        )
        connection = self._joining = ReplicaConnection(
            line, self._name, rank=self._ranks[0], num_ranks=self._ranks[1]
        )
        try:
            connection.join(self._choose, deadline, is_ended)
        except BaseException:
            connection.disconnect("could not agree")
            raise
        finally:
            self._joining = None
        self.connection = connection
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
        """Make no more connections, and end waits in other threads; memory stays mapped."""
        self._is_open = False
        self.wake()
        connection = self.connection
        if connection is not None:
            connection.disconnect()
