"""HTTP: a bound port, and the server that answers there until a signal ends it."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flyweight.errors import SpecError, StoreError
from flyweight.server.access import is_loopback
from flyweight.server.app import make_app
from flyweight.server.fleet import Fleet

MAX_CONNECTIONS = 256
REQUEST_SECONDS = 10.0
_CLOSE_SECONDS = 5


def listen(host: str = "127.0.0.1", port: int = 0, *, may_be_remote: bool = False) -> socket.socket:
    """Return a bound socket, where clients that connect wait until they are served.

    Port 0 takes a free one. A host other than loopback needs `may_be_remote`.
    """
    if not may_be_remote and not is_loopback(host):
        raise SpecError(
            f"host {host!r} can be reached from other machines, and what is sent there can be "
            f"read on the way; say --allow-remote if that is meant"
        )
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, dualstack_ipv6=is_dual)
    except OSError as cause:
        text = f"cannot listen at {host}:{port}: {cause.strerror}; choose another --port"
        raise StoreError(cause.errno, text) from cause


class HttpServer(uvicorn.Server):
    """Serves a fleet at a bound socket, until a signal arrives or `is_over` is set."""

    def __init__(
        self,
        fleet: Fleet,
        listener: socket.socket,
        is_over: threading.Event,
        *,
        host: str,
        token: str,
        store: str | None = None,
    ) -> None:
        if not token:
            raise SpecError("the token is empty; anyone could send it")
        name = f"[{host}]" if ":" in host else host
        self.address = f"http://{name}:{listener.getsockname()[1]}"
        self._fleet, self._listener, self._is_over = fleet, listener, is_over
        super().__init__(
            uvicorn.Config(
                make_app(fleet, token=token, host=host, store=store),
                access_log=False,
                http=_Connection,
                lifespan="on",
                limit_concurrency=MAX_CONNECTIONS,
                log_config=None,
                loop="asyncio",
                server_header=False,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
                ws="none",
            )
        )

    def serve_until_over(self) -> None:
        """Serve, answer the requests that are being served, and return. Closes the socket."""
        cause: BaseException | None = None
        try:
            self.run([self._listener])
        except (Exception, SystemExit) as error:  # SystemExit: uvicorn could not start
            cause = error
        if cause is not None or not self.started or not self.should_exit:
            why = "" if cause is None else f": {type(cause).__name__}: {cause}"
            text = f"the server at {self.address} ended by itself{why}"
            raise StoreError(errno.ECONNABORTED, text) from cause

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; return whether to end."""
        self.should_exit |= self._is_over.is_set()
        if self.should_exit:
            self._fleet.end_waits()  # uvicorn waits for the requests that wait for the fleet
        return await super().on_tick(counter)


class _Connection(H11Protocol):
    """A connection that ends if no whole request arrives in time, or its answer is not read.

    uvicorn has no deadline for either. At its limit of connections uvicorn refuses every request;
    here the connections that have been idle longest are closed first.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._check_later()
        self._make_room()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _make_room(self) -> None:
        """Close idle connections until uvicorn accepts the request of this one."""
        assert self.limit_concurrency is not None
        others = [each for each in self.connections if isinstance(each, _Connection)]
        idle = [each for each in others if each is not self and not each._is_busy]
        idle.sort(key=lambda each: each._idle_since)
        for each in idle[: max(len(others) - self.limit_concurrency + 1, 0)]:
            self.connections.discard(each)  # it would count until the loop reports its end
            each.transport.abort()

    def _check_later(self) -> None:
        now = self.cycle, self.transport.get_write_buffer_size()
        self._next_check = self.loop.call_later(REQUEST_SECONDS, self._check, *now)

    def _check(self, last: object, num_unsent: int) -> None:
        is_unread = 0 < num_unsent == self.transport.get_write_buffer_size()
        if is_unread or (not self._is_busy and self.cycle is last):
            self.transport.abort()  # close() would wait until everything is read
        else:
            self._check_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_check.cancel()
        super().connection_lost(exc)
