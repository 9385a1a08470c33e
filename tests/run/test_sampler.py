"""Tokens are drawn from the right distribution, and each row as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from vllm_mlx.engine.run import sampler
from vllm_mlx.engine.run.sampler import RowSampling, draw, noise_key, sample

VOCAB = 1000


def random_logits(num_rows: int, *, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> Any:
    """Return logits `[num_rows, vocab]` in float32."""
    generator = np.random.default_rng(seed)
    return mx.array(generator.normal(0.0, scale, (num_rows, vocab)).astype(np.float32))


def draws(row: Any, num_draws: int, **settings: Any) -> np.ndarray:
    """Draw `num_draws` tokens from the logits `row`, at as many positions."""
    rows = [RowSampling(position=position, **settings) for position in range(num_draws)]
    return np.array(draw(mx.repeat(row[None], num_draws, axis=0), rows).read())


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> tuple[float, float]:
    """Return the statistic of the draws, and the bound that 1 in 10,000 right draws exceeds."""
    expected = probabilities * len(tokens)
    large = expected >= 5
    counts = np.bincount(tokens, minlength=len(probabilities))
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    keep = wanted > 0
    statistic = float((((observed - wanted) ** 2)[keep] / wanted[keep]).sum())
    assert observed[~keep].sum() == 0
    freedom = int(keep.sum()) - 1
    # Wilson and Hilferty's approximation of the quantile; 3.719 is the normal one.
    return statistic, freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3


def softmax(logits: Any) -> np.ndarray:
    """Return the probabilities of one row of logits in double precision."""
    values = np.array(logits, dtype=np.float64)
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def mlx_lm_keeps(logits: Any, *, top_p: float, min_p: float, top_k: int) -> np.ndarray:
    """Return which tokens mlx-lm's own filters keep, applied in its order."""
    log_probabilities = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if 0 < top_p < 1:
        log_probabilities = apply_top_p(log_probabilities, top_p)
    if min_p > 0:
        log_probabilities = apply_min_p(log_probabilities, min_p)
    if top_k > 0:
        log_probabilities = apply_top_k(log_probabilities, top_k)
    return np.isfinite(np.array(log_probabilities))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_greedy_rows_are_argmax(dtype: Any) -> None:
    """An all-greedy batch is the argmax of every row, in any dtype."""
    logits = random_logits(5).astype(dtype)
    rows = [RowSampling(temperature=0.0, seed=index) for index in range(5)]
    assert sample(logits, rows).tolist() == mx.argmax(logits, axis=-1).tolist()
    assert sample(logits, rows).dtype == mx.uint32


def test_an_all_greedy_batch_does_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """No noise is made and nothing is ranked for rows that are all greedy."""

    def refuse(*_: object) -> None:
        raise AssertionError("not for greedy rows")

    for name in ("_noise", "_rank_threshold", "_draw_plain"):
        monkeypatch.setattr(sampler, name, refuse)
    drawn = draw(random_logits(3), [RowSampling(temperature=0.0), None, RowSampling(top_k=1)])
    assert len(drawn.read()) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 1e-9},
        {"top_k": 1},
        {"top_p": 0.0},
        {"top_p": 1e-6},
        {"min_p": 1.0},
    ],
)
def test_settings_that_leave_one_token_are_greedy(settings: dict[str, Any]) -> None:
    """The limits of every setting are the likeliest token, whatever the seed."""
    logits = random_logits(1)[0]
    assert set(draws(logits, 50, **settings)) == {int(mx.argmax(logits))}


@pytest.mark.parametrize("hot", [{}, {"top_p": 0.5}, {"top_k": 300}, {"min_p": 0.1}])
def test_a_hot_row_leaves_its_greedy_neighbour_greedy(hot: dict[str, Any]) -> None:
    """A row at temperature 0 stays argmax beside rows on any other path."""
    logits = random_logits(3)
    greedy = RowSampling(temperature=0.0)
    for position in range(20):
        rows = [RowSampling(temperature=5.0, position=position, **hot), greedy, None]
        assert sample(logits, rows).tolist()[1] == int(mx.argmax(logits[1]))


