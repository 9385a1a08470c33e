"""Check every byte of a store against its checksums, changing nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from vllm_mlx.cache_tools.listing import (
    ListedRun,
    OnProgress,
    StoreListing,
    fault_text,
    list_store,
    mark_orphans,
)
from vllm_mlx.engine.errors import CacheDamagedError, CacheVersionError
from vllm_mlx.engine.kv.disk_folder import StoreFolder
from vllm_mlx.engine.kv.disk_format import read_run


@dataclass(frozen=True, slots=True)
class Verification:
    """Hold what a check of a whole store found."""

    listing: StoreListing

    @property
    def damaged(self) -> list[ListedRun]:
        """Return the files that are not what they should be, or that the disk cannot read."""
        return [run for run in self.listing.runs if run.state in ("damaged", "unreadable")]

    @property
    def orphaned(self) -> list[ListedRun]:
        """Return the whole files that are never found, because what comes before is missing."""
        return [run for run in self.listing.runs if run.state == "orphaned"]

    @property
    def other_version(self) -> list[ListedRun]:
        """Return the files that another version of the program wrote."""
        return [run for run in self.listing.runs if run.state == "other version"]


def verify_store(path: Path, on_progress: OnProgress | None = None) -> Verification:
    """Read every file whole; `on_progress` counts bytes. Raises CacheError if there is no store.

    A file that is removed meanwhile, as a running server may do, is left out.
    """
    listing = list_store(path)
    folder = StoreFolder(path)
    checked: list[ListedRun] = []
    done = 0
    for run in listing.runs:
        verified = _verified(folder, run)
        if verified is not None:
            checked.append(verified)
        done += run.num_bytes
        if on_progress is not None:
            on_progress(done, listing.num_bytes)
    return Verification(replace(listing, runs=tuple(mark_orphans(checked))))


def _verified(folder: StoreFolder, run: ListedRun) -> ListedRun | None:
    if run.header is None:
        return run
    path = folder.run_path(run.name)
    try:
        read = read_run(path)
    except FileNotFoundError:
        return None
    except (CacheDamagedError, CacheVersionError) as error:
        # It was whole a moment ago, or its header was, so another version is damage too.
        return replace(run, state="damaged", fault=fault_text(error, path))
    except OSError as error:
        return replace(run, state="unreadable", fault=fault_text(error, path))
    if f"{run.name.partition('/')[0]}/{run.header.file_name}" != run.name or (
        read.hashes != run.header.hashes
    ):
        return replace(run, state="damaged", fault="does not hold what its name says")
    return run
