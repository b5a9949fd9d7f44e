"""Fetches: buckets of a publisher on another host, read ahead into staging by threads.

Weights are written from staging only, and only from a bucket that has arrived as a whole. After a
fetch that failed, and after `close`, no byte arrives any more: its socket is closed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

from flyweight.errors import FlyweightError, TransportError
from flyweight.memory import Buffer
from flyweight.transports.network import NetworkHandle, NetworkTransport

STAGING_SLOTS = 4
"""How many buckets are in staging at most: some arrive while one is unpacked."""
_STREAMS_PER_PLACE, _MAX_THREADS = 2, 16
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, eq=False)
class Fetch:
    """A bucket that must be fetched, and the staging that it goes to."""

    handle: NetworkHandle
    slot: int
    into: Buffer


@dataclass(frozen=True)
class Fetched:
    """A bucket has arrived in staging, or why it has not; for the thread that runs the round."""

    round: int
    bucket: int
    error: FlyweightError | None = None


class Fetches:
    """The fetches of one round. `add` each bucket once it is full, and `free` it once unpacked."""

    def __init__(
        self,
        round_: int,
        wanted: Mapping[int, Fetch],
        transport: NetworkTransport,
        *,
        timeout_seconds: float,
        on_progress: Callable[[int], None],
        on_fetched: Callable[[Fetched], None],
    ) -> None:
        """Start the threads.

        wanted: the buckets that may be added.
        timeout_seconds: a fetch fails if no byte comes for this long.
        on_progress: called with the number of bytes that have arrived since the last call.
        on_fetched: called once for each bucket that was added; both are called in the threads.
        """
        self._round, self._wanted, self._transport = round_, wanted, transport
        self._timeout_seconds, self._on_progress = timeout_seconds, on_progress
        self._on_fetched = on_fetched
        self._changed = threading.Condition()
        self._full: deque[int] = deque()
        self._slots_in_use: set[int] = set()
        self._is_over = False
        num_places = len({each.handle.place for each in wanted.values()})
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

    def add(self, bucket: int) -> None:
        """Fetch a bucket, which is full, as soon as its staging is free."""
        with self._changed:
            self._full.append(bucket)
            self._changed.notify()

    def free(self, bucket: int) -> None:
        """Free the staging of a bucket that was fetched."""
        with self._changed:
            self._slots_in_use.discard(self._wanted[bucket].slot)
            self._changed.notify_all()

    def close(self) -> bool:
        """End all fetches; return True if none can write to staging any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._slots_in_use:
            self._transport.interrupt()
        deadline = monotonic() + _CLOSE_SECONDS
        for each in self._threads:
            if each.ident is not None:
                each.join(max(deadline - monotonic(), 0))
        return not any(each.is_alive() for each in self._threads)

    def _run(self) -> None:
        while (bucket := self._next()) is not None:
            fetch, error = self._wanted[bucket], None
            try:
                self._transport.fetch(
                    fetch.handle,
                    fetch.into,
                    timeout_seconds=self._timeout_seconds,
                    on_progress=self._on_progress,
                    is_over=lambda: self._is_over,
                )
            except FlyweightError as found:
                error = found
            except Exception as found:  # an error in our own code, which must end the round
                error = TransportError(f"{type(found).__name__}: {found}")
            self._on_fetched(Fetched(self._round, bucket, error))

    def _next(self) -> int | None:
        """Wait for a bucket that is full and whose staging is free; None if all is over."""
        with self._changed:
            while not self._is_over:
                for bucket in self._full:
                    if (slot := self._wanted[bucket].slot) not in self._slots_in_use:
                        self._slots_in_use.add(slot)
                        self._full.remove(bucket)
                        return bucket
                self._changed.wait()
        return None
