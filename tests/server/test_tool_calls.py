"""Tools over the chat route: what is asked of the engine, and what its text becomes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from vllm_mlx.engine.core.logprobs import Logprobs, TokenLogprob
from vllm_mlx.engine.core.outputs import FinishReason
from vllm_mlx.engine.text.chat_formats import ChatFormats

if TYPE_CHECKING:
    from tests.server.conftest import FakeEngine, Served, ServerFactory

ReadEvents = Callable[[bytes], list[Any]]

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
OTHER = {"type": "function", "function": {"name": "look_up"}}
FORMATS = ChatFormats(tools="hermes", reasoning="qwen3")

THOUGHT = "<think>\nI must look.\n</think>\n\n"
ARGUMENTS = '{"city": "Pa<ris>", "days": 3}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
ANSWER = f"{THOUGHT}One moment.\n{CALL}\n{SECOND}"


@pytest.fixture
async def tooled(make_server: ServerFactory) -> Served:
    """Return a server that reads calls and reasoning, and whose engine writes both."""
    server: Served = await make_server(formats=FORMATS)
    write(server.engine, ANSWER)
    return server


def write(engine: FakeEngine, text: str, reason: FinishReason = "stop", *, size: int = 1) -> None:
    """Have the engine answer with `text` in pieces of so many characters."""
    engine.texts = [text[start : start + size] for start in range(0, len(text), size)]
    engine.finish_reason = reason


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """Put the deltas of one choice together as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            assert delta["reasoning"] == delta["reasoning_content"]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"])
                    assert call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    message["calls"].append([call["function"]["name"], ""])
                else:
                    message["calls"][call["index"]][1] += call["function"]["arguments"]
            if choice["finish_reason"] is not None:
                assert "finish_reason" not in message, "a second end"
                message["finish_reason"] = choice["finish_reason"]
    return message


EXPECTED = {
    "content": "One moment.",
    "reasoning_content": "I must look.",
    "calls": [["get_weather", ARGUMENTS], ["look_up", "{}"]],
    "finish_reason": "tool_calls",
}


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_a_stream_never_shows_a_marker(
    tooled: Served, read_events: ReadEvents, size: int
) -> None:
    """However the text is cut, reasoning, content and calls are told apart whole."""
    write(tooled.engine, ANSWER, size=size)
    response = await tooled.chat(tools=[TOOL, OTHER], stream=True)
    *chunks, done = read_events(await response.get_data())
    assert done == "[DONE]"
    assert joined(chunks) == EXPECTED


async def test_arguments_stream_as_they_come(
    make_server: ServerFactory, read_events: ReadEvents
) -> None:
    """Pieces of arguments are sent before the call is whole, and name and id once, first."""
    server = await make_server(formats=FORMATS)
    server.engine.is_held = True

    async def drive() -> None:
        while not server.engine.requests:
            await server.engine.sleep()
        row = server.engine.requests[0].request_id
        for start in range(0, len(ANSWER), 4):
            server.engine.put(row, ANSWER[start : start + 4])
            await server.engine.sleep()
        server.engine.finish(row)

    async with server.driven_by(drive()):
        response = await server.chat(tools=[TOOL, OTHER], stream=True)
        *chunks, _ = read_events(await response.get_data())
    assert joined(chunks) == EXPECTED
    calls = [
        call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)
    assert sum("id" in call for call in calls) == 2
    assert len([call for call in calls if call["index"] == 0]) > 5


async def test_a_whole_answer_is_what_its_stream_says(tooled: Served) -> None:
    """The real client's types take it, and content is null where there is none."""
    body = await (await tooled.chat(tools=[TOOL, OTHER])).get_json()
    message = ChatCompletion.model_validate(body).choices[0].message
    assert message.content == EXPECTED["content"]
    assert body["choices"][0]["message"]["reasoning"] == EXPECTED["reasoning_content"]
    assert message.tool_calls is not None
    found = [[c.function.name, c.function.arguments] for c in message.tool_calls if c.type]
    assert found == EXPECTED["calls"]
    assert len({call.id for call in message.tool_calls}) == 2
    write(tooled.engine, CALL)
    body = await (await tooled.chat(tools=[TOOL])).get_json()
    assert body["choices"][0]["message"]["content"] is None
    assert body["choices"][0]["finish_reason"] == "tool_calls"


