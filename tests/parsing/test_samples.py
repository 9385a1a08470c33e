"""Hold the forms in which models are documented to answer, and the ways in which they stray."""

from __future__ import annotations

from typing import Any

import pytest
from parsing.harness import check_cuts, check_truncations

PARIS: tuple[str, dict[str, Any]] = ("get_weather", {"city": "Paris"})
ROME: tuple[str, dict[str, Any]] = ("get_weather", {"city": "Rome", "days": 3})

#: Tool format, text, calls, and the content beside them.
FORMS: list[tuple[str, str, list[tuple[str, dict[str, Any]]], str]] = [
    (
        "hermes",
        '<tool_call>{"name":"get_weather","arguments":{"city":"Paris"}}</tool_call>',
        [PARIS],
        "",
    ),
    (
        "hermes",
        'Sure!\n\n<tool_call>\n{"arguments": {"city": "Rome", "days": 3}, "name": "get_weather"}\n'
        "</tool_call>\n",
        [ROME],
        "Sure!",
    ),
    (
        "hermes",
        '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get", "arguments": {}}]</tool_call>',
        [PARIS, ("get", {})],
        "",
    ),
    (
        "hermes",
        "<tool_call>{'name': 'get_weather', 'arguments': {'city': 'Paris',}}</tool_call>",
        [PARIS],
        "",
    ),
    ("hermes", '<tool_call>{"name": "get"}</tool_call>', [("get", {})], ""),
    ("hermes", '<tool_call>{"name": "get", "arguments": null}</tool_call>', [("get", {})], ""),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        [PARIS],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}}</tool_call> ok',
        [PARIS],
        "ok",
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}\n</tool_call> ok',
        [PARIS],
        "ok",
    ),
    (
        "qwen",
        'I will look.\n[Calling tool: get_weather({"city": "Paris"})]\nThere.',
        [PARIS],
        "I will look.\nThere.",
    ),
    (
        "qwen",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
        '</tool_call>\n<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>',
        [PARIS, ("get", {})],
        "",
    ),
    (
        "qwen3_xml",
        "<function=get_weather>\n<parameter=city>Rome</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        [ROME],
        "",
    ),
    (
        "nemotron",
        "<tool_call><function=get></function></tool_call>",
        [("get", {})],
        "",
    ),
    (
        "nemotron_v2",
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]</TOOLCALL>',
        [PARIS, ROME],
        "",
    ),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city":"Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>'
        'get_weather\n```json\n{"city": "Rome", "days": 3}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        [PARIS, ROME],
        "",
    ),
    (
        "deepseek",
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, ("get", {})],
        "Let me see.",
    ),
    (
        "deepseek_v4",
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        [ROME],
        "",
    ),
    (
        "deepseek_v4",
        '<｜DSML｜function_calls><｜DSML｜invoke name="get"></｜DSML｜invoke>'
        "</｜DSML｜function_calls>",
        [("get", {})],
        "",
    ),
    (
        "functionary",
        '<|from|>assistant\n<|recipient|>get_weather\n<|content|>{"city":"Paris"}<|stop|>',
        [PARIS],
        "",
    ),
    ("functionary", 'get_weather\n{"city": "Paris"}>>>get\n{}', [PARIS, ("get", {})], ""),
    ("functionary", "all\nHello >> there", [], "Hello >> there"),
    ("functionary", "get well\nsoon", [], "get well\nsoon"),
    ("functionary", '<function=get_weather>{"city": "Paris"}</function>', [PARIS], ""),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}<tool_call|><|tool_response>',
        [ROME],
        "<|tool_response>",
    ),
    (
        "gemma4",
        'Here:\n```tool_code\nprint(get_weather(city="Rome", days=3))\nget()\n```',
        [ROME, ("get", {})],
        "Here:",
    ),
    (
        "glm47",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "</tool_call><tool_call>get</tool_call>",
        [PARIS, ("get", {})],
        "",
    ),
    (
        "granite",
        '<|tool_call|>[{"name":"get_weather","arguments":{"city":"Paris"}}]',
        [PARIS],
        "",
    ),
    (
        "granite",
        'Right. <|tool_call|> {"name": "get_weather", "arguments": {"city": "Paris"}}',
        [PARIS],
        "Right.",
    ),
    (
        "harmony",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city":"Paris"}<|call|>',
        [PARIS],
        "",
    ),
    (
        "harmony",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city":"Paris"}',
        [PARIS],
        "",
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
        "<|return|>",
        [],
        "Hm.Yes.",
    ),
    (
        "kimi",
        "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city":"Paris"}<|tool_call_end|><|tool_call_begin|>'
        "functions.get:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [PARIS, ("get", {})],
        "Ok.",
    ),
    ("llama", '{"name": "get_weather", "parameters": {"city": "Paris"}}', [PARIS], ""),
    (
        "llama",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get", "parameters": {}}',
        [PARIS, ("get", {})],
        "",
    ),
    (
        "llama",
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Rome", "days": "3"}}',
        [ROME],
        "",
    ),
    ("llama", '<|python_tag|>get_weather.call(city="Paris")', [PARIS], ""),
    ("llama", '{"name": "Bob", "age": 3}', [], '{"name": "Bob", "age": 3}'),
    ("llama", '{"name": "get", "size": 3}', [("get", {})], ""),
    ("llama4", '[get_weather(city="Paris"), get()]', [PARIS, ("get", {})], ""),
    ("llama4", "[get_weather('Rome', days=3)]", [ROME], ""),
    ("llama4", "[get well](https://example.com)", [], "[get well](https://example.com)"),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get">\n</invoke>\n'
        "</minimax:tool_call>",
        [ROME, ("get", {})],
        "",
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abcdefghi"}]',
        [PARIS],
        "",
    ),
    (
        "mistral",
        'Ok.[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get[ARGS]{}',
        [PARIS, ("get", {})],
        "Ok.",
    ),
    (
        "mistral",
        '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}',
        [PARIS],
        "",
    ),
    (
        "poolside_v1",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        [PARIS],
        "",
    ),
    (
        "step3p5",
        "<tool_call>\n<function=get>\n</function>\n</tool_call><tool_call>\n<function=get>\n"
        "</function>\n</tool_call>",
        [("get", {}), ("get", {})],
        "",
    ),
    (
        "xlam",
        'See:\n```json\n[{"name": "get_weather", "arguments": {"city": "Paris"}}]\n```',
        [PARIS],
        "See:",
    ),
    ("xlam", '[{"name": "get_weather", "arguments": {"city": "Paris"}}]', [PARIS], ""),
    ("xlam", '```json\n[{"name": "Bob"}]\n```', [], '```json\n[{"name": "Bob"}]\n```'),
    (
        "openai",
        '{"tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "get_weather", '
        '"arguments": "{\\"city\\": \\"Paris\\"}"}}]}',
        [PARIS],
        "",
    ),
    (
        "anthropic",
        '{"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}',
        [PARIS],
        "",
    ),
    (
        "anthropic",
        '<function_calls>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        "</invoke>\n</function_calls>",
        [PARIS],
        "",
    ),
    ("gemini", '{"functionCall": {"name": "get_weather", "args": {"city": "Paris"}}}', [PARIS], ""),
    ("lfm2", "<|tool_call_start|>[get_weather(city='Paris')]<|tool_call_end|>", [PARIS], ""),
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
        '"parameters": {"city": "Paris"}}\n]<|END_ACTION|>',
        [PARIS],
        "",
    ),
    (
        "minimax_m1",
        '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '{"name": "get", "arguments": {}}\n</tool_calls>',
        [PARIS, ("get", {})],
        "",
    ),
]


