"""Plan which runs to remove, so that no prefix is torn from what continues it, and remove them."""

from __future__ import annotations

import contextlib
import heapq
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_mlx.cache_tools.listing import ListedRun, StoreListing, by_parent
from vllm_mlx.cache_tools.selection import Selection
from vllm_mlx.engine.errors import CacheError
from vllm_mlx.engine.kv.disk_folder import StoreFolder
from vllm_mlx.engine.kv.disk_tier import DiskTier


@dataclass(frozen=True, slots=True)
class PruneCriteria:
    """Say what is to go; what is said together adds up.

    `selected` names all runs that match a selection. `max_bytes` adds runs of its scope, the least
    recently used first, until the whole store is that small. `unusable` adds what is damaged or can
    never be found, what was quarantined, and what killed writers left.
    """

    selection: Selection
    selected: bool = False
    max_bytes: int | None = None
    unusable: bool = False


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """Hold what would be removed, last runs of chains first, and what it would leave."""

    listing: StoreListing
    runs: tuple[ListedRun, ...]
    #: Runs that were meant, but that others which stay need.
    needed: tuple[ListedRun, ...]
    #: Files besides the runs: the quarantine's, and what killed writers left.
    others: tuple[tuple[Path, int], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Return how many bytes would go."""
        return sum(run.num_bytes for run in self.runs) + sum(size for _, size in self.others)

    @property
    def num_files(self) -> int:
        """Return how many files would go."""
        return len(self.runs) + len(self.others)


@dataclass(frozen=True, slots=True)
class PruneResult:
    """Say what was removed; the rest of the plan was needed again or gone already."""

    num_files: int
    num_bytes: int


def plan_prune(listing: StoreListing, criteria: PruneCriteria) -> PrunePlan:
    """Choose what to remove; changes nothing."""
    meant: dict[str, ListedRun] = {}
    if criteria.selected:
        meant.update({run.name: run for run in criteria.selection.of(listing.runs)})
    if criteria.unusable:
        bad = ("damaged", "unreadable", "orphaned")
        meant.update({run.name: run for run in listing.runs if run.state in bad})
    removed = _removable(listing.runs, meant)
    if criteria.max_bytes is not None:
        excess = listing.num_bytes - criteria.max_bytes - sum(r.num_bytes for r in removed)
        removed += _least_used(listing.runs, removed, criteria.selection, excess)
    names = {run.name for run in removed}
    return PrunePlan(
        listing=listing,
        runs=tuple(removed),
        needed=tuple(run for name, run in meant.items() if name not in names),
        others=tuple(_other_files(listing)) if criteria.unusable else (),
    )


def execute_prune(plan: PrunePlan) -> PruneResult:
    """Remove what was planned, as far as nobody has come to need it since.

    Other processes may use the store meanwhile. Raises CacheError if it cannot be changed.
    """
    folder = StoreFolder(plan.listing.path)
    sizes = {run.name: run.num_bytes for run in plan.runs if run.header is not None}
    # What has no readable header continues nothing, and nothing that is found continues it.
    others = [(folder.run_path(r.name), r.num_bytes) for r in plan.runs if r.header is None]
    num_files = num_bytes = 0
    try:
        for path, size in (*others, *plan.others):
            path.unlink(missing_ok=True)
            num_files, num_bytes = num_files + 1, num_bytes + size
        if sizes or others:
            tier = DiskTier.open(plan.listing.path, None)
            with contextlib.closing(tier):
                removed = tier.remove(list(sizes))
            num_files += len(removed)
            num_bytes += sum(sizes[name] for name in removed)
    except (OSError, sqlite3.Error) as error:
        raise CacheError(f"{plan.listing.path} cannot be changed: {error}") from error
    return PruneResult(num_files, num_bytes)


class _Dependents:
    """Count for each run how many others need it, as removing goes on."""

    def __init__(self, runs: Iterable[ListedRun]) -> None:
        runs = list(runs)
        children = by_parent(runs)
        self._holders: dict[bytes, list[ListedRun]] = {}
        for run in runs:
            for block_hash in run.hashes:
                self._holders.setdefault(block_hash, []).append(run)
        self.counts: dict[str, int] = {
            run.name: sum(len(children.get(block_hash, ())) for block_hash in run.hashes)
            for run in runs
        }

    def remove(self, run: ListedRun) -> list[ListedRun]:
        """Count a run as removed; return those that nobody needs any more."""
        freed = []
        for holder in self._holders.get(run.parent, ()) if run.parent is not None else ():
            self.counts[holder.name] -= 1
            if not self.counts[holder.name]:
                freed.append(holder)
        return freed


def _removable(runs: Iterable[ListedRun], meant: Mapping[str, ListedRun]) -> list[ListedRun]:
    """Return those of the meant runs that no run which stays needs, last ones first."""
    dependents = _Dependents(runs)
    free = [run for run in meant.values() if not dependents.counts[run.name]]
    removed: list[ListedRun] = []
    while free:
        run = free.pop()
        removed.append(run)
        free += [freed for freed in dependents.remove(run) if freed.name in meant]
    return removed


def _least_used(
    runs: Iterable[ListedRun], gone: Iterable[ListedRun], selection: Selection, excess: int
) -> list[ListedRun]:
    """Choose the least recently used runs until at least `excess` bytes go."""
    runs = list(runs)
    dependents = _Dependents(runs)
    names = set()
    for run in gone:
        dependents.remove(run)
        names.add(run.name)
    candidates = {
        run.name: run for run in runs if run.name not in names and selection.is_in_scope(run)
    }
    free = [(run.last_used_s, name) for name, run in candidates.items()]
    free = [entry for entry in free if not dependents.counts[entry[1]]]
    heapq.heapify(free)
    removed: list[ListedRun] = []
    while free and excess > 0:
        _, name = heapq.heappop(free)
        run = candidates[name]
        removed.append(run)
        excess -= run.num_bytes
        for freed in dependents.remove(run):
            if freed.name in candidates:
                heapq.heappush(free, (freed.last_used_s, freed.name))
    return removed


def _other_files(listing: StoreListing) -> Iterable[tuple[Path, int]]:
    for file in listing.quarantine:
        yield listing.path / "quarantine" / file.name, file.num_bytes
    for path in listing.leftovers:
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat().st_size
