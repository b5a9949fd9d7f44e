"""Fetches: buckets of a publisher on another host, read ahead into staging by threads.

Weights are written from staging only, and only from a bucket that has arrived as a whole. After a
fetch that failed, and after `close`, no byte arrives any more: its socket or reader is closed. If
a reader cannot be closed, all fetches end, and so does the round for this replica.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from flyweight.errors import FlyweightError, TransportError
from flyweight.live.messages import Filled, Free, Has, Message, RemoteHandle, Unread
from flyweight.memory import Buffer
from flyweight.transports.engine_reads import EngineHandle, EngineReads
from flyweight.transports.network import NetworkHandle, NetworkTransport
from flyweight.transports.nixl_agent import UnfencedRead

STAGING_SLOTS = 8
"""How many buckets are in staging at most. Two arrive at a time, and each stays until the next two
replicas of a chain have it: with less than six, the link would wait."""
HOLDER_SECONDS = 2.0
"""Another replica that gives no byte for this long is not read from any more."""
_STREAMS_PER_PLACE, _MAX_THREADS = 2, 16
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, eq=False)
class Fetch:
    """A bucket that must be fetched, and the staging that it goes to."""

    handle: RemoteHandle
    slot: int
    into: Buffer

    @property
    def server(self) -> object:
        """What serves the bucket, at the publisher's host."""
        handle = self.handle
        return handle.description if isinstance(handle, EngineHandle) else handle.place


@dataclass(frozen=True)
class Fetched:
    """A bucket has arrived in staging; for the thread that runs the round."""

    round: int
    bucket: int


@dataclass(frozen=True)
class FetchesFailed:
    """Staging may still be written by a fetch that failed: this round cannot go on."""

    round: int
    reason: str


FetchEvent = Fetched | FetchesFailed


