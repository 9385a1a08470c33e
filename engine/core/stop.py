"""Find stop strings in a text that arrives in pieces, holding back only what may still match."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_mlx.engine.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Say what one piece of text released, and whether a stop string was completed by it."""

    #: Text that is safe to show: no part of it can belong to a match any more.
    text: str
    #: The stop string that was found; None while there is none.
    stop: str | None = None


@dataclass(slots=True)
class _State:
    """One state of the automaton: the longest suffix of the text that begins a stop string."""

    #: Length of that suffix.
    depth: int
    next: dict[str, _State] = field(default_factory=dict)
    #: The state of the longest proper suffix that is itself a prefix of a stop string.
    fallback: _State | None = None
    #: The longest stop string that ends here.
    stop: str | None = None


class StopMatcher:
    """Match stop strings exactly, however the text is cut.

    The first stop string to be **complete** in the text wins, so that a row ends at the earliest
    token that could end it and never waits for a longer rival; of those complete at the same
    character, the one that starts first (the longest). The text released is everything before
    the match: neither the stop string nor what follows it. Held back is at any time exactly the
    longest suffix that begins a stop string.

    Not thread-safe; one per row. Cost is linear in the text and in the stop strings, by the
    automaton of Aho and Corasick ("Efficient string matching", 1975).

    Raises `InvalidRequestError` for an empty stop string, which would match everywhere.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if "" in stop:
            raise InvalidRequestError("a stop string must not be empty", param="stop")
        self._root = _build_automaton(stop)
        self._state = self._root
        self._held = ""
        self._found: str | None = None

    @property
    def stop(self) -> str | None:
        """Return the stop string that was found, None while there is none."""
        return self._found

    def feed(self, text: str) -> StopMatch:
        """Take the next piece of text and release what can no longer be part of a match.

        Once a stop string was found, whatever follows is swallowed.
        """
        if self._found is not None:
            return StopMatch("", self._found)
        root, state = self._root, self._state
        if not root.next:
            return StopMatch(text)
        seen = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            following = state.next.get(char)
            while following is None and state.fallback is not None:
                state = state.fallback
                following = state.next.get(char)
            state = root if following is None else following
            if state.stop is not None:
                self._found, self._held = state.stop, ""
                return StopMatch(seen[: end - len(state.stop)], state.stop)
        self._state = state
        cut = len(seen) - state.depth
        self._held = seen[cut:]
        return StopMatch(seen[:cut])

    def flush(self) -> str:
        """Return what was held back, once no more text will come."""
        held, self._held, self._state = self._held, "", self._root
        return held


def _build_automaton(stop: Sequence[str]) -> _State:
    """Build the trie of `stop` and link every state to its longest proper suffix."""
    root = _State(0)
    for string in stop:
        state = root
        for char in string:
            state = state.next.setdefault(char, _State(state.depth + 1))
        state.stop = string
    pending = deque((char, root, child) for char, child in root.next.items())
    while pending:
        char, parent, state = pending.popleft()
        fallback = parent.fallback
        while fallback is not None and char not in fallback.next:
            fallback = fallback.fallback
        state.fallback = root if fallback is None else fallback.next[char]
        # Breadth first: the shorter suffix is complete already. Its match is the shorter one.
        if state.stop is None:
            state.stop = state.fallback.stop
        pending.extend((char, state, child) for char, child in state.next.items())
    return root
