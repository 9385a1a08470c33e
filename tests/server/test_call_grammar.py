"""Grammars of answers with calls in them: text stays free, and calls do not."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.grammar_tokens import ByteTokens

from vllm_mlx.engine.core.grammar import GrammarCompiler
from vllm_mlx.engine.parsing import TOOL_PARSERS
from vllm_mlx.engine.parsing.registry import make_reasoning
from vllm_mlx.engine.parsing.tool_format import ToolFormat
from vllm_mlx.server.answers.call_grammar import forced_calls, free_answer
from vllm_mlx.server.answers.tool_choice import ToolChoice

#: One name of each format.
NAMES = sorted({kind: name for name, kind in reversed(TOOL_PARSERS.items())}.values())
#: Formats that give no sign at which a call begins, or whose sign is in parts.
WITHOUT_SIGN = {"functionary", "kimi_k3", "solar"}
#: Formats in which text and a call are alternatives.
ONE_OR_OTHER = {
    *("anthropic", "firefunction", "gemini", "harmony", "llama", "llama4", "openai", "xlam"),
    *("gigachat3", "gemma3"),
}

STRICT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "set",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["metric", "imperial"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}
FREE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "other",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
        },
    },
}


def leaf_of(name: str) -> type[ToolFormat]:
    """Return the format that calls are written in."""
    kind = TOOL_PARSERS[name]
    return kind.members[0] if kind.members else kind


def tokens_of(name: str, *, is_special: bool) -> ByteTokens:
    """Return bytes, and with `is_special` the format's markers as tokens of their own."""
    rendered = leaf_of(name).render_call("set", {})
    found = re.findall(r"<[|｜][^<>]*[|｜]?>|\[[A-Z_]+\]", rendered) if is_special else []
    return ByteTokens(dict.fromkeys(found))


def takes(grammar: str, text: str, tokens: ByteTokens) -> bool:
    """Say whether `text` is a whole answer."""
    matcher = GrammarCompiler(tokens).compile(grammar)
    encoded = tokens.encode(text)
    return matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()


def grammar_of(name: str, tools: list[dict[str, Any]], tokens: ByteTokens, **options: Any) -> str:
    """Return the grammar of an answer in a format."""
    grammar = free_answer(
        TOOL_PARSERS[name],
        tools,
        is_parallel=options.get("is_parallel", True),
        special_tokens=tokens.added_tokens,
        reasoning=make_reasoning("gpt_oss") if name == "harmony" else None,
    )
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("is_special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_SIGN])
def test_calls_to_strict_tools_follow_their_schema_among_free_text(
    name: str, *, is_special: bool
) -> None:
    """Text passes, calls that follow the schema too, others of strict tools do not."""
    leaf, tokens = leaf_of(name), tokens_of(name, is_special=is_special)
    grammar = grammar_of(name, [STRICT, FREE], tokens)
    good = leaf.render_call("set", {"unit": "metric"})
    bad = leaf.render_call("set", {"unit": "metre"})
    loose = leaf.render_call("other", {"x": "not a number", "y": 1})
    opening = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert takes(grammar, f"{opening}It is 3 < 4, {{so}} [there].", tokens)
    assert takes(grammar, good, tokens)
    assert not takes(grammar, bad, tokens)
    assert takes(grammar, loose, tokens)
    if name not in ONE_OR_OTHER:
        assert takes(grammar, f"Wait.\n{good}\n{loose}\nDone.", tokens)
        assert not takes(grammar, f"Wait.\n{good}\n{bad}\nDone.", tokens)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_SIGN])
def test_one_call_at_most_or_none(name: str) -> None:
    """A second call is refused where one is allowed, and the first where none is."""
    leaf, tokens = leaf_of(name), tokens_of(name, is_special=False)
    one = leaf.render_call("set", {"unit": "metric"})
    two = leaf.render_calls([("set", {"unit": "metric"}), ("set", {"unit": "imperial"})])
    single = grammar_of(name, [STRICT], tokens, is_parallel=False)
    assert takes(single, one, tokens)
    assert not takes(single, two, tokens)
    opening = "<|channel|>final<|message|>" if name == "harmony" else ""
    none = grammar_of(name, [], tokens)
    assert takes(none, f"{opening}No call.", tokens)
    assert not takes(none, one, tokens)


@pytest.mark.parametrize("name", sorted(WITHOUT_SIGN))
def test_formats_without_a_sign_leave_answers_free(name: str) -> None:
    """None says that nothing can be enforced short of a call."""
    grammar = free_answer(
        TOOL_PARSERS[name], [STRICT], is_parallel=True, special_tokens={}, reasoning=None
    )
    assert grammar is None


def test_a_named_tool_is_the_only_one_and_called_once() -> None:
    """`required` leaves the choice among all, several at once if that is allowed."""
    tokens = ByteTokens()
    kind = TOOL_PARSERS["hermes"]
    first = kind.render_call("set", {"unit": "metric"})
    other = kind.render_call("other", {"x": 1})

    def grammar(choice: ToolChoice, *, is_parallel: bool = True) -> str:
        return forced_calls(
            kind, [STRICT, FREE], choice, is_parallel=is_parallel, special_tokens={}
        )

    named = grammar(ToolChoice("required", "other"))
    assert takes(named, other, tokens)
    assert not takes(named, first, tokens)
    assert not takes(named, f"{other}\n{other}", tokens)
    required = grammar(ToolChoice("required"))
    assert takes(required, f"{first}\n{other}", tokens)
    assert not takes(required, f"Wait. {first}", tokens)
    single = grammar(ToolChoice("required"), is_parallel=False)
    assert not takes(single, f"{first}\n{other}", tokens)
