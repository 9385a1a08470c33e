"""Tools and reasoning on the demo model, a real instruct model, over the real client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from support.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

WORDS = ["red", "green", "blue", "large", "small", "metric", "imperial"]
VALUES: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 24},
    {"enum": WORDS},
    {"type": "integer", "minimum": 0, "maximum": 500},
    {"type": "boolean"},
    {"type": "array", "items": {"enum": WORDS}, "maxItems": 3},
    {"type": ["number", "null"], "minimum": 0, "maximum": 9},
]


def tool_of(number: int) -> dict[str, Any]:
    """Return one of 20 tools."""
    values = {WORDS[i]: VALUES[(number + i) % len(VALUES)] for i in range(1 + number % 4)}
    parameters = {
        "type": "object",
        "properties": values,
        "required": list(values),
        "additionalProperties": False,
    }
    function = {
        "name": f"paint_{number}",
        "description": "Paint the house in a colour",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


TOOLS = [tool_of(number) for number in range(20)]
ASK: list[Any] = [{"role": "user", "content": "Please paint my house."}]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Any
) -> Iterator[ServerProcess]:
    """Return a ready server of the demo model, which is told to reason in tags."""
    options = ("--reasoning-parser", "qwen3")
    with ServerProcess("demo", tmp_path_factory.mktemp("tools"), *options) as process:
        yield process.wait_ready(180)


async def forced(client: openai.AsyncOpenAI, number: int, seed: int, *, stream: bool) -> Any:
    """Force a call to one of the tools and return the choice."""
    arguments: dict[str, Any] = {
        "model": "demo",
        "messages": ASK,
        "tools": TOOLS[number : number + 2],
        "tool_choice": {"type": "function", "function": {"name": f"paint_{number}"}},
        "temperature": 1,
        "seed": seed,
        "max_tokens": 400,
    }
    if not stream:
        return (await client.chat.completions.create(**arguments)).choices[0]
    async with client.chat.completions.stream(**arguments) as events:
        return (await events.get_final_completion()).choices[0]


async def test_forced_calls_are_valid_and_stream_as_they_are_whole(server: ServerProcess) -> None:
    """200 at temperature 1 over 20 schemas; at the same seed the stream says the same."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", timeout=500
    ) as client:
        plan = [(number, seed) for number in range(20) for seed in range(10)]
        whole: list[Any] = []
        for start in range(0, len(plan), 50):
            # As many as compute at once: one that waits for long would be given up.
            part = plan[start : start + 50]
            whole += await asyncio.gather(*(forced(client, *each, stream=False) for each in part))
        streamed = await asyncio.gather(
            *(forced(client, *each, stream=True) for each in plan[::10])
        )
    for (number, _), choice in zip(plan, whole, strict=True):
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == f"paint_{number}"
        schema = TOOLS[number]["function"]["parameters"]
        jsonschema.validate(json.loads(call.function.arguments), schema)
    for choice, other in zip(streamed, whole[::10], strict=True):
        (one,), (two,) = choice.message.tool_calls, other.message.tool_calls
        assert one.function.arguments == two.function.arguments


async def test_a_client_that_leaves_frees_its_row(server: ServerProcess) -> None:
    """In the midst of a call, and soon."""
    body = {"messages": ASK, "tools": TOOLS[:1], "tool_choice": "required", "stream": True}
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if "tool_calls" in line:
                break
    async with asyncio.timeout(5):
        while server.status()["num_running"]:
            await asyncio.sleep(0.02)


def test_a_budget_ends_reasoning(server: ServerProcess) -> None:
    """The model goes on to its answer, and the count of its reasoning is true."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        messages: list[Any] = [*ASK, {"role": "assistant", "content": "<think>"}]
        answer = client.chat.completions.create(
            model="demo",
            messages=messages,
            temperature=0,
            max_tokens=60,
            extra_body={
                "thinking_token_budget": 12,
                "continue_final_message": True,
                "add_generation_prompt": False,
                "ignore_eos": True,
            },
        )
    usage, message = answer.usage, answer.choices[0].message
    assert usage is not None
    assert usage.completion_tokens_details is not None
    reasoned = usage.completion_tokens_details.reasoning_tokens or 0
    assert 12 < reasoned < 24
    assert message.content
    assert "think>" not in message.content
    tokens = httpx.post(
        f"{server.url}/tokenize",
        json={"prompt": message.model_extra["reasoning"], "add_special_tokens": False},
    ).json()
    assert abs(tokens["count"] - 12) <= 1


def test_what_is_warmed_is_what_requests_with_tools_begin_with(server: ServerProcess) -> None:
    """Tools that the template drops are described alike in both."""
    system = {"role": "system", "content": "Paint only what the user owns."}
    prompt = {"messages": [system], "tools": TOOLS[:6]}
    warmed = httpx.post(f"{server.url}/v1/cache/warm", json={"prompts": [prompt]}, timeout=120)
    assert warmed.json()["count"] == 1, warmed.json()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="demo", messages=[system, *ASK], tools=TOOLS[:6], max_tokens=1
        )
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= usage.prompt_tokens - 64 - 30


def test_results_are_answered(server: ServerProcess) -> None:
    """A call and its result in the history, which the template knows nothing of."""
    call = {"name": "paint_1", "arguments": '{"red": "blue", "green": 3}'}
    history: list[Any] = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "The house is blue now."},
    ]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="demo", messages=history, tools=[TOOLS[1]], tool_choice="none", max_tokens=40
        )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")
