"""GLM: `<think>` tags, and markers around a final answer that are left out."""

from __future__ import annotations

from vllm_mlx.engine.parsing.reasoning.think_tags import ThinkTags


class Glm4(ThinkTags):
    """Read `<think>` blocks and leave out the marks of the answer's box."""

    signs = (
        (
            "<arg_key>",
            "[gMASK]",
        ),
    )
    dropped = ("<|begin_of_box|>", "<|end_of_box|>")
