"""Several processes on one store, and processes that are killed while they write to it."""

from __future__ import annotations

import random
import sqlite3
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.runs import files_in, is_right
from support.store_worker import Worker

from vllm_mlx.engine.kv.disk_format import read_run
from vllm_mlx.engine.kv.disk_tier import DiskTier

#: What may happen to a process whose neighbours evict and prune: no fault of disk, file or index.
EXPECTED = {"missing", "orphan", "no_room"}


def read_all(store: Path) -> set[str]:
    """Read every file of a store, whatever the index says; return the hashes of all blocks."""
    found: set[str] = set()
    for path in files_in(store):
        run = read_run(path)
        assert is_right(run), path
        found |= {block_hash.hex() for block_hash in run.hashes}
    return found


def check_closure(store: Path) -> None:
    """Hold that no run is there whose parent is not."""
    found = read_all(store)
    parents = [read_run(path).parent for path in files_in(store)]
    assert {parent.hex() for parent in parents if parent is not None} - found == set()


def kill_while_writing(store: Path, rounds: int, seed: int, *cap: int) -> None:
    """Kill a writer `rounds` times at a random moment; check each time all that it left.

    Under a cap it evicts as well, and what was stored need not be there any more.
    """
    numbers = random.Random(seed)
    stored: set[str] = set()
    for round_number in range(rounds):
        with Worker(store.parent / "told", "write", store, 60, seed + round_number, *cap) as writer:
            time.sleep(numbers.random() * 0.3)
            writer.process.kill()
            writer.process.wait()
            stored |= set(writer.lines()[1:])
        assert cap or stored <= read_all(store)
        tier = DiskTier.open(store, None)
        assert tier.stats().faults == {}
        assert tier.stats().num_runs == len(files_in(store))
        for path in files_in(store):
            run = read_run(path)
            if run.parent is None:
                assert tier.find(run.hashes) == len(run.hashes)
                assert all(map(is_right, tier.read(run.hashes)))
        tier.close()
        check_closure(store)
    assert stored


@pytest.mark.thorough
def test_a_writer_that_is_killed_leaves_whole_runs(tmp_path: Path) -> None:
    """After a SIGKILL the store opens, and every run that was stored, and no other, is served."""
    kill_while_writing(tmp_path / "store", 3, 1)
    kill_while_writing(tmp_path / "capped", 2, 10, 300_000)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_writer_that_is_killed_fifty_times_leaves_whole_runs(tmp_path: Path) -> None:
    """The same fifty times, twenty of them on a store that evicts meanwhile."""
    kill_while_writing(tmp_path / "store", 30, 100)
    kill_while_writing(tmp_path / "capped", 20, 200, 300_000)


def share(store: Path, seconds: float) -> list[dict[str, Any]]:
    """Let two writers, a reader and a pruner share a store; return what each of them says."""
    cap = 600_000
    kinds = ("write", "write", "read", "prune")
    peak = 0
    with ExitStack() as stack:
        workers = []
        for seed, kind in enumerate(kinds):
            worker = Worker(store.parent / f"told-{seed}", kind, store, seconds, seed, cap)
            workers.append(stack.enter_context(worker))
        while any(worker.process.poll() is None for worker in workers):
            peak = max(peak, size_of(store))
            time.sleep(0.05)
        said = [worker.result() for worker in workers]
    assert cap / 2 < peak <= cap
    return said


def size_of(store: Path) -> int:
    """Return the bytes of all runs at one moment, at which nobody may change them."""
    if not (store / "index-1.sqlite3").exists():
        return 0
    index = sqlite3.connect(store / "index-1.sqlite3", timeout=30, isolation_level=None)
    index.execute("BEGIN IMMEDIATE")
    total = sum(path.stat().st_size for path in files_in(store))
    index.execute("ROLLBACK")
    index.close()
    return total


def check_sharing(store: Path, seconds: float) -> None:
    """Share a store and hold that nobody met an error and that what is left is whole."""
    said = share(store, seconds)
    assert [worker["wrong"] for worker in said] == [[]] * 4
    assert {reason for worker in said for reason in worker["faults"]} <= EXPECTED
    assert all(worker["rounds"] > 3 for worker in said)
    assert sum(worker["num_runs_read"] for worker in said) > 10
    assert sum(worker["num_evicted"] for worker in said) > 0
    check_closure(store)
    tier = DiskTier.open(store, None)
    assert tier.stats().num_runs == len(files_in(store))
    assert tier.stats().faults == {}
    tier.close()


@pytest.mark.thorough
def test_writers_a_reader_and_a_pruner_share_a_store(tmp_path: Path) -> None:
    """Nobody meets an error, no prefix is torn from what continues it, and the cap holds."""
    check_sharing(tmp_path / "store", 3)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_writers_a_reader_and_a_pruner_share_a_store_for_a_minute(tmp_path: Path) -> None:
    """The same for a minute."""
    check_sharing(tmp_path / "store", 60)
