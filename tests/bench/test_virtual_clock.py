"""Hold the measures exact in virtual time, for every endpoint and however the bytes are cut."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from support.scripted_server import Script, ServerScript

from vllm_mlx.bench.endpoints import ENDPOINT_NAMES
from vllm_mlx.bench.metrics import Slo

if TYPE_CHECKING:
    from tests.bench.conftest import RunBench

# Multiples of a power of two: sums and differences of such times are exact.
TTFT_S = 0.25
GAP_S = 0.03125
TOKENS = 9
E2EL_S = TTFT_S + (TOKENS - 1) * GAP_S

Pieces = list[tuple[float, bytes]]


def merged_after_each_word(pieces: Pieces) -> Pieces:
    """Merge what comes at once into one block: start and first word, last word and end."""
    merged: Pieces = []
    for delay, block in pieces:
        if merged and delay == 0:
            merged[-1] = (merged[-1][0], merged[-1][1] + block)
        else:
            merged.append((delay, block))
    return merged


def crumbs(pieces: Pieces) -> Pieces:
    """Give every few bytes a block of their own; all of a block's bytes come at its time."""
    return [
        (delay if index == 0 else 0.0, block[index : index + 7])
        for delay, block in pieces
        for index in range(0, len(block), 7)
    ]


def across_events(pieces: Pieces) -> Pieces:
    """Hold back the first half of each block's bytes to come with the block before."""
    cut: Pieces = []
    for index, (delay, block) in enumerate(pieces):
        following = pieces[index + 1][1] if index + 1 < len(pieces) else b""
        own_half = block[len(block) // 2 :] if index else block
        cut.append((delay, own_half + following[: len(following) // 2]))
    return cut


CUTS = [None, merged_after_each_word, crumbs, across_events]


@pytest.mark.parametrize("concurrency", [1, 64])
@pytest.mark.parametrize("endpoint", ENDPOINT_NAMES)
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__ if cut else "whole")
def test_measures_are_exact(run_bench: RunBench, endpoint: str, concurrency: int, cut: Any) -> None:
    """TTFT, gaps, TPOT, E2EL and rates are the script's own, to the last bit."""
    results = run_bench(
        Script(ttft_s=TTFT_S, gap_s=GAP_S, num_tokens=TOKENS),
        cut=cut,
        endpoint=endpoint,
        concurrencies=(concurrency,),
        num_requests=2 * concurrency,
        repetitions=1,
    )
    (row,) = results.rows
    assert (row["requests"], row["completed"]) == (2 * concurrency, 2 * concurrency)
    for part in ("mean", "min", "p50", "p90", "p95", "p99", "max"):
        assert row[f"ttft_{part}"] == TTFT_S * 1e3
        assert row[f"itl_{part}"] == GAP_S * 1e3
        assert row[f"tpot_{part}"] == GAP_S * 1e3
        assert row[f"e2el_{part}"] == E2EL_S * 1e3
    for latency in ("ttft", "itl", "tpot", "e2el"):
        assert row[f"{latency}_sd"] == 0
    assert row["duration_s"] == 2 * E2EL_S
    assert row["output_tps"] == 2 * concurrency * TOKENS / (2 * E2EL_S)
    assert row["request_rate"] == 2 * concurrency / (2 * E2EL_S)
    assert row["tokens_per_event"] == 1
    assert row["completion_tokens"] == 2 * concurrency * TOKENS
    assert [len(request["gaps"]) for request in results.requests] == [TOKENS - 1] * 2 * concurrency


@pytest.mark.parametrize("endpoint", ENDPOINT_NAMES)
def test_random_cuts_change_nothing(run_bench: RunBench, endpoint: str) -> None:
    """Blocks cut at random and coming at the time of their last byte give the same measures."""
    rng = random.Random(7)

    def cut(pieces: Pieces) -> Pieces:
        blocks: Pieces = []
        for delay, block in pieces:
            places = sorted(rng.sample(range(1, len(block)), min(3, len(block) - 1)))
            ends = [*places, len(block)]
            starts = [0, *places]
            # Half of the wait comes within the block: what ends it decides its time.
            waits = [delay / 2, *[0.0] * (len(ends) - 2), delay / 2]
            blocks += [
                (wait, block[start:end])
                for wait, start, end in zip(waits, starts, ends, strict=True)
            ]
        return blocks

    results = run_bench(
        Script(ttft_s=TTFT_S, gap_s=GAP_S, num_tokens=TOKENS),
        cut=cut,
        endpoint=endpoint,
        concurrencies=(4,),
        num_requests=4,
        repetitions=1,
    )
    (row,) = results.rows
    assert (row["ttft_min"], row["ttft_max"]) == (TTFT_S * 1e3, TTFT_S * 1e3)
    assert (row["itl_min"], row["itl_max"]) == (GAP_S * 1e3, GAP_S * 1e3)


@pytest.mark.parametrize("endpoint", ENDPOINT_NAMES)
def test_whole_answers_have_no_first_output(run_bench: RunBench, endpoint: str) -> None:
    """Without streaming only E2EL and the rates are measured; nothing is made up for the rest."""
    results = run_bench(
        Script(ttft_s=TTFT_S, gap_s=GAP_S, num_tokens=TOKENS),
        endpoint=endpoint,
        stream=False,
        concurrencies=(2,),
        num_requests=4,
        repetitions=1,
    )
    (row,) = results.rows
    assert row["e2el_p50"] == E2EL_S * 1e3
    assert row["output_tps"] == 4 * TOKENS / (2 * E2EL_S)
    assert [row[f"{name}_p50"] for name in ("ttft", "itl", "tpot")] == [None, None, None]


def test_an_open_loop_sends_at_its_times(run_bench: RunBench) -> None:
    """Requests go out on schedule, however many still run, and their TTFT counts from then."""
    results = run_bench(
        Script(ttft_s=4.0, gap_s=GAP_S, num_tokens=2),
        concurrencies=(),
        request_rates=(4.0,),
        arrival="constant",
        num_requests=8,
        repetitions=1,
        warmup=0,
    )
    assert [request["started"] for request in results.requests] == [250.0 * n for n in range(8)]
    assert {request["ttft"] for request in results.requests} == {4000.0}
    (row,) = results.rows
    assert (row["concurrency"], row["request_rate_target"], row["arrival"]) == (None, 4, "constant")
    assert row["dispatch_lag_max"] == 0


def test_goodput_counts_what_is_within_every_limit(run_bench: RunBench) -> None:
    """Only requests within all limits are good: here those whose prompt was in the cache."""
    script = Script(ttft_s=0.125, prefill_s_per_token=0.0625, gap_s=GAP_S, num_tokens=2)
    results = run_bench(
        script,
        slo=Slo.parse("ttft=1s,itl=32"),
        concurrencies=(1,),
        num_requests=16,
        repetitions=1,
        warmup=0,
    )
    (row,) = results.rows
    # Each of the 8 prompts is sent twice.
    assert row["slo_attainment"] == 0.5
    assert row["goodput"] == 8 / row["duration_s"]
    assert [request["meets_slo"] for request in results.requests] == [False] * 8 + [True] * 8


def test_conversations_carry_the_answers(run_bench: RunBench) -> None:
    """A turn sends the earlier turns with the server's own answers, one after the other."""
    server = ServerScript(Script(ttft_s=TTFT_S, gap_s=GAP_S, num_tokens=3))
    results = run_bench(
        server, concurrencies=(2,), num_requests=6, turns=3, repetitions=1, warmup=0
    )
    assert [request["turn"] for request in results.requests] == [0, 0, 1, 1, 2, 2]
    last = server.requests[-1][1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant"] * 2 + ["user"]
    assert last[1]["content"] == last[3]["content"] == " word0 word1 word2"
    (row,) = results.rows
    # Later turns begin with what was sent before.
    assert row["cached_token_rate"] > 0.3
    assert row["duration_s"] == 3 * (TTFT_S + 2 * GAP_S)
