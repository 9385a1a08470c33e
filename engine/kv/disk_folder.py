"""Own the folder of the SSD tier: where files are, how they appear whole, and where bad ones go.

    CACHEDIR.TAG                     keeps backups out, if the folder was made by us
    index-1.sqlite3                  what is where; disposable
    lock                             held while the index is made anew
    runs/<namespace>/<run>.run       the data; `.tmp-*` beside it is being written
    quarantine/<run>.run             damaged files, a few of them

Files are readable by their owner only: what they hold can be turned back into prompts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_mlx.engine.errors import CacheError
from vllm_mlx.engine.kv.disk_format import (
    RUN_SUFFIX,
    EncodedRun,
    StoredRun,
    encode_run,
    namespace_folder,
)

TEMPORARY_PREFIX = ".tmp-"

#: A file being written is locked by its writer; younger ones may not be locked yet.
_LEFTOVER_AGE_S = 60.0
_QUARANTINE_FILES = 8
_WRITE_CHUNK_BYTES = 1 << 24

_CACHEDIR_TAG = """\
Signature: 8a477f597d28d172789f06886806bc55
# Prefixes of prompts, computed by vllm-mlx; they can be removed at any time.
"""


@dataclass(frozen=True, slots=True)
class RunFile:
    """Name one stored file and say how large and how old it is."""

    #: `<namespace folder>/<file name>`.
    name: str
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class StagedRun:
    """Hold a run that is whole on disk under a temporary name."""

    temporary: Path
    final: Path
    #: What it will be once it is published.
    file: RunFile

    def publish(self) -> None:
        """Give the run its name, which makes it appear at once and whole."""
        self.temporary.rename(self.final)


class StoreFolder:
    """Know the paths of one store; holds no state, and any number of processes may use one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs = path / "runs"
        self.quarantine = path / "quarantine"
        self.index = path / "index-1.sqlite3"
        self.lock = path / "lock"

    def make(self) -> None:
        """Create what is missing, for its owner only; raise OSError where that is impossible."""
        is_new = not self.path.exists()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.runs, self.quarantine):
            folder.mkdir(mode=0o700, exist_ok=True)
        if is_new:
            tag = self.path / "CACHEDIR.TAG"
            tag.touch(mode=0o600)
            tag.write_text(_CACHEDIR_TAG)

    def require(self) -> None:
        """Raise CacheError unless a store is here."""
        if not self.runs.is_dir():
            raise CacheError(f"no prefix store in {self.path}: check the path")

    def run_path(self, name: str) -> Path:
        """Return where a run of a given name is."""
        return self.runs / name

    def list_runs(self) -> Iterator[RunFile]:
        """Yield every stored file; one that disappears meanwhile is left out."""
        for entry in self._entries():
            if entry.name.endswith(RUN_SUFFIX) and not entry.name.startswith(TEMPORARY_PREFIX):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    name = f"{Path(entry.path).parent.name}/{entry.name}"
                    yield RunFile(name, status.st_size, status.st_mtime_ns)

    def list_leftovers(self) -> list[Path]:
        """List files that a writer left when it was killed."""
        paths = (Path(e.path) for e in self._entries() if e.name.startswith(TEMPORARY_PREFIX))
        return [path for path in paths if _is_leftover(path)]

    def remove_leftovers(self) -> int:
        """Remove what killed writers left; return how many files that was."""
        leftovers = self.list_leftovers()
        for path in leftovers:
            path.unlink(missing_ok=True)
        return len(leftovers)

    @contextmanager
    def staged(self, run: StoredRun) -> Iterator[StagedRun]:
        """Write a run durably under a temporary name, which is removed unless it is published.

        The caller makes the name durable afterwards (`sync`). Raises ValueError for a run that
        contradicts itself, OSError where it cannot be written.
        """
        encoded = encode_run(run)
        folder = self.runs / namespace_folder(run.namespace.digest)
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(self.runs)
        temporary = folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o600)
        try:
            # The system lets go of the lock when the process ends, however it ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _write(descriptor, encoded)
            os.fsync(descriptor)
            name = f"{folder.name}/{encoded.file_name}"
            file = RunFile(name, encoded.num_bytes, os.fstat(descriptor).st_mtime_ns)
            yield StagedRun(temporary, folder / encoded.file_name, file)
        finally:
            temporary.unlink(missing_ok=True)
            os.close(descriptor)

    def sync(self, name: str) -> None:
        """Make the presence of a run durable."""
        sync_folder(self.run_path(name).parent)

    def set_aside(self, name: str, inode: int) -> None:
        """Move a damaged run to the quarantine, unless another file has its name by now.

        The quarantine keeps the newest few files; raises OSError where nothing can be moved.
        """
        path = self.run_path(name)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == inode:
                self.quarantine.mkdir(mode=0o700, exist_ok=True)
                path.rename(self.quarantine / path.name)
                os.utime(self.quarantine / path.name)
        kept = sorted(self.list_quarantine(), key=lambda file: file.mtime_ns, reverse=True)
        for file in kept[_QUARANTINE_FILES:]:
            (self.quarantine / file.name).unlink(missing_ok=True)

    def list_quarantine(self) -> list[RunFile]:
        """List the files that were set aside."""
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self.quarantine) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append(RunFile(entry.name, status.st_size, status.st_mtime_ns))
        return found

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from making the index anew at the same time."""
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        """Yield what the namespaces' folders hold."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.runs) as folders:
            for folder in folders:
                if folder.is_dir(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                        yield from entries


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, encoded: EncodedRun) -> None:
    for piece in encoded.pieces:
        rest = memoryview(piece)
        while len(rest):
            rest = rest[os.write(descriptor, rest[:_WRITE_CHUNK_BYTES]) :]


def _is_leftover(path: Path) -> bool:
    """Tell whether no living process is writing a temporary file."""
    try:
        if time.time() - path.stat().st_mtime < _LEFTOVER_AGE_S:
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
