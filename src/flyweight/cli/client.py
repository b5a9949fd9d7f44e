"""Client: a control server from outside, with nothing but the standard library.

What the server tells as an error is raised here as the same error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import quote, urlsplit

from flyweight.errors import Busy, FlyweightError, PeerLost, PeerRefused, SpecError, TransferTimeout
from flyweight.sync.messages import error_named

DEFAULT_PORT = 8470
_MAX_ANSWER_BYTES = 64 << 20
_SILENCE_SECONDS = 30.0  # the server sends something every 10 s


class Client:
    """Speaks with the control server at an address."""

    def __init__(self, address: str, token: str) -> None:
        self.address, self._token = address, token
        self._host, self._port = host_and_port(address)

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        timeout_seconds: float = 10.0,
    ) -> Any:
        """Return the result that a route answers with; raise the error that it tells."""
        data = None if body is None else json.dumps(body).encode()
        with self._opened(method, path, data, timeout_seconds) as response:
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
        with self._opened("GET", "/events", None, _SILENCE_SECONDS) as response:
            if response.status != 200:
                raise _error(self._decoded(response.read(_MAX_ANSWER_BYTES), 0), response.status)
            for line in response:
                if line.startswith(b"data: "):
                    yield self._decoded(line.removeprefix(b"data: "), 200)

    @contextmanager
    def _opened(
        self, method: str, path: str, data: bytes | None, timeout_seconds: float
    ) -> Iterator[HTTPResponse]:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        try:
            connection = HTTPConnection(self._host, self._port, timeout=timeout_seconds)
            with closing(connection):
                connection.request(method, quote(path, safe="/?=&"), data, headers)
                with connection.getresponse() as response:
                    yield response
        except TimeoutError as cause:
            raise TransferTimeout(
                f"no answer from {self.address} within {timeout_seconds:g} s"
            ) from cause
        except (OSError, HTTPException, UnicodeError) as cause:
            raise PeerLost(f"no control server answers at {self.address}: {cause}") from cause

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
