"""What coding agents send to the Responses route: tools of every kind, results, old turns."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from support.response_events import (
    FORMATS,
    PATCH,
    SPACE,
    TEXT,
    TOOL,
    ask,
    events_of,
    first_row,
    kinds,
)

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

AGENT_ITEMS: list[dict[str, Any]] = [
    {
        "type": "message",
        "id": f"msg_{role}",
        "role": role,
        "content": [{"type": "input_text", "text": text}],
    }
    for role, text in {"developer": "Be an agent.", "user": "Make a file."}.items()
]
AGENT_ITEMS += [
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Look first."}],
        "encrypted_content": None,
    },
    {
        "type": "function_call",
        "status": "completed",
        "id": "fc_1",
        "name": "exec_command",
        "arguments": '{"cmd": "ls"}',
        "call_id": "call_1",
    },
    {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "a.txt"},
]


async def test_tools_that_are_left_out_are_named(make_server: ServerFactory) -> None:
    """Agents send them unasked; strict servers refuse them."""
    tools = [TOOL, {"type": "web_search", "external_web_access": False}]
    for strict in (False, True):
        served = await make_server(strict_fields=strict, formats=FORMATS)
        response = await ask(served, tools=tools)
        assert response.status_code == (400 if strict else 200)
    served = await make_server(formats=FORMATS)
    response = await ask(served, tools=tools, client_metadata={"x": "y"})
    ignored = response.headers["x-ignored-fields"]
    assert ignored == "tools[].external_web_access, tools[].web_search"
    _, options = served.tokenizer.chats[-1]
    assert [tool["function"]["name"] for tool in options["tools"]] == ["look_up"]


async def test_tools_of_namespaces_and_custom_ones_go_there_and_back(
    make_server: ServerFactory,
) -> None:
    """The client finds its own names; sent back, the model finds those that it knows."""
    served = await make_server(formats=FORMATS)
    patch = '{"name": "apply_patch", "arguments": {"input": "a\\nb"}}'
    other = '{"name": "agents__look_up", "arguments": {"q": "x"}}'
    served.engine.texts = [f"<tool_call>{call}</tool_call>" for call in (patch, other)]
    tools = [PATCH, SPACE]
    body = await (await ask(served, tools=tools)).get_json()
    custom, call = body["output"]
    assert (custom["type"], custom["name"], custom["input"]) == (
        *("custom_tool_call", "apply_patch", "a\nb"),
    )
    assert (call["namespace"], call["name"], call["arguments"]) == (
        *("agents", "look_up", '{"q": "x"}'),
    )
    results = [
        {"type": f"{kind}_output", "call_id": item["call_id"], "output": "done"}
        for kind, item in (("custom_tool_call", custom), ("function_call", call))
    ]
    assert (await ask(served, [*body["output"], *results], tools=tools)).status_code == 200
    messages, options = served.tokenizer.chats[-1]
    assert [message["role"] for message in messages] == ["assistant", "tool", "tool"]
    assert [call["function"] for call in messages[0]["tool_calls"]] == [
        {"name": "apply_patch", "arguments": {"input": "a\nb"}},
        {"name": "agents__look_up", "arguments": {"q": "x"}},
    ]
    shown = [tool["function"] for tool in options["tools"]]
    assert [function["name"] for function in shown] == ["apply_patch", "agents__look_up"]
    assert "start: /.+/s" in shown[0]["description"]


async def test_the_text_of_a_custom_tool_comes_as_it_is_written(
    make_server: ServerFactory,
) -> None:
    """Not at the end of the call, and without the JSON around it."""
    served = await make_server(formats=FORMATS)
    served.engine.is_held = True
    head = '<tool_call>{"name": "apply_patch", "arguments": {"input": "'

    async def write() -> None:
        request_id = await first_row(served)
        for text in (head, "one", "\\", "ntwo", '"}}</tool_call>'):
            served.engine.put(request_id, text)
            await asyncio.sleep(0.02)
        served.engine.finish(request_id)

    async with served.driven_by(write()):
        events = await events_of(await ask(served, stream=True, tools=[PATCH]))
    deltas = [event["delta"] for event in events if event["type"].endswith("input.delta")]
    assert "".join(deltas) == events[-1]["response"]["output"][0]["input"] == "one\ntwo"
    assert len(deltas) > 1


async def test_what_a_coding_agent_sends_is_answered(make_server: ServerFactory) -> None:
    """The shape of its second request, with all that it sends unasked."""
    served = await make_server(formats=FORMATS)
    response = await ask(
        served,
        AGENT_ITEMS,
        model="default",
        stream=True,
        store=False,
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        include=["reasoning.encrypted_content"],
        prompt_cache_key="session",
        client_metadata={"session": "1"},
        tools=[
            {**TOOL, "name": "exec_command", "strict": False},
            SPACE,
            PATCH,
            {
                "type": "tool_search",
                "execution": "client",
                "description": "Find.",
                "parameters": {},
            },
            {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
        ],
    )
    ignored = set(response.headers["x-ignored-fields"].split(", "))
    assert {"tools[].tool_search", "tools[].web_search"} <= ignored
    assert not any("input" in name for name in ignored)
    assert kinds(await events_of(response)) == ["created", "in_progress", *TEXT, "completed"]
    messages, options = served.tokenizer.chats[-1]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2]["reasoning_content"] == "Look first."
    names = [tool["function"]["name"] for tool in options["tools"]]
    assert names == ["exec_command", "agents__look_up", "apply_patch"]
    assert len(served.runtime.responses) == 0


async def test_an_image_that_a_tool_returned_does_not_end_the_chat(served: Served) -> None:
    """The model is told of it, the client by the header; it is not kept."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    output = [{"type": "input_text", "text": "Here: "}, image]
    items = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    response = await ask(served, items)
    assert response.headers["x-ignored-fields"] == "input[].output[].input_image"
    messages, _ = served.tokenizer.chats[-1]
    assert messages[1]["content"] == "Here: \n[an image, which cannot be shown here]"
    stored = await served.client.get(
        f"/v1/responses/{(await response.get_json())['id']}/input_items"
    )
    assert "AAAA" not in json.dumps(await stored.get_json())
