"""The bodies and chunks of OpenAI's chat and completion answers, as plain JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_mlx.engine.core.outputs import RowOutput
from vllm_mlx.server.answers.events import TOOL_CALLS, ParsedAnswer
from vllm_mlx.server.generation import Answer
from vllm_mlx.server.openai.logprobs import CompletionPieces, Spell, chat_logprobs


@dataclass(frozen=True)
class AnswerHead:
    """Hold what every chunk and body of one answer repeats unchanged."""

    id: str
    model: str
    #: Unix time.
    created: int
    #: Messages and deltas name reasoning also where they have none: clients look for it in each.
    names_reasoning: bool = False

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the fields that an object of `kind` begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def chat_completion(
    head: AnswerHead,
    answers: Sequence[ParsedAnswer],
    spell: Spell | None,
    *,
    is_legacy: bool = False,
) -> dict[str, Any]:
    """Return the body of a whole chat answer; `spell` where log-probabilities are asked for.

    `is_legacy` says that the request named its tools as functions.
    """
    choices = [
        {
            "index": index,
            "message": _named(head, _message(answer, is_legacy=is_legacy)),
            "logprobs": chat_logprobs(answer.logprobs, spell) if spell is not None else None,
            **_ending(answer.last, chat_reason(answer.finish_reason, is_legacy=is_legacy)),
        }
        for index, answer in enumerate(answers)
    ]
    return {
        **head.fields("chat.completion"),
        "choices": choices,
        "usage": usage([answer.last for answer in answers], len(answers)),
    }


def _message(answer: ParsedAnswer, *, is_legacy: bool) -> dict[str, Any]:
    """Return the message of one answer; what it does not hold is left out."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content or (None if answer.calls else ""),
        "refusal": None,
    }
    if answer.reasoning:
        message |= reasoning_fields(answer.reasoning)
    calls = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
    if calls and is_legacy:
        message["function_call"] = calls[0]
    elif calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(answer.calls, calls, strict=True)
        ]
    return message


def _named(head: AnswerHead, fields: dict[str, Any]) -> dict[str, Any]:
    return {**reasoning_fields(None), **fields} if head.names_reasoning else fields


def reasoning_fields(text: str | None) -> dict[str, Any]:
    """Return reasoning under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def chat_reason(reason: str | None, *, is_legacy: bool) -> str | None:
    """Return why a chat's answer ended, in the words of the API's generation that was used."""
    return "function_call" if is_legacy and reason == TOOL_CALLS else reason


def text_completion(
    head: AnswerHead, answers: Sequence[Answer], pieces: CompletionPieces, num_choices: int
) -> dict[str, Any]:
    """Return the body of a whole completion: `num_choices` for each prompt, prompt by prompt."""
    choices = []
    for index, answer in enumerate(answers):
        text, logprobs = pieces.piece(index, answer.text, answer.logprobs, answer.prompt_logprobs)
        choices.append({"index": index, "text": text, "logprobs": logprobs, **_ending(answer.last)})
    return {
        **head.fields("text_completion"),
        "choices": choices,
        "usage": usage([answer.last for answer in answers], num_choices),
    }


def chat_chunk(
    head: AnswerHead,
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    last: RowOutput | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    """Return a chunk of choice `index` of a streamed chat answer; `last` ends that choice."""
    ending = _ending(last, finish_reason)
    choice = {"index": index, "delta": _named(head, delta), "logprobs": logprobs, **ending}
    return {**head.fields("chat.completion.chunk"), "choices": [choice]}


def text_chunk(
    head: AnswerHead,
    index: int,
    text: str,
    logprobs: dict[str, Any] | None = None,
    last: RowOutput | None = None,
) -> dict[str, Any]:
    """Return a chunk of choice `index` of a streamed completion; `last` ends that choice."""
    choice = {"index": index, "text": text, "logprobs": logprobs, **_ending(last)}
    return {**head.fields("text_completion"), "choices": [choice]}


def usage_chunk(
    head: AnswerHead, kind: str, ends: Sequence[RowOutput], num_choices: int
) -> dict[str, Any]:
    """Return the last chunk of a stream that was asked for usage; its choices are empty."""
    return {**head.fields(kind), "choices": [], "usage": usage(ends, num_choices)}


def usage(rows: Sequence[RowOutput], num_choices: int) -> dict[str, Any]:
    """Add up what one request took, from the final outputs of its rows in order.

    Each prompt counts once, by the first of its `num_choices`: what the others found stored is
    what that one computed.
    """
    firsts = rows[::num_choices]
    prompt = sum(row.num_prompt_tokens for row in firsts)
    completion = sum(row.num_completion_tokens for row in rows)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(row.num_cached_tokens for row in firsts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(row.num_reasoning_tokens for row in rows)
        },
    }


def _ending(last: RowOutput | None, finish_reason: str | None = None) -> dict[str, Any]:
    """Return why a row ended; `stop_reason` tells which stop string or token it was.

    `finish_reason` stands over the engine's own.
    """
    if last is None:
        return {"finish_reason": None}
    return {"finish_reason": finish_reason or last.finish_reason, "stop_reason": last.stop_reason}
