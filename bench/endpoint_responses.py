"""OpenAI's responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_mlx.bench.answer import Answer, count, error_text, mapping
from vllm_mlx.bench.endpoints import Ask, common_fields
from vllm_mlx.bench.endpoints_openai import bearer

_REASONING_EVENTS = frozenset(
    {"response.reasoning_text.delta", "response.reasoning_summary_text.delta"}
)
_END_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed"})


class ResponsesEndpoint:
    """Ask `/v1/responses`; nothing is stored on the server."""

    name = "responses"
    path = "/v1/responses"

    def body(self, ask: Ask) -> dict[str, Any]:
        """Return the JSON body of a request."""
        body = common_fields(ask) | {
            "input": [dict(message) for message in ask.messages],
            "max_output_tokens": ask.max_tokens,
            "store": False,
        }
        if ask.tools:
            body["tools"] = [_tool(tool) for tool in ask.tools]
        return {**body, **ask.extra}

    def headers(self, api_key: str | None) -> dict[str, str]:
        """Return the authorisation."""
        return bearer(api_key)

    def read_event(self, answer: Answer, name: str, data: bytes) -> bool:
        """Read one event; return whether it carried text, reasoning or a piece of a tool call."""
        if data.startswith(b"[DONE]"):
            answer.has_end_mark = True
            return False
        event = msgspec.json.decode(data)
        if not isinstance(event, dict):
            raise ValueError("an event is not a JSON object")
        kind = event.get("type", name)
        if kind in ("response.output_text.delta", "response.refusal.delta"):
            return answer.add_content(event.get("delta"))
        if kind in _REASONING_EVENTS:
            return answer.add_reasoning(event.get("delta"))
        index = count(event.get("output_index")) or 0
        if kind == "response.function_call_arguments.delta":
            return answer.add_tool_call(index, None, event.get("delta"))
        if kind == "response.output_item.added":
            item = mapping(event.get("item"))
            if item.get("type") == "function_call":
                return answer.add_tool_call(index, item.get("name"), None)
        elif kind in _END_EVENTS:
            _read_end(answer, mapping(event.get("response")))
        elif kind == "error":
            answer.error = error_text(event)
        return False

    def read_whole(self, answer: Answer, body: bytes) -> None:
        """Read a whole response."""
        response = msgspec.json.decode(body)
        if not isinstance(response, dict):
            raise ValueError("the answer is not a JSON object")
        for index, item in enumerate(response.get("output") or ()):
            _read_item(answer, index, mapping(item))
        _read_end(answer, response)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in this API's flat shape; one that is in it already is returned as it is."""
    function = tool.get("function")
    return {"type": "function", **function} if isinstance(function, Mapping) else dict(tool)


def _read_item(answer: Answer, index: int, item: Mapping[str, Any]) -> None:
    kind = item.get("type")
    if kind == "function_call":
        answer.add_tool_call(index, item.get("name"), item.get("arguments"))
    for part in item.get("content") or item.get("summary") or ():
        text = mapping(part).get("text")
        if kind == "reasoning":
            answer.add_reasoning(text)
        else:
            answer.add_content(text)


def _read_end(answer: Answer, response: Mapping[str, Any]) -> None:
    """Read what only the last event, or the whole body, tells."""
    if isinstance(response.get("id"), str):
        answer.request_id = response["id"]
    usage = mapping(response.get("usage"))
    answer.prompt_tokens = count(usage.get("input_tokens"))
    answer.completion_tokens = count(usage.get("output_tokens"))
    answer.cached_tokens = count(mapping(usage.get("input_tokens_details")).get("cached_tokens"))
    status = response.get("status")
    if status == "failed" or response.get("error"):
        answer.error = error_text(response.get("error") or "the response failed")
    elif status == "incomplete":
        reason = mapping(response.get("incomplete_details")).get("reason")
        answer.finish_reason = "length" if reason == "max_output_tokens" else str(reason)
    else:
        answer.finish_reason = "tool_calls" if answer.tool_calls else "stop"
    answer.has_end_mark = True
