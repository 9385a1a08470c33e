"""How the project's log records are written: as text, as JSON, and from process to process.

A record may carry `fields`, given as `extra={"fields": {...}}`: what its message says, for
programs. The level `step` is `info` and one line for each step of the engine besides.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

PROJECT_LOGGER = "vllm_mlx"
STEPS_LOGGER = "vllm_mlx.engine.steps"

#: Between `debug`, which leaves these lines out, and `info`.
STEP = 15
logging.addLevelName(STEP, "STEP")

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

#: What a record on its way from the engine process begins with; no text line does.
_RECORD_MARK = "\x1e"

#: A line from the engine process is at most 64 KiB, and a character may take six bytes of it.
_MAX_TEXT = 5000


def set_level(name: str) -> None:
    """Have the project's loggers write from level `name` on, as `logging` names it, or `STEP`."""
    name = name.upper()
    logging.getLogger(PROJECT_LOGGER).setLevel("INFO" if name == "STEP" else name)
    # Not part of `debug`: fifty lines a second would bury what it is asked for.
    logging.getLogger(STEPS_LOGGER).setLevel(STEP if name == "STEP" else logging.WARNING)


def level_name() -> str:
    """Return the name that `set_level` was given, or that stands for what is set."""
    if logging.getLogger(STEPS_LOGGER).isEnabledFor(STEP):
        return "STEP"
    return logging.getLevelName(logging.getLogger(PROJECT_LOGGER).getEffectiveLevel())


class JsonFormatter(logging.Formatter):
    """Write each record as one JSON object on one line: traceback included, ASCII only."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        exception = _exception_text(self, record)
        if exception:
            line["exception"] = exception
        return json.dumps(line, default=str)


class RecordFormatter(logging.Formatter):
    """Write each record as a line that `read_record` makes the same record of elsewhere."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        made = {
            "name": record.name,
            "levelno": record.levelno,
            "levelname": record.levelname,
            "msg": _bounded(record.getMessage()),
            "exc_text": _bounded(_exception_text(self, record) or "") or None,
            "created": record.created,
            "msecs": record.msecs,
            "process": record.process,
            "fields": getattr(record, "fields", {}),
        }
        return _RECORD_MARK + json.dumps(made, default=str)


def read_record(line: str) -> logging.LogRecord | None:
    """Make the record that a `RecordFormatter` wrote; None for any other line."""
    if not line.startswith(_RECORD_MARK):
        return None
    try:
        made = json.loads(line.removeprefix(_RECORD_MARK))
    except ValueError:
        return None
    return logging.makeLogRecord(made)


def _bounded(text: str) -> str:
    """Return what of a text fits a line of the process's log: its beginning and its end."""
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[: _MAX_TEXT // 2]}\n[...]\n{text[-_MAX_TEXT // 2 :]}"


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _exception_text(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    """Return the traceback of a record, wherever it was made."""
    if record.exc_info and not record.exc_text:
        return formatter.formatException(record.exc_info)
    if record.stack_info and not record.exc_text:
        return formatter.formatStack(record.stack_info)
    return record.exc_text
