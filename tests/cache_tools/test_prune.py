"""Pruning: what is chosen, that no prefix is torn, and that a running server may go on."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest
from support.runs import NAMESPACE, OTHER, chain_of, files_in, run_of

from vllm_mlx.cache_tools.listing import list_store
from vllm_mlx.cache_tools.prune import PruneCriteria, execute_prune, plan_prune
from vllm_mlx.cache_tools.selection import Selection
from vllm_mlx.cache_tools.verify import verify_store
from vllm_mlx.engine.kv.disk_format import read_header
from vllm_mlx.engine.kv.disk_tier import DiskTier

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cache_tools.conftest import FilledStore

DAY_S, NOW_S = 86400.0, 1_800_000_000.0


def names_of(plan: object) -> set[str]:
    """Return the names of the runs that a plan removes."""
    return {run.name for run in plan.runs}  # type: ignore[attr-defined]


def check_closure(path: Path) -> None:
    """Hold that no run is left without what it continues."""
    headers = [read_header(file) for file in files_in(path)]
    blocks = {block_hash for header in headers for block_hash in header.hashes}
    assert {header.parent for header in headers} - {None} <= blocks


def test_a_model_is_removed_and_nothing_else(store: FilledStore) -> None:
    """All runs of a model go; the other's are still found."""
    selection = Selection(models=("model-b",))
    plan = plan_prune(list_store(store.path), PruneCriteria(selection, selected=True))
    assert names_of(plan) == {store.name(1, 2, namespace=OTHER)}
    result = execute_prune(plan)
    assert (result.num_files, result.num_bytes) == (1, plan.num_bytes)
    assert store.found(1, 2, namespace=OTHER) == 0
    assert (store.found(1, 2, 3, 4), store.found(1, 2, 9)) == (4, 3)


def test_planning_changes_nothing(store: FilledStore) -> None:
    """A plan alone removes no file and touches none."""
    before = store.contents()
    plan = plan_prune(list_store(store.path), PruneCriteria(Selection(), selected=True))
    assert plan.num_files == 5
    assert store.contents() == before


def test_what_something_else_continues_stays(store: FilledStore) -> None:
    """A run that matches stays if one that does not match continues it, and so does its parent."""
    store.age(10, 10, 0)
    store.age(10, 1, 0, store.name(1, 2, 3, 4))
    selection = Selection(used_before_s=NOW_S - 5 * DAY_S)
    plan = plan_prune(list_store(store.path), PruneCriteria(selection, selected=True))
    assert names_of(plan) == {store.name(1, 2, 9), store.name(1, 2, namespace=OTHER)}
    assert {run.name for run in plan.needed} == {store.name(1, 2), store.name(1, 2, 3)}
    execute_prune(plan)
    assert store.found(1, 2, 3, 4) == 4
    check_closure(store.path)


