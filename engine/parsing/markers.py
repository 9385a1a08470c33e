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
        short = [a for a in markers if any(a != b and b.startswith(a) for b in markers)]
        partial = "|".join(_prefixes(marker) for marker in markers) or "(?!)"
        # A short marker at the end of the text may become a longer one.
        self._partial = re.compile(
            f"({_alternatives(m for m in markers if m not in short)})"
            f"|(?:{partial})\\Z|({_alternatives(short)})"
        )
        self._complete = re.compile(_alternatives(markers))
        first = re.escape("".join(sorted({marker[0] for marker in markers})))
        self._first = re.compile(f"[{first}]" if first else "(?!)")

    def find(self, text: str, start: int, *, closed: bool) -> tuple[int, str | None]:
        """Return where the first marker in `text` from `start` on begins, and the marker.

        Without one it is None, with the index from which the text may still become one: the end
        of the text if nothing of it can, or if it is `closed` and no more will come.
        """
        found = (self._complete if closed else self._partial).search(text, start)
        if found is None:
            return len(text), None
        marker = found.group() if closed else found.group(1) or found.group(2)
        return found.start(), marker

    def holds_nothing_of(self, text: str) -> bool:
        """Say whether no part of `text`, which is not empty, may belong to a marker."""
        if not self.markers:
            return True
        return text[-1] not in WHITE_SPACE and self._first.search(text) is None


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


def _prefixes(marker: str) -> str:
    """Return a pattern of every proper prefix of `marker`, the longest first."""
    pattern = ""
    for char in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.escape(marker[0]) + pattern if len(marker) > 1 else "(?!)"
