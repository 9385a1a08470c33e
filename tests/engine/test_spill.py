"""Prefixes on SSD: they survive the engine, come back bit for bit, and never stop the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from support.engines import (
    Driver,
    differences,
    make_engine,
    random_prompt,
    tiny_namespace,
)
from support.restarts import Restarts
from support.tiny_models import KINDS

from vllm_mlx.engine.kv.block_codec import Block
from vllm_mlx.engine.kv.block_transfer import from_run, to_run
from vllm_mlx.engine.kv.store import PrefixStore

ALL_KINDS = sorted(KINDS)
BLOCK = 64


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Restarts]:
    """Return a maker of engines over one folder; those left are stopped at the end."""
    made = Restarts(tmp_path / "ssd")
    yield made
    for driver in list(made.drivers):
        made.stop(driver)


def ask(driver: Driver, name: str, prompt: list[int], max_tokens: int = 8) -> int:
    """Run one greedy request; return how many tokens were cached, checked against the runner."""
    before = driver.engine.stats().prefilled_tokens
    driver.add(name, prompt, max_tokens=max_tokens)
    driver.run()
    final = driver.results[name].final
    assert final is not None
    assert final.error is None
    done = driver.engine.stats().prefilled_tokens - before + 1
    assert final.num_cached_tokens + done == len(prompt)
    return final.num_cached_tokens


def check_every_tier(kind: str, lengths: Sequence[int], servers: Restarts) -> None:
    """Ask prompts cold, from RAM, after a restart and from SSD: mlx-lm's tokens each time.

    Lengths are from two blocks up; the whole blocks before the last token are found.
    """
    prompts = {length: random_prompt(length, 1) for length in lengths}
    found = {length: (length - 1) // BLOCK * BLOCK for length in lengths}
    first = servers.start(kind)
    for length, prompt in prompts.items():
        assert ask(first, f"cold {length}", prompt) == 0
    for length, prompt in prompts.items():
        assert ask(first, f"ram {length}", prompt) == found[length]
    servers.stop(first)
    second = servers.start(kind)
    for length, prompt in prompts.items():
        assert ask(second, f"restart {length}", prompt) == found[length]
    second.engine.clear_prefixes()
    for length, prompt in prompts.items():
        assert ask(second, f"ssd {length}", prompt) == found[length]
    for driver in (first, second):
        for name, result in driver.results.items():
            prompt = prompts[int(name.split()[1])]
            assert differences(kind, prompt, result.tokens)[0] == [], name
    disk = second.engine.stats().prefixes.disk  # type: ignore[union-attr]
    assert disk is not None
    assert (disk.num_restored, disk.faults) == (2 * sum(found.values()) // BLOCK, {})


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_prompt_has_the_same_tokens_from_every_tier(kind: str, servers: Restarts) -> None:
    """Lengths of 0, 1 and 63 modulo the block."""
    check_every_tier(kind, [128, 129, 191], servers)


@pytest.mark.faults
def test_a_prompt_of_any_length_has_the_same_tokens_from_every_tier(servers: Restarts) -> None:
    """Every length modulo the block."""
    check_every_tier("full", range(2 * BLOCK, 3 * BLOCK), servers)


def test_a_long_prefix_is_stored_at_its_first_use_while_the_engine_is_idle(
    servers: Restarts,
) -> None:
    """1,024 tokens and more need no second use, and no shutdown."""
    prompt = random_prompt(1200, 2)
    first = servers.start()
    ask(first, "cold", prompt)
    while first.engine.idle():
        pass
    disk = first.engine.stats().prefixes.disk  # type: ignore[union-attr]
    assert disk is not None
    assert disk.num_spilled == 1200 // BLOCK
    assert first.engine._prefixes._spill.flush(10.0)  # type: ignore[attr-defined]
    second = servers.start()
    assert ask(second, "ssd", prompt) == 1152


def test_a_short_prompt_used_once_is_not_stored(servers: Restarts) -> None:
    """One-shot prompts do not wear the SSD."""
    first = servers.start()
    ask(first, "once", random_prompt(300, 3))
    servers.stop(first)
    assert list(servers.folder.rglob("*.run")) == []


def test_a_block_evicted_from_ram_is_found_on_ssd(servers: Restarts) -> None:
    """RAM for a few blocks only: what leaves it comes back from the SSD."""
    block_bytes = make_engine()._layout.row_cost.row_bytes(BLOCK)
    driver = servers.start(cache_memory_bytes=6 * block_bytes)
    prompt = random_prompt(330, 4)
    ask(driver, "cold", prompt)
    assert ask(driver, "hot", prompt) == 320
    for n in range(3):
        ask(driver, f"other{n}", random_prompt(330, 5 + n))
    stats = driver.engine.stats().prefixes
    assert stats is not None
    assert stats.num_evicted > 0
    # Written behind the steps; what is not there yet is a miss.
    assert driver.engine.store_prefixes(60)
    assert ask(driver, "again", prompt) == 320
    assert differences("full", prompt, driver.results["again"].tokens)[0] == []


def test_blocks_that_come_back_continue_those_that_stayed(servers: Restarts) -> None:
    """Of a run whose first block is still in RAM only the rest is read, and stands behind it."""
    driver = servers.start()
    prompt = random_prompt(330, 4)
    for name in ("cold", "hot"):
        ask(driver, name, prompt)
    assert driver.engine.store_prefixes(60)
    store = driver.engine._prefixes
    assert isinstance(store, PrefixStore)
    store.evict_to(store.num_bytes * 2 // 5)
    assert 0 < len(store.tree) < 5
    assert ask(driver, "again", prompt) == 320
    assert sorted(node.depth for node in store.tree) == [1, 2, 3, 4, 5]
    store.tree.check_integrity()


def test_another_model_never_finds_an_entry(servers: Restarts) -> None:
    """Two namespaces on one folder share nothing."""
    prompt = random_prompt(200, 8)
    first = servers.start("full")
    ask(first, "cold", prompt)
    ask(first, "hot", prompt)
    servers.stop(first)
    assert ask(servers.start("rotating"), "cold", prompt) == 0


def test_a_damaged_file_is_a_miss_and_a_counted_fault(servers: Restarts) -> None:
    """The request is computed, the engine goes on, and the fault says why."""
    prompt = random_prompt(200, 9)
    first = servers.start()
    ask(first, "cold", prompt)
    ask(first, "hot", prompt)
    servers.stop(first)
    for file in servers.folder.rglob("*.run"):
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)
    second = servers.start()
    assert ask(second, "cold", prompt) == 0
    assert differences("full", prompt, second.results["cold"].tokens)[0] == []
    disk = second.engine.stats().prefixes.disk  # type: ignore[union-attr]
    assert disk is not None
    assert disk.faults == {"damaged": 1}


def test_others_decode_at_every_step_while_a_prefix_is_restored(servers: Restarts) -> None:
    """A restore is read beside the steps: a running row gets its token at each of them."""
    prompt = random_prompt(2000, 10)
    first = servers.start()
    ask(first, "cold", prompt)
    servers.stop(first)
    second = servers.start()
    second.add("stream", random_prompt(3, 11), max_tokens=200)
    while not second.results["stream"].tokens:
        second.step()
    second.add("restored", prompt, max_tokens=4)
    while second.results["restored"].final is None:
        before = len(second.results["stream"].tokens)
        second.step()
        assert len(second.results["stream"].tokens) == before + 1
    assert second.results["restored"].final.num_cached_tokens == 1984
    second.run()


def test_an_abort_while_a_prefix_is_read_leaves_nothing_held(servers: Restarts) -> None:
    """Blocks loaded for a row that left can be evicted."""
    prompt = random_prompt(2000, 12)
    first = servers.start()
    ask(first, "cold", prompt)
    servers.stop(first)
    second = servers.start()
    second.add("leaves", prompt, max_tokens=4)
    second.step()
    second.engine.abort("leaves")
    second.run()
    second.engine.clear_prefixes()
    stats = second.engine.stats().prefixes
    assert stats is not None
    assert (stats.num_blocks, stats.num_bytes) == (0, 0)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_blocks_come_back_bit_for_bit(dtype: mx.Dtype) -> None:
    """Every dtype survives the way to bytes and back, a state that was never set included."""
    part = mx.random.normal((2, 3, BLOCK, 8)).astype(dtype)
    block = Block(b"\0" * 4 * BLOCK, (part, part * 2), (part * 3,), (part[0], None))
    run = to_run(tiny_namespace("full"), None, [b"h" * 32], [block])
    [(block_hash, back)] = from_run(run)
    assert (block_hash, back.tokens, back.kinds) == (b"h" * 32, block.tokens, block.kinds)
    assert back.state is not None
    assert back.state[1] is None
    for before, after in zip(block.arrays(), back.arrays(), strict=True):
        assert after.dtype == dtype
        assert mx.array_equal(before.view(mx.uint8), after.view(mx.uint8)).item()


def test_a_conversation_that_outgrew_the_budget_beside_its_prefix_still_runs(
    servers: Restarts,
) -> None:
    """The restored prefix and the row together are over the budget: nobody waits for ever."""
    row_bytes = make_engine()._layout.row_cost.row_bytes(1024)
    budget = {"kv_budget_bytes": int(1.2 * row_bytes), "max_model_len": 1024}
    prompt = random_prompt(900, 13)
    first = servers.start(**budget)
    ask(first, "cold", prompt[:500])
    ask(first, "hot", prompt[:500])
    servers.stop(first)
    second = servers.start(**budget)
    second.add("long", prompt, max_tokens=4)
    second.add("other", random_prompt(5, 14), max_tokens=4)
    second.run(max_steps=2000)
    for name, tokens in (("long", prompt), ("other", random_prompt(5, 14))):
        final = second.results[name].final
        assert final is not None
        assert final.finish_reason == "length"
        assert differences("full", tokens, second.results[name].tokens)[0] == []
