"""Hold percentiles and intervals to known values and to numpy."""

from __future__ import annotations

import random

import numpy as np
import pytest

from vllm_mlx.bench.distribution import (
    PERCENTILES,
    Estimate,
    describe,
    differ,
    is_above,
    percentile,
    t_quantile,
)


def test_percentiles_are_numpys() -> None:
    """Every length up to 40 gives numpy's own default percentiles."""
    rng = random.Random(1)
    for length in range(1, 41):
        values = sorted(rng.expovariate(1.0) for _ in range(length))
        for percent in PERCENTILES:
            assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_describe() -> None:
    """A distribution has its eight parts; one value has no deviation, none has nothing."""
    assert describe([4.0, 1.0, 3.0, 2.0]) == pytest.approx(
        {"mean": 2.5, "sd": np.std([1, 2, 3, 4], ddof=1), "min": 1, "p50": 2.5, "p90": 3.7,
         "p95": 3.85, "p99": 3.97, "max": 4}
    )  # fmt: skip
    assert describe([7.0])["sd"] is None
    assert set(describe([]).values()) == {None}


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.95, 4, 2.13185),
        (0.975, 10, 2.22814),
        (0.995, 30, 2.75000),
        (0.975, 1000, 1.96234),
        (0.9, 2.5, 1.73025),
        (0.025, 4, -2.77645),
    ],
)
def test_t_quantiles(probability: float, degrees: float, expected: float) -> None:
    """Quantiles are those of the tables, for degrees that are not whole as well."""
    assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-4)


def test_intervals() -> None:
    """The interval of three repetitions is the textbook's; one repetition has none."""
    estimate = Estimate.of([10.0, 12.0, 14.0])
    assert estimate.half_width(0.95) == pytest.approx(4.30265 * 2 / 3**0.5, rel=1e-4)
    assert Estimate.of([10.0]).half_width(0.95) is None


def test_is_above() -> None:
    """A mean is above a limit when even its interval is; one repetition decides alone."""
    assert is_above(Estimate.of([11.0, 11.1, 10.9]), 10, 0.95)
    assert not is_above(Estimate.of([8.0, 14.0, 11.0]), 10, 0.95)
    assert is_above(Estimate.of([8.0, 14.0, 11.0]), 10, 0)
    assert is_above(Estimate.of([10.1]), 10, 0.95)


def test_differ() -> None:
    """Means differ when the noise of both sides cannot explain it."""
    quiet, noisy = Estimate.of([10.0, 10.1, 9.9]), Estimate.of([11.0, 14.0, 8.5])
    assert differ(quiet, Estimate.of([11.0, 11.1, 10.9]), 0.95)
    assert not differ(quiet, noisy, 0.95)
    assert differ(quiet, Estimate.of([11.0]), 0.95)
    assert not differ(noisy, Estimate.of([10.0]), 0.95)
    assert differ(Estimate.of([1.0]), Estimate.of([1.1]), 0.95)
    assert not differ(Estimate.of([1.0, 1.0]), Estimate.of([1.0, 1.0]), 0.95)
    assert differ(Estimate.of([1.0, 1.0]), Estimate.of([1.1, 1.1]), 0.95)


def test_a_difference_is_found_as_often_as_promised() -> None:
    """Of repetitions that differ by noise alone, about one in twenty seems to be worse."""
    rng = random.Random(2)
    num = 400
    found = 0
    for _ in range(num):
        first = Estimate.of([rng.gauss(100, 3) for _ in range(4)])
        second = Estimate.of([rng.gauss(100, 3) for _ in range(4)])
        found += second.mean > first.mean and differ(first, second, 0.95)
    assert 0.02 < found / num < 0.08
