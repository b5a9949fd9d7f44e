"""The app: routes, what they take, and which code goes with which answer.

Every answer is `{"status", "result"}`; an error adds `error`, the name of its kind.
Handlers that wait do so in threads; the event loop only reads and writes.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
import msgspec
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
from flyweight.server import access, orders
from flyweight.server.course import Answer, Course
from flyweight.server.fleet import Fleet
from flyweight.server.metrics import CONTENT_TYPE, FleetMetrics
from flyweight.server.orders import (
    NoOptions,
    Options,
    ReplicaOptions,
    SleepOptions,
    UpdateOptions,
    WakeupOptions,
)
from flyweight.server.standing import is_still, is_well, words
from flyweight.server.stream import EventStream
from flyweight.verbs.find import versions

MAX_BODY_BYTES = 64 << 10
MAX_STREAMS = 64
_BODY_SECONDS = 10.0
_PAGE = Path(__file__).with_name("page.html")

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


def make_app(fleet: Fleet, *, token: str, host: str, store: str | None = None) -> Starlette:
    """Return the app that controls a fleet; `store` is where versions rest."""
    routes = _Routes(fleet, store)
    control: Mapping[str, tuple[type[Any], Callable[[Any], Course]]] = {
        "/v1/pause": (Options, orders.pause),
        "/v1/resume": (Options, orders.resume),
        "/v1/sleep": (SleepOptions, orders.sleep),
        "/v1/wakeup": (WakeupOptions, orders.wakeup),
        "/v1/update_weights": (UpdateOptions, orders.update),
        "/v1/abort_requests": (Options, orders.abort),
    }
    old: Mapping[str, tuple[Callable[[Any], Course], tuple[Signal, ...]]] = {
        "/clear_load_weight": (orders.clear_load_weight, (Signal.CLEAR,)),
        "/update_model_weight": (orders.update_model_weight, (Signal.UPDATE, Signal.RESTORE)),
    }
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
                Route(path, partial(routes.control, kind, plan), methods=["POST"])
                for path, (kind, plan) in control.items()
            ),
            *(
                Route(path, partial(routes.old_control, plan, same), methods=["GET"])
                for path, (plan, same) in old.items()
            ),
        ],
        middleware=[Middleware(access.Gate, token=token, host=host)],
        exception_handlers={
            FlyweightError: _flyweight_error,
            HTTPException: _http_error,
            Exception: _fault,
        },
        lifespan=routes.lifespan,
    )


class _Routes:
    """What the routes do."""

    def __init__(self, fleet: Fleet, store: str | None) -> None:
        self._fleet, self._store = fleet, store
        self._metrics = FleetMetrics(fleet)
        self._page = _PAGE.read_bytes()
        self._policy = _policy(self._page.decode())
        self._num_streams = 0

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        # A call that waits keeps a thread; with one for each replica the others find one free.
        limiter = anyio.to_thread.current_default_thread_limiter()
        limiter.total_tokens += len(self._fleet.names)
        yield

    async def page(self, request: Request) -> Response:
        headers = {"Content-Security-Policy": self._policy}
        return Response(self._page, 200, headers, "text/html; charset=utf-8")

    async def health(self, request: Request) -> Response:
        await _options(request, NoOptions)
        found = await run_in_threadpool(self._fleet.replicas)
        is_fine = all(map(is_well, found))
        told = {each.name: words(each) for each in found}
        text = "; ".join(f"{name}: {text}" for name, text in told.items())
        body = {"status": "success" if is_fine else "error", "result": text, "replicas": told}
        return access.json_response(200 if is_fine else 503, body)

    async def status(self, request: Request) -> Response:
        await _options(request, NoOptions)
        return _success(await run_in_threadpool(self._fleet.status))

    async def versions(self, request: Request) -> Response:
        await _options(request, NoOptions)
        store = self._store
        at_rest = [] if store is None else await run_in_threadpool(versions, store)
        found = await run_in_threadpool(self._fleet.replicas)
        held = {each.name: each.version for each in found}
        return _success({"store": store, "versions": at_rest, "replicas": held})

    async def metrics(self, request: Request) -> Response:
        text = await run_in_threadpool(self._metrics.text)
        return Response(text, 200, {"Content-Type": CONTENT_TYPE})

    async def is_paused(self, request: Request) -> Response:
        options = await _options(request, ReplicaOptions)
        found = await run_in_threadpool(self._fleet.replicas, options.replica)
        states = {each.name: each.state for each in found}
        return _success({"is_paused": all(map(is_still, found)), "replicas": states})

    async def control(
        self, kind: type[Options], plan: Callable[[Any], Course], request: Request
    ) -> Response:
        options = await _options(request, kind)
        answers = await run_in_threadpool(self._fleet.carry_out, options.replica, plan(options))
        return _answered(answers)

    async def old_control(
        self, plan: Callable[[Options], Course], same: tuple[Signal, ...], request: Request
    ) -> Response:
        """Answer with the codes of old: 400 and 403 for what runs already, 404 for no answer."""
        _check_get(request)
        options = await _options(request, Options)
        answers = await run_in_threadpool(self._fleet.carry_out, options.replica, plan(options))
        opposite = {Signal.CLEAR, Signal.UPDATE, Signal.RESTORE} - set(same)
        busy = [answer.signal for answer in answers if answer.ending == "busy"]
        codes = {504: 404, 503: 404}
        if busy:
            codes[409] = 400 if busy[0] in same else 403 if busy[0] in opposite else 409
        return _answered(answers, codes)

    async def events(self, request: Request) -> Response:
        _check_get(request)
        await _options(request, NoOptions)
        if self._num_streams >= MAX_STREAMS:
            raise HTTPException(503, f"{MAX_STREAMS} clients listen to events already")
        return EventStream(self._fleet, self._count_streams)

    def _count_streams(self, change: int) -> None:
        self._num_streams += change


# What comes in.


def _check_get(request: Request) -> None:
    """Raise for a HEAD, which comes along with every GET: it would act, or never end."""
    if request.method != "GET":
        raise HTTPException(405)


async def _options(request: Request, kind: type[OptionsT]) -> OptionsT:
    """Return what a request asks for, by its query or as JSON; unknown names are errors."""
    query: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in query:
            raise SpecError(f"{name!r} is in the query twice")
        is_number = name == "version" and value.isascii() and value.isdigit()
        query[name] = value.split(",") if name == "tags" else int(value) if is_number else value
    body: dict[str, Any] = {}
    if request.method == "POST" and (data := await _body(request)):
        body = _decoded(data)
    both = body.keys() & query.keys()
    if both:
        raise SpecError(f"{sorted(both)[0]!r} is in the query and in the body")
    try:
        told = msgspec.convert(body, kind)
        asked = msgspec.convert(query, kind, strict=False)
    except msgspec.ValidationError as cause:
        names = ", ".join(kind.__struct_fields__) or "nothing"
        raise SpecError(f"{_lowered(str(cause))}; this route takes {names}") from cause
    return msgspec.structs.replace(told, **{name: getattr(asked, name) for name in query})


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise SpecError(
            f"the body's {len(data)} bytes are no JSON object: {_lowered(str(cause))}"
        ) from cause
    return found


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


async def _body(request: Request) -> bytes:
    """Return a request's body; raise for one that is too large, or does not come."""
    try:
        return await asyncio.wait_for(_read(request), _BODY_SECONDS)
    except asyncio.TimeoutError as cause:
        raise HTTPException(
            408, f"the body did not come within {_BODY_SECONDS:g} s", {"Connection": "close"}
        ) from cause


