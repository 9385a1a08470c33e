"""JSON schemas as llguidance takes them: without what it stumbles over, and with little space."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

#: Between two parts of JSON: nothing, a space, or a line break and an indentation. Without a bound
#: a model that has lost its way writes white space until its tokens are used up.
JSON_WHITE_SPACE = r" ?(\r?\n[ \t]{0,64})?"

#: The formats of strings that llguidance enforces; it refuses others, which schemas may use freely.
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
#: Keywords whose values are no schemas.
_VALUES = frozenset({"const", "enum", "default", "examples"})
#: Keywords whose values hold schemas by name.
_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)


def json_expression(schema: Any, white_space: str | None = JSON_WHITE_SPACE) -> str:
    """Return an expression of llguidance's Lark for JSON that follows `schema`.

    `white_space` is the pattern of what may stand between its parts; None allows none. Left out is
    what asks for nothing: formats that JSON Schema leaves open, and `uniqueItems` false. Raises
    RecursionError for a schema that is nested too deeply.
    """
    schema = _plain(schema)
    if isinstance(schema, dict):
        # llguidance's own options, which a schema might carry, are not for its author to set.
        schema["x-guidance"] = (
            {"whitespace_flexible": False}
            if white_space is None
            else {"whitespace_pattern": white_space}
        )
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _plain(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_plain(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            found[key] = {name: _plain(part) for name, part in value.items()}
        elif key in _VALUES:
            found[key] = value
        elif not _asks_nothing(key, value):
            found[key] = _plain(value)
    return found


def _asks_nothing(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in _FORMATS
    return key == "uniqueItems" and value is False
