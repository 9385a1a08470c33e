"""GLM 4.5 and later: a name, and pairs of `<arg_key>` and `<arg_value>`, within `<tool_call>`."""

from __future__ import annotations

import re
from typing import ClassVar

from vllm_mlx.engine.parsing.reader import Steps
from vllm_mlx.engine.parsing.scan import Scan
from vllm_mlx.engine.parsing.tagged_format import TaggedFormat

_NAME_END = re.compile(r"[\s<]")


class Glm47(TaggedFormat):
    """Read and write GLM's calls; line breaks between the tags may be there or not."""

    signs: ClassVar[tuple[tuple[str, ...], ...]] = (("<arg_key>",),)
    tokens = ("<arg_key>",)
    triggers = ("<tool_call>",)
    closers = ("</tool_call>",)
    call_open = "<tool_call>"
    name_close = ""
    call_close = "</tool_call>"
    argument_open = "<arg_key>"
    value_opens = {"</arg_key>\n<arg_value>": None}  # noqa: RUF012
    value_close = "</arg_value>"
    key_close: ClassVar[str] = "</arg_key>"
    value_open: ClassVar[str] = "<arg_value>"

    @classmethod
    def call(cls, scan: Scan) -> Steps[None]:
        """Read one call."""
        yield from scan.reader.space()
        scan.start((yield from scan.name(_NAME_END)))
        yield from cls.arguments(scan)
        scan.end()

    @classmethod
    def value_opener(cls, scan: Scan, openers: tuple[str, ...]) -> Steps[str]:
        """Read what stands between key and value."""
        yield from scan.reader.expect(cls.key_close)
        yield from scan.reader.space()
        yield from scan.reader.expect(cls.value_open)
        return openers[0]
