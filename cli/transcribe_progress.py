"""Show on stderr how far `transcribe` is: a moving bar in a terminal, a line a file elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from vllm_mlx.cli.errors import printable


class HearingProgress:
    """Tell of each file once it is done, and meanwhile of how far it is. One thread only."""

    def __init__(
        self, num_files: int, *, is_quiet: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_files = num_files
        self._is_quiet = is_quiet
        self._clock = clock
        self._number = 0

    def skip(self, name: str) -> None:
        """Say that a file was done before."""
        self._number += 1
        self._say(f"{name}: done before; --force does it again")

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[Callable[[float, float | None], None]]:
        """Show one file while the block runs; what it yields is told how far that is."""
        self._number += 1
        started = self._clock()
        if self._is_quiet or not sys.stderr.isatty():
            yield _unshown
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        bar = Progress(
            TextColumn(f"[{self._number}/{self._num_files}]", markup=False),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TextColumn("{task.fields[speed]}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        with bar:
            task = bar.add_task(printable(Path(name).name), total=None, speed="")

            def heard(done_s: float, duration_s: float | None) -> None:
                speed = _speed(done_s, self._clock() - started) if done_s else ""
                bar.update(task, completed=done_s, total=duration_s, speed=speed)

            yield heard

    def done(self, name: str, duration_s: float, seconds: float, outputs: Sequence[Path]) -> None:
        """Say what became of a file, and how fast."""
        written = f", written to {', '.join(map(str, outputs))}" if outputs else ""
        speed = _speed(duration_s, seconds)
        self._say(f"{name}: {_length(duration_s)} of sound in {seconds:.1f} s ({speed}){written}")

    def failed(self, name: str, reason: str) -> None:
        """Say what is wrong with a file; not even a quiet command is silent about that."""
        click.echo(f"Error: {printable(name)}: {printable(reason)}", err=True)

    def _say(self, line: str) -> None:
        if not self._is_quiet:
            click.echo(printable(line), err=True)


def _unshown(done_s: float, duration_s: float | None) -> None:
    del done_s, duration_s


def _speed(sound_s: float, seconds: float) -> str:
    """Return how many times faster than real time that is."""
    return f"{sound_s / max(seconds, 1e-3):.1f}x real time"


def _length(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
