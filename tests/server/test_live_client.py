"""The real `openai` client against a real server: what it sends, reads, retries and raises."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import jsonschema
import openai
import pytest
from support.server_process import ServerProcess
from support.tiny_folder import write_tiny_folder

KEY = "test-key"
AUTH = {"Authorization": f"Bearer {KEY}"}

Messages = list[Any]
HELLO: Messages = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Any
) -> Iterator[ServerProcess]:
    """Return a ready server of a tiny model with two rows and a queue of one."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("tiny"), demo_model_path)
    options = ("--max-num-seqs", "2", "--max-queue", "1", "--api-key", KEY)
    options += ("--kv-memory-mb", "64", "--served-model-name", "tiny/model")
    with ServerProcess(str(folder), tmp_path_factory.mktemp("live"), *options) as process:
        yield process.wait_ready()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """Return a client that does not retry."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    """Return an asynchronous client that does not retry."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> float:
    """Wait until `condition` holds and return how long that took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, "it never came true"
        time.sleep(0.01)
    return time.monotonic() - started


def is_idle(server: ServerProcess) -> bool:
    """Say whether the engine's gauges are at zero."""
    status = server.status(**AUTH)
    return status["num_running"] == status["num_waiting"] == 0 and status["requests"] == []


def test_a_forced_call_streams_as_it_comes_whole(client: openai.OpenAI) -> None:
    """A model of random weights calls the tool that it must, with arguments of its schema."""
    city = {"enum": ["Paris", "Rome"]}
    days = {"type": "integer", "minimum": 1, "maximum": 99}
    schema = {
        "type": "object",
        "properties": {"city": city, "days": days},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "forecast", "parameters": schema}}
    arguments: dict[str, Any] = {
        "model": "default",
        "messages": HELLO,
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "temperature": 1,
        "seed": 7,
    }
    whole = client.chat.completions.create(**arguments).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "forecast"
    jsonschema.validate(json.loads(call.function.arguments), schema)
    with client.chat.completions.stream(**arguments) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    (streamed,) = final.message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments


def test_streamed_and_whole_chats_agree(client: openai.OpenAI) -> None:
    """Greedy, the stream's text is the whole answer's, and usage is the same."""
    arguments: dict[str, Any] = {
        "model": "default",
        "messages": HELLO,
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**arguments)
    assert whole.usage is not None
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason in ("length", "stop")
    chunks = list(
        client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
    )
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_request_id_is_the_answers_id(client: openai.OpenAI) -> None:
    """The client's `_request_id` comes from the header."""
    response = client.chat.completions.create(model="tiny/model", messages=HELLO, max_tokens=1)
    assert response._request_id == response.id
    assert response.id.startswith("chatcmpl-")


