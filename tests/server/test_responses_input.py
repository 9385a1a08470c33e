"""From Responses bodies to chats: items, tools, choices, forms and options."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vllm_mlx.engine.errors import InvalidRequestError, RequestNotFoundError
from vllm_mlx.server.answers.plan import ChatInput
from vllm_mlx.server.answers.tool_choice import ToolChoice
from vllm_mlx.server.openai.validation import validate
from vllm_mlx.server.responses_api.chat_input import chat_input, check_include
from vllm_mlx.server.responses_api.fields import POLICIES
from vllm_mlx.server.responses_api.input_items import input_items, sealed
from vllm_mlx.server.responses_api.schemas import ResponsesBody
from vllm_mlx.server.responses_api.tools import offered_tools, shown_name

SAID: dict[str, Any] = {"type": "message", "id": "msg_1", "role": "assistant", "content": "Said."}
TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False},
    {"type": "function", "name": "g", "description": "G.", "strict": True},
    {"type": "custom", "name": "patch"},
    {"type": "image_generation"},
]


#: A turn of the assistant's, as items.
TURNS: list[dict[str, Any]] = [
    {"role": "developer", "content": [{"type": "input_text", "text": "Be."}]},
    {"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "In short"}],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    },
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": t} for t in "xy"],
    },
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"q": 1}'},
    {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "+x"},
    {
        "type": "function_call",
        "call_id": "c3",
        "namespace": "mcp__files__",
        "name": "read",
        "arguments": "{broken",
    },
    {"type": "function_call_output", "call_id": "c1", "output": "one"},
    {
        "type": "custom_tool_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "two"}],
    },
    {"type": "function_call_output", "call_id": "c3", "output": "three"},
    {"type": "item_reference", "id": "msg_1"},
    {"role": "user", "content": "Go on."},
]


def resolve(item_id: str) -> dict[str, Any]:
    """Know one item."""
    if item_id != "msg_1":
        raise RequestNotFoundError("no such item", param="input")
    return SAID


def chat_of(given: Any = "hi", **fields: Any) -> ChatInput:
    """Return the chat of a body, as the route makes it."""
    body = validate(ResponsesBody, {"input": given, **fields}, POLICIES)
    items = input_items(body.input, resolve)
    return chat_input(body, items, offered_tools(body.tools or (), body.tool_choice))


def test_what_the_assistant_did_in_a_row_is_one_turn() -> None:
    """Its thoughts, text and calls; results are messages of their own."""
    chat = chat_of(TURNS, instructions="First.")
    calls: list[tuple[str, str, Any]] = [
        ("c1", "f", {"q": 1}),
        ("c2", "patch", {"input": "+x"}),
        ("c3", "mcp__files__read", "{broken"),
    ]
    assert chat.messages == [
        {"role": "system", "content": "First."},
        {"role": "system", "content": "Be."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "xy",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
                for i, name, arguments in calls
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "tool", "tool_call_id": "c3", "content": "three"},
        {"role": "assistant", "content": "Said."},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize(
    ("fields", "thought"),
    [
        ({"encrypted_content": sealed("Grübel")}, "Grübel"),
        ({"encrypted_content": "gAAAA-of-another-server"}, "In short"),
        ({"encrypted_content": sealed("x")[:-2] + "!"}, "In short"),
        ({"content": None}, "In short"),
        ({"content": [], "encrypted_content": sealed("y")}, "y"),
    ],
)
def test_reasoning_comes_back_however_a_client_kept_it(
    fields: dict[str, Any], thought: str
) -> None:
    """Itself, sealed by us, or as a summary; what others have sealed says nothing."""
    summary = [{"type": "summary_text", "text": "In short"}]
    chat = chat_of([{"type": "reasoning", "summary": summary, **fields}])
    assert chat.messages[0].get("reasoning_content") == thought


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user"}, "input[0].content"),
        ({"type": "message", "content": "x"}, "input[0].role"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "input[0].arguments"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
        ({"type": "function_call_output", "call_id": "c"}, "input[0].output"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input[0].input"),
        ({"type": "item_reference"}, "input[0].id"),
        ({}, "input[0].id"),
    ],
)
def test_items_without_what_they_need_are_refused_by_name(item: dict[str, Any], param: str) -> None:
    """The error's parameter leads to what is missing."""
    with pytest.raises(InvalidRequestError) as caught:
        chat_of([item])
    assert caught.value.param == param


