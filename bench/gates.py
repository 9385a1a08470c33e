"""Gates: limits on measures, and regressions against a baseline, with room for noise.

Repetitions of a configuration are pooled as the column says (mean, sum, largest, smallest). A
mean fails a limit only if it lies beyond it and the interval of its repetitions, too; it fails a
baseline only if it is worse by more than is allowed and differs from the baseline beyond doubt.
What lies beyond without being sure is `unsure`, and passes. Counts and extremes have no interval.
"""

from __future__ import annotations

import dataclasses
import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from vllm_mlx.bench.columns import MEASURES, Column
from vllm_mlx.bench.configuration import group_by_configuration, label_of
from vllm_mlx.bench.distribution import Estimate, differ, is_above
from vllm_mlx.engine.errors import UsageError

Verdict = Literal["pass", "unsure", "fail"]

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_ASSERTION = re.compile(
    r"\s*(?P<measure>\w+)\s*(?:\[(?P<where>[^\]]*)\])?\s*(?P<op><=|>=|==|!=|<|>)\s*"
    r"(?P<number>[-+0-9.eE]+?)\s*(?P<unit>ms|s|%)?\s*"
)
#: What a written unit is worth in a column's own; a pair that is not here does not fit.
_SCALES: Mapping[tuple[str, str], float] = {
    ("ms", "ms"): 1.0,
    ("s", "ms"): 1e3,
    ("ms", "s"): 1e-3,
    ("s", "s"): 1.0,
    ("%", "ratio"): 0.01,
}


@dataclasses.dataclass(frozen=True, slots=True)
class GateResult:
    """Say how one gate went for one configuration, in the column's unit."""

    configuration: str
    gate: str
    measure: str
    verdict: Verdict
    value: float | None
    #: Half width of the value's interval, None where it has none.
    margin: float | None
    limit: float | None
    #: In words: by how much it failed, or why it passed all the same.
    detail: str


@dataclasses.dataclass(frozen=True)
class Assertion:
    """Hold one `--assert`: a measure, a comparison, a limit in the column's unit."""

    text: str
    column: Column
    comparison: str
    limit: float
    #: Columns that a configuration must have these values in.
    where: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> Assertion:
        """Read `ttft_p95<800ms` or `ttft_p95[concurrency=4]<0.8s`; raises `UsageError`."""
        match = _ASSERTION.fullmatch(text)
        if match is None:
            raise UsageError(f"'{text}' is no assertion; write it as 'ttft_p95<800ms'")
        column = measure_named(match["measure"])
        unit = match["unit"]
        scale = 1.0 if unit is None else _SCALES.get((unit, column.unit))
        if scale is None:
            raise UsageError(f"'{text}': {column.name} is not measured in {unit}")
        try:
            limit = float(match["number"]) * scale
        except ValueError:
            raise UsageError(f"'{text}': '{match['number']}' is not a number") from None
        where = {}
        for part in filter(None, (match["where"] or "").split(",")):
            name, _, value = part.partition("=")
            where[name.strip()] = value.strip()
        return cls(" ".join(text.split()), column, match["op"], limit, where)

    def applies_to(self, row: Mapping[str, Any]) -> bool:
        """Return whether the configuration of `row` is meant."""
        return all(_matches(row.get(name), value) for name, value in self.where.items())

    def judge(self, rows: Sequence[Mapping[str, Any]], confidence: float) -> GateResult:
        """Judge the repetitions of one configuration."""
        values = values_of(rows, self.column)
        label = label_of(rows[0])
        if not values:
            return GateResult(
                label, self.text, self.column.name, "fail", None, None, self.limit, "not measured"
            )
        estimate, margin = pooled(values, self.column, confidence)
        holds = _OPERATORS[self.comparison](estimate.mean, self.limit)
        verdict: Verdict = "pass" if holds else "fail"
        detail = ""
        if not holds:
            detail = _beyond(estimate.mean, self.limit)
            if self.comparison not in ("==", "!=") and not self._is_sure(estimate, confidence):
                verdict = "unsure"
                detail += f", within the noise of {len(values)} repetitions"
        return GateResult(
            label, self.text, self.column.name, verdict, estimate.mean, margin, self.limit, detail
        )

    def _is_sure(self, estimate: Estimate, confidence: float) -> bool:
        if not estimate.standard_error or confidence == 0:
            return True
        if self.comparison in ("<", "<="):
            return is_above(estimate, self.limit, confidence)
        mirrored = dataclasses.replace(estimate, mean=-estimate.mean)
        return is_above(mirrored, -self.limit, confidence)


