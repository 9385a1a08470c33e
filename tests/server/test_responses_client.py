"""The real `openai` client's responses against the application: sent, streamed, read and raised."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from vllm_mlx.engine.core.outputs import ErrorInfo
from vllm_mlx.engine.errors import EngineDiedError
from vllm_mlx.engine.text.chat_formats import ChatFormats

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get weather for a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


class City(BaseModel):
    """Name a city."""

    city: str


def client_of(served: Served, api_key: str = "not-needed") -> openai.AsyncOpenAI:
    """Return a client that calls the application itself."""
    transport = httpx2.ASGITransport(app=served.client.app, raise_app_exceptions=False)
    return openai.AsyncOpenAI(
        base_url="http://localhost:8000/v1",
        api_key=api_key,
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=transport),
    )


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    """Return a client of a server with default settings that reads calls and reasoning."""
    served.tokenizer.formats = ChatFormats(tools="hermes", reasoning="qwen3")
    async with client_of(served) as made:
        yield made


async def streamed(client: openai.AsyncOpenAI, **arguments: Any) -> tuple[str, Response]:
    """Return the text that a stream brought, and the response that the client made of it."""
    async with client.responses.stream(**arguments) as stream:
        texts = [event.delta async for event in stream if event.type.endswith("output_text.delta")]
        return "".join(texts), await stream.get_final_response()


async def test_an_answer_is_the_same_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    """The client's own objects carry text, status, usage and the request's id."""
    arguments: dict[str, Any] = {"model": "default", "input": "Hello!", "instructions": "Be."}
    whole = await client.responses.create(**arguments)
    assert (whole.object, whole.status, whole.model) == ("response", "completed", "default")
    assert whole.output_text == "Hello world"
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (9, 2)
    assert whole.usage.input_tokens_details.cached_tokens == 1
    assert whole._request_id == whole.id
    text, final = await streamed(client, **arguments)
    assert text == final.output_text == "Hello world"
    assert final.usage == whole.usage


async def test_reasoning_and_calls_go_there_and_back(
    client: openai.AsyncOpenAI, served: Served
) -> None:
    """The response's own output is taken as the next turn's input, and by its id."""
    served.engine.texts = ["<think>Look", " it up.</think>", "Let me see. ", CALL]
    question: Any = {"role": "user", "content": "Weather in Paris?"}
    arguments: dict[str, Any] = {
        "model": "default",
        "tools": [WEATHER],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
    }
    _, response = await streamed(client, input=[question], **arguments)
    reasoning, message, call = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert (reasoning.content[0].text, reasoning.summary) == ("Look it up.", [])
    assert message.type == "message"
    assert response.output_text == "Let me see."
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Paris"}')

    served.engine.texts = ["It is sunny."]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    output: list[Any] = [item.to_dict() for item in response.output]
    sent_back = await client.responses.create(input=[question, *output, result], **arguments)
    gone_on = await client.responses.create(
        input=[result], previous_response_id=response.id, **arguments
    )
    assert sent_back.output_text == gone_on.output_text == "It is sunny."
    (first, options), (second, _) = served.tokenizer.chats[-2:]
    assert first == second
    assert [turn["role"] for turn in first] == ["user", "assistant", "tool"]
    assert first[1]["reasoning_content"] == "Look it up."
    assert options["reasoning_effort"] == "low"
    # Clients that keep nothing on the server keep reasoning as the sealed text alone.
    sealed = {**output[0], "content": None}
    await client.responses.create(input=[question, sealed, *output[1:], result], **arguments)
    assert served.tokenizer.chats[-1][0] == first


async def test_a_schema_is_parsed(client: openai.AsyncOpenAI, served: Served) -> None:
    """By the client's own helper, whole and streamed; the grammar reaches the engine."""
    served.engine.texts = ['{"city": ', '"Paris"}']
    arguments: dict[str, Any] = {"model": "default", "input": "Where?", "text_format": City}
    whole = await client.responses.parse(**arguments)
    assert whole.output_parsed == City(city="Paris")
    _, final = await streamed(client, **arguments)
    assert final.output_text == '{"city": "Paris"}'
    assert all(request.sampling.grammar for request in served.engine.requests)


async def test_a_stored_response_is_read_listed_cancelled_and_deleted(
    client: openai.AsyncOpenAI,
) -> None:
    """By the methods that the client has for it."""
    made = await client.responses.create(model="default", input="Hello!")
    assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
    (item,) = (await client.responses.input_items.list(made.id)).data
    assert item.type == "message"
    assert [part.to_dict()["text"] for part in item.content] == ["Hello!"]
    assert (await client.responses.cancel(made.id)).status == "completed"
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        await client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.delete(made.id)


async def test_a_prompt_is_warmed(client: openai.AsyncOpenAI, served: Served) -> None:
    """With the client's own option for it."""
    response = await client.responses.create(
        model="default", input="Hello!", prompt_cache_options={"prewarm": True}
    )
    assert (response.status, response.output_text, response.output) == ("completed", "", [])
    assert served.engine.requests[0].is_warm


async def test_the_client_raises_what_it_should(make_server: ServerFactory) -> None:
    """Each fault is the client's own exception, with the message that the server gave."""
    served = await make_server(api_keys=("secret",), max_request_tokens=50, default_max_tokens=50)
    ask: dict[str, Any] = {"model": "default", "input": "Hello!"}
    async with client_of(served, "wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="wrong API key"):
            await client.responses.create(**ask)
    image = {"type": "input_image", "image_url": "http://x/y.png", "detail": "auto"}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"max_output_tokens": 51}, "over this server's limit of 50"),
        ({"input": "x" * 200}, "context"),
        ({"input": [{"role": "user", "content": [image]}]}, "image input is not supported"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "'file_search'"),
        ({"background": True}, "background is not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
    ]
    async with client_of(served, "secret") as client:
        for fields, reason in bad:
            with pytest.raises(openai.BadRequestError, match=reason):
                await client.responses.create(**ask | fields)
        with pytest.raises(openai.NotFoundError, match="does not exist here"):
            await client.responses.create(**ask | {"model": "gpt-5"})
        served.engine.set(phase="restarting")
        with pytest.raises(openai.InternalServerError, match="restarting"):
            await client.responses.create(**ask)


async def test_a_failure_in_a_stream_is_told(client: openai.AsyncOpenAI, served: Served) -> None:
    """As an event with the response that failed, after the text that came before it."""
    served.engine.is_held = True

    async with served.driven_by(served.die_after("Hel", ErrorInfo.of(EngineDiedError("it died")))):
        stream = await client.responses.create(model="default", input="Hello!", stream=True)
        last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.message, last.response.output_text) == ("it died", "Hel")
