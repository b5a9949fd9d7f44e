"""The app: routes, how they read requests, and which HTTP code goes with which answer.

Every answer is `{"status", "result"}`; an error adds `error`, the name of its type.
Starlette runs the routes that are no coroutines in threads, so they may wait.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from flyweight import errors
from flyweight.errors import FlyweightError, LifecycleError, error_named
from flyweight.lifecycle.states import Signal
from flyweight.server.access import AccessMiddleware, error_response, json_response
from flyweight.server.fleet import Fleet
from flyweight.server.health import described, is_healthy, is_paused
from flyweight.server.metrics import FleetMetrics
from flyweight.server.requests import (
    CONTROL_ROUTES,
    LEGACY_ROUTES,
    Answer,
    ControlRoute,
    RequestBody,
    decode,
)
from flyweight.verbs.find import versions

BODY_SECONDS = 10.0
MAX_BODY_BYTES = 64 << 10
MAX_STREAMS = 64
INTERVAL_SECONDS = 0.05
KEEPALIVE_SECONDS = 10.0
_PAGE = Path(__file__).with_name("page.html")
_CODES: dict[type[FlyweightError], int] = {
    LifecycleError: 409,
    errors.TransferTimeout: 504,
    errors.PeerLost: 503,
    errors.SpecError: 400,
    errors.DigestMismatch: 502,  # before VersionError, which it is too
    errors.VersionError: 404,
    errors.StoreError: 500,
}
_CLEARING, _UPDATING = {Signal.CLEAR}, {Signal.UPDATE, Signal.RESTORE}


def make_app(fleet: Fleet, *, token: str, host: str, store: str | None = None) -> Starlette:
    """Return the app that controls a fleet; `store` holds the versions that `/versions` lists."""
    routes = _Routes(fleet, store)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # A call that waits holds a thread; one more per replica leaves some free for the others.
        anyio.to_thread.current_default_thread_limiter().total_tokens += len(fleet.names)
        yield

    return Starlette(
        routes=[
            Route("/", _page(), methods=["GET"]),
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
        lifespan=lifespan,
    )


class _Routes:
    def __init__(self, fleet: Fleet, store: str | None) -> None:
        self._fleet, self._store = fleet, store

    def health(self, request: Request) -> Response:
        _decoded(request)
        found = self._fleet.replicas()
        is_well = all(map(is_healthy, found))
        texts = {each.name: described(each) for each in found}
        text = "; ".join(f"{name}: {text}" for name, text in texts.items())
        body = {"status": "success" if is_well else "error", "result": text, "replicas": texts}
        return json_response(200 if is_well else 503, body)

    def status(self, request: Request) -> Response:
        _decoded(request)
        return _success(self._fleet.status())

    def versions(self, request: Request) -> Response:
        _decoded(request)
        stored = [] if self._store is None else versions(self._store)
        held = {each.name: each.version for each in self._fleet.replicas()}
        return _success({"store": self._store, "versions": stored, "replicas": held})

    def metrics(self, request: Request) -> Response:
        text = generate_latest(FleetMetrics(self._fleet))
        return Response(text, 200, {"Content-Type": CONTENT_TYPE_LATEST})

    def is_paused(self, request: Request) -> Response:
        found = self._fleet.replicas(_decoded(request, ("replica",)).replica)
        states = {each.name: each.state for each in found}
        return _success({"is_paused": all(map(is_paused, found)), "replicas": states})

    async def events(self, request: Request) -> Response:
        _check_get(request)
        _decoded(request)
        if self._fleet.num_listeners >= MAX_STREAMS:
            raise HTTPException(503, f"{MAX_STREAMS} clients listen to events already")
        events = _events(self._fleet)
        # A client that leaves in a send would keep its listener until the generator is collected.
        return StreamingResponse(
            events, media_type="text/event-stream", background=BackgroundTask(events.aclose)
        )

    async def control(self, route: ControlRoute, request: Request) -> Response:
        body = _decoded(request, route.keys, await _data(request))
        return _answered(await run_in_threadpool(self._carry_out, route, body))

    def legacy_control(self, route: ControlRoute, request: Request) -> Response:
        """Answer with FastDeploy's codes: 400 if the same runs, 403 if the opposite, or 404."""
        _check_get(request)
        answers = self._carry_out(route, _decoded(request, route.keys))
        is_clear = route.request.signal in _CLEARING
        same, opposite = (_CLEARING, _UPDATING) if is_clear else (_UPDATING, _CLEARING)
        busy = [answer.signal for answer in answers if answer.ending == "busy"]
        codes = {504: 404, 503: 404}
        if busy:
            codes[409] = 400 if busy[0] in same else 403 if busy[0] in opposite else 409
        return _answered(answers, codes)

    def _carry_out(self, route: ControlRoute, body: RequestBody) -> list[Answer]:
        asked = body.filled(route.request)
        if_cleared = None if route.if_cleared is None else body.filled(route.if_cleared)
        answers = self._fleet.carry_out(body.replica, asked, if_cleared)
        return [answer.in_words_of(body) for answer in answers]


# Requests.


def _check_get(request: Request) -> None:
    """Raise for a HEAD, which Starlette routes like a GET: it would act, or never end."""
    if request.method != "GET":
        raise HTTPException(405)


def _decoded(request: Request, keys: Sequence[str] = (), data: bytes = b"") -> RequestBody:
    return decode(keys, request.query_params.multi_items(), data)


async def _data(request: Request) -> bytes:
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
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), 502)


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


async def _events(fleet: Fleet) -> AsyncGenerator[bytes, None]:
    """Yield the newest status after each change, and a comment where nothing changes for long.

    Changes in between are skipped, so nothing queues up for a slow client. The connection drops
    a client that stops reading.
    """
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # the loop has ended, and this stream with it
            loop.call_soon_threadsafe(changed.set)

    sent = -1
    with fleet.listening(notify):
        while not fleet.is_closing:
            changed.clear()
            number, status = await run_in_threadpool(fleet.latest_status)
            yield b":\n\n" if number == sent else b"event: status\ndata: %b\n\n" % status
            sent = number
            await asyncio.sleep(INTERVAL_SECONDS)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), KEEPALIVE_SECONDS)


async def _flyweight_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, FlyweightError)
    return error_response(_code(error), str(error), error=type(error).__name__)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, path = error.status_code, request.url.path
    texts = {404: f"there is no route {path!r}", 405: f"{path!r} does not take {request.method}"}
    return error_response(code, texts.get(code, error.detail), headers=error.headers)


async def _internal_error(request: Request, error: Exception) -> Response:
    """Report a bug of ours; uvicorn logs its traceback."""
    text = f"{error}: an error in flyweight itself"
    return error_response(500, text, error=type(error).__name__)


def _page() -> Response:
    """Return the page. A browser may run its own script and style only, and call our routes."""
    page = _PAGE.read_text("utf-8")

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()) for each in found)
        return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        f"connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy}
    return Response(page, 200, headers, "text/html; charset=utf-8")
