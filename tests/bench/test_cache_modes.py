"""Hold what each cache mode sends, and that nothing unmeasured fills the cache for the measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.scripted_server import TEMPLATE_TOKENS, Script, ServerScript, prompt_words

if TYPE_CHECKING:
    from tests.bench.conftest import RunBench

SCRIPT = Script(ttft_s=0.125, prefill_s_per_token=0.0009765625, gap_s=0.03125)


def sent(server: ServerScript, path: str = "/v1/chat/completions") -> list[list[str]]:
    """Return the words of every prompt that was generated from, in order."""
    return [prompt_words(body) for where, body in server.requests if where == path]


def first_words(prompts: list[list[str]]) -> list[str]:
    """Return the first word of each prompt."""
    return [words[0] for words in prompts]


def test_cold_prompts_share_no_first_token(run_bench: RunBench) -> None:
    """In cold mode no prompt of the run, probe and warm-up included, begins like another."""
    server = ServerScript(SCRIPT)
    results = run_bench(
        server, cache_modes=("cold",), concurrencies=(1, 4), num_requests=8, repetitions=3
    )
    firsts = first_words(sent(server))
    assert len(firsts) == len(set(firsts)) == 1 + 1 + 4 + 2 * 3 * 8
    assert {row["cached_tokens"] for row in results.rows} == {0}
    assert {row["cache_mode"] for row in results.rows} == {"cold"}


def test_a_second_cold_run_is_cold(run_bench: RunBench) -> None:
    """The same run again on the same server finds nothing in its cache."""
    server = ServerScript(SCRIPT)
    fields: dict[str, Any] = {
        "cache_modes": ("cold",), "concurrencies": (2,), "repetitions": 1, "prompt_tokens": (64,)
    }  # fmt: skip
    run_bench(server, **fields)
    (row,) = run_bench(server, **fields).rows
    # First words are few, and a run later may draw the same one; what follows is new.
    assert row["cached_tokens"] <= row["requests"]


def test_preflight_leaves_the_first_repetition_cold(run_bench: RunBench) -> None:
    """With prompts as they are, probe and warm-up do not fill the cache: the first pass misses."""
    results = run_bench(
        SCRIPT, cache_modes=("preserve",), concurrencies=(1,), num_requests=8, repetitions=2
    )
    first, second = results.rows
    assert first["cached_tokens"] == 0
    assert second["cached_token_rate"] > 0.5
    assert first["ttft_p50"] > second["ttft_p50"]


@pytest.mark.parametrize("prompt_tokens", [(), (128,)])
def test_warm_prompts_were_sent_before(run_bench: RunBench, prompt_tokens: tuple[int]) -> None:
    """In warm mode all of a prompt but its last token comes from the cache, from the start on."""
    results = run_bench(
        SCRIPT,
        cache_modes=("warm",),
        concurrencies=(2,),
        num_requests=8,
        repetitions=2,
        prompt_tokens=prompt_tokens,
    )
    for row in results.rows:
        missed = row["prompt_tokens"] - row["cached_tokens"]
        assert missed == row["requests"] * (TEMPLATE_TOKENS + 1)


def test_prefix_hits_share_the_whole_prompt(run_bench: RunBench) -> None:
    """Without a shared prefix of its own, a set's prompt is the prefix and its end is new."""
    results = run_bench(
        SCRIPT, cache_modes=("prefix-hit",), concurrencies=(2,), num_requests=8, repetitions=2
    )
    for row in results.rows:
        assert 0 < row["cached_tokens"] < row["prompt_tokens"] - row["requests"] * TEMPLATE_TOKENS
    lengths = {request["prompt_tokens"] - request["cached_tokens"] for request in results.requests}
    # The mark at the end is new, whatever the prompt.
    assert max(lengths) <= TEMPLATE_TOKENS + 5


def test_prefix_hits_of_a_length(run_bench: RunBench) -> None:
    """With lengths, exactly the shared prefix is cached, and every prompt has its length."""
    server = ServerScript(SCRIPT)
    results = run_bench(
        server,
        cache_modes=("prefix-hit",),
        prompt_tokens=(200,),
        shared_prefix_tokens=150,
        concurrencies=(2,),
        num_requests=6,
        repetitions=2,
    )
    for request in results.requests:
        assert (request["prompt_tokens"], request["cached_tokens"]) == (200, 150)
    assert results.notes == []
    measured = sent(server)[-6:]
    assert len(set(first_words(measured))) == 1


