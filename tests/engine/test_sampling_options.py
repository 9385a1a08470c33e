"""Every sampling option holds for every token of a row, whoever joins, leaves or is preempted."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from support.engines import Driver, Finished, make_engine, random_prompt, tiny_namespace
from support.library_rows import LibraryRow, library_row, settings_of
from support.tiny_models import KINDS, VOCAB_SIZE

from vllm_mlx.engine.core.request import SamplingParams
from vllm_mlx.engine.engine import Engine

logger = logging.getLogger(__name__)


def random_settings(rng: random.Random) -> dict[str, Any]:
    """Return any mixture of the options, none among them."""
    settings: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "temperature": 0.0}
    if rng.random() < 0.4:
        settings |= {"temperature": rng.choice([0.5, 1.0, 1.5]), "seed": rng.randrange(1 << 40)}
        settings |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
    if rng.random() < 0.5:
        settings["repetition_penalty"] = rng.choice([0.8, 1.2, 1.7])
    if rng.random() < 0.5:
        settings["presence_penalty"] = rng.choice([-1.0, 0.7, 2.0])
    if rng.random() < 0.5:
        settings["frequency_penalty"] = rng.choice([-0.4, 0.6, 2.0])
    if rng.random() < 0.5:
        tokens = rng.sample(range(VOCAB_SIZE), rng.randint(1, 5))
        settings["logit_bias"] = tuple((t, rng.choice([-100.0, -3.0, 2.5, 6.0])) for t in tokens)
    if rng.random() < 0.5:
        settings["stop"] = tuple(f"{rng.randrange(10)} {rng.randrange(10)}" for _ in range(2))
    if rng.random() < 0.6:
        settings["logprobs"] = rng.choice([0, 1, 5, 20])
    return settings


def check_row(name: str, result: Finished, expected: LibraryRow, params: SamplingParams) -> None:
    """Compare tokens, text, ending and log-probabilities with the row alone."""
    difference = expected.first_difference(result.tokens)
    assert difference is None, (
        f"{name} {params}: token {difference} is {result.tokens[difference or 0]}, "
        f"not {expected.tokens[difference or 0]}"
    )
    count = expected.num_comparable(result.tokens)
    if count < len(result.tokens):
        logger.warning("%s differs at a tie", name)
    else:
        check_ending(result, expected, params)
    entries = result.logprob_entries()
    assert params.logprobs is not None or entries == []
    for index, entry in enumerate(entries[:count]):
        truth = expected.logprobs[index]
        assert entry.token_id == result.tokens[index]
        assert entry.offset == len("".join(f"{t} " for t in result.tokens[:index]))
        assert entry.logprob == pytest.approx(truth[entry.token_id], abs=1e-3)
        values = [value for _, value in entry.top]
        best = sorted(truth, reverse=True)[: params.logprobs]
        assert values == pytest.approx(best, abs=1e-3)
        assert values == sorted(values, reverse=True)
        for token, value in entry.top:
            assert value == pytest.approx(truth[token], abs=1e-3)


def check_ending(result: Finished, expected: LibraryRow, params: SamplingParams) -> None:
    """Compare text, finish reason and the number of entries of a row that met no tie."""
    assert result.final is not None
    text, count, stopped = "", 0, False
    for token in expected.tokens:
        text, count = f"{text}{token} ", count + 1
        ends = [text.find(stop) for stop in params.stop if stop in text]
        if ends:
            text, stopped = text[: min(ends)], True
            break
    assert (result.text, len(result.tokens)) == (text, count)
    assert result.final.finish_reason == ("stop" if stopped else "length")
    if params.logprobs is not None:
        spelled = [len(f"{token} ") for token in result.tokens]
        kept = [i for i in range(len(spelled)) if not stopped or sum(spelled[:i]) < len(text)]
        assert len(result.logprob_entries()) == len(kept)


@pytest.mark.parametrize(
    ("kind", "seed", "num_rows"),
    [
        ("full", 0, 12),
        pytest.param("full", 1, 12, marks=pytest.mark.thorough),
        ("rotating", 3, 8),
        pytest.param("recurrent", 11, 6, marks=pytest.mark.thorough),
        pytest.param("latent", 11, 7, marks=pytest.mark.thorough),
    ],
)
def test_rows_of_every_option_equal_the_library_alone(kind: str, seed: int, num_rows: int) -> None:
    """Random rows arrive at random, share prefixes, are preempted and leave early."""
    engine = run_schedule(kind, seed, num_rows)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefixes is not None
    assert stats.prefixes.hit_tokens > 0


def test_nothing_is_kept_of_rows_that_have_left() -> None:
    """Counts of a vocabulary's size go with the last row, whether it ended or the device failed."""
    engine = make_engine()
    driver = Driver(engine)
    driver.add("row", [1, 2, 3], max_tokens=4, presence_penalty=1.0)
    driver.run()
    adjuster = engine._runner._adjuster
    assert (adjuster._counts, adjuster._setting) == (None, None)
    driver.add("again", [1, 2, 3], max_tokens=4, presence_penalty=1.0)
    for _ in range(3):
        driver.step()
    assert adjuster._counts is not None
    engine._fail_all(RuntimeError("the device failed"))
    assert (adjuster._counts, adjuster._setting) == (None, None)
    driver.run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 106))
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_many_rows_of_every_option_equal_the_library_alone(kind: str, seed: int) -> None:
    """The same for every kind of cache and more rows."""
    run_schedule(kind, seed, 20)


def run_schedule(kind: str, seed: int, num_rows: int) -> Engine:
    """Run random rows through an engine short of memory and check each; return the engine."""
    rng = random.Random(seed)
    row_bytes = make_engine(kind)._layout.row_cost.row_bytes(128)
    engine = make_engine(
        kind,
        max_num_seqs=6,
        prefill_tokens_per_step=rng.choice([16, 64]),
        kv_budget_bytes=int(2.5 * row_bytes),
        max_model_len=256,
        admission_headroom_tokens=2,
        namespace=tiny_namespace(kind, 16),
    )
    driver = Driver(engine)
    shared = random_prompt(32, seed)
    wanted: dict[str, tuple[list[int], SamplingParams]] = {}
    for number in range(num_rows):
        prompt = random_prompt(rng.randint(1, 40), 100 * seed + number)
        prompt = shared + prompt if rng.random() < 0.5 else prompt
        wanted[f"row{number}"] = prompt, SamplingParams(**random_settings(rng))
    pending = list(wanted)
    while pending:
        if rng.random() < 0.6:
            name = pending.pop()
            prompt, params = wanted[name]
            driver.add(name, prompt, stream_interval=rng.choice([1, 3]), **settings_of(params))
        if rng.random() < 0.05:
            engine.abort(rng.choice(list(wanted)))
        driver.step()
    driver.run()
    for name, (prompt, params) in wanted.items():
        result = driver.results[name]
        assert result.final is not None
        if result.final.finish_reason != "abort":
            check_row(name, result, library_row(kind, prompt, params), params)
    return engine
