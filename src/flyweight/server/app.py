"""The app: routes, how they read requests, and which HTTP code goes with which answer.

Every answer is `{"status", "result"}`; an error adds `error`, the name of its type.
Whatever waits runs in a thread; the event loop only reads and writes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from flyweight.errors import (
    DigestMismatch,
    FlyweightError,
    LifecycleError,
    PeerLost,
    SpecError,
    StoreError,
    TransferTimeout,
    VersionError,
    error_named,
)
from flyweight.lifecycle.states import Signal
from flyweight.server.access import AccessMiddleware, error_response, json_response, status_name
from flyweight.server.fleet import Fleet
from flyweight.server.health import described, is_healthy, is_paused
from flyweight.server.metrics import CONTENT_TYPE, FleetMetrics
from flyweight.server.requests import (
    CONTROL_ROUTES,
    LEGACY_ROUTES,
    Answer,
    ControlRoute,
    RequestBody,
    decode,
)
from flyweight.server.stream import event_stream
from flyweight.verbs.find import versions

BODY_SECONDS = 10.0
MAX_BODY_BYTES = 64 << 10
MAX_STREAMS = 64
_PAGE = Path(__file__).with_name("page.html")
_CODES: tuple[tuple[type[FlyweightError], int], ...] = (
    (LifecycleError, 409),
    (TransferTimeout, 504),
    (PeerLost, 503),
    (SpecError, 400),
    (DigestMismatch, 502),
    (VersionError, 404),
    (StoreError, 500),
)


def make_app(fleet: Fleet, *, token: str, host: str, store: str | None = None) -> Starlette:
    """Return the app that controls a fleet; `store` holds the versions that `/versions` lists."""
    routes = _Routes(fleet, store)
    return Starlette(
        routes=[
            Route("/", routes.page),
            Route("/health", routes.health),
            Route("/status", routes.status),
            Route("/versions", routes.versions),
            Route("/metrics", routes.metrics),
            Route("/events", routes.events),
            Route("/v1/is_paused", routes.is_paused),
            *(
                Route(path, partial(routes.control, each), methods=["POST"])
                for path, each in CONTROL_ROUTES.items()
            ),
            *(
                Route(path, partial(routes.legacy_control, each), methods=["GET"])
                for path, each in LEGACY_ROUTES.items()
            ),
        ],
        middleware=[Middleware(AccessMiddleware, token=token, host=host)],
        exception_handlers={
            FlyweightError: _flyweight_error,
            HTTPException: _http_error,
            Exception: _internal_error,
        },
        lifespan=routes.lifespan,
    )


class _Routes:
    def __init__(self, fleet: Fleet, store: str | None) -> None:
        self._fleet, self._store = fleet, store
        self._metrics = FleetMetrics(fleet)
        self._page = _PAGE.read_bytes()
        self._policy = _content_security_policy(self._page.decode())

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        # A call that waits holds a thread; one more per replica leaves some free for the others.
        limiter = anyio.to_thread.current_default_thread_limiter()
        limiter.total_tokens += len(self._fleet.names)
        yield

    async def page(self, request: Request) -> Response:
        headers = {"Content-Security-Policy": self._policy}
        return Response(self._page, 200, headers, "text/html; charset=utf-8")

    async def health(self, request: Request) -> Response:
        await _decoded(request)
        found = await run_in_threadpool(self._fleet.replicas)
        is_well = all(map(is_healthy, found))
        texts = {each.name: described(each) for each in found}
        text = "; ".join(f"{name}: {text}" for name, text in texts.items())
        body = {"status": "success" if is_well else "error", "result": text, "replicas": texts}
        return json_response(200 if is_well else 503, body)

    async def status(self, request: Request) -> Response:
        await _decoded(request)
        return _success(await run_in_threadpool(self._fleet.status))

    async def versions(self, request: Request) -> Response:
        await _decoded(request)
        store = self._store
        stored = [] if store is None else await run_in_threadpool(versions, store)
        found = await run_in_threadpool(self._fleet.replicas)
        held = {each.name: each.version for each in found}
        return _success({"store": store, "versions": stored, "replicas": held})

    async def metrics(self, request: Request) -> Response:
        text = await run_in_threadpool(self._metrics.text)
        return Response(text, 200, {"Content-Type": CONTENT_TYPE})

    async def is_paused(self, request: Request) -> Response:
        body = await _decoded(request, "replica")
        found = await run_in_threadpool(self._fleet.replicas, body.replica)
        states = {each.name: each.state for each in found}
        return _success({"is_paused": all(map(is_paused, found)), "replicas": states})

    async def control(self, route: ControlRoute, request: Request) -> Response:
        return _answered(await self._carry_out(route, request))

    async def legacy_control(self, route: ControlRoute, request: Request) -> Response:
        """Answer with FastDeploy's codes: 400 if the same runs, 403 if the opposite, or 404."""
        _check_get(request)
        answers = await self._carry_out(route, request)
        clearing, updating = {Signal.CLEAR}, {Signal.UPDATE, Signal.RESTORE}
        is_clear = route.request.signal in clearing
        same, opposite = (clearing, updating) if is_clear else (updating, clearing)
        busy = [answer.signal for answer in answers if answer.ending == "busy"]
        codes = {504: 404, 503: 404}
        if busy:
            codes[409] = 400 if busy[0] in same else 403 if busy[0] in opposite else 409
        return _answered(answers, codes)

    async def _carry_out(self, route: ControlRoute, request: Request) -> list[Answer]:
        body = await _decoded(request, *route.keys)
        asked = body.filled(route.request)
        if_cleared = None if route.if_cleared is None else body.filled(route.if_cleared)
        answers = await run_in_threadpool(self._fleet.carry_out, body.replica, asked, if_cleared)
        return [answer.in_words_of(body) for answer in answers]

    async def events(self, request: Request) -> Response:
        _check_get(request)
        await _decoded(request)
        if self._fleet.num_listeners >= MAX_STREAMS:
            raise HTTPException(503, f"{MAX_STREAMS} clients listen to events already")
        return event_stream(self._fleet)


