"""DeepSeek V3.2 and V4: `<think>` tags, which a block of calls ends as well."""

from __future__ import annotations

from vllm_mlx.engine.parsing.reasoning.think_tags import ThinkTags


class DeepSeekV4(ThinkTags):
    """Read `<think>` blocks; that calls end them is the tool format's to say."""

    signs = (("｜DSML｜",),)

    def render(self, reasoning: str) -> str:
        """Return the text of a block."""
        return f"<think>{reasoning}</think>"