def test_a_body_needs_something_to_answer() -> None:
    """No items at all, and references to nothing, are faults."""
    for given in ([], None):
        with pytest.raises(InvalidRequestError, match="input holds no item"):
            chat_of(given)
    with pytest.raises(RequestNotFoundError):
        chat_of([{"id": "msg_2"}])
    assert chat_of([{"id": "msg_1"}]).messages == [{"role": "assistant", "content": "Said."}]


def test_tools_are_shown_as_the_chat_route_shows_them() -> None:
    """Custom ones as functions of one text; those of a service are left out."""
    chat = chat_of(tools=TOOLS, parallel_tool_calls=False)
    first, second, third = (tool["function"] for tool in chat.tools)
    assert first == {"name": "f", "parameters": {"type": "object"}, "strict": False}
    assert second == {"name": "g", "description": "G.", "strict": True}
    assert third["parameters"]["required"] == ["input"]
    assert chat.allows_parallel_calls is False


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        (None, ToolChoice(), "f g patch"),
        ("none", ToolChoice("none"), "f g patch"),
        ("required", ToolChoice("required"), "f g patch"),
        ({"type": "function", "name": "g"}, ToolChoice("required", "g"), "f g patch"),
        ({"type": "custom", "name": "patch"}, ToolChoice("required", "patch"), "f g patch"),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [
                    {"type": "custom", "name": "patch"},
                    {"type": "function", "name": "f"},
                    {"type": "image_generation"},
                ],
            },
            ToolChoice(),
            "f patch",
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "g"}],
            },
            ToolChoice("required"),
            "g",
        ),
    ],
)
def test_every_choice_of_tools_is_understood(choice: Any, expected: ToolChoice, names: str) -> None:
    """As a mode, as one tool, and as some of them, in the order in which they are defined."""
    chat = chat_of(tools=TOOLS, tool_choice=choice)
    assert chat.tool_choice == expected
    assert [tool["function"]["name"] for tool in chat.tools] == names.split()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "h"}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "patch"}},
        {"tools": TOOLS, "tool_choice": {"type": "web_search"}},
        {"tool_choice": "required"},
        {"tools": [{"type": "function"}]},
        {"tools": [TOOLS[0], TOOLS[0]]},
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]},
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        {"chat_template_kwargs": {"tools": []}},
    ],
)
def test_what_contradicts_itself_is_refused(fields: dict[str, Any]) -> None:
    """With the field that is at fault."""
    with pytest.raises(InvalidRequestError) as caught:
        chat_of(**fields)
    assert (caught.value.param or "").split(".")[0].split("[")[0] in fields


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "web_search"}, {"type": "function", "name": "no spaces"}], "tools[1].name"),
        (
            [{"type": "namespace", "name": "n", "tools": [TOOLS[0], TOOLS[0]]}],
            "tools[0].tools[1].name",
        ),
        ([{**TOOLS[0], "parameters": {"type": "array"}}], "tools[0].parameters"),
        ([{"type": "custom"}], "tools[0].name"),
    ],
)
def test_a_wrong_tool_is_named_by_its_place(tools: list[Any], param: str) -> None:
    """In the shape of this API, whatever is left out before it."""
    with pytest.raises(InvalidRequestError, match=re.escape(param.rpartition(".")[0])) as caught:
        chat_of(tools=tools)
    assert caught.value.param == param


def test_options_reach_the_template() -> None:
    """Effort by its name, and `none` also as the switch that more templates know."""
    options = chat_of(reasoning={"effort": "high"}).template_options
    assert options == {"reasoning_effort": "high", "add_generation_prompt": True}
    options = chat_of(reasoning={"effort": "none"}).template_options
    assert (options["reasoning_effort"], options["enable_thinking"]) == ("none", False)
    assert chat_of(chat_template_kwargs={"a": 1}).template_options["a"] == 1


def test_forms_are_those_of_the_chat_route() -> None:
    """A schema, any object, or none."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = chat_of(text={"format": {"type": "json_schema", "name": "s", "schema": schema}}).form
    assert form is not None
    assert form.param == "text.format.schema"
    assert chat_of(text={"format": {"type": "json_object"}}).form is not None
    assert chat_of(text={"format": {"type": "text"}}).form is None


def test_what_to_include_is_checked() -> None:
    """What can never be there is harmless, what is missing is not."""
    check_include(["reasoning.encrypted_content", "web_search_call.results"])
    with pytest.raises(InvalidRequestError, match="logprobs"):
        check_include(["message.output_text.logprobs"])


def test_names_of_namespaces_are_made_once() -> None:
    """A namespace that ends as a prefix does is taken as one."""
    assert shown_name("read", None) == "read"
    assert shown_name("read", "files") == "files__read"
    assert shown_name("read", "mcp__files__") == "mcp__files__read"
