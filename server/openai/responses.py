"""The bodies and chunks of OpenAI's chat and completion answers, as plain JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_mlx.engine.core.outputs import RowOutput
from vllm_mlx.server.generation import Answer


@dataclass(frozen=True)
class AnswerHead:
    """Hold what every chunk and body of one answer repeats unchanged."""

    id: str
    model: str
    #: Unix time.
    created: int

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the fields that an object of `kind` begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def chat_completion(head: AnswerHead, answer: Answer) -> dict[str, Any]:
    """Return the body of a whole chat answer."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": None,
        **_ending(answer.last),
    }
    return {
        **head.fields("chat.completion"),
        "choices": [choice],
        "usage": usage([answer.last]),
    }


def text_completion(head: AnswerHead, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the body of a whole completion, one choice for each prompt."""
    choices = [
        {"index": index, "text": answer.text, "logprobs": None, **_ending(answer.last)}
        for index, answer in enumerate(answers)
    ]
    return {
        **head.fields("text_completion"),
        "choices": choices,
        "usage": usage(answer.last for answer in answers),
    }


def chat_chunk(
    head: AnswerHead, delta: dict[str, Any], last: RowOutput | None = None
) -> dict[str, Any]:
    """Return a chunk of a streamed chat answer; `last` ends it."""
    choice = {"index": 0, "delta": delta, "logprobs": None, **_ending(last)}
    return {**head.fields("chat.completion.chunk"), "choices": [choice]}


def text_chunk(
    head: AnswerHead, index: int, text: str, last: RowOutput | None = None
) -> dict[str, Any]:
    """Return a chunk of choice `index` of a streamed completion; `last` ends that choice."""
    choice = {"index": index, "text": text, "logprobs": None, **_ending(last)}
    return {**head.fields("text_completion"), "choices": [choice]}


def usage_chunk(head: AnswerHead, kind: str, ends: Iterable[RowOutput]) -> dict[str, Any]:
    """Return the last chunk of a stream that was asked for usage; its choices are empty."""
    return {**head.fields(kind), "choices": [], "usage": usage(ends)}


def usage(ends: Iterable[RowOutput]) -> dict[str, Any]:
    """Add up what the rows of one request took, from their final outputs."""
    rows = list(ends)
    prompt = sum(row.num_prompt_tokens for row in rows)
    completion = sum(row.num_completion_tokens for row in rows)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(row.num_cached_tokens for row in rows)},
    }


def _ending(last: RowOutput | None) -> dict[str, Any]:
    """Return why a row ended; `stop_reason` tells which stop string or token it was."""
    if last is None:
        return {"finish_reason": None}
    return {"finish_reason": last.finish_reason, "stop_reason": last.stop_reason}
