"""From the outputs of a generation to what they mean: reasoning, content, calls, and the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import filterfalse

import msgspec

from vllm_mlx.engine.core.logprobs import Logprobs
from vllm_mlx.engine.core.outputs import RowOutput
from vllm_mlx.engine.parsing import (
    ContentDelta,
    Event,
    ReasoningDelta,
    StreamParser,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from vllm_mlx.server.answers.plan import AnswerPlan
from vllm_mlx.server.generation import Generation

#: The engine's reasons, and the one that calls add.
TOOL_CALLS = "tool_calls"


@dataclass(frozen=True)
class AnswerPart:
    """Carry what one output of one row says; the last of a row has a `finish_reason`."""

    row: int
    events: Sequence[Event]
    output: RowOutput
    #: `stop`, `length`, `abort`, or `tool_calls`.
    finish_reason: str | None = None


class RowReader:
    """Read the outputs of one row in their order; owns the row's parser."""

    def __init__(
        self,
        parser: StreamParser,
        *,
        max_calls: int | None = None,
        is_forced: bool = False,
        call_markers: tuple[str, ...] = (),
    ) -> None:
        """Begin; of more than `max_calls` calls those that follow are left out.

        What the parser still holds at the end is the beginning of a call if calls are forced, or
        if it begins with one of `call_markers`: then it is not shown.
        """
        self._parser = parser
        self._max_calls = max_calls
        self._is_forced = is_forced
        self._call_markers = call_markers
        self._num_calls = 0
        self._is_last_complete = True

    def read(self, row: int, output: RowOutput) -> AnswerPart:
        """Return what `output` says."""
        events = self._parser.feed(output.text)
        if output.finish_reason is not None:
            events = [*events, *filterfalse(self._is_cut_call, self._parser.finish())]
        events = [event for event in events if self._is_wanted(event)]
        for event in events:
            if isinstance(event, ToolCallStart):
                self._num_calls += 1
                self._is_last_complete = False
            elif isinstance(event, ToolCallEnd):
                self._is_last_complete = event.complete
        return AnswerPart(row, events, output, self._finish_reason(output))

    def _is_wanted(self, event: Event) -> bool:
        if self._max_calls is None or isinstance(event, (ContentDelta, ReasoningDelta)):
            return True
        return event.index < self._max_calls

    def _is_cut_call(self, event: Event) -> bool:
        """Say whether the last of the text is a call that was cut before it had a name."""
        if not isinstance(event, ContentDelta):
            return False
        return self._is_forced or event.text.lstrip().startswith(self._call_markers)

    def _finish_reason(self, output: RowOutput) -> str | None:
        """Return `tool_calls` where the model has come to its end with a call.

        A call that was cut by the limit or by a stop string is none to act on: the engine's own
        reason says so.
        """
        is_cut = not self._is_last_complete and output.stop_reason is not None
        if output.finish_reason == "stop" and self._num_calls and not is_cut:
            return TOOL_CALLS
        return output.finish_reason


async def answer_parts(
    generation: Generation, plan: AnswerPlan
) -> AsyncGenerator[AnswerPart | None]:
    """Yield what the rows say as it comes, and None whenever nothing came for a while.

    Ends and raises as `Generation.outputs` does.
    """
    max_calls = None if plan.chat.allows_parallel_calls else 1
    readers = [
        RowReader(
            plan.parser(),
            max_calls=max_calls,
            is_forced=plan.chat.tool_choice.mode == "required",
            call_markers=plan.call_markers,
        )
        for _ in generation.row_ids
    ]
    async with aclosing(generation.outputs()) as outputs:
        async for news in outputs:
            if news is None:
                yield None
            else:
                row, output = news
                yield readers[row].read(row, output)


async def prompt_only(
    parts: AsyncGenerator[AnswerPart | None], finish_reason: str
) -> AsyncGenerator[AnswerPart | None]:
    """Yield an answer's end alone, as if nothing had been generated; None as `parts` does.

    An answer that was aborted says so, whatever `finish_reason` is.
    """
    async with aclosing(parts):
        async for part in parts:
            if part is None:
                yield None
            elif part.finish_reason is not None:
                output = msgspec.structs.replace(
                    part.output, num_completion_tokens=0, num_reasoning_tokens=0
                )
                reason = "abort" if part.finish_reason == "abort" else finish_reason
                yield AnswerPart(part.row, (), output, reason)


@dataclass
class ParsedCall:
    """Gather one call."""

    id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass
class ParsedAnswer:
    """Gather the whole answer of one row."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    last: RowOutput = field(default_factory=lambda: RowOutput(request_id=""))
    finish_reason: str | None = None


async def collect_answers(generation: Generation, plan: AnswerPlan) -> list[ParsedAnswer]:
    """Wait for the end of every row and return their answers in order."""
    gathering = [_Gathering() for _ in generation.row_ids]
    async with aclosing(answer_parts(generation, plan)) as parts:
        async for part in parts:
            if part is not None:
                gathering[part.row].add(part)
    return [row.whole() for row in gathering]


class _Gathering:
    """Join the parts of one row at its end, as adding text to text costs the square."""

    def __init__(self) -> None:
        self._answer = ParsedAnswer()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._arguments: list[list[str]] = []

    def add(self, part: AnswerPart) -> None:
        """Take the next part."""
        answer = self._answer
        for event in part.events:
            if isinstance(event, ContentDelta):
                self._content.append(event.text)
            elif isinstance(event, ReasoningDelta):
                self._reasoning.append(event.text)
            elif isinstance(event, ToolCallStart):
                answer.calls.append(ParsedCall(event.id, event.name))
                self._arguments.append([])
            elif isinstance(event, ToolArgumentsDelta):
                self._arguments[event.index].append(event.text)
            else:
                answer.calls[event.index].is_complete = event.complete
        if part.output.logprobs is not None:
            answer.logprobs.append(part.output.logprobs)
        answer.last, answer.finish_reason = part.output, part.finish_reason

    def whole(self) -> ParsedAnswer:
        """Return the answer."""
        answer = self._answer
        answer.content, answer.reasoning = "".join(self._content), "".join(self._reasoning)
        for call, texts in zip(answer.calls, self._arguments, strict=True):
            call.arguments = "".join(texts)
        return answer
