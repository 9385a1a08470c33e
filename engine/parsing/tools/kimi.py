"""Kimi K2: an id that holds the name, and JSON, between markers."""

from __future__ import annotations

import re

from vllm_mlx.engine.parsing.named_format import ID, NamedFormat
from vllm_mlx.engine.parsing.reader import Steps
from vllm_mlx.engine.parsing.scan import Scan, UnknownNameError

_BLOCK = "<|tool_calls_section_begin|>"
_BLOCK_END = "<|tool_calls_section_end|>"
_CALL = "<|tool_call_begin|>"
_CALL_END = "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"

_MARKER = re.compile("<")
_NAMESPACE = "functions."
_INDEX = re.compile(r":[0-9]*\s*\Z")


class Kimi(NamedFormat):
    """Read and write Kimi K2's calls; their ids are the model's own, which it expects back."""

    signs = (("<|tool_calls_section_begin|>",),)
    tokens = ("<|tool_calls_section_begin|>",)
    triggers = (_BLOCK, _CALL)
    closers = (_BLOCK_END,)
    opening = _BLOCK
    closing = _BLOCK_END
    id_pattern = "/[0-9]{1,4}/"

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        """Return what is written around the arguments."""
        return f"{_CALL}{_NAMESPACE}{name}:{ID}{_ARGUMENTS}", _CALL_END

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read the calls of one section, or one call without a section."""
        reader = scan.reader
        if scan.trigger == _BLOCK:
            yield from reader.space()
            yield from reader.expect(_CALL)
        while True:
            call_id = yield from reader.word(_MARKER, lambda text: _may_start(scan, text))
            yield from reader.expect(_ARGUMENTS)
            scan.start(scan.known(_name(call_id.strip())), call_id.strip())
            yield from scan.json_object()
            yield from reader.space()
            yield from reader.expect(_CALL_END)
            scan.end()
            yield from reader.space()
            if (yield from reader.find(_CALL, _BLOCK_END)) != _CALL:
                if scan.trigger == _BLOCK:
                    yield from scan.close(_BLOCK_END)
                else:
                    scan.rewind()
                return
            scan.candidate()
            yield from reader.expect(_CALL)


def _name(call_id: str) -> str:
    return _INDEX.sub("", call_id).removeprefix(_NAMESPACE)


def _may_start(scan: Scan, text: str) -> bool:
    """Say whether an id of a known tool begins with `text`."""
    bare = text.lstrip()
    if _NAMESPACE.startswith(bare):
        return True
    name = bare.removeprefix(_NAMESPACE)
    if scan.tools.may_start(name) or scan.tools.knows(_name(name)):
        return True
    raise UnknownNameError
