"""Watch: what a publisher and its replicas do, as it changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from time import monotonic, sleep
from typing import Any

import msgspec

from flyweight.checks import check_seconds
from flyweight.errors import HandleGone, PeerLost, TransferTimeout, TransportError
from flyweight.live.messages import News, Watch
from flyweight.live.reader import Identity, open_channel, with_newest_token
from flyweight.transports.address import parse_address
from flyweight.transports.channel import Channel, Message
from flyweight.transports.tls import Tls
from flyweight.transports.wire import FOREVER

_RETRY_SECONDS = 0.05


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
    channel, first = _begun(address, Identity("watcher", token=token or "", tls=tls), deadline)
    coming = deque([first])

    def take(message: Message) -> None:
        if isinstance(message, News):
            coming.append(message)

    channel.on_push = take
    with closing(channel):
        while True:
            while coming:
                yield coming.popleft()
            try:
                channel.hear(FOREVER)
            except HandleGone:
                return


def _begun(address: str, me: Identity, deadline: float) -> tuple[Channel, News]:
    """Return a connection to a publisher, once there is one, and its first news."""
    place = parse_address(address)
    last: TransportError | None = None
    while True:
        try:
            _, channel = with_newest_token(
                me, place, lambda known: open_channel(place.endpoint, known, deadline)
            )
            try:
                return channel, channel.call(Watch(), News, deadline)
            except BaseException:
                channel.close()
                raise
        except TransferTimeout as error:  # a try that began too late says less than the one before
            if last is None:
                raise
            raise PeerLost(f"no publisher answers at {address}: {last}") from error
        except (PeerLost, HandleGone) as error:
            last = error
            if monotonic() + _RETRY_SECONDS > deadline:
                raise PeerLost(f"no publisher answers at {address}: {error}") from error
        sleep(_RETRY_SECONDS)


def record(news: News) -> dict[str, Any]:
    """Return news as plain data, for JSON."""
    replicas = [msgspec.structs.asdict(each) for each in news.replicas]
    return {"version": news.version, "state": news.state, "replicas": replicas}
