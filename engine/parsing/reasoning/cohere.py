"""Cohere's Command: markers around reasoning, and others around the answer."""

from __future__ import annotations

from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat


class Cohere(ReasoningFormat):
    """Read reasoning between its markers; the answer's markers are left out."""

    signs = (("<|START_THINKING|>",),)
    openers = ("<|START_THINKING|>",)
    closers = (
        "<|END_THINKING|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
    )
