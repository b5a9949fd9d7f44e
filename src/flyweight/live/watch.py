"""Watch: the state of a publisher and its replicas, as it changes."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic, sleep
from typing import Any

import msgspec

from flyweight.errors import PeerLost
from flyweight.live.curve_keys import CurveClient
from flyweight.live.line import opened_line
from flyweight.live.messages import News
from flyweight.live.replica_connection import ReplicaConnection
from flyweight.live.tcp_address import parse_address

_RETRY_SECONDS = 0.05
_SILENCE_SECONDS = 60.0


def watch(
    address: str,
    *,
    token: str | None = None,
    curve: CurveClient | None = None,
    timeout_seconds: float = 10.0,
) -> Iterator[News]:
    """Yield the state of a publisher whenever it changes, until the publisher is closed.

    address: the publisher's address, `unix:DIRECTORY` or `tcp://HOST:PORT`.
    token: its token, if it is not in a file next to its sockets.
    curve: its public key, if messages from other hosts are encrypted.
    timeout_seconds: how long to wait for the publisher to start and to send its first state.

    Raises PeerLost if no publisher starts or it is killed, TransferTimeout if it does not answer.
    """
    place, deadline = parse_address(address), monotonic() + timeout_seconds
    while True:
        try:
            connection = ReplicaConnection(
                opened_line(place, token, curve, deadline), "watcher", role="watcher"
            )
            break
        except PeerLost:
            if monotonic() + _RETRY_SECONDS > deadline:
                raise
        sleep(_RETRY_SECONDS)
    try:
        while True:
            try:
                yield connection.expect(News, deadline, "news")
                deadline = monotonic() + _SILENCE_SECONDS
            except PeerLost:
                if connection.has_ended:
                    return
                raise
    finally:
        connection.disconnect("stopped watching")


def record(news: News) -> dict[str, Any]:
    """Return the state as plain data, for JSON."""
    found: dict[str, Any] = msgspec.to_builtins(news)
    found["replicas"] = [msgspec.structs.asdict(each) for each in news.replicas]
    return {key: value for key, value in found.items() if key != "type"}
