"""Put several runs side by side, each against the first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mlx.bench.columns import MEASURES
from vllm_mlx.bench.configuration import Key, group_by_configuration, label_of
from vllm_mlx.bench.distribution import differ
from vllm_mlx.bench.gates import how_much_worse, pooled, values_of
from vllm_mlx.bench.output.shown import Shown, with_margin

#: What `compare` shows unless it is told otherwise.
COMPARED = ("ttft_p50", "ttft_p95", "itl_p50", "itl_p99", "tpot_mean", "e2el_p50", "output_tps",
            "request_rate", "failures")  # fmt: skip

Rows = Sequence[Mapping[str, Any]]


def comparison(
    runs: Sequence[tuple[str, Rows]], measures: Sequence[str], confidence: float
) -> list[dict[str, Any]]:
    """Return one row for each configuration, measure and run after the first.

    `change` is a fraction of the first run's value, positive for the better, None where that one
    is 0; `is_sure` says whether the two differ beyond the noise of their repetitions. A run
    without rows of a configuration is left out of it.
    """
    first_name, first_rows = runs[0]
    first = group_by_configuration(first_rows)
    found = []
    for key, group in first.items():
        for name in measures:
            column = MEASURES[name]
            before = values_of(group, column)
            if not before:
                continue
            base, base_margin = pooled(before, column, confidence)
            for run_name, rows in runs[1:]:
                now = values_of(_group(rows, key), column)
                if not now:
                    continue
                estimate, margin = pooled(now, column, confidence)
                change = -how_much_worse(base.mean, estimate.mean, column)
                found.append(
                    {
                        "configuration": label_of(group[0]),
                        "measure": name,
                        "unit": column.unit,
                        "first": first_name,
                        "first_value": base.mean,
                        "first_margin": base_margin,
                        "run": run_name,
                        "value": estimate.mean,
                        "margin": margin,
                        "change": change if math.isfinite(change) else None,
                        "is_sure": differ(base, estimate, confidence),
                    }
                )
    return found


def missing(runs: Sequence[tuple[str, Rows]]) -> list[str]:
    """Return in words which configurations are not in every run."""
    groups = [(name, group_by_configuration(rows)) for name, rows in runs]
    found = []
    for name, own in groups:
        for other_name, other in groups:
            found += [
                f"{label_of(own[key][0])}: in {name}, not in {other_name}"
                for key in own.keys() - other.keys()
            ]
    return sorted(found)


def comparison_table(rows: Sequence[Mapping[str, Any]], first_name: str) -> Shown:
    """Return a comparison for people: a line for each measure, two columns for each run."""
    names = list(dict.fromkeys(str(row["run"]) for row in rows))
    lines: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["configuration"], row["measure"]), {})[row["run"]] = row
    shown = []
    for (configuration, measure), by_run in lines.items():
        any_row = next(iter(by_run.values()))
        cells = [with_margin(any_row["first_value"], any_row["first_margin"])]
        for name in names:
            row = by_run.get(name, {})
            cells += [with_margin(row.get("value"), row.get("margin")), _change(row)]
        unit = f" {any_row['unit']}" if any_row["unit"] else ""
        shown.append((configuration, measure + unit, *cells))
    headings = ["configuration", "measure", first_name]
    for name in names:
        headings += [name, "change"]
    return Shown("comparison", tuple(headings), tuple(shown))


def _group(rows: Rows, key: Key) -> Rows:
    return group_by_configuration(rows).get(key, [])


def _change(row: Mapping[str, Any]) -> str:
    if not row:
        return ""
    change = row["change"]
    if change is None:
        return ""
    word = "better" if change > 0 else "worse" if change < 0 else "same"
    if word == "same":
        return word
    return f"{abs(change):.1%} {word}" + ("" if row["is_sure"] else " (noise)")