# Requests.


def _check_get(request: Request) -> None:
    """Raise for a HEAD, which Starlette routes like a GET: it would act, or never end."""
    if request.method != "GET":
        raise HTTPException(405)


async def _decoded(request: Request, *keys: str) -> RequestBody:
    data = await _body(request) if request.method == "POST" else b""
    return decode(keys, request.query_params.multi_items(), data)


async def _body(request: Request) -> bytes:
    """Return the body of a request; raise if it is too large, or does not arrive in time."""
    data = bytearray()
    try:
        with anyio.fail_after(BODY_SECONDS):
            async for chunk in request.stream():
                data += chunk
                if len(data) > MAX_BODY_BYTES:
                    # Not closed here: a client that is still sending would see a reset, no answer.
                    raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    except TimeoutError as cause:
        text = f"the body did not arrive within {BODY_SECONDS:g} s"
        raise HTTPException(408, text, {"Connection": "close"}) from cause
    except ClientDisconnect as cause:
        raise HTTPException(400, f"the body ended after {len(data)} bytes") from cause
    return bytes(data)


# Answers.


def _success(result: object) -> Response:
    return json_response(200, {"status": "success", "result": result})


def _code(error: FlyweightError) -> int:
    return next((code for kind, code in _CODES if isinstance(error, kind)), 502)


def _answered(answers: Sequence[Answer], codes: Mapping[int, int] | None = None) -> Response:
    """Return the answers of replicas as one: a success only if all of them are done."""
    wrong = [answer for answer in answers if answer.ending != "done"]
    if not wrong:
        return _success({"replicas": answers})
    first = wrong[0]
    error = error_named(first.error, first.reason)
    code = _code(error)
    body: dict[str, Any] = {"status": "error", "error": first.error, "replicas": answers}
    if first.ending == "busy":
        body |= {"status": "busy", "result": {"operation": first.operation}}
    else:
        status = "refused" if isinstance(error, LifecycleError) else "error"
        text = "; ".join(f"{each.replica}: {each.reason}" for each in wrong)
        body |= {"status": status, "result": text}
    return json_response(code if codes is None else codes.get(code, code), body)


async def _flyweight_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, FlyweightError)
    return error_response(_code(error), type(error).__name__, str(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, path = error.status_code, request.url.path
    texts = {404: f"there is no route {path!r}", 405: f"{path!r} does not take {request.method}"}
    text = texts.get(code, error.detail)
    return error_response(code, status_name(code), text, **(error.headers or {}))


async def _internal_error(request: Request, error: Exception) -> Response:
    """Report a bug of ours; uvicorn logs its traceback."""
    return error_response(500, type(error).__name__, f"{error}: an error in flyweight itself")


def _content_security_policy(page: str) -> str:
    """Return what a browser may run and load: the page's own script and style, and our routes."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()) for each in found)
        return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        f"connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'"
    )
