"""Chats that a template cannot render as they come: roles, tools, calls and their results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.engine.config import ChatConfig
from vllm_mlx.engine.errors import InvalidRequestError, UsageError
from vllm_mlx.engine.parsing import ToolArgumentsDelta, ToolCallStart, make_parser
from vllm_mlx.engine.text.chat_formats import choose_formats
from vllm_mlx.engine.text.chat_template_file import read_chat_template
from vllm_mlx.engine.text.role_fitting import role_fittings
from vllm_mlx.engine.text.template_facts import TemplateFacts
from vllm_mlx.engine.text.tokenizer import Tokenizer, load_tokenizer

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
#: Refuses two messages of one role in a row, and a system message behind the first.
ALTERNATING = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "{% if not loop.first and loop.previtem.role == m.role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
NO_SYSTEM = ALTERNATING.replace("m.role == 'system' and not loop.first", "m.role == 'system'")
#: Lists tools and shows calls, whose arguments must be objects, and results.
NATIVE = (
    "{% if tools %}{% for t in tools %}<tool>{{ t | tojson }}</tool>{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}</tool_call>"
    "{% endfor %}{% endfor %}"
)
#: The same for a template that pastes arguments as they come.
PASTING = NATIVE.replace(
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}",
    "{{ c.function.arguments }}",
)

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find a word",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        "strict": True,
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"word": 'a "b"'}},
}
ASK = {"role": "user", "content": "Hi"}
HISTORY: list[dict[str, Any]] = [
    ASK,
    {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "one"},
    {"role": "tool", "tool_call_id": "call_2", "content": "two"},
]


@pytest.fixture
def with_template(chat_folder: Path, tmp_path: Path) -> Any:
    """Return a function that loads a tokenizer with another template."""

    def load(template: str, **config: Any) -> Tokenizer:
        file = tmp_path / "template.jinja"
        file.write_text(template, encoding="utf-8")
        return load_tokenizer(chat_folder, chat=ChatConfig(chat_template=str(file), **config))

    return load


def test_roles_are_changed_only_where_the_template_refuses(with_template: Any) -> None:
    """Two questions in a row stay two, or become one."""
    chat = [ASK, {"role": "user", "content": "Again"}]
    assert with_template(PLAIN).render_chat(chat) == "[user]Hi[user]Again[assistant]"
    assert with_template(ALTERNATING).render_chat(chat) == "[user]Hi\n\nAgain"


def test_system_messages_find_their_place(with_template: Any) -> None:
    """Behind the first they become the user's, and where there may be none all of them do."""
    chat = [
        {"role": "system", "content": "Be brief"},
        ASK,
        {"role": "assistant", "content": "Yes"},
        {"role": "system", "content": "Briefer"},
        {"role": "user", "content": "Why"},
    ]
    rest = "[assistant]Yes[user]Briefer\n\nWhy"
    assert with_template(ALTERNATING).render_chat(chat) == f"[system]Be brief[user]Hi{rest}"
    assert with_template(NO_SYSTEM).render_chat(chat) == f"[user]Be brief\n\nHi{rest}"


def test_a_system_message_that_would_be_dropped_is_the_users(with_template: Any) -> None:
    """Templates that show one system message, or none, say nothing when there are more."""
    one = (
        "{% set ns = namespace(rule='') %}"
        "{% for m in messages if m.role == 'system' %}{% set ns.rule = m.content %}{% endfor %}"
        "<{{ ns.rule }}>"
        "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    none = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    chat = [
        {"role": "system", "content": "Be brief"},
        {"role": "system", "content": "Be kind"},
        ASK,
        {"role": "system", "content": "Be quick"},
    ]
    rest = "[user]Hi[user]Be quick"
    assert with_template(one).render_chat(chat) == f"<Be brief\n\nBe kind>{rest}"
    assert with_template(none).render_chat(chat) == f"[user]Be brief[user]Be kind{rest}"


def test_a_refusal_is_told_in_the_templates_own_words(with_template: Any) -> None:
    """What no fitting helps against is the request's fault, with the first reason."""
    always = "{{ raise_exception('not today') }}"
    with pytest.raises(InvalidRequestError, match="not today") as raised:
        with_template(always).render_chat([ASK])
    assert raised.value.param == "messages"


