"""The SSD tier on a healthy disk: finding, reading, sharing, use, and eviction under the cap."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runs import (
    NAMESPACE,
    OTHER,
    chain_of,
    files_in,
    is_right,
    run_of,
    stored_bytes,
    write_run,
)

from vllm_mlx.engine.errors import CacheError
from vllm_mlx.engine.kv.disk_format import StoredRun, iter_blocks
from vllm_mlx.engine.kv.disk_tier import DiskTier

KV = frozenset({"kv"})
STATE = frozenset({"state"})


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """Give an empty store without a cap."""
    opened = DiskTier.open(tmp_path / "store", None)
    yield opened
    opened.close()


def names_read(runs: list[StoredRun]) -> list[list[str]]:
    """Return the names of the tensors of each run."""
    return [[tensor.name for tensor in run.tensors] for run in runs]


def test_a_chain_is_found_as_far_as_it_is_stored(tier: DiskTier) -> None:
    """A look-up ends at the first block that is not stored; other chains are not found at all."""
    tier.write(run_of([1, 2, 3], 0, 2))
    tier.write(run_of([1, 2, 3, 4], 2))
    assert tier.find(chain_of(1, 2, 3, 4, 5)) == 4
    assert tier.find(chain_of(1, 2, 9)) == 2
    assert tier.find(chain_of(2, 3)) == 0
    assert tier.find(chain_of(1, 2, namespace=OTHER)) == 0
    assert tier.find([]) == 0


def test_a_long_chain_is_found_and_read_whole(tier: DiskTier) -> None:
    """A chain of many more blocks than one look-up asks for comes back in order."""
    blocks = [block % 50 for block in range(704)]
    for start in range(0, len(blocks), 8):
        assert tier.write(run_of(blocks[: start + 8], start, size=32))
    hashes = chain_of(*blocks)
    assert tier.find(hashes) == 704
    read = [block for run in tier.read(hashes) for block in run.hashes]
    assert read == hashes


def test_runs_come_back_whole_and_after_a_restart(tier: DiskTier, tmp_path: Path) -> None:
    """What was written is read by this process, by another at the same time, and after both."""
    runs = [run_of([1, 2, 3], 0, 2), run_of([1, 2, 3], 2)]
    assert [tier.write(run) for run in runs] == [True, True]
    hashes = chain_of(1, 2, 3)
    assert tier.read(hashes) == runs
    for _ in range(2):
        again = DiskTier.open(tmp_path / "store", None)
        assert again.read(hashes) == runs
        assert again.stats().faults == {}
        again.close()
        tier.close()


def test_files_are_for_their_owner_only(tier: DiskTier, tmp_path: Path) -> None:
    """Every file is 0600 and every folder 0700, whatever the umask allows."""
    previous = os.umask(0)
    try:
        tier.write(run_of([1, 2]))
        second = DiskTier.open(tmp_path / "second", None)
        second.write(run_of([1]))
        tier.maintain()
        paths = [*tmp_path.rglob("*")]
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}
        second.close()
    finally:
        os.umask(previous)
    wrong = {
        path.name: oct(modes[path.name])
        for path in paths
        if modes[path.name] != (0o700 if path.is_dir() else 0o600)
    }
    assert wrong == {}
    assert len(paths) > 10


def test_only_a_folder_of_our_own_is_kept_out_of_backups(tmp_path: Path) -> None:
    """A folder that was there before is not marked as a cache as a whole."""
    DiskTier.open(tmp_path / "new", None).close()
    (tmp_path / "old").mkdir()
    DiskTier.open(tmp_path / "old", None).close()
    assert (tmp_path / "new" / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28")
    assert not (tmp_path / "old" / "CACHEDIR.TAG").exists()


def test_a_run_that_is_stored_is_not_written_again(tier: DiskTier, tmp_path: Path) -> None:
    """Storing again what is there, all or part of it, writes nothing."""
    tier.write(run_of([1, 2, 3], with_state=[2]))
    before = [(path, path.stat().st_mtime_ns) for path in files_in(tmp_path / "store")]
    assert tier.write(run_of([1, 2, 3], with_state=[2]))
    assert tier.write(run_of([1, 2, 3], 1, 3))
    assert [(path, path.stat().st_mtime_ns) for path in files_in(tmp_path / "store")] == before
    assert tier.stats().num_runs_written == 1


def test_a_run_with_more_in_it_is_written_too(tier: DiskTier) -> None:
    """A block whose state was not stored before gains it from a later run."""
    tier.write(run_of([1, 2, 3]))
    tier.write(run_of([1, 2, 3], 1, 2, with_state=[1]))
    hashes = chain_of(1, 2, 3)
    assert tier.kinds(hashes) == [KV, KV | STATE, KV]
    wanted = [KV, KV | STATE]
    runs = tier.read(hashes[:2], wanted)
    assert names_read(runs) == [["0/kv/0", "0/kv/1", "1/kv/0", "1/kv/1"], ["0/state/1"]]
    assert all(map(is_right, runs))


def test_only_what_is_wanted_of_each_block_is_read(tier: DiskTier) -> None:
    """State is read of the block where a row resumes, and a run without anything wanted not."""
    tier.write(run_of([1, 2], 0, 2, with_state=[0, 1]))
    tier.write(run_of([1, 2, 3, 4], 2, 4, with_state=[2, 3]))
    hashes = chain_of(1, 2, 3, 4)
    runs = tier.read(hashes[:3], [KV, KV, KV | STATE])
    assert names_read(runs) == [
        ["0/kv/0", "0/kv/1", "1/kv/0", "1/kv/1"],
        ["0/kv/0", "0/kv/1", "0/state/1"],
    ]
    assert names_read(tier.read(hashes, [frozenset()] * 3 + [STATE])) == [["1/state/1"]]
    assert names_read(tier.read(hashes[:1], [frozenset({"window"})])) == []


def test_a_run_without_its_parent_is_refused(tier: DiskTier) -> None:
    """What nobody could ever find is not stored."""
    assert not tier.write(run_of([1, 2, 3], 1))
    assert tier.stats().faults == {"orphan": 1}
    assert tier.stats().num_bytes == 0


def test_a_run_that_contradicts_itself_is_refused(tier: DiskTier) -> None:
    """A defect of whoever stores costs the run, and is counted."""
    wrong = run_of([1, 2])
    wrong = StoredRun(
        namespace=OTHER, parent=None, hashes=wrong.hashes, tokens=wrong.tokens, tensors=()
    )
    assert not tier.write(wrong)
    assert tier.stats().faults == {"invalid": 1}


def test_runs_that_others_wrote_are_found(tier: DiskTier, tmp_path: Path) -> None:
    """Another process's runs are found at once, and files that were copied in after a rescan."""
    other = DiskTier.open(tmp_path / "store", None)
    other.write(run_of([1, 2]))
    assert tier.find(chain_of(1, 2)) == 2
    (tmp_path / "elsewhere").mkdir()
    source = DiskTier.open(tmp_path / "elsewhere" / "store", None)
    source.write(run_of([1, 2, 3], 0, 2))
    source.write(run_of([1, 2, 3], 2))
    for path in files_in(tmp_path / "elsewhere" / "store"):
        path.rename(tmp_path / "store" / path.relative_to(tmp_path / "elsewhere" / "store"))
    assert tier.find(chain_of(1, 2, 3)) == 2
    tier.rescan()
    assert tier.find(chain_of(1, 2, 3)) == 3
    assert tier.stats().faults == {}
    other.close()
    source.close()


