"""Parse one text cut in many ways, and hold every way to the same result."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_mlx.engine.parsing import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    make_parser,
)

#: Up to this many characters all pairs of cuts are tried.
SHORT = 50
#: Tries every cut, and every pair of cuts where pairs are tried, of any text.
IS_THOROUGH = bool(os.environ.get("EVERY_CUT"))

#: The tools of every test: all types of arguments, none, and a name that begins another's.
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "limit": {"type": "number"},
                    "is_metric": {"type": "boolean"},
                    "details": {"type": "object"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "note": {"type": ["string", "null"]},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "get", "parameters": {"type": "object", "properties": {}}},
    },
    {
        "type": "function",
        "function": {
            "name": "write-file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
                "required": ["path", "text"],
            },
        },
    },
]


@dataclass(frozen=True)
class Call:
    """One parsed call, its arguments as the text that was streamed."""

    name: str
    arguments: str
    is_complete: bool = True


@dataclass(frozen=True)
class Parsed:
    """Everything that a text gave, put together again; `order` is the kinds in their order."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]
    order: tuple[str, ...]

    def values(self) -> list[tuple[str, Any]]:
        """Return names and arguments of the calls, which must all be complete."""
        assert all(call.is_complete for call in self.calls), self.calls
        return [(call.name, json.loads(call.arguments)) for call in self.calls]


def parse(pieces: Iterable[str], **options: Any) -> Parsed:
    """Parse `pieces` and check what holds for the events of any text."""
    parser = make_parser(**{"tool_schemas": TOOLS, **options})
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return put_together(events + parser.finish())


def put_together(events: list[Event]) -> Parsed:
    """Add up the events; a call's come in order, with nothing else between them."""
    texts = {"reasoning": "", "content": ""}
    calls: list[Call] = []
    order: list[str] = []
    ids: set[str] = set()
    name = arguments = None
    for event in events:
        kind = type(event).__name__
        if not order or order[-1] != kind or kind in ("ToolCallStart", "ToolCallEnd"):
            order.append(kind)
        if isinstance(event, ReasoningDelta | ContentDelta):
            assert event.text, "an empty delta"
            assert name is None, "text within a call"
            texts["reasoning" if isinstance(event, ReasoningDelta) else "content"] += event.text
        elif isinstance(event, ToolCallStart):
            assert name is None, "a call within a call"
            assert event.index == len(calls)
            assert event.id
            assert event.id not in ids
            ids.add(event.id)
            name, arguments = event.name, ""
        elif isinstance(event, ToolArgumentsDelta):
            assert name is not None
            assert event.index == len(calls)
            assert event.text, "an empty delta"
            arguments = (arguments or "") + event.text
        else:
            assert isinstance(event, ToolCallEnd)
            assert event.index == len(calls)
            calls.append(Call(name or "", arguments or "", event.complete))
            assert not event.complete or isinstance(json.loads(calls[-1].arguments), dict)
            name = None
    assert name is None, "a call without an end"
    return Parsed(texts["reasoning"], texts["content"], tuple(calls), tuple(order))


def check_cuts(text: str, *, pairs: bool = False, every: int = 1, **options: Any) -> Parsed:
    """Parse `text` whole, in pieces, and with every single cut; return what all of these gave.

    With `pairs` also with every two cuts; with `every` only at every such character.
    """
    whole = parse([text], **options)
    for pieces in cuts(text, pairs=pairs, every=every):
        parsed = parse(pieces, **options)
        assert parsed == whole, f"cut as {pieces!r}"
    return whole


def cuts(text: str, *, pairs: bool = False, every: int = 1) -> Iterator[list[str]]:
    """Yield `text` in pieces of one to five characters, with every cut, and with every two.

    Of a text that is not short the two cuts are at most a marker's beginning apart.
    """
    reach = len(text) if len(text) <= SHORT or IS_THOROUGH else 2
    every = 1 if IS_THOROUGH else every
    for size in range(1, 6):
        yield [text[at : at + size] for at in range(0, len(text), size)]
    for at in range(1 + len(text) % every, len(text), every):
        yield [text[:at], text[at:]]
    if pairs:
        for one, two in itertools.combinations(range(1, len(text)), 2):
            if two - one <= reach:
                yield [text[:one], text[one:two], text[two:]]


def check_truncations(text: str, **options: Any) -> None:
    """Parse every beginning of `text`: nothing may come out that the whole would not begin with.

    Only text that was held back, as it might have become a marker, may come out as content.
    """
    whole = parse([text], **options)
    for end in range(len(text)):
        cut = parse([text[:end]], **options)
        assert _is_cut_of(cut.reasoning, whole.reasoning, text[:end]), (end, cut)
        assert _is_cut_of(cut.content, whole.content, text[:end]), (end, cut)
        assert len(cut.calls) <= len(whole.calls)
        for index, call in enumerate(cut.calls):
            full = whole.calls[index]
            assert call.name == full.name
            if call.is_complete or index < len(cut.calls) - 1:
                assert call == full, (end, cut)
            else:
                assert full.arguments.startswith(call.arguments), (end, cut)
        if end % 7 == 0:
            assert cut == parse([text[: end // 2], text[end // 2 : end]], **options), end


def _is_cut_of(cut: str, whole: str, text: str) -> bool:
    """Say whether `cut` is a beginning of `whole`, or one followed by the end of `text`."""
    same = len(cut)
    while not whole.startswith(cut[:same]):
        same -= 1
    return text.endswith(cut[same:])
