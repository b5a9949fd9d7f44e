"""FrontStore: ranks without a process group find each other by texts that they leave at a front."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, sleep

from flyweight.errors import PeerLost, PeerRefused, SpecError, TransportError
from flyweight.live.messages import Post
from flyweight.live.reader import Identity, open_channel, with_token
from flyweight.live.shelf import Shelf
from flyweight.ranks.process_group import rendezvous_of
from flyweight.ranks.rendezvous import Rendezvous
from flyweight.transports.address import Address
from flyweight.transports.channel import Channel

_RETRY_SECONDS = 0.05


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


class OwnStore:
    """The texts at the front of this very process."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def set(self, key: str, text: str, deadline: float) -> None:
        self._shelf.post(key, text)

    def get(self, key: str, deadline: float) -> str | None:
        return self._shelf.look(key)


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
            self._connected(deadline, is_over)
            return self._token

    def set(self, key: str, text: str, deadline: float) -> None:
        with self._lock:
            self._posted[key] = text
            self._connected(deadline).send(Post(key, text), deadline)

    def get(self, key: str, deadline: float) -> str | None:
        with self._lock:
            return self._connected(deadline).call(Post(key), Post, deadline).text

    def _connected(self, deadline: float, is_over: Callable[[], bool] = lambda: False) -> Channel:
        while self._is_open and (self._channel is None or self._channel.is_broken):
            try:
                if self._channel is not None:
                    self._channel.close()
                me = with_token(self._me, self._address)
                self._channel = open_channel(self._address.endpoint, me, deadline)
                self._token = me.token
                for key, text in self._posted.items():
                    self._channel.send(Post(key, text), deadline)
            except (PeerLost, PeerRefused):  # a token that was read may be of an earlier one
                if monotonic() + _RETRY_SECONDS > deadline or is_over():
                    raise
                sleep(_RETRY_SECONDS)
        if not self._is_open or self._channel is None:
            raise TransportError("this rank has left")
        return self._channel

    def leave(self) -> None:
        """End the meeting of ranks that is under way; safe in a signal handler."""
        self._is_open = False

    def close(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.close()
