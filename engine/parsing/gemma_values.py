"""Gemma 4's notation of values: JSON with bare keys, and a quote of its own for strings."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mlx.engine.parsing.grammar import (
    FREE_KEY,
    Grammar,
    any_of,
    has_free_keys,
    member_schemas,
    quoted,
)
from vllm_mlx.engine.parsing.literals import Dialect
from vllm_mlx.engine.parsing.schema import SchemaNode

QUOTE = '<|"|>'

GEMMA = Dialect(raw_quote=QUOTE, has_bare_keys=True)

_BARE_KEY = re.compile(r"[^\s:,{}\[\]\"'<]+")


def render_gemma(value: Any) -> str:
    """Return a value in this notation."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_key(k)}:{render_gemma(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(map(render_gemma, value)) + "]"
    return json.dumps(value)


def gemma_grammar(grammar: Grammar, schema: Mapping[str, Any]) -> str:
    """Return an expression for a value that follows `schema`, as far as its types go."""
    return _Values(grammar, schema).value(schema, 0)


class _Values:
    def __init__(self, grammar: Grammar, root: Mapping[str, Any]) -> None:
        self._grammar = grammar
        self._root = root
        self._anything: str | None = None

    def value(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > 8:
            return self.anything()
        words = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if words:
            return any_of([self._grammar.text(render_gemma(word)) for word in words])
        types = SchemaNode(schema, self._root).types
        if types is None or schema.keys() & {"anyOf", "oneOf", "allOf", "$ref"}:
            return self.anything()
        return any_of([self._typed(schema, name, depth) for name in sorted(types)])

    def _typed(self, schema: Mapping[str, Any], name: str, depth: int) -> str:
        grammar = self._grammar
        if name == "string":
            return self._string(schema)
        if name == "array":
            item = grammar.rule("item", self.value(schema.get("items"), depth + 1))
            return f'("[" {grammar.elements(item, schema, quoted(","))} "]")'
        if name != "object":
            return grammar.json({**schema, "type": name})
        full = {"properties": {}, **schema}
        if has_free_keys(full) or not full["properties"]:
            member = f'{FREE_KEY} ":" {self.anything()}'
            inside = f'({member} ("," {member})*)?' if has_free_keys(full) or depth else '""'
        else:
            inside = grammar.ordered(
                [
                    (f"{quoted(f'{_key(key)}:')} {self.value(part, depth + 1)}", is_required)
                    for key, part, is_required in member_schemas(full)
                ],
                '","',
            )
        return f'("{{" {inside} "}}")'

    def _string(self, schema: Mapping[str, Any] | None = None) -> str:
        return f"{self._grammar.text(QUOTE)} {self._grammar.text_up_to(QUOTE, schema)}"

    def anything(self) -> str:
        """Return a rule for any value."""
        if self._anything is None:
            scalar = self._grammar.json({"type": ["number", "boolean", "null"]})
            name = self._anything = self._grammar.reserve("anything")
            member = f'{FREE_KEY} ":" {name}'
            self._grammar.define(
                name,
                f'{scalar} | {self._string()} | "[" ({name} ("," {name})*)? "]" '
                f'| "{{" ({member} ("," {member})*)? "}}"',
            )
        return self._anything


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else f"{QUOTE}{key}{QUOTE}"
