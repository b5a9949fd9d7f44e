"""How the ranks of a group find each other and connect.

Every rank writes to a store that all of them can read, such as a process group's, that it
has arrived, under a key of its own and with a number used once. The coordinator answers
each number with the address of its door and a secret; then the rank connects, and both prove that
they have the token that is made from the secret. What an earlier call left in the store answers no
new number, so a rank that missed one call is not out of step for the next. Each rank has the same
keys in every call, so the store does not grow.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Protocol

from flyweight.errors import (
    PeerFailed,
    PeerRefused,
    SpecError,
    TransferTimeout,
    TransportError,
)
from flyweight.host import location
from flyweight.ranks.group import MESSAGES, PATIENCE, TIMEOUT_SECONDS, Group
from flyweight.transports.address import TcpAddress, connected_tcp, listening_tcp, local_host_for
from flyweight.transports.channel import Channel, introduce
from flyweight.transports.door import Door
from flyweight.transports.wire import Wire

_POLL_SECONDS = 0.01
_NOTICE_SECONDS = 0.25
"""How long a coordinator that fails waits for ranks that are on their way, to tell them."""

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
        """Return the text under a key, or None if there is none yet.

        A store that another process keeps may wait a moment there for a text to come.
        """


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
    token: str = field(default="", repr=False)
    """A secret of all ranks, if there is one: then reading the store is not enough to join."""


def join_group(
    rendezvous: Rendezvous,
    coordinator: int = 0,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    deadline: float | None = None,
) -> Group:
    """Return the group once this rank is connected: the coordinator to all, others to it.

    Every rank must call this together.

    Args:
        timeout_seconds: of the group.
        deadline: when this rank gives the others up; by default after the timeout.
    """
    last = rendezvous.num_ranks - 1
    if type(coordinator) is not int or not 0 <= coordinator <= last:
        raise SpecError(f"coordinator_rank is {coordinator!r}, the group has ranks 0 to {last}")
    if not (isfinite(timeout_seconds) and timeout_seconds > 0):
        raise SpecError(f"timeout_seconds is {timeout_seconds!r}, expected a number above 0")
    if not last or rendezvous.store is None:
        return Group(timeout_seconds=timeout_seconds)
    if deadline is None:
        is_coordinator = rendezvous.rank == coordinator
        deadline = monotonic() + timeout_seconds * (PATIENCE if is_coordinator else 1)
    connections = _Meeting(rendezvous, rendezvous.store, coordinator, deadline).connections()
    words = rendezvous.rank, rendezvous.num_ranks, coordinator
    return Group(*words, connections=connections, timeout_seconds=timeout_seconds)


class _Meeting:
    """One call of a rank: it arrives and connects; or, as the coordinator, admits the others."""

    def __init__(
        self, rendezvous: Rendezvous, store: RendezvousStore, coordinator: int, deadline: float
    ) -> None:
        self._rendezvous, self._store, self._coordinator = rendezvous, store, coordinator
        self._deadline, self._seconds = deadline, max(deadline - monotonic(), 0)
        self._secret = secrets.token_hex(32)
        self._answered: set[str] = set()
        """The numbers of the arrivals that need no answer."""
        self._awaited: set[int] = set()
        """The ranks that were answered in this call."""
        self._doors: dict[str, tuple[Door, str]] = {}
        """By the host that they listen at, with the address: ranks of this network have another."""
        self._admitted: SimpleQueue[Channel] = SimpleQueue()

    def connections(self) -> dict[int, Channel]:
        """Return a connection to every other rank, or to the coordinator."""
        lock = _locks[self._rendezvous.group, self._rendezvous.rank]
        if not lock.acquire(timeout=self._seconds):
            raise TransferTimeout(
                f"another thread was joining this group for {self._seconds:.3g} s"
            )
        try:
            if self._rendezvous.rank == self._coordinator:
                return self._all_admitted()
            return {self._coordinator: self._connected(*self._answer().split(" "))}
        finally:
            lock.release()

    def _answer(self) -> str:
        """Arrive, and return what the coordinator answers: its address and a secret."""
        rank, number = self._rendezvous.rank, secrets.token_hex(16)
        arrival = f"{number} {self._coordinator} {location()}"
        self._set("arrival", rank, arrival)
        while not (answer := self._get("answer", rank)).startswith(number):
            if monotonic() > self._deadline:
                why = f"another process made it as rank {rank}"
                if self._get("arrival", rank) == arrival:
                    self._set("arrival", rank, "")  # nobody is there to be answered
                    why = f"all {self._rendezvous.num_ranks} ranks must make the call"
                raise TransferTimeout(
                    f"coordinator rank {self._coordinator} did not answer within "
                    f"{self._seconds:.3g} s; {why}"
                )
            sleep(_POLL_SECONDS)
        return answer.removeprefix(f"{number} ")

    def _get(self, kind: str, rank: int) -> str:
        key = f"{self._rendezvous.group}/{kind}/{rank}"
        return self._store.get(key, self._deadline) or ""

    def _set(self, kind: str, rank: int, text: str) -> None:
        self._store.set(f"{self._rendezvous.group}/{kind}/{rank}", text, self._deadline)

    def _token(self, secret: str) -> str:
        return hmac.digest(self._rendezvous.token.encode(), secret.encode(), "sha256").hex()

    def _connected(self, address: str, secret: str) -> Channel:
        """Return a connection to the coordinator, on which both sides have proved the token."""
        rank, peer = self._rendezvous.rank, f"coordinator rank {self._coordinator}"
        while True:
            try:
                wire = Wire(connected_tcp(address, self._deadline)[0])
            except TransportError as error:
                error.note(f"{peer} was there")
                raise
            channel = Channel(wire, peer, MESSAGES)
            try:
                introduce(channel, f"rank {rank}", self._token(secret), self._deadline)
                return channel
            except BaseException as error:
                channel.close()
                is_refused = isinstance(error, PeerRefused) or not isinstance(error, TransportError)
                if is_refused or monotonic() > self._deadline:
                    raise
            sleep(_POLL_SECONDS)  # too many came at once

    # The coordinator's side.

    def _all_admitted(self) -> dict[int, Channel]:
        """Answer the ranks that arrive, and return their connections once all are there."""
        num_ranks = self._rendezvous.num_ranks
        missing = set(range(num_ranks)) - {self._coordinator}
        found: dict[int, Channel] = {}
        try:
            while missing := missing - found.keys():
                if monotonic() > self._deadline:
                    raise TransferTimeout(
                        f"{len(missing)} ranks did not join within {self._seconds:.3g} s: "
                        f"{sorted(missing)[:8]}; all ranks must make the call"
                    )
                for rank in missing:
                    self._answer_arrival(rank)
                self._admit(found)
        except BaseException as error:
            end = monotonic() + _NOTICE_SECONDS
            while self._awaited - found.keys() and monotonic() < end:  # they are on their way
                self._admit(found)
            why = PeerFailed(f"rank {self._coordinator} failed while ranks joined: {error!r}")
            fault = error if isinstance(error, TransportError) else why
            Group(self._coordinator, num_ranks, self._coordinator, connections=found).close(fault)
            raise
        finally:
            for door, _ in self._doors.values():
                door.close()
            while not self._admitted.empty():
                self._admitted.get().close()
        return found

    def _admit(self, found: dict[int, Channel]) -> None:
        """Wait a moment for a connection, and take it if it is of a rank that has arrived."""
        with suppress(Empty):
            channel = self._admitted.get(timeout=_POLL_SECONDS)
            for rank in self._awaited - found.keys():
                if channel.name == f"rank {rank}":
                    channel.peer, found[rank] = channel.name, channel
                    return
            channel.close()

    def _answer_arrival(self, rank: int) -> None:
        number, _, rest = self._get("arrival", rank).partition(" ")
        if not number or number in self._answered:
            return
        if not self._get("answer", rank).startswith(number):  # as one of an earlier call does
            coordinator, _, place = rest.partition(" ")
            if coordinator != str(self._coordinator):
                raise TransportError(
                    f"rank {rank} takes rank {coordinator} for the coordinator, rank "
                    f"{self._coordinator} itself"
                )
            self._set("answer", rank, f"{number} {self._address_for(place)} {self._secret}")
            self._awaited.add(rank)
        self._answered.add(number)

    def _address_for(self, place: str) -> str:
        """Return where a rank can reach this one: at the loopback, if it is on this network."""
        host = self._rendezvous.host
        if not host:
            is_here = place == location()
            host = "127.0.0.1" if is_here else local_host_for(place.partition(" ")[2])
        if host not in self._doors:
            server, address = listening_tcp(TcpAddress(host, 0))
            door = Door([server], self._token(self._secret), MESSAGES, None)
            self._doors[host] = door, address.place
            door.open(self._admitted.put)
        return self._doors[host][1]
