"""Mistral: reasoning between `[THINK]` and `[/THINK]`."""

from __future__ import annotations

from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat


class Mistral(ReasoningFormat):
    """Read `[THINK]` blocks."""

    signs = (("[THINK]",),)
    tokens = ("[THINK]",)
    openers = ("[THINK]",)
    closers = ("[/THINK]",)

    def render(self, reasoning: str) -> str:
        """Return the text of a block."""
        return f"[THINK]{reasoning}[/THINK]"
