"""Hunyuan 3: `<think>` tags with a suffix."""

from __future__ import annotations

from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat


class Hunyuan(ReasoningFormat):
    """Read `<think:opensource>` blocks."""

    signs = (("<think{}>", ":opensource"),)
    openers = ("<think:opensource>",)
    closers = ("</think:opensource>",)
