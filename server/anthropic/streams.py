"""Write the streams of the Messages route: named events, pings, and one error event if it fails."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from vllm_mlx.server import sse
from vllm_mlx.server.answers.events import AnswerPart
from vllm_mlx.server.anthropic.blocks import BlockWriter, Payload
from vllm_mlx.server.anthropic.responses import (
    MessageHead,
    message_delta,
    message_start,
    whole_message,
)
from vllm_mlx.server.errors import ErrorReply

#: Sent once at the beginning, and whenever nothing else was for a while; clients skip it.
_PING = sse.named_event("ping", {"type": "ping"})


async def message_events(
    parts: AsyncGenerator[AnswerPart | None], writer: BlockWriter, head: MessageHead
) -> AsyncGenerator[bytes]:
    """Yield the events of a streamed answer.

    The first one tells how much of the prompt was found stored, which the engine says with its
    first output: until then there are pings only.
    """
    has_begun = False
    async with aclosing(parts):
        async for part in parts:
            if part is None:
                yield _PING
                continue
            if not has_begun:
                has_begun = True
                yield _framed([message_start(head, part.output)]) + _PING
            payloads = writer.write(part.events)
            if part.finish_reason is not None:
                payloads += writer.finish()
                payloads += [message_delta(part), {"type": "message_stop"}]
            if payloads:
                yield _framed(payloads)


async def collect_message(
    parts: AsyncGenerator[AnswerPart | None], writer: BlockWriter, head: MessageHead
) -> dict[str, Any]:
    """Wait for the end of an answer and return it whole."""
    payloads: list[Payload] = []
    async with aclosing(parts):
        async for part in parts:
            if part is not None:
                payloads += writer.write(part.events)
                last = part
    return whole_message(head, payloads + writer.finish(), last)


def error_event(reply: ErrorReply, request_id: str) -> bytes:
    """Write the event that ends a stream which fails."""
    return sse.named_event("error", reply.anthropic_body(request_id))


def _framed(payloads: Iterable[Payload]) -> bytes:
    return b"".join(sse.named_event(payload["type"], payload) for payload in payloads)
