"""Granite 3: `<think>` tags, and `<response>` tags around the answer."""

from __future__ import annotations

from vllm_mlx.engine.parsing.reasoning.think_tags import ThinkTags


class Granite(ThinkTags):
    """Read `<think>` blocks; the tags of the answer are left out."""

    signs = (("<think></think>", "<response></response>"),)
    closers = ("</think>", "<response>", "</response>")
