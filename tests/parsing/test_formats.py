"""Hold every tool format to its round trip, however the text is cut and wherever it ends."""

from __future__ import annotations

from typing import Any

import pytest
from parsing.formats import ANSWERS, Answers
from parsing.harness import TOOLS, check_cuts, check_truncations, parse

from vllm_mlx.engine.parsing import TOOL_PARSERS

BEFORE, BEHIND = "Let me look: 5 < 6 {x}.", "Done, [see] <b>this</b>."

#: Arguments that are hard in one format or the other.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "nested": {
        "city": "Rome",
        "details": {"a": [1, {"b": [[], {}, None]}], "c": {"e": True}},
    },
    "unicode": {"city": "Zürich 東京 🏔️👩‍🚀", "tags": ["é", "\u2028", "😀"]},
    "quotes": {"city": 'So "hi", \'ho\' \\"hu\\" \\ \\\\', "note": '"'},
    "angles": {"city": "a < b && c> <br/> </p> <", "details": {"<k>": "<v>"}},
    "braces": {"city": "}{ }} {{ ]] [[ )( ,:;", "tags": ["}", "{[("]},
    "lines": {"city": "\n\tone\r\ntwo\n\n", "note": "a\n"},
    "scalars": {"city": "", "days": -7, "limit": 1.5e-9, "is_metric": False, "note": None},
    "alike": {"city": '{"a": 1}', "note": "null and void", "tags": ["50"], "days": 50},
    "empty": {},
}


def _arguments(answers: Answers, kind: str) -> dict[str, Any]:
    """Return arguments of this kind, without what the format cannot write."""
    arguments = dict(ARGUMENTS[kind])
    if kind in answers.unwritable:
        # No empty parts, no nulls, and no keys that are not names.
        arguments["details"] = {"a": [1, {"b": "c"}], "d": {"e": True, "f": [2.5]}}
    return arguments


def _markers(name: str) -> str:
    """Return text that is full of the format's own markers."""
    leaves = TOOL_PARSERS[name].members or (TOOL_PARSERS[name],)
    found = [m for leaf in leaves for m in (*leaf.triggers, *leaf.closers, *leaf.anchored)]
    return " x ".join([*dict.fromkeys(found), "<think>", "</think>", ""])


@pytest.fixture(params=ANSWERS, ids=lambda answers: answers.tools)
def answers(request: pytest.FixtureRequest) -> Answers:
    """Give the way to write answers in each format in turn."""
    return request.param  # type: ignore[no-any-return]


def test_every_format_is_written_here() -> None:
    """No registered class is missing among the answers."""
    assert {TOOL_PARSERS[a.tools] for a in ANSWERS} == set(TOOL_PARSERS.values())


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_a_call_comes_back_however_it_is_cut(answers: Answers, kind: str) -> None:
    """A rendered call is parsed to itself, in small pieces and at cuts all through it."""
    arguments = _arguments(answers, kind)
    name = "get_weather" if arguments else "get"
    parsed = check_cuts(answers.write([(name, arguments)]), every=5, tools=answers.tools)
    assert [(name, arguments)] == parsed.values()
    assert (parsed.content, parsed.reasoning) == ("", "")


def test_markers_within_arguments_are_text(answers: Answers) -> None:
    """A format's own markers within a string are part of the string."""
    arguments = {"path": "a", "text": _markers(answers.tools)}
    parsed = check_cuts(answers.write([("write-file", arguments)]), every=3, tools=answers.tools)
    assert [("write-file", arguments)] == parsed.values()
    assert parsed.content == ""


def test_several_calls_with_text_around_them(answers: Answers) -> None:
    """Calls come in their order, and the text around them is content without a marker."""
    calls = [("get_weather", {"city": "Paris"}), ("get", {}), ("get_weather", {"city": "Rome"})]
    text = answers.write(calls, before=BEFORE, behind=BEHIND)
    parsed = check_cuts(text, every=4, tools=answers.tools)
    assert calls == parsed.values()
    assert parsed.content.replace("\n", "") == (BEFORE + BEHIND)


def test_reasoning_before_calls(answers: Answers) -> None:
    """Reasoning, content and calls are told apart, in their order."""
    calls = [("get_weather", {"city": "Oslo"})]
    text = answers.write(calls, before=BEFORE, reasoning="First I\nthink <about> it.")
    parsed = check_cuts(text, tools=answers.tools, reasoning=answers.reasoning)
    assert (calls, BEFORE) == (parsed.values(), parsed.content)
    assert parsed.reasoning == "First I\nthink <about> it."
    assert parsed.order[:3] == ("ReasoningDelta", "ContentDelta", "ToolCallStart")


def test_no_call(answers: Answers) -> None:
    """An answer without calls is content, and text that only looks like markers stays."""
    text = "A { b: [1, 2] } <tool> x = f(y) `code` [see] < > >>> done"
    parsed = check_cuts(text, tools=answers.tools, reasoning=answers.reasoning)
    assert (text, "", ()) == (parsed.content, parsed.reasoning, parsed.calls)


def test_two_cuts(answers: Answers) -> None:
    """Every pair of cuts of a short answer, and near pairs of a longer one, change nothing."""
    text = answers.write([("get", {})])
    parsed = check_cuts(text, pairs=True, tools=answers.tools)
    assert parsed.values() == [("get", {})]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ARGUMENTS)
@pytest.mark.timeout(600)
def test_cuts_of_everything(answers: Answers, kind: str) -> None:
    """Every cut and pairs of cuts of every kind of answer change nothing."""
    arguments = _arguments(answers, kind)
    name = "get_weather" if arguments else "get"
    text = answers.write([(name, arguments)], before="a", behind="b", reasoning="c")
    parsed = check_cuts(text, pairs=True, tools=answers.tools, reasoning=answers.reasoning)
    assert [(name, arguments)] == parsed.values()


def test_truncation(answers: Answers) -> None:
    """An answer that ends anywhere gives a beginning of what it would have given."""
    calls = [("get_weather", {"city": 'a "b"', "days": 12, "tags": ["x"]}), ("get", {})]
    text = answers.write(calls, before="Look:", behind="Done.", reasoning="Hm.")
    check_truncations(text, tools=answers.tools, reasoning=answers.reasoning)
    assert calls == parse([text], tools=answers.tools, reasoning=answers.reasoning).values()


def test_an_unknown_name_stays_content(answers: Answers) -> None:
    """A call to something that is not among the tools is content, character by character."""
    text = answers.write([("get_stocks", {"symbol": "X"})])
    parsed = check_cuts(text, tools=answers.tools)
    assert (text, ()) == (parsed.content, parsed.calls)


def test_without_tool_schemas_any_name_is_called(answers: Answers) -> None:
    """A parser that was given no tools takes every name, and values as the text has them."""
    text = answers.write([("get_stocks", {"symbol": "X", "days": 3, "all": True})])
    parsed = check_cuts(text, tools=answers.tools, tool_schemas=None)
    assert parsed.values() == [("get_stocks", {"symbol": "X", "days": 3, "all": True})]


def test_arguments_are_streamed(answers: Answers) -> None:
    """Of a long string most is handed on before it ends."""
    text = answers.write([("write-file", {"path": "p", "text": "word " * 40})])
    end = text.index("word " * 40) + 150
    parsed = parse(text[:end], tools=answers.tools)
    assert parsed.calls[0].arguments.count("word") >= 29
    assert not parsed.calls[0].is_complete
    assert len(TOOLS) == 3
