"""Texts for custom tools: read out of the JSON around them, wherever it is cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx.server.responses_api.custom_text import CustomText


def read(pieces: list[str]) -> tuple[list[str], str]:
    """Return the texts that came with each piece and at the end, and the whole text."""
    reader = CustomText()
    texts = [reader.feed(piece) for piece in pieces]
    return [*texts, reader.finish()], reader.text


@given(st.text(), st.booleans(), st.lists(st.integers(0, 400)))
def test_any_text_comes_back_however_it_is_cut(
    text: str, is_ascii: bool, places: list[int]
) -> None:
    """What came in pieces is the text, and never more of it than is known."""
    text = text.encode("utf-8", "replace").decode()
    written = json.dumps({"input": text}, ensure_ascii=is_ascii)
    cuts = sorted({0, *(place for place in places if place < len(written)), len(written)})
    pieces = [written[a:b] for a, b in itertools.pairwise(cuts)]
    for cut in (pieces, list(written)):
        texts, whole = read(cut)
        assert "".join(texts) == whole == text


def test_text_is_told_as_it_comes() -> None:
    """An escape, or half of a character, waits for its other part."""
    texts, whole = read(['{ "inp', 'ut" :"a', "b\\", "n\\u00e", "9\\ud83d", "\\ude00c", '"}'])
    assert texts == ["", "a", "b", "\n", "é", "😀c", "", ""]
    assert whole == "ab\né😀c"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\nb', "a\nb"),
        ('{"input": "a\\', "a"),
        ('{"input": "a", "more": 1}', "a"),
        ('{"more": 1, "input": "a"}', "a"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"inp', '{"inp'),
        ("*** Begin Patch", "*** Begin Patch"),
        ("", ""),
        (r'{"input": "\d+\\d\"\u12x"}', r'\d+\d"\u12x'),
        (r'{"input": "a\ud83d"}', "a\N{REPLACEMENT CHARACTER}"),
        (r'{"input": "\ud83dx\ude00\ud83d\ud83d\ude00\ud83d\n"}', "\ufffdx\ufffd\ufffd😀\ufffd\n"),
        (r'{"input": "a\ud83d\ud', "a"),
    ],
)
def test_other_forms_are_read_as_far_as_they_go(arguments: str, text: str) -> None:
    """What was cut off ends where it was cut; what is no such JSON is the text itself."""
    for pieces in ([arguments], list(arguments)):
        texts, whole = read(pieces)
        assert "".join(texts) == whole == text
