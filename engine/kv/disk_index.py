"""Know which stored run holds which block, in SQLite; everything in it can be made anew.

Only use counts and times of last use are nowhere else: they are lost with the index, and nothing
else is. SQLite's write lock is also what keeps processes that share a folder from evicting a run
while another one adds to it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from vllm_mlx.engine.kv.disk_folder import RunFile
from vllm_mlx.engine.kv.disk_format import RunHeader, StoredRun

_Value = str | bytes | int | None

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 10.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs(
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    parent BLOB,
    num_bytes INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    last_used_ns INTEGER NOT NULL,
    num_hits INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS runs_by_parent ON runs(parent);
CREATE INDEX IF NOT EXISTS runs_by_use ON runs(last_used_ns);
CREATE TABLE IF NOT EXISTS blocks(
    hash BLOB NOT NULL,
    run INTEGER NOT NULL,
    position INTEGER NOT NULL,
    kinds TEXT NOT NULL,
    PRIMARY KEY(hash, run)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS blocks_by_run ON blocks(run);
"""

#: A run that no other run continues.
_IS_LEAF = """NOT EXISTS (
    SELECT 1 FROM blocks JOIN runs AS child ON child.parent = blocks.hash
    WHERE blocks.run = runs.id AND child.id != runs.id)"""

