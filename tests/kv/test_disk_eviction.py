"""Random operations on a store under a cap: whole prefixes stay, and the books agree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.runs import chain_of, files_in, is_right, run_of

from vllm_mlx.engine.kv.disk_format import read_header
from vllm_mlx.engine.kv.disk_tier import DiskTier

CAP = 40_000


def check_store(tier: DiskTier, path: Path) -> None:
    """Hold the cap, the books, and that every run's parent is stored."""
    headers = [read_header(file) for file in files_in(path)]
    blocks = {block_hash for header in headers for block_hash in header.hashes}
    parents = {header.parent for header in headers} - {None}
    assert parents <= blocks
    stats = tier.stats()
    assert stats.num_runs == len(headers)
    assert stats.num_bytes == sum(file.stat().st_size for file in files_in(path)) <= CAP


def store(tier: DiskTier, blocks: Sequence[int], numbers: random.Random) -> None:
    """Store a chain from where it ends, or again from some earlier block with state in it."""
    found = tier.find(chain_of(*blocks))
    start = found if numbers.random() < 0.8 else numbers.randint(0, found)
    while start < len(blocks):
        stop = min(len(blocks), start + numbers.randint(1, 4))
        state = [block for block in range(start, stop) if numbers.random() < 0.2]
        size = numbers.choice((64, 512, 4096))
        if not tier.write(run_of(blocks, start, stop, size=size, with_state=state)):
            # Nothing was evicted for it in vain, and no later run may be stored.
            assert tier.find(chain_of(*blocks)) <= start or start < found
            break
        start = stop


def operate(path: Path, rounds: int, seed: int) -> None:
    """Store, read, touch, remove, evict and reopen at random; check the store again and again."""
    numbers = random.Random(seed)
    tier = DiskTier.open(path, CAP)
    for round_number in range(rounds):
        blocks = [numbers.randrange(3) for _ in range(numbers.randint(1, 12))]
        action = numbers.random()
        if action < 0.6:
            store(tier, blocks, numbers)
        elif action < 0.8:
            found = tier.find(chain_of(*blocks))
            runs = tier.read(chain_of(*blocks))
            held = {block_hash for run in runs for block_hash in run.hashes}
            assert set(chain_of(*blocks)[:found]) <= held
            assert all(map(is_right, runs))
        elif action < 0.9:
            tier.touch(chain_of(*blocks))
            tier.maintain()
        elif action < 0.95:
            names = [f"{file.parent.name}/{file.name}" for file in files_in(path)]
            tier.remove(numbers.sample(names, len(names) // 3))
        elif action < 0.97:
            tier.close()
            tier = DiskTier.open(path, CAP)
        if round_number % 10 == 0:
            check_store(tier, path)
    check_store(tier, path)
    assert tier.stats().faults.keys() <= {"no_room"}
    tier.close()


def test_prefixes_stay_whole_under_random_operations(tmp_path: Path) -> None:
    """No order of storing, using, removing and evicting tears a prefix or breaks the cap."""
    operate(tmp_path / "store", 150, 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_prefixes_stay_whole_under_many_random_operations(tmp_path: Path) -> None:
    """The same, much longer."""
    for seed in range(10):
        operate(tmp_path / f"store-{seed}", 1000, seed)
