"""The completion route: every form of prompt, several at once, whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from vllm_mlx.engine.core.outputs import ErrorInfo, unpack_tokens
from vllm_mlx.engine.errors import RowFailedError

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[1, 97, 98]]),
        (["a", "b"], [[1, 97], [1, 98]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        ("", [[1]]),
    ],
)
async def test_each_form_of_prompt_becomes_rows(
    served: Served, prompt: Any, expected: list[list[int]]
) -> None:
    """Texts are encoded with their special tokens, tokens are taken as they are."""
    response = await served.post("/v1/completions", prompt=prompt)
    assert response.status_code == 200
    assert [unpack_tokens(r.prompt) for r in served.engine.requests] == expected
    choices = (await response.get_json())["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(expected)))
    assert {choice["text"] for choice in choices} == {"Hello world"}


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], [1, "a"], ["a", [1]], [-1], [2**31], [True], 5, {"a": 1}, [[1], 2]]
)
async def test_other_prompts_are_refused(served: Served, prompt: Any) -> None:
    """Each is a 400 that names the prompt."""
    response = await served.post("/v1/completions", prompt=prompt)
    assert response.status_code == 400
    assert (await response.get_json())["error"]["param"] == "prompt"


async def test_a_missing_prompt_is_named(served: Served) -> None:
    """The field that is required is the one that the error names."""
    response = await served.post("/v1/completions", model="default")
    assert response.status_code == 400
    assert (await response.get_json())["error"]["param"] == "prompt"


async def test_tokens_outside_the_vocabulary_are_refused(served: Served) -> None:
    """The engine never sees an id that it could not look up."""
    response = await served.post("/v1/completions", prompt=[[5], [0x110000]])
    assert response.status_code == 400
    assert (await response.get_json())["error"]["param"] == "prompt[1]"


async def test_rows_of_one_request_share_its_id(served: Served) -> None:
    """Several prompts get the client's id with a number, and usage adds them up."""
    response = await served.post("/v1/completions", prompt=["a", "bc"])
    body = await response.get_json()
    assert [r.request_id for r in served.engine.requests] == [f"{body['id']}-0", f"{body['id']}-1"]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 4


async def test_streamed_choices_interleave_and_each_ends_once(
    served: Served, read_events: Callable[[bytes], list[Any]]
) -> None:
    """Chunks of all prompts come on one stream, told apart by their index."""
    response = await served.post(
        "/v1/completions",
        prompt=["a", "b", "c"],
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, usage, done = read_events(await response.get_data())
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 6
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = {i: "".join(c["text"] for c in choices if c["index"] == i) for i in range(3)}
    assert texts == dict.fromkeys(range(3), "Hello world")
    ends = [c["index"] for c in choices if c["finish_reason"] is not None]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_failed_row_ends_its_request_and_aborts_the_others(
    make_server: ServerFactory, read_events: Callable[[bytes], list[Any]], stream: bool
) -> None:
    """The client is told once, and no row of the request goes on."""
    server = await make_server()
    server.engine.is_held = True

    async def drive() -> None:
        while len(server.engine.requests) < 2:
            await server.engine.sleep()
        first, second = (r.request_id for r in server.engine.requests)
        server.engine.put(second, "x")
        # Long enough for the answer to begin with it.
        await asyncio.sleep(0.05)
        server.engine.finish(first, "error", ErrorInfo.of(RowFailedError("NaN logits")))

    async with server.driven_by(drive()):
        response = await server.post("/v1/completions", prompt=["a", "b"], stream=stream)
        data = await response.get_data()
    if stream:
        events = read_events(data)
        assert (events[-2]["error"]["code"], events[-1]) == ("row_failed", "[DONE]")
    else:
        assert response.status_code == 500
        assert response.headers["x-should-retry"] == "false"
    assert server.engine.left == [server.engine.requests[1].request_id]
    assert server.runtime.generations.num_open_rows == 0


async def test_more_prompts_than_would_ever_fit_are_a_400(make_server: ServerFactory) -> None:
    """A list over rows and queue together can never be served."""
    server = await make_server(max_num_seqs=1, max_queue=1)
    response = await server.post("/v1/completions", prompt=["a", "b", "c"])
    assert response.status_code == 400
    assert (await response.get_json())["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2},
        {"best_of": 1, "n": 2},
        {"suffix": "x"},
        {"n": 0},
        {"n": 129},
        {"logprobs": 21},
        {"logprobs": -1},
        {"max_tokens": 0},
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    served: Served, fields: dict[str, Any]
) -> None:
    """Nothing that a completion asks for is silently left out."""
    response = await served.post("/v1/completions", prompt="a", **fields)
    assert response.status_code == 400
    assert (await response.get_json())["error"]["param"] == next(iter(fields))
