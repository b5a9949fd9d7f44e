"""The event stream: the status of a fleet, sent at each change for as long as a client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from flyweight.server.fleet import Fleet

INTERVAL_SECONDS = 0.05
KEEPALIVE_SECONDS = 10.0


def event_stream(fleet: Fleet) -> StreamingResponse:
    """Return a response that sends status events until the client leaves or the fleet closes."""
    events = _events(fleet)
    # A client that leaves during a send would keep its listener until the generator is collected.
    return StreamingResponse(
        events, media_type="text/event-stream", background=BackgroundTask(events.aclose)
    )


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
