"""Log-probabilities are those of the model's own distribution, of the tokens really drawn."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from vllm_mlx.engine.errors import RowFailedError
from vllm_mlx.engine.run.sampler import RowSampling, draw
from vllm_mlx.engine.run.scoring import DrawScores, score_prompt

VOCAB = 700


def random_logits(num_rows: int, *, scale: float = 2.0) -> mx.array:
    """Return logits `[num_rows, VOCAB]`."""
    generator = np.random.default_rng(5)
    return mx.array(generator.normal(0.0, scale, (num_rows, VOCAB)).astype(np.float32))


def log_softmax(logits: mx.array) -> np.ndarray:
    """Return log-probabilities in double precision."""
    values = np.array(logits.astype(mx.float32), dtype=np.float64)
    values -= values.max(axis=-1, keepdims=True)
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_each_row_that_asks_gets_its_own_number_of_alternatives(dtype: mx.Dtype) -> None:
    """The token's value and the best tokens', best first; other rows get nothing."""
    logits = random_logits(4).astype(dtype)
    tokens = [3, 0, 9, 500]
    scores = DrawScores(logits, mx.array(tokens, dtype=mx.uint32), [0, 2, 3], [5, 0, 20])
    found = scores.read(tokens)
    truth = log_softmax(logits)
    assert sorted(found) == [0, 2, 3]
    for index, num_top in ((0, 5), (2, 0), (3, 20)):
        entry = found[index]
        assert entry.token_id == tokens[index]
        assert entry.logprob == pytest.approx(truth[index, tokens[index]], abs=1e-4)
        best = np.sort(truth[index])[::-1][:num_top]
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=1e-4)
        for token, value in entry.top:
            assert value == pytest.approx(truth[index, token], abs=1e-4)


def test_the_token_and_its_place_among_the_best_have_the_same_value() -> None:
    """Clients compare the two for equality to learn whether a token was the likeliest."""
    logits = random_logits(3)
    tokens: list[int] = mx.argmax(logits, axis=-1).tolist()  # type: ignore[assignment]
    found = DrawScores(logits, mx.array(tokens), [0, 1, 2], [1, 1, 1]).read(tokens)
    for entry in found.values():
        assert entry.top == ((entry.token_id, entry.logprob),)


def test_a_row_that_is_drawn_again_is_scored_for_its_final_token() -> None:
    """A nucleus wider than the candidates is redrawn when read; the entry follows it."""
    logits = random_logits(8, scale=0.1)
    rows = [RowSampling(top_p=0.999, seed=seed) for seed in range(8)]
    drawn = draw(logits, rows)
    scores = DrawScores(logits, drawn.tokens, range(8), [0] * 8)
    mx.async_eval(drawn.arrays, scores.arrays)
    first = drawn.tokens.tolist()
    tokens = drawn.read()
    assert tokens != first, "nothing was drawn again, so that this tests nothing"
    truth = log_softmax(logits)
    for index, entry in scores.read(tokens).items():
        assert entry.token_id == tokens[index]
        assert entry.logprob == pytest.approx(truth[index, tokens[index]], abs=1e-4)


@pytest.mark.parametrize("num_positions", [1, 63, 64, 65, 200])
def test_a_prompt_is_scored_across_slices(num_positions: int) -> None:
    """Every position has the value of the token that follows it, and its alternatives."""
    logits = random_logits(num_positions)
    targets = [(7 * index) % VOCAB for index in range(num_positions)]
    entries = score_prompt(logits, targets, 3).unpack()
    truth = log_softmax(logits)
    assert [entry.token_id for entry in entries] == targets
    for index, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(truth[index, targets[index]], abs=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-truth[index])[:3].tolist()


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    """A tiny vocabulary is listed whole."""
    entries = score_prompt(mx.array([[0.0, 1.0, 2.0]]), [1], 20).unpack()
    assert [token for token, _ in entries[0].top] == [2, 1, 0]


@pytest.mark.parametrize("value", [mx.nan, mx.inf])
def test_a_prompt_whose_logits_are_not_numbers_fails(value: float) -> None:
    """No value is made up for it."""
    logits = random_logits(70)
    logits[66, 3] = value
    with pytest.raises(RowFailedError, match="NaN"):
        score_prompt(logits, [1] * 70, 1)
