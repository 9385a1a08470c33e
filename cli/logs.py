"""Send the project's log records to stderr."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Log our own records from `level` on, and other libraries' from warning on.

    Replaces the root logger's handlers: a command configures its process's logging once.
    """
    logging.basicConfig(stream=sys.stderr, format=FORMAT, level=logging.WARNING, force=True)
    logging.getLogger("vllm_mlx").setLevel(level.upper())
