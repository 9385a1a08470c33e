"""Formats whose calls are plain JSON, with no markers but perhaps a code fence."""

from __future__ import annotations

from typing import ClassVar

from vllm_mlx.engine.parsing.json_format import JsonFormat
from vllm_mlx.engine.parsing.reader import Steps
from vllm_mlx.engine.parsing.scan import Scan


class FencedJson(JsonFormat):
    """Read JSON calls where an answer begins, or anywhere in a fence that says that it is JSON."""

    triggers: ClassVar[tuple[str, ...]] = ("```json",)
    anchored = ("{", "[")
    separators = (";", ",")

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read the calls, and the end of the fence where there was one."""
        yield from super().parse(scan)
        if scan.trigger == "```json":
            yield from scan.close("```")
