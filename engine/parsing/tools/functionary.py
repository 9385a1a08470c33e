"""Functionary: the name of a function, or `all` for the user, before each part of an answer."""

from __future__ import annotations

import re

from vllm_mlx.engine.parsing.format_group import FormatGroup
from vllm_mlx.engine.parsing.named_format import NamedFormat
from vllm_mlx.engine.parsing.reader import MismatchError, Steps
from vllm_mlx.engine.parsing.scan import Scan, UnknownNameError
from vllm_mlx.engine.parsing.tools.llama import FunctionTag

_PART = ">>>"
_LINE_END = re.compile("\n")
#: The recipient that is the user.
_USER = "all"


class FunctionaryV3(NamedFormat):
    """Read and write version 3.2: `>>>f` and its JSON on the next line, `>>>all` before text.

    The prompt ends with the first `>>>`, so that the answer begins behind it.
    """

    triggers = (_PART,)
    anchored = ("",)

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        """Return what is written around the arguments."""
        return f"{_PART}{name}\n", ""

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read one part: a call, or what stands before text."""
        reader = scan.reader
        name = yield from _recipient(scan)
        yield from reader.expect("\n")
        if name == _USER:
            scan.drop()
            return
        # Text may begin with the name of a tool; a call has an object on the next line.
        if (yield from reader.peek()) != "{":
            raise MismatchError
        scan.start(name)
        yield from scan.json_object()
        scan.end()


class FunctionaryV2(NamedFormat):
    """Read and write version 2.4: `<|recipient|>f` and `<|content|>` with its JSON.

    The prompt ends with the first `<|recipient|>`, so that the answer begins behind it.
    """

    triggers = ("<|from|>assistant", "<|recipient|>")
    anchored = ("",)
    closers = ("<|stop|>",)
    between = "\n"

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        """Return what is written around the arguments."""
        return f"<|from|>assistant\n<|recipient|>{name}\n<|content|>", ""

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read one part: a call, or what stands before text."""
        reader = scan.reader
        if scan.trigger == "<|from|>assistant":
            yield from reader.space()
            yield from reader.expect("<|recipient|>")
        name = yield from _recipient(scan)
        yield from reader.space()
        yield from reader.expect("<|content|>")
        if name == _USER:
            scan.drop()
            return
        scan.start(name)
        yield from scan.json_object()
        scan.end()
        yield from reader.space()
        if (yield from reader.accept("<|stop|>")) is None:
            scan.rewind()


class Functionary(FormatGroup):
    """Write version 3.2; read it, 2.4, and the tags of 3.1."""

    signs = (
        (">>>all\\n",),
        ("<|recipient|>",),
    )
    members = (FunctionaryV3, FunctionaryV2, FunctionTag)


class FunctionaryV31(FormatGroup):
    """Write the tags of version 3.1; read all."""

    signs = (("<function=example_function_name>{",),)
    members = (FunctionTag, FunctionaryV3, FunctionaryV2)


def _recipient(scan: Scan) -> Steps[str]:
    """Read the name of a known tool or the user's, up to the end of its line."""

    def may_start(text: str) -> bool:
        if not (_USER.startswith(text.strip()) or scan.tools.may_start(text)):
            raise UnknownNameError
        return len(text) < 256

    name = (yield from scan.reader.word(_LINE_END, may_start)).strip()
    return name if name == _USER else scan.known(name)
