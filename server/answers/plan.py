"""From a chat, whichever API it came by, to its prompt and to how its answer is drawn and read.

Every API goes through `plan_answer`, so that none of them knows less of tools, reasoning and
templates than another.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_mlx.engine.core.request import SamplingParams, Thinking
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.engine.parsing import StreamParser, make_parser
from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat
from vllm_mlx.engine.text.chat_formats import ChatFormats
from vllm_mlx.server.answers.call_grammar import forced_calls, free_answer
from vllm_mlx.server.answers.tool_choice import AUTO, Tool, ToolChoice, is_strict
from vllm_mlx.server.served_model import ServedModel
from vllm_mlx.server.structured_output import AnswerSpec, answer_grammar, with_reasoning
from vllm_mlx.server.tokenizer_pool import TextCodec

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatInput:
    """Hold what a chat asks for, in OpenAI's shapes, whichever API it came by.

    `tools` and `tool_choice` have been through `check_tools`.
    """

    #: As templates take them: roles `system`, `user`, `assistant` and `tool`, contents as text,
    #: `tool_calls` with arguments as objects, `reasoning_content`.
    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = AUTO
    allows_parallel_calls: bool = True
    #: Variables of the template, and `add_generation_prompt` and `continue_final_message`.
    template_options: Mapping[str, Any] = field(default_factory=dict)
    #: Most tokens of reasoning; None leaves it to the server's default.
    thinking_budget: int | None = None
    #: The form of the answer; None leaves it free.
    form: AnswerSpec | None = None

    @property
    def render_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `encode_chat` and `render_chat`."""
        return {**self.template_options, **({"tools": self.tools} if self.tools else {})}


@dataclass(frozen=True)
class AnswerPlan:
    """Say how one chat is answered."""

    chat: ChatInput
    prompt: list[int]
    formats: ChatFormats
    #: The prompt ends within reasoning.
    starts_inside: bool
    thinking: Thinking | None
    shown_tokens: tuple[tuple[int, str], ...]
    grammar: str | None = None

    def sampling(self, sampling: SamplingParams) -> SamplingParams:
        """Return an API's own sampling with what this plan adds to it."""
        return msgspec.structs.replace(
            sampling,
            thinking=self.thinking,
            shown_tokens=self.shown_tokens,
            grammar=self.grammar,
        )

    @property
    def call_markers(self) -> tuple[str, ...]:
        """Return the markers with which nothing but a call begins."""
        if not _reads_tools(self.chat, self.formats) or self.formats.tool_format is None:
            return ()
        kind = self.formats.tool_format
        triggers = [t for leaf in kind.members or (kind,) for t in leaf.triggers]
        return tuple(t for t in triggers if len(t) > 2 and not t.startswith("```"))

    def parser(self) -> StreamParser:
        """Return the parser of one row of the answer."""
        reads_tools = _reads_tools(self.chat, self.formats)
        return make_parser(
            self.formats.tools if reads_tools else None,
            self.formats.reasoning,
            self.chat.tools if reads_tools else None,
            self.starts_inside,
            reasoning_delimiters=self.formats.delimiters,
        )


async def plan_answer(served: ServedModel, chat: ChatInput) -> AnswerPlan:
    """Render and encode a chat, and decide how its answer is drawn and read.

    Raises `InvalidRequestError` for what the template refuses, for calls that are to be enforced
    where no format of calls is known, and for a form that cannot be enforced.
    """
    plan = await served.tokenizers.run(functools.partial(make_plan, chat=chat))
    if plan.grammar is not None:
        param = chat.form.param if chat.form is not None else "tools"
        await served.tokenizers.check_grammar(plan.grammar, param=param)
    return plan


