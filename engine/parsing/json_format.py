"""Formats whose calls are JSON objects between markers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vllm_mlx.engine.parsing.grammar import Grammar, function_of
from vllm_mlx.engine.parsing.json_calls import CallKeys, JsonCallReader
from vllm_mlx.engine.parsing.reader import Steps
from vllm_mlx.engine.parsing.scan import Scan
from vllm_mlx.engine.parsing.tool_format import ToolFormat


class JsonFormat(ToolFormat):
    """Read a JSON object or a list of them behind a trigger, up to a closer where there is one.

    A bracket at the end of a trigger is part of the JSON itself.
    """

    keys: ClassVar[CallKeys] = CallKeys()
    #: What may stand between calls that are no list.
    separators: ClassVar[tuple[str, ...]] = ()
    #: What is written before and behind the calls.
    opening: ClassVar[str] = ""
    closing: ClassVar[str] = ""
    #: Whether calls are written as a list, several in one block.
    is_list: ClassVar[bool] = False

    @classmethod
    def parse(cls, scan: Scan) -> Steps[None]:
        """Read the calls of one block."""
        is_bare = scan.trigger in ("{", "[")
        if scan.trigger[-1] in "{[":
            scan.reader.pos -= 1
        calls = JsonCallReader(scan, cls.keys)
        yield from calls.payload(separators=cls.separators, keeps_unknown=not is_bare)
        if cls.closers and not is_bare:
            yield from scan.close(*cls.closers)

    @classmethod
    def call_object(cls, name: str, arguments: Any) -> dict[str, Any]:
        """Return a call as the object that it is in this format."""
        return {cls.keys.names[0]: name, cls.keys.arguments[0]: arguments}

    @classmethod
    def render_call(cls, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of one call."""
        return cls.render_calls([(name, arguments)])

    @classmethod
    def render_calls(cls, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Return the text of several calls: one list, or one block each."""
        objects = [cls.call_object(name, arguments) for name, arguments in calls]
        if cls.is_list:
            return f"{cls.opening}{_dump(objects)}{cls.closing}"
        return cls.between.join(f"{cls.opening}{_dump(o)}{cls.closing}" for o in objects)

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
        options = [_closed(cls.call_object(n, s), s) for n, s in map(function_of, tools)]
        schema = options[0] if len(options) == 1 else {"anyOf": options}
        if cls.is_list:
            schema = {"type": "array", "items": schema, "minItems": 1}
            if not parallel:
                schema["maxItems"] = 1
        call = grammar.json(schema)
        block = f"{grammar.text(cls.opening)} {call} {grammar.text(cls.closing)}"
        if parallel and not cls.is_list:
            return grammar.build(f"{block} ({grammar.text(cls.between)} {block})*")
        return grammar.build(block)


def _closed(shape: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object of this shape, in which `arguments` is a schema itself."""
    properties: dict[str, Any] = {}
    for key, value in shape.items():
        if value is arguments:
            properties[key] = value
        elif isinstance(value, Mapping):
            properties[key] = _closed(value, arguments)
        else:
            properties[key] = {"const": value}
    return {
        "type": "object",
        "properties": properties,
        "required": list(shape),
        "additionalProperties": False,
    }


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
