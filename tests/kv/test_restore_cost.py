"""Reading against computing: what is learned of both, and what is predicted from it."""

from __future__ import annotations

import pytest

from vllm_mlx.engine.kv.restore_cost import (
    FIRST_READ_BYTES_PER_S,
    MIN_MEASURED_BYTES,
    MIN_MEASURED_TOKENS,
    RestoreCost,
)


def prefill(cost: RestoreCost, num_tokens: int, chunk: int, base: float, slope: float) -> float:
    """Compute a prompt in chunks on a made-up machine; return the seconds it took."""
    total = 0.0
    for start in range(0, num_tokens, chunk):
        seconds = chunk * (base + slope * (start + chunk / 2))
        cost.computed(start, chunk, seconds)
        total += seconds
    return total


def test_what_is_stored_is_read_until_something_was_computed() -> None:
    """Without a measurement of computing, reading is taken to be faster."""
    cost = RestoreCost()
    assert cost.compute_s(0, 64) is None
    assert cost.is_worthwhile(0, 64, 10**12)


def test_a_prompt_is_predicted_from_chunks_of_others() -> None:
    """Attention makes late tokens dearer; a prediction holds for short, long and late parts."""
    cost = RestoreCost()
    whole = prefill(cost, 32_768, 2048, 1e-5, 1e-9)
    assert cost.compute_s(0, 32_768) == pytest.approx(whole)
    short = RestoreCost()
    assert cost.compute_s(0, 8192) == pytest.approx(prefill(short, 8192, 512, 1e-5, 1e-9))
    assert cost.compute_s(24_576, 8192) == pytest.approx(8192 * (1e-5 + 1e-9 * 28_672))


def test_a_chunk_that_compiled_kernels_counts_for_little() -> None:
    """A first chunk of ten seconds does not make reading look fast."""
    cost = RestoreCost()
    cost.computed(0, 2048, 10.0)
    whole = prefill(cost, 16_384, 2048, 5e-5, 0.0)
    assert cost.compute_s(0, 16_384) == pytest.approx(whole)


def test_reading_is_measured_from_end_to_end() -> None:
    """The assumed rate gives way to what restores really took."""
    cost = RestoreCost()
    prefill(cost, 2048, 512, 1e-4, 0.0)
    num_bytes = 2048 * 100_000
    assert cost.restore_s(num_bytes) == num_bytes / FIRST_READ_BYTES_PER_S
    assert not cost.is_worthwhile(0, 2048, num_bytes)
    for _ in range(3):
        cost.restored(num_bytes, num_bytes / 2e9)
    assert cost.is_worthwhile(0, 2048, num_bytes)
    for _ in range(40):
        cost.restored(num_bytes, num_bytes / 3e8)
    assert not cost.is_worthwhile(0, 2048, num_bytes)


def test_noise_between_neighbouring_chunks_is_no_growth() -> None:
    """Chunks of like position with unlike times do not make far tokens dear, or near ones free."""
    cost = RestoreCost()
    for number in range(8):
        cost.computed(128 + number, 64, 64 * (1 + number) * 1e-5)
    assert cost.compute_s(0, 128) == pytest.approx(128 * 4.5e-5)
    assert cost.compute_s(0, 10_000) == pytest.approx(10_000 * 4.5e-5)


def test_a_small_restore_says_nothing_of_a_large_one() -> None:
    """A few blocks that took as long as the disk's latency do not make gigabytes look slow."""
    cost = RestoreCost()
    prefill(cost, 2048, 512, 1e-4, 0.0)
    for _ in range(40):
        cost.restored(MIN_MEASURED_BYTES - 1, 1.0)
    num_bytes = 32_768 * 20_000
    assert cost.restore_s(num_bytes) == num_bytes / FIRST_READ_BYTES_PER_S


def test_a_machine_that_gets_faster_with_length_is_not_extrapolated_below_nothing() -> None:
    """Noise that makes late chunks cheaper never predicts negative or falling times."""
    cost = RestoreCost()
    cost.computed(0, 512, 0.5)
    cost.computed(512, 512, 0.1)
    cost.computed(1024, MIN_MEASURED_TOKENS - 1, 9.0)
    assert cost.compute_s(0, 100_000) == pytest.approx(100_000 * (0.6 / 1024))
