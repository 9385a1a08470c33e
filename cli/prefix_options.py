"""The options of `serve` that say what to warm at the start, and where to record requests."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from vllm_mlx.cli.options import Decorator, option, stacked

normalize_option: Decorator[Any] = option(
    "--normalize-prompts/--no-normalize-prompts",
    default=True,
    help="Take the lines that an agent changes with each request out of system text on "
    "/v1/messages, so that what follows them is found stored.",
)

prefix_options: Decorator[Any] = stacked(
    option(
        "--warm-prompts",
        type=click.Path(),
        metavar="FILE",
        help="Compute the prefixes of these prompts (JSON, JSON Lines, or a folder of them) in "
        "the background, once the model answers.",
    ),
    option(
        "--record",
        type=click.Path(file_okay=False),
        metavar="DIR",
        help="Write the requests that come, without keys, to this folder, for "
        "'vllm-mlx warm --prompts DIR'. They hold what your users say.",
    ),
    normalize_option,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixOptions:
    """Hold the parsed options of `prefix_options`, by the names of their flags."""

    warm_prompts: str | None
    record: str | None
    normalize_prompts: bool

    def prefix_fields(self) -> dict[str, Any]:
        """Return the fields of `ServerConfig` that they become."""
        return {
            "warm_prompts": self.warm_prompts,
            "record_dir": self.record,
            "normalize_prompts": self.normalize_prompts,
        }
