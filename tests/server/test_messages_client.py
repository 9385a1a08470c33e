"""The real `anthropic` client against the application: what it sends, reads and raises."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import anthropic
import httpx2
import pytest

from vllm_mlx.engine.core.outputs import ErrorInfo
from vllm_mlx.engine.errors import EngineDiedError
from vllm_mlx.engine.text.chat_formats import ChatFormats

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

Messages = list[Any]
HELLO: Messages = [{"role": "user", "content": "Hello!"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get weather for a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


def client_of(served: Served, **options: Any) -> anthropic.AsyncAnthropic:
    """Return a client that calls the application itself."""
    transport = httpx2.ASGITransport(app=served.client.app, raise_app_exceptions=False)
    return anthropic.AsyncAnthropic(
        base_url="http://localhost:8000",
        api_key=options.pop("api_key", "not-needed"),
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=transport),
        **options,
    )


@pytest.fixture
async def client(served: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Return a client of a server with default settings that reads calls and reasoning."""
    served.tokenizer.formats = ChatFormats(tools="hermes", reasoning="qwen3")
    async with client_of(served) as made:
        yield made


async def test_a_whole_answer(client: anthropic.AsyncAnthropic) -> None:
    """The client's own objects carry text, reason, usage and the request's id."""
    message = await client.messages.create(model="default", max_tokens=256, messages=HELLO)
    assert (message.type, message.role, message.model) == ("message", "assistant", "default")
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "Hello world"
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (5, 2)
    assert message.usage.cache_read_input_tokens == 1
    assert message._request_id == message.id


async def test_a_streamed_answer_is_the_whole_one(client: anthropic.AsyncAnthropic) -> None:
    """Text comes as it does, and what the client gathers is what it gets whole."""
    arguments: dict[str, Any] = {"model": "default", "max_tokens": 256, "messages": HELLO}
    whole = await client.messages.create(**arguments)
    async with client.messages.stream(**arguments) as stream:
        text = "".join([part async for part in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "Hello world"
    assert [block.text for block in final.content if block.type == "text"] == [text]
    assert [block.text for block in whole.content if block.type == "text"] == [text]
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 2)
    assert final.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens


async def test_tools_and_thinking_go_there_and_back(
    client: anthropic.AsyncAnthropic, served: Served
) -> None:
    """The answer's own content, its signature included, is taken as the next turn's history."""
    served.engine.texts = ["<think>Look", " it up.</think>", "Let me see. ", CALL]
    arguments: dict[str, Any] = {
        "model": "claude-opus-9",
        "max_tokens": 2048,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [WEATHER],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    whole = await client.messages.create(messages=HELLO, **arguments)
    thinking, text, call = whole.content
    assert thinking.type == "thinking"
    assert (thinking.thinking, bool(thinking.signature)) == ("Look it up.", True)
    assert text.type == "text"
    assert text.text == "Let me see."
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    assert (whole.stop_reason, whole.model) == ("tool_use", "claude-opus-9")
    async with client.messages.stream(messages=HELLO, **arguments) as stream:
        final = await stream.get_final_message()
    names = [[block.type, getattr(block, "input", None)] for block in final.content]
    assert names == [["thinking", None], ["text", None], ["tool_use", {"city": "Paris"}]]
    assert final.stop_reason == "tool_use"

    served.engine.texts = ["The weather is sunny."]
    answered = await client.messages.create(
        messages=[
            *HELLO,
            {"role": "assistant", "content": whole.content},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 22C"}
                ],
            },
        ],
        **arguments,
    )
    assert answered.stop_reason == "end_turn"
    messages, options = served.tokenizer.chats[-1]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["reasoning_content"] == "Look it up."
    assert messages[2]["content"] == "Sunny, 22C"
    assert options["enable_thinking"] is True


async def test_a_stop_sequence_is_told(client: anthropic.AsyncAnthropic, served: Served) -> None:
    """With its text, in the reason's own field."""
    served.engine.is_held = True

    async def drive() -> None:
        while not served.engine.requests:
            await served.engine.sleep()
        request_id = served.engine.requests[0].request_id
        served.engine.put(request_id, "One", finish_reason="stop", stop_reason="two")

    async with served.driven_by(drive()):
        message = await client.messages.create(
            model="default", max_tokens=9, messages=HELLO, stop_sequences=["two"]
        )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")


async def test_tokens_are_counted(client: anthropic.AsyncAnthropic) -> None:
    """With the system prompt in blocks, and equal to what usage says in all."""
    system: Any = [{"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}}]
    count = await client.messages.count_tokens(model="default", messages=HELLO, system=system)
    message = await client.messages.create(
        model="default", max_tokens=1, messages=HELLO, system=system
    )
    usage = message.usage
    assert count.input_tokens == 8
    assert count.input_tokens == (
        usage.input_tokens
        + (usage.cache_read_input_tokens or 0)
        + (usage.cache_creation_input_tokens or 0)
    )


async def test_the_models_are_listed_as_the_client_knows_them(
    client: anthropic.AsyncAnthropic,
) -> None:
    """The served one, also by the names that agents invent; another one is its own exception."""
    (model,) = [model async for model in client.models.list()]
    assert (model.type, model.id) == ("model", "org/model")
    assert (model.max_input_tokens, model.created_at.tzinfo is not None) == (99, True)
    assert (await client.models.retrieve("claude-opus-9")).id == "claude-opus-9"
    with pytest.raises(anthropic.NotFoundError, match="does not exist here") as caught:
        await client.models.retrieve("gpt-5")
    assert caught.value.type == "not_found_error"


async def test_the_client_raises_what_it_should(make_server: ServerFactory) -> None:
    """Each fault is the client's own exception, with the message that the server gave."""
    served = await make_server(api_keys=("secret",))
    arguments: dict[str, Any] = {"model": "default", "max_tokens": 1, "messages": HELLO}
    async with client_of(served, api_key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError, match="wrong API key"):
            await client.messages.create(**arguments)
    async with client_of(served, api_key="secret") as client:
        with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
            await client.messages.create(**arguments | {"model": "gpt-5"})
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 200 tokens > 99"):
            await client.messages.create(
                **arguments | {"messages": [{"role": "user", "content": "x" * 200}]}
            )
        image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        with pytest.raises(anthropic.BadRequestError, match="image input is not supported"):
            await client.messages.create(
                **arguments | {"messages": [{"role": "user", "content": [image]}]}
            )
        served.engine.set(phase="restarting")
        with pytest.raises(anthropic.InternalServerError, match="restarting"):
            await client.messages.create(**arguments)
    async with client_of(served, auth_token="secret", api_key=None) as client:
        served.engine.set(phase="ready")
        assert (await client.messages.create(**arguments)).stop_reason == "end_turn"


async def test_an_error_event_is_raised_in_the_middle_of_a_stream(
    client: anthropic.AsyncAnthropic, served: Served
) -> None:
    """After the text that came before it."""
    served.engine.is_held = True

    texts: list[str] = []

    async def note(stream: AsyncIterator[str]) -> None:
        async for text in stream:
            texts.append(text)  # noqa: PERF401 - what came before the error is looked at.

    async def read() -> None:
        async with client.messages.stream(model="default", max_tokens=9, messages=HELLO) as stream:
            await note(stream.text_stream)

    async with served.driven_by(served.die_after("Hel", ErrorInfo.of(EngineDiedError("it died")))):
        with pytest.raises(anthropic.APIStatusError, match="it died"):
            await read()
    assert texts == ["Hel"]
