"""List what a store holds from the headers of its files, changing nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vllm_mlx.engine.errors import CacheDamagedError, CacheError, CacheVersionError
from vllm_mlx.engine.kv.disk_folder import RunFile, StoreFolder
from vllm_mlx.engine.kv.disk_format import RunHeader, read_header
from vllm_mlx.engine.kv.disk_index import RunUse, read_uses

#: `orphaned`: whole, but what comes before it is not stored, so that it is never found.
RunState = Literal["whole", "orphaned", "damaged", "other version", "unreadable"]

#: Called with how much is done and how much there is.
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ListedRun:
    """Hold what is known of one file; times are seconds since the epoch."""

    name: str
    state: RunState
    num_bytes: int
    created_s: float
    last_used_s: float
    num_hits: int = 0
    #: None of a file whose header cannot be read.
    header: RunHeader | None = None
    #: Tokens of the chain before the run, if they are all stored.
    num_tokens_before: int | None = None
    #: What is wrong with it.
    fault: str = ""

    @property
    def model(self) -> str:
        """Return what the run's model was called."""
        return self.header.namespace.label if self.header is not None else ""

    @property
    def namespace(self) -> str:
        """Return the hex digest of the run's namespace, or as much as its folder tells."""
        if self.header is not None:
            return self.header.digest.hex()
        return self.name.partition("/")[0]

    @property
    def hashes(self) -> tuple[bytes, ...]:
        """Return the hashes of its blocks."""
        return self.header.hashes if self.header is not None else ()

    @property
    def parent(self) -> bytes | None:
        """Return the hash of the block that it continues."""
        return self.header.parent if self.header is not None else None

    @property
    def num_tokens(self) -> int:
        """Return how many tokens it stands for."""
        return self.header.num_tokens if self.header is not None else 0


@dataclass(frozen=True, slots=True)
class StoreListing:
    """Hold what one store's folder has in it."""

    path: Path
    runs: tuple[ListedRun, ...]
    quarantine: tuple[RunFile, ...]
    #: Files that killed writers left.
    leftovers: tuple[Path, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all runs, which is what the cap counts."""
        return sum(run.num_bytes for run in self.runs)


def list_store(path: Path, on_progress: OnProgress | None = None) -> StoreListing:
    """Read every file's header; `on_progress` counts files. Raises CacheError if there is no store.

    Files that other processes add or remove meanwhile may be in it or not.
    """
    folder = StoreFolder(path)
    folder.require()
    uses = read_uses(folder.index)
    files = sorted(folder.list_runs(), key=lambda file: file.name)
    runs: list[ListedRun] = []
    for number, file in enumerate(files):
        listed = _listed(folder, file, uses.get(file.name))
        if listed is not None:
            runs.append(listed)
        if on_progress is not None:
            on_progress(number + 1, len(files))
    return StoreListing(
        path=path,
        runs=tuple(mark_orphans(runs)),
        quarantine=tuple(folder.list_quarantine()),
        leftovers=tuple(folder.list_leftovers()),
    )


def mark_orphans(runs: Sequence[ListedRun]) -> list[ListedRun]:
    """Return the runs with those marked that no chain of whole runs leads to."""
    continued = by_parent(run for run in runs if run.state in ("whole", "orphaned"))
    before: dict[str, int] = {}
    pending = [(run, 0) for run in continued.get(None, ())]
    while pending:
        run, num_tokens = pending.pop()
        if run.name in before:
            continue
        before[run.name] = num_tokens
        per_block = run.num_tokens // len(run.hashes)
        for position, block_hash in enumerate(run.hashes):
            reached = num_tokens + (position + 1) * per_block
            pending += [(child, reached) for child in continued.get(block_hash, ())]
    return [_marked(run, before.get(run.name)) for run in runs]


def fault_text(error: OSError | CacheError, path: Path) -> str:
    """Return what an error says of a file besides its path."""
    text = error.message if isinstance(error, CacheError) else error.strerror or str(error)
    return text.removeprefix(f"{path} ")


def by_parent(runs: Iterable[ListedRun]) -> dict[bytes | None, list[ListedRun]]:
    """Return runs by the block that they continue; None has those that begin a chain."""
    found: dict[bytes | None, list[ListedRun]] = {}
    for run in runs:
        found.setdefault(run.parent, []).append(run)
    return found


def _marked(run: ListedRun, num_tokens_before: int | None) -> ListedRun:
    if run.state not in ("whole", "orphaned"):
        return run
    if num_tokens_before is not None:
        return replace(run, state="whole", num_tokens_before=num_tokens_before, fault="")
    return replace(run, state="orphaned", fault="what comes before it is not stored")


def _listed(folder: StoreFolder, file: RunFile, use: RunUse | None) -> ListedRun | None:
    """Return what is known of a file, or None if it is gone by now."""
    created_s = file.mtime_ns / 1e9
    known = ListedRun(
        name=file.name,
        state="whole",
        num_bytes=file.num_bytes,
        created_s=created_s,
        last_used_s=max(created_s, use.last_used_ns / 1e9) if use is not None else created_s,
        num_hits=use.num_hits if use is not None else 0,
    )
    path = folder.run_path(file.name)
    try:
        return replace(known, header=read_header(path))
    except FileNotFoundError:
        return None
    except CacheDamagedError as error:
        return replace(known, state="damaged", fault=fault_text(error, path))
    except CacheVersionError as error:
        return replace(known, state="other version", fault=fault_text(error, path))
    except OSError as error:
        return replace(known, state="unreadable", fault=fault_text(error, path))
