"""Content blocks: the order of their stream events, and that the whole answer is their sum."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_mlx.engine.parsing import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    make_parser,
)
from vllm_mlx.server.anthropic.blocks import BlockWriter, whole_content

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
ANSWER = (
    "<think>\nTwo cities.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "look_up", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
)


def written(*events: Event, **options: Any) -> list[dict[str, Any]]:
    """Return all stream events of an answer."""
    writer = BlockWriter(**options)
    return writer.write(events) + writer.finish()


def sketch(payloads: list[dict[str, Any]]) -> list[str]:
    """Spell stream events shortly: kind of block or delta, and index."""
    lines = []
    for payload in payloads:
        kind = payload["type"].removeprefix("content_block_")
        what = payload.get("content_block", payload.get("delta", {})).get("type", "")
        lines.append(f"{payload['index']} {kind} {what}".rstrip())
    return lines


def test_blocks_of_all_kinds_follow_one_another() -> None:
    """Each is closed before the next is opened, and thinking is signed at its end."""
    payloads = written(
        ReasoningDelta("Two "),
        ReasoningDelta("cities."),
        ContentDelta("Let me see."),
        ToolCallStart(0, "call-1", "look_up"),
        ToolArgumentsDelta(0, '{"city": '),
        ToolArgumentsDelta(0, '"Paris"}'),
        ToolCallEnd(0, complete=True),
        ToolCallStart(1, "call-2", "look_up"),
        ToolArgumentsDelta(1, "{}"),
        ToolCallEnd(1, complete=True),
        ContentDelta("Done."),
    )
    assert sketch(payloads) == [
        "0 start thinking",
        "0 delta thinking_delta",
        "0 delta thinking_delta",
        "0 delta signature_delta",
        "0 stop",
        "1 start text",
        "1 delta text_delta",
        "1 stop",
        "2 start tool_use",
        "2 delta input_json_delta",
        "2 delta input_json_delta",
        "2 stop",
        "3 start tool_use",
        "3 delta input_json_delta",
        "3 stop",
        "4 start text",
        "4 delta text_delta",
        "4 stop",
    ]
    thinking, text, first, second, last = whole_content(payloads)
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Two cities.")
    assert len(thinking["signature"]) >= 32
    assert text == {"type": "text", "text": "Let me see."}
    call = {"type": "tool_use", "id": "call-1", "name": "look_up", "input": {"city": "Paris"}}
    assert first == call
    assert second == {**call, "id": "call-2", "input": {}}
    assert last == {"type": "text", "text": "Done."}


def test_an_answer_without_text_has_no_block() -> None:
    """Nothing is opened that nothing is in."""
    assert written() == []
    assert whole_content([]) == []


def test_thinking_can_be_left_out() -> None:
    """The block is there, signed as the shown one is, and empty."""
    events = [ReasoningDelta("Two cities."), ContentDelta("Paris.")]
    shown, hidden = written(*events), written(*events, shows_thinking=False)
    assert sketch(hidden)[:3] == ["0 start thinking", "0 delta signature_delta", "0 stop"]
    assert whole_content(hidden)[0]["thinking"] == ""
    assert whole_content(hidden)[0]["signature"] == whole_content(shown)[0]["signature"]
    assert "Two cities" not in str(hidden)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"city": "Paris", "days": 3', {"city": "Paris", "days": 3}),
        ('{"city": "Par', {}),
        ("", {}),
        ("  ", {}),
        ('{"city": "Paris"} and more', {"city": "Paris"}),
        ("[1, 2", {}),
    ],
)
def test_arguments_that_were_cut_are_read_as_far_as_they_go(
    text: str, expected: dict[str, Any]
) -> None:
    """A call has an object, whatever the model wrote; the stream has it as it came."""
    payloads = written(
        ToolCallStart(0, "call-1", "look_up"),
        ToolArgumentsDelta(0, text),
        ToolCallEnd(0, complete=False),
    )
    assert whole_content(payloads)[0]["input"] == expected


@pytest.mark.parametrize("size", [1, 3, len(ANSWER)])
def test_the_content_does_not_depend_on_how_the_text_was_cut(size: int) -> None:
    """A real parser, fed in pieces of any size, gives the same blocks."""
    parser = make_parser("hermes", "qwen3", TOOLS)
    writer = BlockWriter()
    payloads = []
    for start in range(0, len(ANSWER), size):
        payloads += writer.write(parser.feed(ANSWER[start : start + size]))
    payloads += writer.write(parser.finish()) + writer.finish()
    content = whole_content(payloads)
    assert [block["type"] for block in content] == ["thinking", "text", "tool_use", "tool_use"]
    assert content[0]["thinking"] == "Two cities."
    assert content[1]["text"] == "Let me see."
    assert [block["input"] for block in content[2:]] == [{"city": "Paris"}, {}]
    indices = [payload["index"] for payload in payloads]
    assert indices == sorted(indices)
