"""Waits between restarts double up to a limit, and useless lives in a row end the trying."""

from __future__ import annotations

import pytest

from vllm_mlx.engine.errors import UsageError
from vllm_mlx.engine.host.restart import RestartBackoff, RestartPolicy


def test_waits_double_up_to_the_limit_and_then_end() -> None:
    """Each useless life doubles the wait; the last allowed one gives up."""
    backoff = RestartBackoff(RestartPolicy(initial_s=0.5, max_s=3.0, max_deaths=6))
    waits = [backoff.record_death(has_produced=False, ready_s=1.0) for _ in range(6)]
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0, None]
    assert backoff.num_useless == 6


@pytest.mark.parametrize(("has_produced", "ready_s"), [(True, 0.1), (False, 60.0)])
def test_a_useful_life_starts_the_count_again(has_produced: bool, ready_s: float) -> None:
    """Output, or a minute of readiness, forgives what was before."""
    backoff = RestartBackoff(RestartPolicy(initial_s=0.5, max_deaths=3))
    for _ in range(5):
        assert backoff.record_death(has_produced=False, ready_s=0.0) == 0.5
        assert backoff.record_death(has_produced=False, ready_s=59.0) == 1.0
        assert backoff.record_death(has_produced=has_produced, ready_s=ready_s) == 0.5


@pytest.mark.parametrize(
    "fields", [{"initial_s": -1.0}, {"initial_s": 2.0, "max_s": 1.0}, {"max_deaths": 0}]
)
def test_senseless_policies_are_refused(fields: dict[str, float]) -> None:
    """A policy that cannot be followed is an error when it is made."""
    with pytest.raises(UsageError):
        RestartPolicy(**fields)  # type: ignore[arg-type]
