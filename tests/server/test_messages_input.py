"""From Messages bodies to chats: turns, tools, thinking, and what cannot stand where it does."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.answers.plan import ChatInput
from vllm_mlx.server.answers.tool_choice import ToolChoice
from vllm_mlx.server.anthropic.chat_input import ChatSettings, chat_input
from vllm_mlx.server.anthropic.schemas import MessagesBody

USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "look_up", "description": "Find.", "input_schema": {"type": "object"}}


def chat_of(
    *messages: dict[str, Any], defaults: dict[str, Any] | None = None, **fields: Any
) -> Any:
    """Return the chat that a body means."""
    body = MessagesBody.model_validate(
        {"max_tokens": 1, "messages": list(messages) or [USER], **fields}
    )
    return chat_input(body, ChatSettings(template_defaults=defaults or {}))


def text(value: str, **fields: Any) -> dict[str, Any]:
    """Return a text block."""
    return {"type": "text", "text": value, **fields}


def use(call_id: str, **arguments: Any) -> dict[str, Any]:
    """Return a call."""
    return {"type": "tool_use", "id": call_id, "name": "look_up", "input": arguments}


def result(call_id: str, content: Any, **fields: Any) -> dict[str, Any]:
    """Return a call's result."""
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (None, None),
        ("Be brief.", "Be brief."),
        ([text("Be brief."), text("And kind.")], "Be brief.\nAnd kind."),
        ("", None),
        ([], None),
    ],
)
def test_the_system_prompt_comes_first(system: Any, expected: str | None) -> None:
    """As a string or in blocks; an empty one is none."""
    chat = chat_of(system=system)
    heads = [message["content"] for message in chat.messages if message["role"] == "system"]
    assert heads == ([] if expected is None else [expected])
    assert chat.messages[-1] == {"role": "user", "content": "Hi"}


def test_a_whole_exchange_with_tools() -> None:
    """Thinking, text and calls become one answer; results come before the text beside them."""
    chat = chat_of(
        {"role": "user", "content": [text("Weather"), text("in Paris?")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look it up.", "signature": "anything"},
                {"type": "redacted_thinking", "data": "secret"},
                text("Let me "),
                text("see."),
                use("t1", city="Paris"),
                use("t2"),
            ],
        },
        {
            "role": "user",
            "content": [
                text("Well?"),
                result("t1", "Sunny"),
                result("t2", [text("no"), text("city")], is_error=True),
            ],
        },
        tools=[TOOL],
    )
    call = {"type": "function", "id": "t1"}
    assert chat.messages == [
        {"role": "user", "content": "Weather\nin Paris?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Look it up.",
            "tool_calls": [
                {**call, "function": {"name": "look_up", "arguments": {"city": "Paris"}}},
                {**call, "id": "t2", "function": {"name": "look_up", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "Sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no\ncity"},
        {"role": "user", "content": "Well?"},
    ]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (result("t", None), ""),
        (result("t", "failed", is_error=True), "Error: failed"),
        (result("t", "error: failed", is_error=True), "error: failed"),
        (result("t", "<tool_use_error>no", is_error=True), "<tool_use_error>no"),
        (result("t", "fine", is_error=False), "fine"),
        (
            result("t", [{"type": "tool_reference", "tool_name": "look_up"}]),
            "The tool look_up is available.",
        ),
    ],
)
def test_results_of_every_kind(block: dict[str, Any], expected: str) -> None:
    """A failure is told as one, once."""
    answer = {"role": "assistant", "content": [use("t")]}
    chat = chat_of(USER, answer, {"role": "user", "content": [block]})
    assert chat.messages[-1] == {"role": "tool", "tool_call_id": "t", "content": expected}


def test_turns_of_one_role_become_one() -> None:
    """As the API says; the assistant's text is put together without a seam."""
    chat = chat_of(
        USER,
        {"role": "user", "content": "there"},
        {"role": "assistant", "content": "Hel"},
        {"role": "assistant", "content": [text("lo"), use("t")]},
        {"role": "user", "content": [result("t", "1")]},
        {"role": "user", "content": "Go on"},
    )
    assert [(m["role"], m["content"]) for m in chat.messages] == [
        ("user", "Hi\nthere"),
        ("assistant", "Hello"),
        ("tool", "1"),
        ("user", "Go on"),
    ]
    assert len(chat.messages[1]["tool_calls"]) == 1


def test_what_the_system_says_in_between_stays_there() -> None:
    """First it belongs to the system prompt, later to the user's turn, so that nothing moves."""
    said = {"role": "system", "content": "The date is new."}
    early = chat_of(said, USER, system="Be brief.")
    assert early.messages[0]["content"] == "Be brief.\nThe date is new."
    late = chat_of(USER, said, {"role": "assistant", "content": "Hello"}, USER)
    reminder = "<system-reminder>\nThe date is new.\n</system-reminder>"
    assert [(m["role"], m["content"]) for m in late.messages] == [
        ("user", f"Hi\n{reminder}"),
        ("assistant", "Hello"),
        ("user", "Hi"),
    ]


def test_a_last_message_of_the_assistant_is_gone_on_with() -> None:
    """An empty one asks for an answer from its beginning."""
    begun = chat_of(USER, {"role": "assistant", "content": "The answer is ("})
    assert begun.template_options["continue_final_message"] is True
    assert begun.template_options["add_generation_prompt"] is False
    empty = chat_of(USER, {"role": "assistant", "content": ""})
    assert empty.messages == [{"role": "user", "content": "Hi"}]
    assert empty.template_options["add_generation_prompt"] is True
    assert "continue_final_message" not in empty.template_options


@pytest.mark.parametrize(
    ("choice", "expected", "allows_parallel"),
    [
        (None, ToolChoice("auto"), True),
        ({"type": "auto"}, ToolChoice("auto"), True),
        ({"type": "none"}, ToolChoice("none"), True),
        ({"type": "any"}, ToolChoice("required"), True),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            ToolChoice("required"),
            False,
        ),
        ({"type": "tool", "name": "look_up"}, ToolChoice("required", "look_up"), True),
    ],
)
def test_every_choice_of_tools(
    choice: dict[str, Any] | None, expected: ToolChoice, allows_parallel: bool
) -> None:
    """Each of the API's choices has its own meaning, and tools keep all that the model is shown."""
    chat: ChatInput = chat_of(tools=[{**TOOL, "strict": True}], tool_choice=choice)
    assert chat.tool_choice == expected
    assert chat.allows_parallel_calls is allows_parallel
    assert chat.tools == [
        {
            "type": "function",
            "function": {
                "name": "look_up",
                "description": "Find.",
                "parameters": {"type": "object"},
                "strict": True,
            },
        }
    ]


