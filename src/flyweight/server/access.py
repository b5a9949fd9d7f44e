"""Access: who may speak with the server. A token, our own host names, our own pages.

A page of another site that a user has open can send requests to loopback, also under a
name that it made lead there; so the names we answer to are listed, and an Origin other
than ours is refused before anything else is looked at.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Collection
from http import HTTPStatus
from ipaddress import ip_address

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = ("/", "/health")
"""What needs no token: the page, which is the same for everyone, and whether all is well."""
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


def json_response(code: int, body: object, **headers: str) -> Response:
    return Response(msgspec.json.encode(body), code, headers, "application/json")


def error_response(code: int, error: str, text: str, **headers: str) -> Response:
    return json_response(code, {"status": "error", "error": error, "result": text}, **headers)


def status_name(code: int) -> str:
    """Return what errors of HTTP itself are called, as MethodNotAllowed."""
    return HTTPStatus(code).phrase.title().replace(" ", "")


class Gate:
    """Lets requests through to an app that come to our name, from our page, with the token."""

    def __init__(self, app: ASGIApp, *, token: str, host: str) -> None:
        self._app, self._token = app, token.encode()
        self._is_wild = host in ("0.0.0.0", "::")  # noqa: S104  (compared, not bound)
        self._names: Collection[str] = {"localhost", host.lower()}
        if self._is_wild:
            self._names |= {socket.gethostname().lower()}

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

        refusal = self._refusal(scope["path"], Headers(scope=scope))
        await (self._app if refusal is None else refusal)(scope, receive, send_with_headers)

    def _refusal(self, path: str, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        if not self._is_ours(host):
            return error_response(
                403, "Forbidden", f"host {host!r} is not a name of this server; use its address"
            )
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return error_response(
                403, "Forbidden", f"origin {origin!r} is another site than 'http://{host}'"
            )
        if path in OPEN_PATHS:
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # Compared as bytes: text outside of ASCII cannot be, and may come from anybody.
        is_right = hmac.compare_digest(token.strip().encode(), self._token)
        if scheme.lower() == "bearer" and is_right:
            return None
        what = "the token is another" if scheme else "there is no token"
        return error_response(
            401,
            "Unauthorized",
            f"{what}; send 'Authorization: Bearer TOKEN' with the one that the server wrote",
            **{"WWW-Authenticate": "Bearer"},
        )

    def _is_ours(self, host: str) -> bool:
        """True for loopback, for the host that is bound, and for any address if all are."""
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name.lower() in self._names or is_loopback(name):
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return self._is_wild  # an address cannot be a name that somebody made lead here
