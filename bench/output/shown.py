"""The few columns that people look at, pooled over repetitions, as plain cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mlx.bench.columns import BY_NAME
from vllm_mlx.bench.configuration import group_by_configuration, label_of
from vllm_mlx.bench.gates import GateResult, pooled, values_of

#: Column and heading; a column without any value is left out.
_SHOWN = (
    ("completed", "ok"),
    ("failures", "failed"),
    ("prompt_tokens_mean", "in tok"),
    ("completion_tokens_mean", "out tok"),
    ("cached_token_rate", "cached"),
    ("ttft_p50", "ttft p50 ms"),
    ("ttft_p95", "ttft p95 ms"),
    ("itl_p50", "itl p50 ms"),
    ("itl_p99", "itl p99 ms"),
    ("tpot_mean", "tpot ms"),
    ("e2el_p50", "e2el p50 ms"),
    ("output_tps", "out tok/s"),
    ("input_tps", "in tok/s"),
    ("request_rate", "req/s"),
    ("goodput", "good/s"),
    ("quality_failures", "quality failed"),
    ("policy_timeouts", "too late"),
)


#: Headings that a narrow terminal does without, the first of them first.
_LESS_IMPORTANT = (
    "in tok/s",
    "req/s",
    "itl p99 ms",
    "in tok",
    "out tok",
    "e2el p50 ms",
    "tpot ms",
    "ok",
    "ttft p95 ms",
    "cached",
)
#: Between two columns of a table in a terminal.
_SPACE = 3


@dataclasses.dataclass(frozen=True)
class Shown:
    """Hold a table of texts."""

    title: str
    headings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    less_important: tuple[str, ...] = ()

    def narrowed(self, width: int) -> Shown:
        """Return the table without the least important columns that do not fit into `width`."""
        table = self
        for heading in self.less_important:
            if table.width <= width:
                break
            table = table.without(heading)
        return table

    @property
    def width(self) -> int:
        """Return how many characters a line takes in a terminal."""
        rows = (self.headings, *self.lines)
        return sum(max(map(len, cells)) + _SPACE for cells in zip(*rows, strict=True))

    def without(self, heading: str) -> Shown:
        """Return the table without a column, the table itself if it has none of that name."""
        if heading not in self.headings:
            return self
        place = self.headings.index(heading)
        cut = [(*row[:place], *row[place + 1 :]) for row in (self.headings, *self.lines)]
        return dataclasses.replace(self, headings=cut[0], lines=tuple(cut[1:]))


def overview(rows: Sequence[Mapping[str, Any]], confidence: float) -> Shown:
    """Return one line for each configuration: means over repetitions, with their intervals."""
    groups = list(group_by_configuration(rows).values())
    shown = [
        (name, heading)
        for name, heading in _SHOWN
        if any(row.get(name) is not None for row in rows)
    ]
    lines = [
        (
            label_of(group[0]),
            str(len(group)),
            *(_pooled_cell(group, n, confidence) for n, _ in shown),
        )
        for group in groups
    ]
    headings = ("configuration", "reps", *(heading for _, heading in shown))
    return Shown("bench-serve", headings, tuple(lines), _LESS_IMPORTANT)


def cases_overview(cases: Sequence[Mapping[str, Any]]) -> Shown:
    """Return one line for each case and repetition of a workload."""
    headings = ("case", "rep", "quality", "in time", "ttft ms", "e2el ms", "out tok", "finish",
                "issues")  # fmt: skip
    lines = tuple(
        (
            str(case["case_id"]),
            str(case["repetition"]),
            "ok" if case["quality_ok"] else "failed",
            "yes" if case["within_policy_timeout"] else "no",
            number(case["ttft"]),
            number(case["e2el"]),
            number(case["completion_tokens"]),
            str(case["finish_reason"] or case["failure"] or ""),
            "; ".join(case["quality_issues"] or ()),
        )
        for case in cases
    )
    return Shown("workload", headings, lines)


def gates_overview(results: Sequence[GateResult]) -> Shown:
    """Return one line for each gate and configuration; what failed comes first."""
    order = {"fail": 0, "unsure": 1, "pass": 2}
    lines = tuple(
        (
            result.verdict.upper() if result.verdict == "fail" else result.verdict,
            result.configuration,
            result.gate,
            with_margin(result.value, result.margin),
            number(result.limit),
            result.detail,
        )
        for result in sorted(results, key=lambda result: order[result.verdict])
    )
    return Shown("gates", ("gate", "configuration", "wanted", "measured", "limit", ""), lines)


def markdown(table: Shown) -> str:
    """Return a table in Markdown, numbers to the right."""
    rule = ["---", *("---:" for _ in table.headings[1:])]
    rows = [table.headings, rule, *table.lines]
    return "\n".join(f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in rows) + "\n"


def number(value: Any) -> str:
    """Return a number with as many digits as help, an empty text for none."""
    if value is None:
        return ""
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value)}" if abs(value) < 1e15 else f"{value:.4g}"
    size = abs(value)
    return f"{value:.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"


def with_margin(value: float | None, margin: float | None) -> str:
    """Return a number, and its interval's half width where it has one."""
    return number(value) + (f" ±{number(margin)}" if margin else "")


def _pooled_cell(group: Sequence[Mapping[str, Any]], name: str, confidence: float) -> str:
    column = BY_NAME[name]
    if column.pooling is None:
        found = [row[name] for row in group if row.get(name) is not None]
        return number(sum(found) / len(found)) if found else ""
    values = values_of(group, column) or [
        float(row[name]) for row in group if row.get(name) is not None
    ]
    if not values:
        return ""
    estimate, margin = pooled(values, column, confidence)
    if column.unit == "ratio":
        return f"{estimate.mean:.0%}"
    return with_margin(estimate.mean, margin)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")
