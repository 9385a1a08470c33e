"""Greedy tokens are mlx-lm's own, whatever the batch, chunking, neighbours and preemptions."""

from __future__ import annotations

import logging
import random

import pytest
from support.engines import (
    Driver,
    differences,
    lengths_around_blocks,
    make_engine,
    random_prompt,
    tiny_namespace,
)
from support.tiny_models import KINDS, KINDS_BY_TIER

ALL_KINDS = sorted(KINDS)


def check(
    kind: str, prompts: dict[str, list[int]], driver: Driver, *, reason: str = "length"
) -> None:
    """Compare every request that ended with `reason`; report differences at ties as warnings."""
    compared = 0
    for name, prompt in prompts.items():
        result = driver.results[name]
        assert result.final is not None
        if result.final.finish_reason != reason:
            continue
        compared += 1
        wrong, ties = differences(kind, prompt, result.tokens)
        assert wrong == []
        for tie in ties:
            logging.getLogger(__name__).warning("differs at a tie: %s", tie)
    assert compared, "nothing was compared"


def run_arriving(driver: Driver, pending: list[tuple[str, list[int], int]], seed: int) -> None:
    """Add requests at random moments while others run, then run to the end."""
    rng = random.Random(seed)
    while pending:
        if rng.random() < 0.4:
            name, prompt, max_tokens = pending.pop()
            driver.add(name, prompt, max_tokens=max_tokens)
        driver.step()
    driver.run()


