"""Meetings: how the ranks of a group find each other, before they are one.

On a bulletin board that all of them can read, a process group's store, every rank
posts that it is there, under a key of its own and with a number used once. The
coordinator answers each number with where it listens and a token that only the board
knows; then every rank connects. What an earlier call left on the board answers
nobody, so a rank that missed a call is not out of step for the next.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from time import monotonic, sleep

from flyweight.errors import PeerLost, SpecError, TransferTimeout, TransportError
from flyweight.host import boot_id
from flyweight.ports import Bulletin, Seat
from flyweight.ranks.group import PATIENCE, TIMEOUT_SECONDS, Group
from flyweight.ranks.link import fault_frame

_CALLED_OFF = "called off: "
_HELLO_BYTES = 72  # 64 digits of token, 8 of rank
_POLL_SECONDS = 0.01
_HEARD_SECONDS = 1.0

_meetings: defaultdict[tuple[str, int], threading.Lock] = defaultdict(threading.Lock)
"""One at a time for each group: a rank has one place on its board."""
_answered: dict[tuple[str, int], str] = {}
"""The number of each rank's that this process answered last, as coordinator of a group."""


def meet(seat: Seat, coordinator: int = 0, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Group:
    """Return the group once all its ranks are there; every rank must call this together."""
    if type(coordinator) is not int or not 0 <= coordinator < seat.num_ranks:
        raise SpecError(
            f"coordinator_rank is {coordinator!r}, the group has ranks 0 to {seat.num_ranks - 1}"
        )
    if not (isfinite(timeout_seconds) and timeout_seconds > 0):
        raise SpecError(f"timeout_seconds is {timeout_seconds!r}, expected a number above 0")
    if seat.num_ranks == 1 or seat.bulletin is None:
        return Group(timeout_seconds=timeout_seconds)
    deadline = monotonic() + timeout_seconds
    alone = _meetings[seat.group, seat.rank]
    if not alone.acquire(timeout=timeout_seconds):
        raise TransferTimeout(f"another thread was meeting this group for {timeout_seconds:g} s")
    try:
        if seat.rank == coordinator:
            return _Hosting(seat, seat.bulletin, timeout_seconds).group()
        return _joined(seat, seat.bulletin, coordinator, timeout_seconds, deadline)
    finally:
        alone.release()


def _joined(
    seat: Seat, board: Bulletin, coordinator: int, timeout_seconds: float, deadline: float
) -> Group:
    number = secrets.token_hex(16)
    arrival = f"{number} {coordinator} {where()}"
    board.post(f"{seat.group}/arrival/{seat.rank}", arrival, deadline)
    answer = None
    while answer is None:
        if monotonic() > deadline:
            raise TransferTimeout(
                f"coordinator rank {coordinator} did not answer within {timeout_seconds:g} s; all "
                f"{seat.num_ranks} ranks must make the call"
            )
        sleep(_POLL_SECONDS)
        answer = board.look(f"{seat.group}/answer/{number}", deadline)
    if answer.startswith(_CALLED_OFF):
        board.post(f"{seat.group}/heard/{number}", "yes", deadline)
        raise TransferTimeout(answer.removeprefix(_CALLED_OFF))
    name, port, token = answer.rsplit(" ", 2)
    try:
        link = socket.create_connection((name, int(port)), max(deadline - monotonic(), 0.1))
        link.sendall(f"{token}{seat.rank:08d}".encode())
    except OSError as cause:
        raise PeerLost(f"coordinator rank {coordinator} at {name}:{port}: {cause}") from cause
    links = {coordinator: link}
    return Group(
        seat.rank, seat.num_ranks, coordinator, links=links, timeout_seconds=timeout_seconds
    )


@dataclass
class _Greeting:
    """A connection that has not yet said who it is."""

    socket: socket.socket
    data: bytes = b""


class _Hosting:
    """The coordinator's side: answers arrivals on the board, and greets who connects."""

    def __init__(self, seat: Seat, board: Bulletin, timeout_seconds: float) -> None:
        self._seat, self._board = seat, board
        self._timeout_seconds, self._patience = timeout_seconds, PATIENCE * timeout_seconds
        self._deadline = monotonic() + self._patience
        self._peers = [rank for rank in range(seat.num_ranks) if rank != seat.rank]
        self._arrivals: dict[int, str] = {}
        self._numbers: dict[int, str] = {}
        self._links: dict[int, socket.socket] = {}
        self._token = secrets.token_hex(32)

    def group(self) -> Group:
        try:
            self._gather_arrivals()
            self._gather_links()
        except BaseException as error:
            if isinstance(error, TransportError):
                self._call_off(error)
            for link in self._links.values():
                link.close()
            raise
        for link in self._links.values():
            link.setblocking(True)
        return Group(
            self._seat.rank,
            self._seat.num_ranks,
            self._seat.rank,
            links=self._links,
            timeout_seconds=self._timeout_seconds,
        )

    def _look(self, ranks: Iterable[int]) -> list[int]:
        """Look who has arrived since; returns those who are new here."""
        fresh = []
        for rank in ranks:
            arrival = self._board.look(f"{self._seat.group}/arrival/{rank}", self._deadline)
            if arrival is None:
                continue
            number, coordinator, _ = arrival.split(" ", 2)
            is_old = _answered.get((self._seat.group, rank)) == number
            if is_old or self._numbers.get(rank) == number:
                continue
            if int(coordinator) != self._seat.rank:
                raise TransportError(
                    f"rank {rank} takes rank {coordinator} for the coordinator, rank "
                    f"{self._seat.rank} itself"
                )
            self._numbers[rank], self._arrivals[rank] = number, arrival.split(" ", 2)[2]
            fresh.append(rank)
        return fresh

    def _late(self, ranks: Sequence[int]) -> TransferTimeout:
        return TransferTimeout(
            f"{len(ranks)} ranks did not come within {self._patience:g} s: {list(ranks)[:8]}; all "
            f"ranks must make the call"
        )

    def _gather_arrivals(self) -> None:
        while missing := [rank for rank in self._peers if rank not in self._arrivals]:
            if monotonic() > self._deadline:
                raise self._late(missing)
            if not self._look(missing):
                sleep(_POLL_SECONDS)

    def _gather_links(self) -> None:
        here = where()
        address = (_own_address(self._arrivals.values(), here), 0)
        with (
            socket.create_server(address, backlog=self._seat.num_ranks) as server,
            selectors.DefaultSelector() as waiting,
        ):
            server.setblocking(False)
            waiting.register(server, selectors.EVENT_READ)
            name, port = server.getsockname()[:2]
            answer = f"{name} {port} {self._token}"
            self._answer(self._peers, answer)
            try:
                while missing := [rank for rank in self._peers if rank not in self._links]:
                    if monotonic() > self._deadline:
                        raise self._late(missing)
                    # One that gave up after its arrival may have come again.
                    for key, _ in waiting.select(0.05) or self._answer_again(missing, answer):
                        self._greet(server, waiting, key)
            finally:
                for key in list(waiting.get_map().values()):
                    if isinstance(key.data, _Greeting):
                        key.data.socket.close()

    def _answer(self, ranks: Iterable[int], answer: str) -> None:
        for rank in ranks:
            _answered[self._seat.group, rank] = self._numbers[rank]
            key = f"{self._seat.group}/answer/{self._numbers[rank]}"
            self._board.post(key, answer, self._deadline)

    def _answer_again(self, ranks: Iterable[int], answer: str) -> tuple[()]:
        self._answer(self._look(ranks), answer)
        return ()

    def _greet(
        self,
        server: socket.socket,
        waiting: selectors.BaseSelector,
        key: selectors.SelectorKey,
    ) -> None:
        """Take a connection in, or some of what one says; a stranger holds nobody up."""
        if key.fileobj is server:
            with suppress(OSError):
                link, _ = server.accept()
                link.setblocking(False)
                waiting.register(link, selectors.EVENT_READ, _Greeting(link))
            return
        greeting: _Greeting = key.data
        try:
            more = greeting.socket.recv(_HELLO_BYTES - len(greeting.data))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        greeting.data += more
        if more and len(greeting.data) < _HELLO_BYTES:
            return
        waiting.unregister(greeting.socket)
        rank = self._rank_of(greeting.data)
        if rank in self._peers and rank not in self._links:
            self._links[rank] = greeting.socket
        else:
            greeting.socket.close()

    def _rank_of(self, hello: bytes) -> int:
        """Return the rank that a connection says it is; -1 for one that does not know the token."""
        is_right = hmac.compare_digest(hello[:64], self._token.encode())
        return int(hello[64:]) if is_right and hello[64:].isdigit() else -1

    def _call_off(self, error: TransportError) -> None:
        """Tell those who are there why nothing comes of it."""
        for link in self._links.values():
            with suppress(OSError):
                link.setblocking(True)
                link.settimeout(_HEARD_SECONDS)
                link.sendall(fault_frame(error))
        with suppress(TransportError):
            until = monotonic() + _HEARD_SECONDS
            told = [rank for rank in self._numbers if rank not in self._links]
            self._deadline = until
            self._answer(told, f"{_CALLED_OFF}{error}")
            for rank in told:  # the board may be ours, and end with us
                key = f"{self._seat.group}/heard/{self._numbers[rank]}"
                while self._board.look(key, until) is None and monotonic() < until:
                    sleep(_POLL_SECONDS)


def where() -> str:
    """Return what tells one network from another, and this host's name: containers may share it."""
    network, boot = "unknown", boot_id()
    with suppress(OSError):
        network = f"{boot}/{os.stat('/proc/self/ns/net').st_ino}" if boot else network
    return f"{network} {socket.gethostname()}"


def _own_address(places: Iterable[str], here: str) -> str:
    """Return the address to listen on: nobody else's business unless ranks are elsewhere."""
    elsewhere = [each.partition(" ")[2] for each in places if each != here]
    if not elsewhere:
        return "127.0.0.1"
    try:
        if elsewhere[0] == socket.gethostname():
            return socket.gethostbyname(elsewhere[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere[0], 9))  # sends nothing; asks the system which way it is
            return str(probe.getsockname()[0])
    except OSError as cause:
        raise PeerLost(f"no way to host {elsewhere[0]!r} of another rank: {cause}") from cause
