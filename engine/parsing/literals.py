"""Scalars and strings in JSON's and Python's spelling, as JSON text."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from types import MappingProxyType

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")

#: Longest spelling of a number; Python refuses to read longer ones.
_MAX_NUMBER = 4000

_JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
#: JSON has no word for numbers that are none; JavaScript writes them so, too.
_NOT_NUMBERS = dict.fromkeys(["NaN", "Infinity", "-Infinity", "nan", "inf", "-inf"], "null")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS = MappingProxyType({**_JSON_WORDS, **_NOT_NUMBERS, **_PYTHON_WORDS})


#: Groups of the pattern of one token.
KEY, STRING, SCALAR, OPEN, CLOSE, COMMA = range(1, 7)


class Tokens:
    """Hold patterns of what is written the same in JSON and is whole beyond doubt.

    All of them begin with white space. A comma counts only if it is not the last of its kind.
    """

    def __init__(self, string: str) -> None:
        space, scalar = r"[ \t\r\n]*+", f"(?:{NUMBER.pattern}|true|false|null)"
        comma = rf",(?={space}[^\s\]}}])"
        #: One token, its kind being the only group that is set.
        self.one = re.compile(
            rf"{space}(?:({string}){space}:|({string})|({scalar})(?=[\s,\]}}])"
            rf"|([{{\[])|([}}\]])|({comma}))"
        )
        atom = f"(?:{string}|{scalar})"
        pair = f"{string}{space}:{space}{atom}{space}"
        flat_object = rf"\{{{space}(?:{pair}(?:,{space}{pair})*+)?\}}"
        flat_array = rf"\[{space}(?:{atom}{space}(?:,{space}{atom}{space})*+)?\]"
        value = f"(?:{atom}|{flat_object}|{flat_array})"
        #: Any number of elements of a list, and of members of an object, with the comma behind.
        self.elements = re.compile(f"(?:{space}{value}{space}{comma})*+")
        self.members = re.compile(f"(?:{space}{string}{space}:{space}{value}{space}{comma})*+")


@dataclass(frozen=True, slots=True)
class Dialect:
    """Say how values are spelt in a format."""

    #: Opening brackets, with the closing one of each.
    brackets: Mapping[str, str] = field(default_factory=lambda: {"{": "}", "[": "]"})
    #: Quotes whose text has backslash escapes; the first one is tried first.
    quotes: tuple[str, ...] = ('"', "'")
    #: A quote whose text ends at its next occurrence and has no escapes.
    raw_quote: str | None = None
    #: Whether keys may stand without quotes.
    has_bare_keys: bool = False
    #: Whether escapes in double quotes are Python's.
    has_python_escapes: bool = False
    #: What is written the same in JSON.
    tokens: Tokens | None = None


_PLAIN = r'[^"\\\x00-\x1f]*+'
_ESCAPES = r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'

#: JSON, and what models write in its place: Python's single quotes and words.
JSON = Dialect(tokens=Tokens(rf'"{_PLAIN}(?:{_ESCAPES}{_PLAIN})*+"'))
#: The same, read by steps alone, so that a fault is found at the same character at every cut.
STEPWISE_JSON = Dialect()
PYTHON = Dialect(
    brackets={"{": "}", "[": "]", "(": ")"},
    has_python_escapes=True,
    tokens=Tokens(rf'"{_PLAIN}"'),
)


def escape(text: str) -> str:
    """Return `text` as it stands between the quotes of a JSON string."""
    return encode_basestring(text)[1:-1]


def quote(text: str) -> str:
    """Return `text` as a JSON string."""
    return encode_basestring(text)


def unescape(text: str) -> str:
    """Return what `text`, valid between the quotes of a JSON string, stands for."""
    return str(json.loads(f'"{text}"')) if "\\" in text else text


def scalar(text: str) -> str | None:
    """Return a number or word in JSON's or Python's spelling as JSON, None if it is neither."""
    word = _WORDS.get(text)
    if word is not None:
        return word
    if NUMBER.fullmatch(text):
        return text
    return _python_number(text)


def may_be_scalar(text: str) -> bool:
    """Say whether a number or word may begin with `text`."""
    if not text or text[0] in "+-.0123456789":
        return len(text) <= _MAX_NUMBER and all(c.isalnum() or c in "+-._" for c in text)
    return any(word.startswith(text) for word in _WORDS)


def integral(text: str) -> str | None:
    """Return the whole number that `text` spells ("50", "50.0"), None if it spells none."""
    if re.fullmatch(r"-?(?:0|[1-9][0-9]*)", text):
        return text
    number = scalar(text)
    if number is None or not NUMBER.fullmatch(number) or len(number) > 300:
        return None
    value = float(number)
    return str(int(value)) if math.isfinite(value) and value.is_integer() else None


def _python_number(text: str) -> str | None:
    """Return a number in Python's spelling (`1_000`, `.5`, `+3`, `0x1f`) as JSON."""
    if not text or len(text) > _MAX_NUMBER or not text.isascii() or text[-1] in "jJ":
        return None
    bare = text.removeprefix("-").removeprefix("+")
    try:
        value = ast.literal_eval(bare)
    except (ValueError, SyntaxError, MemoryError):
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        return None
    return json.dumps(-value if text.startswith("-") else value)
