"""Hold the grammars of answers: what they take, what they refuse, with and without reasoning."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support.grammar_tokens import ByteTokens

from vllm_mlx.engine.core.grammar import GrammarCompiler
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.engine.parsing import REASONING_PARSERS, ContentDelta, ReasoningDelta, make_parser
from vllm_mlx.engine.parsing.registry import make_reasoning
from vllm_mlx.server.structured_output import (
    AnswerSpec,
    answer_grammar,
    choice_spec,
    grammar_spec,
    json_spec,
    object_spec,
    regex_spec,
    with_reasoning,
)

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
BODY = '{"x": 3, "name": "<b> [c] {d}"}'
THOUGHT = 'I think: {"x": 1}\n"5" < 6'
#: One name of each format, but of the one that needs to be told its markers.
NAMES = sorted(
    {kind: name for name, kind in REASONING_PARSERS.items() if name != "delimiters"}.values()
)


def takes(grammar: str, text: str, tokens: ByteTokens | None = None) -> bool:
    """Say whether `text` is a whole answer."""
    tokens = tokens or ByteTokens()
    matcher = GrammarCompiler(tokens).compile(grammar)
    encoded = tokens.encode(text)
    return matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()


def plain(spec: AnswerSpec) -> str:
    """Return the grammar of an answer without reasoning."""
    return answer_grammar(spec, reasoning=None, in_reasoning=False, special_tokens={})


def test_json_may_be_set_in_lines_but_not_in_endless_space() -> None:
    """Compact and indented JSON are taken; white space that serves nothing is not."""
    grammar = plain(json_spec(POINT, param="guided_json"))
    value = {"x": 3, "name": "a"}
    for text in (
        json.dumps(value),
        json.dumps(value, separators=(",", ":")),
        json.dumps(value, indent=4),
        json.dumps(value, indent="\t"),
        json.dumps(value, indent=2).replace("\n", "\r\n"),
    ):
        assert takes(grammar, text), text
    for space in ("  ", "\n\n", "\n" + " " * 65, " " * 1000):
        assert not takes(grammar, '{"x":' + space + '3,"name":"a"}')
    assert not takes(grammar, " " + json.dumps(value))


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (json_spec(json.dumps(POINT), param="p"), [BODY], ["{}", "[]", BODY + "\n", BODY[:-1]]),
        (json_spec(True, param="p"), ["1", "[1, {}]", "null"], ["x"]),
        (json_spec(POINT, param="p", white_space=None), ['{"x":3,"name":""}'], [BODY]),
        (object_spec(param="p"), ["{}", '{"a": [1]}'], ["[]", "1"]),
        (regex_spec(r"\d{3}-\d{4}|a/b\n", param="p"), ["555-1234", "a/b\n"], ["555-12345", ""]),
        (choice_spec(["yes", 'a "b"\n', "\x01/", "ü😀"], param="p"), ["yes", "\x01/"], ["y", "no"]),
        (choice_spec(["a", "ab", ""], param="p"), ["", "a", "ab"], ["b"]),
        (grammar_spec('root ::= "a" | [0-9]+ ("," root)?', param="p"), ["a", "1,22,a"], ["1,"]),
        (grammar_spec('start: word\nword: /[a-z]+/ "::=" "!"', param="p"), ["ab::=!"], ["ab"]),
        (grammar_spec('?start: NUM\nNUM: /[0-9]+/\n%ignore " "', param="p"), ["12"], ["x"]),
        (grammar_spec('%llguidance {}\nstart: "x"', param="p"), ["x"], ["y"]),
    ],
)
def test_each_form_takes_what_it_says(spec: AnswerSpec, good: list[str], bad: list[str]) -> None:
    """Every kind of form takes what follows it whole, and nothing else."""
    for text in good:
        assert takes(plain(spec), text), text
    for text in bad:
        assert not takes(plain(spec), text), text


@pytest.mark.parametrize(
    ("make", "value", "reason"),
    [
        (json_spec, "{", "is not JSON"),
        (json_spec, 3, "must be a JSON schema"),
        (json_spec, [], "must be a JSON schema"),
        (regex_spec, 3, "must be a regular expression"),
        (choice_spec, [], "at least one"),
        (choice_spec, "yes", "must be a list"),
        (choice_spec, ["a", 1], "must be a list of strings"),
        (grammar_spec, {}, "must be a grammar"),
        (grammar_spec, "root ::= (", "is no GBNF"),
        (grammar_spec, 'foo ::= "a"', "No 'root' rule"),
        (grammar_spec, "root ::= " + "(" * 5000, "is no GBNF"),
    ],
)
def test_what_is_no_form_is_refused(make: Any, value: Any, reason: str) -> None:
    """A value of another kind is refused with its field's name."""
    with pytest.raises(InvalidRequestError, match=reason) as refused:
        make(value, param="the_field")
    assert refused.value.param == "the_field"


