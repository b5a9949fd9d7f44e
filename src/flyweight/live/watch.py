"""Watch: how a publisher and its replicas stand, as news of it comes."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic, sleep
from typing import Any

import msgspec

from flyweight.errors import PeerLost
from flyweight.live.address import Address
from flyweight.live.messages import News
from flyweight.live.subscriber import Subscriber

_RETRY_SECONDS = 0.05
_SILENCE_SECONDS = 60.0


def watch(
    address: str, *, token: str | None = None, timeout_seconds: float = 10.0
) -> Iterator[News]:
    """Yield news of the publisher at `address` until it says goodbye.

    Waits `timeout_seconds` for it to come and for its first news; raises PeerLost if it does not
    come, or is killed, and TransferTimeout if it does not answer.
    """
    place, deadline = Address.parse(address), monotonic() + timeout_seconds
    while True:
        try:
            subscriber = Subscriber(place, token, "watcher", is_watcher=True, deadline=deadline)
            break
        except PeerLost:
            if monotonic() + _RETRY_SECONDS > deadline:
                raise
        sleep(_RETRY_SECONDS)
    try:
        while True:
            try:
                yield subscriber.take(News, deadline, "news")
                deadline = monotonic() + _SILENCE_SECONDS
            except PeerLost:
                if subscriber.has_parted:
                    return
                raise
    finally:
        subscriber.close("seen enough")


def record(news: News) -> dict[str, Any]:
    """Return news as plain data."""
    told: dict[str, Any] = msgspec.to_builtins(news)
    told["replicas"] = [
        {name: getattr(each, name) for name in each.__struct_fields__} for each in news.replicas
    ]
    return {key: value for key, value in told.items() if key != "type"}
