"""Read the inside of quoted strings piece by piece, as the inside of JSON strings."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from vllm_mlx.engine.parsing.literals import escape
from vllm_mlx.engine.parsing.markers import marker_set
from vllm_mlx.engine.parsing.reader import Reader, Steps

#: What may stand behind a string whose text has no escapes; the end of the text may, too.
_BEHIND_RAW = ("", ",", "}", "]", ")", ":", " ", "\t", "\r", "\n")

_HEX = frozenset("0123456789abcdefABCDEF")

#: Python's escapes that JSON has not, as what they stand for.
_PYTHON_ESCAPES = {"'": "'", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_PYTHON_HEX = {"x": 2, "u": 4, "U": 8}


@lru_cache(maxsize=8)
def plain_run(opening: str, *, is_python: bool) -> re.Pattern[str]:
    """Return a pattern of the longest run that stands in a JSON string as it stands here."""
    plain = rf'[^{re.escape(opening)}"\\\x00-\x1f]*+'
    # \u is the same in both, but only text of whole surrogate pairs may be looked at by itself.
    escapes = r'\\["\\/bfnrt]' if is_python else r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'
    return re.compile(rf"{plain}(?:{escapes}{plain})*+")


def escape_sequence(reader: Reader, emit: Callable[[str], None], *, is_python: bool) -> Steps[None]:
    """Read one escape that `plain_run` does not cover, backslash first.

    An escape that JSON does not know becomes a backslash and the character behind it.
    """
    while len(reader.text) - reader.pos < 2:
        yield from reader.more()
    char = reader.text[reader.pos + 1]
    if char in _PYTHON_HEX and (is_python or char == "u"):
        yield from _hex_escape(reader, emit, _PYTHON_HEX[char])
    elif is_python and char in _PYTHON_ESCAPES:
        emit(escape(_PYTHON_ESCAPES[char]))
        reader.pos += 2
    elif char in '"\\/bfnrt':
        emit(f"\\{char}")
        reader.pos += 2
    elif char == "'":
        emit("'")
        reader.pos += 2
    else:
        emit("\\\\")
        reader.pos += 1


def raw_string(reader: Reader, emit: Callable[[str], None], closing: str) -> Steps[None]:
    """Read text without escapes up to `closing`.

    It closes where a bracket, a comma, a colon or white space is behind it; elsewhere it is text.
    """
    markers = marker_set(closing)
    while True:
        end, found = markers.find(reader.text, reader.pos, closed=False)
        if end > reader.pos:
            emit(escape(reader.text[reader.pos : end]))
            reader.pos = end
        size = len(closing)
        if found is None and reader.mark is None and reader.pos == len(reader.text):
            reader.quiet = lambda text: not markers.begins_in(text)
            reader.sink = lambda text: emit(escape(text))
        if found is None or (reader.pos + size >= len(reader.text) and not reader.closed):
            yield from reader.more()
        elif reader.text[reader.pos + size : reader.pos + size + 1] in _BEHIND_RAW:
            reader.pos += size
            return
        else:
            emit(escape(closing))
            reader.pos += size


def _hex_escape(reader: Reader, emit: Callable[[str], None], size: int) -> Steps[None]:
    """Read `\\x`, `\\u` or `\\U` and its digits; without them the backslash stands for itself."""
    seen = 2
    while seen < size + 2:
        if reader.pos + seen >= len(reader.text):
            yield from reader.more()
        elif reader.text[reader.pos + seen] in _HEX:
            seen += 1
        else:
            emit("\\\\")
            reader.pos += 1
            return
    digits = reader.text[reader.pos + 2 : reader.pos + seen]
    code = int(digits, 16)
    if size == 4 or code > 0x10FFFF:
        emit(f"\\u{digits}" if size == 4 else "\\ufffd")
    else:
        emit(escape(chr(code)))
    reader.pos += seen
