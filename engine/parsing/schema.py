"""What a tool's JSON schema says of a value: its types and the schemas of its parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: Bounds on chains of references and of combined schemas, which may be circular, and on how many
#: schemas are looked at for one answer.
_MAX_DEPTH = 16
_MAX_SCHEMAS = 256

#: Keywords that say more of a value's type than `type`, `enum` and `const`.
_COMBINING = {"anyOf", "oneOf", "allOf", "$ref", "nullable"}
#: Keywords that say something of the parts of a value.
_SHAPING = {"properties", "additionalProperties", "items", *_COMBINING}

_SINGLE = {name: frozenset([name]) for name in ("string", "integer", "object", "array", "boolean")}

_OF_PYTHON = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}


class SchemaNode:
    """Answer for one place in a schema which JSON types are allowed there.

    Only types steer the parsers, never the finer rules: a value that breaks those is the model's
    answer all the same.
    """

    __slots__ = ("_children", "_is_free", "_root", "_schema", "types")

    def __init__(self, schema: Any, root: Any = None) -> None:
        self._schema = schema
        self._root = schema if root is None else root
        #: Allowed types; None allows all.
        self.types: frozenset[str] | None = self._types_of(schema, 0, itertools.count())
        self._children: dict[str | None, SchemaNode] = {}
        self._is_free = not isinstance(schema, Mapping) or not _SHAPING & schema.keys()

    def child(self, key: str) -> SchemaNode:
        """Return the schema of the member `key` of an object."""
        return self._part(key)

    def item(self) -> SchemaNode:
        """Return the schema of the elements of an array."""
        return self._part(None)

    @property
    def properties(self) -> list[str]:
        """Return the names of an object's declared members, in order."""
        names: dict[str, None] = {}
        for schema in self._variants(self._schema):
            members = schema.get("properties")
            if isinstance(members, Mapping):
                names.update(dict.fromkeys(map(str, members)))
        return list(names)

    def _part(self, key: str | None) -> SchemaNode:
        if self._is_free:
            return ANYTHING
        known = self._children.get(key)
        if known is None:
            found = [
                part
                for schema in self._variants(self._schema)
                for part in _declared_part(schema, key)
            ]
            if not found:
                return ANYTHING
            merged = found[0] if len(found) == 1 else {"anyOf": found}
            known = self._children[key] = SchemaNode(merged, self._root)
        return known

    def _variants(self, schema: Any) -> list[Mapping[str, Any]]:
        """Return `schema` and every schema that it refers to or is combined of, each once."""
        found: dict[int, Mapping[str, Any]] = {}
        pending = [schema]
        while pending and len(found) < _MAX_SCHEMAS:
            schema = pending.pop(0)
            if not isinstance(schema, Mapping) or id(schema) in found:
                continue
            found[id(schema)] = schema
            if isinstance(schema.get("$ref"), str):
                pending.append(self._resolve(schema["$ref"]))
            for word in ("anyOf", "oneOf", "allOf"):
                pending += _listed(schema.get(word))
        return list(found.values())

    def _types_of(self, schema: Any, depth: int, count: Iterator[int]) -> frozenset[str] | None:
        """Return the types that `schema` allows; None, too, where that goes too far to tell."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or next(count) > _MAX_SCHEMAS:
            return None
        if not _COMBINING & schema.keys():
            return self._own_types(schema)

        def types_of(part: Any) -> frozenset[str] | None:
            return self._types_of(part, depth + 1, count)

        types = self._own_types(schema)
        narrower = [types_of(option) for option in _listed(schema.get("allOf"))]
        if isinstance(schema.get("$ref"), str):
            narrower.append(types_of(self._resolve(schema["$ref"])))
        for word in ("anyOf", "oneOf"):
            options = [types_of(option) for option in _listed(schema.get(word))]
            if options and None not in options:
                narrower.append(frozenset().union(*(o for o in options if o is not None)))
        for other in narrower:
            if other is not None:
                types = other if types is None else (types & other or types)
        if types is not None and schema.get("nullable") is True:
            types |= {"null"}
        return types

    def _own_types(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        declared = schema.get("type")
        if isinstance(declared, str):
            return _SINGLE.get(declared) or frozenset([declared.lower()])
        if isinstance(declared, Sequence) and declared:
            return frozenset(str(name).lower() for name in declared)
        values = list(_listed(schema.get("enum")))
        if "const" in schema:
            values.append(schema["const"])
        if values:
            return frozenset(_OF_PYTHON.get(type(value), "object") for value in values)
        if "properties" in schema:
            return frozenset(["object"])
        return frozenset(["array"]) if "items" in schema else None

    def _resolve(self, reference: str) -> Any:
        """Return what a local reference (`#/$defs/name`) points to, None if nothing."""
        target = self._root
        if not reference.startswith("#"):
            return None
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or name not in target:
                return None
            target = target[name]
        return target


class ToolSet:
    """Know the tools of one request: their names and the schemas of their arguments.

    `tools` are OpenAI tool objects (`{"type": "function", "function": {...}}`) or their inner
    function objects. None knows no names and accepts any that looks like one.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._nodes: dict[str, SchemaNode] | None = None
        if tools is not None:
            functions = [tool.get("function", tool) for tool in tools]
            self._nodes = {
                str(function["name"]): SchemaNode(function.get("parameters") or {})
                for function in functions
                if isinstance(function, Mapping) and "name" in function
            }

    def knows(self, name: str) -> bool:
        """Say whether a call may have this name."""
        if self._nodes is not None:
            return name in self._nodes
        return 0 < len(name) <= 128 and all(c.isalnum() or c in "_-.:/" for c in name)

    def may_start(self, text: str) -> bool:
        """Say whether a name, perhaps with white space around it, may begin with `text`."""
        text = text.lstrip()
        if self._nodes is None:
            return not text or self.knows(text.rstrip())
        bare = text.rstrip()
        return any(n == bare or (n.startswith(text)) for n in self._nodes)

    def schema(self, name: str) -> SchemaNode:
        """Return the schema of the arguments of `name`."""
        return ANYTHING if self._nodes is None else self._nodes.get(name, ANYTHING)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _declared_part(schema: Mapping[str, Any], key: str | None) -> Iterator[Any]:
    """Yield what `schema` itself declares of a member, or of an array's elements (None)."""
    if key is None:
        if isinstance(schema.get("items"), Mapping):
            yield schema["items"]
        return
    members = schema.get("properties")
    if isinstance(members, Mapping) and key in members:
        yield members[key]
    elif isinstance(schema.get("additionalProperties"), Mapping):
        yield schema["additionalProperties"]


#: Allows everything.
ANYTHING = SchemaNode({})
