"""Line: a replica's way to its publisher, on the same host or on another one.

On one host it is a connection for files, in the publisher's private directory: the replica maps
memory. From another host it is a data connection: the replica reads memory over the network, and
proves that it knows the token instead of sending it. Either one tells when the publisher dies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from flyweight.errors import FlyweightError, PeerLost, PeerRefused, SpecError
from flyweight.host import birth_of, identity
from flyweight.live.address import Address
from flyweight.live.curve_keys import CurveClient
from flyweight.live.lanes import Transports
from flyweight.live.messages import Welcome
from flyweight.live.tcp_address import TcpAddress
from flyweight.proofs import proof
from flyweight.ranks.run_directory import run_directory
from flyweight.transports.cuda_ipc import CudaIpcTransport
from flyweight.transports.data_sockets import DataConnection, DataServer
from flyweight.transports.data_sockets import Welcome as DataWelcome
from flyweight.transports.engine_reads import EngineReads
from flyweight.transports.fd_passing import ANSWER_SECONDS, FdConnection, check_files
from flyweight.transports.network import NetworkTransport
from flyweight.transports.shared_memory import SharedMemoryTransport

IsOver = Callable[[], bool]
_MIN_ANSWER_SECONDS = 0.1


@dataclass(frozen=True)
class LocalLine:
    """A line on one host."""

    address: Address
    files: FdConnection
    secret: str
    """What a `Hello` shows: the token."""

    is_remote, can_forward, curve = False, False, None

    @property
    def endpoint(self) -> str:
        """Where messages go."""
        return self.address.endpoint

    @property
    def directory(self) -> Path:
        """A directory that all ranks of a replica on this line share."""
        return self.address.directory

    def transports(self) -> Transports:
        """Return transports that open the publisher's memory."""
        return Transports(
            SharedMemoryTransport(fd_connection=self.files),
            CudaIpcTransport(fd_connection=self.files),
        )

    def check_same(self, welcome: Welcome) -> None:
        """Raise PeerLost if messages and memory come from two processes.

        That happens if a publisher was restarted meanwhile: its memory would be the old one's.
        """
        found = birth_of(self.files.pid)
        if found is not None and (welcome.pid, welcome.started) != found:
            raise PeerLost(
                f"the publisher at {self.address} says it is process {welcome.pid}, started at "
                f"{welcome.started} ticks; its files come from process {found[0]}, started at "
                f"{found[1]}"
            )

    def close(self) -> None:
        self.files.close()


@dataclass(frozen=True)
class RemoteLine:
    """A line to another host."""

    address: TcpAddress
    files: DataConnection
    token: str
    curve: CurveClient | None
    """What encrypts messages, if they are."""
    server: DataServer | None
    """Where other replicas read what this one has, if they may."""

    is_remote = True

    @property
    def can_forward(self) -> bool:
        return self.server is not None

    @property
    def endpoint(self) -> str:
        """Where messages go."""
        return str(self.address.with_port(self.files.welcome.control_port))

    @property
    def secret(self) -> str:
        """What a `Hello` shows: a proof that this side knows the token."""
        return hello_proof(self.token, self.files.welcome.session, self.files.name)

    @property
    def directory(self) -> Path:
        """A directory that all ranks of a replica on this line share."""
        return run_directory()

    def transports(self) -> Transports:
        """Return transports that read the publisher's memory."""
        return Transports(
            SharedMemoryTransport(),
            CudaIpcTransport(),
            NetworkTransport(
                server=self.server,
                connection=self.files,
                token=self.token,
                place_host=self.files.local_host,
            ),
            EngineReads(self.files.local_host),
        )

    def check_same(self, welcome: Welcome) -> None:
        """Raise PeerLost if messages and memory come from two publishers."""
        if welcome.session != self.files.welcome.session:
            raise PeerLost(f"another publisher started at {self.address} just now")

    def close(self) -> None:
        self.files.close()
        if self.server is not None:
            self.server.close()


def hello_proof(token: str, session: str, line: str) -> str:
    """Return what a replica on another host shows in place of the token."""
    return proof(token, "hello", session, line)


Line = LocalLine | RemoteLine


def opened_line(
    address: Address | TcpAddress,
    token: str | None,
    curve: CurveClient | None,
    deadline: float,
    is_over: IsOver = lambda: False,
    *,
    can_forward: bool = False,
) -> Line:
    """Connect to the publisher at an address; raise PeerLost if there is none.

    A publisher that does not answer is waited for until the deadline, some seconds at most.

    can_forward: whether other replicas may read what this one has, if it is on another host.
    """
    check_files()
    timeout_seconds = max(min(ANSWER_SECONDS, deadline - monotonic()), _MIN_ANSWER_SECONDS)
    if isinstance(address, Address):
        if curve is not None:
            raise SpecError(f"curve= is for tcp addresses; nothing leaves this host to {address}")
        return _local_line(address, token, timeout_seconds, is_over)
    if token is None:
        raise SpecError(
            f"a publisher at {address} has a token; pass it as token=, to a command as --token-file"
        )
    remote = DataConnection(
        address.host, address.port, token=token, timeout_seconds=timeout_seconds, is_over=is_over
    )
    if remote.welcome.host == identity() and remote.welcome.local:
        try:
            local = Address.parse(remote.welcome.local)
            line = _local_line(local, token, timeout_seconds, is_over)
        except FlyweightError:  # a container that does not see the publisher's directory
            pass
        else:
            remote.close()
            return line
    server = _forwarding_server(remote, token) if can_forward else None
    return RemoteLine(address, remote, token, curve, server)


def _forwarding_server(remote: DataConnection, token: str) -> DataServer:
    """Return a server for other replicas, at the interface by which the publisher is reached."""
    welcome = DataWelcome(control_port=0, session=remote.welcome.session, host=identity())
    try:
        return DataServer(remote.local_host, token=token, welcome=welcome)
    except FlyweightError:
        remote.close()
        raise


def _local_line(
    address: Address, token: str | None, timeout_seconds: float, is_over: IsOver
) -> LocalLine:
    known = address.token() if token is None else token
    try:
        files = FdConnection(
            address.fd_socket, token=known, timeout_seconds=timeout_seconds, is_over=is_over
        )
    except PeerRefused as refused:
        if token is None and address.token() != known:
            raise PeerLost(f"another publisher started at {address} just now") from refused
        raise
    return LocalLine(address, files, known)
