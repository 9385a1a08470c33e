"""Kimi K2: an id that holds the name, and JSON, between markers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mlx.engine.parsing.grammar import Grammar, any_of, function_of
from vllm_mlx.engine.parsing.named_format import NamedFormat
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

    triggers = (_BLOCK, _CALL)
    closers = (_BLOCK_END,)
    opening = _BLOCK
    closing = _BLOCK_END

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        """Return what is written around the arguments."""
        return f"{_CALL}{_NAMESPACE}{name}:0{_ARGUMENTS}", _CALL_END

    @classmethod
    def render_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of several calls, numbered in their ids."""
        blocks = [super(Kimi, cls).render_calls([call]) for call in calls]
        numbered = [block.replace(":0<|", f":{i}<|", 1) for i, block in enumerate(blocks)]
        inner = [block.removeprefix(_BLOCK).removesuffix(_BLOCK_END) for block in numbered]
        return f"{_BLOCK}{''.join(inner)}{_BLOCK_END}"

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

    @classmethod
    def grammar(
        cls,
        tools: Sequence[Mapping[str, Any]],
        *,
        special_tokens: Mapping[str, int] | None = None,
        parallel: bool = False,
    ) -> str:
        """Return Lark text that forces a call."""
        grammar = Grammar(special_tokens)
        options = []
        for name, schema in map(function_of, tools):
            arguments = grammar.json(schema)
            before = grammar.text(f"{_CALL}{_NAMESPACE}{name}:")
            options.append(
                f"{before} /[0-9]{{1,4}}/ {grammar.text(_ARGUMENTS)} {arguments} "
                f"{grammar.text(_CALL_END)}"
            )
        call = grammar.rule("call", any_of(options)) + ("+" if parallel else "")
        return grammar.build(f"{grammar.text(_BLOCK)} {call} {grammar.text(_BLOCK_END)}")


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
