"""The SSD tier when disk, files, folder or index fail: a miss, a counted fault, and no error."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from support.runs import NAMESPACE, chain_of, files_in, is_right, run_of, write_run

from vllm_mlx.engine.kv import disk_format
from vllm_mlx.engine.kv.disk_faults import reason_of
from vllm_mlx.engine.kv.disk_folder import StoreFolder
from vllm_mlx.engine.kv.disk_tier import DiskTier

#: A user without rights, for tests that run as root, whom no mode keeps out.
NOBODY = 65534


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Give the path of a store that holds the chains 1, 2, 3 and 1, 9."""
    path = tmp_path / "store"
    tier = DiskTier.open(path, None)
    for run in (run_of([1]), run_of([1, 2], 1), run_of([1, 2, 3], 2), run_of([1, 9], 1)):
        assert tier.write(run)
    tier.close()
    return path


@pytest.fixture
def tier(store: Path) -> Iterator[DiskTier]:
    """Give that store, opened."""
    opened = DiskTier.open(store, None)
    yield opened
    opened.close()


def file_of(store: Path, block_hash: bytes) -> Path:
    """Return the file whose last block has a given hash."""
    (path,) = (p for p in files_in(store) if p.name.startswith(block_hash.hex()))
    return path


def flip(path: Path, position: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 16
    path.write_bytes(data)


def cut(path: Path) -> None:
    """Cut a file off in its middle."""
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [cut, lambda path: flip(path, -1), lambda path: flip(path, 40)])
def test_a_damaged_file_is_a_miss_and_set_aside(
    tier: DiskTier, store: Path, damage: Callable[[Path], None]
) -> None:
    """What comes before the damage is served; the file goes out of the way, and is stored anew."""
    hashes = chain_of(1, 2, 3)
    path = file_of(store, hashes[1])
    damage(path)
    assert tier.find(hashes) == 3
    assert [run.hashes for run in tier.read(hashes)] == [(hashes[0],)]
    assert tier.stats().faults == {"damaged": 1}
    assert not path.exists()
    assert [file.name for file in (store / "quarantine").iterdir()] == [path.name]
    assert tier.find(hashes) == 1
    assert tier.write(run_of([1, 2], 1))
    assert tier.find(hashes) == 3
    assert all(map(is_right, tier.read(hashes)))


def test_damage_is_found_when_a_store_is_opened(store: Path) -> None:
    """A file whose header is damaged while nobody runs is set aside and never found."""
    hashes = chain_of(1, 2, 3)
    cut(file_of(store, hashes[1]))
    tier = DiskTier.open(store, None)
    assert (tier.find(hashes), tier.stats().faults) == (1, {"damaged": 1})
    assert len(list((store / "quarantine").iterdir())) == 1
    tier.close()


def test_the_quarantine_is_bounded(tmp_path: Path) -> None:
    """Of many damaged files the newest few are kept for whoever wants to look at them."""
    tier = DiskTier.open(tmp_path / "store", None)
    for block in range(20):
        tier.write(run_of([block]))
    for path in files_in(tmp_path / "store"):
        flip(path, -1)
    assert [tier.read(chain_of(block)) for block in range(20)] == [[]] * 20
    assert len(list((tmp_path / "store" / "quarantine").iterdir())) == 8
    assert tier.stats().faults == {"damaged": 20}
    assert tier.stats().num_runs == 0
    tier.close()


def test_a_file_of_another_version_is_left_alone(store: Path) -> None:
    """It is a miss, stays where it is, counts under the cap, and is the first to go."""
    hashes = chain_of(1, 2, 3)
    path = file_of(store, hashes[2])
    head = bytearray(path.read_bytes()[:28])
    head[8:12] = (77).to_bytes(4, "little")
    path.write_bytes(bytes(head) + zlib.crc32(head).to_bytes(4, "little") + bytes(1000))
    tier = DiskTier.open(store, None)
    assert (tier.find(hashes), tier.stats().faults) == (2, {"version": 1})
    stats = tier.stats()
    assert stats.num_runs == 4
    assert stats.num_bytes == sum(file.stat().st_size for file in files_in(store))
    tier.max_bytes = stats.num_bytes - 1
    tier.evict_to_cap()
    assert not path.exists()
    assert tier.stats().num_evicted == 1
    tier.close()


