"""Write OpenAI's streams: chunks, keep-alive comments, usage, and one error event if it fails."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm_mlx.engine.core.logprobs import Logprobs
from vllm_mlx.engine.core.outputs import RowOutput
from vllm_mlx.engine.parsing import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from vllm_mlx.server import sse
from vllm_mlx.server.answers.events import AnswerPart
from vllm_mlx.server.errors import ErrorReply
from vllm_mlx.server.generation import Generation
from vllm_mlx.server.openai.logprobs import CompletionPieces, Spell, chat_logprobs
from vllm_mlx.server.openai.responses import (
    AnswerHead,
    chat_chunk,
    chat_reason,
    reasoning_fields,
    text_chunk,
    usage_chunk,
)


async def chat_events(
    parts: AsyncGenerator[AnswerPart | None],
    head: AnswerHead,
    *,
    num_choices: int,
    include_usage: bool,
    spell: Spell | None,
    is_legacy: bool = False,
) -> AsyncGenerator[bytes]:
    """Yield the events of a streamed chat answer, without the end mark; choices interleave.

    `spell` spells tokens where log-probabilities are asked for; `is_legacy` says that the request
    named its tools as functions.
    """
    write = _ChunkWriter(include_usage=include_usage)
    for index in range(num_choices):
        yield write(chat_chunk(head, index, {"role": "assistant", "content": ""}))
    ends: dict[int, RowOutput] = {}
    held: list[list[Logprobs]] = [[] for _ in range(num_choices)]

    def taken(index: int) -> dict[str, Any] | None:
        parts, held[index] = held[index], []
        return chat_logprobs(parts, spell) if spell is not None and parts else None

    async with aclosing(parts):
        async for part in parts:
            if part is None:
                yield sse.KEEP_ALIVE
                continue
            index, output = part.row, part.output
            if spell is not None:
                held[index] += _parts(output)
            for event in part.events:
                delta = _delta(event, is_legacy=is_legacy)
                if delta is not None:
                    # Those of markers, which say nothing, go with what follows them.
                    yield write(chat_chunk(head, index, delta, taken(index)))
            if output.finish_reason is not None:
                ends[index] = output
                reason = chat_reason(part.finish_reason, is_legacy=is_legacy)
                yield write(chat_chunk(head, index, {}, taken(index), output, reason))
    if include_usage:
        rows = [ends[index] for index in sorted(ends)]
        yield sse.event(usage_chunk(head, "chat.completion.chunk", rows, num_choices))


def _delta(event: Event, *, is_legacy: bool) -> dict[str, Any] | None:
    """Return what an event adds to the message; the end of a call adds nothing."""
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return reasoning_fields(event.text)
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        opened = {"index": event.index, "id": event.id, "type": "function", "function": function}
        return {"function_call": function} if is_legacy else {"tool_calls": [opened]}
    if isinstance(event, ToolArgumentsDelta):
        function = {"arguments": event.text}
        added = {"index": event.index, "function": function}
        return {"function_call": function} if is_legacy else {"tool_calls": [added]}
    return None


async def completion_events(
    generation: Generation,
    head: AnswerHead,
    pieces: CompletionPieces,
    *,
    include_usage: bool,
    num_choices: int,
) -> AsyncGenerator[bytes]:
    """Yield the events of a streamed completion, without the end mark; choices interleave."""
    write = _ChunkWriter(include_usage=include_usage)
    ends: dict[int, RowOutput] = {}
    async with aclosing(generation.outputs()) as outputs:
        async for news in outputs:
            if news is None:
                yield sse.KEEP_ALIVE
                continue
            index, output = news
            parts, last = _parts(output), output if output.finish_reason is not None else None
            if last is not None or pieces.has_news(index, output.text, parts):
                text, logprobs = pieces.piece(index, output.text, parts, output.prompt_logprobs)
                yield write(text_chunk(head, index, text, logprobs, last))
            if last is not None:
                ends[index] = last
    if include_usage:
        rows = [ends[index] for index in sorted(ends)]
        yield sse.event(usage_chunk(head, "text_completion", rows, num_choices))


def _parts(output: RowOutput) -> list[Logprobs]:
    return [output.logprobs] if output.logprobs is not None else []


def error_event(reply: ErrorReply) -> bytes:
    """Write the event of a stream that fails; the end mark follows."""
    return sse.event(reply.openai_body())


class _ChunkWriter:
    """Frame chunks; where usage was asked for, every chunk but the last carries a null one."""

    def __init__(self, *, include_usage: bool) -> None:
        self._include_usage = include_usage

    def __call__(self, chunk: dict[str, Any]) -> bytes:
        if self._include_usage:
            chunk["usage"] = None
        return sse.event(chunk)
