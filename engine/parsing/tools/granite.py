"""Granite 3: a JSON list behind `<|tool_call|>`; Granite 4 writes Hermes's form."""

from __future__ import annotations

from vllm_mlx.engine.parsing.format_group import FormatGroup
from vllm_mlx.engine.parsing.json_format import JsonFormat
from vllm_mlx.engine.parsing.tools.hermes import HermesJson


class GraniteList(JsonFormat):
    """Read and write Granite 3's list."""

    triggers = ("<|tool_call|>",)
    opening = "<|tool_call|>"
    is_list = True


class Granite(FormatGroup):
    """Write Granite 3's list; read both forms."""

    signs = (("<|tool_call|>",),)
    tokens = ("<|tool_call|>",)
    members = (GraniteList, HermesJson)
