"""The demo model behind the Messages route, as manuals of the real client use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from anthropic import Anthropic
from support.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HELLO: list[Any] = [{"role": "user", "content": "Hello there"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get weather for a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path
) -> Iterator[ServerProcess]:
    """Return a ready server of the demo model."""
    with ServerProcess("demo", tmp_path_factory.mktemp("demo")) as process:
        yield process.wait_ready(180)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Anthropic]:
    """Return a client that does not retry."""
    with Anthropic(base_url=server.url, api_key="not-needed", max_retries=0) as made:
        yield made


def text_of(message: anthropic.types.Message) -> str:
    """Return the text of the first block."""
    block = message.content[0]
    assert block.type == "text"
    return block.text


def test_questions_are_answered(client: Anthropic) -> None:
    """Whole, streamed, with a system prompt in both forms, and in the middle of a talk."""
    response = client.messages.create(
        model="default", max_tokens=64, messages=[{"role": "user", "content": "Hello!"}]
    )
    assert text_of(response)
    assert response.id.startswith("msg_")
    assert response.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(
        model="default", max_tokens=64, messages=[{"role": "user", "content": "Tell me a story"}]
    ) as stream:
        assert len(list(stream.text_stream)) > 10
    system: Any
    for system in (
        "You are a helpful coding assistant.",
        [
            {"type": "text", "text": "You are a helpful assistant."},
            {"type": "text", "text": "Be concise in your answers."},
        ],
    ):
        response = client.messages.create(
            model="default",
            max_tokens=32,
            system=system,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            extra_body={"temperature": 0},
        )
        assert "Paris" in text_of(response)
    response = client.messages.create(
        model="default",
        max_tokens=32,
        messages=[
            {"role": "user", "content": "My name is Alice."},
            {"role": "assistant", "content": "Nice to meet you, Alice!"},
            {"role": "user", "content": "What's my name?"},
        ],
        extra_body={"temperature": 0},
    )
    assert text_of(response)
    assert response.usage.input_tokens + (response.usage.cache_read_input_tokens or 0) > 30


def test_an_answer_that_was_begun_is_gone_on_with(client: Anthropic) -> None:
    """The text goes on where the assistant's last message ends."""
    response = client.messages.create(
        model="default",
        max_tokens=8,
        messages=[
            {"role": "user", "content": "What is the capital of France?"},
            {"role": "assistant", "content": "The capital of France is"},
        ],
        extra_body={"temperature": 0},
    )
    assert "Paris" in text_of(response)
    assert "capital" not in text_of(response)


def test_tools_are_used_and_their_results_read(client: Anthropic) -> None:
    """The first answer calls, the second one is text."""
    messages: list[Any] = [{"role": "user", "content": "What's the weather in Paris?"}]
    response = client.messages.create(
        model="default",
        max_tokens=1024,
        messages=messages,
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "get_weather"},
    )
    assert response.stop_reason == "tool_use"
    calls = [block for block in response.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 22C"} for call in calls
    ]
    response = client.messages.create(
        model="default",
        max_tokens=256,
        messages=[
            *messages,
            {"role": "assistant", "content": response.content},
            {"role": "user", "content": results},
        ],
        tools=[WEATHER],
        tool_choice={"type": "none"},
    )
    assert text_of(response)
    assert response.stop_reason != "tool_use"


def test_tokens_are_counted_with_all_that_the_prompt_has(server: ServerProcess) -> None:
    """System prompt and tools count."""
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "Hello, how are you?"}],
    }
    url = f"{server.url}/v1/messages/count_tokens"
    counts = [
        httpx.post(url, json={**body, **fields}, timeout=60).json()["input_tokens"]
        for fields in ({}, {"system": "You are helpful."}, {"tools": [WEATHER]})
    ]
    assert 0 < counts[0] < counts[2]
    assert counts[0] != counts[1]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_that_is_asked_for_is_made(
    client: anthropic.Anthropic, choice: dict[str, Any]
) -> None:
    """Of a model that knows nothing, with arguments that follow the schema; and just one."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [
        {"name": name, "description": "Look.", "input_schema": schema, "strict": True}
        for name in ("get_time", "get_weather")
    ]
    arguments: dict[str, Any] = {
        "model": "default",
        "messages": HELLO,
        "max_tokens": 300,
        "tools": tools,
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
        "extra_body": {"temperature": 1},
    }
    whole = client.messages.create(**arguments)
    with client.messages.stream(**arguments) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        (call,) = [block for block in message.content if block.type == "tool_use"]
        jsonschema.validate(call.input, schema)
        assert message.stop_reason == "tool_use"
        assert call.name == choice.get("name", call.name)
