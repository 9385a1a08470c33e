"""Hold gates: what they read, when they fail, and that noise does not fail them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.scripted_server import Script

from vllm_mlx.bench.gates import (
    Assertion,
    judge_assertions,
    judge_regressions,
    parse_regressions,
)
from vllm_mlx.engine.errors import UsageError

if TYPE_CHECKING:
    from tests.bench.conftest import RunBench

Rows = list[dict[str, Any]]


def rows(measure: str, *values: float | None, **configuration: Any) -> Rows:
    """Return the repetitions of one configuration."""
    return [{"prompt_set": "s", measure: value, **configuration} for value in values]


def verdicts(text: str, measured: Rows, confidence: float = 0.95) -> list[str]:
    """Return how an assertion goes for each configuration."""
    return [
        gate.verdict for gate in judge_assertions([Assertion.parse(text)], measured, confidence)
    ]


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("ttft_p95<800ms", 800),
        (" ttft_p95 <= 0.8s ", 800),
        ("ttft_p95<800", 800),
        ("duration_s<1500ms", 1.5),
        ("success_rate>=99%", 0.99),
        ("output_tps>1e3", 1000),
        ("failures==0", 0),
        ("goodput!=-1", -1),
    ],
)
def test_assertions_are_read(text: str, limit: float) -> None:
    """Limits are read in the column's unit, whichever unit they were written in."""
    assert Assertion.parse(text).limit == pytest.approx(limit)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ttft_p95", "is no assertion"),
        ("ttft_p95<", "is no assertion"),
        ("ttft_p95<fast", "is no assertion"),
        ("ttft_p95<1-2", "is not a number"),
        ("ttft_p59<1", "did you mean ttft_p9"),
        ("model==1", "there is no measure 'model'"),
        ("output_tps>5ms", "is not measured in ms"),
        ("ttft_p50<5%", "is not measured in %"),
    ],
)
def test_what_is_no_assertion(text: str, complaint: str) -> None:
    """A gate that would never work is refused, with the nearest names."""
    with pytest.raises(UsageError, match=complaint):
        Assertion.parse(text)


@pytest.mark.parametrize("text", ["ttft_p50<3", "ttft_p50<=2", "ttft_p50>1", "ttft_p50>=2",
                                  "ttft_p50==2", "ttft_p50!=3"])  # fmt: skip
def test_comparisons_that_hold(text: str) -> None:
    """Each comparison passes what it says, and its opposite fails."""
    measured = rows("ttft_p50", 2.0, 2.0, 2.0)
    assert verdicts(text, measured) == ["pass"]
    opposite = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
    operator = text.removeprefix("ttft_p50").rstrip("123")
    assert verdicts(text.replace(operator, opposite[operator]), measured) == ["fail"]


def test_noise_does_not_fail_a_limit() -> None:
    """A mean beyond the limit fails only when its interval lies beyond it, too."""
    noisy, quiet = rows("ttft_p50", 90.0, 130.0, 95.0), rows("ttft_p50", 104.0, 105.0, 106.0)
    assert verdicts("ttft_p50<100", noisy) == ["unsure"]
    assert verdicts("ttft_p50<100", quiet) == ["fail"]
    assert verdicts("ttft_p50<100", noisy, confidence=0) == ["fail"]
    # One repetition has no interval: it decides.
    assert verdicts("ttft_p50<100", rows("ttft_p50", 101.0)) == ["fail"]
    assert verdicts("output_tps>100", rows("output_tps", 90.0, 60.0, 120.0)) == ["unsure"]
    assert verdicts("output_tps>100", rows("output_tps", 90.0, 91.0, 89.0)) == ["fail"]


def test_counts_and_extremes_are_not_averaged() -> None:
    """One failure in three repetitions is one failure; the largest of all is the largest."""
    assert verdicts("failures==0", rows("failures", 0, 1, 0)) == ["fail"]
    assert verdicts("failures<=1", rows("failures", 0, 1, 1)) == ["fail"]
    assert verdicts("ttft_max<200", rows("ttft_max", 50.0, 201.0, 50.0)) == ["fail"]
    assert verdicts("ttft_min>50", rows("ttft_min", 60.0, 49.0)) == ["fail"]


def test_what_was_not_measured_fails() -> None:
    """A gate on a measure without a value does not pass unseen."""
    assert verdicts("ttft_p50<100", rows("ttft_p50", None, None)) == ["fail"]


def test_interrupted_repetitions_do_not_count() -> None:
    """A partial row is left out."""
    partial = {"ttft_p50": 9e9, "prompt_set": "s", "is_partial": True}
    measured = [*rows("ttft_p50", 1.0, 1.0), partial]
    assert verdicts("ttft_p50<2", measured) == ["pass"]


