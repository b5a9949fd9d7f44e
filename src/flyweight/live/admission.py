"""Admission: who may join a publisher, from this host and from others."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from flyweight.errors import FlyweightError, PeerLost, TransportError
from flyweight.host import identity
from flyweight.live.address import Claim
from flyweight.live.connection import Connection
from flyweight.live.curve_keys import CurveServer
from flyweight.live.line import hello_proof
from flyweight.live.messages import Hello
from flyweight.live.tcp_address import TcpAddress
from flyweight.proofs import is_same
from flyweight.transports.data_sockets import DataServer, Welcome


class Admission:
    """Checks the token of replicas, and where they are."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self.session = secrets.token_hex(8)
        """An id of the publisher; one that is restarted has another."""
        self.data: DataServer | None = None
        """Where replicas on other hosts connect, if they may."""
        self.follows = ""
        """The session that all versions are of, if a replica serves them to others."""
        self._is_remote_only = False

    def listen(
        self,
        at: TcpAddress,
        connection: Connection,
        curve: CurveServer | None,
        on_hangup: Callable[[str], None],
    ) -> DataServer:
        """Accept replicas on other hosts; `on_hangup` is called with the line of one that ends."""
        try:
            connection.listen(str(at.with_port(0)), curve)
        except TransportError as error:
            error.note(f"{at} must name an address of this host; 0.0.0.0 means all of them")
            raise
        welcome = Welcome(
            control_port=connection.port,
            session=self.session,
            host=identity(),
            local=str(self._claim.address),
        )
        self.data = DataServer(
            at.host, at.port, token=self._claim.token, welcome=welcome, on_hangup=on_hangup
        )
        return self.data

    def is_remote(self, line: str) -> bool:
        """True if a line comes from another host, or from a process that reads as if it did."""
        return self.data is not None and self.data.knows(line)

    def knows_token(self, hello: Hello) -> bool:
        """True if a replica of this host shows the token, or one of another host a proof of it."""
        token = self._claim.token
        if self.is_remote(hello.line):
            return is_same(hello.token, hello_proof(token, self.session, hello.line))
        return is_same(hello.token, token)

    def accept_remote_only(self) -> None:
        """Let replicas of this host connect as those of other hosts do, from now on."""
        assert self.data is not None
        self._is_remote_only = True
        self.data.welcome = msgspec.structs.replace(self.data.welcome, local="")

    def refusal(self, hello: Hello) -> FlyweightError | None:
        """Return why a replica must connect in another way, if it must."""
        if self._is_remote_only and not self.is_remote(hello.line):
            return PeerLost("a rank of the publisher is on another host; connect over the network")
        return None
