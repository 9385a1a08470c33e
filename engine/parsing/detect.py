"""Find the formats that a model writes, from its chat template and its vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat
from vllm_mlx.engine.parsing.registry import REASONING_PARSERS, TOOL_PARSERS
from vllm_mlx.engine.parsing.tool_format import ToolFormat

_Formats = Mapping[str, type[ToolFormat]] | Mapping[str, type[ReasoningFormat]]


def detect_parsers(
    template: str, vocabulary: Collection[str] = ()
) -> tuple[str | None, str | None, str]:
    """Return the names of the tool and the reasoning format, None for none, and the reasons.

    The template decides: it writes earlier calls and reasoning as the model does. Only where it
    shows no format, tokens of the vocabulary may.
    """
    no_tools = (
        "neither the template nor the vocabulary shows how calls are written"
        if "tool" in template
        else "the template knows no tools"
    )
    tools, tool_reason = _find(TOOL_PARSERS, template, vocabulary, no_tools)
    no_reasoning = "neither the template nor the vocabulary shows a marker of reasoning"
    reasoning, reasoning_reason = _find(REASONING_PARSERS, template, vocabulary, no_reasoning)
    return (
        tools,
        reasoning,
        f"tools: {tools or 'none'}, {tool_reason}; "
        f"reasoning: {reasoning or 'none'}, {reasoning_reason}",
    )


def all_signs() -> list[str]:
    """Return every text that `detect_parsers` looks for in a template, each once."""
    kinds: list[type[ToolFormat] | type[ReasoningFormat]]
    kinds = [*TOOL_PARSERS.values(), *REASONING_PARSERS.values()]
    signs = [sign for kind in kinds for group in kind.signs for sign in group]
    return list(dict.fromkeys(["tool", *signs]))


def _find(
    formats: _Formats, template: str, vocabulary: Collection[str], otherwise: str
) -> tuple[str | None, str]:
    """Return the first format that is shown, by a whole group of signs or by a token, and how."""
    # A class's own signs and tokens count: those that it inherits are its parent's.
    for name, kind in formats.items():
        for group in vars(kind).get("signs", ()):
            if all(sign in template for sign in group):
                return name, f"the template has {' and '.join(map(repr, group))}"
    for name, kind in formats.items():
        for token in vars(kind).get("tokens", ()):
            if token in vocabulary:
                return name, f"the vocabulary has {token!r}"
    return None, otherwise
