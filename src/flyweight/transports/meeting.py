"""Meetings: how the ranks of a group find each other, before they are one.

A bulletin board that all of them can read, a process group's store, tells who is
there and where the coordinator listens; then every rank connects to it, with a
token that only the board knows. On one host nobody else can even try.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import monotonic

from flyweight.errors import PeerLost, SpecError, TransferTimeout
from flyweight.ports import Bulletin, Seat
from flyweight.transports.group import PATIENCE, TIMEOUT_SECONDS, Group

_CALLED_OFF = "called off: "
_HELLO_BYTES = 72  # 64 digits of token, 8 of rank


def meet(seat: Seat, coordinator: int = 0, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Group:
    """Return the group once all its ranks are there; every rank must call this together."""
    if type(coordinator) is not int or not 0 <= coordinator < seat.num_ranks:
        raise SpecError(
            f"coordinator_rank is {coordinator!r}, the group has ranks 0 to {seat.num_ranks - 1}"
        )
    if not timeout_seconds > 0:
        raise SpecError(f"timeout_seconds is {timeout_seconds!r}, expected more than 0")
    if seat.num_ranks == 1 or seat.bulletin is None:
        return Group(timeout_seconds=timeout_seconds)
    deadline = monotonic() + timeout_seconds
    board, host = seat.bulletin, where()
    if seat.rank == coordinator:
        return _host_meeting(seat, board, host, timeout_seconds)
    board.post(f"{seat.meeting}/rank/{seat.rank}", host)
    address = board.look(f"{seat.meeting}/address", timeout_seconds)
    if address is None:
        raise TransferTimeout(
            f"coordinator rank {coordinator} did not open a meeting within {timeout_seconds:g} s; "
            f"all {seat.num_ranks} ranks must make the call"
        )
    if address.startswith(_CALLED_OFF):
        board.post(f"{seat.meeting}/heard/{seat.rank}", host)
        raise TransferTimeout(address.removeprefix(_CALLED_OFF))
    name, port, token = address.rsplit(" ", 2)
    try:
        link = socket.create_connection((name, int(port)), max(deadline - monotonic(), 0.1))
        link.sendall(f"{token}{seat.rank:08d}".encode())
    except OSError as cause:
        raise PeerLost(f"coordinator rank {coordinator} at {name}:{port}: {cause}") from cause
    return Group(
        seat.rank,
        seat.num_ranks,
        coordinator,
        links={coordinator: link},
        timeout_seconds=timeout_seconds,
    )


def _host_meeting(seat: Seat, board: Bulletin, host: str, timeout_seconds: float) -> Group:
    patience_seconds = PATIENCE * timeout_seconds
    deadline = monotonic() + patience_seconds
    hosts = {seat.rank: host}
    peers = [rank for rank in range(seat.num_ranks) if rank != seat.rank]
    for rank in peers:
        found = board.look(f"{seat.meeting}/rank/{rank}", max(deadline - monotonic(), 0.001))
        if found is not None:
            hosts[rank] = found
    if late := [rank for rank in peers if rank not in hosts]:
        error = _late(late, patience_seconds)
        board.post(f"{seat.meeting}/address", f"{_CALLED_OFF}{error}")
        for rank in hosts.keys() - {seat.rank}:  # the board may be ours, and end with us
            board.look(f"{seat.meeting}/heard/{rank}", 1.0)
        raise error
    token = secrets.token_hex(32)
    links: dict[int, socket.socket] = {}
    address = (_own_address(hosts.values(), host), 0)
    with socket.create_server(address, backlog=seat.num_ranks) as server:
        name, port = server.getsockname()[:2]
        board.post(f"{seat.meeting}/address", f"{name} {port} {token}")
        try:
            while len(links) < len(peers):
                server.settimeout(max(deadline - monotonic(), 0.001))
                link, _ = server.accept()
                rank = _greeted(link, token, deadline)
                if rank in peers and rank not in links:
                    links[rank] = link
                else:
                    link.close()
        except TimeoutError:
            for link in links.values():
                link.close()
            missing = [rank for rank in peers if rank not in links]
            raise _late(missing, patience_seconds) from None
    return Group(
        seat.rank,
        seat.num_ranks,
        seat.rank,
        links=links,
        timeout_seconds=timeout_seconds,
    )


def _late(ranks: Sequence[int], timeout_seconds: float) -> TransferTimeout:
    return TransferTimeout(
        f"{len(ranks)} ranks did not come within {timeout_seconds:g} s: {list(ranks)[:8]}; all "
        f"ranks must make the call"
    )


def where() -> str:
    """Return what tells one network from another, and this host's name: containers may share it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        network = "unknown"
    return f"{network} {socket.gethostname()}"


def _own_address(hosts: Iterable[str], host: str) -> str:
    """Return the address to listen on: nobody else's business unless ranks are elsewhere."""
    elsewhere = [each.partition(" ")[2] for each in hosts if each != host]
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


def _greeted(link: socket.socket, token: str, deadline: float) -> int:
    """Return the rank that a connection says it is; -1 for one that does not know the token."""
    data = b""
    try:
        while len(data) < _HELLO_BYTES:
            # A stranger who says nothing must not keep the others waiting.
            link.settimeout(max(min(deadline - monotonic(), 1.0), 0.001))
            more = link.recv(_HELLO_BYTES - len(data))
            if not more:
                return -1
            data += more
    except OSError:
        return -1
    is_right = hmac.compare_digest(data[:64], token.encode())
    return int(data[64:]) if is_right and data[64:].isdigit() else -1
