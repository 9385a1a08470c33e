"""Anthropic's messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_mlx.bench.answer import Answer, count, error_text, mapping
from vllm_mlx.bench.endpoints import Ask, common_fields, message_text

ANTHROPIC_VERSION = "2023-06-01"

FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
}


class MessagesEndpoint:
    """Ask `/v1/messages`; system messages move to the field of their own."""

    name = "messages"
    path = "/v1/messages"

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the JSON body of a request."""
        body = common_fields(ask) | messages_fields(ask) | {"max_tokens": ask.max_tokens}
        return {**body, **ask.extra}

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return the API's version and the key."""
        return messages_headers(api_key)

    def read_event(self, answer: Answer, name: str, data: bytes) -> bool:
        """Read one event; return whether it carried text, thinking or a piece of a tool call."""
        event = msgspec.json.decode(data)
        if not isinstance(event, dict):
            raise ValueError("an event is not a JSON object")
        kind = event.get("type", name)
        if kind == "content_block_delta":
            return _read_delta(answer, count(event.get("index")) or 0, mapping(event.get("delta")))
        if kind == "content_block_start":
            return _read_block(
                answer, count(event.get("index")) or 0, mapping(event.get("content_block"))
            )
        if kind == "message_start":
            _read_message_head(answer, mapping(event.get("message")))
        elif kind == "message_delta":
            _read_stop(answer, mapping(event.get("delta")))
            _read_usage(answer, mapping(event.get("usage")))
        elif kind == "message_stop":
            answer.has_end_mark = True
        elif kind == "error":
            answer.error = error_text(event)
        return False

    def read_whole(self, answer: Answer, body: bytes) -> None:
        """Read a whole message."""
        message = msgspec.json.decode(body)
        if not isinstance(message, dict):
            raise ValueError("the answer is not a JSON object")
        if message.get("type") == "error":
            answer.error = error_text(message)
            return
        _read_message_head(answer, message)
        for index, block in enumerate(message.get("content") or ()):
            _read_block(answer, index, mapping(block))
        _read_stop(answer, message)
        answer.has_end_mark = True


def messages_fields(ask: Ask) -> dict[str, Any]:
    """Return system, messages and tools in Anthropic's shape."""
    system = [message_text(m) for m in ask.messages if m.get("role") in ("system", "developer")]
    rest = [dict(m) for m in ask.messages if m.get("role") not in ("system", "developer")]
    fields: dict[str, Any] = {"messages": rest}
    if system:
        fields["system"] = "\n\n".join(system)
    if ask.tools:
        fields["tools"] = [_tool(tool) for tool in ask.tools]
    return fields


def messages_headers(api_key: str | None) -> dict[str, str]:
    """Return the headers that Anthropic's API wants."""
    headers = {"anthropic-version": ANTHROPIC_VERSION}
    return headers if api_key is None else headers | {"x-api-key": api_key}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in Anthropic's shape; one that is in it already is returned as it is."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    schema = function.get("parameters") or {"type": "object"}
    described = {"name": function.get("name"), "input_schema": schema}
    if function.get("description"):
        described["description"] = function["description"]
    return described


def _read_message_head(answer: Answer, message: Mapping[str, Any]) -> None:
    if isinstance(message.get("id"), str):
        answer.request_id = message["id"]
    _read_usage(answer, mapping(message.get("usage")))


def _read_block(answer: Answer, index: int, block: Mapping[str, Any]) -> bool:
    kind = block.get("type")
    if kind == "text":
        return answer.add_content(block.get("text"))
    if kind == "thinking":
        return answer.add_reasoning(block.get("thinking"))
    if kind == "tool_use":
        given = block.get("input")
        # A streamed block starts with an empty input, and its text follows in pieces.
        text = msgspec.json.encode(given).decode() if given else None
        return answer.add_tool_call(index, block.get("name"), text)
    return False


def _read_delta(answer: Answer, index: int, delta: Mapping[str, Any]) -> bool:
    kind = delta.get("type")
    if kind == "text_delta":
        return answer.add_content(delta.get("text"))
    if kind == "thinking_delta":
        return answer.add_reasoning(delta.get("thinking"))
    if kind == "input_json_delta":
        return answer.add_tool_call(index, None, delta.get("partial_json"))
    return False


def _read_stop(answer: Answer, source: Mapping[str, Any]) -> None:
    reason = source.get("stop_reason")
    if isinstance(reason, str):
        answer.finish_reason = FINISH_REASONS.get(reason, reason)


def _read_usage(answer: Answer, usage: Mapping[str, Any]) -> None:
    """Read the counts; `input_tokens` leaves out what came from or went into the cache."""
    uncached = count(usage.get("input_tokens"))
    read = count(usage.get("cache_read_input_tokens"))
    written = count(usage.get("cache_creation_input_tokens"))
    if uncached is not None:
        answer.prompt_tokens = uncached + (read or 0) + (written or 0)
    if read is not None:
        answer.cached_tokens = read
    output = count(usage.get("output_tokens"))
    if output is not None:
        answer.completion_tokens = output
