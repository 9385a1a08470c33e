"""Find markers in text, and say from where on the text may still become one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from vllm_mlx.engine.parsing.reader import WHITE_SPACE

#: White space next to a marker belongs to the marker, up to this many characters. The bound keeps
#: what is held back small.
MAX_MARKER_SPACE = 64


class MarkerSet:
    """Search for several literals at once, skipping at the speed of a compiled regex.

    Of markers that begin with one another the longest is found.
    """

    __slots__ = ("_complete", "_first", "_partial", "markers")

    def __init__(self, markers: tuple[str, ...]) -> None:
        self.markers = markers
        firsts = sorted({marker[0] for marker in markers})
        self._first = re.compile(f"[{re.escape(''.join(firsts))}]" if firsts else "(?!)")
        # Every alternative begins with a character of its own: that makes the search fast.
        self._complete = re.compile(_alternatives(markers))
        self._partial = re.compile("|".join(_beginning(c, markers) for c in firsts) or "(?!)")

    def find(self, text: str, start: int, *, closed: bool) -> tuple[int, str | None]:
        """Return where the first marker in `text` from `start` on begins, and the marker.

        Without one it is None, with the index from which the text may still become one: the end
        of the text if nothing of it can, or if it is `closed` and no more will come.
        """
        found = (self._complete if closed else self._partial).search(text, start)
        if found is None:
            return len(text), None
        if closed or found.lastindex is not None:
            return found.start(), found.group()
        return found.start(), None

    def begins_in(self, text: str) -> bool:
        """Say whether a character of `text` may begin a marker."""
        return self._first.search(text) is not None


@lru_cache(maxsize=512)
def marker_set(*markers: str) -> MarkerSet:
    """Return the set of `markers`, compiled once; it holds no state."""
    return MarkerSet(tuple(dict.fromkeys(markers)))


def space_before(text: str, start: int, end: int) -> int:
    """Return where the white space that touches `end` begins, not before `start`."""
    low = max(start, end - MAX_MARKER_SPACE)
    while end > low and text[end - 1] in WHITE_SPACE:
        end -= 1
    return end


def _alternatives(markers: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or "(?!)"


def _beginning(first: str, markers: tuple[str, ...]) -> str:
    """Return a pattern of all markers that begin with `first`; only whole ones set a group.

    At the end of the text it matches the beginnings of markers, too, and rather than a whole
    marker that a longer one begins with.
    """
    rests = [marker[1:] for marker in markers if marker[0] == first]
    short = [a for a in rests if any(a != b and b.startswith(a) for b in rests)]
    whole = _alternatives(rest for rest in rests if rest not in short)
    prefixes = [_prefixes(rest) for rest in rests if rest]
    partial = "|".join(prefixes) if prefixes else "(?!)"
    shorter = f"|({_alternatives(short)})" if short else ""
    return f"{re.escape(first)}(?:({whole})|(?:{partial})\\Z{shorter})"


def _prefixes(text: str) -> str:
    """Return a pattern of every proper prefix of `text`, the longest first."""
    pattern = ""
    for char in reversed(text[:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return pattern
