"""The Messages routes over an engine made of text: shapes, usage, errors, streams and names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from vllm_mlx.engine.core.outputs import ErrorInfo, unpack_tokens
from vllm_mlx.engine.errors import EngineDiedError, InvalidRequestError
from vllm_mlx.engine.text.chat_formats import ChatFormats

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "look_up", "input_schema": {"type": "object"}}


async def ask(served: Served, *messages: Any, path: str = "/v1/messages", **fields: Any) -> Any:
    """Post a chat and return the response."""
    body = {"model": "default", "max_tokens": 8, "messages": list(messages) or [USER], **fields}
    if path != "/v1/messages":
        del body["max_tokens"]
    return await served.post(path, **body)


async def events_of(response: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return a stream's events by their names."""
    found = []
    for block in (await response.get_data()).decode().split("\n\n"):
        if block:
            name, data = block.split("\n")
            payload = json.loads(data.removeprefix("data: "))
            assert name == f"event: {payload['type']}"
            found.append((payload["type"], payload))
    return found


async def test_a_whole_answer_has_anthropics_shape(served: Served) -> None:
    """The text, why it ended, and what of the prompt was found stored."""
    response = await ask(served, system="Be.")
    body = await response.get_json()
    assert response.status_code == 200
    assert body.pop("id") == response.headers["request-id"] == response.headers["x-request-id"]
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "default",
        "content": [{"type": "text", "text": "Hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 2,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert response.headers["request-id"].startswith("msg_")
    assert served.engine.requests[0].request_id == response.headers["request-id"]


async def test_counting_sees_the_prompt_of_the_request(served: Served) -> None:
    """The same tokens that are computed are counted, and usage adds up to them."""
    fields: dict[str, Any] = {
        "system": "x-anthropic-billing-header: cch=1;\nBe brief.",
        "tools": [TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 5},
    }
    counted = await ask(served, path="/v1/messages/count_tokens", **fields)
    body = await (await ask(served, **fields)).get_json()
    total = (await counted.get_json())["input_tokens"]
    assert total == len(unpack_tokens(served.engine.requests[0].prompt)) == len("Be brief.hi")
    usage = body["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[name] for name in parts) == total
    counting, asking = served.tokenizer.chats
    assert counting == asking
    assert asking[1]["tools"][0]["function"]["name"] == "look_up"


async def test_a_stream_has_its_events_in_their_order(served: Served) -> None:
    """From the prompt's usage to the whole of it, with every event under its name."""
    served.engine.is_held = True
    async with served.driven_by(drive(served, "Hel", "lo")):
        response = await ask(served, stream=True)
        events = await events_of(response)
    assert [name for name, _ in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0][1]["message"]
    assert (start["id"], start["content"]) == (response.headers["request-id"], [])
    assert (start["stop_reason"], start["usage"]["output_tokens"]) == (None, 0)
    assert start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"] == 2
    end = events[-2][1]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 2


async def drive(served: Served, *texts: str) -> None:
    """Play the engine: emit texts one by one, so that none are merged, and end."""
    while not served.engine.requests:
        await served.engine.sleep()
    request_id = served.engine.requests[0].request_id
    for number, text in enumerate(texts, start=1):
        served.engine.put(request_id, text, number)
        await served.engine.sleep()
    served.engine.finish(request_id)


async def test_a_stream_that_waits_is_kept_alive_by_pings(make_server: ServerFactory) -> None:
    """Before the engine has said anything, too."""
    served = await make_server(keep_alive_s=0.03)
    served.engine.is_held = True

    async def wait_and_answer() -> None:
        while not served.engine.requests:
            await served.engine.sleep()
        for _ in range(60):
            await served.engine.sleep()
        await drive(served, "x")

    async with served.driven_by(wait_and_answer()):
        events = await events_of(await ask(served, stream=True))
    names = [name for name, _ in events]
    assert names[0] == "ping"
    assert next(name for name in names if name != "ping") == "message_start"


async def test_calls_and_thinking_become_blocks(served: Served) -> None:
    """Whole and streamed, with the reason that an agent goes by."""
    served.tokenizer.formats = ChatFormats(tools="hermes", reasoning="qwen3")
    call = '<tool_call>{"name": "look_up", "arguments": {"q": 1}}</tool_call>'
    served.engine.texts = ["<think>Hm.</think>", "Well. ", call]
    fields: dict[str, Any] = {"tools": [TOOL], "thinking": {"type": "adaptive"}}
    body = await (await ask(served, **fields)).get_json()
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use"]
    assert body["content"][2]["input"] == {"q": 1}
    assert body["stop_reason"] == "tool_use"
    events = await events_of(await ask(served, stream=True, **fields))
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    parts = [e["delta"]["partial_json"] for _, e in events if "partial_json" in e.get("delta", {})]
    assert json.loads("".join(parts)) == {"q": 1}


async def test_thinking_has_its_budget_and_may_be_left_out(served: Served) -> None:
    """The engine is told the budget, and a client that shows no thinking gets none."""
    served.tokenizer.formats = ChatFormats(reasoning="qwen3")
    served.engine.texts = ["<think>Hm.</think>", "Yes."]
    thinking = {"type": "enabled", "budget_tokens": 5, "display": "omitted"}
    body = await (await ask(served, thinking=thinking)).get_json()
    told = served.engine.requests[0].sampling.thinking
    assert told is not None
    assert told.max_tokens == 5
    first, second = body["content"]
    assert (first["thinking"], bool(first["signature"])) == ("", True)
    assert second == {"type": "text", "text": "Yes."}
    assert served.tokenizer.chats[0][1]["enable_thinking"] is True


async def test_strict_servers_refuse_what_they_do_not_know(make_server: ServerFactory) -> None:
    """In the API's own shape, by name."""
    served = await make_server(strict_fields=True)
    response = await ask(served, context_management={"edits": []})
    error = (await response.get_json())["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert "context_management" in error["message"]


async def test_at_most_one_call_where_no_more_are_wanted(served: Served) -> None:
    """What follows the first call is left out."""
    served.tokenizer.formats = ChatFormats(tools="hermes")
    call = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'
    served.engine.texts = [call, call]
    for is_single, count in ((False, 2), (True, 1)):
        choice = {"type": "auto", "disable_parallel_tool_use": is_single}
        body = await (await ask(served, tools=[TOOL], tool_choice=choice)).get_json()
        assert [block["type"] for block in body["content"]] == ["tool_use"] * count


@pytest.mark.parametrize(
    ("reason", "stop_reason", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
    ],
)
async def test_why_an_answer_ended(
    served: Served, reason: Any, stop_reason: Any, expected: tuple[str, str | None]
) -> None:
    """In Anthropic's words, with the text of the sequence that it was."""
    served.engine.is_held = True

    async def drive_to_end() -> None:
        while not served.engine.requests:
            await served.engine.sleep()
        served.engine.put(
            served.engine.requests[0].request_id,
            "Hello",
            finish_reason=reason,
            stop_reason=stop_reason,
        )

    async with served.driven_by(drive_to_end()):
        body = await (await ask(served, stop_sequences=["END"])).get_json()
    assert (body["stop_reason"], body["stop_sequence"]) == expected
    assert served.engine.requests[0].sampling.stop == ("END",)


async def test_sampling_is_as_the_request_says(make_server: ServerFactory) -> None:
    """An agent may ask for any length of answer; it gets what the server allows."""
    served = await make_server(max_request_tokens=50, default_max_tokens=50)
    await ask(served, max_tokens=64000, temperature=0.5, top_p=0.25, top_k=3)
    sampling = served.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 3)
    assert sampling.max_tokens == 50
    await ask(served, max_tokens=7)
    sampling = served.engine.requests[1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.6, 20, 7)


async def test_a_prompt_can_be_stored_without_an_answer(served: Served) -> None:
    """No length at all asks for that: nothing is told but the prompt's usage."""
    for is_streamed in (False, True):
        response = await ask(served, max_tokens=0, stream=is_streamed)
        if is_streamed:
            events = await events_of(response)
            assert [name for name, _ in events] == [
                *("message_start", "ping", "message_delta", "message_stop"),
            ]
            usage, ending = events[2][1]["usage"], events[2][1]["delta"]
        else:
            body = await response.get_json()
            assert body["content"] == []
            usage, ending = body["usage"], body
        assert (usage["output_tokens"], ending["stop_reason"]) == (0, "max_tokens")
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 2
        assert served.engine.requests[-1].is_warm


async def test_a_cancelled_answer_ends_with_what_there_is(served: Served) -> None:
    """By the id that its client knows, and said to be cancelled."""
    served.engine.is_held = True

    async def cancel() -> None:
        while not served.engine.requests:
            await served.engine.sleep()
        request_id = served.engine.requests[0].request_id
        served.engine.put(request_id, "Hel")
        await served.engine.sleep()
        response = await served.post(f"/v1/requests/{request_id}/cancel")
        assert response.status_code == 200

    async with served.driven_by(cancel()):
        body = await (await ask(served)).get_json()
    assert (body["content"][0]["text"], body["stop_reason"]) == ("Hel", "abort")


async def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_look_for(
    served: Served,
) -> None:
    """With both numbers."""
    response = await ask(served, {"role": "user", "content": "x" * 100})
    assert response.status_code == 400
    error = (await response.get_json())["error"]
    assert error == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 100 tokens > 99 maximum",
    }
    longest = await ask(served, {"role": "user", "content": "x" * 99})
    assert longest.status_code == 200
    counted = await ask(
        served, {"role": "user", "content": "x" * 200}, path="/v1/messages/count_tokens"
    )
    assert await counted.get_json() == {"input_tokens": 200}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_errors_have_anthropics_shape_wherever_they_arise(
    make_server: ServerFactory, path: str
) -> None:
    """Keys, rate, names, size, JSON, methods, fields and an engine that is not there."""
    served = await make_server(api_keys=("secret",), max_body_bytes=2000, rate_limit=6)
    key = {"x-api-key": "secret"}

    async def check(status: int, kind: str, method: str = "POST", **request: Any) -> None:
        request.setdefault("headers", key)
        response = await served.client.open(path, method=method, **request)
        body = await response.get_json()
        assert (response.status_code, body["type"], body["error"]["type"]) == (
            *(status, "error", kind),
        )
        assert body["request_id"] == response.headers["request-id"]
        assert body["error"]["message"]

    good = {"model": "default", "max_tokens": 1, "messages": [USER]}
    await check(401, "authentication_error", json=good, headers={})
    await check(401, "authentication_error", json=good, headers={"x-api-key": "wrong"})
    await check(404, "not_found_error", json={**good, "model": "gpt-5"})
    await check(413, "request_too_large", json={**good, "system": "x" * 3000})
    await check(400, "invalid_request_error", data=b"{")
    await check(400, "invalid_request_error", json={**good, "messages": []})
    await check(405, "invalid_request_error", method="GET")
    served.engine.set(phase="restarting")
    await check(503, "overloaded_error", json=good)
    served.engine.set(phase="ready")
    await check(429, "rate_limit_error", json=good)


async def test_a_full_queue_says_when_to_come_again(make_server: ServerFactory) -> None:
    """As a rate limit, which clients wait for."""
    served = await make_server(max_queue=0, max_num_seqs=1)
    served.engine.is_held = True

    async def fill() -> None:
        while not served.engine.requests:
            await served.engine.sleep()
        response = await ask(served)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert (await response.get_json())["error"]["type"] == "rate_limit_error"
        await drive(served, "x")

    async with served.driven_by(fill()):
        assert (await ask(served)).status_code == 200


async def test_an_error_after_the_stream_began_is_its_last_event(served: Served) -> None:
    """The text that came before it is there, and no end."""
    served.engine.finish_reason = "error"
    served.engine.error = ErrorInfo.of(EngineDiedError("the engine died"))
    served.engine.is_held = True

    async with served.driven_by(served.die_after("Hel", served.engine.error)):
        events = await events_of(await ask(served, stream=True))
    assert [name for name, _ in events[-2:]] == ["content_block_delta", "error"]
    assert events[-1][1]["error"] == {"type": "overloaded_error", "message": "the engine died"}


async def test_what_the_engine_refuses_at_once_is_no_stream(served: Served) -> None:
    """It has its status."""
    served.engine.texts, served.engine.finish_reason = [], "error"
    served.engine.error = ErrorInfo.of(InvalidRequestError("no", param="messages"))
    response = await ask(served, stream=True)
    assert response.status_code == 400
    assert (await response.get_json())["error"]["message"] == "no"


@pytest.mark.parametrize("name", ["claude-opus-4-8", "claude-haiku-4-5-20251001", "gpt-4o", "o3-x"])
async def test_names_that_agents_invent_stand_for_the_served_model(
    make_server: ServerFactory, name: str
) -> None:
    """They are said back; on other routes only aliases are known."""
    served = await make_server(model_aliases=(("gpt-4o", "default"), ("o3-*", "org/model")))
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = await ask(served, path=path, model=name)
        assert response.status_code == 200
    body = await (await ask(served, model=name)).get_json()
    assert body["model"] == name
    is_alias = not name.startswith("claude-")
    assert (await served.chat(model=name)).status_code == (200 if is_alias else 404)
    assert (await ask(served, model="mistral")).status_code == 404


async def test_unknown_fields_are_named_in_a_header(served: Served) -> None:
    """As on every route; strict servers refuse them."""
    response = await ask(served, context_management={"edits": []})
    assert response.headers["x-ignored-fields"] == "context_management"
    assert served.runtime.unknown_fields.counts == {"context_management": 1}


async def test_a_client_that_leaves_frees_its_row(served: Served) -> None:
    """In the middle of a call's arguments, too."""
    served.tokenizer.formats = ChatFormats(tools="hermes")
    served.engine.is_held = True
    body = {"max_tokens": 5, "messages": [USER], "tools": [TOOL], "stream": True}
    async with served.client.request("/v1/messages", method="POST") as connection:
        await connection.send(json.dumps(body).encode())
        await connection.send_complete()
        while not served.engine.requests:
            await served.engine.sleep()
        request_id = served.engine.requests[0].request_id
        served.engine.put(request_id, '<tool_call>{"name": "look_up", "arguments": {"q": "')
        await connection.receive()
        await connection.disconnect()
    assert served.engine.left == [request_id]
    assert served.runtime.generations.num_open_rows == 0
