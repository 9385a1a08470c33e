"""Hold the event splitter to the format, wherever its bytes are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mlx.bench.sse import SseEvent, SseSplitter

STREAM = (
    b"\xef\xbb\xbf: a comment\n"
    b'data: {"text": "one"}\n\n'
    b"event: delta\r\ndata:two\r\nid: 7\r\nretry: 10\r\n\r\n"
    b"event: lost\n\n"
    b"data: three\ndata: and more\ndata\n\n\n\n"
    b"data: caf\xc3\xa9 \xe2\x80\xa8 \x85 end\n\n"
    b"event: last\rdata: five\r\r"
)
EVENTS = [
    SseEvent("message", b'{"text": "one"}'),
    SseEvent("delta", b"two"),
    SseEvent("message", b"three\nand more\n"),
    SseEvent("message", "caf\u00e9 \u2028 ".encode() + b"\x85 end"),
    SseEvent("last", b"five"),
]


def split(blocks: list[bytes]) -> list[SseEvent]:
    """Feed blocks to a new splitter and return every event."""
    splitter = SseSplitter()
    events = [event for block in blocks for event in splitter.feed(block)]
    return events + splitter.flush()


def test_one_block() -> None:
    """Comments, names, several lines of data and all three line ends are read."""
    assert split([STREAM]) == EVENTS


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_equal_blocks(size: int) -> None:
    """Blocks of any size give the same events."""
    blocks = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert split(blocks) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_any_cuts(places: list[int]) -> None:
    """Blocks cut anywhere, empty ones too, give the same events."""
    ends = [*sorted(places), len(STREAM)]
    starts = [0, *sorted(places)]
    blocks = [STREAM[start:end] for start, end in zip(starts, ends, strict=True)]
    assert split(blocks) == EVENTS


def test_an_event_comes_with_its_last_byte() -> None:
    """An event is given out by the block that completes it, not before and not later."""
    splitter = SseSplitter()
    assert splitter.feed(b"data: a\n") == []
    assert splitter.feed(b"\ndata: b") == [SseEvent("message", b"a")]
    assert splitter.feed(b"\n\ndata: c\n\n") == [
        SseEvent("message", b"b"),
        SseEvent("message", b"c"),
    ]


def test_a_stream_cut_off_gives_what_had_come() -> None:
    """The last event's data counts even if the empty line after it never came."""
    assert split([b"data: [DONE]"]) == [SseEvent("message", b"[DONE]")]
    assert split([b"event: x"]) == []
