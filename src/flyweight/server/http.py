"""HTTP: a fleet on a port, in a thread of its own, until it is closed."""

from __future__ import annotations

import socket
import threading

import uvicorn

from flyweight.errors import SpecError, StoreError
from flyweight.server.access import is_loopback
from flyweight.server.app import make_app
from flyweight.server.fleet import Fleet

_CLOSE_SECONDS = 5
_MAX_CONNECTIONS = 256


class HttpServer:
    """Serves a fleet from the moment it is made. The fleet stays its maker's to close."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        may_be_remote: bool = False,
        store: str | None = None,
    ) -> None:
        """Bind a port, any that is free for 0; other hosts reach it only if they may."""
        if not token:
            raise SpecError("the token is empty, everybody would know it")
        if not may_be_remote and not is_loopback(host):
            raise SpecError(
                f"host {host!r} can be reached from other machines, and what is sent there can be "
                f"read on the way; say --allow-remote if that is meant"
            )
        self._fleet = fleet
        self._socket = _bound(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.address = (
            f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        )
        config = uvicorn.Config(
            make_app(fleet, token=token, host=host, store=store),
            access_log=False,
            http="h11",
            lifespan="on",
            limit_concurrency=_MAX_CONNECTIONS,
            log_config=None,
            loop="asyncio",
            server_header=False,
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="flyweight-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Answer what was asked and stop listening. Safe to repeat."""
        self._fleet.end_waits()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


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