def test_prompts_in_every_form_and_several_at_once(client: openai.OpenAI) -> None:
    """Text and its tokens give the same completion, each at its index, streamed too."""
    arguments: dict[str, Any] = {"model": "default", "max_tokens": 8, "temperature": 0}
    tokens = client.post("/../tokenize", body={"prompt": "One two three"}, cast_to=dict[str, Any])[
        "tokens"
    ]
    whole = client.completions.create(prompt=["One two three", "Four"], **arguments)
    assert [choice.index for choice in whole.choices] == [0, 1]
    from_tokens = client.completions.create(prompt=tokens, **arguments)
    assert from_tokens.choices[0].text == whole.choices[0].text
    texts = ["", ""]
    for chunk in client.completions.create(
        prompt=["One two three", "Four"], stream=True, **arguments
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_stop_ends_before_the_stop_string(client: openai.OpenAI) -> None:
    """The match is not part of the text, whole and streamed, as a string and in a list."""
    arguments: dict[str, Any] = {
        "model": "default",
        "prompt": "One two three",
        "max_tokens": 24,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    free = client.completions.create(**arguments).choices[0].text
    stop = free[len(free) // 2 : len(free) // 2 + 4]
    expected = free[: free.index(stop)]
    stopped = client.completions.create(stop=stop, **arguments).choices[0]
    assert (stopped.text, stopped.finish_reason) == (expected, "stop")
    streamed = client.completions.create(stop=["never seen", stop], stream=True, **arguments)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    """The same seed gives the same text at temperature 1, another seed another."""
    texts = [
        client.completions.create(
            model="default", prompt="Hi", max_tokens=12, temperature=1, top_p=1, seed=seed
        )
        .choices[0]
        .text
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_lengths_are_exact(client: openai.OpenAI) -> None:
    """`max_completion_tokens`, `min_tokens` and `ignore_eos` count what usage counts."""
    response = client.chat.completions.create(
        model="default",
        messages=HELLO,
        max_completion_tokens=9,
        extra_body={"ignore_eos": True, "min_tokens": 9},
    )
    assert response.usage is not None
    assert response.usage.completion_tokens == 9
    assert response.choices[0].finish_reason == "length"


def test_errors_are_the_clients_own_classes(client: openai.OpenAI, server: ServerProcess) -> None:
    """400, 401, 404 and an over-long prompt are raised with code, param and id."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=HELLO, temperature=3)
    assert caught.value.param == "temperature"
    assert caught.value.request_id is not None
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="default", messages=HELLO, logprobs=True, top_logprobs=21
        )
    assert caught.value.param == "top_logprobs"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="default", prompt="word " * 9000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert not_found.value.code == "model_not_found"
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError) as refused:
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"
    assert server.get("/v1/models").status_code == 401
    assert server.get("/health").status_code == 200


def test_models_are_found_by_all_their_names(client: openai.OpenAI) -> None:
    """The list has the served name; ids with slashes can be retrieved."""
    (model,) = client.models.list().data
    assert model.id == "tiny/model"
    assert client.models.retrieve("tiny/model").id == "tiny/model"
    assert client.models.retrieve("default").to_dict()["max_model_len"] == 8192
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


async def test_overload_is_a_429_that_retrying_gets_through(
    async_client: openai.AsyncOpenAI, server: ServerProcess
) -> None:
    """Two rows and a queue of one: a fourth is refused, and is answered when it tries again."""

    async def endless() -> None:
        await async_client.completions.create(
            model="default", prompt="x", max_tokens=8000, extra_body={"ignore_eos": True}
        )

    running = [asyncio.create_task(endless()) for _ in range(3)]
    try:
        async with asyncio.timeout(20):
            while (await asyncio.to_thread(server.status, **AUTH))["num_waiting"] == 0:
                await asyncio.sleep(0.02)
        with pytest.raises(openai.RateLimitError) as caught:
            await async_client.completions.create(model="default", prompt="x", max_tokens=1)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        patient = async_client.with_options(max_retries=10)
        answering = asyncio.create_task(
            patient.completions.create(model="default", prompt="x", max_tokens=1)
        )
        await asyncio.sleep(0.3)
        assert not answering.done()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert (await answering).choices[0].finish_reason == "length"


def test_closing_a_stream_frees_its_row(client: openai.OpenAI, server: ServerProcess) -> None:
    """The gauges are back at zero at once, and the totals tell what was generated."""
    before = server.status(**AUTH)
    stream = client.chat.completions.create(
        model="default",
        messages=HELLO,
        stream=True,
        max_tokens=8000,
        extra_body={"ignore_eos": True},
    )
    for _, _ in zip(range(5), stream, strict=False):
        pass
    assert not is_idle(server)
    stream.close()
    assert wait_until(lambda: is_idle(server)) < 3
    after = server.status(**AUTH)
    assert after["total_requests_processed"] == before["total_requests_processed"] + 1
    generated = after["total_completion_tokens"] - before["total_completion_tokens"]
    assert 3 <= generated < 8000


def test_a_client_that_gives_up_waiting_frees_its_row(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    """A whole answer that nobody waits for any more is aborted too."""
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1.0).completions.create(
            model="default", prompt="x", max_tokens=8000, extra_body={"ignore_eos": True}
        )
    assert wait_until(lambda: is_idle(server)) < 3
    assert " 499 " in server.log


def test_a_request_is_cancelled_by_the_id_that_its_client_knows(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    """The stream ends with what there is; a made-up id and an ended one are 404."""
    stream = client.completions.create(
        model="default",
        prompt="x",
        stream=True,
        max_tokens=8000,
        extra_body={"ignore_eos": True},
    )
    first = next(iter(stream))
    (request,) = server.status(**AUTH)["requests"]
    assert request["request_id"] == first.id
    reply = client.post(f"/requests/{first.id}/cancel", cast_to=dict[str, Any])
    assert reply["cancelled"] is True
    *_, last = stream
    assert last.choices[0].finish_reason == "abort"  # type: ignore[comparison-overlap]
    for request_id in (first.id, "cmpl-made-up"):
        with pytest.raises(openai.NotFoundError):
            client.delete(f"/requests/{request_id}", cast_to=dict[str, Any])
    assert wait_until(lambda: is_idle(server)) < 3
