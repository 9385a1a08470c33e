"""OpenAI's chat and plain completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_mlx.bench.answer import Answer, count, error_text, mapping
from vllm_mlx.bench.endpoints import Ask, common_fields, message_text

_decode = msgspec.json.decode


class ChatEndpoint:
    """Ask `/v1/chat/completions`."""

    name = "chat"
    path = "/v1/chat/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the JSON body of a request."""
        body = common_fields(ask) | {
            "messages": [dict(message) for message in ask.messages],
            "max_tokens": ask.max_tokens,
        }
        if ask.is_streamed:
            body["stream_options"] = {"include_usage": True}
        if ask.tools:
            body["tools"] = [dict(tool) for tool in ask.tools]
        return {**body, **ask.extra}

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return the authorisation."""
        return bearer(api_key)

    def read_event(self, answer: Answer, name: str, data: bytes) -> bool:
        """Read one chunk; return whether it carried text, reasoning or a piece of a tool call."""
        del name
        if data.startswith(b"[DONE]"):
            answer.has_end_mark = True
            return False
        chunk = _object(data)
        _read_head(answer, chunk)
        has_output = False
        for choice in chunk.get("choices") or ():
            has_output |= _read_message(answer, mapping(choice.get("delta")))
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        return has_output

    def read_whole(self, answer: Answer, body: bytes) -> None:
        """Read a whole completion."""
        completion = _object(body)
        _read_head(answer, completion)
        for choice in completion.get("choices") or ():
            _read_message(answer, mapping(choice.get("message")))
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        answer.has_end_mark = True


class CompletionsEndpoint:
    """Ask `/v1/completions`; messages become one text, a blank line between them."""

    name = "completions"
    path = "/v1/completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the JSON body of a request."""
        body = common_fields(ask) | {
            "prompt": completion_prompt(ask),
            "max_tokens": ask.max_tokens,
        }
        if ask.is_streamed:
            body["stream_options"] = {"include_usage": True}
        return {**body, **ask.extra}

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return the authorisation."""
        return bearer(api_key)

    def read_event(self, answer: Answer, name: str, data: bytes) -> bool:
        """Read one chunk; return whether it carried text."""
        del name
        if data.startswith(b"[DONE]"):
            answer.has_end_mark = True
            return False
        return self._read(answer, _object(data))

    def read_whole(self, answer: Answer, body: bytes) -> None:
        """Read a whole completion."""
        self._read(answer, _object(body))
        answer.has_end_mark = True

    def _read(self, answer: Answer, completion: Mapping[str, Any]) -> bool:
        _read_head(answer, completion)
        has_output = False
        for choice in completion.get("choices") or ():
            has_output |= answer.add_content(choice.get("text"))
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        return has_output


def completion_prompt(ask: Ask) -> str:
    """Return the messages as the one text that plain completions take."""
    return "\n\n".join(message_text(message) for message in ask.messages)


def bearer(api_key: str | None) -> dict[str, str]:
    """Return the header that carries the key, none without one."""
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def read_openai_usage(answer: Answer, usage: object) -> None:
    """Read the token counts of chat and plain completions; counts that are missing are kept."""
    if not isinstance(usage, Mapping):
        return
    prompt_tokens = count(usage.get("prompt_tokens"))
    completion_tokens = count(usage.get("completion_tokens"))
    cached_tokens = count(mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))
    answer.prompt_tokens = answer.prompt_tokens if prompt_tokens is None else prompt_tokens
    if completion_tokens is not None:
        answer.completion_tokens = completion_tokens
    answer.cached_tokens = answer.cached_tokens if cached_tokens is None else cached_tokens


def _object(data: bytes) -> Mapping[str, Any]:
    # msgspec's error is a ValueError.
    found = _decode(data)
    if not isinstance(found, dict):
        raise ValueError("an event is not a JSON object")
    return found


def _read_head(answer: Answer, chunk: Mapping[str, Any]) -> None:
    if chunk.get("error"):
        answer.error = error_text(chunk["error"])
    if answer.request_id is None and isinstance(chunk.get("id"), str):
        answer.request_id = chunk["id"]
    usage = chunk.get("usage")
    if usage is not None:
        read_openai_usage(answer, usage)


def _read_message(answer: Answer, message: Mapping[str, Any]) -> bool:
    """Read a delta or a message: they hold the same parts."""
    has_output = answer.add_content(message.get("content"))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    has_output |= answer.add_reasoning(reasoning)
    for position, call in enumerate(message.get("tool_calls") or ()):
        function = mapping(call.get("function"))
        index = count(call.get("index"))
        has_output |= answer.add_tool_call(
            position if index is None else index, function.get("name"), function.get("arguments")
        )
    return has_output
