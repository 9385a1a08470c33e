"""Reasoning between `<think>` and `</think>`, by far the most common form."""

from __future__ import annotations

from typing import ClassVar

from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat


class ThinkTags(ReasoningFormat):
    """Read `<think>` blocks; the opening tag may have been written by the template already."""

    signs: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("</think>",),
        ("<think>",),
    )
    tokens: ClassVar[tuple[str, ...]] = ("<think>",)
    openers: tuple[str, ...] = ("<think>",)
    closers: tuple[str, ...] = ("</think>",)
