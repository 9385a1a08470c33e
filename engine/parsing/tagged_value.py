"""Read the value of an argument that stands between tags, as JSON that follows its schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_mlx.engine.parsing.inner_value import InnerValue
from vllm_mlx.engine.parsing.json_value import ValueScanner, text_to_json
from vllm_mlx.engine.parsing.literals import escape
from vllm_mlx.engine.parsing.markers import marker_set
from vllm_mlx.engine.parsing.reader import WHITE_SPACE, Reader, Steps
from vllm_mlx.engine.parsing.schema import SchemaNode

Emit = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ValueEnd:
    """Say what ends a value: one of `closers`, with one of `followers` behind white space.

    Values are not escaped in these formats, so a closer alone may be part of one; with what must
    follow it hardly ever is.
    """

    closers: tuple[str, ...]
    followers: tuple[str, ...]


def read_value(
    reader: Reader, emit: Emit, node: SchemaNode, end: ValueEnd, *, is_text: bool | None = None
) -> Steps[None]:
    """Read a value up to its end and emit it as JSON.

    A string is emitted as it comes, and so is an object or an array. Where the schema leaves open
    whether the value is a string, `is_text` says so; if that is None, the value decides when it
    is whole.
    """
    types = node.types
    if types is None and is_text is not None:
        types = frozenset(["string"]) if is_text else None
    if types is not None and not types - {"string"}:
        emit('"')
        yield from _text(reader, lambda text: emit(escape(text)), end)
        emit('"')
        return
    if types is not None and not types - {"object", "array", "null"}:
        while (yield from reader.peek()) in WHITE_SPACE:
            reader.pos += 1
        if (yield from reader.peek()) in "{[":
            inner = InnerValue(emit, lambda inner: ValueScanner(inner, emit).value(node))
            yield from _text(reader, inner.add, end)
            inner.finish()
            return
    parts: list[str] = []
    yield from _text(reader, parts.append, end)
    emit(text_to_json("".join(parts), types))


def _text(reader: Reader, emit: Emit, end: ValueEnd) -> Steps[None]:
    """Hand on the text before the end of the value and use up the closer."""
    markers = marker_set(*end.closers)

    def quiet(text: str) -> bool:
        return not markers.begins_in(text)

    while True:
        index, closer = markers.find(reader.text, reader.pos, closed=False)
        if index > reader.pos:
            emit(reader.text[reader.pos : index])
            reader.pos = index
        if closer is None:
            if reader.mark is None and reader.pos == len(reader.text):
                reader.quiet, reader.sink = quiet, emit
            yield from reader.more()
        elif (yield from _is_end(reader, len(closer), end.followers)):
            reader.pos += len(closer)
            return
        else:
            emit(closer)
            reader.pos += len(closer)


def _is_end(reader: Reader, size: int, followers: tuple[str, ...]) -> Steps[bool]:
    """Say whether one of `followers` stands behind the next `size` characters."""
    longest = max(map(len, followers))
    while True:
        while (
            reader.pos + size < len(reader.text) and reader.text[reader.pos + size] in WHITE_SPACE
        ):
            size += 1
        ahead = reader.text[reader.pos + size : reader.pos + size + longest]
        if any(ahead.startswith(follower) for follower in followers):
            return True
        if not any(follower.startswith(ahead) for follower in followers):
            return False
        if reader.closed:
            return True
        yield