@pytest.mark.parametrize(
    ("fields", "defaults", "thinks", "budget"),
    [
        ({}, {}, False, None),
        ({}, {"enable_thinking": True}, None, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": True}, False, None),
        ({"thinking": {"type": "adaptive"}}, {}, True, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {}, True, 2000),
        (
            {
                "thinking": {"type": "disabled"},
                "chat_template_kwargs": {"enable_thinking": True},
            },
            {},
            True,
            None,
        ),
    ],
)
def test_the_model_thinks_when_it_is_asked_to(
    fields: dict[str, Any], defaults: dict[str, Any], thinks: bool | None, budget: int | None
) -> None:
    """And not otherwise, unless the server or the template's own variables say so."""
    chat = chat_of(defaults=defaults, **fields)
    assert chat.template_options.get("enable_thinking") is thinks
    assert chat.thinking_budget == budget


@pytest.mark.parametrize(
    ("effort", "expected"), [("low", "low"), ("high", "high"), ("max", "high")]
)
def test_effort_reaches_the_template_in_its_own_words(effort: str, expected: str) -> None:
    """Templates know three degrees."""
    chat = chat_of(output_config={"effort": effort})
    assert chat.template_options["reasoning_effort"] == expected


def test_the_form_of_an_answer_is_a_schema() -> None:
    """It becomes the grammar that every API's forms become."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    chat: ChatInput = chat_of(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert chat.form is not None
    assert '"city"' in chat.form.lark
    assert chat_of(output_config={"effort": "low"}).form is None


@pytest.mark.parametrize(
    ("messages", "fields", "reason"),
    [
        ([{"role": "user", "content": [use("t")]}], {}, "tool_use block cannot stand in a message"),
        (
            [USER, {"role": "assistant", "content": [result("t", "x")]}],
            {},
            "tool_result block cannot stand in a message of role assistant",
        ),
        ([{"role": "system", "content": [use("t")]}], {}, "of role system"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "a text block needs text"),
        (
            [{"role": "user", "content": [{"type": "tool_result"}]}],
            {},
            "a tool_result block needs tool_use_id",
        ),
        ([USER, {"role": "assistant", "content": [use("t")]}], {}, "tool_result must follow"),
        ([{"role": "system", "content": "x"}], {}, "no message of a user or an assistant"),
        ([{"role": "assistant", "content": ""}], {}, "no message of a user or an assistant"),
        ([USER], {"tool_choice": {"type": "any"}}, "there are no tools"),
        ([USER], {"tools": [TOOL], "tool_choice": {"type": "tool"}}, "needs a name"),
        (
            [USER],
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
            "names 'x', which is not among",
        ),
        ([USER], {"tools": [TOOL, TOOL]}, "two tools of the name 'look_up'"),
        ([USER], {"chat_template_kwargs": {"tools": []}}, "tools cannot be given in"),
        ([USER], {"output_config": {"format": {"type": "json_schema"}}}, "schema is missing"),
    ],
)
def test_what_cannot_be_is_refused(
    messages: list[dict[str, Any]], fields: dict[str, Any], reason: str
) -> None:
    """The reason says what stands where it cannot."""
    with pytest.raises(InvalidRequestError, match=reason):
        chat_of(*messages, **fields)
