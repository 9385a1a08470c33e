"""Fill a store with a few prefixes of two models, of known ages and uses."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.runs import NAMESPACE, OTHER, chain_of, files_in, run_of

from vllm_mlx.engine.kv.block_hash import Namespace
from vllm_mlx.engine.kv.disk_tier import DiskTier

DAY_S = 86400.0
NOW_S = 1_800_000_000.0


class FilledStore:
    """Hold the path of a store, and change what its files and index say."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, blocks: Sequence[int], *ends: int, namespace: Namespace = NAMESPACE) -> None:
        """Store a chain as runs that end at `ends`; what is there already stays."""
        tier = DiskTier.open(self.path, None)
        for start, stop in zip((0, *ends), ends, strict=False):
            assert tier.write(run_of(blocks, start, stop, namespace=namespace))
        tier.close()

    def name(self, *blocks: int, namespace: Namespace = NAMESPACE) -> str:
        """Return the name of the run that ends a chain."""
        end = chain_of(*blocks, namespace=namespace)[-1].hex()
        (path,) = (p for p in files_in(self.path) if p.name.startswith(end))
        return f"{path.parent.name}/{path.name}"

    def file(self, *blocks: int, namespace: Namespace = NAMESPACE) -> Path:
        """Return the file of the run that ends a chain."""
        return self.path / "runs" / self.name(*blocks, namespace=namespace)

    def age(self, created_days: float, used_days: float, num_hits: int, *names: str) -> None:
        """Say how long before `NOW_S` runs were stored and used; without names, of all runs."""
        index = sqlite3.connect(self.path / "index-1.sqlite3")
        for file in files_in(self.path):
            name = f"{file.parent.name}/{file.name}"
            if names and name not in names:
                continue
            created_ns = int((NOW_S - created_days * DAY_S) * 1e9)
            os.utime(file, ns=(created_ns, created_ns))
            index.execute(
                "UPDATE runs SET mtime_ns = ?, last_used_ns = ?, num_hits = ? WHERE name = ?",
                (created_ns, int((NOW_S - used_days * DAY_S) * 1e9), num_hits, name),
            )
        index.commit()
        index.close()

    def found(self, *blocks: int, namespace: Namespace = NAMESPACE) -> int:
        """Return how many blocks of a chain a server would find."""
        tier = DiskTier.open(self.path, None)
        found = tier.find(chain_of(*blocks, namespace=namespace))
        tier.close()
        return found

    def contents(self) -> dict[str, tuple[int, int]]:
        """Return inode and time of every file with data, to see whether anything changed."""
        paths = [path for path in self.path.rglob("*") if path.is_file()]
        data = [path for path in paths if not path.name.startswith("index")]
        return {
            str(path.relative_to(self.path)): (path.stat().st_ino, path.stat().st_mtime_ns)
            for path in data
        }


@pytest.fixture
def store(tmp_path: Path) -> FilledStore:
    """Give a store with the chains 1, 2, 3, 4 and 1, 2, 9 of one model and 1, 2 of another."""
    filled = FilledStore(tmp_path / "store")
    filled.put([1, 2, 3, 4], 2, 3, 4)
    filled.put([1, 2, 9], 2, 3)
    filled.put([1, 2], 2, namespace=OTHER)
    filled.age(10, 5, 0)
    filled.age(10, 1, 7, filled.name(1, 2), filled.name(1, 2, 3))
    filled.age(40, 30, 2, filled.name(1, 2, namespace=OTHER))
    return filled
