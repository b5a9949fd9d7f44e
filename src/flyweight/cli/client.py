"""A client of the control server, with nothing but the standard library.

The token is never sent. First the server proves that it knows the token, since another process may
have taken its port; then each request carries its own proof. Errors that the server reports are
raised here with the same type.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from math import inf
from time import monotonic
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from flyweight import errors
from flyweight.errors import PeerRefused
from flyweight.proofs import is_same, proof

DEFAULT_PORT = 8470
_MAX_ANSWER_BYTES = 64 << 20
_MAX_PROOF_BYTES = 4096
_SILENCE_SECONDS = 30.0  # the server sends something every 10 s
_NOT_A_PROOF = (
    ConnectionError, HTTPException, ValueError, RecursionError, LookupError, TypeError,
)  # fmt: skip
"""What reading a proof can raise: anything may listen at the port."""


class Client:
    """Talks to the control server at an address; `place` names where its token was found."""

    def __init__(self, address: str, token: str, place: str) -> None:
        self.address, self._token, self._place = address, token, place
        self._host, self._port = host_and_port(address)

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] | None = None,
        *,
        timeout_seconds: float = 10.0,
    ) -> Any:
        """Return the result of a route, or raise the error that it reports."""
        text = urlencode(query or {}, quote_via=quote, errors="surrogateescape")
        target = f"{path}?{text}" if text else path
        with self._request(method, target, timeout_seconds) as response:
            body = response.read(_MAX_ANSWER_BYTES)
        return self._decode(body, response.status)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the status at each change, until the server ends."""
        with self._request("GET", "/events", _SILENCE_SECONDS, is_stream=True) as response:
            if response.status != 200:
                self._decode(response.read(_MAX_ANSWER_BYTES), response.status)
            for line in response:
                if line.startswith(b"data: "):
                    yield self._decode(line.removeprefix(b"data: "), 200, is_event=True)

    @contextmanager
    def _request(
        self, method: str, target: str, timeout_seconds: float, *, is_stream: bool = False
    ) -> Iterator[HTTPResponse]:
        """Yield the response. All of it arrives in time; of a stream, each line does."""
        deadline = inf if is_stream else monotonic() + timeout_seconds
        connection = HTTPConnection(self._host, self._port, timeout=timeout_seconds)
        connection.auto_open = 0  # use the connection that was proven, never a second one
        try:
            with closing(connection), ExitStack() as stack:
                connection.connect()
                if not is_stream:  # the timeout of a socket starts again with each byte
                    left = max(deadline - monotonic(), 0.0)
                    timer = threading.Timer(left, _shut_down, [connection.sock])
                    timer.daemon = True
                    timer.start()
                    stack.callback(timer.cancel)
                nonce = self._proven_nonce(connection)
                ours = proof(self._token, "request", nonce, method, target)
                headers = {"Authorization": f"Flyweight {nonce} {ours}"}
                connection.request(method, target, None, headers)
                with connection.getresponse() as response:
                    yield response
                if monotonic() > deadline:  # the response may be cut off
                    raise TimeoutError
        except (OSError, HTTPException, UnicodeError, PeerRefused) as cause:
            if isinstance(cause, TimeoutError) or monotonic() > deadline:
                raise errors.TransferTimeout(
                    f"no answer from {self.address} within {timeout_seconds:g} s"
                ) from cause
            if isinstance(cause, PeerRefused):
                raise
            why = str(cause) or type(cause).__name__
            raise errors.PeerLost(f"no control server answers at {self.address}: {why}") from cause

    def _proven_nonce(self, connection: HTTPConnection) -> str:
        """Return the server's nonce for a request; raise PeerRefused unless it knows the token."""
        nonce, theirs, shown = secrets.token_hex(16), "", ""
        with suppress(*_NOT_A_PROOF):
            connection.request("GET", f"/challenge?nonce={nonce}")
            with connection.getresponse() as response:
                result = json.loads(response.read(_MAX_PROOF_BYTES))["result"]
            theirs, shown = str(result["nonce"]), str(result["proof"])
        if is_same(shown, proof(self._token, "server", nonce, theirs)):
            return theirs
        raise PeerRefused(
            f"{self.address} did not prove that it knows the token of {self._place}, it may be a "
            f"stranger; the token was not sent. If your server was killed, end what is at its port "
            f"and start flyweight serve again, which makes a new token; for a server with another "
            f"token say --token-file, or set FLYWEIGHT_TOKEN"
        )

    def _decode(self, body: bytes, code: int, *, is_event: bool = False) -> dict[str, Any]:
        """Return the result in a response, or an event; raise the error that it reports."""
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if isinstance(answer, dict):
            if code != 200 and "result" in answer:
                raise _error(answer, code)
            result = answer if is_event else answer.get("result")
            if isinstance(result, dict) and "replicas" in result:
                return result
        raise PeerRefused(
            f"{self.address} answers {code} with {len(body)} bytes that are not our protocol; is "
            f"it a control server?"
        )


def _shut_down(connected: socket.socket) -> None:
    with suppress(OSError):  # it may be closed already
        connected.shutdown(socket.SHUT_RDWR)


def host_and_port(address: str) -> tuple[str, int]:
    """Return the two parts of `http://HOST:PORT`."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise errors.SpecError(f"address {address!r} is not of the form 'http://HOST:PORT'")
    return parts.hostname, DEFAULT_PORT if port is None else port


def _error(answer: Mapping[str, Any], code: int) -> errors.FlyweightError:
    result = answer.get("result")
    if isinstance(result, dict) and "operation" in result:
        return errors.Busy(f"operation {result['operation']} is running; wait until it ends")
    if code in (401, 403):
        return PeerRefused(str(result))
    return errors.error_named(str(answer.get("error")), str(result))
