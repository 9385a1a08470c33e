"""MiniMax M3: reasoning between `<mm:think>` and `</mm:think>`."""

from __future__ import annotations

from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat


class MiniMaxM3(ReasoningFormat):
    """Read `<mm:think>` blocks."""

    signs = (("mm:think",),)
    openers = ("<mm:think>",)
    closers = ("</mm:think>",)
