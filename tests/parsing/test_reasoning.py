"""Hold the reasoning formats, and how reasoning and calls go together."""

from __future__ import annotations

import pytest
from parsing.harness import TOOLS, check_cuts, check_truncations, parse, put_together

from vllm_mlx.engine.errors import UsageError
from vllm_mlx.engine.parsing import REASONING_PARSERS, make_parser
from vllm_mlx.engine.parsing.registry import make_reasoning

THOUGHT = "I'm thinking:\n5 < 6, {a} [b]."
ANSWER = "So it is.\n\nGood > bye."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'

NAMES = sorted(set(REASONING_PARSERS) - {"delimiters"})


@pytest.mark.parametrize("name", NAMES)
def test_a_block_comes_back_however_it_is_cut(name: str) -> None:
    """Reasoning and answer are told apart, without a marker in either."""
    reasoning = make_reasoning(name)
    assert reasoning is not None
    text = reasoning.render(THOUGHT) + _framed(name, ANSWER)
    parsed = check_cuts(text, pairs=len(text) < 70, reasoning=name)
    assert (parsed.reasoning, parsed.content) == (THOUGHT, ANSWER)
    check_truncations(text, reasoning=name)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_that_the_prompt_opened(name: str) -> None:
    """Where the template wrote the opening marker, the text begins within reasoning."""
    reasoning = make_reasoning(name)
    assert reasoning is not None
    text = reasoning.render(THOUGHT)
    inside = text[text.index(THOUGHT) :] + _framed(name, ANSWER)
    prompt = f"question\n{text[: text.index(THOUGHT)]}"
    assert reasoning.is_open(prompt)
    assert not reasoning.is_open(f"{prompt}{THOUGHT}")
    parsed = check_cuts(inside, reasoning=name, in_reasoning=True)
    assert (parsed.reasoning, parsed.content) == (THOUGHT, ANSWER)
    # A model may write the marker once more.
    again = check_cuts(text + _framed(name, ANSWER), reasoning=name, in_reasoning=True)
    assert (again.reasoning, again.content) == (THOUGHT, ANSWER)


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_that_is_cut_off(name: str) -> None:
    """Without its end a block is reasoning all the same, streamed or whole."""
    parsed = check_cuts("I am not done", reasoning=name, in_reasoning=True)
    assert (parsed.reasoning, parsed.content) == ("I am not done", "")


@pytest.mark.parametrize("name", [*NAMES, None])
def test_text_without_markers_is_content(name: str | None) -> None:
    """Plain text stays as it is, white space included."""
    text = "\n Plain <b>text</b>,\n\n < [ ok ] \n"
    assert check_cuts(text, pairs=True, reasoning=name).content == text


def test_without_a_reasoning_parser_markers_are_content() -> None:
    """Nothing is left out that was not asked for."""
    text = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
    assert check_cuts(text).content == text


@pytest.mark.parametrize(
    ("tools", "call"),
    [
        ("hermes", CALL),
        (
            "qwen3_xml",
            "<tool_call>\n<function=get_weather>\n"
            "<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "glm47",
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        ),
        (
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
            "<|tool_calls_section_end|>",
        ),
    ],
)
def test_a_call_within_reasoning(tools: str, call: str) -> None:
    """A call that comes before the end of reasoning is a call; reasoning goes on behind it."""
    text = f"<think>Let me call\n{call}\nand wait.</think>\n\nDone."
    parsed = check_cuts(text, tools=tools, reasoning="qwen3")
    assert parsed.values() == [("get_weather", {"city": "Paris"})]
    assert parsed.reasoning == "Let me call\nand wait."
    assert parsed.content == "Done."
    check_truncations(text, tools=tools, reasoning="qwen3")


def test_a_call_ends_reasoning_where_the_format_says_so() -> None:
    """A block of DSML ends the reasoning that it stands in."""
    call = (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city" '
        'string="true">Paris</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>'
    )
    text = f"Let me call {call} Done."
    parsed = check_cuts(text, tools="deepseek_v4", reasoning="deepseek_v4", in_reasoning=True)
    assert parsed.values() == [("get_weather", {"city": "Paris"})]
    assert (parsed.reasoning, parsed.content) == ("Let me call", "Done.")


