"""Show on stderr how far loading is: a moving bar in a terminal, a line a stage elsewhere."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from vllm_mlx.cli.errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress


class LoadingProgress:
    """Show stages as they come; a context manager, and the callback that loading calls.

    Called from one thread only. May be entered again after it was left.
    """

    def __init__(self) -> None:
        self._stage: str | None = None
        self._progress: Progress | None = None
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._progress = self._exits.enter_context(_terminal_progress())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exits.close()
        self._progress = None

    def __call__(self, stage: str, fraction: float | None) -> None:
        """Show that loading is at `fraction` (0 to 1, None if unknown) of `stage`."""
        stage = printable(stage)
        if self._progress is None:
            if stage != self._stage:
                click.echo(f"{stage} ...", err=True)
        else:
            if stage != self._stage or not self._progress.task_ids:
                for task_id in self._progress.task_ids:
                    self._progress.remove_task(task_id)
                self._progress.add_task(stage, total=None)
            self._progress.update(
                self._progress.task_ids[-1],
                total=None if fraction is None else 1.0,
                completed=fraction or 0.0,
            )
        self._stage = stage


def _terminal_progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        Elapsed(),
        console=Console(stderr=True),
        transient=True,
    )
