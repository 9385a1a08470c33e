"""Show how far `warm` is, and say what it has done."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import click

from vllm_mlx.cli.errors import printable
from vllm_mlx.engine.errors import InvalidRequestError

#: Called with how much is done.
OnDone = Callable[[int], None]


@dataclass
class WarmCounts:
    """Count what became of prompts."""

    #: Prefixes stored now, and those that were stored before.
    stored: int = 0
    skipped: int = 0
    #: Prompts that do not fill one block, of which nothing is ever stored.
    too_short: int = 0
    computed_tokens: int = 0
    failures: list[str] = field(default_factory=list)


class WarmReport:
    """Hold the counts of one run and print them; data goes to stdout, remarks to stderr."""

    def __init__(self, where: str, *, as_json: bool) -> None:
        self.counts = WarmCounts()
        self._where = where
        self._as_json = as_json
        self._began = time.monotonic()

    def print_counts(self) -> None:
        """Say what was done; to a log nothing where nothing was."""
        counts, elapsed_s = self.counts, time.monotonic() - self._began
        if self._as_json:
            print_json({**asdict(counts), "elapsed_s": round(elapsed_s, 3)})
        elif counts.stored or counts.computed_tokens or sys.stderr.isatty():
            parts = [
                f"{_prefixes(counts.stored)} stored in {elapsed_s:.1f} s, "
                f"{counts.computed_tokens:,} tokens computed",
                f"{counts.skipped} stored before" if counts.skipped else "",
                f"{counts.too_short} too short to be stored" if counts.too_short else "",
            ]
            line = "; ".join(filter(None, parts))
            click.echo(f"{printable(self._where)}: {line}", err=True)


def raise_failures(failures: Sequence[str]) -> None:
    """Say what is wrong with each prompt that could not be warmed, and raise if any could not."""
    for failure in failures:
        click.echo(f"Warning: {printable(failure)}", err=True)
    if failures:
        raise InvalidRequestError(
            f"{len(failures)} of the prompts cannot be warmed; all others are dealt with"
        )


def print_json(fields: dict[str, Any]) -> None:
    """Print one object on stdout."""
    click.echo(json.dumps(fields, ensure_ascii=False))


@contextlib.contextmanager
def progress_bar(total: int, what: str) -> Iterator[OnDone]:
    """Give what shows how much is done of a total: a bar in a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield show_nothing
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


def show_nothing(done: int) -> None:
    """Take how much is done, where nobody looks."""
    del done


def _prefixes(count: int) -> str:
    return "1 prefix" if count == 1 else f"{count} prefixes"
