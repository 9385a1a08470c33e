"""End a stream of events properly, whatever happens while it is sent."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from vllm_mlx.engine.errors import VllmMlxError
from vllm_mlx.server.errors import ErrorReply, internal_reply, reply_to
from vllm_mlx.server.request_context import RequestContext

logger = logging.getLogger(__name__)

#: Writes an API's events for an error.
WriteError = Callable[[ErrorReply], bytes]


async def ended_properly(
    events: AsyncGenerator[bytes],
    context: RequestContext,
    write_error: WriteError,
    *,
    write_defect: WriteError | None = None,
    last: bytes = b"",
) -> AsyncGenerator[bytes]:
    """Yield `events`, an error as an API writes it, and the `last` bytes in any case.

    The status has been sent by then, so the event is all that can tell the client. A defect of ours
    goes through `write_defect`, where an API tells the two apart. Sets the context's error code.
    """
    reply, write = None, write_error
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except VllmMlxError as error:
            reply = reply_to(error)
        except Exception:
            # The last place where anything can be told: whatever the defect is, it is logged, and
            # the client gets an event instead of a stream that breaks off.
            logger.exception("stream %s failed", context.id)
            reply, write = internal_reply(context.id), write_defect or write_error
    if reply is not None:
        context.error_code = reply.code
        yield write(reply)
    if last:
        yield last
