"""Qwen: JSON or tags within `<tool_call>`, or `[Calling tool: f({...})]`."""

from __future__ import annotations

import re

from vllm_mlx.engine.parsing.format_group import FormatGroup
from vllm_mlx.engine.parsing.named_format import NamedFormat
from vllm_mlx.engine.parsing.reader import Steps
from vllm_mlx.engine.parsing.scan import Scan
from vllm_mlx.engine.parsing.tools.hermes import HermesJson
from vllm_mlx.engine.parsing.tools.qwen3_xml import Qwen3Xml

_NAME_END = re.compile(r"\(")


class QwenBracket(NamedFormat):
    """Read and write calls in square brackets, as models write them in plain text."""

    triggers = ("[Calling tool:",)
    closers = (")]",)
    between = "\n"

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        """Return what is written around the arguments."""
        return f"[Calling tool: {name}(", ")]"

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read one call."""
        reader = scan.reader
        name = yield from scan.name(_NAME_END)
        yield from reader.expect("(")
        scan.start(name)
        yield from scan.json_object()
        yield from reader.space()
        yield from reader.expect(")")
        yield from reader.space()
        yield from reader.expect("]")
        scan.end()


class Qwen(FormatGroup):
    """Write JSON in tags; read all three forms."""

    members = (HermesJson, Qwen3Xml, QwenBracket)
