"""Prefixes that are found again: same tokens, truly not computed, for every kind of cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from support.engines import (
    Driver,
    differences,
    lengths_around_blocks,
    make_engine,
    random_prompt,
    tiny_model,
    tiny_namespace,
)
from support.tiny_models import KINDS, KINDS_BY_TIER

ALL_KINDS = sorted(KINDS)
BLOCK = 64


def make_driver(kind: str = "full", **options: object) -> Driver:
    """Return a driver over an engine that keeps prefixes."""
    return Driver(make_engine(kind, namespace=tiny_namespace(kind), **options))  # type: ignore[arg-type]


def computed(driver: Driver) -> int:
    """Return the runner's own count of prompt tokens that a prefill forward computed."""
    return driver.engine.stats().prefilled_tokens


def ask(driver: Driver, name: str, prompt: list[int], max_tokens: int = 8) -> tuple[int, int]:
    """Run one greedy request; return (tokens said to be cached, prompt tokens computed)."""
    before = computed(driver)
    driver.add(name, prompt, max_tokens=max_tokens)
    driver.run()
    final = driver.results[name].final
    assert final is not None
    assert final.error is None
    # The last prompt token is computed by the first decode step, not by prefill.
    return final.num_cached_tokens, computed(driver) - before + 1


def check(kind: str, driver: Driver, name: str, prompt: list[int]) -> None:
    """Compare a request's tokens with mlx-lm's."""
    assert differences(kind, prompt, driver.results[name].tokens)[0] == []


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_hit_gives_the_tokens_of_a_cold_run_and_counts_what_it_did_not_compute(
    kind: str,
) -> None:
    """Every prompt is asked twice; what is said to be cached was really not computed."""
    driver = make_driver(kind)
    for length in lengths_around_blocks((1, 3)):
        prompt = random_prompt(length, 20)
        assert ask(driver, f"cold{length}", prompt) == (0, length)
        cached, done = ask(driver, f"hit{length}", prompt)
        assert cached + done == length
        assert 1 <= done <= BLOCK
        for name in ("cold", "hit"):
            check(kind, driver, f"{name}{length}", prompt)


@pytest.mark.parametrize("kind", ["full", "recurrent"])
def test_what_a_prompt_puts_into_the_store_is_told_once(kind: str) -> None:
    """As many tokens as the store has blocks more of; who finds them stored stores nothing."""
    driver = make_driver(kind)
    prompt = random_prompt(200, 40)
    for name, length, expected in (("first", 200, 192), ("again", 200, 0), ("part", 130, 0)):
        before = len(driver.engine._prefixes.tree)
        ask(driver, name, prompt[:length], max_tokens=1)
        final = driver.results[name].final
        assert final is not None
        assert final.num_stored_tokens == expected
        assert (len(driver.engine._prefixes.tree) - before) * BLOCK == expected
    bare = Driver(make_engine(kind))
    ask(bare, "bare", prompt, max_tokens=1)
    last = bare.results["bare"].final
    assert last is not None
    assert last.num_stored_tokens == 0, "there is no store"


@pytest.mark.parametrize("kind", KINDS_BY_TIER)
def test_a_prompt_that_departs_from_another_is_right_and_reuses_what_is_before(kind: str) -> None:
    """Only whole blocks before the first differing token can be found."""
    driver = make_driver(kind)
    shared = random_prompt(200, 21)
    first, second = shared + random_prompt(60, 22), shared + random_prompt(75, 23)
    ask(driver, "first", first)
    cached, done = ask(driver, "second", second)
    assert cached + done == len(second)
    # Recurrent state is kept at the end of a prompt only, windows where they were not replaced.
    assert cached == (192 if not driver.engine._prefixes.checkpoint_grid else 0)
    check(kind, driver, "second", second)


@pytest.mark.parametrize("kind", KINDS_BY_TIER)
def test_a_conversation_goes_on_from_its_own_answer(kind: str) -> None:
    """The next turn finds the last one's answer, and each token's KV is stored once."""
    driver = make_driver(kind)
    history = random_prompt(70, 24)
    for turn in range(5):
        cached, done = ask(driver, f"turn{turn}", history, max_tokens=40)
        check(kind, driver, f"turn{turn}", history)
        assert cached + done == len(history)
        if turn:
            assert cached >= (len(history) - 20 - 1) // BLOCK * BLOCK - BLOCK
        history = history + driver.results[f"turn{turn}"].tokens + random_prompt(20, 25 + turn)
    stats = driver.engine.stats().prefixes
    assert stats is not None
    assert stats.num_blocks <= len(history) // BLOCK


def test_requests_that_arrive_together_compute_a_shared_prefix_once() -> None:
    """The second waits for what the first is computing, and others are not held back."""
    driver = make_driver(prefill_tokens_per_step=64)
    shared = random_prompt(640, 30)
    prompts = {str(n): shared + random_prompt(10, 31 + n) for n in range(4)}
    for name, prompt in prompts.items():
        driver.add(name, prompt, max_tokens=4)
    driver.add("other", random_prompt(5, 40), max_tokens=4)
    driver.run()
    assert computed(driver) == 640 + 4 * 9 + 4
    for name, prompt in prompts.items():
        check("full", driver, name, prompt)


def test_a_waiting_row_starts_when_the_shared_part_is_stored() -> None:
    """A row waits for the blocks that it shares, not for the rest of a long prompt."""
    driver = make_driver(prefill_tokens_per_step=64)
    shared = random_prompt(128, 50)
    driver.add("long", shared + random_prompt(2000, 51), max_tokens=4)
    driver.step()
    driver.add("short", shared + random_prompt(5, 52), max_tokens=2)
    while driver.results["short"].final is None:
        driver.step()
    assert driver.results["long"].final is None
    final = driver.results["short"].final
    assert final.num_cached_tokens == 128
    driver.run()


