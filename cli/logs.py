"""Send the project's log records to stderr, as text or as JSON."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator

from vllm_mlx.engine.logs import TEXT_FORMAT, JsonFormatter, set_level

logger = logging.getLogger(__name__)


def configure_logging(level: str, log_format: str = "text") -> None:
    """Log our own records from `level` on, and other libraries' from warning on.

    Replaces the root logger's handlers: a command configures its process's logging once. With
    `json` Python's own warnings are log records, too.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_json = log_format == "json"
    handler.setFormatter(JsonFormatter() if is_json else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(is_json)
    set_level(level)


@contextlib.contextmanager
def echoes_logged(log_format: str) -> Iterator[None]:
    """Log what is echoed to stderr meanwhile instead, if logs are JSON: each line of it parses."""
    if log_format != "json":
        yield
        return
    with contextlib.redirect_stderr(_LoggedLines()):
        yield


class _LoggedLines(io.TextIOBase):
    """Log each line that is written."""

    def write(self, text: str) -> int:
        """Log the lines of `text`, which is whole ones; raise TypeError for bytes."""
        if not isinstance(text, str):
            # By this click tells a stream of text from one of bytes.
            raise TypeError(f"text is written here, not {type(text).__name__}")
        for line in text.splitlines():
            logger.info("%s", line.strip())
        return len(text)
