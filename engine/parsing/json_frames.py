"""What a value scanner remembers: the brackets that are open, and what is due."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_mlx.engine.parsing.literals import OPEN, SCALAR, STRING
from vllm_mlx.engine.parsing.schema import ANYTHING, SchemaNode

Emit = Callable[[str], None]

#: What comes next in a value: the value itself, what stands behind an opening bracket, behind a
#: comma in an object, behind a value, nothing. Plain numbers, for the sake of speed.
VALUE, FIRST, KEY_DUE, NEXT, NOTHING = range(5)


@dataclass(slots=True)
class Frame:
    """One bracket that is open."""

    closing: str
    #: What is emitted for `closing`.
    emits: str
    is_object: bool
    node: SchemaNode
    #: The way out to return to once this bracket closes: what is in it is text for the outside.
    outside: Emit | None = None


_ANY_OBJECT = Frame("}", "}", is_object=True, node=ANYTHING)
_ANY_ARRAY = Frame("]", "]", is_object=False, node=ANYTHING)


def plain_frame(char: str, node: SchemaNode) -> Frame:
    """Return the frame of an opening bracket that may stay as it is."""
    if node is ANYTHING:
        return _ANY_OBJECT if char == "{" else _ANY_ARRAY
    closing = "}" if char == "{" else "]"
    return Frame(closing, closing, char == "{", node)


def is_plain(kind: int | None, types: frozenset[str] | None) -> bool:
    """Say whether a token that begins a value may stay as it is where `types` are allowed."""
    if types is None:
        return kind in (STRING, SCALAR, OPEN)
    if kind == STRING:
        return "string" in types
    if kind == SCALAR:
        return bool(types - {"string", "null"})
    return kind == OPEN and ("string" not in types or bool(types & {"object", "array"}))
