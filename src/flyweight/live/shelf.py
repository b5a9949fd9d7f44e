"""Shelf: the offers that a holder serves, and who reads them. Guards the pure state by one lock."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from time import monotonic

from msgspec.structs import replace

from flyweight.errors import HandleGone, TransferTimeout, TransportError
from flyweight.forks import call_in_child
from flyweight.live.lease_book import LeaseBook
from flyweight.live.messages import (
    Available,
    Current,
    Done,
    Join,
    News,
    ReplicaNews,
    Staged,
    Wait,
)
from flyweight.live.offer import Served
from flyweight.live.publish_id import PublishId
from flyweight.live.tracker import Result, Tracker
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
        self._available: Available | None = None
        """The newest version, for readers that wait."""
        self._last: PublishId | None = None
        """The last version that was offered; none before it comes any more."""
        self._channels: dict[int, Channel] = {}
        self._bells: dict[int, int] = {}
        self._replicas: dict[int, ReplicaNews] = {}
        """Who has joined, and what the last update of each came to."""
        self._updating: set[int] = set()
        """The readers that were told of a version, and are not done."""
        self._ring_users: dict[tuple[int, int], int] = {}
        """The reader that uses each ring of a device, or was the last to use it."""
        self._watchers: set[int] = set()
        self._is_publishing = False
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

    def announce(self, available: Available) -> None:
        """Tell all readers that wait, and those that come, of the version."""
        with self._changed:
            self._available = available
            self._tracker.announce(available.id)
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

    def wait_until(self, is_true: Callable[[], bool], deadline: float) -> bool:
        """Wait until a claim about this shelf holds, or the deadline, or `stop`."""
        with self._changed:
            left = max(deadline - monotonic(), 0)
            return self._changed.wait_for(lambda: self._is_stopped or is_true(), left)

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
            self.wait_until(is_over, deadline)
            return self._tracker.results(id), self._tracker.missing(id)

    def reclaim(self, id: PublishId, deadline: float) -> Served | None:
        """Withdraw a version, end the leases that outlast the deadline, and give the offer back.

        Only what this returns may be written, and only by who gets it. A reader that has mapped
        the memory can still read, but its lease has ended: it does not commit without digests,
        and digests do not fit.
        """
        with self._changed:
            self._leases.withdraw(id)
            try:
                self.wait_until(lambda: self._leases.is_free(id), deadline)
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
        with self._changed:
            self._replicas[reader] = ReplicaNews(join.name, join.rank, join.pid)
            self._tracker.join(
                reader,
                join.name,
                join.rank,
                join.num_ranks,
                serves_at=join.serves_at,
                host=join.host,
            )
            self._show()

    def refuse(self, reader: int, text: str) -> None:
        """Note that an engine cannot take this model; the next report says so."""
        with self._changed:
            if (replica := self._replicas.get(reader)) is not None:
                self._tracker.refused(replica.name, text)

    def lose(self, reader: int) -> None:
        with self._changed:
            self.sent_bytes += self._channels.pop(reader).sent_bytes
            os.close(self._bells.pop(reader))
            self._ending.pop(reader, None)
            self._watchers.discard(reader)
            self._updating.discard(reader)
            self._leases.lose(reader)
            if self._replicas.pop(reader, None) is not None:
                self._tracker.lose(reader)
            self._show()

    @contextmanager
    def waiting(self, reader: int, kind: str, wait: Wait) -> Iterator[None]:
        """Count the reader among those that wait."""
        with self._changed:
            self._tracker.wait(reader, kind, wait.have, wait.version)
            self._updating.discard(reader)
            replica = self._replicas[reader]
            if wait.have is not None and replica.state == "EMPTY":  # of an earlier connection
                self._replicas[reader] = replace(replica, state="READY", version=wait.have.version)
            self._show()
        try:
            yield
        finally:
            with self._changed:
                self._tracker.stop_waiting(reader)

    def answer(self, reader: int, kind: str, wait: Wait) -> Available | Current | None:
        """Return what a reader should be told now, if anything.

        Raises VersionError if the version that it wants cannot come any more.
        """
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
            if found is None or self._available is None:
                return None
            self._updating.add(reader)
            self._show()
            return replace(self._available, holders=found)

    def nothing_new(self, have: PublishId | None) -> TransferTimeout:
        """Return the error for a reader whose time is over."""
        is_newest = have is not None and have == self.newest
        why = f"{have} is the newest" if is_newest else "there is no version"
        return TransferTimeout(
            f"{why}, and no other came in time; publish one, or give update a longer "
            f"timeout_seconds"
        )

    def lease(self, id: PublishId, reader: int, deadline: float) -> Served:
        """Return the offer of a version, which stays until the lease ends.

        A version that is newer than those that are here may be on its way: wait for it.
        """

        def is_decided() -> bool:
            last = self._last
            return last is not None and last.session == id.session and last.version >= id.version

        with self._changed:
            self.wait_until(is_decided, deadline)
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
            users = [self._ring_users.get((device, each)) for each in range(MAX_RINGS)]
            if (
                reader in users
            ):  # else it could have two, and keep the other ranks of its engine out
                return users.index(reader)
            return next((n for n, u in enumerate(users) if not self._leases.has_lease(u)), None)

        with self._changed:
            self.wait_until(lambda: free() is not None, deadline)
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

    def maps(self, reader: int, id: PublishId) -> None:
        """Note that a reader maps a version, so that others cannot fetch it there."""
        with self._changed:
            if reader in self._replicas and id == self.newest:
                self._tracker.maps(reader)

    def note(self, reader: int, message: Staged | Done) -> None:
        """Take what a reader says of a version, without a request."""
        with self._changed:
            if reader not in self._replicas:
                raise TransportError("a reader must join before it has a version")
            if isinstance(message, Staged):
                self._tracker.staged(reader, message.id)
            else:
                self._updating.discard(reader)
                self._tracker.done(reader, message.id, message.result)
                self._replicas[reader] = after(self._replicas[reader], message)
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
        """Let watchers look again, and all that wait in this process."""
        for reader in self._watchers & set(self._bells):
            os.eventfd_write(self._bells[reader], 1)
        self._changed.notify_all()

    def news(self) -> News:
        """Return what watchers see."""
        with self._changed:
            replicas = tuple(
                replace(each, state="UPDATING") if reader in self._updating else each
                for reader, each in self._replicas.items()
            )
            version = None if self.newest is None else self.newest.version
            state = "PUBLISHING" if self._is_publishing else "IDLE"
            return News(version, state, replicas)

    # Texts that ranks leave for each other: a `RendezvousStore`.

    def set(self, key: str, text: str, deadline: float) -> None:
        with self._changed:
            self._posts[key] = text
            self._posts.move_to_end(key)
            if len(self._posts) > _MOST_POSTS:
                self._posts.popitem(last=False)
            self._changed.notify_all()

    def get(self, key: str, deadline: float) -> str | None:
        """Return the text under a key; None if there is none."""
        return self._posts.get(key)


def after(replica: ReplicaNews, done: Done) -> ReplicaNews:
    """Return what is known of a replica once it has said how an update ended."""
    result = done.result
    if not result.error:
        return replace(
            replica, state="READY", version=done.id.version, seconds=result.seconds, error=""
        )
    if result.is_touched:
        replica = replace(replica, state="FAILED", version=None)
    return replace(replica, seconds=result.seconds, error=result.error)