def test_fittings_move_nothing_and_keep_calls() -> None:
    """Calls of merged messages are in their order, and results are never merged."""
    chat = [
        {"role": "assistant", "content": "a", "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "t"},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    same, merged = role_fittings(chat)
    assert same == chat
    assert merged[0]["content"] == "a"
    assert merged[0]["reasoning_content"] == "t"
    assert merged[0]["tool_calls"] == [CALL, CALL]
    assert merged[1:] == chat[2:]


def test_a_template_that_lists_tools_is_given_them(with_template: Any) -> None:
    """They are not described again; whether they are strict is not the model's business."""
    text = with_template(NATIVE).render_chat(HISTORY, tools=[TOOL])
    assert text.startswith("<tool>{")
    assert '"name": "look_up"' in text
    assert "strict" not in text
    assert "# Tools" not in text
    assert '[assistant]Wait.<tool_call>look_up word=a "b"</tool_call>[tool]one[tool]two' in text


def test_arguments_are_texts_where_a_template_pastes_them(with_template: Any) -> None:
    """A printed dictionary would be no JSON."""
    text = with_template(PASTING).render_chat(HISTORY, tools=[TOOL])
    assert '<tool_call>look_up {"word": "a \\"b\\""}</tool_call>' in text


def test_arguments_that_are_no_json_do_not_end_the_chat(with_template: Any) -> None:
    """A call that was cut off stands in the history for good."""
    cut = {**CALL, "function": {"name": "look_up", "arguments": '{"word": "a'}}
    chat = [ASK, {"role": "assistant", "content": "", "tool_calls": [cut]}]
    text = with_template(NATIVE).render_chat(chat, tools=[TOOL])
    assert 'look_up arguments={"word": "a</tool_call>' in text


@pytest.mark.parametrize("parser", [None, "mistral", "qwen3_xml"])
def test_tools_that_a_template_drops_are_described(with_template: Any, parser: str | None) -> None:
    """In the format that the answer is read with; earlier calls and results look the same."""
    tokenizer = with_template(PLAIN, tool_parser=parser)
    assert tokenizer.formats.tools == (parser or "hermes")
    text = tokenizer.render_chat(
        [{"role": "system", "content": "Be brief"}, *HISTORY], tools=[TOOL]
    )
    head, _, rest = text.partition("[user]Hi[assistant]Wait.\n")
    assert head.startswith("[system]Be brief\n\n# Tools")
    assert '"description": "Find a word"' in head
    assert "strict" not in head
    call, _, results = rest.partition("[user]<tool_response>")
    events = make_parser(tokenizer.formats.tools, None, [TOOL]).feed(call)
    (start,) = (event for event in events if isinstance(event, ToolCallStart))
    assert start.name == "look_up"
    arguments = "".join(event.text for event in events if isinstance(event, ToolArgumentsDelta))
    assert arguments == '{"word": "a \\"b\\""}'
    assert results == ("\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>[assistant]")


def test_without_tools_nothing_is_added(with_template: Any) -> None:
    """Neither a description nor another form of anything."""
    assert with_template(PLAIN).render_chat([ASK], tools=[]) == "[user]Hi[assistant]"


def test_a_longer_chat_begins_as_the_shorter_one(with_template: Any) -> None:
    """What is described and written does not change with what follows, so prefixes hold."""
    tokenizer = with_template(PLAIN)
    short = tokenizer.render_chat(HISTORY[:2], tools=[TOOL], add_generation_prompt=False)
    whole = tokenizer.render_chat(HISTORY, tools=[TOOL])
    assert whole.startswith(short)


def test_defaults_of_the_template_yield_to_the_request(with_template: Any) -> None:
    """A request's own value counts."""
    tokenizer = with_template("{{ mood }}", template_kwargs={"mood": "calm"})
    assert tokenizer.render_chat([ASK]) == "calm"
    assert tokenizer.render_chat([ASK], mood="merry") == "merry"


def test_formats_come_from_the_template_or_the_user(with_template: Any) -> None:
    """What was asked for stands over what is found; `none` switches off."""
    found = with_template(NATIVE + "<think>").formats
    assert found.reasoning == "qwen3"
    assert "the template has" in found.reason
    chosen = with_template(
        NATIVE + "<think>", tool_parser="none", reasoning_parser="delimiters:<a>,<b>"
    ).formats
    assert (chosen.tools, chosen.reasoning, chosen.delimiters) == (
        None,
        "delimiters",
        ("<a>", "<b>"),
    )
    takes_tools = TemplateFacts(takes_tools=True)
    unknown = choose_formats(ChatConfig(), "{{ tools }}", (), takes_tools, {})
    assert unknown.tools == "auto"
    plain = choose_formats(ChatConfig(), "{{ messages }}", (), TemplateFacts(), {})
    assert plain.tools == "hermes"
    assert "described to the model" in plain.reason
    none = choose_formats(ChatConfig(), "", (), TemplateFacts(), {})
    assert none.tools is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tool_parser": "no_such"}, "no tool parser 'no_such'; there are: .*hermes"),
        ({"reasoning_parser": "no_such"}, "no reasoning parser 'no_such'; there are: .*qwen3"),
        ({"reasoning_parser": "delimiters:<a>,<a>"}, "two markers"),
        ({"reasoning_parser": "delimiters"}, "two markers"),
        ({"template_kwargs": {"tools": []}}, "tools is no variable"),
    ],
)
def test_choices_that_cannot_be_are_usage_errors(fields: dict[str, Any], reason: str) -> None:
    """They are known before anything is loaded."""
    with pytest.raises(UsageError, match=reason):
        ChatConfig(**fields)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{% if %}", "line 1"), (" \n", "is empty"), (None, "cannot be read")],
)
def test_a_template_file_that_is_none_is_refused(
    tmp_path: Path, content: str | None, reason: str
) -> None:
    """The reason says where it is wrong."""
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UsageError, match=reason):
        read_chat_template(file)


def test_a_template_file_may_use_what_models_templates_use(tmp_path: Path) -> None:
    """Loop controls and the block that marks what the model wrote."""
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    file = tmp_path / "template.jinja"
    file.write_text(template)
    assert read_chat_template(file) == template
    shutil.rmtree(tmp_path)
