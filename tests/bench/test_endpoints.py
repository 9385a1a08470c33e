"""Hold what is sent to each API, and what is read from its answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.api_answers import answer_events, event, whole_answer

from vllm_mlx.bench.answer import Answer
from vllm_mlx.bench.endpoints import ENDPOINT_NAMES, Ask, endpoint_named
from vllm_mlx.bench.sse import SseSplitter

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
ASK = Ask(
    model="m",
    messages=[{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}],
    max_tokens=5,
    temperature=0.0,
    tools=[TOOL],
    is_held=True,
    extra={"top_k": 3},
)
HELD = {"ignore_eos": True, "min_tokens": 5, "top_k": 3, "temperature": 0.0, "stream": True}


def read(endpoint: str, *blocks: bytes) -> tuple[Answer, list[bool]]:
    """Read a stream and return the answer, and which events carried output."""
    answer, splitter, reader = Answer(), SseSplitter(), endpoint_named(endpoint)
    events = splitter.feed(b"".join(blocks))
    return answer, [reader.read_event(answer, one.name, one.data) for one in events]


def test_chat_body() -> None:
    """Chat carries messages and tools as they are, and asks for usage."""
    assert endpoint_named("chat").body(ASK) == {
        "model": "m",
        "messages": list(ASK.messages),
        "max_tokens": 5,
        "stream_options": {"include_usage": True},
        "tools": [TOOL],
        **HELD,
    }


def test_completions_body() -> None:
    """Plain completions carry the messages' texts."""
    body = endpoint_named("completions").body(ASK)
    assert body["prompt"] == "be kind\n\nhello"
    assert body["stream_options"] == {"include_usage": True}


def test_messages_body() -> None:
    """Anthropic's messages carry the system text and the tools in their own shape."""
    endpoint = endpoint_named("messages")
    assert endpoint.body(ASK) == {
        "model": "m",
        "system": "be kind",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 5,
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        **HELD,
    }
    assert endpoint.headers("k")["x-api-key"] == "k"
    assert "anthropic-version" in endpoint.headers(None)


def test_responses_body() -> None:
    """Responses carry the input, flat tools, and are not stored."""
    assert endpoint_named("responses").body(ASK) == {
        "model": "m",
        "input": list(ASK.messages),
        "max_output_tokens": 5,
        "store": False,
        "tools": [{"type": "function", **TOOL["function"]}],
        **HELD,
    }


@pytest.mark.parametrize("name", ["chat", "completions", "responses"])
def test_keys_are_bearer_tokens(name: str) -> None:
    """OpenAI's endpoints carry the key as a bearer token, and nothing without one."""
    assert endpoint_named(name).headers("k") == {"authorization": "Bearer k"}
    assert endpoint_named(name).headers(None) == {}


@pytest.mark.parametrize("name", ENDPOINT_NAMES)
def test_streamed_text(name: str) -> None:
    """A stream gives its text, counts and end; each word is one output, all else is none."""
    start, words, end = answer_events(name, ["one", " two"], prompt_tokens=9, cached_tokens=4)
    answer, carried = read(name, *start, *words, *end)
    assert carried == [False] * len(start) + [True, True] + [False] * len(end)
    assert answer.content == "one two"
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 2, 4)
    assert (answer.finish_reason, answer.has_end_mark) == ("stop", True)
    assert answer.request_id is not None


@pytest.mark.parametrize("name", ENDPOINT_NAMES)
def test_whole_text(name: str) -> None:
    """A whole answer gives the same as a streamed one."""
    body = whole_answer(name, ["one", " two"], prompt_tokens=9, cached_tokens=4)
    answer = Answer()
    endpoint_named(name).read_whole(answer, json.dumps(body).encode())
    assert answer.content == "one two"
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 2, 4)
    assert (answer.finish_reason, answer.has_end_mark) == ("stop", True)


def chat_delta(**delta: Any) -> bytes:
    """Frame one chat delta."""
    return event({"choices": [{"index": 0, "delta": delta}]})


def test_chat_reasoning_and_tools_are_output() -> None:
    """Reasoning under either name and every piece of a tool call count as output."""
    first = {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}
    second = {"index": 0, "function": {"arguments": '{"a":'}}
    third = {"index": 1, "function": {"name": "g", "arguments": "{}"}}
    answer, carried = read(
        "chat",
        chat_delta(reasoning_content="hm"),
        chat_delta(reasoning="hm", content=None),
        chat_delta(tool_calls=[first]),
        chat_delta(tool_calls=[second, third]),
        chat_delta(role="assistant"),
    )
    assert carried == [True, True, True, True, False]
    assert answer.reasoning == "hmhm"
    calls = [(call.name, call.arguments) for call in answer.tool_calls.values()]
    assert calls == [("f", '{"a":'), ("g", "{}")]


def test_messages_thinking_and_tools_are_output() -> None:
    """Thinking and tool blocks of Anthropic's stream count as output."""
    answer, carried = read(
        "messages",
        event({"type": "content_block_start", "index": 0,
               "content_block": {"type": "thinking", "thinking": ""}}),
        event({"type": "content_block_delta", "index": 0,
               "delta": {"type": "thinking_delta", "thinking": "hm"}}),
        event({"type": "content_block_start", "index": 1,
               "content_block": {"type": "tool_use", "id": "t", "name": "f", "input": {}}}),
        event({"type": "content_block_delta", "index": 1,
               "delta": {"type": "input_json_delta", "partial_json": "{}"}}),
        event({"type": "message_delta", "delta": {"stop_reason": "tool_use"}}),
    )  # fmt: skip
    assert carried == [False, True, True, True, False]
    assert answer.reasoning == "hm"
    assert answer.finish_reason == "tool_calls"
    assert [(c.name, c.arguments) for c in answer.tool_calls.values()] == [("f", "{}")]


def test_responses_tools_and_length() -> None:
    """Function calls of a response are output; one cut off ends with `length`."""
    call = {"type": "function_call", "name": "f"}
    end = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    answer, carried = read(
        "responses",
        event({"type": "response.output_item.added", "output_index": 1, "item": call}),
        event({"type": "response.function_call_arguments.delta", "output_index": 1, "delta": "{"}),
        event({"type": "response.incomplete", "response": end}),
    )
    assert carried == [True, True, False]
    assert [(c.name, c.arguments) for c in answer.tool_calls.values()] == [("f", "{")]
    assert answer.finish_reason == "length"


ERRORS = {
    "chat": {"error": {"message": "no memory", "type": "server_error"}},
    "completions": {"error": {"message": "no memory"}},
    "messages": {"type": "error", "error": {"type": "api_error", "message": "no memory"}},
    "responses": {
        "type": "response.failed",
        "response": {"status": "failed", "error": {"message": "no memory"}},
    },
}


@pytest.mark.parametrize("name", ENDPOINT_NAMES)
def test_errors_within_a_stream(name: str) -> None:
    """Each API's own error event is read as an error."""
    answer, _ = read(name, event(ERRORS[name]))
    assert answer.error == "no memory"


@pytest.mark.parametrize("name", ENDPOINT_NAMES)
@pytest.mark.parametrize("data", [b"not json", b"[1]", b'"text"'])
def test_what_is_not_the_api_is_refused(name: str, data: bytes) -> None:
    """Data of another shape raises, rather than passing for an empty answer."""
    with pytest.raises(ValueError):
        endpoint_named(name).read_event(Answer(), "message", data)
