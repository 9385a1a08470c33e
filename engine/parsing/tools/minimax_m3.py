"""MiniMax M3: nested tags, each behind a token that text cannot hold."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mlx.engine.parsing.grammar import (
    FREE_KEY,
    Grammar,
    any_of,
    function_of,
    has_free_keys,
    member_schemas,
)
from vllm_mlx.engine.parsing.json_value import text_to_json
from vllm_mlx.engine.parsing.literals import escape, quote
from vllm_mlx.engine.parsing.markers import marker_set
from vllm_mlx.engine.parsing.reader import MismatchError, Steps
from vllm_mlx.engine.parsing.scan import Scan
from vllm_mlx.engine.parsing.schema import SchemaNode
from vllm_mlx.engine.parsing.tool_format import ToolFormat

_MARK = "]<]minimax[>["
_BLOCK = f"{_MARK}<tool_call>"
_BLOCK_END = f"{_MARK}</tool_call>"
_CALL = f'{_MARK}<invoke name="'
_CALL_END = f"{_MARK}</invoke>"

_QUOTE = re.compile('"')
_TAG_END = re.compile(">")
_MAX_DEPTH = 100
_MAX_GRAMMAR_DEPTH = 8


class MiniMaxM3(ToolFormat):
    """Read and write MiniMax M3's calls: a tag is a member of an object, `item` one of a list."""

    signs = (("]<]minimax[>[",),)
    triggers = (_BLOCK, _CALL)
    closers = (_BLOCK_END,)

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read the calls of one block, or one call without a block."""
        reader = scan.reader
        if scan.trigger == _BLOCK:
            yield from reader.space()
            yield from reader.expect(_CALL)
        while True:
            name = yield from scan.name(_QUOTE)
            yield from reader.expect('">')
            scan.start(name)
            yield from _members(scan, scan.schema, "invoke", 0)
            scan.whole()
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
    def render_call(cls, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call."""
        return cls.render_calls([(name, arguments)])

    @classmethod
    def render_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of several calls in one block."""
        lines = [f'{_CALL}{name}">{_render(arguments)}{_CALL_END}' for name, arguments in calls]
        return "\n".join([_BLOCK, *lines, _BLOCK_END])

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
            before = grammar.text(f'{_CALL}{name}">')
            options.append(f"{before} {_content(grammar, schema, _CALL_END, 0)}")
        call = grammar.rule("call", any_of(options))
        more = f' ("\\n" {call})*' if parallel else ""
        opening, closing = grammar.text(f"{_BLOCK}\n"), grammar.text(_BLOCK_END)
        return grammar.build(f'{opening} {call}{more} "\\n" {closing}')


def _members(scan: Scan, node: SchemaNode, tag: str, depth: int) -> Steps[None]:
    """Read the members of an object, up to and with the closing `tag`."""
    separator = "{"
    while True:
        yield from scan.reader.space()
        if (yield from scan.reader.accept(f"{_MARK}</", f"{_MARK}<")) != f"{_MARK}<":
            yield from scan.reader.expect(f"{tag}>")
            scan.emit("{}" if separator == "{" else "}")
            return
        key = yield from scan.reader.word(_TAG_END, lambda text: len(text) < 256)
        yield from scan.reader.expect(">")
        scan.emit(f"{separator}{quote(key)}: ")
        separator = ", "
        yield from _value(scan, node.child(key), key, depth + 1)


def _items(scan: Scan, node: SchemaNode, tag: str, depth: int) -> Steps[None]:
    """Read the elements of a list, up to and with the closing `tag`."""
    separator = "["
    while True:
        yield from scan.reader.space()
        if (yield from scan.reader.accept(f"{_MARK}</", f"{_MARK}<")) != f"{_MARK}<":
            yield from scan.reader.expect(f"{tag}>")
            scan.emit("]")
            return
        yield from scan.reader.expect("item>")
        scan.emit(separator)
        separator = ", "
        yield from _value(scan, node.item(), "item", depth + 1)


def _value(scan: Scan, node: SchemaNode, tag: str, depth: int) -> Steps[None]:
    """Read what stands in `tag`: tags, or text up to the closing one."""
    reader, types = scan.reader, node.types
    if depth > _MAX_DEPTH:
        raise MismatchError
    may_be_tags = types is None or types & {"object", "array"}
    if may_be_tags and (yield from reader.find(f"{_MARK}<", f"{_MARK}</")) == f"{_MARK}<":
        is_list = (yield from reader.find(f"{_MARK}<item>")) is not None
        if is_list and (types is None or "array" in types):
            yield from _items(scan, node, tag, depth)
        else:
            yield from _members(scan, node, tag, depth)
        return
    if types is not None and not types - {"string"}:
        scan.emit('"')
        yield from _text(scan, tag, escaped=True)
        scan.emit('"')
        return
    parts: list[str] = []
    yield from _text(scan, tag, parts=parts)
    text = "".join(parts)
    if not text.strip() and types is not None and "string" not in types:
        empty = {"object": "{}", "array": "[]", "null": "null"}
        text = next((empty[name] for name in empty if name in types), text)
    scan.emit(text_to_json(text, types))


def _text(
    scan: Scan, tag: str, *, escaped: bool = False, parts: list[str] | None = None
) -> Steps[None]:
    """Read text up to and with the closing `tag`; emit it, or collect it in `parts`."""
    reader = scan.reader
    markers = marker_set(f"{_MARK}</{tag}>")
    while True:
        end, found = markers.find(reader.text, reader.pos, closed=False)
        text = reader.text[reader.pos : end]
        reader.pos = end
        if parts is not None:
            parts.append(text)
        else:
            scan.emit(escape(text) if escaped else text)
        if found is not None:
            reader.pos += len(found)
            return
        yield from reader.more()


def _render(value: Any) -> str:
    if isinstance(value, Mapping):
        return "".join(f"{_MARK}<{k}>{_render(v)}{_MARK}</{k}>" for k, v in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "".join(f"{_MARK}<item>{_render(v)}{_MARK}</item>" for v in value)
    return value if isinstance(value, str) else json.dumps(value)


def _content(grammar: Grammar, schema: Mapping[str, Any], closing: str, depth: int) -> str:
    """Return an expression for a value that follows `schema`, and the `closing` tag behind it."""
    types = SchemaNode(schema).types or frozenset(["string"])
    words = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if words:
        return f"{any_of([grammar.text(_render(w)) for w in words])} {grammar.text(closing)}"
    if "string" in types or depth > _MAX_GRAMMAR_DEPTH:
        return grammar.text_up_to(closing, schema)
    if "array" in types:
        item = _content(grammar, schema.get("items") or {}, f"{_MARK}</item>", depth + 1)
        item = grammar.rule("item", f"{grammar.text(f'{_MARK}<item>')} {item}")
        return f"{grammar.elements(item, schema)} {grammar.text(closing)}"
    if "object" not in types:
        return f"{grammar.json({**schema, 'type': sorted(types)})} {grammar.text(closing)}"
    full = {"properties": {}, **schema}
    if has_free_keys(full) or (not full["properties"] and depth):
        # The name behind text that is not known yet cannot be asked for again.
        opening, end = grammar.text(f"{_MARK}<"), f"{_MARK}</"
        value = grammar.text_up_to(end)
        return f'({opening} {FREE_KEY} ">" {value} {FREE_KEY} ">")* {grammar.text(closing)}'
    parts = [
        (
            f"{grammar.text(f'{_MARK}<{key}>')} "
            f"{_content(grammar, part, f'{_MARK}</{key}>', depth + 1)}",
            is_required,
        )
        for key, part, is_required in member_schemas(full)
    ]
    return f"{grammar.ordered(parts)} {grammar.text(closing)}"