def test_a_file_of_another_version_under_a_running_store_is_a_miss(
    tier: DiskTier, store: Path
) -> None:
    """The same holds when the file changes after it was indexed."""
    hashes = chain_of(1, 2)
    path = file_of(store, hashes[1])
    head = bytearray(path.read_bytes()[:28])
    head[8:12] = (77).to_bytes(4, "little")
    path.write_bytes(bytes(head) + zlib.crc32(head).to_bytes(4, "little"))
    assert len(tier.read(hashes)) == 1
    assert tier.stats().faults == {"version": 1}
    assert path.exists()


def test_a_file_that_was_removed_is_a_miss(tier: DiskTier, store: Path) -> None:
    """A file that somebody removed is forgotten when it is missed, and can be stored again."""
    hashes = chain_of(1, 2, 3)
    file_of(store, hashes[2]).unlink()
    assert len(tier.read(hashes)) == 2
    assert (tier.find(hashes), tier.stats().faults) == (2, {"missing": 1})
    file_of(store, hashes[1]).unlink()
    assert tier.write(run_of([1, 2], 1))
    assert len(tier.read(hashes)) == 2


def test_a_file_with_other_blocks_than_the_index_says_is_a_miss(
    tier: DiskTier, store: Path
) -> None:
    """KV of other tokens is never handed out, even under a name that the index trusts."""
    hashes = chain_of(1, 2)
    write_run(file_of(store, hashes[1]), run_of([1, 9], 1))
    assert [run.hashes for run in tier.read(hashes)] == [(hashes[0],)]
    assert tier.stats().faults == {"index": 1}
    tier.rescan()
    assert tier.stats().faults == {"index": 1, "damaged": 1}
    assert tier.find(hashes) == 1


