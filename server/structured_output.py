"""From what a request says of the form of its answer to the grammar that enforces it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from vllm_mlx.engine.core.grammar import check_grammar_length
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.engine.parsing.grammar import Grammar, any_of
from vllm_mlx.engine.parsing.json_grammar import JSON_WHITE_SPACE, json_expression
from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat

_HEAD = "%llguidance {}"

#: Between the end of reasoning, or another marker, and the answer.
_LEAD = r"/[ \r\n\t]{1,8}/?"
#: How many further markers may stand before an answer: its own opening, where a format has one.
_MAX_MARKERS = 2

_START_OF_LARK = re.compile(r"^\s*(%llguidance\b|\??start\b[^:\n]*:(?!:))", re.MULTILINE)


@dataclass(frozen=True)
class AnswerSpec:
    """Say which form an answer must have, whichever field and API asked for it."""

    #: The form as a grammar in llguidance's Lark.
    lark: str
    #: The field, for errors.
    param: str


def json_spec(schema: Any, *, param: str, white_space: str | None = JSON_WHITE_SPACE) -> AnswerSpec:
    """Return the form of JSON that follows `schema`: an object, its text, or a boolean.

    `white_space` is the pattern of what may stand between its parts; None allows none.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{param} is not JSON: {error}", param=param) from None
    if not isinstance(schema, bool | Mapping):
        raise InvalidRequestError(
            f"{param} must be a JSON schema, an object, not {type(schema).__name__}", param=param
        )
    try:
        expression = json_expression(schema, white_space)
    except RecursionError:
        raise InvalidRequestError(f"{param} is nested too deeply", param=param) from None
    return AnswerSpec(f"{_HEAD}\nstart: {expression}", param)


def object_spec(*, param: str) -> AnswerSpec:
    """Return the form of any JSON object."""
    return json_spec({"type": "object"}, param=param)


def regex_spec(pattern: Any, *, param: str) -> AnswerSpec:
    """Return the form of a text that a regular expression matches whole."""
    if not isinstance(pattern, str):
        raise InvalidRequestError(f"{param} must be a regular expression, a string", param=param)
    grammars = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return AnswerSpec(f"{_HEAD}\n{grammars[0]['lark_grammar']}", param)


def choice_spec(choices: Any, *, param: str) -> AnswerSpec:
    """Return the form of one of several texts."""
    is_list = isinstance(choices, list) and bool(choices)
    if not is_list or not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequestError(f"{param} must be a list of strings, at least one", param=param)
    options = " | ".join(exact_text(choice) for choice in dict.fromkeys(choices))
    return AnswerSpec(f"{_HEAD}\nstart: {options}", param)


def grammar_spec(grammar: Any, *, param: str) -> AnswerSpec:
    """Return the form that a grammar describes: Lark with a rule `start`, or GBNF with `root`."""
    if not isinstance(grammar, str):
        raise InvalidRequestError(f"{param} must be a grammar, a string", param=param)
    check_grammar_length(grammar, param=param)
    if _START_OF_LARK.search(grammar) is None and "::=" in grammar:
        try:
            grammar = gbnf_to_lark(grammar)
        except Exception as error:  # noqa: BLE001 - the converter raises plain exceptions
            reason = " ".join(str(error).split())[:300]
            raise InvalidRequestError(f"{param} is no GBNF: {reason}", param=param) from None
    return AnswerSpec(grammar, param)


def answer_grammar(
    spec: AnswerSpec,
    *,
    reasoning: ReasoningFormat | None,
    in_reasoning: bool,
    special_tokens: Mapping[str, int],
    alternatives: Sequence[str] = (),
) -> str:
    """Return the grammar of a whole answer: reasoning as the model will, then the form asked for.

    `alternatives` are grammars of what may come instead, such as calls. See `with_reasoning`.
    """
    if reasoning is None and not alternatives:
        return spec.lark
    opening = reasoning.answer_opening if reasoning is not None else ""
    return _assembled(
        [(opening, spec.lark), *(("", lark) for lark in alternatives)],
        reasoning=reasoning,
        in_reasoning=in_reasoning,
        special_tokens=special_tokens,
    )


def with_reasoning(
    lark: str,
    *,
    reasoning: ReasoningFormat | None,
    in_reasoning: bool,
    special_tokens: Mapping[str, int],
) -> str:
    """Return a grammar of reasoning and then what `lark` describes, such as a call.

    With `in_reasoning` the prompt has opened the reasoning, which then ends with its marker;
    otherwise the answer may begin with a block of it. The text of reasoning is free, but for
    special tokens, and a marker spelt out in other tokens ends nothing. `special_tokens` are
    `GrammarCompiler.special_tokens`. Without a reasoning format the grammar is `lark` itself.
    """
    if reasoning is None:
        return lark
    return _assembled(
        [("", lark)],
        reasoning=reasoning,
        in_reasoning=in_reasoning,
        special_tokens=special_tokens,
    )


def exact_text(text: str) -> str:
    """Return an expression for exactly this text, whatever characters it has."""
    return f"/{_escaped(text)}/" if text else '""'


def _escaped(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _assembled(
    bodies: Sequence[tuple[str, str]],
    *,
    reasoning: ReasoningFormat | None,
    in_reasoning: bool,
    special_tokens: Mapping[str, int],
) -> str:
    """Return the grammar of reasoning and one of `bodies`, each behind its own opening."""
    grammar = Grammar(special_tokens)
    names = [f"answer_{index}" for index in range(len(bodies))]
    body = any_of(
        [
            f"{grammar.text(opening)} @{name}"
            for name, (opening, _) in zip(names, bodies, strict=True)
        ]
    )
    parts = [body]
    if reasoning is not None:
        parts = [_thoughts(grammar, reasoning, in_reasoning), _markers(grammar, reasoning), body]
    first = grammar.build(" ".join(parts))
    inner = [
        {"name": name, "lark_grammar": lark} for name, (_, lark) in zip(names, bodies, strict=True)
    ]
    return json.dumps({"grammars": [{"lark_grammar": first}, *inner]}, ensure_ascii=False)


def _thoughts(grammar: Grammar, reasoning: ReasoningFormat, in_reasoning: bool) -> str:
    """Return an expression for the reasoning that comes before an answer."""
    mark = "\N{OBJECT REPLACEMENT CHARACTER}"
    head, _, tail = reasoning.render(mark).partition(mark)
    head, tail = head.strip(), tail.strip()
    block = f"{_text_up_to(grammar, tail)} {_LEAD}"
    return block if in_reasoning else f"({grammar.text(head)} {block})?"


def _text_up_to(grammar: Grammar, closing: str) -> str:
    """Return an expression for any text and the first `closing` behind it.

    Where that begins with a special token the text does not spell it out in others: parsers would
    see the end there.
    """
    expression = grammar.text(closing)
    if not expression.startswith("<["):
        return grammar.text_up_to(closing)
    any_text = "/(?s:.*)/"
    spelt = f"/(?s:.*){_escaped(closing)}(?s:.*)/"
    return f"{grammar.rule('TEXT', f'{any_text} & ~{spelt}')} {expression}"


def _markers(grammar: Grammar, reasoning: ReasoningFormat) -> str:
    """Return an expression for the markers of an answer, which some formats have."""
    further = [grammar.text(marker) for marker in reasoning.closers[1:]]
    if not further or reasoning.answer_opening:
        return '""'
    return f"({any_of(further)} {_LEAD}){{0,{_MAX_MARKERS}}}"
