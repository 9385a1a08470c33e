"""LFM2: a list of Python calls between markers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mlx.engine.parsing.grammar import Grammar, any_of
from vllm_mlx.engine.parsing.json_calls import CallKeys, JsonCallReader
from vllm_mlx.engine.parsing.python_calls import python_grammar, python_list, render_python
from vllm_mlx.engine.parsing.reader import Steps
from vllm_mlx.engine.parsing.scan import Scan
from vllm_mlx.engine.parsing.tool_format import ToolFormat

_OPEN = "<|tool_call_start|>"
_CLOSE = "<|tool_call_end|>"


class Lfm2(ToolFormat):
    """Read and write `<|tool_call_start|>[f(city="Paris")]<|tool_call_end|>`; read JSON, too."""

    signs = ((_OPEN,), ("<|tool_list_start|>",))
    tokens = (_OPEN,)
    triggers = (_OPEN,)
    closers = (_CLOSE,)

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read one list."""
        reader = scan.reader
        yield from reader.space()
        start = reader.pos - (reader.mark or 0)
        yield from reader.expect("[")
        yield from reader.space()
        if (yield from reader.peek()) == "{":
            reader.pos = (reader.mark or 0) + start
            yield from JsonCallReader(scan, CallKeys()).payload()
        else:
            yield from python_list(scan)
        yield from scan.close(_CLOSE)

    @classmethod
    def render_call(cls, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call."""
        return cls.render_calls([(name, arguments)])

    @classmethod
    def render_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of several calls in one list."""
        return f"{_OPEN}[{', '.join(render_python(*call) for call in calls)}]{_CLOSE}"

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
        call = grammar.rule("call", any_of([python_grammar(grammar, tool) for tool in tools]))
        more = f' (", " {call})*' if parallel else ""
        return grammar.build(f'{grammar.text(_OPEN)} "[" {call}{more} "]" {grammar.text(_CLOSE)}')
