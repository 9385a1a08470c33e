"""Server-sent events: their bytes, their headers, and how a stream ends whatever happens in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from quart import Response

DONE = b"data: [DONE]\n\n"

#: A comment, which every client skips: it only shows proxies and clients that we are there.
KEEP_ALIVE = b": keep-alive\n\n"

_encoder = msgspec.json.Encoder()


def event(payload: Any) -> bytes:
    """Frame one JSON payload as an event; its JSON holds no line break."""
    return b"data: " + _encoder.encode(payload) + b"\n\n"


def named_event(name: str, payload: Any) -> bytes:
    """Frame one JSON payload as an event with a type of its own."""
    return b"event: " + name.encode("ascii") + b"\n" + event(payload)


async def kept_alive(events: AsyncGenerator[bytes], every_s: float) -> AsyncGenerator[bytes]:
    """Yield `events`, which it takes over, and a comment whenever none has come for so long."""
    async with aclosing(events):
        while True:
            coming = asyncio.ensure_future(anext(events, None))
            try:
                while not (await asyncio.wait({coming}, timeout=every_s))[0]:
                    yield KEEP_ALIVE
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.wait({coming})
            event = coming.result()
            if event is None:
                return
            yield event


def event_stream(chunks: AsyncIterator[bytes]) -> Response:
    """Make the response that sends `chunks` as they come, for as long as they come."""
    response = Response(chunks, content_type="text/event-stream; charset=utf-8")
    # The default of 60 s would cut a long answer.
    response.timeout = None
    response.headers["cache-control"] = "no-cache"
    # Asks nginx, which gathers responses, to hand each event on at once.
    response.headers["x-accel-buffering"] = "no"
    return response
