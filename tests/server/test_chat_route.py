"""The chat route: whole and streamed answers, prompts, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from vllm_mlx.engine.core.outputs import ErrorInfo, unpack_tokens
from vllm_mlx.engine.errors import EngineDiedError, RequestTooLargeError

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

ReadEvents = Callable[[bytes], list[Any]]


async def test_a_whole_answer_has_openais_shape(served: Served) -> None:
    """The body carries the text, why it ended, and true usage."""
    response = await served.chat("hello", model="default")
    body = await response.get_json()
    assert response.status_code == 200
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "default"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_one_id_names_the_request_everywhere(served: Served) -> None:
    """Body, response header and engine request carry the same id."""
    response = await served.chat()
    body = await response.get_json()
    assert response.headers["x-request-id"] == body["id"]
    assert served.engine.requests[0].request_id == body["id"]


async def test_a_stream_begins_with_the_role_and_ends_with_done(
    served: Served, read_events: ReadEvents
) -> None:
    """Role, text and finish come in order, with one id and time, and then the end mark."""
    response = await served.chat(stream=True)
    events = read_events(await response.get_data())
    assert response.content_type.startswith("text/event-stream")
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello world"
    assert [c["choices"][0]["finish_reason"] for c in chunks].count("stop") == 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert {(c["id"], c["created"]) for c in chunks} == {(chunks[0]["id"], chunks[0]["created"])}
    assert chunks[0]["id"] == response.headers["x-request-id"]
    assert all("usage" not in c for c in chunks)


async def test_a_stream_can_end_with_usage(served: Served, read_events: ReadEvents) -> None:
    """The usage chunk has no choices, and the chunks before it say null."""
    response = await served.chat(stream=True, stream_options={"include_usage": True})
    *chunks, last, done = read_events(await response.get_data())
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 4
    assert {c["usage"] for c in chunks} == {None}


async def test_stream_options_need_a_stream(served: Served) -> None:
    """Stream options on a whole answer are refused."""
    response = await served.chat(stream_options={"include_usage": True})
    assert response.status_code == 400
    assert (await response.get_json())["error"]["param"] == "stream_options"


async def test_an_error_after_the_stream_began_is_one_event(
    make_server: ServerFactory, read_events: ReadEvents
) -> None:
    """Text that was generated comes first, then the error, then the end mark."""
    server = await make_server()
    server.engine.finish_reason = "error"
    server.engine.error = ErrorInfo.of(EngineDiedError("the engine died", retry_after_s=2.0))
    response = await server.chat(stream=True)
    events = read_events(await response.get_data())
    assert response.status_code == 200
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "engine_died"
    assert sum("error" in event for event in events[:-1]) == 1
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-2])
    assert text == "Hello world"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_at_once_keeps_its_status(
    make_server: ServerFactory, stream: bool
) -> None:
    """A request that never fits is a 400, streamed or not."""
    server = await make_server()
    server.engine.texts = []
    server.engine.finish_reason = "error"
    server.engine.error = ErrorInfo.of(RequestTooLargeError("needs 9 MB of 2 MB"))
    response = await server.chat(stream=stream)
    assert response.status_code == 400
    assert (await response.get_json())["error"]["code"] == "request_too_large"


async def test_messages_reach_the_template_in_its_own_terms(served: Served) -> None:
    """Roles, parts and tool calls become what chat templates know."""
    await served.chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"x": 1}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
    )
    messages, options = served.tokenizer.chats[0]
    assert messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    assert options == {
        "enable_thinking": False,
        "reasoning_effort": "low",
        "add_generation_prompt": True,
    }


async def test_the_last_message_can_be_continued(served: Served) -> None:
    """`continue_final_message` turns the generation prompt off."""
    await served.chat(continue_final_message=True)
    _, options = served.tokenizer.chats[0]
    assert options == {"add_generation_prompt": False, "continue_final_message": True}


async def test_the_prompt_reaches_the_engine_as_tokens(served: Served) -> None:
    """The engine gets the template's tokens and nothing else."""
    await served.chat("hey")
    assert unpack_tokens(served.engine.requests[0].prompt) == [ord(c) for c in "hey"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages[0].content[0].type",
        ),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 99999}, "max_tokens"),
        ({"max_completion_tokens": 99999}, "max_completion_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop_token_ids": [0x110000]}, "stop_token_ids"),
        ({"min_tokens": 200}, "min_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {str(0x110000): 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"content": "bad"}, "messages"),
    ],
)
async def test_wrong_and_unsupported_fields_are_named(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    """Each fault is a 400 in OpenAI's shape that names the field; the engine never hears of it."""
    response = await served.chat(**fields)
    error = (await response.get_json())["error"]
    assert response.status_code == 400
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert served.engine.requests == []


async def test_values_that_ask_for_nothing_are_accepted(served: Served) -> None:
    """Refused fields at their defaults do no harm, as SDKs and frameworks send them."""
    response = await served.chat(
        n=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        logprobs=False,
        tool_choice="none",
        response_format={"type": "text"},
        logit_bias=None,
        tools=[],
        user="me",
        metadata={"a": "b"},
    )
    assert response.status_code == 200
    assert "x-ignored-fields" not in response.headers


async def test_a_prompt_over_the_context_is_refused_as_openai_does(served: Served) -> None:
    """The prompt alone fills the context: 400 with the code that clients look for."""
    response = await served.chat("x" * 100)
    error = (await response.get_json())["error"]
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "maximum context length is 100 tokens" in error["message"]


async def test_a_completion_is_clamped_to_the_context(served: Served) -> None:
    """A prompt of 99 tokens in a context of 100 may still get one."""
    await served.chat("x" * 99, max_tokens=50)
    assert served.engine.requests[0].sampling.max_tokens == 1


@pytest.mark.parametrize("name", ["default", "org/model", "/models/org--model", None])
async def test_every_name_of_the_model_works(served: Served, name: str | None) -> None:
    """The default name, the model as given and its folder all answer, as does no name."""
    response = await served.chat(**({} if name is None else {"model": name}))
    assert response.status_code == 200
    assert (await response.get_json())["model"] == (name or "org/model")


async def test_an_unknown_model_is_a_404(served: Served) -> None:
    """Another model's name is answered with OpenAI's code for it."""
    response = await served.chat(model="gpt-4")
    assert response.status_code == 404
    assert (await response.get_json())["error"]["code"] == "model_not_found"


async def test_unknown_fields_are_ignored_and_named(served: Served) -> None:
    """They are named at any depth in a response header, and counted."""
    for _ in range(2):
        response = await served.chat(
            messages=[{"role": "user", "content": "x", "mood": 1}], new_thing=2
        )
        assert response.status_code == 200
        assert response.headers["x-ignored-fields"] == "new_thing, messages[].mood"
    assert served.runtime.unknown_fields.counts == {"new_thing": 2, "messages[].mood": 2}


async def test_strict_servers_refuse_unknown_fields(make_server: ServerFactory) -> None:
    """With strict fields an unknown one is a 400 that names it."""
    server = await make_server(strict_fields=True)
    response = await server.chat(new_thing=2)
    assert response.status_code == 400
    assert (await response.get_json())["error"]["param"] == "new_thing"
