"""TCP sockets whose every wait has a deadline, and which notice a cut link."""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from time import monotonic
from typing import Any

import numpy as np

from flyweight.errors import PeerLost, TransportError
from flyweight.host import reason
from flyweight.memory import Bytes, Items

LOST_SECONDS = 3
"""A link that carries nothing for so long counts as cut."""
CHECK_SECONDS = 0.05
_MAX_RECEIVE_BYTES = 8 << 20  # progress is reported at least that often
_BACKLOG = 256
_MAX_ROWS = 1024  # what one call of the kernel takes
PACK_BYTES, _MAX_PACKS = 256 << 10, 2
"""What is copied together before it is sent: small enough to stay in the CPU's cache."""
_of_thread = threading.local()
_PLACE = re.compile(r"(?:([A-Za-z0-9._-]{0,253})|\[([0-9A-Fa-f:.]{2,45})\]):([1-9][0-9]{0,4})")


class Rows:
    """Blocks of memory that are sent as one run of bytes, from where they lie.

    Arrays with gaps between their items are copied together, a few at a time, just before they are
    sent. Each should have at most `PACK_BYTES`.
    """

    def __init__(self, rows: Sequence[memoryview | Items]) -> None:
        self._rows = [_flat(row) for row in rows if memoryview(row).nbytes]
        self._ends = list(accumulate(row.nbytes for row in self._rows))
        """Where each row ends in that run."""
        self.nbytes = self._ends[-1] if self._ends else 0

    def send(self, peer: socket.socket, head: bytes, offset: int, nbytes: int) -> None:
        """Send `head` and then a range; raise OSError once the connection is shut down."""
        row, end = bisect_right(self._ends, offset), offset + nbytes
        views = [memoryview(head)]
        while views or offset < end:
            num_packed = 0
            while offset < end and len(views) < _MAX_ROWS and num_packed < _MAX_PACKS:
                view = self._rows[row]
                if not isinstance(view, memoryview):
                    view = _packed(view, num_packed)
                    num_packed += 1
                start = self._ends[row] - len(view)
                views.append(view[offset - start : end - start])
                offset, row = self._ends[row], row + 1
            _send_all(peer, views)
            views = []


def _flat(row: memoryview | Items) -> memoryview | Items:
    """Return the bytes of a row where they lie, or the row itself if it has gaps."""
    if isinstance(row, np.ndarray) and not row.flags.c_contiguous:
        return row
    return memoryview(row).cast("B")


def _packed(row: Items, number: int) -> memoryview:
    """Copy items together, into memory that this thread uses again for the same number."""
    packs: list[Bytes] = _of_thread.__dict__.setdefault("packs", [])
    if number == len(packs):
        packs.append(np.empty(PACK_BYTES, np.uint8))
    into = packs[number] if row.nbytes <= PACK_BYTES else np.empty(row.nbytes, np.uint8)
    np.copyto(into[: row.nbytes].view(row.dtype).reshape(row.shape), row)
    return memoryview(into)[: row.nbytes]


def _send_all(peer: socket.socket, views: Sequence[memoryview]) -> None:
    first, left = 0, sum(map(len, views))
    while left:
        sent = peer.sendmsg(views[first:], [], socket.MSG_NOSIGNAL)
        left -= sent
        while left and sent >= len(views[first]):
            sent -= len(views[first])
            first += 1
        if left:
            views = [*views[:first], views[first][sent:], *views[first + 1 :]]


class DeadlinePassed(Exception):
    """A wait is over. Not a TimeoutError: the kernel raises that for a cut link."""


def place_of(host: str, port: int) -> str:
    """Return "HOST:PORT", with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_place(place: str) -> tuple[str, int]:
    """Return the host, which may be "", and the port of "HOST:PORT"."""
    found = _PLACE.fullmatch(place)
    if found is None or int(found[3]) > 65535:
        raise TransportError(f"place is {place!r:.100}, expected HOST:PORT or [IPv6]:PORT")
    return found[1] or found[2] or "", int(found[3])


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens; for host "" at every address, of IPv4 and IPv6."""
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError, OverflowError) as cause:
        raise TransportError(f"cannot listen at {place_of(host, port)}: {reason(cause)}") from cause


