"""What tests of the Responses routes share: tools, how to ask, and how to read the events."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from vllm_mlx.engine.text.chat_formats import ChatFormats

FORMATS = ChatFormats(tools="hermes", reasoning="qwen3")
TOOL = {
    "type": "function",
    "name": "look_up",
    "description": "Look it up.",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"},
}
SPACE = {"type": "namespace", "name": "agents", "description": "Others.", "tools": [TOOL]}
CALL = '<tool_call>{"name": "look_up", "arguments": {"q": "x"}}</tool_call>'

_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def ask(served: Any, given: Any = "hi", **fields: Any) -> Any:
    """Post a body and return the response."""
    return await served.post("/v1/responses", input=given, **fields)


async def events_of(response: Any) -> list[dict[str, Any]]:
    """Return a stream's events: each is named, numbered, and valid by the client's own types."""
    assert response.status_code == 200, await response.get_data()
    found = []
    for block in (await response.get_data()).decode().split("\n\n"):
        if block:
            name, data = block.split("\n")
            payload = json.loads(data.removeprefix("data: "))
            assert name == f"event: {payload['type']}"
            _EVENTS.validate_python(payload)
            found.append(payload)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, without what all begin with, and each run of deltas once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if name not in names[i - 1 : i]]


async def first_row(served: Any, number: int = 0) -> str:
    """Wait for a request to reach the engine and return its id."""
    while len(served.engine.requests) <= number:
        await served.engine.sleep()
    return served.engine.requests[number].request_id


#: The events of each kind of item.
TEXT = [
    *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
    *("content_part.done", "output_item.done"),
]
REASONING = [name.replace("output_text", "reasoning_text") for name in TEXT]
ARGUMENTS = "function_call_arguments"
CALLED = ["output_item.added", f"{ARGUMENTS}.delta", f"{ARGUMENTS}.done", "output_item.done"]
CUSTOM = [name.replace(ARGUMENTS, "custom_tool_call_input") for name in CALLED]
