"""Write grammars, in llguidance's dialect of Lark, that force calls in a given format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mlx.engine.parsing.json_grammar import json_expression

#: Name of an argument that a tool takes without having declared it.
FREE_KEY = "/[A-Za-z_][A-Za-z0-9_]*/"

#: Between two parts of JSON. Without a bound a model that has lost its way writes white space until
#: its tokens are used up.
_WHITE_SPACE = r" ?(\r?\n[ \t]{0,64})?"

#: Bounds on the length of a text that are enforced; larger ones would make large automata.
_MAX_LENGTH = 4096


def function_of(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the schema of the arguments of an OpenAI tool object."""
    function = tool.get("function", tool)
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    return str(function["name"]), {"type": "object", **parameters, "properties": properties}


def has_free_keys(schema: Mapping[str, Any]) -> bool:
    """Say whether a tool declares none of its arguments, yet takes some."""
    return not schema["properties"] and schema.get("additionalProperties", False) is not False


def member_schemas(schema: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Return name, schema and necessity of each declared argument.

    A schema takes the definitions along that it may refer to.
    """
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required") or ()
    return [
        (key, {**(value if isinstance(value, Mapping) else {}), **definitions}, key in required)
        for key, value in schema["properties"].items()
    ]


class Grammar:
    """Collect the rules of one grammar.

    `special_tokens` gives the ids of markers that are special tokens: no text matches those, so
    that each is written as its id wherever it stands in a literal.
    """

    def __init__(self, special_tokens: Mapping[str, int] | None = None) -> None:
        self._special = dict(special_tokens or {})
        markers = sorted(self._special, key=len, reverse=True)
        self._markers = re.compile(f"({'|'.join(map(re.escape, markers)) or '(?!)'})")
        self._rules: list[str] = []
        self._num_names = 0

    def text(self, literal: str) -> str:
        """Return an expression for exactly this text."""
        pieces = [
            f"<[{self._special[piece]}]>" if piece in self._special else quoted(piece)
            for piece in self._markers.split(literal)
            if piece
        ]
        return " ".join(pieces) or '""'

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for JSON that follows `schema`."""
        return self.rule("json", json_expression(schema))

    def rule(self, name: str, expression: str, attributes: str = "") -> str:
        """Add a rule and return its own name."""
        unique = self.reserve(name)
        self.define(unique + attributes, expression)
        return unique

    def reserve(self, name: str) -> str:
        """Return a name for a rule that is defined later, perhaps by itself."""
        self._num_names += 1
        return f"{name}_{self._num_names}"

    def define(self, name: str, expression: str) -> None:
        """Define a rule whose name was reserved."""
        self._rules.append(f"{name}: {expression}")

    def text_up_to(self, closing: str, schema: Mapping[str, Any] | None = None) -> str:
        """Return an expression for any text and the first `closing` behind it.

        The text is as long as `schema`, that of a string, says.
        """
        body = f"/(?s:.{_length(schema or {})})/"
        if self._markers.search(closing):
            return f"{self.rule('text', body)} {self.text(closing)}"
        return self.rule("text", body, f"[suffix={quoted(closing)}]")

    def ordered(self, parts: Sequence[tuple[str, bool]], separator: str = '""') -> str:
        """Return an expression for `parts` in their order, of which only some are necessary."""
        behind, first = '""', '""'
        for expression, is_required in reversed(parts):
            options = [f"{expression} {behind}"] + ([] if is_required else [first])
            first = self.rule("arguments", " | ".join(options))
            options = [f"{separator} {expression} {behind}"] + ([] if is_required else [behind])
            behind = self.rule("more", " | ".join(options))
        return first

    def elements(self, item: str, schema: Mapping[str, Any], separator: str = '""') -> str:
        """Return an expression for as many of `item` as an array's schema allows."""
        low, high = int(schema.get("minItems") or 0), schema.get("maxItems")
        if high is not None and int(high) < 1:
            return '""'
        more = f"{{{max(low - 1, 0)},{'' if high is None else int(high) - 1}}}"
        some = f"{item} ({separator} {item}){more}"
        return f"({some})" if low else f"({some})?"

    def build(self, start: str) -> str:
        """Return the grammar's text; `start` is its root expression."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, ""])


def _length(schema: Mapping[str, Any]) -> str:
    """Return how often any character may come in a string of this schema, for a pattern."""
    low, high = schema.get("minLength"), schema.get("maxLength")
    bounds = [
        bound if isinstance(bound, int) and 0 <= bound <= _MAX_LENGTH else None
        for bound in (low, high)
    ]
    if bounds == [None, None] or (bounds[1] is not None and bounds[1] < (bounds[0] or 0)):
        return "*"
    return f"{{{bounds[0] or 0},{'' if bounds[1] is None else bounds[1]}}}"


def quoted(text: str) -> str:
    """Return `text` as a string of the grammar's language."""
    return json.dumps(text, ensure_ascii=False)


def any_of(options: Sequence[str]) -> str:
    """Return an expression for one of several."""
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"