#: Blocks that are looked up together, at first and at most.
_FIRST_LOOKUP = 8
_MAX_LOOKUP = 512


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Say which run holds a block, where in it, and what kinds of tensors the block has there."""

    run: str
    position: int
    kinds: frozenset[str]


@dataclass(frozen=True, slots=True)
class RunUse:
    """Say how a run was used."""

    num_hits: int
    last_used_ns: int


class DiskIndex:
    """Own one connection; its lock lets threads take turns, and processes exclude one another."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._lock = threading.RLock()

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make the changes of the body together or not at all, while nobody else makes any."""
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def places(self, hashes: Sequence[bytes]) -> list[list[BlockPlace]]:
        """Return where each block of a chain is, up to the first that is nowhere."""
        found: list[list[BlockPlace]] = []
        for asked in _portions(hashes):
            known = self._look_up(asked)
            for block_hash in asked:
                if block_hash not in known:
                    return found
                found.append(known[block_hash])
        return found

    def count_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks of a chain are stored, from its first on."""
        count = 0
        for asked in _portions(hashes):
            marks = ",".join("?" * len(asked))
            rows = self._rows(f"SELECT hash FROM blocks WHERE hash IN ({marks})", asked)
            known = {row[0] for row in rows}
            for block_hash in asked:
                if block_hash not in known:
                    return count
                count += 1
        return count

    def has_block(self, block_hash: bytes) -> bool:
        """Tell whether any run holds a block."""
        return self.count_prefix([block_hash]) == 1

    def add(self, file: RunFile, header: RunHeader | StoredRun | None) -> int | None:
        """Add a run and return its id, or None if it is known already.

        Without a header it only takes up room, and is the first to go.
        """
        parent = header.parent if header is not None else None
        last_used_ns = file.mtime_ns if header is not None else 0
        cursor = self._execute(
            "INSERT OR IGNORE INTO runs(name, parent, num_bytes, mtime_ns, last_used_ns)"
            " VALUES (?, ?, ?, ?, ?)",
            (file.name, parent, file.num_bytes, file.mtime_ns, last_used_ns),
        )
        if cursor.rowcount != 1 or cursor.lastrowid is None:
            return None
        if header is not None:
            rows = [
                (block_hash, cursor.lastrowid, position, ",".join(sorted(kinds)))
                for position, (block_hash, kinds) in enumerate(
                    zip(header.hashes, header.kinds, strict=True)
                )
            ]
            with self._lock:
                self._connection.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?)", rows)
        return cursor.lastrowid

    def remove(self, name: str) -> None:
        """Forget a run."""
        self._execute(
            "DELETE FROM blocks WHERE run = (SELECT id FROM runs WHERE name = ?)", (name,)
        )
        self._execute("DELETE FROM runs WHERE name = ?", (name,))

    def is_leaf(self, name: str) -> bool:
        """Tell whether no other run continues a run, or it is not known."""
        query = f"SELECT 1 FROM runs WHERE name = ? AND NOT {_IS_LEAF}"
        return not self._rows(query, (name,))

    def least_used_leaf(self, kept: int) -> tuple[str, int] | None:
        """Return name and bytes of the leaf that was not used for longest, other than id `kept`."""
        query = f"SELECT name, num_bytes FROM runs WHERE id != ? AND {_IS_LEAF}"
        found = self._rows(f"{query} ORDER BY last_used_ns LIMIT 1", (kept,))
        return (found[0][0], found[0][1]) if found else None

    def use(self, hashes: Sequence[bytes], when_ns: int, num_hits: int) -> None:
        """Count a use of every run that holds a block of a chain, the first blocks' as the latest.

        So of runs that were used together the last one is the first to go.
        """
        seen: set[str] = set()
        for places in self.places(hashes):
            for place in places:
                if place.run not in seen:
                    when = when_ns - len(seen)
                    seen.add(place.run)
                    self._execute(
                        "UPDATE runs SET num_hits = num_hits + ?,"
                        " last_used_ns = max(last_used_ns, ?) WHERE name = ?",
                        (num_hits, when, place.run),
                    )

    def totals(self) -> tuple[int, int]:
        """Return how many runs there are, and their bytes."""
        query = "SELECT count(*), coalesce(sum(num_bytes), 0) FROM runs"
        ((count, num_bytes),) = self._rows(query)
        return count, num_bytes

    def files(self) -> dict[str, RunFile]:
        """Return what is known of each file, by name."""
        rows = self._rows("SELECT name, num_bytes, mtime_ns FROM runs")
        return {row[0]: RunFile(*row) for row in rows}

    def uses(self) -> dict[str, RunUse]:
        """Return how each run was used, by name."""
        rows = self._rows("SELECT name, num_hits, last_used_ns FROM runs")
        return {row[0]: RunUse(row[1], row[2]) for row in rows}

    def _look_up(self, hashes: Sequence[bytes]) -> dict[bytes, list[BlockPlace]]:
        marks = ",".join("?" * len(hashes))
        query = (
            "SELECT hash, name, position, kinds FROM blocks JOIN runs ON runs.id = blocks.run"
            f" WHERE hash IN ({marks})"
        )
        found: dict[bytes, list[BlockPlace]] = {}
        for block_hash, name, position, kinds in self._rows(query, hashes):
            place = BlockPlace(name, position, _parse_kinds(kinds))
            found.setdefault(block_hash, []).append(place)
        return found

    def _execute(self, query: str, values: Sequence[_Value] = ()) -> sqlite3.Cursor:
        with self._lock:
            return self._connection.execute(query, values)

    def _rows(self, query: str, values: Sequence[_Value] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()


def _portions(hashes: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Cut a chain into portions to look up: most chains end at once or go on for long."""
    start, size = 0, _FIRST_LOOKUP
    while start < len(hashes):
        yield hashes[start : start + size]
        start, size = start + size, min(4 * size, _MAX_LOOKUP)


@lru_cache(maxsize=64)
def _parse_kinds(kinds: str) -> frozenset[str]:
    return frozenset(kinds.split(",") if kinds else ())


def open_index(path: Path) -> DiskIndex:
    """Open the index at `path`, made if it is missing.

    Only one process at a time may open one that may be missing. Raises sqlite3.Error if it cannot
    be used.
    """
    # SQLite gives its further files the mode of the first one.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = _connect(path)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("the index is damaged")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION):
            raise sqlite3.DatabaseError(f"the index has version {version}")
        connection.executescript(_SCHEMA)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    except sqlite3.Error:
        connection.close()
        raise
    return DiskIndex(connection)


def reopen_index(path: Path) -> DiskIndex:
    """Open an index that `open_index` has just opened once more, with a connection of its own."""
    return DiskIndex(_connect(path))


def read_uses(path: Path) -> dict[str, RunUse]:
    """Return how each run was used, by name, changing nothing; empty if that cannot be read."""
    # The first needs to write beside the file, the second sees only what was checkpointed.
    for options in ("mode=ro", "mode=ro&immutable=1"):
        with contextlib.suppress(sqlite3.Error):
            uri = f"file:{quote(str(path.absolute()))}?{options}"
            connection = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S)
            try:
                return DiskIndex(connection).uses()
            finally:
                connection.close()
    return {}


def memory_index() -> DiskIndex:
    """Make an index that only this process has, for a folder that cannot be written."""
    connection = _connect(":memory:")
    connection.executescript(_SCHEMA)
    return DiskIndex(connection)


def remove_index(path: Path) -> None:
    """Remove an index's files."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _connect(path: Path | str) -> sqlite3.Connection:
    return sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