def test_a_size_removes_the_least_recently_used(store: FilledStore) -> None:
    """Only as much goes as must, the least recently used ends of chains first."""
    listing = list_store(store.path)
    goal = listing.num_bytes - 1
    plan = plan_prune(listing, PruneCriteria(Selection(), max_bytes=goal))
    assert names_of(plan) == {store.name(1, 2, namespace=OTHER)}
    plan = plan_prune(listing, PruneCriteria(Selection(), max_bytes=listing.num_bytes // 2))
    assert names_of(plan) == {
        store.name(1, 2, namespace=OTHER),
        store.name(1, 2, 9),
        store.name(1, 2, 3, 4),
    }
    assert listing.num_bytes - plan.num_bytes <= listing.num_bytes // 2
    plan = plan_prune(listing, PruneCriteria(Selection(), max_bytes=0))
    assert execute_prune(plan).num_files == 5
    assert files_in(store.path) == []


def test_a_size_can_be_kept_by_one_models_runs(store: FilledStore) -> None:
    """Within a scope only its runs go, however recently the others were used."""
    store.age(10, 6, 0, store.name(1, 2, 9))
    listing = list_store(store.path)
    criteria = PruneCriteria(Selection(models=("model-a",)), max_bytes=listing.num_bytes - 1)
    assert names_of(plan_prune(listing, criteria)) == {store.name(1, 2, 9)}
    criteria = PruneCriteria(Selection(models=("model-a",)), max_bytes=0)
    assert store.name(1, 2, namespace=OTHER) not in names_of(plan_prune(listing, criteria))


def test_what_is_unusable_is_removed(store: FilledStore) -> None:
    """Damaged files go, with what can no longer be found, the quarantine and leftovers."""
    os.truncate(store.file(1, 2, 9), 100)
    data = bytearray(store.file(1, 2, 3).read_bytes())
    data[-1] ^= 1
    store.file(1, 2, 3).write_bytes(data)
    quarantined = store.path / "quarantine" / "old.run"
    quarantined.write_bytes(b"x" * 10)
    leftover = store.file(1, 2).parent / ".tmp-left"
    leftover.write_bytes(b"x" * 5)
    os.utime(leftover, (0, 0))
    doomed = {store.name(1, 2, 9), store.name(1, 2, 3), store.name(1, 2, 3, 4)}
    listing = verify_store(store.path).listing
    plan = plan_prune(listing, PruneCriteria(Selection(), unusable=True))
    assert names_of(plan) == doomed
    assert plan.num_files == 5
    result = execute_prune(plan)
    assert (result.num_files, result.num_bytes) == (5, plan.num_bytes)
    assert verify_store(store.path).damaged == verify_store(store.path).orphaned == []
    assert (store.found(1, 2, 3, 4), store.found(1, 2, namespace=OTHER)) == (2, 2)
    assert not quarantined.exists()
    assert not leftover.exists()


def test_what_was_continued_meanwhile_stays(store: FilledStore) -> None:
    """A server that stores after the plan was made keeps what it built on."""
    plan = plan_prune(list_store(store.path), PruneCriteria(Selection(), selected=True))
    tier = DiskTier.open(store.path, None)
    assert tier.write(run_of([1, 2, 3, 4, 5], 4))
    result = execute_prune(plan)
    assert result.num_files == 2
    assert tier.find(chain_of(1, 2, 3, 4, 5)) == 5
    assert len(tier.read(chain_of(1, 2, 3, 4, 5))) == 4
    assert tier.stats().faults == {}
    tier.close()
    check_closure(store.path)


def test_a_running_server_sees_what_was_pruned(store: FilledStore) -> None:
    """It misses what is gone, without a fault, and can store it again."""
    tier = DiskTier.open(store.path, None)
    criteria = PruneCriteria(Selection(models=("model-a",)), selected=True)
    execute_prune(plan_prune(list_store(store.path), criteria))
    assert tier.find(chain_of(1, 2)) == 0
    assert tier.find(chain_of(1, 2, namespace=OTHER)) == 2
    assert tier.write(run_of([1, 2]))
    assert tier.stats().faults == {}
    tier.close()


@pytest.mark.parametrize("seed", range(2))
def test_no_selection_tears_a_prefix(tmp_path: Path, seed: int) -> None:
    """Whatever is selected at random, every prefix that is left is whole."""
    from tests.cache_tools.conftest import FilledStore

    numbers = random.Random(seed)
    store = FilledStore(tmp_path / "store")
    tier = DiskTier.open(store.path, None)
    for _ in range(40):
        blocks = [numbers.randrange(3) for _ in range(numbers.randint(1, 9))]
        namespace = numbers.choice((NAMESPACE, OTHER))
        start = tier.find(chain_of(*blocks, namespace=namespace))
        while start < len(blocks):
            stop = min(len(blocks), start + numbers.randint(1, 3))
            tier.write(run_of(blocks, start, stop, namespace=namespace))
            start = stop
    tier.close()
    for file in files_in(store.path):
        name = f"{file.parent.name}/{file.name}"
        store.age(numbers.random() * 9, numbers.random() * 9, numbers.randrange(9), name)
    while list_store(store.path).runs:
        listing = list_store(store.path)
        selection = Selection(used_before_s=NOW_S - numbers.random() * 9 * DAY_S)
        if numbers.random() < 0.5:
            goal = listing.num_bytes * 4 // 5 if listing.num_bytes > 2000 else 0
            plan = plan_prune(listing, PruneCriteria(selection, max_bytes=goal))
            assert listing.num_bytes - plan.num_bytes <= goal
        else:
            plan = plan_prune(listing, PruneCriteria(selection, selected=True))
            meant = {run.name for run in selection.of(listing.runs)}
            assert names_of(plan) | {run.name for run in plan.needed} == meant
        assert execute_prune(plan).num_files == plan.num_files
        check_closure(store.path)
