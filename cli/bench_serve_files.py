"""The commands `bench-serve compare` and `bench-serve report`: what result files tell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vllm_mlx.cli.bench_serve_options import NEW_FILE, OLD_FILE, Listed
from vllm_mlx.cli.options import FiniteRange, verbose_option

if TYPE_CHECKING:
    from vllm_mlx.bench.output.shown import Shown
    from vllm_mlx.bench.results import Results

Rows = list[dict[str, Any]]

_confidence_option = click.option(
    "--confidence",
    type=FiniteRange(0, 1, max_open=True),
    default=0.95,
    show_default=True,
    metavar="X",
    help="Confidence of the intervals, and of what counts as more than noise.",
)


@click.command()
@click.argument("files", nargs=-1, required=True, type=OLD_FILE, metavar="FILE FILE...")
@click.option(
    "--measures",
    type=Listed(click.STRING),
    metavar="NAME,...",
    help="Measures to compare; default: the usual ones.",
)
@click.option(
    "--max-regression",
    metavar="GATE,...",
    help="Exit 1 if a run is worse than the first by more, as ttft_p50=10%.",
)
@click.option(
    "--format",
    "shown_format",
    type=click.Choice(("table", "markdown", "json")),
    default="table",
    show_default=True,
    help="Format of stdout.",
)
@_confidence_option
@verbose_option
def compare(
    files: tuple[Path, ...],
    measures: tuple[str, ...] | None,
    max_regression: str | None,
    shown_format: str,
    confidence: float,
) -> int:
    """Put the runs of several result FILEs side by side, each against the first.

    \b
    Examples:
      vllm-mlx bench-serve compare before.json after.json
      vllm-mlx bench-serve compare a.csv b.csv c.db --measures ttft_p50,output_tps
      vllm-mlx bench-serve compare main.json branch.json --max-regression output_tps=5%
    """
    if len(files) < 2:
        raise click.UsageError("give at least two files")
    import json

    from vllm_mlx.bench.compare import COMPARED, comparison, comparison_table, missing
    from vllm_mlx.bench.gates import judge_regressions, measure_named, parse_regressions
    from vllm_mlx.bench.output.files import read_rows
    from vllm_mlx.bench.output.shown import gates_overview
    from vllm_mlx.cli.bench_serve_output import show_tables
    from vllm_mlx.cli.errors import ExitCode

    names = [measure_named(name).name for name in measures or COMPARED]
    regressions = parse_regressions(max_regression) if max_regression is not None else []
    runs = [(name, read_rows(path)) for name, path in zip(_short_names(files), files, strict=True)]
    for line in missing(runs):
        click.echo(f"Note: {line}", err=True)
    rows = comparison(runs, names, confidence)
    if not rows:
        raise click.UsageError("the files have no configuration in common")
    judged = [
        gate
        for _, now in runs[1:]
        for gate in judge_regressions(regressions, runs[0][1], now, confidence)
    ]
    if shown_format == "json":
        click.echo(json.dumps(rows, indent=2, allow_nan=False))
    else:
        tables = [comparison_table(rows, runs[0][0])]
        tables += [gates_overview(judged)] if judged else []
        _show(tables, shown_format)
    if shown_format == "json" and judged:
        show_tables([gates_overview(judged)], is_data=False)
    failed = any(gate.verdict == "fail" for gate in judged)
    return ExitCode.GATE_FAILED if failed else ExitCode.DONE


@click.command()
@click.argument("files", nargs=-1, required=True, type=OLD_FILE, metavar="FILE...")
@click.option(
    "--output",
    "-o",
    type=NEW_FILE,
    metavar="FILE",
    help="Write the merged rows there: .csv, .json, .jsonl, .db or .md.",
)
@click.option(
    "--plot", metavar="FILE", help="Draw the figures into a .png or .svg; - is the terminal."
)
@click.option(
    "--format",
    "shown_format",
    type=click.Choice(("table", "markdown")),
    default="table",
    show_default=True,
    help="Format of stdout.",
)
@_confidence_option
@verbose_option
def report(
    files: tuple[Path, ...],
    output: Path | None,
    plot: str | None,
    shown_format: str,
    confidence: float,
) -> None:
    """Merge the runs of several result FILEs into one table, file or figure.

    Repetitions of the same configuration are pooled, whichever file they come from.

    \b
    Examples:
      vllm-mlx bench-serve report results.db
      vllm-mlx bench-serve report monday.csv tuesday.csv -o week.db
      vllm-mlx bench-serve report results.json --plot figure.png
    """
    from vllm_mlx.bench.output.files import check_writable
    from vllm_mlx.bench.output.shown import overview
    from vllm_mlx.bench.plots import check_plot
    from vllm_mlx.cli.bench_serve_output import draw

    if output is not None:
        check_writable(output)
    if plot is not None:
        check_plot(plot)
    merged = _merged(files)
    if output is not None:
        _write_merged(output, merged, confidence)
    _show([overview(merged.rows, confidence)], shown_format)
    if plot is not None:
        draw(plot, merged)


def _merged(files: tuple[Path, ...]) -> Results:
    """Return the rows of all files; a run that two files hold counts once."""
    from vllm_mlx.bench.output.files import read_requests, read_rows
    from vllm_mlx.bench.results import Results

    merged = Results()
    runs: set[str] = set()
    for path in files:
        rows = [row for row in read_rows(path) if row["run_id"] not in runs]
        new = {str(row["run_id"]) for row in rows}
        merged.rows += rows
        merged.requests += [row for row in read_requests(path) if row["run_id"] in new]
        runs |= new
    return merged


def _write_merged(path: Path, merged: Results, confidence: float) -> None:
    from vllm_mlx.bench.output.files import format_of, tables_of, write_results, write_text
    from vllm_mlx.bench.output.reports import summary_text
    from vllm_mlx.bench.output.shown import overview
    from vllm_mlx.cli.bench_serve_output import tables_text

    file_format = format_of(path, "auto")
    if file_format == "markdown":
        write_text(path, summary_text(merged.rows, [], [], [], confidence))
    elif file_format == "table":
        write_text(path, tables_text([overview(merged.rows, confidence)]))
    else:
        tables = tables_of(merged, with_requests=bool(merged.requests))
        write_results(path, file_format, tables, [])


def _show(tables: list[Shown], shown_format: str) -> None:
    from vllm_mlx.bench.output.shown import markdown
    from vllm_mlx.cli.bench_serve_output import show_tables

    if shown_format == "markdown":
        click.echo("\n".join(markdown(table) for table in tables), nl=False)
    else:
        show_tables(tables, is_data=True)


def _short_names(files: tuple[Path, ...]) -> list[str]:
    """Return the files' names without suffix; with their folders where these are alike."""
    names = [path.stem for path in files]
    return names if len(set(names)) == len(names) else [str(path) for path in files]
