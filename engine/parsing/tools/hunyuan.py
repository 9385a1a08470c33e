"""Hunyuan 3: GLM's pairs of tags, all with the same suffix."""

from __future__ import annotations

from vllm_mlx.engine.parsing.reader import Steps
from vllm_mlx.engine.parsing.scan import Scan
from vllm_mlx.engine.parsing.tagged_format import TaggedFormat

_KEY_END = "</arg_key:opensource>"
_VALUE = "<arg_value:opensource>"


class Hunyuan(TaggedFormat):
    """Read and write Hunyuan 3's calls."""

    signs = (("<tool_calls{}>", ":opensource"),)
    tokens = ("<tool_calls:opensource>",)
    triggers = ("<tool_calls:opensource>", "<tool_call:opensource>")
    closers = ("</tool_calls:opensource>",)
    block_open = "<tool_calls:opensource>"
    block_close = "</tool_calls:opensource>"
    call_open = "<tool_call:opensource>"
    name_close = "<tool_sep:opensource>"
    call_close = "</tool_call:opensource>"
    argument_open = "<arg_key:opensource>"
    value_opens = {f"{_KEY_END}\n{_VALUE}": None}  # noqa: RUF012
    value_close = "</arg_value:opensource>"

    @classmethod
    def value_opener(cls, scan: Scan, openers: tuple[str, ...]) -> Steps[str]:
        """Read what stands between key and value."""
        yield from scan.reader.expect(_KEY_END)
        yield from scan.reader.space()
        yield from scan.reader.expect(_VALUE)
        return openers[0]
