"""Say in plain messages what a chat template leaves out: tools, calls and their results; pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm_mlx.engine.parsing.tool_format import ToolFormat

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

_INTRODUCTION = """\
# Tools

These functions can be called, each described by a JSON object:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments in exactly this form:
{example}
Call only functions that are listed. The result of a call comes back within \
<tool_response></tool_response>."""


def with_tools_described(
    messages: Sequence[Message], tools: Sequence[Tool], tool_format: type[ToolFormat]
) -> list[Message]:
    """Return the chat with the tools, and how to call them, at the end of its system message."""
    text = _INTRODUCTION.format(
        tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools),
        example=tool_format.render_call("function-name", {"argument-name": "value"}),
    )
    if messages and messages[0]["role"] == "system":
        system = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}".lstrip()}
        return [system, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_calls_written(messages: Iterable[Message], tool_format: type[ToolFormat]) -> list[Message]:
    """Return the chat with each earlier call as the text that the model writes for it."""
    return [
        _call_written(message, tool_format) if message.get("tool_calls") else message
        for message in messages
    ]


def with_results_written(messages: Iterable[Message]) -> list[Message]:
    """Return the chat with the results of calls as the user's; those in a row as one message."""
    written: list[Message] = []
    is_behind_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if not is_result:
            written.append(message)
        else:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if is_behind_result:
                text = f"{written.pop()['content']}\n{text}"
            written.append({"role": "user", "content": text})
        is_behind_result = is_result
    return written


def with_arguments_as_text(messages: Iterable[Message]) -> list[Message]:
    """Return the chat with the arguments of each call as JSON text, as some templates want it."""
    return [
        {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _call_written(message: Message, tool_format: type[ToolFormat]) -> Message:
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]
    parts = [message.get("content") or "", tool_format.render_calls(calls)]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(part for part in parts if part)}


def _as_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