@pytest.mark.parametrize(
    ("tools", "text", "calls", "content"), FORMS, ids=[f"{f[0]}-{i}" for i, f in enumerate(FORMS)]
)
def test_documented_forms(
    tools: str, text: str, calls: list[tuple[str, dict[str, Any]]], content: str
) -> None:
    """An answer in a documented form gives its calls and its content, at every cut and end."""
    parsed = check_cuts(text, tools=tools)
    assert parsed.values() == calls
    assert parsed.content == content
    check_truncations(text, tools=tools)


@pytest.mark.parametrize(
    ("tools", "text", "calls", "content"),
    [f for f in FORMS if f[0] not in ("functionary", "harmony", "lfm2", "cohere", "minimax_m1")],
)
def test_auto_reads_them_all(
    tools: str, text: str, calls: list[tuple[str, dict[str, Any]]], content: str
) -> None:
    """The format of all formats gives what the right one gives."""
    parsed = check_cuts(text, every=4, tools="auto")
    assert [name for name, _ in parsed.values()] == [name for name, _ in calls]
    assert parsed.values() == calls
    assert parsed.content == content


#: What a model wrote for an argument, and what the schema makes of it.
VALUES: list[tuple[str, str, Any]] = [
    ("days", '"50"', 50),
    ("days", '"230.0"', 230),
    ("days", '"many"', "many"),
    ("limit", '"1.5"', 1.5),
    ("is_metric", '"True"', True),
    ("is_metric", "False", False),
    ("city", '{"a": [1, "b"]}', '{"a": [1, "b"]}'),
    ("city", "[1, 2]", "[1, 2]"),
    ("city", "50", "50"),
    ("city", "true", "true"),
    ("city", '"50"', "50"),
    ("details", '"{\\"a\\": 1}"', {"a": 1}),
    ("details", '"no"', "no"),
    ("tags", '"[\\"a\\"]"', ["a"]),
    ("tags", '[1, "b", true]', ["1", "b", "true"]),
    ("tags", '["a",]', ["a"]),
    ("note", "null", None),
    ("note", "None", None),
    ("note", '"null"', "null"),
    ("other", '"50"', "50"),
]


