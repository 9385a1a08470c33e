"""The demo model behind the Responses route, asked by the real client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai import OpenAI
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from support.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get weather for a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class City(BaseModel):
    """Name a city and the number of those who live there."""

    name: str
    millions: int


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path
) -> Iterator[ServerProcess]:
    """Return a ready server of the demo model."""
    with ServerProcess("demo", tmp_path_factory.mktemp("demo")) as process:
        yield process.wait_ready(180)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    """Return a client that does not retry."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_conversation_goes_on_and_finds_what_was_computed(client: OpenAI) -> None:
    """The answer is right, and of the next turn's prompt the first turn's was not computed."""
    instructions = "You are a helpful assistant. Answer in one short sentence. " * 8
    first = client.responses.create(
        model="default",
        input="What is the capital of France?",
        instructions=instructions,
        temperature=0,
        max_output_tokens=40,
    )
    assert "Paris" in first.output_text
    assert first.usage is not None
    second = client.responses.create(
        model="default",
        input="And of Italy?",
        instructions=instructions,
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=40,
    )
    assert "Rome" in second.output_text
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 64 * 64


def test_a_prewarmed_prompt_is_found(client: OpenAI) -> None:
    """Nothing was generated for it, and all its whole blocks are there."""
    asked: dict[str, Any] = {
        "model": "default",
        "input": "Name a river.",
        "instructions": "Rivers are long, and lakes are deep. " * 20,
    }
    warmed = client.responses.create(prompt_cache_options={"prewarm": True}, **asked)
    assert (warmed.status, warmed.output) == ("completed", [])
    assert warmed.usage is not None
    assert warmed.usage.output_tokens == 0
    answered = client.responses.create(max_output_tokens=4, **asked)
    assert answered.status == "incomplete"
    assert answered.incomplete_details is not None
    assert answered.incomplete_details.reason == "max_output_tokens"
    assert answered.usage is not None
    assert answered.usage.input_tokens == warmed.usage.input_tokens
    found = answered.usage.input_tokens_details.cached_tokens
    assert found == (warmed.usage.input_tokens - 1) // 64 * 64


def test_calls_and_schemas_are_enforced_while_they_stream(client: OpenAI) -> None:
    """Arguments come in pieces and follow their schema; so does the text of an answer."""
    with client.responses.stream(
        model="default",
        input="What is the weather in Paris?",
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=100,
    ) as stream:
        deltas = [
            event.delta
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert "".join(deltas) == call.arguments
    assert len(deltas) > 1
    jsonschema.validate(call.parsed_arguments, WEATHER["parameters"])
    parsed = client.responses.parse(
        model="default", input="Tell me of Rome.", text_format=City, max_output_tokens=200
    )
    if parsed.status == "completed":
        assert isinstance(parsed.output_parsed, City)


def test_every_event_is_one_of_the_clients(server: ServerProcess) -> None:
    """As it comes over the wire, numbered without a gap."""
    body = {"input": "Tell me a story.", "stream": True, "max_output_tokens": 32}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=60) as response:
        numbers = [
            EVENTS.validate_json(line.removeprefix("data: ")).sequence_number
            for line in response.iter_lines()
            if line.startswith("data: ")
        ]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 20