def test_gates_of_one_configuration() -> None:
    """A gate may name the configurations that it is for, and is for all without."""
    measured = [
        *rows("ttft_p50", 10.0, concurrency=1, stream=True),
        *rows("ttft_p50", 99.0, concurrency=4, stream=True),
    ]
    assert verdicts("ttft_p50<50", measured) == ["pass", "fail"]
    assert verdicts("ttft_p50[concurrency=1]<50", measured) == ["pass"]
    assert verdicts("ttft_p50[concurrency=4,prompt_set=s]<50", measured) == ["fail"]
    assert verdicts("ttft_p50[stream=true]<50", measured) == ["pass", "fail"]
    with pytest.raises(UsageError, match="applies to no configuration"):
        verdicts("ttft_p50[concurrency=2]<50", measured)


def regression(text: str, before: Rows, now: Rows) -> list[tuple[str, str]]:
    """Return how regressions go, and why."""
    judged = judge_regressions(parse_regressions(text), before, now, 0.95)
    return [(gate.verdict, gate.detail) for gate in judged]


def test_regressions_know_which_direction_is_worse() -> None:
    """More latency and less throughput are worse; the other way round is better."""
    before = rows("ttft_p50", 100.0, 101.0, 99.0)
    assert regression("ttft_p50=10%", before, rows("ttft_p50", 109.0, 109.0, 109.5)) == [
        ("pass", "9.2% worse than 100")
    ]
    assert regression("ttft_p50=10%", before, rows("ttft_p50", 115.0, 116.0, 114.0)) == [
        ("fail", "15.0% worse than 100")
    ]
    assert regression("ttft_p50=10%", before, rows("ttft_p50", 50.0, 51.0, 49.0)) == [
        ("pass", "50.0% better than 100")
    ]
    fast = rows("output_tps", 100.0, 101.0, 99.0)
    assert regression("output_tps=5%", fast, rows("output_tps", 90.0, 91.0, 89.0))[0][0] == "fail"
    assert regression("output_tps=5%", fast, rows("output_tps", 120.0, 121.0))[0][0] == "pass"


def test_regressions_within_the_noise_pass() -> None:
    """A mean that is too much worse passes as unsure when repetitions scatter as widely."""
    before = rows("ttft_p50", 100.0, 120.0, 80.0)
    ((verdict, detail),) = regression("ttft_p50=10%", before, rows("ttft_p50", 90.0, 140.0, 115.0))
    assert verdict == "unsure"
    assert "within the noise of 3 repetitions" in detail


def test_regressions_are_held_by_configuration() -> None:
    """Each configuration is held to its own; one that the baseline lacks is not judged here."""
    before = rows("ttft_p50", 10.0, concurrency=1) + rows("ttft_p50", 100.0, concurrency=4)
    now = rows("ttft_p50", 11.0, concurrency=1) + rows("ttft_p50", 101.0, concurrency=4)
    now += rows("ttft_p50", 101.0, concurrency=8)
    judged = judge_regressions(parse_regressions("ttft_p50=5%"), before, now, 0.95)
    assert [(gate.configuration, gate.verdict) for gate in judged] == [
        ("s c=1", "fail"), ("s c=4", "pass")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ttft_p50", "write it as ttft_p50=10%"),
        ("ttft_p50=10", "write it as ttft_p50=10%"),
        ("ttft_p50=-1%", "write it as ttft_p50=10%"),
        ("", "names no measure"),
        ("requests=1%", "neither direction"),
        ("nothing=1%", "there is no measure"),
    ],
)
def test_what_is_no_regression(text: str, complaint: str) -> None:
    """A regression that cannot be judged is refused."""
    with pytest.raises(UsageError, match=complaint):
        parse_regressions(text)


GATE = "ttft_p50=10%,tpot_mean=10%,output_tps=10%"
NUM_RUNS = 20


def measured(run_bench: RunBench, seed: int, slowdown: float = 1.0) -> Rows:
    """Measure a scripted server whose every delay is noisy, in virtual time."""
    script = Script(ttft_s=0.1, gap_s=0.02, num_tokens=6, jitter=0.1, seed=seed, slowdown=slowdown)
    return run_bench(script, concurrencies=(4,), num_requests=24, repetitions=3, warmup=0).rows


def test_gates_tell_a_slower_server_from_noise(run_bench: RunBench) -> None:
    """Of 20 runs of the same server none fails; of 20 runs of one 15% slower all do."""
    baseline = measured(run_bench, 1000)
    regressions = parse_regressions(GATE)
    failed = []
    for slowdown in (1.0, 1.15):
        judged = [
            judge_regressions(regressions, baseline, measured(run_bench, seed, slowdown), 0.95)
            for seed in range(NUM_RUNS)
        ]
        failed.append(sum(any(gate.verdict == "fail" for gate in gates) for gates in judged))
    assert failed == [0, NUM_RUNS]
