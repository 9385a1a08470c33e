"""The options that select stored prefixes, shared by the commands of `cache`."""

from __future__ import annotations

import re
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vllm_mlx.cli.options import Decorator, stacked
from vllm_mlx.cli.pending import env_name

if TYPE_CHECKING:
    from vllm_mlx.cache_tools.selection import Selection

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


def parse_moment(text: str) -> float:
    """Return the seconds since the epoch of an age such as `7d`, or of a date and time.

    Raises `BadParameter` for anything else.
    """
    if match := _AGE.fullmatch(text.strip()):
        return time.time() - float(match[1]) * _UNITS_S[match[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(
            f"{text!r} is neither an age such as 30m, 12h, 7d or 2w nor a date such as "
            "2026-01-31 or 2026-01-31T18:00."
        ) from error


directory_argument: Decorator[Any] = click.argument(
    "directory",
    metavar="DIR",
    type=click.Path(path_type=Path),
    envvar=env_name("--ssd-cache-dir"),
)

# None of these can be set by a variable: what another command's settings name must not decide what
# is removed.
selection_options: Decorator[Any] = stacked(
    click.option(
        "--model",
        "models",
        multiple=True,
        metavar="NAME",
        help="Only of this model; may hold * and ?, and be given more than once.",
    ),
    click.option(
        "--namespace",
        "namespaces",
        multiple=True,
        metavar="HEX",
        help="Only of the namespaces whose digest begins so; may be given more than once.",
    ),
    click.option(
        "--older-than",
        type=parse_moment,
        metavar="AGE",
        help="Only what was stored longer ago than this: 30m, 12h, 7d, 2w, or a date.",
    ),
    click.option(
        "--unused-since",
        type=parse_moment,
        metavar="WHEN",
        help="Only what was last used before this: an age, or a date such as 2026-01-31.",
    ),
)


def build_selection(
    models: tuple[str, ...],
    namespaces: tuple[str, ...],
    older_than: float | None,
    unused_since: float | None,
    min_hits: int | None = None,
) -> Selection:
    """Return the selection that the options stand for; raise `UsageError` for a wrong digest."""
    from vllm_mlx.cache_tools.selection import Selection

    wrong = [start for start in namespaces if not re.fullmatch(r"[0-9a-fA-F]+", start)]
    if wrong:
        raise click.UsageError(f"{wrong[0]!r} is not the beginning of a namespace's digest")
    return Selection(models, namespaces, older_than, unused_since, min_hits)
