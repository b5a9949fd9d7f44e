"""The front of a trainer: who listens there, and how ranks find each other by it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

from flyweight.errors import HandleGone, PeerLost, SpecError, TransferTimeout, TransportError
from flyweight.live.holder import Holder
from flyweight.live.messages import Post
from flyweight.live.reader import Identity, open_channel, with_newest_token
from flyweight.live.shelf import Shelf
from flyweight.ranks.process_group import rendezvous_of
from flyweight.ranks.rendezvous import Rendezvous
from flyweight.transports.address import (
    Address,
    TcpAddress,
    UnixAddress,
    local_host_for,
    parse_address,
)
from flyweight.transports.channel import Channel
from flyweight.transports.tls import Tls

_RETRY_SECONDS = 0.05
Found = TypeVar("Found")


def holder_at(
    place: Address, shelf: Shelf, token: str, tls: Tls | None, rank: int = 0
) -> tuple[Holder, Address]:
    """Listen for a rank of the front at an address; return that too, with its real port."""
    if isinstance(place, UnixAddress):
        return Holder(shelf, token, local=place.socket_of(rank)), place
    if rank == 0:
        holder = Holder(shelf, token, remote=place, tls=tls)
        return holder, parse_address(f"tcp://{holder.endpoint.remote}")
    # Another rank listens where it reaches rank 0 from: readers reach it there too.
    host = local_host_for(os.uname().nodename if place.is_any else place.host)
    return Holder(shelf, token, remote=TcpAddress(host, 0), tls=tls), place


def once_there(
    connect: Callable[[], Found], deadline: float, is_over: Callable[[], bool] = lambda: False
) -> Found:
    """Return what `connect` returns; call it again while nobody answers, unless `is_over`."""
    last: TransportError | None = None
    while True:
        try:
            return connect()
        except TransferTimeout:  # a try that began too late says less than the one before
            if last is None:
                raise
            raise last from None
        except (PeerLost, HandleGone) as error:
            last = error
            if monotonic() + _RETRY_SECONDS > deadline or is_over():
                raise
        sleep(_RETRY_SECONDS)


def ranks_given(
    process_group: object, rank: int | None, world_size: int | None
) -> Rendezvous | None:
    """Return which of how many ranks the user says this is; None if nothing is said.

    Ranks without a process group have no store yet: they find each other at the front.
    """
    if rank is None and world_size is None:
        return None if process_group is None else rendezvous_of(process_group)
    if process_group is not None:
        raise SpecError("give a process_group, or rank and world_size, not both")
    if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
        raise SpecError(f"rank is {rank!r} of world_size {world_size!r}")
    return Rendezvous(rank, world_size)


class FrontStore:
    """The texts at the front of a trainer, which may start later."""

    def __init__(self, address: Address, me: Identity) -> None:
        self._address, self._me, self._token = address, me, ""
        self._channel: Channel | None = None
        self._is_open = True
        self._posted: dict[str, str] = {}
        """A front that is started again has lost what was left at the one before."""
        self._lock = threading.Lock()

    def token(self, deadline: float, is_over: Callable[[], bool] = lambda: False) -> str:
        """Connect to the front, and return its token; wait for a front unless `is_over`."""
        with self._lock:
            once_there(lambda: self.channel(deadline), deadline, is_over)
            return self._token

    def set(self, key: str, text: str, deadline: float) -> None:
        with self._lock:
            self._posted[key] = text
            once_there(lambda: self.channel(deadline), deadline).send(Post(key, text), deadline)

    def get(self, key: str, deadline: float) -> str | None:
        with self._lock:
            channel = once_there(lambda: self.channel(deadline), deadline)
            return channel.call(Post(key), Post, deadline).text

    def channel(self, deadline: float) -> Channel:
        """Return a connection that works, with the newest token."""
        if not self._is_open:
            raise TransportError("this rank has left")
        if self._channel is None or self._channel.is_broken:
            if self._channel is not None:
                self._channel.close()
            place = self._address
            me, channel = with_newest_token(
                self._me, place, lambda me: open_channel(place.endpoint, me, deadline)
            )
            self._channel, self._token = channel, me.token
            for key, text in self._posted.items():
                channel.send(Post(key, text), deadline)
        return self._channel

    def leave(self) -> None:
        """End the meeting of ranks that is under way; safe in a signal handler."""
        self._is_open = False

    def close(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.close()
