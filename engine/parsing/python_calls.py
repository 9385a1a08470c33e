"""Read calls that are Python: `f(city="Paris", days=3)`."""

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
    quoted,
)
from vllm_mlx.engine.parsing.json_value import ValueScanner
from vllm_mlx.engine.parsing.literals import PYTHON, quote
from vllm_mlx.engine.parsing.reader import MismatchError, Steps
from vllm_mlx.engine.parsing.scan import Scan
from vllm_mlx.engine.parsing.schema import SchemaNode

NAME_END = re.compile(r"\(")
_KEYWORD_END = re.compile(r"[^A-Za-z0-9_]")


def python_call(scan: Scan) -> Steps[None]:
    """Read one call, from its name to its closing parenthesis."""
    name = yield from scan.name(NAME_END)
    yield from scan.reader.expect("(")
    scan.start(name)
    yield from keyword_arguments(scan)
    scan.end()


def python_list(scan: Scan) -> Steps[None]:
    """Read the calls of a list, from behind its opening bracket to behind its closing one."""
    reader = scan.reader
    while True:
        yield from reader.space()
        yield from python_call(scan)
        yield from reader.space()
        if (yield from reader.find(",", "]")) == "]":
            reader.pos += 1
            return
        scan.candidate()
        yield from reader.expect(",")


def keyword_arguments(scan: Scan) -> Steps[None]:
    """Read the arguments of the open call up to the closing parenthesis.

    Arguments without a keyword get the names of the schema, in its order.
    """
    reader = scan.reader
    unnamed = iter(scan.schema.properties)
    separator = "{"
    while True:
        yield from reader.space()
        if (yield from reader.accept(")")) is not None:
            scan.emit("{}" if separator == "{" else "}")
            scan.whole()
            return
        key = yield from _keyword(scan)
        if key is None:
            key = next(unnamed, None)
        if key is None:
            raise MismatchError
        scan.emit(f"{separator}{quote(key)}: ")
        separator = ", "
        yield from reader.space()
        yield from ValueScanner(reader, scan.emit, PYTHON).value(scan.schema.child(key))
        yield from reader.space()
        if (yield from reader.find(",", ")")) == ",":
            reader.pos += 1
        elif reader.text[reader.pos] != ")":
            raise MismatchError


def _keyword(scan: Scan) -> Steps[str | None]:
    """Read `key=`; return None and read nothing where a value comes without one."""
    reader = scan.reader
    size = 0
    while True:
        found = _KEYWORD_END.search(reader.text, reader.pos + size)
        if found is not None:
            break
        size = len(reader.text) - reader.pos
        yield from reader.more()
    size = found.start() - reader.pos
    key = reader.text[reader.pos : found.start()]
    while (char := reader.text[reader.pos + size]) in " \t":
        size += 1
        while reader.pos + size >= len(reader.text):
            yield from reader.more()
    if not key or key[0].isdigit() or char != "=":
        return None
    reader.pos += size + 1
    return key


def render_python(name: str, arguments: Mapping[str, Any]) -> str:
    """Return one call as Python, its values as JSON except for the three words that differ."""
    values = ", ".join(f"{key}={_literal(value)}" for key, value in arguments.items())
    return f"{name}({values})"


def python_grammar(grammar: Grammar, tool: Mapping[str, Any], *, suffix: str = "") -> str:
    """Return an expression for a call to one tool; its values are written as JSON."""
    name, schema = function_of(tool)
    parts = [
        (f"{grammar.text(f'{key}=')} {_value_grammar(grammar, part)}", is_required)
        for key, part, is_required in member_schemas(schema)
    ]
    inside = grammar.ordered(parts, grammar.text(", "))
    if has_free_keys(schema):
        free = f'{FREE_KEY} "=" {grammar.json({})}'
        inside = f'({free} (", " {free})*)?'
    return f"{grammar.text(f'{name}{suffix}(')} {inside} {grammar.text(')')}"


def _value_grammar(grammar: Grammar, schema: Mapping[str, Any]) -> str:
    """Return an expression for a value: JSON, or one of Python's words where these differ."""
    types = SchemaNode(schema).types
    if types is None or "enum" in schema or "const" in schema:
        return grammar.json(schema)
    words = {"boolean": ["True", "False"], "null": ["None"]}
    options = [quoted(word) for name in sorted(types) for word in words.get(name, ())]
    if types - words.keys():
        options.append(grammar.json({**schema, "type": sorted(types - words.keys())}))
    return any_of(options)


def _literal(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{quote(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
