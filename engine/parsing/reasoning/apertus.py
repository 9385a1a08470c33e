"""Apertus: reasoning between `<|inner_prefix|>` and `<|inner_suffix|>`."""

from __future__ import annotations

from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat


class Apertus(ReasoningFormat):
    """Read inner blocks."""

    signs = (("<|inner_prefix|>",),)
    openers = ("<|inner_prefix|>",)
    closers = ("<|inner_suffix|>",)