ROWS = st.builds(
    RowSampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3]),
    top_k=st.sampled_from([0, 5, 255, 256, 700, 5000]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
    seed=st.integers(-(2**70), 2**70),
    position=st.integers(0, 10**6),
    banned=st.lists(st.integers(0, VOCAB + 5), max_size=3).map(tuple),
)


@hypothesis_settings(max_examples=40, deadline=None)
@given(st.lists(st.none() | ROWS, min_size=1, max_size=6), st.sampled_from([0.1, 3.0]))
def test_a_row_draws_the_same_token_alone_and_in_any_batch(
    rows: list[RowSampling | None], scale: float
) -> None:
    """Given equal logits, neither neighbours nor their paths change a row's draw."""
    logits = random_logits(len(rows), scale=scale)
    together = draw(logits, rows).read()
    for index, row in enumerate(rows):
        if row is not None:
            assert draw(logits[index : index + 1], [row]).read() == [together[index]]


def test_a_neighbours_nucleus_does_not_narrow_a_row() -> None:
    """A row without top_p keeps its tail beside a row with one, where the mass rounds to 1."""
    peaked = np.full(VOCAB, -40.0, dtype=np.float32)
    peaked[:3] = [0.0, -25.0, -26.0]
    logits = mx.stack([mx.array(peaked), mx.array(peaked)])
    drawn = set()
    for position in range(100):
        hot = RowSampling(temperature=50.0, top_k=3, position=position)
        drawn.add(draw(logits, [hot, RowSampling(top_p=0.5)]).read()[0])
    assert drawn == {0, 1, 2}


def test_noise_of_other_positions_and_seeds_is_independent() -> None:
    """Neighbouring seeds and positions have uncorrelated noise, and no two share a key."""
    rows = [RowSampling(seed=seed, position=position) for seed in range(4) for position in range(4)]
    noise = np.array(sampler._noise(rows, 4000))
    correlations = np.corrcoef(noise) - np.eye(len(rows))
    assert np.abs(correlations).max() < 5 / np.sqrt(4000)
    seeds = [*range(50), 2**32, 2**63 - 1, -1, -(2**62)]
    keys = {noise_key(seed, position) for seed in seeds for position in range(200)}
    assert len(keys) == len(seeds) * 200
    assert noise_key(2**64 + 5, 7) == noise_key(5, 7)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_plain_draws_follow_the_softmax(temperature: float) -> None:
    """Over many positions the draws have the distribution of the softmax at the temperature."""
    logits = random_logits(1, vocab=60, scale=1.5)[0]
    tokens = draws(logits, 20_000, temperature=temperature, seed=11)
    statistic, bound = chi_square(tokens, softmax(logits / temperature))
    assert statistic < bound


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.8},
        {"top_k": 12},
        {"min_p": 0.05},
        {"top_p": 0.95, "top_k": 30, "min_p": 0.02},
        {"top_k": 280},
    ],
)
def test_filtered_draws_follow_the_softmax_over_kept_tokens(settings: dict[str, Any]) -> None:
    """Filters leave the distribution over what they keep, temperature coming after them."""
    logits = random_logits(1, vocab=300, scale=2.0)[0]
    kept = mlx_lm_keeps(logits[None], **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, **settings})[0]
    tokens = draws(logits, 6000, temperature=1.3, seed=5, **settings)
    statistic, bound = chi_square(tokens, softmax(np.where(kept, np.array(logits / 1.3), -np.inf)))
    assert statistic < bound


def test_draws_of_different_seeds_follow_the_softmax() -> None:
    """The first position of many consecutive seeds is as random as many positions of one."""
    logits = random_logits(1, vocab=60, scale=1.5)[0]
    rows = [RowSampling(seed=seed) for seed in range(20_000)]
    tokens = np.array(draw(mx.repeat(logits[None], len(rows), axis=0), rows).read())
    statistic, bound = chi_square(tokens, softmax(logits))
    assert statistic < bound


