"""Further samples of calls, through every way of cutting their text."""

from __future__ import annotations

import pytest
from parsing.harness import Call, check_cuts, parse

from vllm_mlx.engine.parsing import ToolCallStart, make_parser


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('"two\nlines\t"', "two\nlines\t"),
        (r'"a\db\'c"', "a\\db'c"),
        (r'"\u00e9\ud83d\ude00\n"', "é😀\n"),
        (r'"\u12"', "\\u12"),
        (r"'it\'s \"so\"'", 'it\'s "so"'),
        (r"'\x41\u00e9\U0001F600'", "Aé😀"),
    ],
)
def test_strings_are_put_right(written: str, value: str) -> None:
    """What JSON does not allow in strings is written as it does."""
    text = f'<tool_call>{{"name": "get_weather", "arguments": {{"city": {written}}}}}</tool_call>'
    assert check_cuts(text, tools="hermes").values() == [("get_weather", {"city": value})]


def test_arguments_pass_unchanged() -> None:
    """Arguments that are JSON as the schema wants them are streamed character by character."""
    arguments = '{ "city" :"a\\u00e9\\/",\n\t"days":-1.50E+3 ,"details": {"x":[ ]}}'
    text = f'<tool_call>{{"name": "get_weather", "arguments":{arguments}}}</tool_call>'
    assert check_cuts(text, tools="hermes").calls == (Call("get_weather", arguments),)


def test_what_cannot_be_understood_stays_in_the_arguments() -> None:
    """Behind the start of a call nothing is taken back: a broken call ends as not complete."""
    text = (
        '<tool_call>{"name": "get_weather", "arguments": {"city": Paris}}</tool_call> and '
        '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    )
    parsed = check_cuts(text, tools="hermes")
    assert parsed.calls == (
        Call("get_weather", '{"city": Paris}}', is_complete=False),
        Call("get", "{}"),
    )
    assert parsed.content == "and"


@pytest.mark.parametrize(
    ("tools", "text", "arguments"),
    [
        (
            "hermes",
            '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": Par\\"is}"}</tool_call>',
            '{"city": Par"is}}',
        ),
        (
            "hermes",
            '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"P"}</tool_call>',
            '{"city": "P}',
        ),
        (
            "qwen3_xml",
            '<function=get_weather>\n<parameter=details>\n{"a": b}\n</parameter>\n</function>'
            "</tool_call>",
            '{"details": {"a": b}\n</function>',
        ),
        (
            "minimax",
            '<invoke name="get_weather"><parameter name="tags">["a"] and "b"</parameter></invoke>'
            "</minimax:tool_call>",
            '{"tags": ["a"] and "b"</invoke>',
        ),
        ("llama4", "[get_weather(city=Paris)]", '{"city": Paris)]'),
        ("gemma4", "<|tool_call>call:get_weather{city:Paris}<tool_call|>", '{"city":Paris}'),
        (
            "harmony",
            "<|channel|>commentary to=functions.get_weather<|message|>Paris<|call|>",
            "Paris",
        ),
    ],
)
def test_broken_arguments_are_kept(tools: str, text: str, arguments: str) -> None:
    """Faults within arguments break the call off at the same character however it is cut."""
    parsed = check_cuts(text, pairs=True, tools=tools)
    assert parsed.calls == (Call("get_weather", arguments, is_complete=False),)
    assert parsed.content == ""


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"nome": "get"}</tool_call>',
        '<tool_call>{"name": "getter", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": [1, {"b": "</tool_call>"}]}, "name": "no"}</tool_call>',
        "<tool_call>[]</tool_call>",
        "  <tool_call> get </tool_call>  ",
    ],
)
def test_a_malformed_beginning_becomes_content(text: str) -> None:
    """What does not get as far as a known name is content, white space included."""
    parsed = check_cuts(text, pairs=True, tools="hermes")
    assert (parsed.content, parsed.calls) == (text, ())


def test_unknown_calls_in_a_list_stay_while_known_ones_are_called() -> None:
    """Of a list the calls to known tools are made, and the others are content as they stand."""
    unknown = '{"name": "nope", "arguments": {"x": "]}"}}'
    known = '{"name": "get", "arguments": {}}'
    parsed = check_cuts(f"[TOOL_CALLS] [{known}, {unknown}, {known}]", tools="mistral")
    assert parsed.values() == [("get", {}), ("get", {})]
    assert parsed.content == f", {unknown}"
    parsed = check_cuts(f"[TOOL_CALLS] [{unknown}, {known}]", tools="mistral")
    assert parsed.values() == [("get", {})]
    assert parsed.content == f"[TOOL_CALLS] [{unknown}"
    for text in (f"[TOOL_CALLS] [{unknown}, {unknown}]", f"[TOOL_CALLS] [{unknown} ", unknown):
        assert check_cuts(text, tools="mistral").content == text


def test_ids_of_the_model_are_kept() -> None:
    """An id that is known when the call starts is the call's."""
    texts = {
        "kimi": "<|tool_call_begin|>functions.get:7<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "mistral": "[TOOL_CALLS]get[CALL_ID]abcdefghi[ARGS]{}",
        "anthropic": '{"type": "tool_use", "id": "toolu_9", "name": "get", "input": {}}',
    }
    ids = {"kimi": "functions.get:7", "mistral": "abcdefghi", "anthropic": "toolu_9"}
    for tools, text in texts.items():
        events = make_parser(tools).feed(text)
        assert [e.id for e in events if isinstance(e, ToolCallStart)] == [ids[tools]]
    made = make_parser("mistral").feed("[TOOL_CALLS]get{}")[0]
    assert isinstance(made, ToolCallStart)
    assert len(made.id) == 9
    assert made.id.isalnum()


def test_deep_nesting_is_bounded() -> None:
    """Brackets without end break a call off instead of the parser."""
    text = '<tool_call>{"name": "get_weather", "arguments": {"details": ' + "[" * 5000
    for pieces in ([text], [text[:300], text[300:]], list(text)):
        parsed = parse(pieces, tools="hermes")
        assert parsed.calls == (Call("get_weather", text[text.index('{"d') :], is_complete=False),)