def test_a_call_right_behind_reasoning() -> None:
    """White space between reasoning and a call is nobody's."""
    for between in ("", "\n", "\n\n", "  \n"):
        text = f"<think>Hm.</think>{between}{CALL}"
        parsed = check_cuts(text, tools="hermes", reasoning="qwen3")
        assert parsed.order == (
            "ReasoningDelta",
            "ToolCallStart",
            "ToolArgumentsDelta",
            "ToolCallEnd",
        )


def test_several_blocks_of_reasoning() -> None:
    """Reasoning may go on between calls."""
    text = f"<think>One.</think>{CALL}\n<think>Two.</think>{CALL}\n<think>Three.</think>Answer."
    parsed = check_cuts(text, tools="hermes", reasoning="qwen3")
    assert (parsed.reasoning, parsed.content) == ("One.Two.Three.", "Answer.")
    assert len(parsed.calls) == 2


def test_a_lone_end_marker_is_left_out() -> None:
    """An end without a beginning is no text."""
    assert check_cuts("</think>\n\nAnswer", reasoning="qwen3").content == "Answer"
    assert check_cuts("Well</think> yes", reasoning="deepseek_r1").content == "Well yes"


def test_markers_that_say_nothing_are_left_out() -> None:
    """GLM's box around an answer disappears, the text around it stays as it is."""
    text = "<think>a</think>It is <|begin_of_box|>42<|end_of_box|> of course."
    parsed = check_cuts(text, reasoning="glm4")
    assert (parsed.reasoning, parsed.content) == ("a", "It is 42 of course.")


def test_any_pair_of_delimiters() -> None:
    """The user may name the two markers."""
    text = "((why))\nbecause((/why)) answer ((w"
    parsed = check_cuts(
        text, pairs=True, reasoning="delimiters", reasoning_delimiters=("((why))", "((/why))")
    )
    assert (parsed.reasoning, parsed.content) == ("because", "answer ((w")


@pytest.mark.parametrize("pair", [None, ("", "x"), ("<a>", "<a>b"), (" ", "b")])
def test_delimiters_that_cannot_work_are_refused(pair: tuple[str, str] | None) -> None:
    """Two markers are needed that can be told apart."""
    with pytest.raises(UsageError, match="delimiters"):
        make_parser(reasoning="delimiters", reasoning_delimiters=pair)


def test_unknown_names_are_refused() -> None:
    """A name that is not registered is a usage error that lists those that are."""
    with pytest.raises(UsageError, match="hermes"):
        make_parser(tools="herpes")
    with pytest.raises(UsageError, match="qwen3"):
        make_parser(reasoning="qwen")
    with pytest.raises(UsageError, match="delimiters"):
        make_parser(reasoning="qwen3", reasoning_delimiters=("a", "b"))


def test_streams_share_nothing() -> None:
    """Two parsers that are fed in turns do not see each other."""
    texts = [f"<think>One</think>{CALL}", '<tool_call>{"name": "get", "arguments": {}}</tool_call>']
    alone = [parse([text], tools="hermes", reasoning="qwen3") for text in texts]
    parsers = [make_parser("hermes", "qwen3", TOOLS) for _ in texts]
    events = [[], []]  # type: ignore[var-annotated]
    for at in range(max(map(len, texts))):
        for parser, text, found in zip(parsers, texts, events, strict=True):
            found += parser.feed(text[at : at + 1])
    for parser, found, expected in zip(parsers, events, alone, strict=True):
        assert put_together(found + parser.finish()) == expected


def _framed(name: str, answer: str) -> str:
    """Return an answer as it stands behind reasoning in this format."""
    if name in ("gpt_oss", "gpt-oss", "harmony"):
        return f"<|channel|>final<|message|>{answer}<|return|>"
    if name == "solar":
        return f"<|content|>{answer}<|end|>"
    return answer
