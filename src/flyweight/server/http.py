"""HTTP: serves a fleet on a port, in a thread of its own, until it is closed."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from time import monotonic, sleep

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from flyweight.errors import SpecError, StoreError
from flyweight.server.access import is_loopback
from flyweight.server.app import make_app
from flyweight.server.fleet import Fleet

MAX_CONNECTIONS = 256
REQUEST_SECONDS = 10.0
_START_SECONDS = 20.0
_CLOSE_SECONDS = 5
_POLL_SECONDS = 0.005


class Listener:
    """A bound port; clients that connect wait until it is served."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, may_be_remote: bool = False
    ) -> None:
        """Bind a port; 0 takes a free one. A host other than loopback needs `may_be_remote`."""
        if not may_be_remote and not is_loopback(host):
            raise SpecError(
                f"host {host!r} can be reached from other machines, and what is sent there can be "
                f"read on the way; say --allow-remote if that is meant"
            )
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            self.socket = socket.create_server(address, family=family, dualstack_ipv6=is_dual)
        except OSError as cause:
            text = f"cannot listen at {host}:{port}: {cause.strerror}; choose another --port"
            raise StoreError(cause.errno, text) from cause
        self.host, self.port = host, int(self.socket.getsockname()[1])

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class HttpServer:
    """Serves a fleet as soon as it is made. The caller closes the fleet and the listener."""

    def __init__(
        self, fleet: Fleet, listener: Listener, *, token: str, store: str | None = None
    ) -> None:
        if not token:
            raise SpecError("the token is empty; anyone could send it")
        host = f"[{listener.host}]" if ":" in listener.host else listener.host
        self.address = f"http://{host}:{listener.port}"
        self._fleet = fleet
        config = uvicorn.Config(
            make_app(fleet, token=token, host=listener.host, store=store),
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
        self._server = uvicorn.Server(config)
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(listener.socket,), name="flyweight-http", daemon=True
        )
        self._thread.start()
        try:
            self._wait_started()
        except BaseException:
            self.close()
            raise

    def _run(self, listener: socket.socket) -> None:
        try:
            self._server.run([listener])
        except BaseException as error:  # raised by `check`, in the caller's thread
            self._error = error

    def _wait_started(self) -> None:
        deadline = monotonic() + _START_SECONDS
        while not self._server.started:
            self.check()
            if monotonic() > deadline:
                text = f"the server at {self.address} did not start in {_START_SECONDS:g} s"
                raise StoreError(errno.ETIMEDOUT, text)
            sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raise StoreError if the server has ended without being closed."""
        if not self._thread.is_alive():
            cause = self._error
            why = "" if cause is None else f": {type(cause).__name__}: {cause}"
            text = f"the server at {self.address} ended by itself{why}"
            raise StoreError(errno.ECONNABORTED, text) from cause

    def close(self) -> None:
        """Answer the requests that are being served and stop. Safe to repeat."""
        self._fleet.end_waits()
        self._server.should_exit = True
        self._thread.join(2 * _CLOSE_SECONDS)

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


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