async def test_without_tools_their_markers_are_text(tooled: Served) -> None:
    """Nobody asked for calls, so nothing is one; nor is a call to what there is not."""
    body = await (await tooled.chat()).get_json()
    (choice,) = body["choices"]
    assert choice["message"]["content"].endswith(SECOND)
    assert choice["finish_reason"] == "stop"
    body = await (await tooled.chat(tools=[OTHER])).get_json()
    assert "get_weather" in body["choices"][0]["message"]["content"]
    assert len(body["choices"][0]["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("text", "reason", "stop_reason", "expected"),
    [
        (CALL[:60], "length", None, "length"),
        (CALL[:60], "stop", "ris", "stop"),
        (CALL[:60], "stop", None, "tool_calls"),
        (CALL + "\nDone", "stop", "x", "tool_calls"),
        ("No call at all", "stop", None, "stop"),
        (CALL, "length", None, "length"),
        ("<tool_call>", "stop", None, "stop"),
        ("Use <tool_call> tags", "stop", None, "stop"),
    ],
)
async def test_the_end_tells_calls_to_act_on(
    make_server: ServerFactory,
    read_events: ReadEvents,
    text: str,
    reason: FinishReason,
    stop_reason: str | None,
    expected: str,
) -> None:
    """`tool_calls` needs a call, and one that was cut by a limit or a stop string is none."""
    server = await make_server(formats=FORMATS)
    server.engine.is_held = True
    for stream in (False, True):

        async def drive() -> None:
            count = len(server.engine.requests)
            while len(server.engine.requests) == count:
                await server.engine.sleep()
            row = server.engine.requests[-1].request_id
            server.engine.put(row, text, finish_reason=reason, stop_reason=stop_reason)

        async with server.driven_by(drive()):
            response = await server.chat(tools=[TOOL], stream=stream)
            if stream:
                *chunks, _ = read_events(await response.get_data())
                found = joined(chunks)["finish_reason"]
            else:
                found = (await response.get_json())["choices"][0]["finish_reason"]
        assert found == expected


@pytest.mark.parametrize("end", range(1, CALL.index("get_weather") + 4))
async def test_a_call_that_is_cut_before_its_name_is_not_shown(
    make_server: ServerFactory, end: int
) -> None:
    """A whole marker at the end is no content, nor is a part of one where a call was asked for."""
    server = await make_server(formats=FORMATS)
    write(server.engine, f"Wait.\n{CALL[:end]}", "length")
    choices: list[Any] = ["required"]
    if end >= len("<tool_call>"):
        choices.append("auto")
    for choice in choices:
        body = await (await server.chat(tools=[TOOL], tool_choice=choice)).get_json()
        assert body["choices"][0]["message"]["content"] == "Wait."
        assert body["choices"][0]["finish_reason"] == "length"


async def test_several_answers_each_have_their_own_calls(
    tooled: Served, read_events: ReadEvents
) -> None:
    """With `n` the choices interleave and stay apart."""
    response = await tooled.chat(tools=[TOOL, OTHER], stream=True, n=3)
    *chunks, _ = read_events(await response.get_data())
    assert [joined(chunks, index) for index in range(3)] == [EXPECTED] * 3
    body = await (await tooled.chat(tools=[TOOL, OTHER], n=2)).get_json()
    ids = [c["id"] for choice in body["choices"] for c in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4


async def test_a_client_that_leaves_in_a_call_frees_its_row(make_server: ServerFactory) -> None:
    """What was being written is aborted, and nothing stays open."""
    server = await make_server(formats=FORMATS)
    server.engine.is_held = True
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "stream": True}
    async with server.client.request("/v1/chat/completions", method="POST") as connection:
        await connection.send(json.dumps(body).encode())
        await connection.send_complete()
        while not server.engine.requests:
            await server.engine.sleep()
        row = server.engine.requests[0].request_id
        server.engine.put(row, CALL[:60])
        received = b""
        while b"get_weather" not in received:
            received += await connection.receive()
        await connection.disconnect()
    assert server.engine.left == [row]
    assert server.runtime.generations.num_open_rows == 0


async def test_every_token_has_its_logprob_once(
    make_server: ServerFactory, read_events: ReadEvents
) -> None:
    """Those of markers, too; in a stream as in a whole answer."""
    server = await make_server(formats=FORMATS)
    server.engine.is_held = True

    async def drive() -> None:
        count = len(server.engine.requests)
        while len(server.engine.requests) == count:
            await server.engine.sleep()
        row = server.engine.requests[-1].request_id
        for index, character in enumerate(CALL):
            entry = TokenLogprob(ord(character), -1.0, (), index)
            server.engine.put(row, character, index + 1, logprobs=Logprobs.pack([entry]))
        server.engine.finish(row)

    found = []
    for stream in (False, True):
        async with server.driven_by(drive()):
            response = await server.chat(tools=[TOOL], logprobs=True, stream=stream)
            if stream:
                *chunks, _ = read_events(await response.get_data())
                parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"]]
            else:
                parts = [(await response.get_json())["choices"][0]["logprobs"]]
        found.append("".join(e["token"] for p in parts if p for e in p["content"]))
    assert found == [CALL, CALL]


async def test_functions_are_answered_as_they_are_asked_for(
    tooled: Served, read_events: ReadEvents
) -> None:
    """The older names of tools give the older form of a call, one at most."""
    functions = [TOOL["function"], OTHER["function"]]
    body = await (await tooled.chat(functions=functions)).get_json()
    (choice,) = body["choices"]
    expected = {"name": "get_weather", "arguments": ARGUMENTS}
    assert choice["message"]["function_call"] == expected
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"
    response = await tooled.chat(functions=functions, stream=True)
    *chunks, _ = read_events(await response.get_data())
    deltas = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
    assert [d["name"] for d in deltas if "name" in d] == ["get_weather"]
    assert "".join(d.get("arguments", "") for d in deltas) == expected["arguments"]


async def test_older_calls_in_the_history_are_calls(tooled: Served) -> None:
    """`function_call` and the role `function` reach the template by their newer names."""
    call = {"name": "look_up", "arguments": '{"word": "a"}'}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "look_up", "content": "y"},
    ]
    assert (await tooled.post("/v1/chat/completions", messages=messages)).status_code == 200
    rendered = tooled.tokenizer.chats[-1][0]
    assert rendered[1]["tool_calls"][0]["function"] == {
        "name": "look_up",
        "arguments": {"word": "a"},
    }
    assert rendered[2] == {"role": "tool", "content": "y", "name": "look_up"}


