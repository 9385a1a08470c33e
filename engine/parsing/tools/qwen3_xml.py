"""Qwen 3 Coder and later: `<function=f>` and `<parameter=city>` tags within `<tool_call>`."""

from __future__ import annotations

from typing import ClassVar

from vllm_mlx.engine.parsing.tagged_format import TaggedFormat


class Qwen3Xml(TaggedFormat):
    """Read and write the tagged calls of Qwen 3 Coder, Qwen 3.5, Nemotron 3 and Step 3.5."""

    signs: ClassVar[tuple[tuple[str, ...], ...]] = (
        (
            "<tool_call>",
            "<function=",
            "<parameter=",
        ),
    )
    triggers = ("<tool_call>", "<function=")
    closers = ("</tool_call>",)
    block_open = "<tool_call>"
    block_close = "</tool_call>"
    call_open = "<function="
    name_close = ">"
    call_close = "</function>"
    argument_open = "<parameter="
    value_opens = {">": None}  # noqa: RUF012
    value_close = "</parameter>"
    has_value_lines = True
