"""Keep the SSD tier's index open and in step with the files, whatever happens to either."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from vllm_mlx.engine.errors import CacheDamagedError, CacheError, CacheVersionError
from vllm_mlx.engine.kv.disk_faults import FaultCounter, reason_of
from vllm_mlx.engine.kv.disk_folder import RunFile, StoreFolder
from vllm_mlx.engine.kv.disk_format import RunHeader, read_header
from vllm_mlx.engine.kv.disk_index import (
    BlockPlace,
    DiskIndex,
    memory_index,
    open_index,
    remove_index,
    reopen_index,
)

Found = TypeVar("Found")

_RESCAN_INTERVAL_S = 600.0
_MAX_PENDING_USES = 4096


class DiskCatalog:
    """Own the connections to one folder's index; any thread may use it.

    Looking up never waits for a change: it has a connection of its own, and finds nothing while
    the index is missing or being made anew. What changes the index may take seconds, and belongs
    on a thread that may wait.
    """

    def __init__(self, folder: StoreFolder, faults: FaultCounter) -> None:
        self.folder = folder
        self.faults = faults
        #: The folder cannot be written; the index is in memory.
        self.is_read_only = False
        self.is_closed = False
        #: Held by whatever changes the index, so that it is not replaced meanwhile.
        self._lock = threading.RLock()
        self._writer: DiskIndex | None = None
        self._reader: DiskIndex | None = None
        #: Device and inode of the index's file.
        self._identity: tuple[int, int] | None = None
        self._rescanned_at = 0.0
        self._uses_lock = threading.Lock()
        self._uses: list[tuple[tuple[bytes, ...], int]] = []

    def open(self) -> None:
        """Make the folder if it is missing and bring the index up to date.

        Raises CacheError for a folder that can be neither made nor read.
        """
        try:
            self.folder.make()
            self.folder.remove_leftovers()
        except OSError as error:
            if not self.folder.runs.is_dir():
                raise CacheError(
                    f"cannot make the prefix store {self.folder.path}: "
                    f"{error.strerror or error}; give another folder"
                ) from error
        self.rescan()

    def close(self) -> None:
        """Save uses and close the index; nothing is found or opened again afterwards."""
        self.maintain()
        with self._lock:
            self.is_closed = True
            self._detach()

    def count_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return how many blocks of a chain are stored, from its first on."""
        return self._looked_up(lambda index: index.count_prefix(hashes), 0)

    def places(self, hashes: Sequence[bytes]) -> list[list[BlockPlace]]:
        """Return where each block of a chain is, up to the first that is nowhere."""
        return self._looked_up(lambda index: index.places(hashes), [])

    def totals(self) -> tuple[int, int]:
        """Return how many runs there are, and their bytes."""
        return self._looked_up(DiskIndex.totals, (0, 0))

    @contextmanager
    def changing(self) -> Iterator[DiskIndex]:
        """Give the index for changes that are made together or not at all.

        Raises OSError or sqlite3.Error; pass them to `note`.
        """
        with self._lock:
            index = self._current()
            with index.writing():
                yield index

    def note(self, error: OSError | sqlite3.Error) -> None:
        """Count an error; an index that cannot be used is let go of, and made anew later."""
        reason = reason_of(error)
        self.faults.count(reason, error)
        # A thread that changes the index right now will notice by itself.
        if reason == "index" and self._lock.acquire(blocking=False):
            try:
                self._detach()
            finally:
                self._lock.release()

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Remember a use of a chain until `maintain`; too many at once are forgotten."""
        with self._uses_lock:
            if len(self._uses) < _MAX_PENDING_USES:
                self._uses.append((tuple(hashes), time.time_ns()))

    def maintain(self) -> None:
        """Save uses, and follow now and then what others did to the folder."""
        if self.is_closed or not self.folder.runs.is_dir():
            return
        if not self._is_current() or time.monotonic() - self._rescanned_at > _RESCAN_INTERVAL_S:
            self.rescan()
        with self._uses_lock:
            uses, self._uses = self._uses, []
        if not uses:
            return
        latest = dict(uses)
        counts = Counter(hashes for hashes, _ in uses)
        try:
            with self.changing() as index:
                for hashes, when_ns in latest.items():
                    index.use(hashes, when_ns, counts[hashes])
        except (OSError, sqlite3.Error) as error:
            self.note(error)

    def rescan(self) -> None:
        """Bring the index in step with the files: add unknown ones, forget those that are gone."""
        try:
            with self._lock:
                self._scan(self._attached())
        except (OSError, sqlite3.Error) as error:
            self.note(error)

    def forget(self, name: str, *, if_gone: bool) -> None:
        """Take a run out of the index; with `if_gone` not if it has been written again."""
        try:
            with self.changing() as index:
                if not (if_gone and self.folder.run_path(name).exists()):
                    index.remove(name)
        except (OSError, sqlite3.Error) as error:
            self.note(error)

    def set_aside(self, name: str, inode: int) -> None:
        """Move a damaged file out of the way and take it out of the index."""
        is_moved = False
        # One that cannot be moved is at least not looked for again.
        with contextlib.suppress(OSError):
            self.folder.set_aside(name, inode)
            is_moved = True
        self.forget(name, if_gone=is_moved)

    def _looked_up(self, look_up: Callable[[DiskIndex], Found], nothing: Found) -> Found:
        reader = self._reader
        if reader is None or not self._is_current():
            return nothing
        try:
            return look_up(reader)
        except sqlite3.Error as error:
            # It may just have been closed because the index is made anew.
            if reader is self._reader:
                self.note(error)
            return nothing

    def _current(self) -> DiskIndex:
        """Return the index for changes, in step with the files if it had to be opened."""
        if self._writer is not None and self._is_current():
            return self._writer
        index = self._attached()
        self._scan(index)
        return index

    def _attached(self) -> DiskIndex:
        if self._writer is not None and self._is_current():
            return self._writer
        if self.is_closed:
            raise sqlite3.ProgrammingError("the store is closed")
        self._detach()
        try:
            self.folder.make()
            with self.folder.locked():
                writer = self._open_index()
                reader = reopen_index(self.folder.index)
            status = self.folder.index.stat()
            self._identity = (status.st_dev, status.st_ino)
            self.is_read_only = False
        except OSError as error:
            if reason_of(error) != "read_only" or not self.folder.runs.is_dir():
                raise
            self.faults.count("read_only", error)
            writer = reader = memory_index()
            self.is_read_only = True
        self._writer, self._reader = writer, reader
        return writer

    def _open_index(self) -> DiskIndex:
        try:
            return open_index(self.folder.index)
        except sqlite3.Error as error:
            if reason_of(error) != "index":
                raise
            self.faults.count("index", error)
            remove_index(self.folder.index)
            return open_index(self.folder.index)

    def _detach(self) -> None:
        for index in (self._reader, self._writer):
            if index is not None:
                index.close()
        self._reader = self._writer = self._identity = None

    def _is_current(self) -> bool:
        """Tell whether the open index is the one in the folder; nobody may have removed it."""
        if self.is_read_only:
            return self._reader is not None
        try:
            status = os.stat(self.folder.index)
        except OSError:
            return False
        return self._identity == (status.st_dev, status.st_ino)

    def _scan(self, index: DiskIndex) -> None:
        self._rescanned_at = time.monotonic()
        found = {file.name: file for file in self.folder.list_runs()}
        known = index.files()
        changed = [file for file in found.values() if known.get(file.name) != file]
        gone = known.keys() - found.keys()
        headers = [(file, self._header_of(file)) for file in changed]
        if not headers and not gone:
            return
        with index.writing():
            for name in gone:
                # Another process may have written it since the files were listed.
                if not self.folder.run_path(name).exists():
                    index.remove(name)
            for file, header in headers:
                index.remove(file.name)
                if header is not None:
                    index.add(file, header if isinstance(header, RunHeader) else None)

    def _header_of(self, file: RunFile) -> RunHeader | CacheVersionError | None:
        """Return a file's header, the error of another version, or None if it is of no use."""
        path = self.folder.run_path(file.name)
        try:
            inode = path.stat().st_ino
            header = read_header(path)
            if file.name != f"{path.parent.name}/{header.file_name}":
                raise CacheDamagedError(f"{path} does not hold what its name says")
        except CacheVersionError as error:
            self.faults.count("version", error)
            return error
        except CacheDamagedError as error:
            self.faults.count("damaged", error)
            with contextlib.suppress(OSError):
                self.folder.set_aside(file.name, inode)
            return None
        except FileNotFoundError:
            # Removed since the files were listed.
            return None
        except OSError as error:
            self.faults.count(reason_of(error), error)
            return None
        return header
