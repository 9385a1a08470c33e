"""The Responses routes over an engine made of text: events in order, ends, storage and owners."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from openai.types.responses import Response as SdkResponse
from support.response_events import (
    CALL,
    CALLED,
    CUSTOM,
    FORMATS,
    PATCH,
    REASONING,
    TEXT,
    TOOL,
    ask,
    events_of,
    first_row,
    kinds,
)

from vllm_mlx.engine.core.outputs import ErrorInfo, unpack_tokens
from vllm_mlx.engine.errors import EngineDiedError, InvalidRequestError

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

SCHEMA = {"type": "json_schema", "name": "s", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("texts", "fields", "expected"),
    [
        (["Hello", " world"], {}, [*TEXT, "completed"]),
        (["<think>Hm", "m</think>", "So."], {}, [*REASONING, *TEXT, "completed"]),
        ([CALL], {"tools": [TOOL]}, [*CALLED, "completed"]),
        (["<think>Hm</think>", "See: ", CALL], {"tools": [TOOL]}, [*REASONING, *TEXT, *CALLED]),
        ([CALL, CALL], {"tools": [TOOL]}, [*CALLED, *CALLED, "completed"]),
        ([CALL, CALL], {"tools": [TOOL], "parallel_tool_calls": False}, [*CALLED, "completed"]),
        (['{"a": ', "1}"], {"text": {"format": SCHEMA}}, [*TEXT, "completed"]),
        (
            ['<tool_call>{"name": "apply_patch", "arguments": {"input": "a\\nb"}}</tool_call>'],
            {"tools": [PATCH]},
            [*CUSTOM, "completed"],
        ),
        ([], {}, ["completed"]),
    ],
    ids=[
        *("text", "reasoning", "call", "reasoning, text and call", "two calls", "one of two calls"),
        *("schema", "custom", "nothing"),
    ],
)
async def test_the_events_of_each_kind_of_output_come_in_order(
    make_server: ServerFactory, texts: list[str], fields: dict[str, Any], expected: list[str]
) -> None:
    """What they add up to is what their last one says, and what is answered whole."""
    served = await make_server(formats=FORMATS)
    served.engine.texts = texts
    events = await events_of(await ask(served, stream=True, **fields))
    assert kinds(events)[: len(expected) + 2] == ["created", "in_progress", *expected]
    final = events[-1]["response"]
    assert (final["status"], events[-1]["type"]) == ("completed", "response.completed")
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert added_up(events) == final["output"]
    body = await (await ask(served, **fields)).get_json()
    SdkResponse.model_validate(body)
    assert [without_ids(item) for item in body["output"]] == [
        without_ids(item) for item in final["output"]
    ]
    assert without_ids(body).keys() == without_ids(final).keys()


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of the done events, after checking that the deltas say the same."""
    items: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    added: dict[str, int] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            added[event["item"]["id"]] = event["output_index"]
            assert event["item"]["status"] == "in_progress"
        elif event["type"].endswith(".delta"):
            assert added[event["item_id"]] == event["output_index"]
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        elif event["type"] == "response.output_item.done":
            item = event["item"]
            assert event["output_index"] == added[item["id"]] == len(items)
            whole = item.get("arguments", item.get("input"))
            assert (item["content"][0]["text"] if whole is None else whole) == texts[item["id"]]
            items.append(item)
    return items