def test_an_error_of_the_disk_is_a_miss(
    tier: DiskTier, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that the disk cannot read is set aside as a damaged one is."""
    path = file_of(store, chain_of(1)[0])

    def fail(*args: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(disk_format.os, "pread", fail)
        assert tier.read(chain_of(1)) == []
    assert tier.stats().faults == {"io": 1}
    assert not path.exists()


def test_the_folder_is_deleted_under_a_running_store(tier: DiskTier, store: Path) -> None:
    """Everything is a miss then, and the next write makes the folder anew."""
    hashes = chain_of(1, 2, 3)
    shutil.rmtree(store)
    assert tier.find(hashes) == 0
    assert tier.read(hashes) == []
    tier.touch(hashes)
    tier.maintain()
    assert not store.exists()
    assert tier.write(run_of([1, 2]))
    assert tier.find(hashes) == 2
    assert len(tier.read(hashes)) == 1
    assert tier.stats().num_runs == 1
    assert tier.stats().faults == {}


def test_only_the_data_is_deleted_under_a_running_store(tier: DiskTier, store: Path) -> None:
    """Files that are gone while the index is there are misses, and writing goes on."""
    hashes = chain_of(1, 2, 3)
    shutil.rmtree(store / "runs")
    assert tier.read(hashes) == []
    assert tier.write(run_of([1]))
    assert tier.write(run_of([1, 2], 1))
    assert len(tier.read(hashes[:2])) == 2
    tier.rescan()
    assert tier.find(hashes) == 2
    assert tier.stats().num_runs == 2


@pytest.mark.parametrize("is_running", [True, False])
def test_the_index_is_deleted(store: Path, is_running: bool) -> None:
    """It is made anew from the files, at the next maintenance, write or start."""
    hashes = chain_of(1, 2, 3)
    tier = DiskTier.open(store, None)
    if not is_running:
        tier.close()
    for path in store.glob("index*"):
        path.unlink()
    if is_running:
        assert tier.find(hashes) == 0
        tier.maintain()
    else:
        tier = DiskTier.open(store, None)
    assert tier.find(hashes) == 3
    assert tier.find(chain_of(1, 9)) == 2
    assert tier.stats().faults == {}
    tier.close()


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("garbage", [b"", b"garbage " * 2000])
def test_the_index_is_damaged(store: Path, is_running: bool, garbage: bytes) -> None:
    """It is made anew, by a running store as soon as it notices, and no caller hears of it."""
    hashes = chain_of(1, 2, 3)
    tier = DiskTier.open(store, None)
    if not is_running:
        tier.close()
    # Not the third file: it is shared memory, which SQLite makes anew when the first one opens it.
    for path in (store / "index-1.sqlite3", store / "index-1.sqlite3-wal"):
        if is_running:
            # In place: the store has the file open.
            with path.open("r+b") as file:
                file.truncate(0)
                file.write(garbage)
        else:
            path.write_bytes(garbage)
    if is_running:
        for _ in range(3):
            tier.find(hashes)
            tier.write(run_of([5]))
            tier.maintain()
        assert tier.find(chain_of(5)) == 1
    else:
        tier = DiskTier.open(store, None)
    assert tier.find(hashes) == 3
    assert all(map(is_right, tier.read(hashes)))
    assert set(tier.stats().faults) <= {"index"}
    tier.close()


def test_an_index_of_another_version_is_made_anew(store: Path) -> None:
    """What another version of the program left in the index's place is not trusted."""
    connection = sqlite3.connect(store / "index-1.sqlite3")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    tier = DiskTier.open(store, None)
    assert tier.find(chain_of(1, 2, 3)) == 3
    assert tier.stats().faults == {"index": 1}
    tier.close()


def test_an_index_that_is_held_too_long_is_a_miss(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that holds the index costs a write that is counted, and no look-up."""
    monkeypatch.setattr("vllm_mlx.engine.kv.disk_index.BUSY_TIMEOUT_S", 0.05)
    tier = DiskTier.open(store, None)
    other = sqlite3.connect(store / "index-1.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert not tier.write(run_of([5]))
    assert tier.find(chain_of(1, 2, 3)) == 3
    assert len(tier.read(chain_of(1, 2, 3))) == 3
    other.execute("ROLLBACK")
    other.close()
    assert tier.write(run_of([5]))
    assert tier.stats().faults == {"busy": 1}
    tier.close()


@contextmanager
def as_nobody(store: Path) -> Iterator[None]:
    """Take the right to write the store away, for root as well."""
    paths = [store, *store.rglob("*")]
    for path in paths:
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
        path.chmod(0o500 if path.is_dir() else 0o400)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path in [store, *store.rglob("*")]:
            path.chmod(0o700 if path.is_dir() else 0o600)


@pytest.fixture
def open_to_all(store: Path) -> Iterator[Path]:
    """Give the store in a place that every user of the machine can get to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(shutil.move(store, folder))


def test_a_read_only_folder_is_served_from(open_to_all: Path) -> None:
    """What is there is found and read; what cannot be stored is counted."""
    hashes = chain_of(1, 2, 3)
    with as_nobody(open_to_all):
        tier = DiskTier.open(open_to_all, None)
        assert tier.find(hashes) == 3
        assert all(map(is_right, tier.read(hashes)))
        assert not tier.write(run_of([5]))
        tier.maintain()
        tier.evict_to_cap()
        stats = tier.stats()
        tier.close()
    assert stats.is_read_only
    assert set(stats.faults) == {"read_only"}


def test_damage_in_a_read_only_folder_is_met_once(open_to_all: Path) -> None:
    """A damaged file that cannot be moved is a miss from then on."""
    hashes = chain_of(1, 2, 3)
    flip(file_of(open_to_all, hashes[1]), -1)
    with as_nobody(open_to_all):
        tier = DiskTier.open(open_to_all, None)
        assert [len(tier.read(hashes)) for _ in range(3)] == [1, 1, 1]
        assert tier.stats().faults["damaged"] == 1
        tier.close()


def test_a_folder_becomes_read_only_under_a_running_store(open_to_all: Path) -> None:
    """Reading goes on, writing is counted, and goes on when the folder is writable again."""
    hashes = chain_of(1, 2, 3)
    tier = DiskTier.open(open_to_all, None)
    with as_nobody(open_to_all):
        assert not tier.write(run_of([5]))
        assert len(tier.read(hashes)) == 3
        tier.maintain()
    assert tier.stats().faults.keys() == {"read_only"}
    assert tier.write(run_of([5]))
    assert tier.find(chain_of(5)) == 1
    tier.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], AbstractContextManager[None]]]]:
    """Give a folder on a disk of half a MiB, and a context in which it is that small.

    Where nothing may be mounted the system's limit on the size of files stands in for it.
    """
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)]
    is_mounted = (
        shutil.which("mount") is not None
        and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    )

    @contextmanager
    def limited() -> Iterator[None]:
        if is_mounted:
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    yield path / "store", limited
    if is_mounted:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_counted(
    small_disk: tuple[Path, Callable[[], AbstractContextManager[None]]],
) -> None:
    """Runs that do not fit are not stored, nothing half-written stays, and reading goes on."""
    path, limited = small_disk
    tier = DiskTier.open(path, None)
    hashes = chain_of(1, 2)
    assert tier.write(run_of([1, 2], size=1000))
    with limited():
        done = [tier.write(run_of([block], size=100_000)) for block in range(10, 20)]
        assert not all(done)
        assert all(map(is_right, tier.read(hashes)))
        tier.maintain()
    assert tier.stats().faults.keys() <= {"full", "index"}
    assert tier.stats().faults["full"] >= 1
    assert list(path.rglob(".tmp-*")) == []
    for file in files_in(path)[1:]:
        file.unlink()
    tier.maintain()
    tier.rescan()
    assert tier.write(run_of([7], size=10_000))
    assert tier.find(chain_of(7)) == 1
    tier.close()


