"""Biases and penalties are mlx-lm's own, for every row and token, whoever comes and goes."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors
from support.fakes import make_sequence

from vllm_mlx.engine.core.sequence import Sequence
from vllm_mlx.engine.run.logit_adjustment import LogitAdjuster

VOCAB = 50
#: As many tokens as a penalty may look back: all.
ALL = 1 << 20


def random_logits(num_rows: int, seed: int = 0) -> mx.array:
    """Return logits of both signs."""
    generator = np.random.default_rng(seed)
    return mx.array(generator.normal(0.0, 3.0, (num_rows, VOCAB)).astype(np.float32))


def expected(logits: mx.array, sequence: Sequence) -> np.ndarray:
    """Return one row as mlx-lm's processors leave it."""
    params = sequence.sampling
    row = logits[None] + 0
    outputs = make_logits_processors(
        presence_penalty=params.presence_penalty,
        presence_context_size=ALL,
        frequency_penalty=params.frequency_penalty,
        frequency_context_size=ALL,
    )
    everything = make_logits_processors(
        logit_bias=dict(params.logit_bias),
        repetition_penalty=params.repetition_penalty,
        repetition_context_size=ALL,
    )
    for processors, tokens in ((everything, sequence.tokens), (outputs, sequence.output)):
        for process in processors:
            row = process(mx.array(tokens, dtype=mx.int32), row)
    return np.array(row[0])


def random_settings(rng: random.Random) -> dict[str, Any]:
    """Return any mixture of settings, none among them."""
    settings: dict[str, Any] = {}
    if rng.random() < 0.4:
        settings["repetition_penalty"] = rng.choice([0.7, 1.3, 2.0])
    if rng.random() < 0.4:
        settings["presence_penalty"] = rng.choice([-1.5, 0.8])
    if rng.random() < 0.4:
        settings["frequency_penalty"] = rng.choice([-0.5, 1.2])
    if rng.random() < 0.4:
        tokens = rng.sample(range(VOCAB), rng.randint(1, 6))
        settings["logit_bias"] = tuple((token, rng.uniform(-100, 100)) for token in tokens)
    return settings


@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_give_what_the_library_gives_each_row_alone(seed: int) -> None:
    """Rows join, leave, come back longer, change places and draw, with holes between them."""
    rng = random.Random(seed)
    adjuster = LogitAdjuster()
    absent: list[Sequence] = []
    placed: dict[int, Sequence] = {}
    num_rows = 6
    for step in range(40):
        if rng.random() < 0.4 and len(placed) < num_rows:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
            new = make_sequence(f"{step}", prompt, **random_settings(rng))
            back = absent.pop() if absent and rng.random() < 0.5 else new
            free = [place for place in range(num_rows) if place not in placed]
            placed[rng.choice(free)] = back
        if rng.random() < 0.2 and placed:
            absent.append(placed.pop(rng.choice(sorted(placed))))
        if rng.random() < 0.1:
            places = rng.sample(range(num_rows), len(placed))
            placed = dict(zip(places, placed.values(), strict=True))
        logits = random_logits(num_rows, seed * 100 + step)
        before = np.array(logits)
        adjusted = adjuster.adjust(logits, sorted(placed.items(), key=lambda item: item[0]))
        assert np.array_equal(np.array(logits), before), "the model's own logits were changed"
        for place in range(num_rows):
            wanted = expected(logits[place], placed[place]) if place in placed else before[place]
            np.testing.assert_allclose(np.array(adjusted[place]), wanted, rtol=1e-5, atol=1e-5)
        for sequence in placed.values():
            # More than one token now and then, as a row does that comes back.
            sequence.output += [rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 1, 3]))]


def test_rows_that_ask_for_nothing_cost_nothing() -> None:
    """The logits come back as they are, and nothing is kept."""
    logits = random_logits(2).astype(mx.bfloat16)
    adjuster = LogitAdjuster()
    assert adjuster.adjust(logits, [(0, make_sequence("a")), (1, make_sequence("b"))]) is logits


def test_counts_end_with_the_last_row_that_has_penalties() -> None:
    """An array of the vocabulary's size is not kept for rows that have left."""
    adjuster = LogitAdjuster()
    row = make_sequence("a", presence_penalty=1.0)
    adjuster.adjust(random_logits(1), [(0, row)])
    assert adjuster._counts is not None
    adjuster.adjust(random_logits(1), [(0, make_sequence("b", logit_bias=((1, 2.0),)))])
    assert adjuster._counts is None


def test_a_new_row_of_an_old_name_is_counted_anew() -> None:
    """A row is known by what it is, not by the id that a client may use again."""
    adjuster = LogitAdjuster()
    logits = random_logits(1)
    for _ in range(2):
        row = make_sequence("same", [1, 2], repetition_penalty=1.5, frequency_penalty=1.0)
        for token in (3, 3, 4):
            adjusted = adjuster.adjust(logits, [(0, row)])
            np.testing.assert_allclose(np.array(adjusted[0]), expected(logits[0], row), rtol=1e-5)
            row.output.append(token)


def test_low_precision_logits_are_adjusted_in_float32() -> None:
    """A small penalty is not lost in rounding, and neighbours keep their values."""
    logits = (random_logits(2) + 200.0).astype(mx.bfloat16)
    row = make_sequence("a", presence_penalty=0.01)
    row.output.append(7)
    adjusted = LogitAdjuster().adjust(logits, [(0, row), (1, make_sequence("b"))])
    assert adjusted.dtype == mx.float32
    difference = np.array(logits.astype(mx.float32) - adjusted)
    assert difference[0, 7] == pytest.approx(0.01, abs=1e-4)
    assert np.count_nonzero(difference) == 1
