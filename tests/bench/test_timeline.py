"""Hold how requests fail, and what a record keeps of one."""

from __future__ import annotations

import json

import pytest
from support.api_answers import answer_events, event

from vllm_mlx.bench.endpoints import endpoint_named
from vllm_mlx.bench.metrics import gaps_s, measures, tpot_s, ttft_s
from vllm_mlx.bench.timeline import Place, RequestRecord, RequestRecorder

START, WORDS, END = answer_events("chat", ["a", "b", "c"], prompt_tokens=5)


def record(
    *blocks: tuple[float, bytes],
    status: int = 200,
    content_type: str = "text/event-stream; charset=utf-8",
    is_streamed: bool = True,
) -> RequestRecord:
    """Record blocks at their times; the request began at 1 and ends with the last block."""
    recorder = RequestRecorder(
        endpoint_named("chat"),
        Place(0, "p"),
        scheduled_at=0.5,
        is_streamed=is_streamed,
        max_tokens=8,
    )
    recorder.started(1.0)
    recorder.head(status, content_type, 1.25)
    for at, block in blocks:
        recorder.body(block, at)
    return recorder.ended(blocks[-1][0] if blocks else 1.25)


def failure_kind(found: RequestRecord) -> str | None:
    """Return why a request failed."""
    return found.failure.kind if found.failure is not None else None


def test_a_good_stream() -> None:
    """n tokens have n - 1 gaps, and TPOT divides by these."""
    found = record(
        (2.0, START[0] + WORDS[0]), (3.0, WORDS[1]), (5.0, WORDS[2]), (5.5, b"".join(END))
    )
    assert found.failure is None
    assert found.event_times == (2.0, 3.0, 5.0)
    assert (ttft_s(found), gaps_s(found), tpot_s(found)) == (1.0, [1.0, 2.0], 1.5)
    assert (found.first_byte_at, found.ended_at, found.finished_at) == (1.25, 5.5, 5.5)


def test_tokens_that_no_event_showed() -> None:
    """Where more tokens are counted than shown, the finish reason ends the last of them."""
    usage = {"completion_tokens": 4}
    end = [
        event({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
        event({"choices": [], "usage": usage}),
    ]
    found = record((2.0, WORDS[0]), (3.0, WORDS[1]), (4.0, WORDS[2]), (5.0, end[0]), (9.0, end[1]))
    assert tpot_s(found) == 1.0


def test_tokens_that_come_at_once_have_no_tpot() -> None:
    """One event with several tokens shows nothing of their rate."""
    usage = event({"choices": [{"delta": {}, "finish_reason": "stop"}],
                   "usage": {"completion_tokens": 50}})  # fmt: skip
    assert tpot_s(record((2.0, WORDS[0]), (2.5, usage))) is None


@pytest.mark.parametrize(
    ("blocks", "kind"),
    [
        ([START[0], *WORDS], "cut"),
        ([START[0]], "cut"),
        ([START[0], *END], "empty"),
        ([*WORDS, event({"error": {"message": "broke"}})], "error"),
        ([WORDS[0], b"data: {not json\n\n", *END], "invalid"),
        ([WORDS[0], b'data: {"choices": [5]}\n\n', *END], "invalid"),
    ],
)
def test_streams_that_fail(blocks: list[bytes], kind: str) -> None:
    """A stream cut off, empty, with an error or of another shape has failed, each by its kind."""
    assert failure_kind(record(*((2.0, block) for block in blocks))) == kind


def test_a_stream_may_end_with_its_mark_alone() -> None:
    """Servers that never send a finish reason are measured all the same."""
    found = record((2.0, WORDS[0]), (3.0, b"data: [DONE]\n\n"))
    assert found.failure is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too many"}}', "too many"),
        (b'{"detail": "too many"}', "too many"),
        (b"<html>", "<html>"),
        (b"", "an empty body"),
    ],
)
def test_http_errors(body: bytes, message: str) -> None:
    """A bad status is a failure named after it, with the server's own words."""
    found = record((2.0, body), status=429, content_type="application/json")
    assert found.failure is not None
    assert (found.failure.kind, found.failure.message) == ("http_429", message)


def test_a_stream_that_came_whole_is_measured_as_whole() -> None:
    """A server that ignores `stream` gives an answer without a first output."""
    body = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}
    found = record((4.0, json.dumps(body).encode()), content_type="application/json")
    assert (found.failure, found.event_times, ttft_s(found)) == (None, (), None)


def test_failed_requests_count_apart() -> None:
    """Failures are counted by kind and leave latencies and throughput alone."""
    good = record((2.0, START[0] + b"".join(WORDS)), (3.0, b"".join(END)))
    failed = record((9.0, b"{}"), status=500, content_type="application/json")
    columns = measures([good, failed, failed], None)
    assert (columns["requests"], columns["completed"], columns["failures"]) == (3, 1, 2)
    assert columns["failures_by_kind"] == {"http_500": 2}
    assert columns["e2el_max"] == 2000
    # The time that failures took is part of the duration.
    assert columns["duration_s"] == 8
    assert columns["output_tps"] == 3 / 8


def test_nothing_measured() -> None:
    """Without any request every measure is missing, and none is made up."""
    columns = measures([], None)
    assert columns["success_rate"] is None
    assert columns["ttft_p50"] is None
    assert columns["output_tps"] is None
