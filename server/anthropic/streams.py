"""Write the streams of the Messages route: named events, pings, and one error event if it fails."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

import msgspec

from vllm_mlx.engine.errors import VllmMlxError
from vllm_mlx.server import sse
from vllm_mlx.server.answers.events import AnswerPart
from vllm_mlx.server.anthropic.blocks import BlockWriter, Payload
from vllm_mlx.server.anthropic.responses import (
    MessageHead,
    message_delta,
    message_start,
    whole_message,
)
from vllm_mlx.server.errors import ErrorReply, internal_reply, reply_to
from vllm_mlx.server.request_context import RequestContext

logger = logging.getLogger(__name__)

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


async def prompt_only(
    parts: AsyncGenerator[AnswerPart | None],
) -> AsyncGenerator[AnswerPart | None]:
    """Yield an answer's end alone, as if nothing had been generated; None as `parts` does."""
    async with aclosing(parts):
        async for part in parts:
            if part is None:
                yield None
            elif part.finish_reason is not None:
                output = msgspec.structs.replace(
                    part.output, num_completion_tokens=0, num_reasoning_tokens=0
                )
                reason = "abort" if part.finish_reason == "abort" else "length"
                yield AnswerPart(part.row, (), output, reason)


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


async def ended_properly(
    events: AsyncGenerator[bytes], context: RequestContext
) -> AsyncGenerator[bytes]:
    """Yield `events`; a failure becomes one error event, which ends the stream.

    The status has been sent by then, so the event is all that can tell the client.
    """
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except VllmMlxError as error:
            yield _error_event(reply_to(error), context)
        except Exception:
            # A defect of ours must not leave the client with a stream that breaks off.
            logger.exception("stream %s failed", context.id)
            yield _error_event(internal_reply(context.id), context)


def _error_event(reply: ErrorReply, context: RequestContext) -> bytes:
    context.error_code = reply.code
    return sse.named_event("error", reply.anthropic_body(context.id))


def _framed(payloads: Iterable[Payload]) -> bytes:
    return b"".join(sse.named_event(payload["type"], payload) for payload in payloads)