@pytest.mark.parametrize("top_p", [1.0, 0.99, 0.9, 0.5, 0.01])
@pytest.mark.parametrize("top_k", [0, 2, 40, 255, 700])
@pytest.mark.parametrize("min_p", [0.0, 0.02])
def test_kept_sets_equal_mlx_lms(top_p: float, top_k: int, min_p: float) -> None:
    """The kept tokens are those of mlx-lm's filters in mlx-lm's order, for peaked and flat rows."""
    logits = mx.concatenate(
        [random_logits(6, scale=scale, seed=int(scale * 10)) for scale in (0.5, 1.5, 4.0)]
    )
    rows = [RowSampling(top_p=top_p, top_k=top_k, min_p=min_p)] * logits.shape[0]
    ranked = -mx.sort(-logits, axis=-1)
    threshold = sampler._rank_threshold(ranked, logits, rows)
    expected = mlx_lm_keeps(logits, top_p=top_p, min_p=min_p, top_k=top_k)
    assert (np.array(logits >= threshold) == expected).all()
    candidates = sampler._rank_threshold(ranked[:, :256], logits, rows)
    settled = np.array(candidates > ranked[:, 255:256])[:, 0]
    assert (np.array(logits >= candidates) == expected)[settled].all()
    assert (settled == (expected.sum(axis=-1) < 256)).all()


def record_sorts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of every full sort."""
    sorted_rows: list[int] = []
    whole: Callable[..., Any] = sampler._draw_sorted

    def recording(logits: Any, rows: Sequence[RowSampling]) -> Any:
        sorted_rows.append(len(rows))
        return whole(logits, rows)

    monkeypatch.setattr(sampler, "_draw_sorted", recording)
    return sorted_rows


def test_only_rows_that_need_it_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nucleus beyond the candidates costs its own row a full sort, and no other row."""
    sorted_rows = record_sorts(monkeypatch)
    logits = mx.concatenate([random_logits(3), random_logits(1, scale=0.1)])
    nucleus = RowSampling(top_p=0.9)
    draw(logits, [nucleus, RowSampling(top_k=50), RowSampling(), None]).read()
    assert sorted_rows == []
    draw(logits, [nucleus, nucleus, None, nucleus]).read()
    assert sorted_rows == [1]
    draw(logits, [nucleus, RowSampling(top_k=256), nucleus, None]).read()
    assert sorted_rows == [1, 1]


def test_a_wide_nucleus_is_drawn_from_as_a_whole() -> None:
    """Where the nucleus is wider than the candidates, tokens outside them are drawn too."""
    logits = random_logits(1, scale=0.1)[0]
    kept = mlx_lm_keeps(logits[None], top_p=0.9, min_p=0.0, top_k=0)[0]
    tokens = draws(logits, 6000, top_p=0.9, seed=3)
    candidates = set(np.argsort(-np.array(logits))[:256])
    assert set(tokens) - candidates
    assert kept[tokens].all()
    statistic, bound = chi_square(tokens, softmax(np.where(kept, np.array(logits), -np.inf)))
    assert statistic < bound


def test_sample_and_draw_agree_where_rows_are_redrawn() -> None:
    """The one-call form gives what the two-step form gives, wide nuclei included."""
    logits = random_logits(4, scale=0.1)
    rows = [RowSampling(top_p=0.9, seed=1), None, RowSampling(seed=2), RowSampling(top_k=9, seed=3)]
    assert sample(logits, rows).tolist() == draw(logits, rows).read()


