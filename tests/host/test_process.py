"""What an engine process prints is logged at its level, and how it ended is put in words."""

from __future__ import annotations

import logging

import pytest

from vllm_mlx.engine.host.process import ExitReport, ProcessLog


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> ProcessLog:
    """Return a log whose lines are captured at every level."""
    caplog.set_level(logging.DEBUG)
    return ProcessLog()


def test_lines_are_logged_at_their_own_level(
    log: ProcessLog, caplog: pytest.LogCaptureFixture
) -> None:
    """A level's name sets the level of its line and of a traceback after it."""
    log.data_received(b"plain\nERROR vllm_mlx.x: it fai")
    log.data_received(b"led\nTraceback:\n  line\nINFO vllm_mlx.y: on\nmore")
    log.connection_lost(None)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "plain"),
        ("ERROR", "vllm_mlx.x: it failed"),
        ("ERROR", "Traceback:"),
        ("ERROR", "  line"),
        ("INFO", "vllm_mlx.y: on"),
        ("INFO", "more"),
    ]
    assert log.ended.is_set()


def test_redrawn_and_empty_lines_are_not_noise(
    log: ProcessLog, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a progress bar the last state is logged, of an empty line nothing."""
    log.data_received(b"\n 10%\r 50%\r100%\r\n\n")
    assert [record.message for record in caplog.records] == ["100%"]


def test_the_last_lines_are_kept_and_no_more(log: ProcessLog) -> None:
    """Twenty lines are remembered; a line without an end is cut instead of kept."""
    log.data_received(b"".join(b"line %d\n" % i for i in range(100)))
    assert log.last_words == tuple(f"line {i}" for i in range(80, 100))
    log.data_received(b"x" * 200_000)
    assert len(log.last_words[-1]) == 200_000
    log.data_received(b"\xff\n")
    assert log.last_words[-1] == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (ExitReport(-9), "the engine process was killed by signal 9 (SIGKILL)"),
        (ExitReport(-6, ("abort",)), "the engine process was killed by signal 6 (SIGABRT)"),
        (ExitReport(-99), "the engine process was killed by signal 99 (unknown)"),
        (ExitReport(70), "the engine process ended with exit code 70"),
        (ExitReport(None), "the engine process closed its connection and could not be ended"),
        (
            ExitReport(None, start_error="no memory"),
            "the engine process could not be started: no memory",
        ),
    ],
)
def test_ends_are_put_in_words(report: ExitReport, words: str) -> None:
    """Signals have names, exit codes numbers, and a failed start its reason."""
    assert report.headline == words


def test_last_words_follow_the_headline() -> None:
    """A description quotes the last lines, each on a line of its own."""
    assert ExitReport(1, ("one", "two")).describe() == (
        "the engine process ended with exit code 1; its last words:\n  one\n  two"
    )
    assert ExitReport(1).describe() == "the engine process ended with exit code 1"
