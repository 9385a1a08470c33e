"""Figures of a run: throughput against load, and how latencies are distributed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_mlx.bench.configuration import group_by_configuration, label_of
from vllm_mlx.bench.distribution import PERCENTILES
from vllm_mlx.engine.errors import UsageError

FIGURE_SUFFIXES = (".png", ".svg")
#: Stands for the terminal in place of a file.
TERMINAL = "-"

_WIDTH, _HEIGHT = 90, 20

Rows = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Line:
    """Hold one line of a figure."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Figure:
    """Hold one figure: what its axes are, and its lines."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]


def check_plot(target: str) -> None:
    """Raise `UsageError` where a figure cannot be made: before anything is measured."""
    if target != TERMINAL and Path(target).suffix.lower() not in FIGURE_SUFFIXES:
        raise UsageError(f"--plot {target}: a file ends in .png or .svg; - is the terminal")
    library = "plotext" if target == TERMINAL else "matplotlib"
    if find_spec(library) is None:
        raise UsageError(f"--plot needs {library}: pip install 'vllm-mlx[plots]'")


def figures(rows: Rows, requests: Rows) -> list[Figure]:
    """Return the figures that rows give; the CDF is of single requests where there are any."""
    found = [
        _throughput(rows, "concurrency", "requests at once"),
        _throughput(rows, "request_rate_target", "requests wanted per second"),
        _latencies(rows, requests, "ttft", "time to first output"),
        _latencies(rows, requests, "e2el", "time to the last byte"),
    ]
    return [figure for figure in found if figure.lines]


def plot(target: str, rows: Rows, requests: Rows) -> str | None:
    """Draw the figures into a file, or return them as text for the terminal.

    Raises `UsageError` when the rows hold nothing to draw.
    """
    drawn = figures(rows, requests)
    if not drawn:
        raise UsageError("there is nothing to plot: no answered request")
    if target == TERMINAL:
        return "\n".join(_terminal_text(figure) for figure in drawn)
    _draw_file(Path(target), drawn)
    return None


def _throughput(rows: Rows, load: str, x_label: str) -> Figure:
    """Return tokens per second over the load, a line for what else varies."""
    points: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if row.get(load) is None or row.get("output_tps") is None:
            continue
        label = label_of({**row, "concurrency": None, "request_rate_target": None})
        points.setdefault(label, {}).setdefault(float(row[load]), []).append(row["output_tps"])
    lines = tuple(
        Line(label, tuple(sorted(by_load)), tuple(_mean(by_load[x]) for x in sorted(by_load)))
        for label, by_load in points.items()
    )
    return Figure("Throughput", x_label, "output tokens per second", lines)


def _latencies(rows: Rows, requests: Rows, name: str, x_label: str) -> Figure:
    """Return the share of requests within a latency, a line for each configuration."""
    lines = []
    for key, group in group_by_configuration(rows).items():
        values = _request_values(group, requests, name)
        if values:
            shares = [100 * rank / len(values) for rank in range(1, len(values) + 1)]
        else:
            shares = [0.0, *(float(percent) for percent in PERCENTILES), 100.0]
            parts = ["min", *(f"p{percent}" for percent in PERCENTILES), "max"]
            columns = [[r[f"{name}_{p}"] for r in group if r.get(f"{name}_{p}")] for p in parts]
            values = [_mean(found) for found in columns if found]
        if len(values) == len(shares):
            lines.append(Line(label_of(dict(key)), tuple(values), tuple(shares)))
    return Figure("Latency", f"{x_label}, ms", "share of requests, %", tuple(lines))


def _request_values(group: Rows, requests: Rows, name: str) -> list[float]:
    """Return a latency of every answered request of a configuration, in ascending order."""
    wanted = {_which(row) for row in group}
    return sorted(
        float(request[name])
        for request in requests
        if request.get(name) is not None
        and not request.get("failure")
        and _which(request) in wanted
    )


def _which(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a request's row and its repetition's have in common."""
    return tuple(row.get(name) for name in ("run_id", "configuration", "repetition"))


def _draw_file(path: Path, drawn: Sequence[Figure]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(
        1, len(drawn), figsize=(6 * len(drawn), 4.5), squeeze=False, layout="constrained"
    )
    for figure, axis in zip(drawn, axes[0], strict=True):
        for line in figure.lines:
            axis.plot(line.x, line.y, label=line.label, marker="o" if len(line.x) < 20 else None)
        axis.set(title=figure.title, xlabel=figure.x_label, ylabel=figure.y_label)
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize="small")
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)


def _terminal_text(figure: Figure) -> str:
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(_WIDTH, _HEIGHT)
    for line in figure.lines:
        plotext.plot(list(line.x), list(line.y), label=line.label)
    plotext.title(figure.title)
    plotext.xlabel(figure.x_label)
    plotext.ylabel(figure.y_label)
    text = plotext.uncolorize(plotext.build())
    plotext.clear_figure()
    return str(text)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
