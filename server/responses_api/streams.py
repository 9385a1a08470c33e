"""Run the answer of a Responses request: its numbered events, its end, and what is known of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from vllm_mlx.server import sse
from vllm_mlx.server.answers.events import AnswerPart
from vllm_mlx.server.errors import ErrorReply
from vllm_mlx.server.responses_api.output_items import ItemWriter, Payload
from vllm_mlx.server.responses_api.responses import ResponseHead, error_of, status_of

logger = logging.getLogger(__name__)

#: The last event of a stream by what the response has come to. The API has no event for one that
#: was cancelled, which is not complete either.
_LAST_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}


class ResponseRun:
    """Own one response while it is answered. Event loop only.

    `keep` is called with the response before anybody is told that it has ended, so that who asks
    for it then finds it.
    """

    def __init__(
        self,
        head: ResponseHead,
        writer: ItemWriter,
        *,
        client: str,
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        self.client = client
        self.id = head.id
        #: Set when nothing more comes, whatever the end.
        self.over = asyncio.Event()
        self._head = head
        self._writer = writer
        self._keep = keep
        self._number = 0
        self._final: dict[str, Any] | None = None

    @property
    def response(self) -> dict[str, Any]:
        """Return the response as it is by now."""
        if self._final is not None:
            return self._final
        return self._head.response("in_progress", self._writer.output)

    def begin(self) -> list[Payload]:
        """Return the events that come before anything is known of the answer."""
        return [self.lifecycle("response.created"), self.lifecycle("response.in_progress")]

    def lifecycle(self, name: str) -> Payload:
        """Return an event that carries the whole response."""
        return self._numbered({"type": name, "response": self.response})

    def take(self, part: AnswerPart) -> list[Payload]:
        """Return the events that say what a part says; the last one ends the response."""
        payloads = self._writer.write(part.events)
        if part.finish_reason is not None:
            status = status_of(part)
            payloads += self._writer.finish(is_cut=status != "completed")
        payloads = [self._numbered(payload) for payload in payloads]
        if part.finish_reason is not None:
            self._final = self._head.response(status, self._writer.output, last=part.output)
            self._keep(self._final)
            self.over.set()
            payloads.append(self.lifecycle(_LAST_EVENTS[status]))
        return payloads

    def fail(self, reply: ErrorReply) -> list[Payload]:
        """Return the event that says that the response has failed; what there was stays in it."""
        if self._final is None:
            output = self._writer.output
            self._final = self._head.response("failed", output, error=error_of(reply))
        self.over.set()
        return [self.lifecycle("response.failed")]

    def defect(self, reply: ErrorReply) -> list[Payload]:
        """Return the events that say that something of ours has broken."""
        error = {"code": reply.code, "message": reply.message, "param": None}
        return [self._numbered({"type": "error", **error}), *self.fail(reply)]

    def _numbered(self, payload: Payload) -> Payload:
        number, self._number = self._number, self._number + 1
        return {**payload, "sequence_number": number}


async def response_events(
    parts: AsyncGenerator[AnswerPart | None], run: ResponseRun
) -> AsyncGenerator[bytes]:
    """Yield the events of a streamed response.

    While its prompt is computed, which may take minutes, `response.in_progress` comes again:
    clients that wait for events so long only do not count comments as such.
    """
    has_begun = False
    yield _framed(run.begin())
    async with aclosing(parts):
        async for part in parts:
            if part is None:
                waits = _framed([run.lifecycle("response.in_progress")])
                yield sse.KEEP_ALIVE if has_begun else waits
                continue
            has_begun = True
            payloads = run.take(part)
            if payloads:
                yield _framed(payloads)


async def collect_response(
    parts: AsyncGenerator[AnswerPart | None], run: ResponseRun
) -> dict[str, Any]:
    """Wait for the end of a response and return it."""
    async with aclosing(parts):
        async for part in parts:
            if part is not None:
                run.take(part)
    return run.response


def failure_events(run: ResponseRun, reply: ErrorReply) -> bytes:
    """Write the events that say a response has failed."""
    return _framed(run.fail(reply))


def defect_events(run: ResponseRun, reply: ErrorReply) -> bytes:
    """Write the events that say the server has a fault of its own."""
    return _framed(run.defect(reply))


def _framed(payloads: Iterable[Payload]) -> bytes:
    return b"".join(sse.named_event(payload["type"], payload) for payload in payloads)
