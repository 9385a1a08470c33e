"""What `serve` says on stderr beside its log: text as it is, JSON as log records."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import click
import pytest

from vllm_mlx.cli.logs import echoes_logged

#: Everything that may be said in a run: our records, a library's, a warning and an echo.
PROGRAM = """
import logging, sys, warnings
import click
from vllm_mlx.cli.logs import configure_logging, echoes_logged
configure_logging("info", sys.argv[1])
logging.getLogger("vllm_mlx.x").info("ours")
logging.getLogger("library").info("not told")
logging.getLogger("library").warning("theirs")
warnings.warn("careful")
with echoes_logged(sys.argv[1]):
    click.echo("announced", err=True)
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("vllm_mlx.x").exception("broken")
"""


def stderr_of(log_format: str) -> str:
    """Run the program in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, log_format]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def test_with_json_every_line_is_an_object() -> None:
    """Records, warnings, announcements and a traceback."""
    lines = [json.loads(line) for line in stderr_of("json").splitlines()]
    told = [(line["level"], line["message"].splitlines()[0]) for line in lines]
    assert told[:2] == [("info", "ours"), ("warning", "theirs")]
    assert told[2][0] == "warning"
    assert "careful" in told[2][1]
    assert told[3:] == [("info", "announced"), ("error", "broken")]
    assert "ZeroDivisionError" in lines[-1]["exception"]


def test_text_is_for_people() -> None:
    """Records have a time and a level, and announcements are as they are."""
    text = stderr_of("text")
    assert " INFO vllm_mlx.x: ours\n" in text
    assert " WARNING library: theirs\n" in text
    assert "\nannounced\n" in text
    assert "not told" not in text
    assert "ZeroDivisionError: division by zero" in text


def test_what_is_echoed_is_logged_line_by_line(caplog: pytest.LogCaptureFixture) -> None:
    """Each line is a record of its own."""
    caplog.set_level(logging.INFO)
    with echoes_logged("json"):
        click.echo("one\n  two", err=True)
    assert [record.message for record in caplog.records] == ["one", "two"]
