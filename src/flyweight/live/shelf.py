"""Shelf: the offers that a holder serves, and who reads them. Guards the pure state by one lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    Result,
    Staged,
    Wait,
)
from flyweight.live.offer import Served
from flyweight.live.publish_id import PublishId
from flyweight.live.ring import Ring
from flyweight.live.tracker import Tracker
from flyweight.transports.channel import Channel

MAX_RINGS = 2
"""So many readers of a device at once; each ring takes memory of it."""
_MOST_POSTS = 4096
_PARTING_SECONDS, _NOTICE_SECONDS = 0.5, 0.2


@dataclass(eq=False)
class Connected:
    """What a shelf knows of a reader."""

    number: int
    channel: Channel
    bell: int
    """Rings when the reader's thread has to look."""
    ending: str = ""
    """Why the connection must end."""
    replica: ReplicaNews | None = None
    """Who has joined, and what its last update came to."""
    is_updating: bool = False
    """True if it has heard of a version, and is not done."""
    is_watching: bool = False
    """True if the bell is to ring when the news change."""


class Shelf:
    """Threads that publish and threads of connections meet here."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        """A signal handler may close what its own thread is using."""
        self.leases, self.tracker = LeaseBook(), Tracker()
        """Other files change them within `changing`."""
        self._offers: dict[PublishId, Served] = {}
        self._available: Available | None = None
        """The newest version, for readers that wait."""
        self._last: PublishId | None = None
        """The last version that was offered; none before it comes any more."""
        self._readers: dict[int, Connected] = {}
        self._rings: dict[int, list[Ring]] = {}
        """Those of each device."""
        self._is_publishing = self._is_stopped = False
        self._posts: dict[str, str] = {}
        self._numbers = count()
        self._sent_bytes = 0
        call_in_child(self._close_in_child)

    def _close_in_child(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        for each in self._readers.values():
            os.close(each.bell)
        self._readers = {}

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock; then let watchers look again, and all that wait in this process."""
        with self._changed:
            yield
            self._wake(each for each in self._readers.values() if each.is_watching)

    def _wake(self, readers: Iterable[Connected]) -> None:
        """Let readers' own threads look again, and all that wait in this process."""
        for each in readers:
            os.eventfd_write(each.bell, 1)
        self._changed.notify_all()

    # The side that has offers.

    @property
    def newest(self) -> PublishId | None:
        return self.tracker.newest

    def offer(self, offer: Served) -> None:
        """From now on readers can lease the version, if they know of it."""
        with self.changing():
            self.leases.offer(offer.id)
            self._offers[offer.id] = offer
            self._last = offer.id

    def pass_over(self, id: PublishId) -> None:
        """From now on nobody waits for a version here, which is not offered."""
        with self.changing():
            self._last = id

    def announce(self, available: Available) -> None:
        """Tell all readers that wait, and those that come, of the version."""
        with self._changed:
            self._available = available
            self.tracker.announce(available.id)
            self._wake(self._readers.values())

    def stop(self) -> None:
        """End the waits of whoever publishes: the holder is about to close."""
        with self.changing():
            self._is_stopped = True

    def wait_until(self, is_true: Callable[[], bool], deadline: float) -> None:
        """Wait until a claim about this shelf holds, or the deadline, or `stop`."""
        with self._changed:
            left = max(deadline - monotonic(), 0)
            self._changed.wait_for(lambda: self._is_stopped or is_true(), left)

    def wait_served(
        self, id: PublishId, num_replicas: int, deadline: float
    ) -> tuple[list[Result], list[str]]:
        """Wait for the engines that have heard of a version, and until so many have it.

        An engine that has fetched everything is not waited for. Returns how each ended, and the
        names of those that are not done.
        """

        def is_over() -> bool:
            found = self.tracker.outcome(id)
            num_done = sum(not each.error for each in found.results)
            return num_done >= num_replicas and not found.needing

        with self._changed:
            self.wait_until(is_over, deadline)
            found = self.tracker.outcome(id)
            return found.results, found.missing

    def reclaim(self, id: PublishId, deadline: float) -> Served | None:
        """Withdraw a version, end the leases that outlast the deadline, and give the offer back.

        Only what this returns may be written, and only by who gets it. A reader that has mapped
        the memory can still read, but its lease has ended: it does not commit without digests,
        and digests do not fit.
        """
        with self._changed:
            self.leases.withdraw(id)
            try:
                self.wait_until(lambda: self.leases.is_free(id), deadline)
            finally:  # Ctrl-C does not wait, and leaves no lease either
                # Readers that have not begun to write learn of it before the memory changes.
                text = "its time was over; the memory may have changed"
                self._end(self.leases.end(id), text, _NOTICE_SECONDS)
            return self._offers.pop(id, None)

    def _end(self, readers: Iterable[int], text: str, seconds: float) -> None:
        """Have readers' own threads say why their connections end; shut those that take longer."""
        ended = [self._readers[each] for each in readers if each in self._readers]
        for each in ended:
            each.ending = each.ending or text
        self._wake(ended)

        def left() -> list[Connected]:
            return [each for each in ended if each.number in self._readers]

        self._changed.wait_for(lambda: not left(), seconds)
        for each in left():
            each.channel.shut()

    def end_conversations(self, text: str) -> None:
        """Let all readers that are connected know why they must connect again, or leave."""
        with self._changed:
            self._end(list(self._readers), text, _PARTING_SECONDS)

    def close_rings(self) -> None:
        """Free the memory of the rings, which no reader uses any more."""
        for device in self._rings.values():
            for ring in device:
                ring.close()

    def replicas(self) -> list[str]:
        """Return the names of the engines that are connected."""
        with self._changed:
            return self.tracker.replicas()

    def waiting_names(self) -> list[str]:
        """Return the names of the engines that wait for a version."""
        with self._changed:
            return self.tracker.waiting()

    def all_sent_bytes(self) -> int:
        with self._changed:
            return self._sent_bytes + sum(
                each.channel.sent_bytes for each in self._readers.values()
            )

    # The side of connections: a reader is the number of its connection.

    def enter(self, channel: Channel) -> Connected:
        """Begin to know a connection, until `lose`."""
        with self._changed:
            bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            found = Connected(next(self._numbers), channel, bell)
            self._readers[found.number] = found
            return found

    def join(self, reader: int, join: Join) -> None:
        with self.changing():
            self._readers[reader].replica = ReplicaNews(join.name, join.rank, join.pid)
            self.tracker.join(reader, join)

    def refuse(self, reader: int, text: str) -> None:
        """Note that an engine cannot take this model; the next report says so."""
        with self._changed:
            if (replica := self._readers[reader].replica) is not None:
                self.tracker.refused(replica.name, text)

    def lose(self, reader: int) -> None:
        with self.changing():
            gone = self._readers.pop(reader)
            os.close(gone.bell)
            self._sent_bytes += gone.channel.sent_bytes
            self.leases.lose(reader)
            if gone.replica is not None:
                self.tracker.lose(reader)

    @contextmanager
    def waiting(self, reader: int, kind: str, wait: Wait) -> Iterator[None]:
        """Count the reader among those that wait."""
        with self.changing():
            self.tracker.wait(reader, kind, wait)
            me = self._readers[reader]
            me.is_updating = False
            assert me.replica is not None
            if wait.have is not None and me.replica.state == "EMPTY":  # of an earlier connection
                me.replica = replace(me.replica, state="READY", version=wait.have.version)
        try:
            yield
        finally:
            with self._changed:
                self.tracker.stop_waiting(reader)

    def answer(self, reader: int, kind: str, wait: Wait) -> Available | Current | None:
        """Return the answer to a wait, if there is one now.

        Raises VersionError if the version that it wants cannot come any more.
        """
        with self._changed:
            is_offered = self.newest in self.leases.offered
            found = self.tracker.answer(reader, kind, wait, is_offered=is_offered)
            if not isinstance(found, tuple):
                return found
            with self.changing():
                self._readers[reader].is_updating = True
            assert self._available is not None
            return replace(self._available, holders=found)

    def lease(self, id: PublishId, reader: int, deadline: float) -> Served:
        """Return the offer of a version, which stays until the lease ends.

        A version that is newer than those that are here may be on its way: wait for it.
        """

        def is_decided() -> bool:
            return self._last is not None and (self._last == id or self._last.follows(id))

        with self._changed:
            self.wait_until(is_decided, deadline)
            self.leases.take(id, reader)
            return self._offers[id]

    def leased(self, reader: int) -> Served:
        """Return the offer that a reader has leased; raise HandleGone unless its lease runs."""
        with self._changed:
            if (id := self.leases.leased(reader)) is None:
                raise HandleGone(
                    "the reader has no lease here, or it has ended; the memory may have changed"
                )
            return self._offers[id]

    def take_ring(self, device: int, reader: int, deadline: float) -> Ring:
        """Wait for a ring of a device that no reader with a lease uses, and give it to a reader."""

        def free() -> Ring | None:
            rings = self._rings.setdefault(device, [Ring(device) for _ in range(MAX_RINGS)])
            # With another one than it had, it would keep the other ranks of its engine out.
            mine = [each for each in rings if each.reader == reader]
            unused = [each for each in rings if self.leases.leased(each.reader) is None]
            return next(iter(mine + unused), None)

        with self._changed:
            self.wait_until(lambda: free() is not None, deadline)
            if (ring := free()) is None:
                raise TransferTimeout(
                    f"{MAX_RINGS} other readers use the rings of device {device}; update again"
                )
            ring.reader = reader
            return ring

    def note(self, reader: int, message: Staged | Done) -> None:
        """Take what a reader says of a version, without a request."""
        with self._changed:
            me = self._readers[reader]
            if me.replica is None:
                raise TransportError("a reader must join before it has a version")
            self.tracker.note(reader, message)
            if isinstance(message, Done):
                result, me.is_updating = message.result, False
                if not result.error:
                    me.replica = replace(me.replica, state="READY", version=message.id.version)
                elif result.is_touched:
                    me.replica = replace(me.replica, state="FAILED", version=None)
                me.replica = replace(me.replica, seconds=result.seconds, error=result.error)
            self._wake(self._readers.values())

    # Watchers.

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Let watchers see that a publish is under way."""
        with self.changing():
            self._is_publishing = True
        try:
            yield
        finally:
            with self.changing():
                self._is_publishing = False

    def news(self) -> News:
        """Return what watchers see."""
        with self._changed:
            replicas = tuple(
                replace(each.replica, state="UPDATING") if each.is_updating else each.replica
                for each in self._readers.values()
                if each.replica is not None
            )
            version = None if self.newest is None else self.newest.version
            return News(version, "PUBLISHING" if self._is_publishing else "IDLE", replicas)

    # Texts that ranks leave for each other: a `RendezvousStore`.

    def set(self, key: str, text: str, deadline: float) -> None:
        with self._changed:
            self._posts.pop(key, None)
            self._posts[key] = text
            if len(self._posts) > _MOST_POSTS:
                del self._posts[next(iter(self._posts))]

    def get(self, key: str, deadline: float) -> str | None:
        """Return the text under a key; None if there is none."""
        return self._posts.get(key)