def test_uses_are_counted_and_last(tier: DiskTier, tmp_path: Path) -> None:
    """Hits by reading and by touching survive a restart; looking up alone is no hit."""
    tier.write(run_of([1, 2]))
    tier.find(chain_of(1, 2))
    tier.read(chain_of(1, 2))
    tier.touch(chain_of(1, 2, 3))
    tier.close()
    again = DiskTier.open(tmp_path / "store", None)
    with again._catalog.changing() as index:
        (use,) = index.uses().values()
    assert use.num_hits == 2
    assert abs(use.last_used_ns / 1e9 - time.time()) < 60
    again.close()


def test_the_least_recently_used_leaf_goes_first(tmp_path: Path) -> None:
    """Under the cap prefixes stay, and of their continuations those that were used last."""
    size = stored_bytes(run_of([1, 2], 1))
    tier = DiskTier.open(tmp_path / "store", 4 * size)
    tier.write(run_of([1]))
    for last in (2, 3, 4):
        assert tier.write(run_of([1, last], 1))
    tier.touch(chain_of(1, 2))
    tier.maintain()
    assert tier.write(run_of([1, 5], 1))
    found = {last: tier.find(chain_of(1, last)) for last in (2, 3, 4, 5)}
    assert found == {2: 2, 3: 1, 4: 2, 5: 2}
    stats = tier.stats()
    assert (stats.num_evicted, stats.evicted_bytes, stats.faults) == (1, size, {})
    assert stats.num_bytes == sum(path.stat().st_size for path in files_in(tmp_path / "store"))
    tier.close()


