"""JSON schemas of every kind: our own, keyword by keyword, and those that real tools publish."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

_ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string", "maxLength": 20}, "zip": {"pattern": "^[0-9]{5}$"}},
    "required": ["street", "zip"],
    "additionalProperties": False,
}


def _object(required: list[str] | None = None, /, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


#: By name. Little is open-ended, so that a small model comes to an end.
OWN: dict[str, dict[str, Any]] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer", "minimum": -1000, "maximum": 1000},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 10_000},
    "decimal": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 100},
    "enum": {"enum": ["a", 'b "quoted"', 3, 4.5, None, True, {"x": [1, 2]}, ["y"]]},
    "const": {"const": {"kind": "fixed", "values": [1, 2, {"deep": None}]}},
    "short string": {"type": "string", "minLength": 3, "maxLength": 8},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
    "unanchored pattern": {"type": "string", "pattern": "b+c", "maxLength": 20},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "types": {"type": ["integer", "null", "boolean"]},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer", "maximum": 9}, {"enum": ["a", "b"]}],
        "items": False,
        "minItems": 2,
    },
    "tuple of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"const": 1}, {"enum": ["x", "y"]}],
        "additionalItems": False,
        "minItems": 2,
    },
    "matrix": {
        "type": "array",
        "items": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "minItems": 2,
            "maxItems": 2,
        },
        "maxItems": 3,
    },
    "object": _object(name={"type": "string", "maxLength": 15}, on={"type": "boolean"}),
    "empty object": {"type": "object", "additionalProperties": False},
    "optional properties": _object(
        ["b"], a={"type": "boolean"}, b={"type": "null"}, c={"enum": [1, 2]}, d={"const": "d"}
    ),
    "only optional properties": _object([], a={"type": "boolean"}, b={"type": "null"}),
    "odd names": _object(**{'a "b"': {"const": 1}, "ü\n": {"const": 2}, "": {"const": 3}}),
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^[a-d]{1,2}$": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "additional properties": {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
    },
    "nested": _object(
        person=_object(home=_ADDRESS, age={"type": "integer", "minimum": 0, "maximum": 120})
    ),
    "array of objects": {"type": "array", "items": _ADDRESS, "minItems": 1, "maxItems": 2},
    "any of": {"anyOf": [{"type": "boolean"}, _ADDRESS, {"const": "none"}]},
    "one of by type": {"oneOf": [{"type": "boolean"}, {"type": "null"}, {"enum": ["x"]}]},
    "one of by tag": {
        "oneOf": [
            _object(kind={"const": "cat"}, lives={"type": "integer", "minimum": 1, "maximum": 9}),
            _object(kind={"const": "dog"}, is_good={"const": True}),
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"a": {"minimum": 3, "maximum": 5}, "b": {"enum": ["x", "y"]}}},
            {"required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": {}, "b": {}},
    },
    "definitions": {
        "$defs": {
            "level": {"enum": ["low", "high"]},
            "box": _object(top={"$ref": "#/$defs/level"}),
        },
        "type": "array",
        "items": {"$ref": "#/$defs/box"},
        "maxItems": 3,
    },
    "recursive": {
        "$defs": {
            "node": _object(
                ["value"],
                value={"type": "boolean"},
                next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            )
        },
        "$ref": "#/$defs/node",
    },
    "nullable reference": {
        "$defs": {"home": _ADDRESS},
        **_object(home={"anyOf": [{"$ref": "#/$defs/home"}, {"type": "null"}]}),
    },
    "annotated": {
        "title": "Answer",
        "description": "Of a question",
        "examples": [{"yes": True}],
        **_object(yes={"type": "boolean", "title": "Yes", "default": False}),
    },
    "many properties": _object(**{f"p{number}": {"type": "boolean"} for number in range(20)}),
    "long enum": {"enum": [f"value {number * 37 % 1000}" for number in range(500)]},
    "emoji": _object(mood={"enum": ["😀", "🙁", "日本", "naïve"]}),
}


def real_schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the schema of each file format that check-jsonschema knows."""
    folder = files("check_jsonschema") / "builtin_schemas" / "vendor"
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".json"):
            yield entry.name.removesuffix(".json"), json.loads(entry.read_text(encoding="utf-8"))


def real_parts(limit: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield up to `limit` of each format's definitions of objects, with all that they refer to."""
    for name, schema in real_schemas():
        for key in ("definitions", "$defs"):
            definitions = schema.get(key, {})
            objects = [
                part
                for part, content in definitions.items()
                if isinstance(content, dict) and "properties" in content
            ]
            for part in objects[:limit]:
                yield f"{name}: {part}", {"$ref": f"#/{key}/{part}", key: definitions}