def without_ids(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an object without what is new each time."""
    return {name: v for name, v in fields.items() if name not in ("id", "call_id", "created_at")}


async def test_a_whole_response_has_openais_shape(served: Served) -> None:
    """It says what it was asked, what it took, and its id in the headers."""
    response = await ask(served, instructions="Be.", metadata={"a": "b"}, max_output_tokens=9)
    body = await response.get_json()
    SdkResponse.model_validate(body)
    assert body["id"] == response.headers["x-request-id"]
    assert body["id"].startswith("resp_")
    assert served.engine.requests[0].request_id == body["id"]
    said = ("object", "status", "model", "instructions", "metadata", "max_output_tokens", "store")
    assert [body[name] for name in said] == [
        *("response", "completed", "org/model", "Be.", {"a": "b"}, 9, True)
    ]
    assert (body["temperature"], body["top_p"]) == (0.6, 0.9)
    (item,) = body["output"]
    assert item["content"][0] == {
        "type": "output_text",
        "text": "Hello world",
        "annotations": [],
        "logprobs": [],
    }
    assert body["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_is_cut_is_incomplete(
    make_server: ServerFactory, stream: bool
) -> None:
    """The response says why, and so does the item; of a call, too."""
    served = await make_server(formats=FORMATS)
    served.engine.finish_reason = "length"
    for texts in (["Hel"], ['<tool_call>{"name": "look_up", "arguments": {"q": "x']):
        served.engine.texts = texts
        response = await ask(served, stream=stream, tools=[TOOL])
        if stream:
            events = await events_of(response)
            assert kinds(events)[-2:] == ["output_item.done", "incomplete"]
            body = events[-1]["response"]
        else:
            body = await response.get_json()
        assert body["status"] == "incomplete"
        assert body["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in body["output"]] == ["incomplete"]
    assert body["output"][0]["arguments"] == '{"q": "x'


async def test_a_failure_in_a_stream_is_its_last_event(served: Served) -> None:
    """With what came before it, and the error; nothing of it is stored."""
    served.engine.is_held = True

    async def die() -> None:
        request_id = await first_row(served)
        served.engine.put(request_id, "Hel")
        await served.engine.sleep()
        served.engine.finish(request_id, "error", ErrorInfo.of(EngineDiedError("it died")))

    async with served.driven_by(die()):
        events = await events_of(await ask(served, stream=True))
    assert kinds(events)[-2:] == ["output_text.delta", "failed"]
    failed = events[-1]["response"]
    assert failed["error"] == {"code": "server_error", "message": "it died"}
    assert (failed["status"], failed["output"][0]["content"][0]["text"]) == ("failed", "Hel")
    assert (await served.client.get(f"/v1/responses/{failed['id']}")).status_code == 404


async def test_a_defect_is_an_error_event_and_a_failure(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream has its end, and says nothing of our inside."""

    def break_down(self: Any, part: Any) -> None:
        raise ZeroDivisionError("inner workings")

    monkeypatch.setattr("vllm_mlx.server.responses_api.streams.ResponseRun.take", break_down)
    events = await events_of(await ask(served, stream=True))
    assert kinds(events) == ["created", "in_progress", "error", "failed"]
    assert events[-2]["code"] == "internal_error"
    assert "inner workings" not in json.dumps(events)


async def test_what_is_refused_at_once_is_no_stream(served: Served) -> None:
    """It has its status, whoever refuses it."""
    served.engine.texts, served.engine.finish_reason = [], "error"
    served.engine.error = ErrorInfo.of(InvalidRequestError("no", param="input"))
    for response in (await ask(served, stream=True), await ask(served, ["x"], stream=True)):
        assert response.status_code == 400
        assert (await response.get_json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_is_cancelled_by_its_id(served: Served, stream: bool) -> None:
    """Both the canceller and the reader get what there was; then it is stored as it ended."""
    served.engine.is_held = True
    seen: dict[str, Any] = {}

    async def cancel() -> None:
        request_id = await first_row(served)
        served.engine.put(request_id, "Hel")
        await served.engine.sleep()
        path = f"/v1/responses/{request_id}"
        seen["before"] = await (await served.client.get(path)).get_json()
        seen["cancelled"] = await (await served.client.post(f"{path}/cancel")).get_json()

    async with served.driven_by(cancel()):
        response = await ask(served, stream=stream)
        body = await response.get_json() if not stream else None
        events = await events_of(response) if stream else []
    final = events[-1]["response"] if stream else body
    if stream:
        assert kinds(events) == ["created", "in_progress", *TEXT, "incomplete"]
    assert seen["before"]["status"] == "in_progress"
    assert seen["cancelled"] == final
    assert (final["status"], final["incomplete_details"]) == ("cancelled", None)
    assert final["output"][0]["content"][0]["text"] == "Hel"
    path = f"/v1/responses/{final['id']}"
    assert await (await served.client.get(path)).get_json() == final
    assert await (await served.client.post(f"{path}/cancel")).get_json() == final


async def test_a_client_that_leaves_frees_its_row(served: Served) -> None:
    """And its response is neither found nor stored."""
    served.engine.is_held = True
    async with served.client.request("/v1/responses", method="POST") as connection:
        await connection.send(json.dumps({"input": "hi", "stream": True}).encode())
        await connection.send_complete()
        request_id = await first_row(served)
        served.engine.put(request_id, "Hel")
        await connection.receive()
        await connection.disconnect()
    assert served.engine.left == [request_id]
    assert served.runtime.generations.num_open_rows == 0
    assert (await served.client.get(f"/v1/responses/{request_id}")).status_code == 404
    assert len(served.runtime.responses) == 0


async def test_a_conversation_goes_on_without_its_instructions(served: Served) -> None:
    """The turns before are the prompt's beginning; branches and deletions do not disturb it."""
    first = await (await ask(served, "One?", instructions="Be.")).get_json()
    second = await (await ask(served, "Two?", previous_response_id=first["id"])).get_json()
    deleted = await served.client.delete(f"/v1/responses/{first['id']}")
    expected = {"id": first["id"], "object": "response", "deleted": True}
    assert await deleted.get_json() == expected
    for path in (f"/v1/responses/{first['id']}", f"/v1/responses/{first['id']}/input_items"):
        assert (await served.client.get(path)).status_code == 404
    await ask(served, "Three?", previous_response_id=second["id"], instructions="Be new.")
    chats = [
        [(message["role"], message["content"]) for message in messages]
        for messages, _ in served.tokenizer.chats
    ]
    answer = ("assistant", "Hello world")
    assert chats[1] == [("user", "One?"), answer, ("user", "Two?")]
    assert chats[2] == [("system", "Be new."), *chats[1], answer, ("user", "Three?")]
    again = await ask(served, "Four?", previous_response_id=first["id"])
    assert again.status_code == 404
    assert (await again.get_json())["error"]["param"] == "previous_response_id"


async def test_what_is_not_to_be_stored_is_not(served: Served) -> None:
    """Neither to be read nor to be gone on with."""
    body = await (await ask(served, store=False)).get_json()
    assert body["store"] is False
    assert (await served.client.get(f"/v1/responses/{body['id']}")).status_code == 404
    assert (await ask(served, previous_response_id=body["id"])).status_code == 404


async def test_other_clients_see_nothing(make_server: ServerFactory) -> None:
    """A response is its key's alone: to read, go on with, refer to, cancel or delete."""
    served = await make_server(api_keys=("mine", "other"))
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("mine", "other"))

    async def post(headers: dict[str, str], **body: Any) -> Any:
        return await served.client.post(
            "/v1/responses", json={"input": "x", **body}, headers=headers
        )

    body = await (await post(mine)).get_json()
    path = f"/v1/responses/{body['id']}"
    reference = [{"type": "item_reference", "id": body["output"][0]["id"]}]
    for headers, status in ((other, 404), (mine, 200)):
        for method, place in (("GET", path), ("GET", f"{path}/input_items")):
            response = await served.client.open(place, method=method, headers=headers)
            assert response.status_code == status
        assert (await post(headers, previous_response_id=body["id"])).status_code == status
        assert (await post(headers, input=reference)).status_code == status
        cancelled = await served.client.post(f"{path}/cancel", headers=headers)
        assert cancelled.status_code == status
        assert (await served.client.delete(path, headers=headers)).status_code == status

    served.engine.is_held = True

    async def cancel() -> None:
        request_id = await first_row(served, len(served.engine.requests))
        place = f"/v1/responses/{request_id}/cancel"
        assert (await served.client.post(place, headers=other)).status_code == 404
        assert served.engine.aborted == []
        assert (await served.client.post(place, headers=mine)).status_code == 200

    async with served.driven_by(cancel()):
        assert (await (await post(mine)).get_json())["status"] == "cancelled"


async def test_input_items_are_listed_in_pages(served: Served) -> None:
    """The latest first, or as they came, each with an id."""
    items = [{"role": "user", "content": text} for text in "abc"]
    body = await (await ask(served, items)).get_json()
    path = f"/v1/responses/{body['id']}/input_items"

    async def page(query: str) -> Any:
        response = await served.client.get(f"{path}?{query}")
        return response.status_code, await response.get_json()

    def texts(found: Any) -> str:
        return "".join(item["content"][0]["text"] for item in found["data"])

    _, latest = await page("limit=2")
    assert (texts(latest), latest["has_more"]) == ("cb", True)
    _, rest = await page(f"after={latest['last_id']}")
    assert (texts(rest), rest["has_more"], rest["first_id"]) == ("a", False, rest["last_id"])
    _, whole = await page("order=asc&limit=100")
    assert texts(whole) == "abc"
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nothing"):
        status, _ = await page(query)
        assert status == 400, query


@pytest.mark.parametrize(
    "fields", [{"prompt_cache_options": {"prewarm": True}}, {"generate": False, "stream": True}]
)
async def test_a_prompt_is_computed_and_nothing_else(
    served: Served, fields: dict[str, Any]
) -> None:
    """The row is one whose prompt is worth storing; the response is empty, and can be gone on."""
    response = await ask(served, "One?", instructions="Be.", **fields)
    if "stream" in fields:
        events = await events_of(response)
        assert kinds(events) == ["created", "in_progress", "completed"]
        body = events[-1]["response"]
    else:
        body = await response.get_json()
    assert (body["status"], body["output"]) == ("completed", [])
    assert body["usage"]["input_tokens"] == len("Be.One?")
    assert body["usage"]["output_tokens"] == 0
    (row,) = served.engine.requests
    assert (row.is_warm, row.sampling.max_tokens) == (True, 1)
    await ask(served, "Two?", previous_response_id=body["id"])
    prompt = unpack_tokens(served.engine.requests[1].prompt)
    assert "".join(map(chr, prompt)) == "One?Two?"


async def test_waiting_clients_are_told_by_events(make_server: ServerFactory) -> None:
    """A comment is none, and those who wait for events give up."""
    served = await make_server(keep_alive_s=0.02)
    served.engine.is_held = True

    async def answer() -> None:
        request_id = await first_row(served)
        await asyncio.sleep(0.1)
        served.engine.put(request_id, "x", finish_reason="stop")

    async with served.driven_by(answer()):
        events = await events_of(await ask(served, stream=True))
    assert kinds(events) == ["created", "in_progress", *TEXT, "completed"]
    assert [event["type"] for event in events].count("response.in_progress") > 1
