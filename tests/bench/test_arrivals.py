"""Hold when requests are sent, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics

import pytest
from support.virtual_time import run_virtually

from vllm_mlx.bench.arrivals import closed_loop, open_loop, schedule


def gaps(arrival: str, burstiness: float, num: int, seed: int = 0) -> list[float]:
    """Return the gaps of a schedule of 4 requests per second."""
    offsets = list(itertools.islice(schedule(4, arrival, burstiness, random.Random(seed)), num))
    assert offsets[0] == 0
    return [after - before for before, after in itertools.pairwise(offsets)]


def test_constant_arrivals() -> None:
    """Constant arrivals are a quarter of a second apart."""
    assert set(gaps("constant", 1.0, 50)) == {0.25}


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_random_arrivals(burstiness: float) -> None:
    """Gaps have the wanted mean, and a spread that burstiness sets: 1 is Poisson's own."""
    found = gaps("poisson", burstiness, 20000)
    mean = statistics.fmean(found)
    assert mean == pytest.approx(0.25, rel=0.05)
    # A gamma distribution of shape k has a deviation of mean / sqrt(k).
    assert statistics.stdev(found) / mean == pytest.approx(burstiness**-0.5, rel=0.05)


def test_arrivals_repeat_with_their_seed() -> None:
    """The same seed gives the same arrivals, another one others."""
    assert gaps("poisson", 1.0, 20) == gaps("poisson", 1.0, 20)
    assert gaps("poisson", 1.0, 20) != gaps("poisson", 1.0, 20, seed=1)


def test_a_closed_loop_keeps_its_concurrency() -> None:
    """Exactly so many run at once until items run out, and each runs once."""
    running, most, done = 0, 0, []

    async def perform(item: int, scheduled_at: float) -> None:
        nonlocal running, most
        assert scheduled_at == asyncio.get_running_loop().time()
        running += 1
        most = max(most, running)
        await asyncio.sleep(1 + item % 3)
        running -= 1
        done.append(item)

    run_virtually(closed_loop(range(20), 4, perform, None))
    assert (most, running, sorted(done)) == (4, 0, list(range(20)))


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Each item begins at its time even while all before it still run."""
    began = []

    async def perform(item: int, scheduled_at: float) -> None:
        assert scheduled_at == asyncio.get_running_loop().time()
        began.append((item, scheduled_at))
        await asyncio.sleep(1000)

    run_virtually(open_loop(range(5), iter([0.0, 1.0, 1.5, 4.0, 4.0]), perform, None))
    assert began == [(0, 0.0), (1, 1.0), (2, 1.5), (3, 4.0), (4, 4.0)]


def test_nothing_begins_after_the_end() -> None:
    """Neither loop begins an item after the time it was given."""
    began = []

    async def perform(item: int, scheduled_at: float) -> None:
        began.append(item)
        await asyncio.sleep(1)

    run_virtually(closed_loop(range(100), 2, perform, 3.0))
    assert len(began) == 6
    began.clear()
    run_virtually(open_loop(range(100), iter(float(n) for n in range(100)), perform, 3.0))
    assert began == [0, 1, 2]