def test_draw_evaluates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the logits before the tokens are read."""
    logits = random_logits(4)
    rows = [RowSampling(top_p=0.9), RowSampling(), RowSampling(temperature=0.0), None]
    tape: list[str] = []
    for name in ("eval", "async_eval", "synchronize"):
        monkeypatch.setattr(mx, name, lambda *_, name=name: tape.append(name))
    drawn = draw(logits * 2.0, rows)
    assert tape == []
    monkeypatch.undo()
    assert len(drawn.read()) == 4


def test_banned_tokens_are_never_drawn_and_never_counted() -> None:
    """Banned ids are neither drawn nor part of a nucleus, in this row only."""
    logits = random_logits(1)[0]
    best = [int(token) for token in np.argsort(-np.array(logits))[:3]]
    banned = (best[0], best[1], VOCAB + 7, -1)
    before = np.array(logits)
    for settings in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}):
        assert set(draws(logits, 5, banned=banned, **settings)) == {best[2]}
    tokens = draws(logits, 500, banned=banned, temperature=0.5)
    assert not set(tokens) & set(banned)
    both = draw(
        mx.stack([logits, logits]),
        [RowSampling(temperature=0.0, banned=banned), RowSampling(temperature=0.0)],
    )
    assert both.read() == [best[2], best[0]]
    assert (np.array(logits) == before).all()


@pytest.mark.parametrize("poison", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 300}, {"min_p": 0.1}]
)
def test_a_poisoned_row_disturbs_no_other(poison: float, settings: dict[str, Any]) -> None:
    """A row of NaN or infinities gets some token of the vocabulary; its neighbours their own."""
    logits = random_logits(3)
    rows = [RowSampling(seed=seed, **settings) for seed in range(3)]
    clean = draw(logits, rows).read()
    poisoned = mx.concatenate([logits[:1], mx.full((1, VOCAB), poison), logits[2:]])
    tokens = draw(poisoned, rows).read()
    assert [tokens[0], tokens[2]] == [clean[0], clean[2]]
    assert 0 <= tokens[1] < VOCAB


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.999999}, {"top_k": 40}, {"top_k": 400}])
def test_a_mask_with_few_tokens_is_kept_to(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a mask leaves three tokens only these are drawn, without sorting the vocabulary."""
    sorted_rows = record_sorts(monkeypatch)
    allowed = [3, 500, 999]
    mask = np.full(VOCAB, -np.inf, dtype=np.float32)
    mask[allowed] = [0.0, 0.5, 1.0]
    assert set(draws(mx.array(mask), 200, **settings)) == set(allowed)
    assert sorted_rows == ([200] if settings.get("top_k") == 400 else [])


def test_equal_logits_at_the_threshold_are_all_kept() -> None:
    """Ties at the last rank stay in, the same on the narrow and on the sorted path."""
    values = np.full(VOCAB, -5.0, dtype=np.float32)
    values[:3] = 2.0
    values[10:14] = 1.0
    assert set(draws(mx.array(values), 300, top_k=5)) == {0, 1, 2, 10, 11, 12, 13}
    values[10:400] = 1.0
    assert set(draws(mx.array(values), 6000, top_k=5, temperature=9.0)) == {
        0,
        1,
        2,
        *range(10, 400),
    }


def test_sixteen_bit_logits_are_drawn_in_float32() -> None:
    """Half-precision logits draw exactly what the same values in float32 draw."""
    logits = random_logits(3).astype(mx.bfloat16)
    rows = [RowSampling(seed=1), RowSampling(top_p=0.9), RowSampling(top_k=400)]
    assert draw(logits, rows).read() == draw(logits.astype(mx.float32), rows).read()


@pytest.mark.parametrize("vocab", [2, 5, 256, 257])
def test_small_vocabularies(vocab: int) -> None:
    """Filters wider than the vocabulary keep all of it."""
    logits = random_logits(1, vocab=vocab, scale=0.2)[0]
    expected = set(range(vocab))
    for settings in ({"top_k": 300}, {"top_k": vocab}, {"top_p": 0.9999999}):
        tokens = draws(logits, 40 * vocab, **settings)
        assert len(expected - set(tokens)) <= vocab // 100


def test_a_batch_of_dead_rows() -> None:
    """Dead rows get any token, alone too."""
    assert len(draw(random_logits(2), [None, None]).read()) == 2


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_forced_token_is_drawn_whatever_the_logits_say(dtype: Any) -> None:
    """Also one that is banned or ruled out; other rows draw what they draw without it."""
    logits = random_logits(6).astype(dtype)
    logits[1, 7] = -mx.inf
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 1.0, "top_k": 5, "banned": (7,)},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.0},
    ]
    free = [RowSampling(seed=index, **row) for index, row in enumerate(settings)]
    alone = draw(logits, free).read()
    for forced in ((0, 2, 4), (1, 3, 5), range(6)):
        rows = [
            RowSampling(seed=index, forced=7 if index in forced else None, **row)
            for index, row in enumerate(settings)
        ]
        tokens = draw(logits, rows).read()
        assert tokens == [7 if index in forced else alone[index] for index in range(6)]
