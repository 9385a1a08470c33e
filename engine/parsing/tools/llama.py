"""Llama 3 and 4: JSON, a JSON in a function tag, or Python."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mlx.engine.parsing.format_group import FormatGroup
from vllm_mlx.engine.parsing.grammar import Grammar, any_of
from vllm_mlx.engine.parsing.json_calls import CallKeys
from vllm_mlx.engine.parsing.json_format import JsonFormat
from vllm_mlx.engine.parsing.named_format import NamedFormat
from vllm_mlx.engine.parsing.python_calls import (
    keyword_arguments,
    python_call,
    python_grammar,
    python_list,
    render_python,
)
from vllm_mlx.engine.parsing.reader import MismatchError, Steps
from vllm_mlx.engine.parsing.scan import Scan, UnknownNameError
from vllm_mlx.engine.parsing.tool_format import ToolFormat

_PYTHON_TAG = "<|python_tag|>"
_PYTHON_START = "<|python_start|>"
_PYTHON_END = "<|python_end|>"
_TAG_END = re.compile(">")
_BUILTIN_END = re.compile(r"[(\n]")


class LlamaJson(JsonFormat):
    """Read and write `{"name": ..., "parameters": {...}}`, several with semicolons between."""

    triggers = (_PYTHON_TAG,)
    anchored = ("{",)
    keys = CallKeys(arguments=("parameters", "arguments"))
    separators = (";",)
    between = "; "


class LlamaBuiltin(ToolFormat):
    """Read and write calls to tools that Llama knows itself: `<|python_tag|>f.call(query="x")`."""

    triggers = (_PYTHON_TAG,)

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read one call."""
        suffix = ".call"

        def may_start(text: str) -> bool:
            dot = text.rfind(".")
            name = text if dot < 0 or scan.tools.may_start(text) else text[:dot]
            if not scan.tools.may_start(name):
                raise UnknownNameError
            return name is text or suffix.startswith(text[dot:])

        text = yield from scan.reader.word(_BUILTIN_END, may_start)
        yield from scan.reader.expect("(")
        if not text.endswith(suffix):
            raise MismatchError
        scan.start(scan.known(text.removesuffix(suffix).strip()))
        yield from keyword_arguments(scan)
        scan.end()

    @classmethod
    def render_call(cls, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call."""
        return _PYTHON_TAG + render_python(f"{name}.call", arguments)

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
        options = [python_grammar(grammar, tool, suffix=".call") for tool in tools]
        call = grammar.rule("call", f"{grammar.text(_PYTHON_TAG)} {any_of(options)}")
        return grammar.build(f"{call}+" if parallel else call)


class FunctionTag(NamedFormat):
    """Read and write `<function=f>{...}</function>`."""

    triggers = ("<function=",)
    closers = ("</function>",)

    @classmethod
    def frame(cls, name: str) -> tuple[str, str]:
        """Return what is written around the arguments."""
        return f"<function={name}>", "</function>"

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read one call."""
        reader = scan.reader
        name = yield from scan.name(_TAG_END)
        yield from reader.expect(">")
        yield from reader.space()
        # Without JSON the tag belongs to another format.
        if (yield from reader.peek()) != "{":
            raise MismatchError
        scan.start(name)
        yield from scan.json_object()
        yield from scan.close("</function>")
        scan.end()


class LlamaPythonic(ToolFormat):
    """Read and write a list of Python calls, `[f(city="Paris"), g()]`."""

    triggers = (_PYTHON_START, _PYTHON_TAG)
    anchored = ("[",)
    closers = (_PYTHON_END,)

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read one list, and the end marker where there was a start marker."""
        reader = scan.reader
        if scan.trigger != "[":
            yield from reader.space()
            if (yield from reader.accept("[")) is None:
                yield from python_call(scan)
                yield from reader.space()
                yield from reader.expect(_PYTHON_END)
                return
        yield from python_list(scan)
        if scan.trigger == _PYTHON_START:
            yield from reader.space()
            yield from reader.expect(_PYTHON_END)

    @classmethod
    def render_call(cls, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call."""
        return cls.render_calls([(name, arguments)])

    @classmethod
    def render_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of several calls in one list."""
        return f"[{', '.join(render_python(*call) for call in calls)}]"

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
        return grammar.build(f'"[" {call}{more} "]"')


class Llama(FormatGroup):
    """Write JSON; read all forms."""

    signs = (
        ('{"name": function name, "parameters":',),
        ("<|python_tag|>",),
    )
    tokens = ("<|python_tag|>",)
    members = (LlamaJson, FunctionTag, LlamaPythonic, LlamaBuiltin)


class Llama4(FormatGroup):
    """Write Python; read all forms."""

    members = (LlamaPythonic, LlamaJson, FunctionTag, LlamaBuiltin)
