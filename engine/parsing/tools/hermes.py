"""Hermes: each call is a JSON object within `<tool_call>` tags."""

from __future__ import annotations

from vllm_mlx.engine.parsing.format_group import FormatGroup
from vllm_mlx.engine.parsing.json_format import JsonFormat
from vllm_mlx.engine.parsing.tools.qwen3_xml import Qwen3Xml


class HermesJson(JsonFormat):
    """Read and write JSON calls in tags, as Hermes, Qwen 2.5 and 3, Granite 4 and others do."""

    triggers = ("<tool_call>",)
    closers = ("</tool_call>",)
    opening = "<tool_call>\n"
    closing = "\n</tool_call>"


class Hermes(FormatGroup):
    """Write JSON in tags; read the tagged arguments of later models, too."""

    signs = (
        (
            "<tool_call>",
            '"name"',
        ),
        (
            "<tool_call>",
            '"arguments"',
        ),
    )
    tokens = ("<tool_call>",)
    members = (HermesJson, Qwen3Xml)
