"""MiniMax M2: `<invoke>` and `<parameter>` tags within `<minimax:tool_call>`."""

from __future__ import annotations

from vllm_mlx.engine.parsing.tagged_format import TaggedFormat


class MiniMax(TaggedFormat):
    """Read and write MiniMax M2's calls."""

    signs = (("<minimax:tool_call>",),)
    tokens = ("<minimax:tool_call>",)
    triggers = ("<minimax:tool_call>", '<invoke name="')
    closers = ("</minimax:tool_call>",)
    block_open = "<minimax:tool_call>"
    block_close = "</minimax:tool_call>"
    call_open = '<invoke name="'
    name_close = '">'
    call_close = "</invoke>"
    argument_open = '<parameter name="'
    value_opens = {'">': None}  # noqa: RUF012
    value_close = "</parameter>"
