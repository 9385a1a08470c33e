"""Stop strings are found exactly, however the text is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx.engine.core.stop import StopMatch, StopMatcher
from vllm_mlx.engine.errors import InvalidRequestError

# A tiny alphabet makes overlaps, self-similar stop strings and near misses common.
LETTERS = st.text(alphabet="ab\n", max_size=24)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def whole_text_search(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Return what must be shown of `text` and the stop string, by looking at every prefix."""
    for end in range(len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(text: str, stop: list[str], cuts: list[int]) -> tuple[str, str | None]:
    """Feed `text` cut at `cuts` and return what came out, with the stop string."""
    matcher = StopMatcher(stop)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    shown = ""
    for start, end in itertools.pairwise(edges):
        match = matcher.feed(text[start:end])
        shown += match.text
        if match.stop is not None:
            return shown, match.stop
    return shown + matcher.flush(), None


@given(LETTERS, STOPS, st.lists(st.integers(0, 24), max_size=8))
def test_any_cutting_equals_whole_text_search(text: str, stop: list[str], cuts: list[int]) -> None:
    """The released text and the stop string do not depend on how the text was cut."""
    assert whole_text_search(text, stop) == run(text, stop, cuts)


@given(LETTERS, STOPS)
def test_holds_back_exactly_what_may_still_match(text: str, stop: list[str]) -> None:
    """After every character, what is held is the longest suffix that begins a stop string."""
    matcher = StopMatcher(stop)
    shown = ""
    for position, char in enumerate(text):
        match = matcher.feed(char)
        shown += match.text
        if match.stop is not None:
            return
        seen = text[: position + 1]
        suffixes = [seen[start:] for start in range(len(seen) + 1)]
        longest = next(s for s in suffixes if not s or any(t.startswith(s) for t in stop))
        assert seen[: len(seen) - len(longest)] == shown


@given(LETTERS, STOPS)
def test_no_stop_string_is_ever_shown(text: str, stop: list[str]) -> None:
    """The text released up to the end contains no stop string."""
    shown, _ = run(text, stop, list(range(25)))
    assert [string for string in stop if string in shown] == []


def test_first_complete_wins_and_then_the_longest() -> None:
    """A match that is complete ends the text at once; at the same character the longest wins."""
    assert run("abcd", ["abcd", "bc"], []) == ("a", "bc")
    assert run("xabc", ["c", "bc", "abc"], [1, 2, 3]) == ("x", "abc")
    assert run("xab", ["ab", "a"], []) == ("x", "a")


def test_text_after_the_match_is_swallowed() -> None:
    """Nothing that follows a match comes out, in the same piece or later."""
    matcher = StopMatcher(["END"])
    assert StopMatch("one ", "END") == matcher.feed("one END two")
    assert StopMatch("", "END") == matcher.feed(" three")
    assert matcher.flush() == ""
    assert matcher.stop == "END"


def test_flush_returns_the_held_prefix() -> None:
    """A beginning of a stop string that never completes is text after all."""
    matcher = StopMatcher(["\n\nUser:"])
    assert StopMatch("hello") == matcher.feed("hello\n\nUs")
    assert matcher.flush() == "\n\nUs"
    assert matcher.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    """No stop string means no hold-back."""
    matcher = StopMatcher(())
    assert StopMatch("anything") == matcher.feed("anything")
    assert matcher.flush() == ""


def test_matches_characters_outside_the_basic_plane() -> None:
    """Emoji and CJK stop strings match by character."""
    assert run("数は🛑止まる", ["🛑止"], [1, 3]) == ("数は", "🛑止")
    assert run("数は🛑まる", ["🛑止"], [1, 3]) == ("数は🛑まる", None)


def test_work_is_linear_in_the_text() -> None:
    """A self-similar stop string costs no more look-ups for each character as the text grows."""

    class CountingDict(dict):  # type: ignore[type-arg]
        """A dictionary that counts its look-ups."""

        count = 0

        def get(self, key: object, default: object = None) -> object:
            CountingDict.count += 1
            return super().get(key, default)

    def lookups(length: int) -> int:
        matcher = StopMatcher(["a" * 50 + "b"])
        state = matcher._root
        while state is not None:
            following = next(iter(state.next.values()), None)
            state.next = CountingDict(state.next)
            state = following  # type: ignore[assignment]
        CountingDict.count = 0
        for _ in range(length):
            matcher.feed("a")
        return CountingDict.count

    assert lookups(4000) < 2 * 2.2 * 2000
    assert lookups(4000) <= 2.1 * lookups(2000)


def test_refuses_an_empty_stop_string() -> None:
    """An empty stop string is the client's mistake and names its field."""
    with pytest.raises(InvalidRequestError) as raised:
        StopMatcher(["ok", ""])
    assert raised.value.param == "stop"
