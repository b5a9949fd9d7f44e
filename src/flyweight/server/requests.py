"""Requests: what each control route takes, and what a replica answers.

A route starts from a `Request`, and the JSON body (or the query) fills in the fields that the
route lets a caller choose. That object goes unchanged through the fleet into `Control.start`,
which numbers it and writes it into the status cell, where the ranks read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from flyweight.checks import one_of
from flyweight.errors import SpecError
from flyweight.formats.snapshot import number_in
from flyweight.lifecycle.cell import Request
from flyweight.lifecycle.states import Signal, Tag, tags_named

_MAX_SECONDS = 86_400.0
_MAX_VERSION_TEXT = 200
_EVERYTHING = tuple(Tag)
_request = partial(Request, number=0)  # Control.start sets the number


class ControlRoute(NamedTuple):
    """A route that changes something: the request it sends, and the keys that it takes."""

    request: Request
    keys: tuple[str, ...] = ("replica", "timeout")
    if_cleared: Request | None = None
    """Sent instead to a replica whose weights or KV cache are cleared."""


CONTROL_ROUTES: Mapping[str, ControlRoute] = {
    "/v1/pause": ControlRoute(_request(signal=Signal.PAUSE)),
    "/v1/resume": ControlRoute(_request(signal=Signal.RESUME)),
    "/v1/sleep": ControlRoute(
        _request(signal=Signal.CLEAR, tags=_EVERYTHING),
        ("replica", "timeout", "when_serving", "tags"),
    ),
    "/v1/wakeup": ControlRoute(
        _request(signal=Signal.RESTORE, tags=_EVERYTHING), ("replica", "timeout", "tags")
    ),
    "/v1/update_weights": ControlRoute(
        _request(signal=Signal.UPDATE),
        ("replica", "timeout", "when_serving", "version", "verify_checksum"),
    ),
    # One operation, so that no server has to stay alive for the resume.
    "/v1/abort_requests": ControlRoute(
        _request(signal=Signal.PAUSE, should_abort=True, should_resume=True)
    ),
}
LEGACY_ROUTES: Mapping[str, ControlRoute] = {
    "/clear_load_weight": ControlRoute(_request(signal=Signal.CLEAR, tags=_EVERYTHING)),
    "/update_model_weight": ControlRoute(
        _request(signal=Signal.UPDATE, should_resume=True),
        if_cleared=_request(signal=Signal.RESTORE, tags=_EVERYTHING, should_resume=True),
    ),
}
"""FastDeploy's routes: clear everything, and serve again whatever was cleared before."""


class WhenServing(str, Enum):
    """What to do while inference requests run: wait until they end, or refuse the call."""

    DRAIN = "drain"
    REFUSE = "refuse"


class RequestBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller may choose, under the names of the HTTP interface."""

    replica: str | None = None
    """The replica's name; None means all of them."""
    timeout: Annotated[float, msgspec.Meta(gt=0, le=_MAX_SECONDS)] = 60.0
    """Seconds until the operation ends at the latest."""
    when_serving: str = WhenServing.DRAIN.value
    tags: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ()
    """What to clear or restore; empty, which no caller can send, means all of it."""
    version: (
        Annotated[int, msgspec.Meta(ge=0)]
        | Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_VERSION_TEXT)]
        | None
    ) = None
    """The version's number, or a text that ends with it; None means one newer than is held."""
    verify_checksum: bool = False
    """True refuses a source without checksums. Checksums that exist are always compared."""

    @property
    def version_number(self) -> int | None:
        if not isinstance(self.version, str):
            return self.version
        number = number_in(self.version)
        if number is None:
            raise SpecError(
                f"version is {self.version!r}, expected a number, or text that ends with one"
            )
        return number

    def filled(self, request: Request) -> Request:
        """Return a route's request with what the caller chose; raise SpecError for bad names."""
        return msgspec.structs.replace(
            request,
            version=self.version_number,
            tags=tags_named(self.tags) if self.tags else request.tags,
            may_drain=one_of(WhenServing, self.when_serving, "when_serving") is WhenServing.DRAIN,
            verify=self.verify_checksum,
            timeout_seconds=self.timeout,
        )


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica answers: the operation that ended, or the one that is still running."""

    replica: str
    ending: Literal["done", "busy", "failed"]
    operation: str | None
    """The operation's id; None if none was started."""
    signal: str
    error: str
    """The name of the error's type; empty if the operation is done."""
    reason: str
    state: str
    version: int | str | None
    """The version that the replica holds, as the caller wrote it if that is the one."""
    seconds: float

    def in_words_of(self, body: RequestBody) -> Answer:
        """Return the answer with the caller's text for its version, if that is what is held."""
        if self.ending == "busy" or self.version is None or self.version != body.version_number:
            return self
        return msgspec.structs.replace(self, version=body.version)


def decode(keys: Collection[str], query: Sequence[tuple[str, str]], data: bytes) -> RequestBody:
    """Return what the query and the JSON body say; raise SpecError for other keys and types."""
    try:
        in_body = msgspec.json.decode(data, type=dict[str, Any]) if data else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        text = _lowered(str(cause))
        raise SpecError(f"the body's {len(data)} bytes are no JSON object: {text}") from cause
    takes = f"this route takes {', '.join(keys) or 'nothing'}"
    names = [*in_body, *(name for name, _ in query)]
    for name in names:
        if name not in keys:
            raise SpecError(f"unknown field {name!r}; {takes}")
        if names.count(name) > 1:
            raise SpecError(f"{name!r} is given twice; give it once, in the query or in the body")
    in_query = {name: _query_value(name, text) for name, text in query}
    try:
        body = msgspec.convert(in_body, RequestBody)
        from_query = msgspec.convert(in_query, RequestBody, strict=False)  # a query is all text
    except msgspec.ValidationError as cause:
        raise SpecError(f"{_lowered(str(cause))}; {takes}") from cause
    return msgspec.structs.replace(body, **{name: getattr(from_query, name) for name in in_query})


def _query_value(name: str, text: str) -> object:
    if name == "tags":
        return text.split(",")
    # int() refuses longer ones
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_VERSION_TEXT
    return int(text) if name == "version" and is_number else text


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]
