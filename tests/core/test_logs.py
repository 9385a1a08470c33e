"""How log records are written: JSON lines, and from process to process."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from vllm_mlx.engine.core.step_log import StepLog
from vllm_mlx.engine.host.process import ProcessLog
from vllm_mlx.engine.logs import (
    STEP,
    STEPS_LOGGER,
    JsonFormatter,
    RecordFormatter,
    level_name,
    read_record,
    set_level,
)


def failed_record(message: str, **fields: object) -> logging.LogRecord:
    """Make a record with a traceback and fields."""
    try:
        raise ValueError("two\nlines")
    except ValueError:
        info = sys.exc_info()
    record = logging.LogRecord("vllm_mlx.x", logging.ERROR, "x.py", 1, message, (), info)
    record.fields = fields
    return record


@pytest.fixture
def steps_level() -> Iterator[None]:
    """Leave the logger of steps as it was."""
    steps = logging.getLogger(STEPS_LOGGER)
    level = steps.level
    yield
    steps.setLevel(level)


def test_a_record_is_one_json_object_on_one_line() -> None:
    """Its traceback, line breaks, fields and characters of any kind are inside."""
    line = JsonFormatter().format(failed_record("a\nb \ud800\u2028", request_id="r", ms=1.5))
    assert line.splitlines() == [line]
    read = json.loads(line)
    assert (read["level"], read["logger"], read["request_id"]) == ("error", "vllm_mlx.x", "r")
    assert (read["message"], read["ms"]) == ("a\nb \ud800\u2028", 1.5)
    assert read["exception"].startswith("Traceback (most recent call last):\n")
    assert read["exception"].endswith("ValueError: two\nlines")
    assert read["time"].endswith("Z")


def test_a_record_of_the_engine_process_arrives_whole(caplog: pytest.LogCaptureFixture) -> None:
    """Logger, level, message, traceback, fields and process are those that it was made with."""
    caplog.set_level(logging.INFO)
    sent = failed_record("100% bad\nindeed", step=3)
    sent.process = 77
    line = RecordFormatter().format(sent)
    log = ProcessLog()
    log.data_received(line.encode() + b"\nnative words\n")
    record, native = caplog.records
    assert (record.name, record.levelname, record.process) == ("vllm_mlx.x", "ERROR", 77)
    assert record.getMessage() == "100% bad\nindeed"
    assert json.loads(JsonFormatter().format(record))["step"] == 3
    assert "ValueError: two\nlines" in logging.Formatter().format(record)
    assert (native.levelname, native.message) == ("INFO", "native words")
    assert log.last_words[0] == "vllm_mlx.x: 100% bad"
    assert log.last_words[-2:] == ("lines", "native words")


def test_a_record_of_any_length_arrives(caplog: pytest.LogCaptureFixture) -> None:
    """A long message is cut in its middle, so that its line is not cut at its end."""
    log = ProcessLog()
    text = "\N{SNOWMAN}" * 100_000 + "end"
    log.data_received(RecordFormatter().format(failed_record(text)).encode() + b"\n")
    (record,) = caplog.records
    assert record.getMessage().startswith("\N{SNOWMAN}" * 2500 + "\n[...]\n")
    assert record.getMessage().endswith("\N{SNOWMAN}end")


@pytest.mark.parametrize("line", ["\x1enot json", "plain", "\x1e"])
def test_a_line_that_is_no_record_is_text(line: str) -> None:
    """Whatever a library prints cannot break the log."""
    assert read_record(line) is None


def test_the_step_level_is_info_with_steps(
    steps_level: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps are logged at their own level only, not while debugging."""
    seen = {}
    for name in ("step", "debug", "info", "warning"):
        set_level(name)
        seen[name] = (
            level_name(),
            logging.getLogger("vllm_mlx.engine.engine").getEffectiveLevel(),
            logging.getLogger(STEPS_LOGGER).isEnabledFor(STEP),
        )
    assert seen == {
        "step": ("STEP", logging.INFO, True),
        "debug": ("DEBUG", logging.DEBUG, False),
        "info": ("INFO", logging.INFO, False),
        "warning": ("WARNING", logging.WARNING, False),
    }


def test_a_step_is_one_line(steps_level: None, caplog: pytest.LogCaptureFixture) -> None:
    """It says how many wait and run, what is computed, what was found, and how long it took."""
    times = iter([1.0, 2.0, 2.0125])
    log = StepLog(lambda: next(times))
    log.begin()
    log.end(1, num_waiting=0, num_running=0)
    assert caplog.records == []
    set_level("step")
    log.begin()
    log.planned(num_decoded=2, num_prefilled=510, num_hits=64)
    log.end(7, num_waiting=3, num_running=2)
    (record,) = caplog.records
    assert record.levelname == "STEP"
    assert record.getMessage() == (
        "step 7: waiting 3, running 2, scheduled tokens 512 (prefill 510), prefix hits 64, 12.5 ms"
    )
    assert record.__dict__["fields"]["scheduled_tokens"] == 512
