"""Where the results of `bench-serve` go: stdout, files, figures and CI's own formats."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from vllm_mlx.bench.gates import GateResult
from vllm_mlx.bench.output.files import (
    check_writable,
    csv_text,
    format_of,
    json_lines,
    json_text,
    tables_of,
    write_results,
    write_text,
)
from vllm_mlx.bench.output.reports import append_text, junit_text, summary_text
from vllm_mlx.bench.output.shown import Shown, cases_overview, gates_overview, overview
from vllm_mlx.bench.output.tables import ROW_TABLE
from vllm_mlx.bench.results import Results
from vllm_mlx.cli.bench_serve_options import OutputOptions
from vllm_mlx.engine.errors import UsageError

#: Columns of a table that is not shown in a terminal.
_WIDE = 240


class ResultWriter:
    """Write a run's results as the options say; `check` finds what cannot work."""

    def __init__(self, options: OutputOptions, confidence: float) -> None:
        self._options = options
        self._confidence = confidence

    def check(self) -> None:
        """Raise `UsageError` for outputs that cannot be written."""
        options = self._options
        for path in (options.output, options.junit, options.summary):
            if path is not None:
                check_writable(path)
        if options.plot is not None:
            from vllm_mlx.bench.plots import TERMINAL, check_plot

            check_plot(options.plot)
            if options.plot == TERMINAL and self._stdout_format() not in ("table", "markdown"):
                raise UsageError("--plot - would mix with the data on stdout; give --output")
        file_format = self._file_format()
        if options.output is None and file_format == "sqlite":
            raise UsageError("--format sqlite needs --output")
        if options.raw and file_format in ("table", "markdown"):
            raise UsageError("--raw needs a csv, json, jsonl or sqlite file: give --output")
        if options.raw and options.output is None and file_format != "json":
            raise UsageError(f"--raw with --format {file_format} writes two files: give --output")

    def write(self, results: Results, gates: Sequence[GateResult]) -> None:
        """Write everything that was asked for."""
        options = self._options
        tables = tables_of(results, with_requests=options.raw)
        summary = summary_text(results.rows, results.cases, gates, results.notes, self._confidence)
        stdout_format = self._stdout_format()
        if options.output is not None:
            self._write_file(results, gates, summary)
        if stdout_format == "json":
            click.echo(json_text(tables, results.notes), nl=False)
        elif stdout_format == "csv":
            click.echo(csv_text(results.rows, ROW_TABLE), nl=False)
        elif stdout_format == "jsonl":
            click.echo(json_lines(results.rows), nl=False)
        elif stdout_format == "markdown":
            click.echo(summary, nl=False)
        else:
            self._print_tables(results, gates)
        if options.junit is not None:
            write_text(options.junit, junit_text(gates, results.cases))
        if options.summary is not None:
            append_text(options.summary, summary)
        if options.plot is not None:
            self._draw(options.plot, results)
        if stdout_format not in ("table", "markdown"):
            show_tables([gates_overview(gates)] if gates else [], is_data=False)
        for note in results.notes:
            click.echo(f"Note: {note}", err=True)

    def _write_file(self, results: Results, gates: Sequence[GateResult], summary: str) -> None:
        path, file_format = self._options.output, self._file_format()
        assert path is not None
        if file_format == "markdown":
            write_text(path, summary)
        elif file_format == "table":
            write_text(path, tables_text(_tables(results, gates, self._confidence)))
        else:
            tables = tables_of(results, with_requests=self._options.raw)
            write_results(path, file_format, tables, results.notes)

    def _print_tables(self, results: Results, gates: Sequence[GateResult]) -> None:
        show_tables(_tables(results, gates, self._confidence), is_data=True)

    def _draw(self, target: str, results: Results) -> None:
        try:
            draw(target, results)
        except UsageError as error:
            # A run without any answer has nothing to draw, and an exit code of its own.
            click.echo(f"Note: {error.message}", err=True)

    def _file_format(self) -> str:
        """Return the format of the output file, or of stdout where there is none."""
        if self._options.output is not None:
            return format_of(self._options.output, self._options.file_format)
        is_auto = self._options.file_format == "auto"
        return "table" if is_auto else self._options.file_format

    def _stdout_format(self) -> str:
        """Return what stdout carries: the table for people beside a file, else the data."""
        return "table" if self._options.output is not None else self._file_format()


def show_tables(tables: Sequence[Shown], *, is_data: bool) -> None:
    """Print tables: data on stdout, anything else on stderr."""
    stream = sys.stdout if is_data else sys.stderr
    width = None if stream.isatty() else _WIDE
    for table in tables:
        _render(table, stream, width)


def tables_text(tables: Sequence[Shown]) -> str:
    """Return tables as text for a file."""
    import io

    stream = io.StringIO()
    for table in tables:
        _render(table, stream, _WIDE)
    return stream.getvalue()


def draw(target: str, results: Results) -> None:
    """Draw the figures of a run."""
    from vllm_mlx.bench.plots import plot

    text = plot(target, results.rows, results.requests)
    if text is not None:
        click.echo(text)


def _tables(results: Results, gates: Sequence[GateResult], confidence: float) -> list[Shown]:
    tables = [overview(results.rows, confidence)]
    if results.cases:
        tables.append(cases_overview(results.cases))
    if gates:
        tables.append(gates_overview(gates))
    return tables


def _render(table: Shown, stream: object, width: int | None) -> None:
    from typing import IO, cast

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=cast(IO[str], stream), width=width)
    table = table.narrowed(console.width)
    drawn = Table(box=box.SIMPLE_HEAD, title=None, pad_edge=False)
    for index, heading in enumerate(table.headings):
        is_number = index > 0 and all(_is_number(line[index]) for line in table.lines)
        drawn.add_column(Text(heading), justify="right" if is_number else "left")
    for line in table.lines:
        drawn.add_row(*(Text(cell) for cell in line))
    console.print(drawn)


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] == "-"
