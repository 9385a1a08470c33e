"""Gemma 4: a name and its arguments in a notation of its own, between markers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mlx.engine.parsing.format_group import FormatGroup
from vllm_mlx.engine.parsing.gemma_values import GEMMA, gemma_grammar, render_gemma
from vllm_mlx.engine.parsing.grammar import Grammar, any_of, function_of
from vllm_mlx.engine.parsing.python_calls import python_call, python_grammar, render_python
from vllm_mlx.engine.parsing.reader import Steps
from vllm_mlx.engine.parsing.scan import Scan
from vllm_mlx.engine.parsing.tool_format import ToolFormat

_CALL = "<|tool_call>"
_CALL_END = "<tool_call|>"
_FENCE = "```tool_code"
_NAME_END = re.compile("{")


class Gemma4Call(ToolFormat):
    """Read and write `<|tool_call>call:f{city:<|"|>Paris<|"|>,days:3}<tool_call|>`."""

    triggers = (_CALL,)
    closers = (_CALL_END,)
    between = ""

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read one call."""
        reader = scan.reader
        yield from reader.space()
        yield from reader.expect("call:")
        scan.start((yield from scan.name(_NAME_END)))
        yield from scan.json_object(GEMMA)
        yield from scan.close(_CALL_END)
        scan.end()

    @classmethod
    def render_call(cls, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call."""
        return f"{_CALL}call:{name}{render_gemma(arguments)}{_CALL_END}"

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
        options = [
            f"{grammar.text(f'{_CALL}call:{name}')} {gemma_grammar(grammar, schema)}"
            for name, schema in map(function_of, tools)
        ]
        call = grammar.rule("call", f"{any_of(options)} {grammar.text(_CALL_END)}")
        return grammar.build(f"{call}+" if parallel else call)


class GemmaCode(ToolFormat):
    """Read and write Python calls in a `tool_code` fence, as Gemma 3 does."""

    triggers = (_FENCE,)
    closers = ("```",)

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read the calls of one fence, each on a line of its own, in `print()` or not."""
        reader = scan.reader
        while True:
            yield from reader.space()
            is_printed = (yield from reader.accept("print(")) is not None
            yield from python_call(scan)
            yield from reader.space()
            if is_printed:
                yield from reader.expect(")")
                yield from reader.space()
            if (yield from reader.accept("```")) is not None:
                return
            scan.candidate()

    @classmethod
    def render_call(cls, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call."""
        return cls.render_calls([(name, arguments)])

    @classmethod
    def render_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of several calls in one fence."""
        lines = "\n".join(render_python(*call) for call in calls)
        return f"{_FENCE}\n{lines}\n```"

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
        more = f' ("\\n" {call})*' if parallel else ""
        return grammar.build(f'"{_FENCE}\\n" {call}{more} "\\n```"')


class Gemma4(FormatGroup):
    """Write Gemma 4's notation; read Gemma 3's fence, too."""

    signs = (
        ("<|tool_call>",),
        ("<tool_call|>",),
    )
    tokens = ("<|tool_call>",)
    members = (Gemma4Call, GemmaCode)


class Gemma3(FormatGroup):
    """Write Gemma 3's fence; read both."""

    signs = (("```tool_code",),)
    members = (GemmaCode, Gemma4Call)