@pytest.mark.parametrize(
    "chunk",
    [
        pytest.param(1, marks=pytest.mark.thorough),
        pytest.param(7, marks=pytest.mark.thorough),
        64,
        pytest.param(512, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_batched_rows_equal_the_library_alone(kind: str, chunk: int) -> None:
    """Rows of mixed lengths join and leave at random and draw mlx-lm's own greedy tokens."""
    lengths = lengths_around_blocks((1,) if chunk == 1 else (1, 2))
    rng = random.Random(chunk)
    prompts = {str(n): random_prompt(n, 0) for n in lengths}
    pending = [(name, prompt, rng.choice([1, 5, 14])) for name, prompt in prompts.items()]
    rng.shuffle(pending)
    driver = Driver(make_engine(kind, max_num_seqs=6, prefill_tokens_per_step=chunk))
    run_arriving(driver, pending, seed=chunk)
    check(kind, prompts, driver)


def test_every_prompt_length_equals_the_library_alone() -> None:
    """Each length from 1 to two blocks and one, for full attention."""
    prompts = {str(n): random_prompt(n, 1) for n in range(1, 130)}
    driver = Driver(make_engine("full", max_num_seqs=32, prefill_tokens_per_step=64))
    for name, prompt in prompts.items():
        driver.add(name, prompt, max_tokens=4)
    driver.run()
    check("full", prompts, driver)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_prompt_length_of_every_kind_equals_the_library_alone(kind: str) -> None:
    """Each length from 1 to three blocks and one."""
    prompts = {str(n): random_prompt(n, 1) for n in range(1, 194)}
    driver = Driver(make_engine(kind, max_num_seqs=32, prefill_tokens_per_step=64))
    for name, prompt in prompts.items():
        driver.add(name, prompt, max_tokens=8)
    driver.run()
    check(kind, prompts, driver)


@pytest.mark.parametrize("kind", KINDS_BY_TIER)
def test_rows_grow_from_group_to_group_without_a_change(kind: str) -> None:
    """Rows that cross several capacities, windows included, still draw the library's tokens."""
    prompts = {name: random_prompt(length, 2) for name, length in (("a", 3), ("b", 60), ("c", 200))}
    driver = Driver(make_engine(kind))
    for name, prompt in prompts.items():
        driver.add(name, prompt, max_tokens=80)
    driver.run()
    check(kind, prompts, driver)


@pytest.mark.parametrize("kind", KINDS_BY_TIER)
def test_neighbours_that_abort_and_fail_change_nothing(kind: str) -> None:
    """Rows beside aborted rows, failed rows and rows that end early keep their tokens."""

    class Fragile:
        """Fail at the fifth token of every third row."""

        made = 0

        def __init__(self) -> None:
            Fragile.made += 1
            self.fails = Fragile.made % 3 == 0
            self.count = 0

        def add(self, token_id: int) -> str:
            """Count tokens, and fail."""
            self.count += 1
            if self.fails and self.count == 5:
                raise ValueError("this row's own fault")
            return "x"

        def flush(self) -> str:
            """Hold nothing back."""
            return ""

    driver = Driver(make_engine(kind, max_num_seqs=8, make_decoder=Fragile, eos=(5, 6)))
    prompts = {str(n): random_prompt(n, 3) for n in (1, 9, 40, 63, 64, 65, 90, 130, 150)}
    rng = random.Random(4)
    for name, prompt in prompts.items():
        driver.add(name, prompt, max_tokens=40, ignore_eos=rng.random() < 0.7)
    aborted = {"9", "90"}
    for _ in range(12):
        driver.step()
    for name in aborted:
        driver.engine.abort(name)
    driver.run()
    reasons = {result.final.finish_reason for result in driver.results.values() if result.final}
    assert {"abort", "error", "length"} <= reasons
    check(kind, prompts, driver)


@pytest.mark.parametrize("kind", KINDS_BY_TIER)
def test_preempted_rows_resume_with_the_same_tokens(kind: str) -> None:
    """With bytes for two rows, rows are preempted and resumed, and still draw the same tokens."""
    row_bytes = make_engine(kind)._layout.row_cost.row_bytes(128)
    engine = make_engine(
        kind,
        kv_budget_bytes=int(2.5 * row_bytes),
        max_model_len=256,
        admission_headroom_tokens=4,
    )
    driver = Driver(engine)
    prompts = {str(n): random_prompt(20 + 7 * n, 5) for n in range(5)}
    for name, prompt in prompts.items():
        driver.add(name, prompt, max_tokens=60)
    driver.run()
    assert engine.stats().num_preemptions > 0
    check(kind, prompts, driver)
    assert engine.stats().kv_bytes == 0


@pytest.mark.parametrize("kind", KINDS_BY_TIER)
def test_a_seeded_row_draws_the_same_tokens_alone_and_in_a_batch(kind: str) -> None:
    """The noise of a row depends on its seed and position, whatever else is in the batch."""
    prompt = random_prompt(20, 6)
    settings = {"temperature": 1.0, "top_p": 0.95, "seed": 11, "max_tokens": 25}
    alone = Driver(make_engine(kind))
    alone.add("row", prompt, **settings)
    alone.run()
    crowd = Driver(make_engine(kind))
    for n in range(5):
        crowd.add(f"hot{n}", random_prompt(30 + n, 7), temperature=1.5, max_tokens=30)
    for _ in range(4):
        crowd.step()
    crowd.add("row", prompt, **settings)
    crowd.run()
    assert crowd.results["row"].tokens == alone.results["row"].tokens
    assert crowd.results["hot0"].tokens != crowd.results["hot1"].tokens


@pytest.mark.parametrize("kind", KINDS_BY_TIER)
def test_a_burst_of_prompts_prefilled_together_equals_the_library_alone(kind: str) -> None:
    """Padding on the right of a shared forward reaches no row, windows and states included."""
    driver = Driver(make_engine(kind))
    prompts = {str(n): random_prompt(60 + n, 12) for n in range(8)}
    for name, prompt in prompts.items():
        driver.add(name, prompt, max_tokens=6)
    driver.run()
    check(kind, prompts, driver)


@pytest.mark.parametrize("kind", KINDS_BY_TIER)
def test_prompts_behind_a_stored_prefix_prefilled_together_equal_the_library(kind: str) -> None:
    """Rows that resume at the same block share a forward too."""
    driver = Driver(make_engine(kind, namespace=tiny_namespace(kind)))
    shared = random_prompt(128, 13)
    driver.add("first", [*shared, 1], max_tokens=1)
    driver.run()
    prompts = {str(n): shared + random_prompt(20 + n, 14) for n in range(5)}
    for name, prompt in prompts.items():
        driver.add(name, prompt, max_tokens=6)
    driver.run()
    assert driver.results["4"].final is not None
    assert driver.results["4"].final.num_cached_tokens == 128
    check(kind, prompts, driver)


def test_a_hot_row_leaves_its_greedy_neighbour_greedy() -> None:
    """Settings of one row never reach another."""
    driver = Driver(make_engine("full"))
    prompts = {"cold": random_prompt(12, 8)}
    driver.add("hot", random_prompt(12, 9), temperature=2.0, top_k=50, max_tokens=40)
    driver.add("cold", prompts["cold"], temperature=0.0, max_tokens=40)
    driver.run()
    check("full", prompts, driver)


def test_the_comparison_can_fail() -> None:
    """A changed token is reported as a difference, so that equality means something."""
    prompt = random_prompt(10, 10)
    driver = Driver(make_engine("full"))
    driver.add("row", prompt, max_tokens=5)
    tokens = driver.run()["row"].tokens
    wrong, _ = differences("full", prompt, [*tokens[:3], (tokens[3] + 1) % 97, tokens[4]])
    assert len(wrong) == 1