@pytest.mark.parametrize("prompt_tokens", [(), (100,)])
def test_cold_prompts_with_a_shared_prefix_share_nothing(
    run_bench: RunBench, prompt_tokens: tuple[int]
) -> None:
    """In cold mode even the shared system message is new each time."""
    server = ServerScript(SCRIPT)
    (row,) = run_bench(
        server,
        cache_modes=("cold",),
        prompt_tokens=prompt_tokens,
        shared_prefix_tokens=50,
        concurrencies=(1,),
        num_requests=8,
        repetitions=1,
    ).rows
    if prompt_tokens:
        assert (row["prompt_tokens_min"], row["prompt_tokens_max"]) == (100, 100)
    assert row["cached_tokens"] == 0
    firsts = first_words(sent(server))
    assert len(set(firsts)) == len(firsts)


def test_a_set_shares_its_prefix_alone(run_bench: RunBench) -> None:
    """A set's prompts behind a shared prefix hit on exactly that, and never on one another."""
    results = run_bench(
        SCRIPT,
        cache_modes=("prefix-hit",),
        shared_prefix_tokens=50,
        concurrencies=(2,),
        num_requests=16,
        repetitions=2,
    )
    assert {request["cached_tokens"] for request in results.requests} == {50}


def test_modes_are_a_sweep(run_bench: RunBench) -> None:
    """Several modes give rows of their own, labelled."""
    results = run_bench(
        SCRIPT, cache_modes=("cold", "warm"), concurrencies=(1,), num_requests=8, repetitions=1
    )
    assert [row["cache_mode"] for row in results.rows] == ["cold", "warm"]
    assert [row["configuration"] for row in results.rows] == ["short c=1 cold", "short c=1 warm"]
    cold, warm = results.rows
    assert cold["ttft_p50"] > warm["ttft_p50"]


@pytest.mark.parametrize("counts_by", ["tokenize", "count_tokens", "usage"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_lengths_are_exact_whoever_counts(
    run_bench: RunBench, endpoint: str, counts_by: str
) -> None:
    """Prompts have their length by the server's count, and the report names its source."""
    server = ServerScript(Script(counts_by=counts_by))
    results = run_bench(
        server,
        endpoint=endpoint,
        prompt_tokens=(32, 200),
        output_tokens=(5,),
        cache_modes=("cold",),
        concurrencies=(3,),
        num_requests=6,
        repetitions=2,
    )
    for row in results.rows:
        wanted = row["prompt_tokens_target"]
        assert (row["prompt_tokens_min"], row["prompt_tokens_max"]) == (wanted, wanted)
        assert row["cached_tokens"] == 0
    # Anthropic's route counts chats only.
    is_plain = endpoint == "completions" and counts_by == "count_tokens"
    expected = "usage" if is_plain else counts_by
    assert {row["prompt_tokens_source"] for row in results.rows} == {expected}


@pytest.mark.parametrize("counts_by", ["tokenize", "count_tokens"])
def test_a_counter_that_is_wrong_is_passed_over(run_bench: RunBench, counts_by: str) -> None:
    """A server that counts its prompts otherwise than its usage says is calibrated by usage."""
    (row,) = run_bench(
        Script(counts_by=counts_by, miscounts_by=TEMPLATE_TOKENS),
        prompt_tokens=(60,),
        concurrencies=(1,),
        num_requests=4,
        repetitions=1,
    ).rows
    assert row["prompt_tokens_source"] == "usage"
    assert (row["prompt_tokens_min"], row["prompt_tokens_max"]) == (60, 60)


def test_output_is_held_where_the_server_can(run_bench: RunBench) -> None:
    """A server that takes ignore_eos gives exactly the tokens, and the row says how."""
    (row,) = run_bench(
        SCRIPT, output_tokens=(12,), concurrencies=(1,), num_requests=4, repetitions=1
    ).rows
    assert (row["output_control"], row["output_reached"]) == ("ignore_eos", 1)
    assert row["completion_tokens_mean"] == 12


def test_output_that_is_not_held_is_labelled(run_bench: RunBench) -> None:
    """A server that ignores ignore_eos is measured, and the report says what was not reached."""
    results = run_bench(
        Script(can_hold=False),
        output_tokens=(12,),
        concurrencies=(1,),
        num_requests=4,
        repetitions=1,
    )
    (row,) = results.rows
    assert (row["output_reached"], row["completion_tokens_mean"]) == (0, 6)
    assert any("output_reached" in note for note in results.notes)


def test_a_server_that_refuses_to_hold_is_asked_without(run_bench: RunBench) -> None:
    """A server that refuses unknown fields is measured without them."""
    server = ServerScript(Script(refuses_hold=True))
    (row,) = run_bench(
        server, output_tokens=(12,), concurrencies=(1,), num_requests=4, repetitions=1
    ).rows
    assert row["output_control"] == "none"
    assert row["failures"] == 0
    assert not any(body.get("ignore_eos") for _, body in server.requests[1:])
