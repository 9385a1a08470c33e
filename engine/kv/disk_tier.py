"""Keep runs of KV blocks on disk, under one cap, in a folder that several processes share.

No fault of the disk, of a file or of the index reaches the caller: it is a miss, or a run that was
not stored, counted by its reason. Files are authoritative and the index is not: whatever it says is
checked against the file that it names.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vllm_mlx.engine.errors import CacheDamagedError, CacheVersionError
from vllm_mlx.engine.kv.disk_catalog import DiskCatalog
from vllm_mlx.engine.kv.disk_faults import FaultCounter, FaultReason, reason_of
from vllm_mlx.engine.kv.disk_folder import RunFile, StoreFolder
from vllm_mlx.engine.kv.disk_format import StoredRun, namespace_folder, read_run
from vllm_mlx.engine.kv.disk_index import BlockPlace, DiskIndex

_REMOVED_TOGETHER = 64
#: No run has this id.
_NONE_KEPT = 0


class DiskStats(msgspec.Struct, frozen=True, kw_only=True):
    """Count what this process did with the tier, and what the folder holds of all processes."""

    num_runs: int = 0
    num_bytes: int = 0
    max_bytes: int | None = None
    num_runs_written: int = 0
    written_bytes: int = 0
    num_runs_read: int = 0
    read_bytes: int = 0
    #: Time that reading took, checksums included.
    read_s: float = 0.0
    num_evicted: int = 0
    evicted_bytes: int = 0
    is_read_only: bool = False
    #: How often each reason occurred.
    faults: dict[str, int] = {}


class Pick(msgspec.Struct, frozen=True):
    """Say which block a run must have at a place, and which kinds of tensors to take of it."""

    hash: bytes
    kinds: frozenset[str]


class ReadPart(msgspec.Struct, frozen=True):
    """Say what to read of one run, by the places of its blocks."""

    name: str
    picks: Mapping[int, Pick]


class _RefusedError(Exception):
    """Give up writing a run, for a reason that is not an error of the disk."""

    def __init__(self, reason: FaultReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: FaultReason = reason


class DiskTier:
    """Store and find runs; any thread may use it, and `write` and `read` take their time.

    Use `open`. `max_bytes` caps all runs in the folder, whoever wrote them; None does not cap.
    """

    def __init__(self, catalog: DiskCatalog, faults: FaultCounter, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.folder = catalog.folder
        self.faults = faults
        self._catalog = catalog
        self._done_lock = threading.Lock()
        self._done = DiskStats()

    @classmethod
    def open(cls, path: Path, max_bytes: int | None) -> DiskTier:
        """Open the store in `path`, made if it is missing, and bring its index up to date.

        A folder that cannot be written is served from as it is. Raises CacheError for one that can
        be neither made nor read.
        """
        faults = FaultCounter()
        tier = cls(DiskCatalog(StoreFolder(path), faults), faults, max_bytes)
        tier._catalog.open()
        tier.evict_to_cap()
        return tier

    def find(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks of a chain are stored, from its first on; reads the index only."""
        return self._catalog.count_prefix(hashes)

    def kinds(self, hashes: Sequence[bytes]) -> list[frozenset[str]]:
        """Return what kinds of tensors each block of the longest stored prefix of a chain has."""
        return [_all_kinds(places) for places in self._catalog.places(hashes)]

    def read(
        self, hashes: Sequence[bytes], wanted: Sequence[frozenset[str]] | None = None
    ) -> list[StoredRun]:
        """Read runs that together hold a chain's blocks, in order, as far as they are whole.

        `wanted[i]` are the kinds of tensors that are needed of block i; None takes everything. Only
        those are read, and a run that has none of them is left out; two runs may hold the same
        block. Counts a use of the chain's blocks that were read.
        """
        runs: list[StoredRun] = []
        for part in self.plan(hashes, wanted):
            run = self.read_part(part)
            if run is None:
                break
            runs.append(run)
        if runs:
            held = {block_hash for run in runs for block_hash in run.hashes}
            self.touch([block_hash for block_hash in hashes if block_hash in held])
        return runs

    def plan(
        self, hashes: Sequence[bytes], wanted: Sequence[frozenset[str]] | None = None
    ) -> list[ReadPart]:
        """Return the parts that `read` reads, in order; looks at the index only."""
        return _plan(hashes, self._catalog.places(hashes), wanted)

    def read_part(self, part: ReadPart) -> StoredRun | None:
        """Read one part of a plan, or deal with the fault why that is impossible.

        Counts no use.
        """
        began = time.perf_counter()
        run = self._read_part(part)
        if run is not None:
            seconds = time.perf_counter() - began
            self._count(num_runs_read=1, read_bytes=run.num_bytes, read_s=seconds)
        return run

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Count a use of a chain from its first block on; returns at once."""
        self._catalog.touch(hashes)

    def write(self, run: StoredRun) -> bool:
        """Store a run durably, evicting what was not used for longest; return whether it is there.

        A run whose blocks are stored already, with all these kinds of tensors, is only touched.
        One whose parent is not stored is refused: it would never be found.
        """
        if self._catalog.is_closed:
            return False
        try:
            return self._write(run)
        except (OSError, sqlite3.Error) as error:
            self._catalog.note(error)
        except _RefusedError as error:
            self.faults.count(error.reason, error)
        except ValueError as error:
            self.faults.count("invalid", error)
        return False

    def maintain(self) -> None:
        """Save uses, and follow now and then what others did to the folder; may take seconds."""
        self._catalog.maintain()

    def rescan(self) -> None:
        """Bring the index in step with the files; may take seconds."""
        self._catalog.rescan()

    def evict_to_cap(self) -> None:
        """Evict what was not used for longest until the runs fit under the cap."""
        if self._catalog.is_closed or self._catalog.is_read_only:
            return
        try:
            with self._catalog.changing() as index:
                self._make_room(index, _NONE_KEPT)
        except (OSError, sqlite3.Error) as error:
            self._catalog.note(error)

    def remove(self, names: Sequence[str]) -> list[str]:
        """Remove runs by name, as far as no run that stays continues them; return those removed.

        It is quickest with the last runs of chains first. Raises OSError or sqlite3.Error where it
        cannot be done.
        """
        removed: list[str] = []
        rest = list(names)
        while rest:
            kept: list[str] = []
            # In portions, so that other processes are not kept waiting for all of it.
            for start in range(0, len(rest), _REMOVED_TOGETHER):
                with self._catalog.changing() as index:
                    for name in rest[start : start + _REMOVED_TOGETHER]:
                        if not index.is_leaf(name):
                            kept.append(name)
                            continue
                        self.folder.run_path(name).unlink(missing_ok=True)
                        index.remove(name)
                        removed.append(name)
            if len(kept) == len(rest):
                break
            rest = kept
        return removed

    def clear(self, digest: bytes | None = None) -> tuple[int, int]:
        """Remove all runs, or all of the namespace with this digest; return files and bytes."""
        folder = namespace_folder(digest) + "/" if digest is not None else ""
        removed: list[RunFile] = []
        try:
            with self._catalog.changing() as index:
                for name, file in index.files().items():
                    if name.startswith(folder):
                        self.folder.run_path(name).unlink(missing_ok=True)
                        index.remove(name)
                        removed.append(file)
        except (OSError, sqlite3.Error) as error:
            self._catalog.note(error)
        return len(removed), sum(file.num_bytes for file in removed)

    def stats(self) -> DiskStats:
        """Return the counters."""
        num_runs, num_bytes = self._catalog.totals()
        with self._done_lock:
            done = self._done
        return msgspec.structs.replace(
            done,
            num_runs=num_runs,
            num_bytes=num_bytes,
            max_bytes=self.max_bytes,
            is_read_only=self._catalog.is_read_only,
            faults=self.faults.counts(),
        )

    def close(self) -> None:
        """Save uses and close the index; what is called later finds and stores nothing."""
        self._catalog.close()

    def _write(self, run: StoredRun) -> bool:
        self.folder.make()
        with self._catalog.changing() as index:
            if self._is_stored(index, run):
                self.touch(run.hashes)
                return True
            _require_parent(index, run)
        with self.folder.staged(run) as staged:
            if self.max_bytes is not None and staged.file.num_bytes > self.max_bytes:
                raise _RefusedError("too_large", f"{staged.file.num_bytes} bytes in one run")
            with self._catalog.changing() as index:
                _require_parent(index, run)
                added = index.add(staged.file, run)
                if added is None:
                    return True
                self._make_room(index, added)
                # Seen by nobody before the index is let go of, and by everybody after.
                staged.publish()
            self.folder.sync(staged.file.name)
        self._count(num_runs_written=1, written_bytes=staged.file.num_bytes)
        return True

    def _is_stored(self, index: DiskIndex, run: StoredRun) -> bool:
        """Tell whether all that a run holds is stored; files that are gone are forgotten."""
        places = index.places(run.hashes)
        names = {place.run for options in places for place in options}
        gone = {name for name in names if not self.folder.run_path(name).exists()}
        for name in gone:
            index.remove(name)
        return len(places) == len(run.hashes) and all(
            kinds <= _all_kinds([place for place in options if place.run not in gone])
            and any(place.run not in gone for place in options)
            for kinds, options in zip(run.kinds, places, strict=True)
        )

    def _make_room(self, index: DiskIndex, kept: int) -> None:
        """Evict leaves until the cap holds; nothing goes if that would not be enough."""
        if self.max_bytes is None:
            return
        _, total = index.totals()
        victims: list[tuple[str, int]] = []
        while total > self.max_bytes:
            victim = index.least_used_leaf(kept)
            if victim is None:
                raise _RefusedError("no_room", f"{total} bytes, of which none may go")
            index.remove(victim[0])
            total -= victim[1]
            victims.append(victim)
        for name, _ in victims:
            self.folder.run_path(name).unlink(missing_ok=True)
        self._count(num_evicted=len(victims), evicted_bytes=sum(size for _, size in victims))

    def _read_part(self, part: ReadPart) -> StoredRun | None:
        name, picks = part.name, part.picks
        path = self.folder.run_path(name)
        inode = 0
        try:
            inode = path.stat().st_ino
            run = read_run(
                path, wanted=lambda block, kind: block in picks and kind in picks[block].kinds
            )
        except CacheDamagedError as error:
            self.faults.count("damaged", error)
            self._catalog.set_aside(name, inode)
        except CacheVersionError as error:
            self.faults.count("version", error)
            self._catalog.forget(name, if_gone=False)
        except OSError as error:
            self.faults.count(reason_of(error), error)
            if error.errno == errno.EIO:
                self._catalog.set_aside(name, inode)
            elif reason_of(error) == "missing":
                self._catalog.forget(name, if_gone=True)
        else:
            if all(run.hashes[at] == pick.hash for at, pick in picks.items()):
                return run
            self.faults.count("index", f"{path} does not hold what the index says")
            self._catalog.forget(name, if_gone=False)
        return None

    def _count(self, **added: Any) -> None:
        with self._done_lock:
            counted = {name: getattr(self._done, name) + value for name, value in added.items()}
            self._done = msgspec.structs.replace(self._done, **counted)


def _plan(
    hashes: Sequence[bytes],
    places: Sequence[Sequence[BlockPlace]],
    wanted: Sequence[frozenset[str]] | None,
) -> list[ReadPart]:
    """Choose few runs that hold what is wanted of each block, up to one that nobody holds whole."""
    plan: dict[str, dict[int, Pick]] = {}
    for index, options in enumerate(places):
        missing = _all_kinds(options) if wanted is None else wanted[index]
        by_reach = sorted(
            options, key=lambda place: (place.run in plan, _reach(places, index, place.run))
        )
        picked: list[tuple[BlockPlace, frozenset[str]]] = []
        while missing and by_reach:
            place = by_reach.pop()
            if taken := missing & place.kinds:
                picked.append((place, taken))
                missing -= taken
        if missing:
            break
        for place, taken in picked:
            plan.setdefault(place.run, {})[place.position] = Pick(hashes[index], taken)
    return [ReadPart(name, picks) for name, picks in plan.items()]


def _reach(places: Sequence[Sequence[BlockPlace]], start: int, run: str) -> int:
    """Count the blocks from `start` on that one run holds."""
    count = 0
    for options in places[start:]:
        if all(place.run != run for place in options):
            break
        count += 1
    return count


def _all_kinds(places: Sequence[BlockPlace]) -> frozenset[str]:
    return frozenset[str]().union(*(place.kinds for place in places))


def _require_parent(index: DiskIndex, run: StoredRun) -> None:
    if run.parent is not None and not index.has_block(run.parent):
        raise _RefusedError("orphan", "a run whose parent is not stored")