@pytest.mark.parametrize(("key", "written", "value"), VALUES)
def test_values_follow_the_schema(key: str, written: str, value: Any) -> None:
    """A value of another type than the schema's becomes one of it where that can be done."""
    text = f'<tool_call>{{"name": "get_weather", "arguments": {{"{key}": {written}}}}}</tool_call>'
    parsed = check_cuts(text, tools="hermes")
    assert parsed.values() == [("get_weather", {key: value})]
    assert type(parsed.values()[0][1][key]) is type(value)


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("days", "50", 50),
        ("days", "50.0", 50),
        ("days", "soon", "soon"),
        ("limit", "2", 2),
        ("is_metric", "True", True),
        ("city", "50", "50"),
        ("city", '{"a": 1}', '{"a": 1}'),
        ("city", "null", "null"),
        ("details", "{'a': True, 'b': [None, \"c\"]}", {"a": True, "b": [None, "c"]}),
        ("details", "nothing", "nothing"),
        ("tags", '["a", 1]', ["a", "1"]),
        ("note", "null", None),
        ("note", "nullify", "nullify"),
        ("other", "50", 50),
        ("other", "fifty", "fifty"),
        ("other", "[1, 2]", [1, 2]),
        ("other", "[1, 2", "[1, 2"),
    ],
)
@pytest.mark.parametrize("tools", ["qwen3_xml", "glm47", "minimax"])
def test_values_between_tags_follow_the_schema(
    tools: str, key: str, written: str, value: Any
) -> None:
    """Text between tags becomes what the schema says; without a schema what it looks like."""
    argument = {
        "qwen3_xml": f"<function=get_weather><parameter={key}>{written}</parameter></function>",
        "glm47": f"<tool_call>get_weather<arg_key>{key}</arg_key><arg_value>{written}</arg_value>"
        "</tool_call>",
        "minimax": f'<invoke name="get_weather"><parameter name="{key}">{written}</parameter>'
        "</invoke>",
    }[tools]
    parsed = check_cuts(argument, tools=tools)
    assert parsed.values() == [("get_weather", {key: value})]
    assert type(parsed.values()[0][1][key]) is type(value)
