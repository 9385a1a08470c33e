"""Say which special tokens a model's text must keep so that its formats can be read."""

from __future__ import annotations

from collections.abc import Collection

from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat
from vllm_mlx.engine.parsing.tool_format import ToolFormat


def kept_tokens(
    tools: type[ToolFormat] | None,
    reasoning: ReasoningFormat | None,
    special_tokens: Collection[str],
) -> frozenset[str]:
    """Return those of a tokenizer's special tokens that a parser of these formats looks for.

    Detokenizers leave special tokens out, and with them the markers of many formats: calls would
    be lost. Tokens that end an answer may be kept or not; parsers do without them.
    """
    formats = [] if tools is None else list(tools.members) or [tools]
    texts = [text for kind in formats for text in (*kind.triggers, *kind.anchored, *kind.closers)]
    texts += [kind.render_call("f", {"text": "x", "number": 1}) for kind in formats]
    texts += [text for kind in formats for text in kind.inner_markers]
    framings = [kind.framing() for kind in (tools, *formats) if kind and kind.framing is not None]
    for frame in (reasoning, *framings):
        if frame is not None:
            texts += [*frame.markers, *frame.dropped, frame.render("x") if frame.openers else ""]
    everything = "\n".join(texts)
    return frozenset(token for token in special_tokens if token and token in everything)
