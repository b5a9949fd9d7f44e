"""Client: a control server from outside, with nothing but the standard library.

The token is never sent. The server first proves that it knows it, since a stranger may have
its port; then each request is proven, by itself, to come from someone who knows it too. What
the server tells as an error is raised here as the same error.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from math import inf
from time import monotonic
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from flyweight.errors import (
    Busy,
    FlyweightError,
    PeerLost,
    PeerRefused,
    SpecError,
    TransferTimeout,
    error_named,
)
from flyweight.proofs import is_same, proof

DEFAULT_PORT = 8470
_MAX_ANSWER_BYTES = 64 << 20
_MAX_PROOF_BYTES = 4096
_SILENCE_SECONDS = 30.0  # the server sends something every 10 s


class Client:
    """Speaks with the control server at an address; `place` is where its token was found."""

    def __init__(self, address: str, token: str, place: str) -> None:
        self.address, self._token, self._place = address, token, place
        self._host, self._port = host_and_port(address)

    def call(
        self,
        method: str,
        path: str,
        options: Mapping[str, object] | None = None,
        *,
        timeout_seconds: float = 10.0,
    ) -> Any:
        """Return the result that a route answers with in time; raise the error that it tells."""
        query = urlencode(options or {}, quote_via=quote, errors="surrogateescape")
        target = f"{path}?{query}" if query else path
        with self._opened(method, target, timeout_seconds) as response:
            text = response.read(_MAX_ANSWER_BYTES)
        told = self._decoded(text, response.status)
        if response.status != 200:
            raise _error(told, response.status)
        result = told.get("result")
        if not isinstance(result, dict) or "replicas" not in result:
            raise self._refusal(text, response.status)
        return result

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield how things stand, at each change, until the server ends."""
        with self._opened("GET", "/events", _SILENCE_SECONDS, is_stream=True) as response:
            if response.status != 200:
                raise _error(self._decoded(response.read(_MAX_ANSWER_BYTES), 0), response.status)
            for line in response:
                if line.startswith(b"data: "):
                    yield self._decoded(line.removeprefix(b"data: "), 200)

    @contextmanager
    def _opened(
        self, method: str, target: str, timeout_seconds: float, *, is_stream: bool = False
    ) -> Iterator[HTTPResponse]:
        """Ask, and yield the answer: all of it comes in time, of a stream each part of it."""
        deadline = inf if is_stream else monotonic() + timeout_seconds
        connection = HTTPConnection(self._host, self._port, timeout=timeout_seconds)
        connection.auto_open = 0  # the one that was proven is spoken with, or none
        try:
            with closing(connection):
                connection.connect()
                with _cut_at(deadline, connection.sock):
                    nonce = self._proven(connection)
                    shown = proof(self._token, "request", nonce, method, target)
                    headers = {"Authorization": f"Flyweight {nonce} {shown}"}
                    connection.request(method, target, None, headers)
                    with connection.getresponse() as response:
                        yield response
                if monotonic() > deadline:  # what was read may be half of it
                    raise TimeoutError
        except (OSError, HTTPException, UnicodeError, PeerRefused) as cause:
            if isinstance(cause, TimeoutError) or monotonic() > deadline:
                raise TransferTimeout(
                    f"no answer from {self.address} within {timeout_seconds:g} s"
                ) from cause
            if isinstance(cause, PeerRefused):
                raise
            why = str(cause) or type(cause).__name__
            raise PeerLost(f"no control server answers at {self.address}: {why}") from cause

    def _proven(self, connection: HTTPConnection) -> str:
        """Return the server's nonce for a request; raise PeerRefused unless it knows the token."""
        nonce, theirs, shown = secrets.token_hex(16), "", ""
        is_unlike = (
            ConnectionError,
            HTTPException,
            ValueError,
            RecursionError,
            LookupError,
            TypeError,
        )
        with suppress(*is_unlike):  # anything may be there
            connection.request("GET", f"/challenge?nonce={nonce}")
            with connection.getresponse() as response:
                told = json.loads(response.read(_MAX_PROOF_BYTES))["result"]
            theirs, shown = str(told["nonce"]), str(told["proof"])
        if is_same(shown, proof(self._token, "server", nonce, theirs)):
            return theirs
        raise PeerRefused(
            f"{self.address} did not prove that it knows the token of {self._place}, it may be a "
            f"stranger; the token was not sent. If your server was killed, end what is at its port "
            f"and start flyweight serve again, which makes a new token; for a server with another "
            f"token say --token-file, or set FLYWEIGHT_TOKEN"
        )

    def _decoded(self, text: bytes, code: int) -> dict[str, Any]:
        try:
            told = json.loads(text)
        except (ValueError, RecursionError):
            told = None
        is_ours = isinstance(told, dict) and ("result" in told or "replicas" in told)
        if not is_ours or not isinstance(told, dict):
            raise self._refusal(text, code)
        return told

    def _refusal(self, text: bytes, code: int) -> PeerRefused:
        return PeerRefused(
            f"{self.address} answers {code} with {len(text)} bytes that are not of our kind; is it "
            f"a control server?"
        )


@contextmanager
def _cut_at(deadline: float, line: socket.socket) -> Iterator[None]:
    """End what waits for a socket when time is over: each byte would be waited for anew."""

    def cut() -> None:
        with suppress(OSError):  # it may be closed already
            line.shutdown(socket.SHUT_RDWR)

    if deadline == inf:
        yield
        return
    timer = threading.Timer(max(deadline - monotonic(), 0.0), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def host_and_port(address: str) -> tuple[str, int]:
    """Return the two parts of `http://HOST:PORT`."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise SpecError(f"address {address!r} is not of the form 'http://HOST:PORT'")
    return parts.hostname, DEFAULT_PORT if port is None else port


def _error(told: Mapping[str, Any], code: int) -> FlyweightError:
    result = told.get("result")
    if isinstance(result, dict) and "operation" in result:
        return Busy(f"operation {result['operation']} is running; wait until it ends")
    if code in (401, 403):
        return PeerRefused(str(result))
    return error_named(str(told.get("error")), str(result))
