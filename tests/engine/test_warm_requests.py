"""Requests sent for their prompt's KV alone, and what removing stored prefixes leaves."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engines import Driver, differences, random_prompt
from support.restarts import Restarts
from support.tiny_models import KINDS

from vllm_mlx.engine.core.stats import CacheCleared

BLOCK = 64


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Restarts]:
    """Return a maker of engines over one folder; those left are stopped at the end."""
    made = Restarts(tmp_path / "ssd")
    yield made
    for driver in list(made.drivers):
        made.stop(driver)


def ask(driver: Driver, name: str, prompt: list[int], **options: object) -> int:
    """Run one greedy request; return how many tokens were cached."""
    driver.add(name, prompt, **{"max_tokens": 4, **options})
    driver.run()
    final = driver.results[name].final
    assert final is not None
    assert final.error is None
    return final.num_cached_tokens


def warm(driver: Driver, name: str, prefix: list[int]) -> int:
    """Have whole blocks stored durably; return how many tokens were stored already."""
    assert len(prefix) % BLOCK == 0
    return ask(driver, name, [*prefix, 0], max_tokens=1, is_warm=True)


def stored_files(servers: Restarts) -> int:
    """Count the files of all models."""
    return len(list(servers.folder.rglob("*.run")))


def cleared(driver: Driver, **tiers: bool) -> CacheCleared:
    """Remove stored prefixes and wait for it."""
    clearing = driver.engine.clear_prefixes(**tiers)
    deadline = time.monotonic() + 10
    while (result := clearing.result()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return result


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_warmed_prefix_is_found_after_a_restart_whole(kind: str, servers: Restarts) -> None:
    """However short, it is on disk when the engine says so, and it is computed once."""
    prefix = random_prompt(2 * BLOCK, 1)
    first = servers.start(kind)
    assert warm(first, "warm", prefix) == 0
    assert first.engine.store_prefixes(10.0)
    # As if it were killed: nothing is closed.
    second = servers.start(kind)
    prompt = prefix + random_prompt(30, 2)
    assert ask(second, "hit", prompt) == 2 * BLOCK
    assert differences(kind, prompt, second.results["hit"].tokens)[0] == []
    assert warm(second, "again", prefix) == 2 * BLOCK
    stats = second.engine.stats()
    assert stats.prefixes is not None
    assert stats.prefixes.query_tokens == len(prompt), "warming is no query of a client"


def test_warming_what_only_ram_holds_stores_it(servers: Restarts) -> None:
    """A prefix that was used once is not on disk; warming it puts it there without computing."""
    prefix = random_prompt(2 * BLOCK, 3)
    first = servers.start()
    ask(first, "once", [*prefix, 1, 2])
    assert first.engine.store_prefixes(10.0)
    assert stored_files(servers) == 0
    assert warm(first, "warm", prefix) == 2 * BLOCK
    assert first.engine.store_prefixes(10.0)
    assert ask(servers.start(), "hit", [*prefix, 1, 2]) == 2 * BLOCK


def test_a_long_prefix_is_stored_whole_though_the_disk_is_slow(
    servers: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits to be written is waited for, not dropped."""
    driver = servers.start()
    tier = driver.engine._prefixes._spill._tier  # type: ignore[attr-defined]
    write = tier.write

    def write_slowly(run: object) -> bool:
        time.sleep(0.02)
        return bool(write(run))

    monkeypatch.setattr(tier, "write", write_slowly)
    prefix = random_prompt(40 * BLOCK, 4)
    warm(driver, "warm", prefix)
    seen = 0
    while driver.engine.idle():
        disk = driver.engine.stats().prefixes.disk  # type: ignore[union-attr]
        assert disk is not None
        seen = max(seen, disk.num_queued)
    assert driver.engine.store_prefixes(10.0)
    assert seen <= 5
    assert ask(servers.start(), "hit", [*prefix, 1]) == 40 * BLOCK


def test_clearing_ram_leaves_the_ssd(servers: Restarts) -> None:
    """Hot blocks that leave RAM are on SSD afterwards."""
    prefix = random_prompt(2 * BLOCK, 5)
    driver = servers.start()
    warm(driver, "warm", prefix)
    assert cleared(driver, ram=True) == CacheCleared(num_blocks=2)
    assert driver.engine.store_prefixes(10.0)
    assert ask(driver, "hit", [*prefix, 1]) == 2 * BLOCK


def test_clearing_ssd_leaves_ram_and_other_models(servers: Restarts) -> None:
    """Only this model's files go, and what goes is stored anew when it is used again."""
    prefix = random_prompt(2 * BLOCK, 6)
    other = servers.start("latent")
    warm(other, "warm", prefix)
    servers.stop(other)
    driver = servers.start()
    warm(driver, "warm", prefix)
    assert driver.engine.store_prefixes(10.0)
    assert stored_files(servers) == 2
    assert cleared(driver, ram=False, ssd=True) == CacheCleared(num_runs=1)
    assert stored_files(servers) == 1
    assert warm(driver, "again", prefix) == 2 * BLOCK
    assert driver.engine.store_prefixes(10.0)
    assert stored_files(servers) == 2


def test_clearing_both_forgets_everything(servers: Restarts) -> None:
    """What leaves RAM is not written on its way, and nothing is found after a restart."""
    prefix = random_prompt(2 * BLOCK, 7)
    driver = servers.start()
    warm(driver, "warm", prefix)
    assert cleared(driver, ram=True, ssd=True).num_blocks == 2
    assert ask(driver, "cold", [*prefix, 1]) == 0
    servers.stop(driver)
    assert stored_files(servers) == 0


def test_a_miss_says_where_the_prompt_departs(
    servers: Restarts, caplog: pytest.LogCaptureFixture
) -> None:
    """With debug logging the token is logged and reported; without, nothing looks for it."""
    driver = servers.start()
    prefix = random_prompt(3 * BLOCK, 8)
    ask(driver, "stored", [*prefix, 1])
    changed = [*prefix[:100], (prefix[100] + 1) % 97, *prefix[101:], 1]
    ask(driver, "quiet", changed)
    driver.engine.clear_prefixes()
    ask(driver, "stored-again", [*prefix, 1])
    with caplog.at_level(logging.DEBUG, logger="vllm_mlx.engine.kv.store"):
        ask(driver, "told", changed)
    departures = [driver.results[name].final.departs_at for name in ("quiet", "told")]  # type: ignore[union-attr]
    assert departures == [None, 100]
    assert "the nearest stored prefix differs from token 100 on" in caplog.text
