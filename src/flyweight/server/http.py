"""HTTP: a fleet on a port, in a thread of its own, until it is closed."""

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

_CLOSE_SECONDS = 5
_START_SECONDS = 20.0
_POLL_SECONDS = 0.005
_MAX_CONNECTIONS = 256
_REQUEST_SECONDS = 10.0


class Listener:
    """A port that is bound: who connects to it waits until it is served."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, may_be_remote: bool = False
    ) -> None:
        """Bind a port, any that is free for 0; other machines reach it only if they may."""
        if not may_be_remote and not is_loopback(host):
            raise SpecError(
                f"host {host!r} can be reached from other machines, and what is sent there can be "
                f"read on the way; say --allow-remote if that is meant"
            )
        self.host, self.socket = host, _bound(host, port)
        self.port: int = self.socket.getsockname()[1]

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class HttpServer:
    """Serves a fleet from the moment it is made. Fleet and listener stay their makers' to close."""

    def __init__(
        self, fleet: Fleet, listener: Listener, *, token: str, store: str | None = None
    ) -> None:
        if not token:
            raise SpecError("the token is empty, everybody would know it")
        host = f"[{listener.host}]" if ":" in listener.host else listener.host
        self.address = f"http://{host}:{listener.port}"
        self._fleet = fleet
        config = uvicorn.Config(
            make_app(fleet, token=token, host=listener.host, store=store),
            access_log=False,
            http=_Connection,
            lifespan="on",
            limit_concurrency=_MAX_CONNECTIONS,
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
        except BaseException as error:  # told by `check`, in the thread that has to know
            self._error = error

    def _wait_started(self) -> None:
        deadline = monotonic() + _START_SECONDS
        while not self._server.started:
            self.check()
            if monotonic() > deadline:
                raise StoreError(
                    errno.ETIMEDOUT,
                    f"the server at {self.address} did not start in {_START_SECONDS:g} s",
                )
            sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raise StoreError if the server has ended though nobody closed it."""
        if not self._thread.is_alive():
            cause = self._error
            why = "" if cause is None else f": {type(cause).__name__}: {cause}"
            raise StoreError(
                errno.ECONNABORTED, f"the server at {self.address} ended by itself{why}"
            ) from cause

    def close(self) -> None:
        """Answer what was asked and stop listening. Safe to repeat."""
        self._fleet.end_waits()
        self._server.should_exit = True
        self._thread.join(2 * _CLOSE_SECONDS)

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class _Connection(H11Protocol):
    """Is closed if no request comes, half of one, or nobody reads: uvicorn would wait for ever.

    Where there are too many, the one that has been silent longest makes room for the newest:
    uvicorn would refuse everybody until those go that ask for nothing.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._silent_since = self.loop.time()
        self._look_later()
        self._make_room()

    def on_response_complete(self) -> None:
        self._silent_since = self.loop.time()
        super().on_response_complete()

    @property
    def _is_at_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _make_room(self) -> None:
        """Close silent ones until this one's request will be let in, if there are any."""
        assert self.limit_concurrency is not None
        others = [each for each in self.connections if isinstance(each, _Connection)]
        silent = [each for each in others if each is not self and not each._is_at_work]
        silent.sort(key=lambda each: each._silent_since)
        for each in silent[: max(len(others) - self.limit_concurrency + 1, 0)]:
            self.connections.discard(each)  # it would count until its end was told
            each.transport.abort()

    def _look_later(self) -> None:
        now = self.cycle, self.transport.get_write_buffer_size()
        self._looking = self.loop.call_later(_REQUEST_SECONDS, self._look, *now)

    def _look(self, last: object, num_unsent: int) -> None:
        is_unread = 0 < num_unsent == self.transport.get_write_buffer_size()
        if is_unread or (not self._is_at_work and self.cycle is last):
            self.transport.abort()  # to close it would wait until all is read
        else:
            self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._looking.cancel()
        super().connection_lost(exc)


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            listener.listen()
        except BaseException:
            listener.close()
            raise
    except OSError as cause:
        raise StoreError(
            cause.errno, f"cannot listen at {host}:{port}: {cause.strerror}; choose another --port"
        ) from cause
    return listener