def prepare(peer: socket.socket) -> None:
    """Let a connection fail once its link is cut; receiving returns after CHECK_SECONDS."""
    peer.setblocking(True)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_SECONDS)
    give_up_after(peer, LOST_SECONDS)
    return_after(peer, CHECK_SECONDS)


def give_up_after(peer: socket.socket, seconds: float) -> None:
    """Let a connection fail if sent bytes are not taken for so long.

    It counts as well if the peer's host is alive, and its process does not read.
    """
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


def return_after(peer: socket.socket, seconds: float) -> None:
    """Let receiving return after so long without bytes; 0: never."""
    # The kernel's own timeout: it waits for many segments in one call, without Python's lock.
    wait = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)


def shut_down(peer: socket.socket) -> None:
    """End a connection, and every call of another thread that waits for it."""
    with suppress(OSError):  # it has ended already
        peer.shutdown(socket.SHUT_RDWR)


def receive(
    peer: socket.socket,
    into: memoryview,
    timeout_seconds: float,
    *,
    is_renewed: bool = False,
    on_progress: Callable[[int], None] = lambda nbytes: None,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Fill `into`; raise EOFError if the peer closes, DeadlinePassed, or OSError.

    is_renewed: whether each arrival renews the deadline.
    """
    done, deadline = 0, monotonic() + timeout_seconds
    while done < len(into):
        if monotonic() >= deadline or is_over():
            raise DeadlinePassed
        try:
            count = peer.recv_into(into[done : done + _MAX_RECEIVE_BYTES], 0, socket.MSG_WAITALL)
        except BlockingIOError:  # nothing came for CHECK_SECONDS
            continue
        if count == 0:
            raise EOFError
        done += count
        on_progress(count)
        if is_renewed:
            deadline = monotonic() + timeout_seconds


def connect(
    host: str,
    port: int,
    deadline: float,
    is_over: Callable[[], bool],
    made: Callable[[int], socket.socket],
) -> None:
    """Connect to one of the host's addresses, tried in turn; raise PeerLost or DeadlinePassed.

    made: returns a new socket of a family, for each address; the last one is connected.
    """
    try:
        addresses = _addresses(host, port, deadline, is_over)
        for num_left, (family, address) in zip(
            range(len(addresses), 0, -1), addresses, strict=True
        ):
            now = monotonic()
            try:
                peer = made(family)
                _connect(peer, address, now + (deadline - now) / num_left, is_over)
                prepare(peer)
                return
            except (OSError, DeadlinePassed):
                if num_left == 1 or is_over():
                    raise
    except OSError as cause:
        raise PeerLost(f"no process listens at {place_of(host, port)}: {reason(cause)}") from cause


def _connect(
    peer: socket.socket, address: Any, deadline: float, is_over: Callable[[], bool]
) -> None:
    peer.setblocking(False)
    try:
        peer.connect(address)
    except BlockingIOError:
        writable = select.poll()
        writable.register(peer, select.POLLOUT)
        while not writable.poll(1000 * max(min(deadline - monotonic(), CHECK_SECONDS), 0)):
            if monotonic() >= deadline or is_over():
                raise DeadlinePassed from None
        if number := peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(number, os.strerror(number)) from None


def _addresses(
    host: str, port: int, deadline: float, is_over: Callable[[], bool]
) -> list[tuple[int, Any]]:
    """Return the families and addresses of a host; raise DeadlinePassed or OSError."""
    found: list[Any] = []

    def ask(flags: int) -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))
        except (OSError, UnicodeError, OverflowError) as cause:
            text = reason(cause)
            found.append(OSError(errno.EHOSTUNREACH, f"{host!r} is not found as a host: {text}"))

    ask(socket.AI_NUMERICHOST)
    if isinstance(found[0], OSError):
        found.clear()
        # A name server may be silent for long, and the call cannot be interrupted.
        asker = threading.Thread(target=ask, args=(0,), name="flyweight-names", daemon=True)
        asker.start()
        while asker.is_alive():
            asker.join(max(min(deadline - monotonic(), CHECK_SECONDS), 0))
            if asker.is_alive() and (monotonic() >= deadline or is_over()):
                raise DeadlinePassed
    if isinstance(found[0], Exception):
        raise found[0]
    return [(each[0], each[4]) for each in found]
