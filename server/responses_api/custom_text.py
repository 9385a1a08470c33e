"""Read the text for a custom tool out of the JSON that a model writes around it, as it comes."""

from __future__ import annotations

import re

import msgspec

#: The one argument of a custom tool, as the model sees it.
ARGUMENT = "input"

_HEAD = re.compile(rf'\s*\{{\s*"{ARGUMENT}"\s*:\s*"')
#: By so many characters the text has begun.
_MAX_HEAD = 100
_HEX = "[0-9a-fA-F]"
#: The next of a JSON string that is known for what it is, up to its end.
_TOKEN = re.compile(rf'[^"\\]+|\\u{_HEX}{{4}}|\\u(?={_HEX}{{0,3}}[^0-9a-fA-F])|\\[^u]', re.DOTALL)
_ESCAPES = {
    **{f"\\{mark}": mark for mark in '"\\/'},
    "\\b": "\b",
    "\\f": "\f",
    "\\n": "\n",
    "\\r": "\r",
    "\\t": "\t",
}


class CustomText:
    """Follow the arguments of one call; owns what has been read of them."""

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._texts: list[str] = []
        #: What could not be read yet.
        self._held = self._half = ""
        self._has_begun = False

    @property
    def text(self) -> str:
        """Return what the tool is called with, as far as it is known.

        Of arguments in another form than was asked for, that is what the model wrote.
        """
        if self._has_begun:
            return "".join(self._texts)
        return custom_input("".join(self._arguments))

    @property
    def _is_over(self) -> bool:
        """Say whether the text has ended, or will not begin."""
        if self._has_begun:
            return self._held.startswith('"')
        return len(self._held) > _MAX_HEAD

    def feed(self, arguments: str) -> str:
        """Take the next piece of the arguments and return the text that is new by it."""
        self._arguments.append(arguments)
        if self._is_over:
            return ""
        self._held += arguments
        if not self._has_begun:
            head = _HEAD.match(self._held)
            if head is None:
                return ""
            self._has_begun = True
            self._held = self._held[head.end() :]
        place, texts = 0, [self._half]
        while (token := _TOKEN.match(self._held, place)) is not None:
            texts.append(_meaning(token[0]))
            place = token.end()
        self._held = self._held[place:]
        text, self._half = _joined("".join(texts), is_all=self._is_over)
        self._texts.append(text)
        return text

    def finish(self) -> str:
        """Return the text that is new by the end of the arguments."""
        return "" if self._has_begun else self.text


def _meaning(token: str) -> str:
    """Return what a token stands for.

    Models forget to escape: a line break stands for itself, and so does a backslash before what
    is no escape.
    """
    if len(token) == len("\\u0000") and token.startswith("\\u"):
        return chr(int(token[2:], 16))
    return _ESCAPES.get(token, token)


def _joined(text: str, *, is_all: bool) -> tuple[str, str]:
    """Join halves of characters; return the text, and a half whose other one may come."""
    half = ""
    if not is_all and text[-1:] and "\ud800" <= text[-1] <= "\udbff":
        text, half = text[:-1], text[-1]
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"), half


def custom_arguments(text: str) -> dict[str, str]:
    """Return the arguments of a call to a custom tool."""
    return {ARGUMENT: text}


def custom_input(arguments: str) -> str:
    """Return the text in the whole arguments of a call to a custom tool.

    What the model wrote in another form is returned as it is.
    """
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    text = decoded.get(ARGUMENT) if isinstance(decoded, dict) else None
    return text if isinstance(text, str) else arguments
