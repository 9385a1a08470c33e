"""Kimi K3: tags made of special tokens; each argument says its type."""

from __future__ import annotations

import re

from vllm_mlx.engine.parsing.reader import Steps
from vllm_mlx.engine.parsing.reasoning.kimi_k3 import KimiK3 as KimiK3Messages
from vllm_mlx.engine.parsing.scan import Scan
from vllm_mlx.engine.parsing.tagged_format import TaggedFormat

_QUOTE = re.compile('"')
_TAG_END = re.compile("<")
_TYPES = ("number", "integer", "boolean", "null", "object", "array")


class KimiK3(TaggedFormat):
    """Read and write Kimi K3's calls."""

    signs = (("<|open|>", "argument"),)
    triggers = ("<|open|>tools<|sep|>", '<|open|>call tool="')
    closers = ("<|close|>tools<|sep|>",)
    block_open = "<|open|>tools<|sep|>"
    block_close = "<|close|>tools<|sep|>"
    call_open = '<|open|>call tool="'
    name_close = '" index="1"<|sep|>'
    call_close = "<|close|>call<|sep|>"
    argument_open = '<|open|>argument key="'
    value_opens = {  # noqa: RUF012
        '" type="string"<|sep|>': True,
        **{f'" type="{name}"<|sep|>': False for name in _TYPES},
    }
    value_close = "<|close|>argument<|sep|>"
    line = ""
    framing = KimiK3Messages

    @classmethod
    def call(cls, scan: Scan) -> Steps[None]:
        """Read one call; its number is of no use here."""
        name = yield from scan.name(_QUOTE)
        yield from scan.reader.word(_TAG_END, lambda text: len(text) < 64)
        yield from scan.reader.expect("<|sep|>")
        scan.start(name)
        yield from cls.arguments(scan)
        scan.end()
