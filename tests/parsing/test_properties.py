"""Hold the parsers to random calls, random marker soups, and to prompt release of text."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parsing.formats import ANSWERS, Answers
from parsing.harness import TOOLS, check_truncations, parse

from vllm_mlx.engine.parsing import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ContentDelta,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    make_parser,
)
from vllm_mlx.engine.parsing.registry import make_reasoning
from vllm_mlx.engine.parsing.tool_format import ToolFormat

#: Formats that take marks of the frame of the answer out of plain text, too.
FRAMED = ("cohere", "functionary", "functionary_v31", "harmony", "kimi_k3", "solar")

#: Characters that no format gives a meaning to.
PLAIN = "αβγδεζηθικλμνξοπρστυφχψω"


def leaves(kind: type[ToolFormat]) -> list[type[ToolFormat]]:
    """Return a format, or those that it stands for."""
    return list(kind.members) or [kind]


@pytest.fixture(params=ANSWERS, ids=lambda answers: answers.tools)
def answers(request: pytest.FixtureRequest) -> Answers:
    """Give the way to write answers in each format in turn."""
    return request.param  # type: ignore[no-any-return]


# Round trips

pieces_of_text = st.one_of(
    st.text(max_size=12),
    st.sampled_from([*"\"'\\\n<>{}[](),:", "```"]),
    st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</function>", "[TOOL_CALLS]"]),
    st.sampled_from(["<|", "|>", "<｜", "｜>", "</", "]<]minimax[>[", "true", "null", "-1.5"]),
)
texts = st.lists(pieces_of_text, max_size=6).map("".join).filter(lambda text: _is_utf8(text))
names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
values = st.recursive(
    st.one_of(texts, st.integers(-(10**12), 10**12), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.dictionaries(names, inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)
arguments = st.fixed_dictionaries(
    {"city": texts},
    optional={
        "days": st.integers(-(10**9), 10**9),
        "limit": st.floats(allow_nan=False, allow_infinity=False),
        "is_metric": st.booleans(),
        "details": st.dictionaries(names, values, min_size=1, max_size=3),
        "tags": st.lists(texts, min_size=1, max_size=3),
    },
)
calls = st.lists(
    st.one_of(
        st.tuples(st.just("get_weather"), arguments),
        st.tuples(st.just("get"), st.just({})),
        st.tuples(st.just("write-file"), st.fixed_dictionaries({"path": texts, "text": texts})),
    ),
    min_size=1,
    max_size=3,
)
plain_texts = st.text(alphabet=PLAIN + " .", max_size=20).map(str.strip)


def _round_trip(answers: Answers, data: st.DataObject) -> None:
    """Draw calls, text around them and cuts, and compare what is parsed."""
    chosen = [(n, a) for n, a in data.draw(calls) if _is_writable(TOOL_PARSERS[answers.tools], a)]
    before, behind, thought = (data.draw(plain_texts) for _ in range(3))
    chosen = chosen or [("get", {})]
    text = answers.write(chosen, before=before, behind=behind, reasoning=thought)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    options: dict[str, Any] = {"tools": answers.tools, "reasoning": answers.reasoning}
    parsed = parse(pieces, **options)
    assert parsed == parse([text], **options)
    assert parsed.values() == chosen
    assert "".join(parsed.content.split()) == "".join(f"{before}{behind}".split())
    assert parsed.reasoning == thought


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_random_calls_come_back(answers: Answers, data: st.DataObject) -> None:
    """Random calls, written in a format and cut at random, are parsed to themselves."""
    _round_trip(answers, data)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_many_random_calls_come_back(answers: Answers, data: st.DataObject) -> None:
    """The same, often."""
    _round_trip(answers, data)


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _is_writable(kind: type[ToolFormat], value: Any) -> bool:
    """Say whether a format can write a value so that where it ends is beyond doubt.

    Formats without escapes cannot write their own ends, if what follows them follows, too.
    """
    if isinstance(value, dict):
        return all(_is_writable(kind, part) for part in value.values())
    if isinstance(value, list):
        return all(_is_writable(kind, part) for part in value)
    leaf = leaves(kind)[0]
    ends = ["]<]minimax[>[", '<|"|>', getattr(leaf, "value_close", "]]>"), "]]>"]
    if not isinstance(value, str):
        return True
    if leaf.__name__ == "MiniMaxM3" and (value != value.strip() or not value or _is_word(value)):
        return False
    return not any(end in value for end in ends)


def _is_word(text: str) -> bool:
    """Say whether text without a type would be read as JSON."""
    return text[:1] in "{[-0123456789" or text in ("true", "false", "null")


# Marker soups


def _soup(rng: random.Random, kind: type[ToolFormat], reasoning: str) -> list[str]:
    """Return pieces of markers, of calls, and of plain text, in any order."""
    found = make_reasoning(reasoning)
    assert found is not None
    markers = [*found.markers, *found.dropped]
    for leaf in leaves(kind):
        markers += [*leaf.triggers, *leaf.closers, *leaf.anchored]
        for word in ("call_open", "name_close", "call_close", "argument_open", "value_close"):
            markers.append(getattr(leaf, word, ""))
        rendered = leaf.render_calls([("get_weather", {"city": "x", "days": 1}), ("get", {})])
        start = rng.randrange(len(rendered))
        markers += [rendered, rendered[:start], rendered[start:]]
    grains = ["get", "get_weather", '"name"', '"arguments"', ":", ",", "{", "}", "[", "]", '"']
    grains += [" ", "\n", "{}", "(", ")", "=", "\\", "'", "<", ">", "|", "1", "true", "</", "```"]
    soup = []
    for _ in range(rng.randrange(1, 16)):
        pick = rng.random()
        if pick < 0.45:
            marker = rng.choice(markers)
            soup.append(marker if rng.random() < 0.8 else marker[: rng.randrange(len(marker) + 1)])
        elif pick < 0.75:
            soup.append(rng.choice(grains))
        else:
            soup.append("".join(rng.choices(PLAIN, k=3)))
    return [piece for piece in soup if piece]


def _check_soup(rng: random.Random, answers: Answers) -> None:
    """Parse one soup whole, in its pieces, and in single characters, and look for its letters."""
    kind = TOOL_PARSERS[answers.tools]
    soup = _soup(rng, kind, answers.reasoning)
    text = "".join(soup)
    in_reasoning = rng.random() < 0.2
    options: dict[str, Any] = {
        "tools": answers.tools,
        "reasoning": answers.reasoning,
        "in_reasoning": in_reasoning,
        "tool_schemas": rng.choice([TOOLS, TOOLS, None]),
    }
    whole = parse([text], **options)
    assert whole == parse(soup, **options), text
    cut = rng.randrange(len(text) + 1)
    assert whole == parse([text[:cut], text[cut:]], **options), text
    _check_letters(text, options)
    if answers.tools not in FRAMED:
        # Without tools and reasoning nothing is taken out of the text at all.
        assert parse(soup, tools=answers.tools, tool_schemas=[]).content == text


def _check_letters(text: str, options: dict[str, Any]) -> None:
    """Feed single characters: plain letters come out, unless a call is open where they stand."""
    parser = make_parser(**options)
    seen, within, since = "", set(), 0
    is_open = False
    for at, char in enumerate(text):
        was_open = is_open
        for event in parser.feed(char):
            if isinstance(event, ToolCallStart):
                is_open, seen = True, seen + event.id + event.name
                within.update(range(since, at + 1))
            elif isinstance(event, ToolCallEnd):
                is_open, since = False, at + 1
            else:
                seen += event.text
                since = since if isinstance(event, ToolArgumentsDelta) else at + 1
        if was_open or is_open:
            within.add(at)
    for event in parser.finish():
        if isinstance(event, ContentDelta | ReasoningDelta | ToolArgumentsDelta):
            seen += event.text
    outside = [char for at, char in enumerate(text) if char in PLAIN and at not in within]
    found = iter(seen)
    assert all(char in found for char in outside), (text, seen)


def test_marker_soups(answers: Answers) -> None:
    """Random markers and pieces of calls never raise, and no plain text gets lost among them."""
    rng = random.Random(answers.tools)
    for _ in range(30):
        _check_soup(rng, answers)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_marker_soups() -> None:
    """The same, a hundred thousand times over all formats; `SOUP_SEED` gives others."""
    rng = random.Random(os.environ.get("SOUP_SEED", "0"))
    for number in range(100_000):
        _check_soup(rng, ANSWERS[number % len(ANSWERS)])


def test_truncated_soups(answers: Answers) -> None:
    """A soup that ends anywhere gives a beginning of what it would have given."""
    rng = random.Random(f"cut {answers.tools}")
    for _ in range(2):
        text = "".join(_soup(rng, TOOL_PARSERS[answers.tools], answers.reasoning))[:120]
        check_truncations(text, tools=answers.tools, reasoning=answers.reasoning)


# Promptness


def _near_misses(kind: type[ToolFormat], reasoning: str) -> Iterator[str]:
    """Yield every beginning of every marker that may stand anywhere, but not whole markers."""
    found = make_reasoning(reasoning)
    assert found is not None
    markers = {m for leaf in leaves(kind) for m in leaf.triggers}
    markers.update(found.markers, found.dropped)
    for marker in sorted(markers):
        for end in range(1, len(marker)):
            if marker[:end] not in markers:
                yield marker[:end]


def test_text_is_released_as_soon_as_it_is_text(answers: Answers) -> None:
    """Only what may be a marker is held back, and it is let go with the first other character."""
    options = {"tools": answers.tools, "reasoning": answers.reasoning, "tool_schemas": TOOLS}
    for beginning in dict.fromkeys(_near_misses(TOOL_PARSERS[answers.tools], answers.reasoning)):
        parser = make_parser(**options)  # type: ignore[arg-type]
        assert _content(parser.feed("Text ab")) == "Text ab"
        # White space before a marker belongs to it.
        held = beginning
        assert _content(parser.feed(f" {held}")) == "", beginning
        released = _content(parser.feed("~"))
        assert released == f" {held}~", beginning


def test_a_call_to_nothing_is_released_with_its_name(answers: Answers) -> None:
    """As soon as no tool's name can come of it, a call is content as far as it goes."""
    text = answers.write([("gex", {"a": "b"})])
    end = text.index("gex") + len("gex")
    parser = make_parser(answers.tools, None, TOOLS)
    assert _content(parser.feed(text[: end - 1])) == ""
    assert _content(parser.feed(text[end - 1 : end])) == text[:end]


def test_a_call_starts_when_its_name_is_complete(answers: Answers) -> None:
    """The start of a call does not wait for its arguments."""
    text = answers.write([("write-file", {"path": "some path", "text": ""})])
    parser = make_parser(answers.tools, None, TOOLS)
    events = parser.feed(text[: text.index("some path")])
    assert [e.name for e in events if isinstance(e, ToolCallStart)] == ["write-file"]


def _content(events: list[Any]) -> str:
    assert all(isinstance(event, ContentDelta) for event in events)
    return "".join(event.text for event in events)


def test_every_reasoning_format_takes_part() -> None:
    """The soups know every reasoning format but the one that is configured."""
    used = {REASONING_PARSERS[answers.reasoning] for answers in ANSWERS}
    rare = {REASONING_PARSERS[name] for name in ("delimiters", "granite")}
    assert used | rare == set(REASONING_PARSERS.values())