def test_a_chain_is_evicted_from_its_end(tmp_path: Path) -> None:
    """Of runs that were used together the last goes first, so that a whole prefix is left."""
    tier = DiskTier.open(tmp_path / "store", None)
    blocks = list(range(10))
    for start in range(10):
        tier.write(run_of(blocks, start, start + 1))
    tier.touch(chain_of(*blocks))
    tier.maintain()
    tier.max_bytes = tier.stats().num_bytes // 2
    tier.evict_to_cap()
    assert tier.find(chain_of(*blocks)) == 5
    assert len(files_in(tmp_path / "store")) == 5
    tier.close()


def test_opening_with_a_smaller_cap_evicts(tmp_path: Path) -> None:
    """The cap holds for what earlier processes and other models stored, too."""
    tier = DiskTier.open(tmp_path / "store", None)
    for block in range(6):
        tier.write(run_of([block], namespace=(NAMESPACE, OTHER)[block % 2]))
    cap = tier.stats().num_bytes // 2
    tier.close()
    tier = DiskTier.open(tmp_path / "store", cap)
    assert 0 < tier.stats().num_bytes <= cap
    assert tier.find(chain_of(5, namespace=OTHER)) == 1
    assert tier.find(chain_of(0)) == 0
    tier.close()


def test_a_run_never_evicts_what_it_continues(tmp_path: Path) -> None:
    """Where only its own prefix could go for it, the new run is refused and nothing is lost."""
    size = stored_bytes(run_of([1, 2], 1))
    tier = DiskTier.open(tmp_path / "store", 2 * size)
    tier.write(run_of([1]))
    tier.write(run_of([1, 2], 1))
    assert not tier.write(run_of([1, 2, 3], 2))
    assert tier.find(chain_of(1, 2, 3)) == 2
    assert tier.stats().faults == {"no_room": 1}
    tier.max_bytes = size // 2
    assert not tier.write(run_of([7]))
    assert tier.stats().faults == {"no_room": 1, "too_large": 1}
    tier.close()


def test_removing_keeps_what_others_need(tier: DiskTier) -> None:
    """Runs are removed in any order, but none that a run which stays continues."""
    for stop in (1, 2, 3):
        tier.write(run_of([1, 2, 3], stop - 1, stop))
    tier.write(run_of([1, 9], 1))
    hashes = chain_of(1, 2, 3)
    names = [
        f"{NAMESPACE.digest.hex()[:32]}/{path.name}"
        for block_hash in hashes
        for path in files_in(tier.folder.path)
        if path.name.startswith(block_hash.hex())
    ]
    assert sorted(tier.remove(names)) == sorted(names[1:])
    assert (tier.find(hashes), tier.find(chain_of(1, 9))) == (1, 2)


def test_clearing_removes_a_namespace_or_all(tier: DiskTier, tmp_path: Path) -> None:
    """Everything of one model goes, or everything, and can be stored again at once."""
    for stop in (1, 2, 3):
        tier.write(run_of([1, 2, 3], stop - 1, stop))
    tier.write(run_of([1, 2], namespace=OTHER))
    assert tier.clear(NAMESPACE.digest)[0] == 3
    assert (tier.find(chain_of(1, 2, 3)), tier.find(chain_of(1, 2, namespace=OTHER))) == (0, 2)
    assert tier.write(run_of([1, 2, 3]))
    total = tier.stats().num_bytes
    assert tier.clear() == (2, total)
    assert files_in(tmp_path / "store") == []
    assert tier.clear() == (0, 0)
    assert tier.stats().faults == {}


def test_leftovers_of_killed_writers_are_removed(tier: DiskTier, tmp_path: Path) -> None:
    """An old temporary file goes when a store is opened; one that is being written stays."""
    tier.write(run_of([1]))
    folder = files_in(tmp_path / "store")[0].parent
    for name in (".tmp-old", ".tmp-new"):
        write_run(folder / name, run_of([2]))
    long_ago = time.time() - 3600
    os.utime(folder / ".tmp-old", (long_ago, long_ago))
    with tier.folder.staged(run_of([3])) as staged:
        os.utime(staged.temporary, (long_ago, long_ago))
        DiskTier.open(tmp_path / "store", None).close()
        found = {path.name for path in folder.glob(".tmp-*")}
        assert found == {".tmp-new", staged.temporary.name}
    assert {path.name for path in folder.glob(".tmp-*")} == {".tmp-new"}


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    """A path that can never be a store is told to whoever gave it."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(CacheError, match="cannot make the prefix store"):
            DiskTier.open(path, None)


def test_blocks_of_a_read_are_named(tier: DiskTier) -> None:
    """A run that was read hands out each block's hash with its tensors."""
    run = run_of([1, 2], with_state=[1])
    tier.write(run)
    (read,) = tier.read(chain_of(1, 2))
    assert [block_hash for block_hash, _ in iter_blocks(read)] == list(run.hashes)
    assert [tensor.kind for tensor in read.of_block(1)] == ["kv", "kv", "state"]
