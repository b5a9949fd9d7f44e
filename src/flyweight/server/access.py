"""Access: which requests the server answers. They need the token, our host name, and our origin.

A client sends the token (the page, metric scrapes), or proves that it knows it (our commands,
after the server has proven the same), so a stranger who listens on our port learns nothing.

A page of another site that is open in the user's browser can send requests to loopback, even
under a host name that it resolves to loopback. So the server lists the names it answers to, and
refuses other hosts and other origins before it looks at the token.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Mapping
from http import HTTPStatus
from ipaddress import ip_address

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flyweight.proofs import is_same, proof

OPEN_PATHS = ("/", "/health")
"""Need no token: the page, which is the same for everyone, and the health check."""
_CHALLENGE_PATH = "/challenge"
_MAX_NONCES = 4096
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def json_response(code: int, body: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), code, headers, "application/json")


def error_response(
    code: int, text: str, *, error: str = "", headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error, named after the HTTP code (MethodNotAllowed) if it has no other name."""
    name = error or HTTPStatus(code).phrase.title().replace(" ", "")
    return json_response(code, {"status": "error", "error": name, "result": text}, headers)


class AccessMiddleware:
    """Passes a request on to the app if its host, its origin and its token are ours."""

    def __init__(self, app: ASGIApp, *, token: str, host: str) -> None:
        self._app, self._token = app, token
        self._nonces: dict[str, None] = {}
        """Nonces that were given out and not used, oldest first. Only the event loop uses it."""
        self._is_any_host = host in ("0.0.0.0", "::")  # noqa: S104  (compared, not bound)
        self._names = {"localhost", host.lower()}
        if self._is_any_host:
            self._names.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._answer(scope, Headers(scope=scope))
        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _answer(self, scope: Scope, headers: Headers) -> Response | None:
        """Return a refusal or a proof, or None to pass the request on to the app."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_our_host(host):
            text = f"host {host!r} is not a name of this server; use its address"
            return error_response(403, text)
        if origin not in (None, f"http://{host}"):
            return error_response(403, f"origin {origin!r} is another site than 'http://{host}'")
        if scope["path"] == _CHALLENGE_PATH:
            return self._challenge(scope)
        if scope["path"] in OPEN_PATHS:
            return None
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and is_same(shown.strip(), self._token):
            return None
        if scheme.lower() == "flyweight" and self._is_proven(shown, scope, headers):
            return None
        what = "the token is another one" if scheme else "the request has no token"
        text = f"{what}; send 'Authorization: Bearer TOKEN' with the token that the server wrote"
        return error_response(401, text, headers={"WWW-Authenticate": "Bearer"})

    def _challenge(self, scope: Scope) -> Response:
        """Prove to a client that this server knows the token; give it a nonce for one request."""
        if scope["method"] != "GET":
            return error_response(405, f"{_CHALLENGE_PATH!r} does not take {scope['method']}")
        query = scope["query_string"].decode("latin-1")
        found = re.fullmatch(r"nonce=([0-9a-f]{32})", query)
        if found is None:
            text = f"the query is {query[:80]!r}, expected 'nonce=' and 32 hexadecimal digits"
            return error_response(400, text, error="SpecError")
        nonce = secrets.token_hex(16)
        self._nonces[nonce] = None
        if len(self._nonces) > _MAX_NONCES:
            del self._nonces[next(iter(self._nonces))]
        shown = proof(self._token, "server", found[1], nonce)
        return json_response(200, {"status": "success", "result": {"nonce": nonce, "proof": shown}})

    def _is_proven(self, shown: str, scope: Scope, headers: Headers) -> bool:
        """True for a proof of the token and of this request, which has no body. Each nonce once."""
        nonce, _, mac = shown.partition(" ")
        if nonce not in self._nonces:
            return False
        del self._nonces[nonce]
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        query = scope["query_string"].decode("latin-1")
        target = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        expected = proof(self._token, "request", nonce, scope["method"], target)
        return is_same(mac, expected) and not has_body

    def _is_our_host(self, host: str) -> bool:
        """True for loopback, for the bound host, and for any IP address if all are bound."""
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name.lower() in self._names or is_loopback(name):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return self._is_any_host  # nobody can make a DNS name of their own out of an IP address
