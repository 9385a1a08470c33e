"""DeepSeek V3.2 and V4: tags of its own markup language, DSML."""

from __future__ import annotations

from typing import ClassVar

from vllm_mlx.engine.parsing.format_group import FormatGroup
from vllm_mlx.engine.parsing.tagged_format import TaggedFormat


class DeepSeekV4Tags(TaggedFormat):
    """Read and write calls whose arguments say whether they are text or JSON."""

    triggers: ClassVar[tuple[str, ...]] = ("<｜DSML｜tool_calls>", '<｜DSML｜invoke name="')
    closers = ("</｜DSML｜tool_calls>",)
    block_open = "<｜DSML｜tool_calls>"
    block_close = "</｜DSML｜tool_calls>"
    call_open = '<｜DSML｜invoke name="'
    name_close = '">'
    call_close = "</｜DSML｜invoke>"
    argument_open = '<｜DSML｜parameter name="'
    value_opens = {'" string="true">': True, '" string="false">': False}  # noqa: RUF012
    value_close = "</｜DSML｜parameter>"
    ends_reasoning = True


class DeepSeekV32Tags(DeepSeekV4Tags):
    """Read and write the same within the block of V3.2."""

    triggers = ("<｜DSML｜function_calls>",)
    closers = ("</｜DSML｜function_calls>",)
    block_open = "<｜DSML｜function_calls>"
    block_close = "</｜DSML｜function_calls>"


class DeepSeekV4(FormatGroup):
    """Write V4's block; read both."""

    signs = (("｜DSML｜",),)
    tokens = ("｜DSML｜",)
    members = (DeepSeekV4Tags, DeepSeekV32Tags)


class DeepSeekV32(FormatGroup):
    """Write V3.2's block; read both."""

    signs = (
        (
            "｜DSML｜",
            "function_calls",
        ),
    )
    members = (DeepSeekV32Tags, DeepSeekV4Tags)
