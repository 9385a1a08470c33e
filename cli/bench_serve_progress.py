"""Show on stderr how far a measurement is, at a cost that it does not measure."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from vllm_mlx.bench.runner import Runner

_REFRESH_S = 0.5
_CLEAR_LINE = "\r\x1b[2K"


class MeasuringProgress:
    """Rewrite one line in a terminal, twice a second; print a line a repetition elsewhere.

    A progress bar with a thread of its own would take the interpreter away from the sockets.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._timer: asyncio.TimerHandle | None = None
        self._runner: Runner | None = None
        self._label = ""
        self._said: str | None = None

    def say(self, text: str) -> None:
        """Tell what is being done; the same again is not repeated."""
        if self._is_terminal:
            self._write(_CLEAR_LINE + text)
        elif text != self._said and not text.endswith("preparing"):
            click.echo(text, err=True)
        self._said = text

    def began(self, label: str, repetition: int, runner: Runner) -> None:
        """Begin to watch a repetition."""
        self._label = f"{label}, repetition {repetition}"
        self._runner = runner
        if self._is_terminal:
            self._timer = asyncio.get_running_loop().call_later(_REFRESH_S, self._show)

    def ended(self, row: Mapping[str, Any] | None) -> None:
        """Stop watching, and say what was measured."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._runner = None
        start = _CLEAR_LINE if self._is_terminal else ""
        click.echo(f"{start}{self._label}: {_result(row)}", err=True)

    def clear(self) -> None:
        """Leave an empty line behind in a terminal."""
        if self._is_terminal:
            self._write(_CLEAR_LINE)

    def _show(self) -> None:
        assert self._runner is not None
        records = self._runner.records
        failed = sum(not record.is_ok for record in records)
        failures = f", {failed} failed" if failed else ""
        progress = f"{len(records)} of {self._runner.num_planned}"
        self._write(f"{_CLEAR_LINE}{self._label}: {progress} requests{failures}")
        self._timer = asyncio.get_running_loop().call_later(_REFRESH_S, self._show)

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _result(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "interrupted before a request ended"
    parts = [f"{row['completed']} of {row['requests']} ok"]
    if row["ttft_p50"] is not None:
        parts.append(f"ttft p50 {row['ttft_p50']:.1f} ms")
    if row["e2el_p50"] is not None:
        parts.append(f"e2el p50 {row['e2el_p50']:.1f} ms")
    if row["output_tps"] is not None:
        parts.append(f"{row['output_tps']:.1f} tok/s")
    if row["failures_by_kind"]:
        parts.append(", ".join(f"{n} {kind}" for kind, n in row["failures_by_kind"].items()))
    return ", ".join(parts) + (" (partial)" if row["is_partial"] else "")
