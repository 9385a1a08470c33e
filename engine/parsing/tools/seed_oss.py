"""Seed-OSS: Qwen 3 Coder's tags in a block of its own, values without lines of their own."""

from __future__ import annotations

from vllm_mlx.engine.parsing.tools.qwen3_xml import Qwen3Xml


class SeedOss(Qwen3Xml):
    """Read and write Seed-OSS's calls."""

    signs = (("<seed:tool_call>",), ("seed:", "<function="))
    triggers = ("<seed:tool_call>", "<function=")
    closers = ("</seed:tool_call>",)
    block_open = "<seed:tool_call>"
    block_close = "</seed:tool_call>"
    has_value_lines = False
