"""How the ranks of a group find each other and connect.

Every rank writes to a store that all of them can read, such as a process group's, that it
has arrived, under a key of its own and with a number used once. The coordinator answers
each number with the address where it listens and a token that only readers of the store
know; then every rank connects. What an earlier call left in the store answers no new
number, so a rank that missed one call is not out of step for the next. Each rank has the same
keys in every call, so the store does not grow.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import threading
from collections import defaultdict
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from time import monotonic, sleep
from typing import Protocol

from flyweight.errors import PeerLost, SpecError, TransferTimeout, TransportError
from flyweight.host import location
from flyweight.ranks.connection import fault_frame
from flyweight.ranks.group import NOTICE_SECONDS, PATIENCE, TIMEOUT_SECONDS, Group

_CALLED_OFF = "called off: "
_HELLO_BYTES = 72  # 64 digits of token, 8 of rank
_POLL_SECONDS = 0.01

_locks: defaultdict[tuple[str, int], threading.Lock] = defaultdict(threading.Lock)
"""One rendezvous at a time for each rank of a group: a rank has one key in the store."""


class RendezvousStore(Protocol):
    """A key-value store that all ranks of a group can read and write.

    Both methods raise TransferTimeout if the store does not answer before `deadline`, a time of
    the monotonic clock.
    """

    def set(self, key: str, text: str, deadline: float) -> None:
        """Put a text under a key, in place of the one before."""

    def get(self, key: str, deadline: float) -> str | None:
        """Return the text under a key, or None if there is none yet."""


@dataclass(frozen=True)
class Rendezvous:
    """Which rank of a group this is, and the store in which the ranks find each other."""

    rank: int = 0
    num_ranks: int = 1
    store: RendezvousStore | None = None
    group: str = ""
    """A name that all ranks of the group use for it, and no other group does."""
    host: str = ""
    """Where the coordinator can listen for all ranks; by default it looks at where they are."""

    def key(self, kind: str, *ranks: int) -> str:
        return "/".join((self.group, kind, *map(str, ranks)))


def join_group(
    rendezvous: Rendezvous, coordinator: int = 0, *, timeout_seconds: float = TIMEOUT_SECONDS
) -> Group:
    """Return the group once all its ranks are connected; every rank must call this together."""
    last = rendezvous.num_ranks - 1
    if type(coordinator) is not int or not 0 <= coordinator <= last:
        raise SpecError(f"coordinator_rank is {coordinator!r}, the group has ranks 0 to {last}")
    if not (isfinite(timeout_seconds) and timeout_seconds > 0):
        raise SpecError(f"timeout_seconds is {timeout_seconds!r}, expected a number above 0")
    if not last or rendezvous.store is None:
        return Group(timeout_seconds=timeout_seconds)
    lock = _locks[rendezvous.group, rendezvous.rank]
    deadline = monotonic() + timeout_seconds
    if not lock.acquire(timeout=timeout_seconds):
        raise TransferTimeout(f"another thread was joining this group for {timeout_seconds:g} s")
    try:
        if rendezvous.rank == coordinator:
            connections = _Coordinator(rendezvous, rendezvous.store, timeout_seconds).connect()
        else:
            connections = {
                coordinator: _connected(rendezvous, coordinator, deadline, timeout_seconds)
            }
    finally:
        lock.release()
    return Group(
        rendezvous.rank,
        rendezvous.num_ranks,
        coordinator,
        connections=connections,
        timeout_seconds=timeout_seconds,
    )


def _connected(
    rendezvous: Rendezvous, coordinator: int, deadline: float, timeout_seconds: float
) -> socket.socket:
    """Return a connection to the coordinator."""
    store, number = rendezvous.store, secrets.token_hex(16)
    assert store is not None
    arrival = f"{number} {coordinator} {location()}"
    store.set(rendezvous.key("arrival", rendezvous.rank), arrival, deadline)
    key = rendezvous.key("answer", coordinator, rendezvous.rank)
    while not (answer := store.get(key, deadline) or "").startswith(number):
        if monotonic() > deadline:
            why = f"all {rendezvous.num_ranks} ranks must make the call"
            if store.get(rendezvous.key("arrival", rendezvous.rank), deadline) != arrival:
                why = f"another process made it as rank {rendezvous.rank}"
            raise TransferTimeout(
                f"coordinator rank {coordinator} did not answer within {timeout_seconds:g} s; {why}"
            )
        sleep(_POLL_SECONDS)
    answer = answer.removeprefix(f"{number} ")
    if answer.startswith(_CALLED_OFF):
        store.set(rendezvous.key("heard", rendezvous.rank), number, deadline)
        raise TransferTimeout(answer.removeprefix(_CALLED_OFF))
    name, port, token = answer.rsplit(" ", 2)
    try:
        connection = socket.create_connection((name, int(port)), max(deadline - monotonic(), 0.1))
        connection.sendall(f"{token}{rendezvous.rank:08d}".encode())
    except OSError as cause:
        raise PeerLost(f"coordinator rank {coordinator} at {name}:{port}: {cause}") from cause
    return connection


class _Coordinator:
    """The coordinator's side: answers the ranks that arrive, and accepts their connections."""

    def __init__(
        self, rendezvous: Rendezvous, store: RendezvousStore, timeout_seconds: float
    ) -> None:
        self._rendezvous, self._store = rendezvous, store
        self._seconds = PATIENCE * timeout_seconds
        self._deadline = monotonic() + self._seconds
        self._peers = [rank for rank in range(rendezvous.num_ranks) if rank != rendezvous.rank]
        self._arrivals: dict[int, tuple[str, str]] = {}
        """The number of each rank's arrival, and its location."""
        self._connections: dict[int, socket.socket] = {}
        self._token = secrets.token_hex(32)

    def connect(self) -> dict[int, socket.socket]:
        """Return a connection to every other rank."""
        try:
            while missing := self._missing(self._arrivals):
                if not self._new_arrivals(missing):
                    sleep(_POLL_SECONDS)
            self._accept_all()
        except BaseException as error:
            if isinstance(error, TransportError):
                self._call_off(error)
            for connection in self._connections.values():
                connection.close()
            raise
        return self._connections

    def _missing(self, found: Container[int]) -> list[int]:
        """Return the ranks that are not found yet; raise TransferTimeout after the deadline."""
        missing = [rank for rank in self._peers if rank not in found]
        if missing and monotonic() > self._deadline:
            raise TransferTimeout(
                f"{len(missing)} ranks did not join within {self._seconds:g} s: {missing[:8]}; "
                f"all ranks must make the call"
            )
        return missing

    def _new_arrivals(self, ranks: Iterable[int]) -> list[int]:
        """Read the store, and return the ranks that have arrived since the last time."""
        new = []
        for rank in ranks:
            arrival = self._store.get(self._rendezvous.key("arrival", rank), self._deadline)
            if arrival is None:
                continue
            number, coordinator, place = arrival.split(" ", 2)
            answer = self._store.get(self._answer_key(rank), self._deadline) or ""
            if number in (answer.partition(" ")[0], self._arrivals.get(rank, ("", ""))[0]):
                continue  # of an earlier call
            if int(coordinator) != self._rendezvous.rank:
                raise TransportError(
                    f"rank {rank} takes rank {coordinator} for the coordinator, rank "
                    f"{self._rendezvous.rank} itself"
                )
            self._arrivals[rank] = number, place
            new.append(rank)
        return new

    def _answer(self, ranks: Iterable[int], answer: str) -> None:
        for rank in ranks:
            number, _ = self._arrivals[rank]
            self._store.set(self._answer_key(rank), f"{number} {answer}", self._deadline)

    def _answer_key(self, rank: int) -> str:
        return self._rendezvous.key("answer", self._rendezvous.rank, rank)

    def _accept_all(self) -> None:
        places = (place for _, place in self._arrivals.values())
        address = self._rendezvous.host or _own_address(places)
        with (
            socket.create_server((address, 0), backlog=self._rendezvous.num_ranks) as server,
            selectors.DefaultSelector() as selector,
        ):
            server.setblocking(False)
            selector.register(server, selectors.EVENT_READ)
            name, port = server.getsockname()[:2]
            answer = f"{name} {port} {self._token}"
            self._answer(self._peers, answer)
            try:
                while missing := self._missing(self._connections):
                    ready = selector.select(0.05)
                    for key, _ in ready:
                        self._accept(server, selector, key)
                    if not ready:  # a rank that gave up may have come again
                        self._answer(self._new_arrivals(missing), answer)
            finally:
                for key in list(selector.get_map().values()):
                    if isinstance(key.fileobj, socket.socket):
                        key.fileobj.close()

    def _accept(
        self, server: socket.socket, selector: selectors.BaseSelector, key: selectors.SelectorKey
    ) -> None:
        """Accept a connection, or read some of its hello; a stranger delays nobody."""
        if key.fileobj is server:
            with suppress(OSError):
                accepted, _ = server.accept()
                accepted.setblocking(False)
                selector.register(accepted, selectors.EVENT_READ, bytearray())
            return
        connection, hello = key.fileobj, key.data
        assert isinstance(connection, socket.socket)
        try:
            more = connection.recv(_HELLO_BYTES - len(hello))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        hello += more
        if more and len(hello) < _HELLO_BYTES:
            return
        selector.unregister(connection)
        has_token = hmac.compare_digest(hello[:64], self._token.encode())
        rank = int(hello[64:]) if has_token and hello[64:].isdigit() else -1
        if rank in self._peers and rank not in self._connections:
            self._connections[rank] = connection
        else:
            connection.close()

    def _call_off(self, error: TransportError) -> None:
        """Tell the ranks that are there why the group is not formed."""
        for connection in self._connections.values():
            with suppress(OSError):
                connection.settimeout(NOTICE_SECONDS)
                connection.sendall(fault_frame(error))
        with suppress(TransportError):
            self._deadline = monotonic() + NOTICE_SECONDS
            waiting = [rank for rank in self._arrivals if rank not in self._connections]
            self._answer(waiting, f"{_CALLED_OFF}{error}")
            for rank in waiting:  # the store may be in this process, and end with it
                key, number = self._rendezvous.key("heard", rank), self._arrivals[rank][0]
                while self._store.get(key, self._deadline) != number:
                    if monotonic() > self._deadline:
                        return
                    sleep(_POLL_SECONDS)


def _own_address(locations: Iterable[str]) -> str:
    """Return the address to listen on: the loopback, unless a rank is on another network."""
    here = location()
    elsewhere = [each.partition(" ")[2] for each in locations if each != here]
    if not elsewhere:
        return "127.0.0.1"
    try:
        if elsewhere[0] == socket.gethostname():
            return socket.gethostbyname(elsewhere[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere[0], 9))  # sends nothing; the system picks the local address
            return str(probe.getsockname()[0])
    except OSError as cause:
        raise PeerLost(f"cannot reach host {elsewhere[0]!r} of another rank: {cause}") from cause
