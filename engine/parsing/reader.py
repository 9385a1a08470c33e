"""Text that arrives in pieces, and steps that wait until enough of it is there to decide.

A format is written as if its whole text were at hand: as a generator that yields wherever it needs
more. Every step decides by the characters alone and never by where a piece ended, which is why
the result cannot depend on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

#: A computation that yields whenever it must wait for more text, and returns a T.
Steps = Generator[None, None, T]

WHITE_SPACE = " \t\r\n"
_SPACE = re.compile(r"[ \t\r\n]*+")


class MismatchError(Exception):
    """Report text that the format does not allow; it says nothing of what was read before it."""


class CutError(MismatchError):
    """Report that the text ended where the format needs more of it."""


class Reader:
    """Hold the text that is not used up yet.

    `pos` is where reading goes on. Text before `pos` is let go as soon as more arrives, unless
    `mark` keeps it because it may have to be given back. Both move when text is let go, so an
    index kept across a yield must be relative to one of them.
    """

    __slots__ = ("closed", "mark", "pos", "quiet", "sink", "text")

    def __init__(self, text: str = "", *, closed: bool = False) -> None:
        self.text = text
        self.pos = 0
        self.mark: int | None = None
        self.closed = closed
        #: A short cut past all steps, while these wait with nothing held back: text that `quiet`
        #: accepts goes to `sink` as it is. Steps set both anew each time that they wait.
        self.quiet: Callable[[str], object] | None = None
        self.sink: Callable[[str], None] = _nowhere

    def append(self, piece: str) -> None:
        """Take the next piece of text."""
        keep = self.pos if self.mark is None else self.mark
        if not keep:
            self.text += piece
            return
        self.text = self.text[keep:] + piece
        self.pos -= keep
        if self.mark is not None:
            self.mark = 0

    def more(self) -> Steps[None]:
        """Wait for more text; raises `CutError` if none will come."""
        if self.closed:
            raise CutError
        yield

    def peek(self) -> Steps[str]:
        """Return the next character without using it up; raises `CutError` at the end."""
        while self.pos >= len(self.text):
            yield from self.more()
        return self.text[self.pos]

    def space(self) -> Steps[None]:
        """Skip white space; the end of the text is no fault."""
        while True:
            text, pos = self.text, self.pos
            if pos < len(text):
                if text[pos] not in WHITE_SPACE:
                    return
                found = _SPACE.match(text, pos)
                self.pos = pos if found is None else found.end()
                if self.pos < len(text):
                    return
            if self.closed:
                return
            yield

    def expect(self, literal: str) -> Steps[None]:
        """Use up exactly `literal`; raises `MismatchError` at the first character that differs."""
        while not self.text.startswith(literal, self.pos):
            if not literal.startswith(self.text[self.pos : self.pos + len(literal)]):
                raise MismatchError
            yield from self.more()
        self.pos += len(literal)

    def find(self, *literals: str) -> Steps[str | None]:
        """Return the longest of `literals` that comes next, or None; uses nothing up.

        Raises `CutError` where the text ends before that is decided.
        """
        while True:
            text, pos = self.text, self.pos
            ahead = len(text) - pos
            best: str | None = None
            is_open = False
            for literal in literals:
                if text.startswith(literal, pos):
                    if best is None or len(literal) > len(best):
                        best = literal
                elif len(literal) > ahead and literal.startswith(text[pos:]):
                    is_open = True
            if not is_open or (self.closed and best is not None):
                return best
            yield from self.more()

    def accept(self, *literals: str) -> Steps[str | None]:
        """Use up and return the longest of `literals` that comes next, None if none does."""
        found = yield from self.find(*literals)
        if found is not None:
            self.pos += len(found)
        return found

    def word(self, stop: re.Pattern[str], may_start: Callable[[str], bool]) -> Steps[str]:
        """Use up and return the text before the first match of `stop`, which matches one character.

        Raises `MismatchError` as soon as `may_start` refuses what there is of it.
        """
        seen = 0
        while True:
            found = stop.search(self.text, self.pos + seen)
            end = len(self.text) if found is None else found.start()
            text = self.text[self.pos : end]
            if not may_start(text):
                raise MismatchError
            if found is not None:
                self.pos = end
                return text
            seen = len(text)
            yield from self.more()


def _nowhere(text: str) -> None:
    """Stand for a sink where there is none."""
    raise AssertionError(f"no sink for {text!r}")
