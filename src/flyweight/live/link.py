"""Link: the session of a publisher that a replica or a relay uses, and where it serves others.

A session is built whole and swapped in. The publisher's own address comes first; the other ones are
tried while it does not answer, and are left as soon as it does.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from flyweight.errors import PeerLost, TransferTimeout
from flyweight.live.holder import Holder
from flyweight.live.publish_id import PublishId
from flyweight.live.reader import Identity, with_token
from flyweight.live.session import Receiver, Session, Ways, serving_place
from flyweight.live.shelf import Shelf
from flyweight.live.target import Target
from flyweight.transports.address import Address

_LOOK_SECONDS = 1.0
"""How long to look for a publisher that may be back."""


class Link:
    """Used by the thread that updates; others may ask what it says of itself."""

    def __init__(
        self,
        address: Address,
        me: Identity,
        ways: Ways,
        *,
        serve: str | bool = True,
        others: Sequence[Address] = (),
    ) -> None:
        self.address, self.me, self._ways, self._serve = address, me, ways, serve
        self._others = list(others)
        self.shelf = Shelf()
        """What is staged, for others of its kind."""
        self.holder: Holder | None = None
        """Serves them, if they cannot map everything themselves."""
        self.session: Session | None = None
        self.hearing = threading.Lock()
        """Held by the thread that takes what the publisher sends: an update, or who only looks."""

    @property
    def is_connected(self) -> bool:
        """True while a holder is connected, as far as it was heard."""
        session = self.session
        if session is None:
            return False
        if not self.hearing.acquire(blocking=False):
            return not session.has_failed
        try:
            return session.is_alive
        finally:
            self.hearing.release()

    @property
    def newest(self) -> PublishId | None:
        """The newest version that was announced; None if there is none."""
        session = self.session
        return session.front.newest if session is not None and self.is_connected else None

    def connect(self, target: Target, deadline: float, *, is_current: bool = True) -> bool:
        """Have a session that is alive, and return True if it is another one than before.

        is_current: False if the memory is no longer that which the last session was made for.
        """
        last, addresses = self.session, [self.address, *self._others]
        if last is not None and last.is_alive and is_current:
            if not self._others or last.front.endpoint == self.address.endpoint:
                return False
            # Look whether the publisher is there again, and else go on with the fallback.
            deadline = monotonic() + (deadline - monotonic()) / 2
            with suppress(PeerLost, TransferTimeout):
                receiver = self._receiver(target)
                self._swap(Session.open(addresses[:1], receiver, deadline, _LOOK_SECONDS))
            return self.session is not last
        self._swap(Session.open(addresses, self._receiver(target), deadline))
        return True

    def _receiver(self, target: Target) -> Receiver:
        """Return what a session needs; from now on what is staged is served."""
        me, place = self.me, serving_place(self.address, serve=self._serve)
        if self.holder is None and place is not None:
            token = with_token(me, self.address).token
            self.holder = Holder(self.shelf, token, remote=place, tls=me.tls)
        if self.holder is not None:
            me = replace(me, serves_at=self.holder.endpoint)
        return Receiver(me, target, self._ways, self.shelf)

    def _swap(self, new: Session) -> None:
        self.drop()
        self.session = new
        if self.holder is not None:
            self.holder.start(new.holding)

    def drop(self) -> None:
        """Close the session, so that the next one is built anew."""
        last, self.session = self.session, None
        if last is not None:
            last.close()

    def close(self, why: str) -> None:
        self.drop()
        if self.holder is not None:
            self.holder.close(why)
