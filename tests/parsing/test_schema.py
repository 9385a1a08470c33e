"""Hold what the parsers read from tools' schemas: the types of values, whatever form they have."""

from __future__ import annotations

import time
from typing import Any

import pytest

from vllm_mlx.engine.parsing.schema import ANYTHING, SchemaNode, ToolSet


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, None),
        (True, None),
        ({"type": "STRING"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": True}, {"boolean"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, {"string", "number"}),
        ({"oneOf": [{"type": "string"}, {}]}, None),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"$ref": "#/$defs/a/b~1c", "$defs": {"a": {"b/c": {"type": "array"}}}}, {"array"}),
        ({"$ref": "#/nowhere"}, None),
        ({"$ref": "https://example.com/schema"}, None),
        ({"$ref": "#"}, None),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str] | None) -> None:
    """Every way to say what a value may be gives its types, and what says nothing allows all."""
    assert SchemaNode(schema).types == types


def test_parts_of_a_schema() -> None:
    """Members and elements are found through references and combinations."""
    root = {
        "type": "object",
        "properties": {"list": {"type": "array", "items": {"$ref": "#/$defs/row"}}},
        "anyOf": [{"properties": {"mode": {"type": "string"}}}, {"$ref": "#/$defs/row"}],
        "additionalProperties": {"type": "boolean"},
        "$defs": {"row": {"type": "object", "properties": {"mode": {"type": "integer"}}}},
    }
    node = SchemaNode(root)
    assert node.child("list").item().child("mode").types == {"integer"}
    assert node.child("mode").types == {"boolean", "string", "integer"}
    assert node.child("other").types == {"boolean"}
    assert node.properties == ["list", "mode"]
    assert SchemaNode({"type": "object"}).child("x") is ANYTHING


def test_circular_schemas_end() -> None:
    """References in circles and combinations of combinations are given up in milliseconds."""
    names = [f"n{index}" for index in range(20)]
    every = [{"$ref": f"#/$defs/{name}"} for name in names]
    root = {"anyOf": every, "$defs": {name: {"anyOf": every, "oneOf": every} for name in names}}
    start = time.process_time()
    node = SchemaNode(root)
    assert node.types is None
    assert node.child("a").types is None
    assert node.properties == []
    assert time.process_time() - start < 0.5


def test_names_of_tools() -> None:
    """Known names are known by any beginning; without tools every name that looks like one is."""
    tools = ToolSet([{"function": {"name": "get"}}, {"name": "get_all", "parameters": None}])
    assert [tools.knows(name) for name in ("get", "get_all", "ge", "got", "")] == [1, 1, 0, 0, 0]
    assert [tools.may_start(text) for text in ("", " g", "get ", "get_", "get x", "geta")] == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    anything = ToolSet(None)
    assert [anything.knows(name) for name in ("a-b.c:d/e", "", "a b", "a{")] == [1, 0, 0, 0]
    assert ToolSet([]).may_start("") is False
    assert tools.schema("get_all").types is None
