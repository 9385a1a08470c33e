"""Nemotron: Qwen 3 Coder's tags since version 3, a JSON list in `<TOOLCALL>` before."""

from __future__ import annotations

from vllm_mlx.engine.parsing.format_group import FormatGroup
from vllm_mlx.engine.parsing.json_format import JsonFormat
from vllm_mlx.engine.parsing.tools.hermes import HermesJson
from vllm_mlx.engine.parsing.tools.qwen3_xml import Qwen3Xml


class NemotronList(JsonFormat):
    """Read and write the list of Nemotron Nano 2."""

    triggers = ("<TOOLCALL>",)
    closers = ("</TOOLCALL>",)
    opening = "<TOOLCALL>"
    closing = "</TOOLCALL>"
    is_list = True


class NemotronV2(FormatGroup):
    """Write the list; read both."""

    signs = (("<TOOLCALL>",),)
    members = (NemotronList, Qwen3Xml, HermesJson)


class Nemotron(FormatGroup):
    """Write tags; read both."""

    members = (Qwen3Xml, NemotronList, HermesJson)
