"""News of a publisher: events for listeners in this process, messages for watchers elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic

import msgspec

from flyweight.events import emit
from flyweight.live import messages
from flyweight.live.member import Member

_WATCHER_SECONDS = 5.0
"""The shortest silence for which a watcher is given up: watchers do not know `silence_seconds`."""
_LISTENER_SECONDS = 2.0


class EventThread:
    """Emits events in a thread of its own: an error of a listener must not end a connection."""

    def __init__(self) -> None:
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon: a listener that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="flyweight-events", daemon=True)
        self._thread.start()

    def emit(self, kind: str, **fields: int | float | str | None) -> None:
        """Emit an event soon."""
        self._events.put(partial(emit, kind, **fields))

    def close(self) -> None:
        """End the thread, after the events that were emitted before."""
        self._events.put(None)
        self._thread.join(_LISTENER_SECONDS)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            with suppress(Exception):  # listeners belong to the user
                event()


class Watchers:
    """The watchers of a publisher, and the news that they get. Its members' lock guards it."""

    def __init__(
        self, send: Callable[[messages.Message, bytes], None], version: int | None
    ) -> None:
        self._send = send
        self._last_seen: dict[bytes, float] = {}
        self.news = messages.News(version, 0, "idle", 0, 0.0, "", ())
        """What the publisher does; `send` adds what its replicas do."""

    def __contains__(self, id: bytes) -> bool:
        return id in self._last_seen

    @property
    def ids(self) -> list[bytes]:
        return list(self._last_seen)

    def seen(self, id: bytes) -> None:
        """Add a watcher, or note that it lives."""
        self._last_seen[id] = monotonic()

    def remove(self, id: bytes) -> None:
        self._last_seen.pop(id, None)

    def remove_silent(self, now: float, silence_seconds: float, awake_since: float) -> None:
        """Remove the watchers that were silent for long."""
        for id, last_seen in list(self._last_seen.items()):
            if now - max(last_seen, awake_since) > max(silence_seconds, _WATCHER_SECONDS):
                del self._last_seen[id]

    def send(self, members: Iterable[Member]) -> None:
        """Tell all watchers what the publisher and its replicas do."""
        if not self._last_seen:
            return
        replicas = tuple(
            messages.ReplicaNews(
                each.shown_name,
                each.hello.pid,
                each.state,
                each.version,
                each.nbytes,
                each.seconds,
                each.error,
            )
            for each in members
            if each.agreement
        )
        news = msgspec.structs.replace(self.news, replicas=replicas)
        for id in self.ids:  # one that is unreachable is removed meanwhile
            self._send(news, id)
