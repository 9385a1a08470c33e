"""Write the answers of each API as a server streams them: an event for each token."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any


def answer_events(
    endpoint: str, words: Sequence[str], *, prompt_tokens: int, cached_tokens: int = 0
) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Return the events before the first word, one for each word, and those after the last."""
    return _written(endpoint, tuple(words), prompt_tokens, cached_tokens)


@functools.lru_cache(maxsize=256)
def _written(
    endpoint: str, words: tuple[str, ...], prompt_tokens: int, cached_tokens: int
) -> tuple[list[bytes], list[bytes], list[bytes]]:
    found: tuple[list[bytes], list[bytes], list[bytes]]
    found = _WRITERS[endpoint](words, prompt_tokens, cached_tokens)
    return found


def whole_answer(
    endpoint: str, words: Sequence[str], *, prompt_tokens: int, cached_tokens: int = 0
) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
    text = "".join(words)
    usage = _openai_usage(len(words), prompt_tokens, cached_tokens)
    if endpoint == "chat":
        message = {"role": "assistant", "content": text}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "chatcmpl-1", "choices": [choice], "usage": usage}
    if endpoint == "completions":
        choice = {"index": 0, "text": text, "finish_reason": "stop"}
        return {"id": "cmpl-1", "choices": [choice], "usage": usage}
    if endpoint == "messages":
        return {
            "id": "msg_1",
            "type": "message",
            "content": [{"type": "text", "text": text}],
            "stop_reason": "end_turn",
            "usage": _anthropic_usage(len(words), prompt_tokens, cached_tokens),
        }
    return {
        "id": "resp_1",
        "status": "completed",
        "output": [{"type": "message", "content": [{"type": "output_text", "text": text}]}],
        "usage": _responses_usage(len(words), prompt_tokens, cached_tokens),
    }


def event(payload: dict[str, Any], name: str | None = None) -> bytes:
    """Frame one payload."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {json.dumps(payload)}\n\n".encode()


def _chat(words: Sequence[str], prompt: int, cached: int) -> tuple[list[bytes], ...]:
    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return event({"id": "chatcmpl-1", "choices": [choice], "usage": None})

    usage = _openai_usage(len(words), prompt, cached)
    end = [chunk({}, "stop"), event({"id": "chatcmpl-1", "choices": [], "usage": usage})]
    first = chunk({"role": "assistant", "content": ""})
    return [first], [chunk({"content": word}) for word in words], [*end, b"data: [DONE]\n\n"]


def _completions(words: Sequence[str], prompt: int, cached: int) -> tuple[list[bytes], ...]:
    def chunk(text: str, finish: str | None = None) -> bytes:
        choice = {"index": 0, "text": text, "finish_reason": finish}
        return event({"id": "cmpl-1", "choices": [choice]})

    usage = _openai_usage(len(words), prompt, cached)
    end = [chunk("", "stop"), event({"id": "cmpl-1", "choices": [], "usage": usage})]
    return [], [chunk(word) for word in words], [*end, b"data: [DONE]\n\n"]


def _messages(words: Sequence[str], prompt: int, cached: int) -> tuple[list[bytes], ...]:
    def named(name: str, **fields: Any) -> bytes:
        return event({"type": name, **fields}, name)

    usage = _anthropic_usage(1, prompt, cached)
    start = [
        named("message_start", message={"id": "msg_1", "usage": usage}),
        named("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        named("ping"),
    ]
    deltas = [
        named("content_block_delta", index=0, delta={"type": "text_delta", "text": word})
        for word in words
    ]
    stop = {"stop_reason": "end_turn", "stop_sequence": None}
    end = [
        named("content_block_stop", index=0),
        named("message_delta", delta=stop, usage={"output_tokens": len(words)}),
        named("message_stop"),
    ]
    return start, deltas, end


def _responses(words: Sequence[str], prompt: int, cached: int) -> tuple[list[bytes], ...]:
    def named(name: str, **fields: Any) -> bytes:
        return event({"type": name, **fields}, name)

    start = [
        named("response.created", response={"id": "resp_1", "status": "in_progress"}),
        named("response.output_item.added", output_index=0, item={"type": "message"}),
    ]
    deltas = [
        named("response.output_text.delta", output_index=0, delta=word, item_id="msg_1")
        for word in words
    ]
    response = {
        "id": "resp_1",
        "status": "completed",
        "usage": _responses_usage(len(words), prompt, cached),
    }
    end = [
        named("response.output_text.done", text="".join(words)),
        named("response.completed", response=response),
    ]
    return start, deltas, end


def _openai_usage(completion: int, prompt: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _anthropic_usage(output: int, prompt: int, cached: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": output,
    }


def _responses_usage(output: int, prompt: int, cached: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "output_tokens": output,
        "input_tokens_details": {"cached_tokens": cached},
    }


_WRITERS: dict[str, Any] = {
    "chat": _chat,
    "completions": _completions,
    "messages": _messages,
    "responses": _responses,
}