class Fetches:
    """The fetches of one round, in threads of their own."""

    def __init__(
        self,
        round_: int,
        wanted: Mapping[int, Fetch],
        transport: NetworkTransport,
        engines: EngineReads,
        *,
        timeout_seconds: float,
        on_progress: Callable[[int], None],
        send: Callable[[Message], None],
        on_fetched: Callable[[FetchEvent], None],
    ) -> None:
        """Start the threads.

        wanted: the buckets that may be fetched.
        timeout_seconds: a fetch from the publisher fails if no byte comes for this long.
        on_progress: called with the number of bytes that have arrived since the last call.
        send: sends a message to the publisher.
        on_fetched: called once for each bucket that has arrived, or if no more can arrive.
        """
        self._round, self._wanted = round_, wanted
        self._transport, self._engines = transport, engines
        self._timeout_seconds, self._on_progress = timeout_seconds, on_progress
        self._send, self._on_fetched = send, on_fetched
        self._changed = threading.Condition()
        self._full: list[int] = []
        """The buckets to fetch, in order."""
        self._handles: dict[int, NetworkHandle | None] = {}
        """Where each bucket is read, if not from the publisher."""
        self._attempts: Counter[int] = Counter()
        self._slot_users: dict[int, int] = {}
        """The bucket that each slot of staging is for."""
        self._running: set[int] = set()
        self._arrived: set[int] = set()
        self._freed: list[int] = []
        """The buckets whose slots are to be freed."""
        self.lent: dict[int, NetworkHandle] = {}
        """Staging that others may read."""
        self._unread: set[int] = set()
        """The buckets there that the publisher has not freed: others may still need them."""
        self._is_over, self._is_fenced = False, True
        num_places = len({each.server for each in wanted.values()})
        count = min(_STREAMS_PER_PLACE * num_places, _MAX_THREADS, len(wanted))
        self._threads = [
            threading.Thread(target=self._run, name="flyweight-fetch", daemon=True)
            for _ in range(count)
        ]
        try:
            for each in self._threads:
                each.start()
        except RuntimeError as cause:  # the system's limit of threads is reached
            self.close()
            raise TransportError(
                f"cannot start a thread: {cause}; raise the limit, ulimit -u"
            ) from cause

    def take(self, message: object) -> bool:
        """Do what the publisher says of a bucket, if it is one of these; else return False."""
        if not isinstance(message, Filled | Free):
            return False
        bucket = message.bucket
        if message.round != self._round or bucket not in self._wanted:
            return False
        with self._changed:
            if isinstance(message, Free):
                self._unread.discard(bucket)
                self._freed.append(bucket)
            elif bucket not in self._arrived:
                self._handles[bucket] = message.handle
                self._attempts[bucket] += 1  # a fetch from elsewhere that runs ends now
                if bucket not in self._full and bucket not in self._running:
                    self._full.append(bucket)
            self._changed.notify_all()
        return True

    @property
    def is_needed(self) -> bool:
        """True if this side is done with the round, and other replicas still need its staging."""
        return self._is_over and bool(self._unread)

    def close(self) -> bool:
        """End all fetches; return True if none can write to staging any more."""
        with self._changed:
            self._is_over = True
            is_running = bool(self._running)
            self._changed.notify_all()
        if is_running:
            self._transport.interrupt()
        deadline = monotonic() + _CLOSE_SECONDS
        for each in self._threads:
            if each.ident is not None:
                each.join(max(deadline - monotonic(), 0))
        return self._is_fenced and not any(each.is_alive() for each in self._threads)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_over or self._freed or self._next() is not None
                )
                if self._is_over:
                    return
                freed, bucket = self._freed.pop() if self._freed else None, None
                if freed is None and (bucket := self._next()) is not None:
                    self._full.remove(bucket)
                    self._running.add(bucket)
                    self._slot_users[self._wanted[bucket].slot] = bucket
            if freed is not None:
                self._free(freed)
            elif bucket is not None:
                self._fetch(bucket)

    def _next(self) -> int | None:
        """Return the first bucket whose slot of staging is free, or reserved for it."""
        for bucket in self._full:
            if self._slot_users.get(self._wanted[bucket].slot, bucket) == bucket:
                return bucket
        return None

    def _fetch(self, bucket: int) -> None:
        fetch, attempt = self._wanted[bucket], self._attempts[bucket]
        holder, seconds = self._handles[bucket], self._timeout_seconds
        error: FlyweightError | None = None
        try:
            self._bring(
                fetch.handle if holder is None else _read_from(holder, fetch),
                fetch.into,
                timeout_seconds=seconds if holder is None else min(seconds, HOLDER_SECONDS),
                on_progress=self._on_progress,
                is_over=lambda: self._is_over or self._attempts[bucket] != attempt,
            )
        except FlyweightError as found:
            error = found
        except Exception as found:  # an error in our own code; nobody knows what it leaves behind
            error = UnfencedRead(f"{type(found).__name__}: {found}")
        if isinstance(error, UnfencedRead):
            self._fail(bucket, error)
            return
        with self._changed:
            self._running.discard(bucket)
            if error is not None and self._attempts[bucket] != attempt:
                self._full.insert(0, bucket)  # it is read from somebody else now
                self._changed.notify_all()
                return
            if error is None:
                self._arrived.add(bucket)
                if self._transport.can_offer:
                    self.lent[bucket] = self._transport.offer(fetch.into)
                    self._unread.add(bucket)
        if error is None:
            self._send(Has(self._round, bucket, self.lent.get(bucket)))
            self._on_fetched(Fetched(self._round, bucket))
        elif not self._is_over:
            key, kind = "" if holder is None else holder.key, type(error).__name__
            self._send(Unread(self._round, bucket, key, kind, str(error)))

    def _fail(self, bucket: int, error: UnfencedRead) -> None:
        """End all fetches of the round: a slot that may still be written must not be used again."""
        with self._changed:
            self._running.discard(bucket)
            is_first, self._is_fenced, self._is_over = not self._is_over, False, True
            self._changed.notify_all()
        if is_first:
            self._on_fetched(FetchesFailed(self._round, str(error)))

    def _bring(self, handle: RemoteHandle, into: Buffer, **options: Any) -> None:
        """Bring a bucket here by what serves it."""
        if isinstance(handle, EngineHandle):
            self._engines.fetch(handle, into, **options)
        else:
            self._transport.fetch(handle, into, **options)

    def _free(self, bucket: int) -> None:
        """End what others still read of a bucket, and let another one take its slot."""
        handle = self.lent.pop(bucket, None)
        if handle is not None:
            self._transport.release(handle)
        with self._changed:
            slot = self._wanted[bucket].slot
            if self._slot_users.get(slot) == bucket:
                del self._slot_users[slot]
            self._changed.notify_all()


def _read_from(holder: NetworkHandle, fetch: Fetch) -> NetworkHandle:
    """Return the handle of another replica's staging; its bucket has the bytes of ours."""
    if holder.nbytes != fetch.into.nbytes:
        raise TransportError(
            f"another replica has {holder.nbytes} bytes of a bucket of {fetch.into.nbytes}"
        )
    return holder