@dataclasses.dataclass(frozen=True)
class Regression:
    """Hold how much worse than the baseline one measure may be, as a fraction of it."""

    column: Column
    allowed: float

    @property
    def text(self) -> str:
        """Return the gate's name."""
        return f"{self.column.name} at most {self.allowed * 100:g}% worse"

    def judge(
        self,
        baseline: Sequence[Mapping[str, Any]],
        rows: Sequence[Mapping[str, Any]],
        confidence: float,
    ) -> GateResult:
        """Judge the repetitions of one configuration against those of the baseline."""
        label, name = label_of(rows[0]), self.column.name
        before, now = values_of(baseline, self.column), values_of(rows, self.column)
        if not before or not now:
            which = "in the baseline" if not before else "now"
            return GateResult(
                label, self.text, name, "fail", None, None, None, f"not measured {which}"
            )
        base, _ = pooled(before, self.column, confidence)
        estimate, margin = pooled(now, self.column, confidence)
        worse = how_much_worse(base.mean, estimate.mean, self.column)
        sign = 1 if self.column.better == "lower" else -1
        limit = base.mean * (1 + sign * self.allowed)
        detail = f"{abs(worse):.1%} {'worse' if worse > 0 else 'better'} than {base.mean:.4g}"
        verdict: Verdict = "pass"
        if worse > self.allowed:
            verdict = "fail"
            if not differ(base, estimate, confidence):
                verdict = "unsure"
                detail += f", within the noise of {len(now)} repetitions"
        return GateResult(label, self.text, name, verdict, estimate.mean, margin, limit, detail)


def parse_regressions(text: str) -> list[Regression]:
    """Read `ttft_p50=10%,output_tps=5%`; raises `UsageError`."""
    found = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition("=")
        column = measure_named(name.strip())
        if column.better is None:
            raise UsageError(f"'{part}': neither direction of {column.name} is worse")
        number, is_percent = value.strip().removesuffix("%"), value.strip().endswith("%")
        try:
            allowed = float(number)
        except ValueError:
            raise UsageError(f"'{part}': write it as {column.name}=10%") from None
        if not is_percent or not 0 <= allowed < float("inf"):
            raise UsageError(f"'{part}': write it as {column.name}=10%")
        found.append(Regression(column, allowed / 100))
    if not found:
        raise UsageError("--max-regression names no measure; write it as ttft_p50=10%")
    return found


def judge_assertions(
    assertions: Sequence[Assertion], rows: Sequence[Mapping[str, Any]], confidence: float
) -> list[GateResult]:
    """Judge every assertion for every configuration that it applies to.

    Raises `UsageError` for one that applies to none: it would pass unseen.
    """
    results = []
    for assertion in assertions:
        groups = [
            group
            for group in group_by_configuration(rows).values()
            if assertion.applies_to(group[0])
        ]
        if not groups:
            raise UsageError(f"'{assertion.text}' applies to no configuration of this run")
        results += [assertion.judge(group, confidence) for group in groups]
    return results


def judge_regressions(
    regressions: Sequence[Regression],
    baseline: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    confidence: float,
) -> list[GateResult]:
    """Judge every measure of every configuration that both runs have."""
    before = group_by_configuration(baseline)
    return [
        regression.judge(before[key], group, confidence)
        for key, group in group_by_configuration(rows).items()
        if key in before
        for regression in regressions
    ]


def measure_named(name: str) -> Column:
    """Return a measure's column; raises `UsageError` with the nearest names."""
    column = MEASURES.get(name)
    if column is None:
        near = difflib.get_close_matches(name, MEASURES, n=3) or ["ttft_p95", "output_tps"]
        raise UsageError(f"there is no measure '{name}'; did you mean {', '.join(near)}?")
    return column


def values_of(rows: Sequence[Mapping[str, Any]], column: Column) -> list[float]:
    """Return a measure's values; interrupted repetitions do not count."""
    found = [row.get(column.name) for row in rows if not row.get("is_partial")]
    return [float(value) for value in found if value is not None]


def pooled(
    values: Sequence[float], column: Column, confidence: float
) -> tuple[Estimate, float | None]:
    """Return repetitions as one value, and the half width of its interval if it has one."""
    if column.pooling == "mean":
        estimate = Estimate.of(values)
        return estimate, estimate.half_width(confidence) if confidence > 0 else None
    pools: Mapping[str, Callable[[Sequence[float]], float]] = {
        "sum": lambda numbers: sum(numbers),
        "max": lambda numbers: max(numbers),
        "min": lambda numbers: min(numbers),
    }
    return Estimate(pools[str(column.pooling)](values), None, len(values)), None


def how_much_worse(before: float, now: float, column: Column) -> float:
    """Return the change as a fraction of `before`, positive where it is for the worse."""
    change = now - before
    if change == 0:
        return 0.0
    worse = change if column.better == "lower" else -change
    return worse / abs(before) if before else float("inf") if worse > 0 else float("-inf")


def _matches(value: Any, wanted: str) -> bool:
    if isinstance(value, bool):
        return wanted.lower() == str(value).lower()
    if isinstance(value, (int, float)):
        try:
            return float(wanted) == value
        except ValueError:
            return False
    return str(value) == wanted


def _beyond(value: float, limit: float) -> str:
    distance = abs(value - limit)
    share = f" ({distance / abs(limit):.1%})" if limit else ""
    return f"off by {distance:.4g}{share}"
