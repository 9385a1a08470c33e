"""Find the formats that a model writes, from its chat template and its vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat
from vllm_mlx.engine.parsing.registry import REASONING_PARSERS, TOOL_PARSERS
from vllm_mlx.engine.parsing.tool_format import ToolFormat


def detect_parsers(
    template: str, vocabulary: Collection[str] = ()
) -> tuple[str | None, str | None, str]:
    """Return the names of the tool and the reasoning format, None for none, and the reasons.

    The template decides: it writes earlier calls and reasoning as the model does. Only where it
    shows no tool format, tokens of the vocabulary may.
    """
    tools, tool_reason = _by_signs(TOOL_PARSERS, template)
    if tools is None:
        tools, token = _by_tokens(TOOL_PARSERS, vocabulary)
        tool_reason = f"the vocabulary has {token!r}" if tools else _no_tools(template)
    reasoning, reasoning_reason = _by_signs(REASONING_PARSERS, template)
    return (
        tools,
        reasoning,
        f"tools: {tools or 'none'}, {tool_reason}; "
        f"reasoning: {reasoning or 'none'}, "
        f"{reasoning_reason or 'the template shows no marker of reasoning'}",
    )


def _by_signs(
    formats: Mapping[str, type[ToolFormat]] | Mapping[str, type[ReasoningFormat]], template: str
) -> tuple[str | None, str]:
    """Return the first format that has a group of signs that is wholly in `template`."""
    for name, kind in formats.items():
        for group in kind.signs:
            if all(sign in template for sign in group):
                return name, f"the template has {' and '.join(map(repr, group))}"
    return None, ""


def _by_tokens(
    formats: Mapping[str, type[ToolFormat]], vocabulary: Collection[str]
) -> tuple[str | None, str]:
    for name, kind in formats.items():
        for token in kind.tokens:
            if token in vocabulary:
                return name, token
    return None, ""


def _no_tools(template: str) -> str:
    if "tool" not in template:
        return "the template knows no tools"
    return "neither the template nor the vocabulary shows how calls are written"


def all_signs() -> list[str]:
    """Return every text that `detect_parsers` looks for in a template, each once."""
    formats: Iterable[type[ToolFormat] | type[ReasoningFormat]]
    formats = [*TOOL_PARSERS.values(), *REASONING_PARSERS.values()]
    found = {sign: None for kind in formats for group in kind.signs for sign in group}
    return ["tool", *found]
