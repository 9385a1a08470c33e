"""The built-in workloads, in the shape of a workload's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


_WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "day": {"type": "string"}},
            "required": ["town"],
        },
    },
}

#: Everyday chats: short and longer answers, a conversation, a list, some code.
_CHAT: Mapping[str, Any] = {
    "name": "chat",
    "description": "Everyday chats with light checks that any instruction-tuned model can pass.",
    "defaults": {
        "max_tokens": 256,
        "checks": {
            "finish_reason": ["stop", "length"],
            "min_chars": 1,
            "forbidden_regex": [r"<\|[a-z_]+\|>"],
            "no_tool_calls": True,
        },
    },
    "cases": [
        {
            "id": "greeting",
            "tags": ["short"],
            "messages": _user("Say hello in one short sentence."),
            "checks": {"max_chars": 1500},
        },
        {
            "id": "explain",
            "tags": ["text"],
            "messages": _user("Explain in one paragraph why the sea is salty."),
            "checks": {"min_chars": 60, "required_regex": [r"(?i)salt|mineral|river"]},
        },
        {
            "id": "list",
            "tags": ["format"],
            "messages": _user("List five vegetables, one a line, with a hyphen before each."),
            "checks": {"min_chars": 15},
        },
        {
            "id": "code",
            "tags": ["code"],
            "messages": _user("Write a Python function `add` that returns the sum of two numbers."),
            "checks": {"required_regex": [r"def\s+\w+"]},
        },
        {
            "id": "conversation",
            "tags": ["multi-turn"],
            "messages": [
                {"role": "system", "content": "You are a patient teacher. Answer briefly."},
                {"role": "user", "content": "My name is Ada. What is a prime number?"},
                {
                    "role": "assistant",
                    "content": "A whole number above 1 that only 1 and itself divide.",
                },
                {"role": "user", "content": "Name the first four of them, please."},
            ],
            "checks": {"min_chars": 4},
        },
    ],
}

#: Structured answers, for models that can give them.
_STRUCTURED: Mapping[str, Any] = {
    "name": "structured",
    "description": "JSON and tool calls; needs a model and a server that can do both.",
    "defaults": {"max_tokens": 512},
    "cases": [
        {
            "id": "json",
            "tags": ["json"],
            "messages": _user(
                "Answer with one JSON object and nothing else: the name and the population, as a "
                "whole number, of the capital of France."
            ),
            "extra_body": {"response_format": {"type": "json_object"}},
            "checks": {"json": True, "no_tool_calls": True},
        },
        {
            "id": "tool",
            "tags": ["tools"],
            "tools": [_WEATHER_TOOL],
            "messages": _user("What will the weather be in Lisbon tomorrow? Look it up."),
            "checks": {
                "finish_reason": ["tool_calls"],
                "tool_call_count": 1,
                "tool_call_names": ["get_weather"],
                "tool_call_args_required_keys": {"get_weather": ["town"]},
            },
        },
        {
            "id": "no-tool",
            "tags": ["tools"],
            "tools": [_WEATHER_TOOL],
            "messages": _user("Say thank you in three languages."),
            "checks": {"no_tool_calls": True, "min_chars": 10},
        },
    ],
}

BUILTIN_WORKLOADS: Mapping[str, Mapping[str, Any]] = {"chat": _CHAT, "structured": _STRUCTURED}
