"""The message of an answer and its usage, as Anthropic's clients read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_mlx.engine.core.outputs import RowOutput
from vllm_mlx.server.answers.events import TOOL_CALLS, AnswerPart
from vllm_mlx.server.anthropic.blocks import Payload, whole_content


@dataclass(frozen=True)
class MessageHead:
    """Hold what an answer says of itself from the beginning."""

    id: str
    model: str


def whole_message(
    head: MessageHead, payloads: Iterable[Payload], last: AnswerPart
) -> dict[str, Any]:
    """Return the body of a whole answer, from the stream events of its blocks and its last part."""
    message = _message(head, whole_content(payloads))
    return {**message, **ending(last), "usage": usage(last.output)}


def message_start(head: MessageHead, first: RowOutput) -> Payload:
    """Return the first event of a stream: the prompt's tokens are counted, and none written."""
    message = _message(head, []) | {"stop_reason": None, "stop_sequence": None}
    return {"type": "message_start", "message": {**message, "usage": prompt_usage(first, 0)}}


def message_delta(last: AnswerPart) -> Payload:
    """Return the event that says why the answer ended, and all that it took."""
    return {"type": "message_delta", "delta": ending(last), "usage": usage(last.output)}


def ending(last: AnswerPart) -> dict[str, Any]:
    """Return why the answer ended; a cancelled one says `abort`, which is this server's own."""
    assert last.finish_reason is not None
    stopped_by = last.output.stop_reason
    if last.finish_reason == "stop" and isinstance(stopped_by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    return {"stop_reason": _STOP_REASONS[last.finish_reason], "stop_sequence": None}


_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    TOOL_CALLS: "tool_use",
    "abort": "abort",
}


def usage(last: RowOutput) -> dict[str, Any]:
    """Return what a request took, from its final output."""
    details = {"thinking_tokens": last.num_reasoning_tokens}
    return {**prompt_usage(last, last.num_completion_tokens), "output_tokens_details": details}


def prompt_usage(output: RowOutput, num_output_tokens: int) -> dict[str, Any]:
    """Divide the prompt's tokens: found stored, computed and stored now, and only computed.

    Together they are what `count_tokens` counts.
    """
    read, stored = output.num_cached_tokens, output.num_stored_tokens
    return {
        "input_tokens": output.num_prompt_tokens - read - stored,
        "cache_creation_input_tokens": stored,
        "cache_read_input_tokens": read,
        "output_tokens": num_output_tokens,
    }


def _message(head: MessageHead, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
    }
