"""Seed-OSS: reasoning between `<seed:think>` and `</seed:think>`."""

from __future__ import annotations

from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat


class SeedOss(ReasoningFormat):
    """Read `<seed:think>` blocks."""

    signs = (("seed:think",),)
    openers = ("<seed:think>",)
    closers = ("</seed:think>",)