def test_an_aborted_prefill_leaves_its_complete_blocks() -> None:
    """What was computed before the client left is found by the next."""
    driver = make_driver(prefill_tokens_per_step=100)
    prompt = random_prompt(500, 60)
    driver.add("left", prompt, max_tokens=4)
    for _ in range(3):
        driver.step()
    driver.engine.abort("left")
    driver.run()
    cached, _ = ask(driver, "again", prompt)
    assert cached == 256
    check("full", driver, "again", prompt)


def test_a_failed_row_leaves_nothing() -> None:
    """KV of a row that ended in an error is not trusted."""

    class Failing:
        """Fail at the first token."""

        def add(self, token_id: int) -> str:
            """Fail."""
            raise ValueError("broken")

        def flush(self) -> str:
            """Hold nothing."""
            return ""

    driver = make_driver(make_decoder=Failing)
    driver.add("bad", random_prompt(20, 61), max_tokens=100)
    driver.run()
    stats = driver.engine.stats().prefixes
    assert stats is not None
    assert stats.num_blocks == 0


def test_a_prefix_that_computed_to_no_numbers_is_not_found_again() -> None:
    """Blocks of a row whose logits are NaN are dropped, so that the next one computes anew."""
    model, _ = tiny_model("full")

    class Poisonable:
        """Turn every logit into NaN while told to."""

        layers = model.layers
        is_poisoned = True

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            """Compute."""
            logits = model(inputs, cache=cache)
            return logits * float("nan") if self.is_poisoned else logits

    poisonable = Poisonable()
    driver = make_driver(model=poisonable)
    prompt = random_prompt(200, 97)
    driver.add("bad", prompt, max_tokens=4)
    driver.run()
    final = driver.results["bad"].final
    assert final is not None
    assert final.finish_reason == "error"
    poisonable.is_poisoned = False
    assert ask(driver, "good", prompt) == (0, 200)
    check("full", driver, "good", prompt)


def test_preempted_rows_resume_from_what_they_stored() -> None:
    """A preempted row's blocks are found when it resumes, and its tokens do not change."""
    row_bytes = make_engine()._layout.row_cost.row_bytes(256)
    driver = make_driver(
        kv_budget_bytes=int(2.6 * row_bytes), max_model_len=512, admission_headroom_tokens=4
    )
    prompts = {str(n): random_prompt(100 + 7 * n, 62) for n in range(4)}
    for name, prompt in prompts.items():
        driver.add(name, prompt, max_tokens=80)
    driver.run()
    assert driver.engine.stats().num_preemptions > 0
    for name, prompt in prompts.items():
        check("full", driver, name, prompt)
        final = driver.results[name].final
        assert final is not None
        assert final.num_cached_tokens == 0, "its own earlier work is no cached prompt"


def test_rows_take_back_what_prefixes_hold_in_the_shared_budget() -> None:
    """Prefixes never keep a request from starting: they are evicted first."""
    row_bytes = make_engine()._layout.row_cost.row_bytes(256)
    driver = make_driver(kv_budget_bytes=2 * row_bytes, max_model_len=256)
    for n in range(6):
        prompt = random_prompt(200, 70 + n)
        ask(driver, str(n), prompt)
        check("full", driver, str(n), prompt)
        stats = driver.engine.stats()
        assert stats.prefixes is not None
        assert stats.kv_bytes + stats.prefixes.num_bytes <= 2 * row_bytes
    assert stats.prefixes.num_evicted > 0


def test_the_ram_budget_holds_and_the_least_used_goes_first() -> None:
    """With room for four blocks, the prompt that was used last is still found."""
    block_bytes = make_engine()._layout.row_cost.row_bytes(BLOCK)
    driver = make_driver(cache_memory_bytes=4 * block_bytes)
    for n in range(3):
        ask(driver, f"cold{n}", random_prompt(140, 80 + n))
    stats = driver.engine.stats().prefixes
    assert stats is not None
    assert stats.num_bytes <= 4 * block_bytes
    assert ask(driver, "last", random_prompt(140, 82))[0] == 128
    assert ask(driver, "first", random_prompt(140, 80))[0] == 0


def test_a_block_in_the_middle_of_another_prompt_is_not_found() -> None:
    """The same tokens behind other tokens have other KV."""
    driver = make_driver()
    middle = random_prompt(64, 90)
    ask(driver, "first", random_prompt(64, 91) + middle + [1])
    assert ask(driver, "second", [*middle, 1, 2]) == (0, 66)
    check("full", driver, "second", [*middle, 1, 2])


def test_clearing_makes_every_prompt_cold_again() -> None:
    """After a clear nothing is held and nothing is found."""
    driver = make_driver()
    prompt = random_prompt(200, 95)
    ask(driver, "cold", prompt)
    assert driver.engine.clear_prefixes().num_blocks == 3
    assert ask(driver, "again", prompt) == (0, 200)


def test_a_seeded_row_draws_the_same_after_a_hit() -> None:
    """A restored prefix changes no draw."""
    driver = make_driver()
    prompt = random_prompt(150, 96)
    for name in ("cold", "hit"):
        driver.add(name, prompt, temperature=1.0, seed=5, max_tokens=20)
        driver.run()
    assert driver.results["cold"].tokens == driver.results["hit"].tokens
    final = driver.results["hit"].final
    assert final is not None
    assert final.num_cached_tokens == 128
