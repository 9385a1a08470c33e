"""DeepSeek R1, V3 and V3.1: a name between markers, and JSON, fenced before V3.1."""

from __future__ import annotations

import re
from typing import ClassVar

from vllm_mlx.engine.parsing.named_format import NamedFormat
from vllm_mlx.engine.parsing.reader import Steps
from vllm_mlx.engine.parsing.scan import Scan, UnknownNameError

_BLOCK = "<｜tool▁calls▁begin｜>"
_BLOCK_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"

_MARKER = re.compile("<")
_NAME_END = re.compile(r"[\n`{<]")
#: R1 and V3 name the kind of tool first; there is one kind.
_KIND = "function"


class DeepSeek(NamedFormat):
    """Read all three forms; write R1's and V3's."""

    signs: ClassVar[tuple[tuple[str, ...], ...]] = (
        (
            "<｜tool▁calls▁begin｜>",
            "```json",
        ),
    )
    tokens = ("<｜tool▁calls▁begin｜>",)
    triggers = (_BLOCK, _CALL)
    closers = (_BLOCK_END,)
    opening = _BLOCK
    closing = _BLOCK_END
    between = "\n"

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        """Return what is written around the arguments."""
        return f"{_CALL}{_KIND}{_SEPARATOR}{name}\n```json\n", f"\n```{_CALL_END}"

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read the calls of one block, or one call without a block."""
        reader = scan.reader
        if scan.trigger == _BLOCK:
            yield from reader.space()
            yield from reader.expect(_CALL)
        while True:
            yield from cls._call(scan)
            yield from reader.space()
            if (yield from reader.find(_CALL, _BLOCK_END)) != _CALL:
                if scan.trigger == _BLOCK:
                    yield from scan.close(_BLOCK_END)
                else:
                    scan.rewind()
                return
            scan.candidate()
            yield from reader.expect(_CALL)

    @classmethod
    def _call(cls, scan: Scan) -> Steps[None]:
        reader = scan.reader

        def may_start(text: str) -> bool:
            if not (_KIND.startswith(text) or scan.tools.may_start(text)):
                raise UnknownNameError
            return True

        name = (yield from reader.word(_MARKER, may_start)).strip()
        yield from reader.expect(_SEPARATOR)
        if name == _KIND and (yield from reader.peek()) not in "{\n":
            name = yield from scan.name(_NAME_END)
        scan.start(scan.known(name))
        fence = yield from scan.fence()
        yield from scan.json_object()
        yield from reader.space()
        if fence:
            yield from reader.expect("```")
            yield from reader.space()
        yield from reader.expect(_CALL_END)
        scan.end()


class DeepSeekV31(DeepSeek):
    """Read all forms; write V3.1's."""

    signs = (("<｜tool▁calls▁begin｜>",),)
    between = ""

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        """Return what is written around the arguments."""
        return f"{_CALL}{name}{_SEPARATOR}", _CALL_END
