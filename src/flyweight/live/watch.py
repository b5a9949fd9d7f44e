"""Watch: what a publisher and its replicas do, as it changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from time import monotonic
from typing import Any

import msgspec

from flyweight.checks import check_seconds
from flyweight.errors import HandleGone, PeerLost
from flyweight.live.front_store import FrontStore, once_there
from flyweight.live.messages import News, Watch
from flyweight.live.reader import Identity
from flyweight.transports.address import parse_address
from flyweight.transports.channel import Channel, Message
from flyweight.transports.tls import Tls
from flyweight.transports.wire import FOREVER


def watch(
    address: str,
    *,
    token: str | None = None,
    tls: Tls | None = None,
    timeout_seconds: float = 10.0,
) -> Iterator[News]:
    """Yield what a publisher and its replicas do, whenever that changes, until it is closed.

    address: the publisher's address, `unix:DIRECTORY` or `tcp://HOST:PORT`.
    token: its token, if it is not in a file next to its sockets.
    tls: certificates, if the publisher encrypts what goes to other hosts.
    timeout_seconds: how long to wait for the publisher to start and to say what it does.

    Raises PeerLost if no publisher starts or it is killed, TransferTimeout if it does not answer.
    """
    deadline = monotonic() + check_seconds("timeout_seconds", timeout_seconds)
    front = FrontStore(parse_address(address), Identity("watcher", token=token or "", tls=tls))
    coming = deque[News]()

    def take(message: Message) -> None:
        if isinstance(message, News):
            coming.append(message)

    def begin() -> Channel:
        channel = front.channel(deadline)
        channel.on_push = take
        coming.append(channel.call(Watch(), News, deadline))
        return channel

    with closing(front):
        try:
            channel = once_there(begin, deadline)
        except (PeerLost, HandleGone) as error:
            raise PeerLost(f"no publisher answers at {address}: {error}") from error
        while True:
            while coming:
                yield coming.popleft()
            try:
                channel.hear(FOREVER)
            except HandleGone:
                return


def record(news: News) -> dict[str, Any]:
    """Return news as plain data, for JSON."""
    replicas = [msgspec.structs.asdict(each) for each in news.replicas]
    return {"version": news.version, "state": news.state, "replicas": replicas}
