"""Server-sent events: their bytes, their headers, and how a stream ends whatever happens in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
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


def event_stream(chunks: AsyncIterator[bytes]) -> Response:
    """Make the response that sends `chunks` as they come, for as long as they come."""
    response = Response(chunks, content_type="text/event-stream; charset=utf-8")
    # The default of 60 s would cut a long answer.
    response.timeout = None
    response.headers["cache-control"] = "no-cache"
    # Asks nginx, which gathers responses, to hand each event on at once.
    response.headers["x-accel-buffering"] = "no"
    return response
