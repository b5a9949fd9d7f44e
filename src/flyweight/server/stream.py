"""The event stream: how things stand, told at each change, for as long as somebody reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from flyweight.server.fleet import Fleet

_REST_SECONDS = 0.05
_KEEPALIVE_SECONDS = 10.0
_SEND_SECONDS = 10.0


class EventStream(Response):
    """How things stand, sent at each change; whoever does not read is let go.

    What is sent is the newest, not all there was in between, so nothing piles up for a slow
    reader.
    """

    def __init__(self, fleet: Fleet, count: Callable[[int], None]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._fleet, self._count = fleet, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._count(1)
        streaming = asyncio.ensure_future(self._stream(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((streaming, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._count(-1)
            for task in (streaming, leaving):
                task.cancel()
            await asyncio.gather(streaming, leaving, return_exceptions=True)

    async def _stream(self, send: Send) -> None:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def ring() -> None:
            with suppress(RuntimeError):  # the loop has ended, and this stream with it
                loop.call_soon_threadsafe(changed.set)

        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        seen = -1
        with self._fleet.listening(ring):
            while not self._fleet.is_over:
                changed.clear()
                number, data = await run_in_threadpool(self._fleet.news)
                chunk = b":\n\n" if number == seen else b"event: status\ndata: %b\n\n" % data
                seen = number
                body = {"type": "http.response.body", "body": chunk, "more_body": True}
                await asyncio.wait_for(send(body), _SEND_SECONDS)
                await asyncio.sleep(_REST_SECONDS)
                try:
                    await asyncio.wait_for(changed.wait(), _KEEPALIVE_SECONDS)
                except asyncio.TimeoutError:
                    continue
        await send({"type": "http.response.body", "body": b""})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