async def _read(request: Request) -> bytes:
    data = bytearray()
    try:
        async for chunk in request.stream():
            data += chunk
            if len(data) > MAX_BODY_BYTES:
                # The connection stays open: who still sends would see it reset, and no answer.
                raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    except ClientDisconnect as cause:
        raise HTTPException(400, f"the body ended after {len(data)} bytes") from cause
    return bytes(data)


# What goes out.


def _success(result: object) -> Response:
    return access.json_response(200, {"status": "success", "result": result})


def _code(error: FlyweightError) -> int:
    kinds: tuple[tuple[type[FlyweightError], int], ...] = (
        (LifecycleError, 409),
        (TransferTimeout, 504),
        (PeerLost, 503),
        (SpecError, 400),
        (DigestMismatch, 502),
        (VersionError, 404),
        (StoreError, 500),
    )
    return next((code for kind, code in kinds if isinstance(error, kind)), 502)


def _answered(answers: Sequence[Answer], codes: Mapping[int, int] | None = None) -> Response:
    """Tell how replicas answered: well only if all of them did."""
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
    return access.json_response(code if codes is None else codes.get(code, code), body)


async def _flyweight_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, FlyweightError)
    return access.error_response(_code(error), type(error).__name__, str(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {
        404: f"there is no {request.url.path!r} here",
        405: f"{request.url.path!r} does not take {request.method}",
    }
    text = texts.get(error.status_code, error.detail)
    return access.error_response(
        error.status_code, access.status_name(error.status_code), text, **(error.headers or {})
    )


async def _fault(request: Request, error: Exception) -> Response:
    """Tell of a fault of ours; who serves the app logs its traceback."""
    text = f"{error}: a fault in flyweight itself"
    return access.error_response(500, type(error).__name__, text)


def _policy(page: str) -> str:
    """Return what a browser may run and load of the page: what is in it, and our own routes."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(each.encode()).digest()) for each in found)
        return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; "
        f"connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'"
    )
