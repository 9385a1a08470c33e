"""JSON calls in one `<tool_calls>` block: MiniMax M1, Apriel."""

from __future__ import annotations

from vllm_mlx.engine.parsing.json_format import JsonFormat


class Apriel(JsonFormat):
    """Read a list or single objects; write a list."""

    signs = (("<tool_calls>[",),)
    triggers = ("<tool_calls>",)
    closers = ("</tool_calls>",)
    opening = "<tool_calls>"
    closing = "</tool_calls>"
    is_list = True


class MiniMaxM1(Apriel):
    """Read the same; write each object in a block of its own, which the model may merge."""

    signs = (("<tool_calls>",),)
    opening = "<tool_calls>\n"
    closing = "\n</tool_calls>"
    is_list = False