def make_plan(codec: TextCodec, chat: ChatInput) -> AnswerPlan:
    """Do the work of `plan_answer`, on the thread that owns `codec`."""
    formats = codec.formats
    if chat.tool_choice.mode == "required" and formats.tools is None:
        raise InvalidRequestError(
            "tool_choice asks for a call, but this server reads none: its model has no chat "
            "template, or it was started with --tool-call-parser none",
            param="tool_choice",
        )
    text = codec.render_chat(chat.messages, **chat.render_options)
    reasoning = formats.reasoning_format()
    starts_inside = reasoning is not None and reasoning.is_open(text)
    return AnswerPlan(
        chat=chat,
        prompt=codec.encode(text, add_special_tokens=False),
        formats=formats,
        starts_inside=starts_inside,
        thinking=_thinking(codec, chat, reasoning, starts_inside=starts_inside),
        shown_tokens=formats.shown_tokens(reads_tools=_reads_tools(chat, formats)),
        grammar=_grammar(codec, chat, reasoning, starts_inside=starts_inside),
    )


def _reads_tools(chat: ChatInput, formats: ChatFormats) -> bool:
    """Say whether calls are looked for in the answer."""
    return bool(chat.tools) and formats.tools is not None and chat.tool_choice.mode != "none"


def _grammar(
    codec: TextCodec, chat: ChatInput, reasoning: ReasoningFormat | None, *, starts_inside: bool
) -> str | None:
    """Return the grammar of the answer, its reasoning included; None leaves it free.

    A call that is asked for stands over the form, which the answer to the call's result will have;
    where the model may call tools, a call may take the place of the form.
    """
    tool_format = codec.formats.tool_format if chat.tools else None
    is_forced = chat.tool_choice.mode == "required"
    if chat.form is None and (tool_format is None or not _holds_calls(chat)):
        return None
    special_tokens = codec.grammars.special_tokens
    calls = None
    if tool_format is not None and chat.tool_choice.mode != "none":
        calls = forced_calls(
            tool_format,
            chat.tools,
            chat.tool_choice,
            is_parallel=chat.allows_parallel_calls,
            special_tokens=special_tokens,
        )
    if chat.form is not None and not is_forced:
        return answer_grammar(
            chat.form,
            reasoning=reasoning,
            in_reasoning=starts_inside,
            special_tokens=special_tokens,
            alternatives=[] if calls is None else [calls],
        )
    assert tool_format is not None, "calls are forced of known formats only"
    if not is_forced:
        calls = free_answer(
            tool_format,
            chat.tools if chat.tool_choice.mode == "auto" else (),
            is_parallel=chat.allows_parallel_calls,
            special_tokens=special_tokens,
            reasoning=reasoning,
        )
    if calls is None:
        return None
    return with_reasoning(
        calls, reasoning=reasoning, in_reasoning=starts_inside, special_tokens=special_tokens
    )


def _holds_calls(chat: ChatInput) -> bool:
    """Say whether calls, or that there are none, must be enforced."""
    is_free = chat.tool_choice.mode == "auto" and chat.allows_parallel_calls
    return not is_free or any(map(is_strict, chat.tools))


def _thinking(
    codec: TextCodec, chat: ChatInput, reasoning: ReasoningFormat | None, *, starts_inside: bool
) -> Thinking | None:
    formats = codec.formats
    if reasoning is None or formats.reasoning is None:
        return None
    budget = formats.thinking_budget if chat.thinking_budget is None else chat.thinking_budget
    closing: list[int] = []
    if budget is not None:
        closing = codec.encode(closing_text(reasoning), add_special_tokens=False)
    return Thinking(
        reasoning=formats.reasoning,
        delimiters=formats.delimiters,
        tools=formats.tools if _reads_tools(chat, formats) else None,
        starts_inside=starts_inside,
        max_tokens=budget,
        closing=tuple(closing),
    )


def closing_text(reasoning: ReasoningFormat) -> str:
    """Return what ends reasoning, as the model writes it, up to the end of the marker."""
    body = "\N{OBJECT REPLACEMENT CHARACTER}"
    tail = reasoning.render(body).partition(body)[2]
    ends = [tail.find(closer) + len(closer) for closer in reasoning.closers if closer in tail]
    return tail[: min(ends)] if ends else reasoning.closers[0]
