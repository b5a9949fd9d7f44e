"""Shelf: the offers that a holder serves, and who reads them. Guards the pure state by one lock."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from time import monotonic

import msgspec

from flyweight.errors import HandleGone, TransferTimeout
from flyweight.forks import call_in_child
from flyweight.live.lease_book import LeaseBook
from flyweight.live.messages import (
    Available,
    Current,
    Join,
    News,
    NotYet,
    ReplicaNews,
    Superseded,
    Wait,
)
from flyweight.live.offer import About, Served
from flyweight.live.publish_id import PublishId
from flyweight.live.tracker import CannotCome, Result, Tracker
from flyweight.transports.address import Endpoint
from flyweight.transports.channel import Channel

MAX_RINGS = 2
"""So many readers of a device at once; each ring takes memory of it."""
_MOST_POSTS = 4096
_PARTING_SECONDS, _NOTICE_SECONDS = 0.5, 0.2


class Shelf:
    """Threads that publish and threads of connections meet here."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        """A signal handler may close what its own thread is using."""
        self._leases, self._tracker = LeaseBook(), Tracker()
        self._offers: dict[PublishId, Served] = {}
        self._about = About()
        self._last: PublishId | None = None
        """The last version that was offered; none before it comes any more."""
        self._channels: dict[int, Channel] = {}
        self._bells: dict[int, int] = {}
        self._joined: dict[int, Join] = {}
        self._states: dict[int, tuple[str, int | None, float, str]] = {}
        """What the last update of each reader came to: state, version, seconds and error."""
        self._updating: set[int] = set()
        """The readers that were told of a version, and are not done."""
        self._ring_users: dict[tuple[int, int], int] = {}
        """The reader that uses each ring of a device, or was the last to use it."""
        self._watchers: set[int] = set()
        self._is_publishing = False
        self._places: dict[str, Endpoint] = {}
        self._ending: dict[int, str] = {}
        self._posts: OrderedDict[str, str] = OrderedDict()
        self._is_stopped = False
        self._numbers = count()
        self.sent_bytes = 0
        call_in_child(self._close_in_child)

    def _close_in_child(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        for bell in self._bells.values():
            os.close(bell)
        self._bells, self._channels = {}, {}

    # The side that has offers.

    @property
    def newest(self) -> PublishId | None:
        return self._tracker.newest

    def offer(self, offer: Served) -> None:
        """From now on readers can lease the version, if they know of it."""
        with self._changed:
            self._leases.offer(offer.id)
            self._offers[offer.id] = offer
            self._last = offer.id
            self._changed.notify_all()

    def pass_over(self, id: PublishId) -> None:
        """From now on nobody waits for a version here, which is not offered."""
        with self._changed:
            self._last = id
            self._changed.notify_all()

    def announce(self, id: PublishId, about: About) -> None:
        """Tell all readers that wait, and those that come, of the version."""
        with self._changed:
            self._about = about
            self._tracker.announce(id)
            self.ring()

    def ring(self) -> None:
        """Let all that wait look again."""
        with self._changed:
            for bell in self._bells.values():
                os.eventfd_write(bell, 1)
            self._changed.notify_all()

    def stop(self) -> None:
        """End the waits of whoever publishes: the holder is about to close."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def wait_for(self, is_true: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._is_stopped or is_true(), seconds)

    def wait_served(
        self, id: PublishId, num_replicas: int, deadline: float
    ) -> tuple[list[Result], list[str]]:
        """Wait for the engines that were told of a version, and until so many have it.

        An engine that has fetched everything is not waited for. Returns how each ended, and the
        names of those that are not done.
        """

        def is_over() -> bool:
            num_done = sum(not each.error for each in self._tracker.results(id))
            return num_done >= num_replicas and not self._tracker.needing(id)

        with self._changed:
            left = max(deadline - monotonic(), 0)
            self._changed.wait_for(lambda: self._is_stopped or is_over(), left)
            return self._tracker.results(id), self._tracker.missing(id)

    def withdraw(self, id: PublishId) -> None:
        """Give no new leases of a version."""
        with self._changed:
            self._leases.withdraw(id)

    def reclaim(self, id: PublishId, deadline: float) -> Served | None:
        """Withdraw a version, end the leases that outlast the deadline, and give the offer back.

        Only what this returns may be written, and only by who gets it. A reader that has mapped
        the memory can still read, but its lease has ended: it does not commit without digests,
        and digests do not fit.
        """
        with self._changed:
            self._leases.withdraw(id)
            try:
                left = max(deadline - monotonic(), 0)
                self._changed.wait_for(lambda: self._is_stopped or self._leases.is_free(id), left)
            finally:  # Ctrl-C does not wait, and leaves no lease either
                readers = self._leases.end(id)
                for reader in readers:
                    self._end(reader, "its time was over; the memory may have changed")
                # Readers that have not begun to write learn of it before the memory changes.
                self._changed.wait_for(
                    lambda: not readers & set(self._channels), _NOTICE_SECONDS if readers else 0
                )
                for reader in readers & set(self._channels):  # it still sends what will change
                    self._channels[reader].shut()
            return self._offers.pop(id, None)

    def _end(self, reader: int, text: str) -> None:
        """Have a reader's own thread say why its connection ends."""
        self._ending.setdefault(reader, text)
        if reader in self._bells:
            os.eventfd_write(self._bells[reader], 1)

    def end_conversations(self, text: str) -> None:
        """Let all readers that are connected know why they must connect again, or leave."""
        with self._changed:
            readers = set(self._channels)
            for reader in readers:
                self._end(reader, text)
            self._changed.wait_for(lambda: not readers & set(self._channels), _PARTING_SECONDS)
            for reader in readers & set(self._channels):
                self._channels[reader].shut()

    def replicas(self) -> list[str]:
        """Return the names of the engines that are connected."""
        with self._changed:
            return self._tracker.replicas()

    def waiting_names(self) -> list[str]:
        """Return the names of the engines that wait for a version."""
        with self._changed:
            return self._tracker.waiting()

    def all_sent_bytes(self) -> int:
        with self._changed:
            return self.sent_bytes + sum(each.sent_bytes for each in self._channels.values())

    # The side of connections: a reader is the number of its connection.

    def enter(self, channel: Channel) -> tuple[int, int]:
        """Return the number of a new connection, and the bell that rings when it has to look."""
        with self._changed:
            reader = next(self._numbers)
            self._bells[reader] = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._channels[reader] = channel
            return reader, self._bells[reader]

    def ending(self, reader: int) -> str | None:
        """Return why a reader's connection must end."""
        return self._ending.get(reader)

    def join(self, reader: int, join: Join) -> None:
        place = ""
        if join.serves_at is not None:
            place = str(join.serves_at)
        with self._changed:
            if place:
                assert join.serves_at is not None
                self._places[place] = join.serves_at
            self._joined[reader] = join
            self._states[reader] = "EMPTY", None, 0.0, ""
            self._show()
            self._tracker.join(
                reader, join.name, join.rank, join.num_ranks, serves_at=place, host=join.host
            )
            self._changed.notify_all()

    def refuse(self, reader: int, text: str) -> None:
        """Note that an engine cannot take this model; the next report says so."""
        with self._changed:
            if (join := self._joined.get(reader)) is not None:
                self._tracker.refused(join.name, text)

    def lose(self, reader: int) -> None:
        with self._changed:
            self.sent_bytes += self._channels.pop(reader).sent_bytes
            os.close(self._bells.pop(reader))
            self._ending.pop(reader, None)
            self._states.pop(reader, None)
            self._watchers.discard(reader)
            self._updating.discard(reader)
            self._show()
            self._leases.lose(reader)
            if (join := self._joined.pop(reader, None)) is not None:
                self._tracker.lose(reader)
                if all(each.serves_at != join.serves_at for each in self._joined.values()):
                    self._places.pop(str(join.serves_at), None)
            self._changed.notify_all()

    @contextmanager
    def waiting(self, reader: int, kind: str, wait: Wait) -> Iterator[None]:
        """Count the reader among those that wait."""
        with self._changed:
            self._tracker.wait(reader, kind, wait.have, wait.version)
            self._updating.discard(reader)
            state, _, seconds, error = self._states[reader]
            if wait.have is not None and state == "EMPTY":  # it has it from an earlier connection
                self._states[reader] = "READY", wait.have.version, seconds, error
            self._show()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._tracker.stop_waiting(reader)

    def answer(self, reader: int, kind: str, wait: Wait) -> Available | Current | Superseded | None:
        """Return what a reader should be told now, if anything."""
        with self._changed:
            newest, wanted = self._tracker.newest, wait.id
            if newest is not None and wait.version is not None:
                wanted = PublishId(newest.session, wait.version)
            if newest is not None and newest == wait.have and wait.may_keep:
                return Current()
            if wanted is not None and wanted == wait.have:  # what this id names never changes
                return Current()
            is_offered = newest in self._leases.offered
            found = self._tracker.answer(reader, kind, wanted, wait.have, is_offered=is_offered)
            if isinstance(found, CannotCome):
                return Superseded(found.newest)
            if found is None or newest is None:
                return None
            self._updating.add(reader)
            self._show()
            holders = (self._places[each] for each in found.holders if each in self._places)
            about = self._about
            return Available(newest, about.parent, dict(about.values), tuple(holders))

    def nothing_new(self, have: PublishId | None) -> Current | NotYet:
        with self._changed:
            return Current() if have is not None and have == self.newest else NotYet()

    def lease(self, id: PublishId, reader: int, deadline: float) -> Served:
        """Return the offer of a version, which stays until the lease ends.

        A version that is newer than those that are here may be on its way: wait for it.
        """

        def is_decided() -> bool:
            last = self._last
            return last is not None and last.session == id.session and last.version >= id.version

        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopped or is_decided(), max(deadline - monotonic(), 0)
            )
            self._leases.take(id, reader)
            return self._offers[id]

    def check_lease(self, id: PublishId, reader: int) -> None:
        """Raise HandleGone unless a reader's lease still runs."""
        with self._changed:
            if reader not in self._leases.readers(id):
                raise HandleGone(f"the lease of {id} has ended; the memory may have changed")

    def take_ring(self, device: int, reader: int, deadline: float) -> int:
        """Wait for a ring of a device that no reader with a lease uses; return its number."""

        def free() -> int | None:
            for number in range(MAX_RINGS):
                user = self._ring_users.get((device, number), reader)
                if user == reader or not self._leases.has_lease(user):
                    return number
            return None

        with self._changed:
            left = max(deadline - monotonic(), 0)
            self._changed.wait_for(lambda: self._is_stopped or free() is not None, left)
            if (number := free()) is None:
                raise TransferTimeout(
                    f"{MAX_RINGS} other readers use the rings of device {device}; update again"
                )
            self._ring_users[device, number] = reader
            return number

    def drop_lease(self, reader: int) -> None:
        """End the lease of a reader that will not use it."""
        with self._changed:
            self._leases.lose(reader)
            self._changed.notify_all()

    def release(self, id: PublishId, reader: int) -> None:
        """End a lease; raise HandleGone unless it ran until now."""
        with self._changed:
            self._leases.release(id, reader)
            self._changed.notify_all()

    def staged(self, reader: int, id: PublishId) -> None:
        """Note that a reader has all of a version and needs nobody any more."""
        with self._changed:
            if reader in self._joined:
                self._tracker.staged(reader, id)
                self._changed.notify_all()

    def maps(self, reader: int, id: PublishId) -> None:
        """Note that a reader maps a version, so that others cannot fetch it there."""
        with self._changed:
            if reader in self._joined and id == self.newest:
                self._tracker.maps(reader)

    def mistrust(self, reader: int, id: PublishId, place: str) -> None:
        with self._changed:
            if reader in self._joined and id == self.newest:
                self._tracker.mistrust(reader, place)

    def done(self, reader: int, id: PublishId, result: Result) -> None:
        with self._changed:
            if reader not in self._joined:
                raise HandleGone("a reader must join before it can be done")
            if result.error:
                state, version, _, _ = self._states[reader]
                if result.is_touched:
                    state, version = "FAILED", None
                self._states[reader] = state, version, result.seconds, result.error
            else:
                self._states[reader] = "READY", id.version, result.seconds, ""
            self._updating.discard(reader)
            self._tracker.done(reader, id, result)
            self.ring()

    # Watchers.

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Let watchers see that a publish is under way."""
        with self._changed:
            self._is_publishing = True
            self._show()
        try:
            yield
        finally:
            with self._changed:
                self._is_publishing = False
                self._show()

    def watch(self, reader: int) -> News:
        """Return what watchers see; from now on the reader's bell rings when that changes."""
        with self._changed:
            self._watchers.add(reader)
            return self.news()

    def _show(self) -> None:
        for reader in self._watchers & set(self._bells):
            os.eventfd_write(self._bells[reader], 1)

    def news(self) -> News:
        """Return what watchers see."""
        with self._changed:
            replicas = []
            for reader, join in self._joined.items():
                replica = ReplicaNews(join.name, join.rank, join.pid, *self._states[reader])
                if reader in self._updating:
                    replica = msgspec.structs.replace(replica, state="UPDATING")
                replicas.append(replica)
            newest = self._tracker.newest
            version = None if newest is None else newest.version
            state = "PUBLISHING" if self._is_publishing else "IDLE"
            return News(version, state, tuple(replicas))

    # Texts that ranks leave for each other.

    def post(self, key: str, text: str) -> None:
        with self._changed:
            self._posts[key] = text
            self._posts.move_to_end(key)
            if len(self._posts) > _MOST_POSTS:
                self._posts.popitem(last=False)
            self._changed.notify_all()

    def look(self, key: str, seconds: float) -> str | None:
        """Return the text under a key, as soon as there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or key in self._posts, seconds)
            return self._posts.get(key)
