"""The options of `serve` that say what it shows of its work: logs and metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from vllm_mlx.cli.options import Decorator, option, stacked

#: From all to little; `step` is `info` and a line for each step of the engine.
LOG_LEVELS = ("debug", "step", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

operation_options: Decorator[Any] = stacked(
    option(
        "--log-level",
        type=click.Choice(LOG_LEVELS),
        default="info",
        help="What to log; step is info and one line for each step of the engine.",
    ),
    option(
        "--log-format",
        type=click.Choice(LOG_FORMATS),
        default="text",
        help="Log lines for people, or JSON objects, one a line.",
    ),
    option("--log-prompts", is_flag=True, help="Log what each request asks, too: private!"),
    option(
        "--metrics",
        "--enable-metrics",
        is_flag=True,
        help="Answer GET /metrics, for Prometheus and without a key.",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationOptions:
    """Hold the parsed options of `operation_options`, by the names of their flags."""

    log_level: str
    log_format: str
    log_prompts: bool
    metrics: bool

    def operation_fields(self) -> dict[str, Any]:
        """Return the fields of `ServerConfig` that they become."""
        return {"log_prompts": self.log_prompts, "metrics": self.metrics}
