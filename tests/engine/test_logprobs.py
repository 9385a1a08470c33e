"""Log-probabilities of prompts and answers, rows that score only, and logits that are broken."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.engines import Driver, make_engine, random_prompt, tiny_model, tiny_namespace
from support.tiny_models import KINDS, VOCAB_SIZE

from vllm_mlx.engine.core.logprobs import TokenLogprob
from vllm_mlx.engine.run import runner

ALL_KINDS = sorted(KINDS)


def direct(kind: str, tokens: list[int]) -> np.ndarray:
    """Return the model's log-probabilities `[T, V]` after each token, in one plain forward."""
    model, _ = tiny_model(kind)
    logits = model(mx.array(tokens)[None])[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def prompt_entries(driver: Driver, name: str) -> list[TokenLogprob]:
    """Return what one request was told of its prompt; it must have come at once."""
    parts = driver.results[name].prompt_logprobs
    assert len(parts) <= 1
    return parts[0].unpack() if parts else []


def check_prompt(kind: str, driver: Driver, name: str, prompt: list[int], num_top: int) -> None:
    """Compare a prompt's entries with one plain forward."""
    truth = direct(kind, prompt)
    entries = prompt_entries(driver, name)
    assert [entry.token_id for entry in entries] == prompt[1:]
    for index, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(truth[index, entry.token_id], abs=1e-3)
        best = np.sort(truth[index])[::-1][:num_top]
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=1e-3)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_prompt_is_scored_whatever_the_chunks_and_the_neighbours(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, pieces of chunks, running rows and a stored prefix leave every value as it is."""
    monkeypatch.setattr(runner, "MAX_SCORED_LOGITS", 13 * VOCAB_SIZE)
    driver = Driver(
        make_engine(kind, prefill_tokens_per_step=32, namespace=tiny_namespace(kind, 16))
    )
    prompt = random_prompt(75, 40)
    driver.add("other", random_prompt(20, 41), max_tokens=30)
    driver.add("warm", prompt, max_tokens=2)
    driver.run()
    before = driver.engine.stats().prefilled_tokens
    driver.add("neighbour", random_prompt(30, 42), max_tokens=20)
    driver.add("scored", prompt, max_tokens=3, prompt_logprobs=2, logprobs=2)
    driver.add("only", prompt[:40], max_tokens=0, prompt_logprobs=0)
    driver.run()
    check_prompt(kind, driver, "scored", prompt, 2)
    check_prompt(kind, driver, "only", prompt[:40], 0)
    only, scored = driver.results["only"].final, driver.results["scored"].final
    assert only is not None
    assert (only.finish_reason, only.num_completion_tokens) == ("length", 0)
    # The prompt was stored before, and was computed all the same.
    assert scored is not None
    assert scored.num_cached_tokens == 0
    assert driver.engine.stats().prefilled_tokens - before == 29 + 74 + 39
    answer = driver.results["scored"]
    assert answer.tokens[0] == driver.results["warm"].tokens[0]
    truth = direct(kind, prompt + answer.tokens)
    for index, entry in enumerate(answer.logprob_entries()):
        place = len(prompt) - 1 + index
        assert entry.logprob == pytest.approx(truth[place, answer.tokens[index]], abs=1e-3)


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_a_request_for_no_tokens_generates_none(prompt_logprobs: int | None) -> None:
    """A prompt of one token has nothing to score, and nothing is computed for an echo alone."""
    driver = Driver(make_engine())
    driver.add("one", [5], max_tokens=0, prompt_logprobs=prompt_logprobs)
    driver.add("many", [5, 6, 7], max_tokens=0, prompt_logprobs=prompt_logprobs)
    driver.run()
    for name, count in (("one", 0), ("many", 2 if prompt_logprobs else 0)):
        final = driver.results[name].final
        assert final is not None
        assert (final.finish_reason, final.error) == ("length", None)
        assert driver.results[name].tokens == []
        assert len(prompt_entries(driver, name)) == count
    assert driver.engine.stats().kv_bytes == 0


def test_a_scored_prompt_that_is_preempted_begins_again() -> None:
    """A row sent back in the middle of its prompt still scores every position, once."""
    engine = make_engine(prefill_tokens_per_step=16, max_model_len=256)
    driver = Driver(engine)
    prompt = random_prompt(60, 43)
    driver.add("row", prompt, max_tokens=4, prompt_logprobs=1)
    driver.step()
    driver.step()
    (sequence,) = engine._scheduler.sequences()
    assert 0 < sequence.num_prompt_scored < len(prompt) - 1
    engine._scheduler._preempt(sequence)
    driver.run()
    check_prompt("full", driver, "row", prompt, 1)
    assert sequence.num_preemptions == 1


def test_a_scored_row_that_is_preempted_later_may_use_its_stored_prefix() -> None:
    """Once the prompt is scored the row is like any other."""
    engine = make_engine(namespace=tiny_namespace("full", 16), max_model_len=256)
    driver = Driver(engine)
    prompt = random_prompt(60, 44)
    driver.add("row", prompt, max_tokens=12, prompt_logprobs=1)
    for _ in range(4):
        driver.step()
    (sequence,) = engine._scheduler.sequences()
    assert sequence.output
    engine._scheduler._preempt(sequence)
    before = engine.stats().prefilled_tokens
    driver.run()
    assert engine.stats().prefilled_tokens - before < 16
    check_prompt("full", driver, "row", prompt, 1)
    alone = Driver(make_engine())
    alone.add("row", prompt, max_tokens=12)
    assert driver.results["row"].tokens == alone.run()["row"].tokens


def test_logprobs_are_the_models_own_whatever_changes_the_draw() -> None:
    """Temperature, filters, penalties, biases and banned tokens do not show in them."""
    prompt = random_prompt(30, 45)
    settings: dict[str, Any] = {
        "temperature": 1.7,
        "top_k": 3,
        "seed": 3,
        "repetition_penalty": 1.9,
        "presence_penalty": 2.0,
        "logit_bias": ((7, 100.0),),
        "min_tokens": 6,
        "stop_token_ids": (7,),
    }
    driver = Driver(make_engine())
    driver.add("row", prompt, max_tokens=6, logprobs=4, **settings)
    result = driver.run()["row"]
    truth = direct("full", prompt + result.tokens)
    for index, entry in enumerate(result.logprob_entries()):
        place = truth[len(prompt) - 1 + index]
        assert entry.logprob == pytest.approx(place[result.tokens[index]], abs=1e-3)
        best = np.sort(place)[::-1][:4]
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=1e-3)


def test_rows_of_one_prompt_compute_it_once() -> None:
    """Choices of one request share the whole blocks of their prompt; each draws its own tokens."""
    driver = Driver(make_engine(namespace=tiny_namespace("full", 16)))
    prompt = random_prompt(100, 46)
    for index in range(4):
        driver.add(f"choice{index}", prompt, max_tokens=10, temperature=1.0, seed=index)
    driver.run()
    # 99 tokens once; 6 blocks of 16 are shared, and the 3 others compute what is left of the 99.
    assert driver.engine.stats().prefilled_tokens == 99 + 3 * 3
    assert len({tuple(result.tokens) for result in driver.results.values()}) == 4
    assert [
        result.final.num_cached_tokens for result in driver.results.values() if result.final
    ] == [0, 96, 96, 96]


class Poisoned:
    """Give NaN for the row that reads one token, from that token on, as damaged weights would."""

    def __init__(self, model: Any, token: int, value: float = float("nan")) -> None:
        self._model = model
        self._token = token
        self._value = value
        self.layers = model.layers

    def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
        """Run the model and spoil the logits after the token."""
        logits = self._model(tokens, **options)
        return mx.where((tokens == self._token)[..., None], self._value, logits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("neighbour", [{}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 2}])
def test_a_row_with_broken_logits_ends_with_an_error_that_says_so(
    value: float, neighbour: dict[str, Any]
) -> None:
    """Its neighbours draw what they draw without it, and the engine goes on."""
    model, _ = tiny_model("full")
    calm = Driver(make_engine())
    calm.add("good", [1, 2, 3], max_tokens=12, seed=1, **neighbour)
    expected = calm.run()["good"].tokens
    poison = next(token for token in range(50, 90) if token not in expected)
    driver = Driver(make_engine(model=Poisoned(model, poison, value)))
    driver.add("good", [1, 2, 3], max_tokens=12, seed=1, **neighbour)
    driver.add("bad", [4, poison], max_tokens=12, logprobs=1, presence_penalty=1.0)
    driver.add("late", [4, 5], max_tokens=12, logit_bias=((poison, 100.0),))
    driver.run()
    for name, num_tokens in (("bad", 0), ("late", 1)):
        final = driver.results[name].final
        assert final is not None
        assert final.error is not None
        assert (final.error.code, final.num_completion_tokens) == ("row_failed", num_tokens)
        assert "NaN or infinite logits" in final.error.message
    assert driver.results["good"].tokens == expected
    driver.add("after", [1, 2, 3], max_tokens=12, seed=1, **neighbour)
    assert driver.run()["after"].tokens == expected
    assert driver.engine.stats().kv_bytes == 0


def test_a_scored_prompt_with_broken_logits_fails_alone() -> None:
    """No value is reported for what is not a number."""
    model, _ = tiny_model("full")
    driver = Driver(make_engine(model=Poisoned(model, 70)))
    driver.add("bad", [1, 70, 2, 3], max_tokens=1, prompt_logprobs=1)
    driver.add("good", [1, 2, 3], max_tokens=4, prompt_logprobs=1)
    driver.run()
    bad = driver.results["bad"].final
    assert bad is not None
    assert bad.error is not None
    assert "for this prompt" in bad.error.message
    assert len(driver.results["good"].tokens) == 4
    check_prompt("full", driver, "good", [1, 2, 3], 1)
