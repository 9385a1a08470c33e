"""Percentiles, distributions and confidence intervals; pure arithmetic."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

#: The percentiles that every distribution reports.
PERCENTILES = (50, 90, 95, 99)
#: The names of a distribution's values, in the order of the columns.
PARTS = ("mean", "sd", "min", *(f"p{p}" for p in PERCENTILES), "max")

_SIMPSON_STEPS = 120
_HALVINGS = 45


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of values in ascending order, linear between the two nearest ranks.

    The same rule as numpy's and pandas' default. Raises `ValueError` without values.
    """
    if not ordered:
        raise ValueError("a percentile of nothing")
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    # This form is exact where the two are equal.
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def describe(values: Iterable[float]) -> dict[str, float | None]:
    """Return the parts of a distribution by name; None for what so few values do not have."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(PARTS)
    described: dict[str, float | None] = {
        "mean": statistics.fmean(ordered),
        "sd": statistics.stdev(ordered) if len(ordered) > 1 else None,
        "min": ordered[0],
        "max": ordered[-1],
    }
    for percent in PERCENTILES:
        described[f"p{percent}"] = percentile(ordered, percent)
    return {part: described[part] for part in PARTS}


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Hold the mean of a few repetitions and how sure it is."""

    mean: float
    #: Of the mean; None with one repetition.
    standard_error: float | None
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate from one value a repetition."""
        num = len(values)
        error = statistics.stdev(values) / math.sqrt(num) if num > 1 else None
        return cls(statistics.fmean(values), error, num)

    def half_width(self, confidence: float) -> float | None:
        """Return the two-sided interval's half width; None with one repetition."""
        if self.standard_error is None:
            return None
        return self.standard_error * t_quantile((1 + confidence) / 2, self.num - 1)


def is_above(estimate: Estimate, limit: float, confidence: float) -> bool:
    """Return whether the estimate lies above `limit` beyond doubt (one-sided).

    With one repetition, or a confidence of 0, the mean alone decides.
    """
    if estimate.standard_error is None or confidence == 0:
        return estimate.mean > limit
    margin = estimate.standard_error * t_quantile(confidence, estimate.num - 1)
    return estimate.mean - margin > limit


def differ(first: Estimate, second: Estimate, confidence: float) -> bool:
    """Return whether two means differ beyond doubt (one-sided, Welch's test).

    A side with one repetition borrows the other's spread; with one on both, any difference
    counts.
    """
    difference = abs(first.mean - second.mean)
    if confidence == 0:
        return difference > 0
    variances = [_variance_of_mean(first, second), _variance_of_mean(second, first)]
    if variances[0] is None or variances[1] is None:
        return difference > 0
    total = variances[0] + variances[1]
    if total == 0:
        return difference > 0
    freedom = 0.0
    for variance, one in zip(variances, (first, second), strict=True):
        assert variance is not None
        if one.num > 1:
            freedom += variance**2 / (one.num - 1)
    # Without two spreads the freedom is that of the one which was measured.
    degrees = total**2 / freedom
    if 1 in (first.num, second.num):
        degrees = max(first.num, second.num) - 1
    return difference > math.sqrt(total) * t_quantile(confidence, degrees)


def _variance_of_mean(one: Estimate, other: Estimate) -> float | None:
    if one.standard_error is not None:
        return one.standard_error**2
    if other.standard_error is None:
        return None
    return other.standard_error**2 * other.num / one.num


def t_quantile(probability: float, degrees: float) -> float:
    """Return Student's t below which `probability` lies; `degrees` need not be whole.

    With x = sqrt(degrees) tan(a) the density becomes a power of a cosine, which Simpson's rule
    integrates well whatever the degrees; the quantile is found by halving an interval.
    """
    if not 0 < probability < 1:
        raise ValueError(f"a probability of {probability} has no quantile")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    scale = math.exp(log_scale) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if 0.5 + scale * _integral_of_cosine_power(middle, degrees - 1) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _integral_of_cosine_power(angle: float, power: float) -> float:
    """Integrate cos(a)**power from 0 to `angle`, at most a right angle, by Simpson's rule."""
    step = angle / _SIMPSON_STEPS
    total = 0.0
    for index in range(_SIMPSON_STEPS + 1):
        weight = 1 if index in (0, _SIMPSON_STEPS) else 4 if index % 2 else 2
        total += weight * max(math.cos(index * step), 0.0) ** power
    return total * step / 3
