"""Read one value as it comes and hand it on as valid JSON that follows a schema.

Text that is JSON already passes unchanged, white space included. Put right on the way: raw control
characters and unknown escapes in strings, trailing commas, Python's quotes, words and tuples; and
types, where the schema asks for others than the model wrote (`"50"` for an integer, an object for
a string).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from vllm_mlx.engine.parsing.json_frames import (
    FIRST,
    KEY_DUE,
    NEXT,
    NOTHING,
    VALUE,
    Frame,
    is_plain,
    plain_frame,
)
from vllm_mlx.engine.parsing.literals import (
    CLOSE,
    COMMA,
    JSON,
    KEY,
    NUMBER,
    OPEN,
    Dialect,
    Tokens,
    escape,
    integral,
    may_be_scalar,
    quote,
    scalar,
    unescape,
)
from vllm_mlx.engine.parsing.quoted import escape_sequence, plain_run, raw_string
from vllm_mlx.engine.parsing.reader import MismatchError, Reader, Steps
from vllm_mlx.engine.parsing.schema import ANYTHING, SchemaNode

Emit = Callable[[str], None]

_SPACE = re.compile(r"[ \t\r\n]*+")
#: What ends a number or a word.
_DELIMITER = re.compile(r"[\s,:{}\[\]()\"'<]")
_BARE_KEY_END = re.compile(r"[\s:,{}\[\]]")

#: Deepest nesting; JSON readers of clients fail at about a thousand.
MAX_DEPTH = 500


class ValueScanner:
    """Read values from `reader` and emit them as JSON.

    The reader's `pos` is at all times behind what was emitted, except within a key, a number or
    a string that must be whole before it can be emitted.
    """

    def __init__(self, reader: Reader, emit: Emit, dialect: Dialect = JSON) -> None:
        self._reader = reader
        self._emit = emit
        self._dialect = dialect
        self._frames: list[Frame] = []
        self._due = VALUE
        #: The schema of the value that is due.
        self._node = ANYTHING
        self._quotes = dialect.quotes
        if dialect.raw_quote is not None:
            self._quotes = (dialect.raw_quote, *dialect.quotes)

    def value(self, node: SchemaNode = ANYTHING) -> Steps[None]:
        """Read one value with the white space before it; raises `MismatchError` if it is none."""
        self._due, self._node = VALUE, node
        while self._due is not NOTHING:
            if self._dialect.tokens is not None:
                self._pass_tokens(self._dialect.tokens)
            if self._due is VALUE:
                yield from self._begin(self._node)
            elif self._due is FIRST:
                yield from self._first(self._frames[-1])
            elif self._due is KEY_DUE:
                yield from self._key(self._frames[-1].node)
            elif self._due is NEXT:
                yield from self._next(self._frames[-1])

    def string(self) -> Steps[str]:
        """Read a string and return what it stands for; emits nothing."""
        opening = yield from self._reader.accept(*self._quotes)
        if opening is None:
            raise MismatchError
        return unescape((yield from self._collect(opening)))

    def string_into(self, emit: Emit) -> Steps[None]:
        """Read a string and hand its inside to `emit`, in pieces of whole JSON escapes."""
        opening = yield from self._reader.accept(*self._quotes)
        if opening is None:
            raise MismatchError
        yield from self._string(opening, emit)

    def _pass_tokens(self, tokens: Tokens) -> None:
        """Emit what is at hand and can stay as it is, token by token or more at once.

        This is for speed alone: the steps below give the same, and go on where this stops.
        """
        frames = self._frames
        due, node, text, start = self._due, self._node, self._reader.text, self._reader.pos
        pos = start
        while due != NOTHING:
            if due == VALUE and node is ANYTHING and frames and not frames[-1].is_object:
                pos = tokens.elements.match(text, pos).end()  # type: ignore[union-attr]
            elif due == KEY_DUE and frames[-1].node is ANYTHING:
                pos = tokens.members.match(text, pos).end()  # type: ignore[union-attr]
            found = tokens.one.match(text, pos)
            if found is None:
                break
            kind = found.lastindex
            if kind == CLOSE and (due in (NEXT, FIRST)):
                if not self._may_pop(found.group(CLOSE)):
                    break
                frames.pop()
                due = NEXT if frames else NOTHING
            elif kind == COMMA and due == NEXT:
                frame = frames[-1]
                due = KEY_DUE if frame.is_object else VALUE
                node = frame.node.item() if due == VALUE else node
            elif kind == KEY and (due in (KEY_DUE, FIRST)) and frames[-1].is_object:
                node = frames[-1].node.child(unescape(found.group(KEY)[1:-1]))
                due = VALUE
            elif due == VALUE or (due == FIRST and not frames[-1].is_object):
                wanted = node if due == VALUE else frames[-1].node.item()
                if not is_plain(kind, wanted.types) or len(frames) >= MAX_DEPTH:
                    break
                if kind == OPEN:
                    frames.append(plain_frame(found.group(OPEN), wanted))
                    due = FIRST
                else:
                    due = NEXT if frames else NOTHING
            else:
                break
            pos = found.end()
        self._due, self._node = due, node
        if pos > start:
            self._pass_on(pos - start)

    def _may_pop(self, char: str) -> bool:
        """Say whether `char` closes the last bracket, with nothing else to be done."""
        frame = self._frames[-1]
        return frame.closing == char == frame.emits and frame.outside is None

    def _behind_value(self) -> None:
        self._due = NEXT if self._frames else NOTHING

    def _begin(self, node: SchemaNode) -> Steps[None]:
        """Read a scalar, a string or an opening bracket."""
        char = yield from self._visible()
        if char in self._dialect.brackets:
            self._open(char, node)
            return
        for opening in self._quotes:
            if opening[0] == char and (yield from self._reader.accept(opening)):
                yield from self._string_value(opening, node)
                self._behind_value()
                return
        yield from self._scalar_value(node)
        self._behind_value()

    def _open(self, char: str, node: SchemaNode) -> None:
        if len(self._frames) >= MAX_DEPTH:
            raise MismatchError
        is_object = char == "{"
        outside = None
        if not is_plain(OPEN, node.types):
            outside, node = self._emit, ANYTHING
            outside('"')
            self._emit = _escaping(outside)
        emits = "}" if is_object else "]"
        self._frames.append(Frame(self._dialect.brackets[char], emits, is_object, node, outside))
        self._emit("{" if is_object else "[")
        self._reader.pos += 1
        self._due = FIRST

    def _close(self) -> None:
        frame = self._frames.pop()
        self._emit(frame.emits)
        self._reader.pos += 1
        if frame.outside is not None:
            self._emit = frame.outside
            self._emit('"')
        self._behind_value()

    def _first(self, frame: Frame) -> Steps[None]:
        """Go on behind an opening bracket."""
        char = yield from self._visible()
        if char == frame.closing:
            self._close()
        elif frame.is_object:
            yield from self._key(frame.node)
        else:
            self._due, self._node = VALUE, frame.node.item()

    def _next(self, frame: Frame) -> Steps[None]:
        """Go on behind a value."""
        reader = self._reader
        char = yield from self._visible()
        if char == frame.closing:
            self._close()
            return
        if char != ",":
            raise MismatchError
        size = yield from self._space_after(1)
        if reader.text[reader.pos + size] == frame.closing:
            # A trailing comma is let go.
            reader.pos += 1
            return
        self._pass_on(size)
        self._due = KEY_DUE if frame.is_object else VALUE
        self._node = frame.node if frame.is_object else frame.node.item()

    def _key(self, node: SchemaNode) -> Steps[None]:
        """Read a key and its colon."""
        reader, emit = self._reader, self._emit
        yield from self._visible()
        opening = yield from reader.accept(*self._quotes)
        if opening is not None:
            parts: list[str] = []

            def both(part: str) -> None:
                parts.append(part)
                emit(part)

            emit('"')
            yield from self._string(opening, both)
            emit('"')
            key = unescape("".join(parts))
        elif self._dialect.has_bare_keys:
            key = yield from reader.word(_BARE_KEY_END, lambda text: len(text) < 256)
            emit(quote(key))
        else:
            raise MismatchError
        if (yield from self._visible()) != ":":
            raise MismatchError
        self._pass_on(1)
        self._due, self._node = VALUE, node.child(key)

    def _string_value(self, opening: str, node: SchemaNode) -> Steps[None]:
        types = node.types
        if types is None or "string" in types:
            self._emit('"')
            yield from self._string(opening, self._emit)
            self._emit('"')
            return
        text = yield from self._collect(opening)
        self._emit(text_to_json(unescape(text), types, unchanged=f'"{text}"'))

    def _scalar_value(self, node: SchemaNode) -> Steps[None]:
        reader = self._reader
        seen = 0
        while True:
            found = _DELIMITER.search(reader.text, reader.pos + seen)
            end = len(reader.text) if found is None else found.start()
            text = reader.text[reader.pos : end]
            if not may_be_scalar(text):
                raise MismatchError
            if found is not None:
                break
            seen = len(text)
            if reader.closed and not self._frames:
                break
            if reader.closed and (node.types is None or "string" not in node.types):
                self._pass_on(seen)
            yield from reader.more()
        value = scalar(text)
        if value is None:
            raise MismatchError
        types = node.types
        if types is not None and value != "null" and not types - {"string", "null"}:
            value = quote(text)
        self._emit(value)
        reader.pos = end

    def _collect(self, opening: str) -> Steps[str]:
        """Read a whole string and return its JSON text, without quotes."""
        parts: list[str] = []
        yield from self._string(opening, parts.append)
        return "".join(parts)

    def _string(self, opening: str, emit: Emit) -> Steps[None]:
        """Read what follows the opening quote up to the closing one, as JSON text."""
        reader = self._reader
        if opening == self._dialect.raw_quote:
            yield from raw_string(reader, emit, opening)
            return
        is_python = opening == "'" or self._dialect.has_python_escapes
        run = plain_run(opening, is_python=is_python)
        while True:
            found = run.match(reader.text, reader.pos)
            if found is not None and found.end() > reader.pos:
                emit(found.group())
                reader.pos = found.end()
            if reader.pos == len(reader.text) and reader.mark is None:
                reader.quiet, reader.sink = run.fullmatch, emit
            char = yield from reader.peek()
            if char == opening:
                reader.pos += 1
                return
            if char == "\\":
                yield from escape_sequence(reader, emit, is_python=is_python)
            elif char == '"' or char < " ":
                emit(escape(char))
                reader.pos += 1

    def _visible(self) -> Steps[str]:
        """Emit white space and return the character behind it."""
        size = yield from self._space_after(0)
        if size:
            self._pass_on(size)
        return self._reader.text[self._reader.pos]

    def _space_after(self, size: int) -> Steps[int]:
        """Return how many characters, `size` and the white space behind them, come next."""
        reader = self._reader
        while True:
            found = _SPACE.match(reader.text, reader.pos + size)
            size = size if found is None else found.end() - reader.pos
            if reader.pos + size < len(reader.text):
                return size
            yield from reader.more()

    def _pass_on(self, size: int) -> None:
        """Emit the next `size` characters as they are."""
        reader = self._reader
        self._emit(reader.text[reader.pos : reader.pos + size])
        reader.pos += size


def _escaping(emit: Emit) -> Emit:
    """Return a way to emit text from within a string."""
    return lambda text: emit(escape(text))


def text_to_json(text: str, types: frozenset[str] | None, unchanged: str | None = None) -> str:
    """Return JSON of one of `types` for a value that was given as text.

    Where types other than a string are allowed and `text` spells a value of one of them, it is
    that value; otherwise the text stays a string (`unchanged`, if its JSON is at hand).
    """
    as_string = quote(text) if unchanged is None else unchanged
    if types is not None and not types - {"string"}:
        return as_string
    bare = text.strip()
    if bare[:1] in ("{", "["):
        is_wanted = types is None or ("object" if bare[0] == "{" else "array") in types
        return (is_wanted and reread(bare)) or as_string
    if types is None:
        word = bare in ("true", "false", "null") or NUMBER.fullmatch(bare)
        return bare if word else as_string
    lower = bare.lower()
    if "boolean" in types and lower in ("true", "false"):
        return lower
    if "null" in types and lower in ("null", "none"):
        return "null"
    number = integral(bare) if "integer" in types else None
    if number is None and "number" in types:
        number = scalar(bare)
    return number if number is not None and NUMBER.fullmatch(number) else as_string


def reread(text: str, node: SchemaNode = ANYTHING, dialect: Dialect = JSON) -> str | None:
    """Return a whole value, given as text, as JSON; None if it is none."""
    parts: list[str] = []
    reader = Reader(text, closed=True)
    try:
        for _ in ValueScanner(reader, parts.append, dialect).value(node):
            return None
    except MismatchError:
        return None
    return None if text[reader.pos :].strip() else "".join(parts)
