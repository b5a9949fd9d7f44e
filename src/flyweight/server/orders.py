"""Orders: what the routes that change something take, and what each asks of a replica."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec

from flyweight.checks import one_of
from flyweight.errors import SpecError
from flyweight.formats.snapshot import number_in
from flyweight.lifecycle.replica_status import ReplicaStatus
from flyweight.lifecycle.states import Signal, Tag, tags_named
from flyweight.server.course import Course, Order

_MAX_SECONDS = 86_400.0
_MAX_TEXT = 200

Seconds = Annotated[float, msgspec.Meta(gt=0, le=_MAX_SECONDS)]
Tags = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]


class WhenServing(str, Enum):
    """What happens to requests that run: they are finished first, or the call is refused."""

    DRAIN = "drain"
    REFUSE = "refuse"


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every route takes that asks something of replicas."""

    replica: str | None = None
    """Which; all of them if it is missing."""
    timeout: Seconds = 60.0


class DrainOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    when_serving: str = WhenServing.DRAIN.value

    @property
    def may_drain(self) -> bool:
        return one_of(WhenServing, self.when_serving, "when_serving") is WhenServing.DRAIN


class SleepOptions(DrainOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tags: Tags = tuple(Tag)


class WakeupOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tags: Tags = tuple(Tag)


class UpdateOptions(DrainOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: (
        Annotated[int, msgspec.Meta(ge=0)]
        | Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_TEXT)]
        | None
    ) = None
    """Which, by its number or by a text that ends with it; one newer than is held without it."""
    verify_checksum: bool = False
    """Whether a source without checksums is refused; what has some is compared either way."""


class ReplicaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replica: str | None = None


class NoOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


def pause(options: Options) -> Course:
    return _always(Order(signal=Signal.PAUSE, timeout_seconds=options.timeout))


def resume(options: Options) -> Course:
    return _always(Order(signal=Signal.RESUME, timeout_seconds=options.timeout))


def sleep(options: SleepOptions) -> Course:
    return _always(
        Order(
            signal=Signal.CLEAR,
            tags=tags_named(options.tags),
            may_drain=options.may_drain,
            timeout_seconds=options.timeout,
        )
    )


def wakeup(options: WakeupOptions) -> Course:
    tags = tags_named(options.tags)
    return _always(Order(signal=Signal.RESTORE, tags=tags, timeout_seconds=options.timeout))


def update(options: UpdateOptions) -> Course:
    text = options.version if isinstance(options.version, str) else None
    number = options.version if not isinstance(options.version, str) else number_in(options.version)
    if text is not None and number is None:
        raise SpecError(f"version is {text!r}, expected a number, or text that ends with one")
    return _always(
        Order(
            signal=Signal.UPDATE,
            version=number,
            version_text=text,
            may_drain=options.may_drain,
            must_verify=options.verify_checksum,
            timeout_seconds=options.timeout,
        )
    )


def abort(options: Options) -> Course:
    """End the requests that run: a pause that aborts, and on with it if it was serving."""
    return _always(
        Order(
            signal=Signal.PAUSE,
            should_abort=True,
            should_resume=True,
            timeout_seconds=options.timeout,
        )
    )


def clear_load_weight(options: Options) -> Course:
    return sleep(SleepOptions(timeout=options.timeout))


def update_model_weight(options: Options) -> Course:
    """Have weights and cache again and serve them, whatever was cleared before."""

    def course(before: ReplicaStatus) -> Order:
        has_all = not any(rank.absent for rank in before.ranks)
        return Order(
            signal=Signal.UPDATE if has_all else Signal.RESTORE,
            tags=() if has_all else tuple(Tag),
            should_resume=True,
            timeout_seconds=options.timeout,
        )

    return course


def _always(order: Order) -> Course:
    return lambda before: order