def test_an_error_while_writing_leaves_nothing_behind(
    tier: DiskTier, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call fails, the run is not found and its file is not there."""
    before = [path.name for path in files_in(store)]

    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for target in ("os.fsync", "os.write", "pathlib.Path.rename", "fcntl.flock"):
        with monkeypatch.context() as patch:
            patch.setattr(target, fail)
            assert not tier.write(run_of([5]))
        assert tier.find(chain_of(5)) == 0
    assert [path.name for path in files_in(store)] == before
    assert list(store.rglob(".tmp-*")) == []
    assert tier.stats().faults == {"full": 4}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EDQUOT, ""), "full"),
        (OSError(errno.EROFS, ""), "read_only"),
        (OSError(errno.EIO, ""), "io"),
        (FileNotFoundError(errno.ENOENT, ""), "missing"),
        (sqlite3.DatabaseError("malformed"), "index"),
    ],
)
def test_errors_have_reasons(error: OSError | sqlite3.Error, reason: str) -> None:
    """Each error is counted under what a person would look for."""
    assert reason_of(error) == reason


def test_each_reason_is_logged_once(
    tier: DiskTier, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says what happened first, and the counters how often."""
    for _ in range(5):
        tier.write(run_of([7, 8], 1))
    assert tier.stats().faults == {"orphan": 5}
    assert [record.message.split(": ")[1] for record in caplog.records] == ["orphan"]


def test_a_file_written_again_is_not_set_aside(store: Path) -> None:
    """A process that saw damage does not take away what another has put in its place."""
    folder = StoreFolder(store)
    path = file_of(store, chain_of(1)[0])
    old_inode = path.stat().st_ino
    write_run(store / "new", run_of([1]))
    (store / "new").rename(path)
    folder.set_aside(f"{NAMESPACE.digest.hex()[:32]}/{path.name}", old_inode)
    assert path.exists()


def test_closing_twice_and_using_a_closed_store(tier: DiskTier) -> None:
    """A closed store finds and stores nothing, and says nothing."""
    tier.close()
    assert tier.find(chain_of(1)) == 0
    assert tier.read(chain_of(1)) == []
    assert not tier.write(run_of([5]))
    tier.maintain()
    tier.evict_to_cap()
    tier.close()
    assert tier.stats().faults == {}
