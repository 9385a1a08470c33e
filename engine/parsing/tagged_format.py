"""Formats whose calls are tags: a name, and each argument between tags of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from vllm_mlx.engine.parsing.grammar import (
    FREE_KEY,
    Grammar,
    any_of,
    function_of,
    has_free_keys,
    member_schemas,
)
from vllm_mlx.engine.parsing.literals import quote
from vllm_mlx.engine.parsing.reader import MismatchError, Steps
from vllm_mlx.engine.parsing.scan import Scan
from vllm_mlx.engine.parsing.schema import SchemaNode
from vllm_mlx.engine.parsing.tagged_value import ValueEnd, read_value
from vllm_mlx.engine.parsing.tool_format import ToolFormat

_NO_TEXT = frozenset(["object", "array", "number", "boolean", "null"])


class TaggedFormat(ToolFormat):
    """Read calls such as `<function=f><parameter=city>Paris</parameter></function>`.

    White space between tags does not matter. Values are plain text; what they are, the schema
    says.
    """

    #: Around the calls of one block; empty where calls have none. The opening one is a trigger.
    block_open: ClassVar[str] = ""
    block_close: ClassVar[str] = ""
    #: Before the name of a call, behind the name, and behind the arguments.
    call_open: ClassVar[str]
    name_close: ClassVar[str]
    call_close: ClassVar[str]
    #: Before the name of an argument and before its value, and behind the value. The keys of the
    #: second are the text between name and value; what they map to says whether the value is text
    #: (True), JSON (False) or either (None).
    argument_open: ClassVar[str]
    value_opens: ClassVar[Mapping[str, bool | None]]
    value_close: ClassVar[str]
    #: Whether one line break behind the opening and one before the closing tag of a value belong
    #: to the tags.
    has_value_lines: ClassVar[bool] = False
    #: Line breaks, or nothing, that are written between the tags.
    line: ClassVar[str] = "\n"

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read the calls of one block, or one call without a block."""
        reader = scan.reader
        is_block = scan.trigger == cls.block_open
        if is_block:
            yield from reader.space()
            yield from reader.expect(cls.call_open)
        while True:
            yield from cls.call(scan)
            yield from reader.space()
            if not is_block:
                # A model may leave out the opening tag alone.
                if not cls.block_close or (yield from reader.accept(cls.block_close)) is None:
                    scan.rewind()
                return
            ahead = yield from reader.find(cls.call_open, cls.block_close)
            if ahead != cls.call_open:
                yield from scan.close(cls.block_close)
                return
            scan.candidate()
            yield from reader.expect(cls.call_open)

    @classmethod
    def call(cls, scan: Scan) -> Steps[None]:
        """Read one call, from behind its opening tag to behind its closing one."""
        reader = scan.reader
        name = yield from scan.name(_stop(cls.name_close[0]))
        yield from reader.expect(cls.name_close)
        scan.start(name)
        yield from cls.arguments(scan)
        scan.end()

    @classmethod
    def arguments(cls, scan: Scan) -> Steps[None]:
        """Read all arguments and the closing tag of the call."""
        reader = scan.reader
        separator = "{"
        while True:
            yield from reader.space()
            found = yield from reader.accept(cls.argument_open, cls.call_close)
            if found is None:
                raise MismatchError
            if found == cls.call_close:
                scan.emit("{}" if separator == "{" else "}")
                scan.whole()
                return
            openers = tuple(cls.value_opens)
            key = yield from reader.word(_stop(openers[0][0]), lambda text: len(text) < 256)
            opener = yield from cls.value_opener(scan, openers)
            scan.emit(f"{separator}{quote(key.strip())}: ")
            separator = ", "
            if cls.has_value_lines and (yield from reader.peek()) == "\n":
                reader.pos += 1
            yield from read_value(
                reader,
                scan.emit,
                scan.schema.child(key.strip()),
                cls.value_end(opener),
                is_text=cls.value_opens[opener],
            )

    @classmethod
    def value_opener(cls, scan: Scan, openers: tuple[str, ...]) -> Steps[str]:
        """Read what stands between the name of an argument and its value."""
        opener = yield from scan.reader.accept(*openers)
        if opener is None:
            raise MismatchError
        return opener

    @classmethod
    def value_end(cls, opener: str) -> ValueEnd:
        """Return what ends a value that began with `opener`."""
        del opener
        lines = (f"\n{cls.value_close}",) if cls.has_value_lines else ()
        block = (cls.block_close,) if cls.block_close else ()
        return ValueEnd((*lines, cls.value_close), (cls.argument_open, cls.call_close, *block))

    @classmethod
    def value_text(cls, value: Any) -> str:
        """Return a value as it is written between its tags."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return f"\n{text}\n" if cls.has_value_lines else text

    @classmethod
    def render_argument(cls, key: str, value: Any) -> str:
        """Return one argument with its tags."""
        is_text = isinstance(value, str)
        opener = next(o for o, text in cls.value_opens.items() if text in (None, is_text))
        return f"{cls.argument_open}{key}{opener}{cls.value_text(value)}{cls.value_close}"

    @classmethod
    def render_call(cls, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call."""
        return cls.render_calls([(name, arguments)])

    @classmethod
    def render_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of several calls, each in a block of its own."""
        parts = []
        for name, arguments in calls:
            lines = [cls.block_open] if cls.block_open else []
            lines.append(f"{cls.call_open}{name}{cls.name_close}")
            lines += [cls.render_argument(key, value) for key, value in arguments.items()]
            lines.append(cls.call_close)
            lines += [cls.block_close] if cls.block_close else []
            parts.append(cls.line.join(lines))
        return cls.between.join(parts)

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
        line = grammar.text(cls.line)
        options = []
        for name, schema in map(function_of, tools):
            parts = [
                (f"{cls._argument(grammar, key, part)} {line}", is_required)
                for key, part, is_required in member_schemas(schema)
            ]
            inside = grammar.ordered(parts)
            if has_free_keys(schema):
                inside = f"({cls._argument(grammar, None, {})} {line})*"
            before = grammar.text(f"{cls.call_open}{name}{cls.name_close}{cls.line}")
            options.append(f"{before} {inside} {grammar.text(cls.call_close)}")
        call = any_of(options)
        if cls.block_open:
            opening, closing = cls.block_open + cls.line, cls.line + cls.block_close
            call = f"{grammar.text(opening)} {call} {grammar.text(closing)}"
        block = grammar.rule("block", call)
        more = f" ({grammar.text(cls.between)} {block})*" if parallel else ""
        return grammar.build(f"{block}{more}")

    @classmethod
    def _argument(cls, grammar: Grammar, key: str | None, schema: Mapping[str, Any]) -> str:
        """Return an expression for one argument; its name is free if `key` is None."""
        types = SchemaNode(schema).types
        options = []
        for opener, is_text in cls.value_opens.items():
            before = grammar.text(f"{cls.argument_open}{key}{opener}")
            if key is None:
                before = f"{grammar.text(cls.argument_open)} {FREE_KEY} {grammar.text(opener)}"
            before += ' "\\n"' if cls.has_value_lines else ""
            closing = cls.value_end(opener).closers[0]
            may_be_text = types is None or "string" in types
            if may_be_text and is_text is not False:
                options.append(f"{before} {cls._text_value(grammar, schema, closing)}")
                continue
            others = (types or _NO_TEXT) - {"string"}
            if is_text is not True and others:
                part = {"type": sorted(others)} if may_be_text else schema
                options.append(f"{before} {grammar.json(part)} {grammar.text(closing)}")
        return any_of(options)

    @classmethod
    def _text_value(cls, grammar: Grammar, schema: Mapping[str, Any], closing: str) -> str:
        """Return an expression for a value that is text, and what closes it."""
        words = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if words:
            texts = [word if isinstance(word, str) else json.dumps(word) for word in words]
            return f"{any_of([grammar.text(text) for text in texts])} {grammar.text(closing)}"
        return grammar.text_up_to(closing, schema)


@lru_cache(maxsize=64)
def _stop(char: str) -> re.Pattern[str]:
    return re.compile(re.escape(char))