def named(name: str) -> dict[str, Any]:
    """Return the choice of a tool."""
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [named("a b")]}, "tools[0].function.name"),
        ({"tools": [named("")]}, "tools[0].function.name"),
        ({"tools": [TOOL, OTHER, TOOL]}, "tools[2].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}
                ]
            },
            "tools[0].function.parameters",
        ),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": named("look_up")}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("look_up")}, "tool_choice"),
        ({"tools": [TOOL], "functions": [OTHER["function"]]}, "functions"),
        ({"function_call": {"name": "look_up"}}, "function_call"),
        ({"functions": [named("a b")["function"]]}, "functions[0].function.name"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ],
)
async def test_tools_that_cannot_be_are_named(
    tooled: Served, fields: dict[str, Any], param: str
) -> None:
    """Each is a 400 that says where it is wrong."""
    response = await tooled.chat(**fields)
    error = (await response.get_json())["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["param"].startswith(param)


async def test_calls_are_not_forced_where_none_are_read(make_server: ServerFactory) -> None:
    """A server without a tool parser says so; without force the text is the answer."""
    server = await make_server(formats=ChatFormats())
    write(server.engine, CALL)
    response = await server.chat(tools=[TOOL], tool_choice="required")
    assert response.status_code == 400
    assert "--tool-call-parser" in (await response.get_json())["error"]["message"]
    body = await (await server.chat(tools=[TOOL])).get_json()
    assert body["choices"][0]["message"]["content"] == CALL


async def test_the_prompt_and_the_engine_are_told_of_tools(tooled: Served) -> None:
    """The template gets them, whatever the choice, and the grammar only what must be enforced."""
    grammars = []
    choices: list[Any] = ["auto", "none", "required", named("look_up")]
    for choice in choices:
        await tooled.chat(tools=[TOOL, OTHER], tool_choice=choice)
        options = tooled.tokenizer.chats[-1][1]
        assert [tool["function"]["name"] for tool in options["tools"]] == ["get_weather", "look_up"]
        grammars.append(tooled.engine.requests[-1].sampling.grammar)
    free, none, required, one = grammars
    assert free is None
    assert none is not None
    assert "get_weather" not in none
    assert required is not None
    assert "get_weather" in required
    assert one is not None
    assert "get_weather" not in one
    assert "look_up" in one
    await tooled.chat(tools=[TOOL], parallel_tool_calls=False)
    assert tooled.engine.requests[-1].sampling.grammar is not None
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    await tooled.chat(tools=[strict])
    assert tooled.engine.requests[-1].sampling.grammar is not None


async def test_a_schema_that_cannot_be_enforced_is_told(tooled: Served) -> None:
    """Where a call is forced or strict; elsewhere the schema is the model's to read."""
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        nested = {"type": "object", "properties": {"a": nested}}
    for parameters in (
        {"$ref": "#/no"},
        {"properties": [1]},
        {"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 4}}, "required": ["a"]},
        {"properties": {"a": 5}, "required": 5},
    ):
        broken = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        assert (await tooled.chat(tools=[broken])).status_code == 200
        response = await tooled.chat(tools=[broken], tool_choice="required")
        assert response.status_code == 400, parameters
        assert (await response.get_json())["error"]["param"] == "tools"
    deep = {"type": "function", "function": {"name": "f", "parameters": nested}}
    response = await tooled.chat(tools=[deep], tool_choice="required")
    assert response.status_code in (200, 400)


async def test_a_budget_of_reasoning_reaches_the_engine(make_server: ServerFactory) -> None:
    """The request's own, or the server's default."""
    server = await make_server(formats=ChatFormats(reasoning="qwen3", thinking_budget=7))
    await server.chat("Why?<think>\n", thinking_token_budget=3)
    await server.chat("Why?")
    first, second = (request.sampling.thinking for request in server.engine.requests)
    assert first is not None
    assert (first.max_tokens, first.starts_inside) == (3, True)
    assert "".join(map(chr, first.closing)) == "\n</think>"
    assert second is not None
    assert (second.max_tokens, second.starts_inside) == (7, False)


async def test_reasoning_that_the_prompt_began_is_reasoning(
    make_server: ServerFactory, read_events: ReadEvents
) -> None:
    """A template that opens the block itself leaves the model to close it."""
    server = await make_server(formats=ChatFormats(reasoning="qwen3"))
    write(server.engine, "I see.\n</think>\n\nYes")
    response = await server.chat("Why?<think>\n", stream=True)
    *chunks, _ = read_events(await response.get_data())
    message = joined(chunks)
    assert (message["reasoning_content"], message["content"]) == ("I see.", "Yes")


async def test_effort_and_thinking_reach_the_template(tooled: Served) -> None:
    """No effort is no thinking, unless the request says otherwise itself."""
    await tooled.chat(reasoning_effort="none")
    assert tooled.tokenizer.chats[-1][1]["enable_thinking"] is False
    await tooled.chat(reasoning_effort="none", enable_thinking=True)
    assert tooled.tokenizer.chats[-1][1]["enable_thinking"] is True
    await tooled.chat(reasoning_effort="low")
    assert "enable_thinking" not in tooled.tokenizer.chats[-1][1]


async def test_tokenize_sees_the_tools(tooled: Served) -> None:
    """It renders what the chat does."""
    messages = [{"role": "user", "content": "hi"}]
    response = await tooled.post("/tokenize", messages=messages, tools=[TOOL])
    assert response.status_code == 200
    asked = tooled.tokenizer.chats[-1]
    await tooled.chat(tools=[TOOL])
    assert tooled.tokenizer.chats[-1] == asked
    assert (await tooled.post("/tokenize", prompt="x", tools=[TOOL])).status_code == 400


async def test_models_and_status_say_what_is_read(tooled: Served) -> None:
    """And the status why."""
    (model,) = (await (await tooled.client.get("/v1/models")).get_json())["data"]
    assert (model["tool_call_parser"], model["reasoning_parser"]) == ("hermes", "qwen3")
    status = await (await tooled.client.get("/v1/status")).get_json()
    assert status["parsers"] == {
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "reason": "",
    }
    assert json.dumps(status)