def test_a_schema_does_not_steer_the_compiler() -> None:
    """llguidance's own options within a schema are without effect: they would loosen it."""
    schema = {"type": "string", "unheard": 1, "not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidRequestError, match="Unimplemented keys"):
        GrammarCompiler(ByteTokens()).check(plain(json_spec(schema, param="p")))


def test_what_asks_for_nothing_refuses_no_schema() -> None:
    """Formats that JSON Schema leaves open are left open, and values are never looked into."""
    value = {"format": "int32", "uniqueItems": False, "const": 1}
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "password", "maxLength": 3},
            "uniqueItems": False,
            "const": {"type": "array", "items": {"format": "date"}, "uniqueItems": False},
            "enum": {"enum": [value]},
        },
        "default": value,
        "additionalProperties": False,
    }
    grammar = plain(json_spec(schema, param="p"))
    text = {"format": "x", "const": ["2024-02-29"], "enum": value}
    assert takes(grammar, json.dumps(text))
    assert not takes(grammar, json.dumps({"const": ["2024-02-30"]}))
    assert not takes(grammar, '{"uniqueItems": 1}')


def _special(name: str) -> list[str]:
    reasoning = make_reasoning(name)
    assert reasoning is not None
    texts = [*reasoning.markers, reasoning.render("x"), reasoning.answer_opening]
    found = re.findall(r"<[^<>\s]+>|\[/?[A-Z]+\]", "\n".join(texts))
    return list(dict.fromkeys(found))


def _read(name: str, text: str, *, in_reasoning: bool) -> tuple[str, str]:
    """Return reasoning and content as the parsers tell them apart."""
    parser = make_parser(reasoning=name, in_reasoning=in_reasoning)
    events = [*parser.feed(text), *parser.finish()]
    return (
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        "".join(event.text for event in events if isinstance(event, ContentDelta)),
    )


@pytest.mark.parametrize("is_special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", NAMES)
def test_reasoning_comes_before_the_form(name: str, is_special: bool) -> None:
    """In every format the model may think first, and must where the prompt has begun to."""
    reasoning = make_reasoning(name)
    assert reasoning is not None
    tokens = ByteTokens(_special(name) if is_special else [])
    special = GrammarCompiler(tokens).special_tokens
    spec = json_spec(POINT, param="p")
    block = reasoning.render(THOUGHT)
    opening = reasoning.answer_opening

    free = answer_grammar(spec, reasoning=reasoning, in_reasoning=False, special_tokens=special)
    assert takes(free, opening + BODY, tokens)
    assert takes(free, block + opening + BODY, tokens)
    assert _read(name, block + opening + BODY, in_reasoning=False) == (THOUGHT, BODY)
    assert not takes(free, "Well. " + opening + BODY, tokens)
    assert not takes(free, block, tokens)

    inside = answer_grammar(spec, reasoning=reasoning, in_reasoning=True, special_tokens=special)
    rest = block[block.index(THOUGHT) :] + opening + BODY
    assert takes(inside, rest, tokens)
    assert _read(name, rest, in_reasoning=True) == (THOUGHT, BODY)
    assert not takes(inside, opening + BODY, tokens)


def test_a_marker_spelt_in_other_tokens_ends_no_reasoning() -> None:
    """Parsers look at text: the letters of a special marker may not be drawn one by one."""
    tokens = ByteTokens(["<think>", "</think>"])
    grammar = with_reasoning(
        '%llguidance {}\nstart: "yes"',
        reasoning=make_reasoning("qwen3"),
        in_reasoning=True,
        special_tokens=GrammarCompiler(tokens).special_tokens,
    )
    matcher = GrammarCompiler(tokens).compile(grammar)
    assert matcher.try_consume_tokens(list(b"so </think>")) == len(b"so </think")
    matcher = GrammarCompiler(tokens).compile(grammar)
    assert matcher.consume_tokens([*b"so </thin", tokens.added_tokens["</think>"], *b"\nyes"])
    assert matcher.is_stopped()


def test_an_answer_may_be_something_else_instead() -> None:
    """A call, say, may take the place of the form, behind reasoning too."""
    call = '%llguidance {}\nstart: "<call>" /[a-z]+/ "</call>"'
    for reasoning in (None, make_reasoning("qwen3")):
        grammar = answer_grammar(
            choice_spec(["yes"], param="p"),
            reasoning=reasoning,
            in_reasoning=False,
            special_tokens={},
            alternatives=[call],
        )
        assert takes(grammar, "yes")
        assert takes(grammar, "<call>go</call>")
        assert not takes(grammar, "yes<call>go</call>")
        assert takes(grammar, "<think>\nhm\n</think>\n\n<call>go</call>") == (reasoning is not None)
