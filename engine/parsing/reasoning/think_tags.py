"""Reasoning between `<think>` and `</think>`, by far the most common form."""

from __future__ import annotations

from typing import ClassVar

from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat


class ThinkTags(ReasoningFormat):
    """Read `<think>` blocks; the opening tag may have been written by the template already."""

    openers = ("<think>",)
    closers = ("</think>",)
    template_signs: ClassVar[tuple[str, ...]] = ("</think>", "<think>")
