"""Writing behind and reading beside: order, bounds, drops, flush and close."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runs import chain_of, files_in, is_right, run_of

from vllm_mlx.engine.kv.disk_format import StoredRun
from vllm_mlx.engine.kv.disk_tier import DiskTier, ReadPart
from vllm_mlx.engine.kv.disk_writer import DiskReader, DiskWriter, RunStream


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """Give an empty store."""
    opened = DiskTier.open(tmp_path / "store", None)
    yield opened
    opened.close()


@pytest.fixture
def gate(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold every write back until the event is set, as a slow disk does."""
    event = threading.Event()
    write = tier.write

    def slow(run: StoredRun) -> bool:
        assert event.wait(10)
        return write(run)

    monkeypatch.setattr(tier, "write", slow)
    return event


def started(tier: DiskTier, max_queued_bytes: int = 1 << 20) -> DiskWriter:
    """Return a running writer."""
    writer = DiskWriter(tier, max_queued_bytes)
    writer.start()
    return writer


def test_what_is_submitted_is_written_in_order(tier: DiskTier) -> None:
    """Runs of a chain are stored parents first, so that none is refused."""
    writer = started(tier)
    blocks = list(range(20))
    for start in range(20):
        assert writer.submit(run_of(blocks, start, start + 1))
    assert writer.flush(10)
    assert tier.find(chain_of(*blocks)) == 20
    assert writer.stats().num_queued == 0
    assert writer.close(10)
    assert tier.stats().faults == {}


def test_a_full_queue_drops_and_counts(tier: DiskTier, gate: threading.Event) -> None:
    """Submitting never waits unless it is asked to; what finds no room is counted."""
    size = run_of([1]).num_bytes
    writer = started(tier, 2 * size)
    began = time.monotonic()
    taken = [writer.submit(run_of([block])) for block in range(5)]
    assert time.monotonic() - began < 5
    assert taken == [True, True, False, False, False]
    stats = writer.stats()
    assert (stats.num_queued, stats.queued_bytes) == (2, 2 * size)
    assert (stats.num_dropped, stats.dropped_bytes) == (3, 3 * size)
    gate.set()
    assert writer.flush(10)
    assert tier.stats().faults == {"queue_full": 3}
    assert [tier.find(chain_of(block)) for block in range(5)] == [1, 1, 0, 0, 0]
    writer.close(10)


def test_submitting_can_wait_for_room(tier: DiskTier, gate: threading.Event) -> None:
    """Whoever must lose nothing waits until the disk has caught up."""
    writer = started(tier, run_of([1]).num_bytes)
    assert writer.submit(run_of([1]))
    assert not writer.submit(run_of([2]), timeout_s=0.05)
    threading.Timer(0.1, gate.set).start()
    assert writer.submit(run_of([2]), timeout_s=10)
    assert writer.close(10)
    assert [tier.find(chain_of(block)) for block in (1, 2)] == [1, 1]


def test_a_run_larger_than_the_queue_is_taken_alone(tier: DiskTier) -> None:
    """A bound smaller than one run does not keep everything out."""
    writer = started(tier, 1)
    assert writer.submit(run_of([1], size=4096))
    assert writer.close(10)
    assert tier.find(chain_of(1)) == 1


def test_flush_and_close_have_limits(tier: DiskTier, gate: threading.Event) -> None:
    """A disk that hangs does not hang whoever waits; what was not written is counted."""
    writer = started(tier)
    for block in range(3):
        writer.submit(run_of([block]))
    assert not writer.flush(0.05)
    threading.Timer(0.2, gate.set).start()
    assert not writer.close(0.05)
    assert writer.stats().num_dropped == 2
    assert [tier.find(chain_of(block)) for block in range(3)] == [1, 0, 0]
    assert not writer.submit(run_of([4]))
    assert tier.stats().faults == {"queue_full": 3}


def test_a_defect_costs_one_run(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody expected is counted, and the thread goes on."""
    writer = started(tier)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "write", None)
        writer.submit(run_of([1]))
        assert writer.flush(10)
    writer.submit(run_of([2]))
    writer.submit(run_of([3, 4], 1))
    assert writer.close(10)
    assert [tier.find(chain_of(block)) for block in (1, 2)] == [0, 1]
    assert tier.stats().faults == {"invalid": 1, "orphan": 1}
    assert writer.stats().num_refused == 1


def test_uses_are_saved_while_nothing_is_written(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle writer looks after the store, so that another process sees uses soon."""
    monkeypatch.setattr("vllm_mlx.engine.kv.disk_writer._MAINTENANCE_INTERVAL_S", 0.02)
    maintained = threading.Event()
    monkeypatch.setattr(tier, "maintain", maintained.set)
    writer = started(tier)
    assert maintained.wait(10)
    writer.close(10)


def test_reading_is_done_by_other_threads(tier: DiskTier) -> None:
    """A future gives what the tier would give; one of an unknown chain gives nothing."""
    for start in range(0, 8, 2):
        tier.write(run_of(range(8), start, start + 2))
    reader = DiskReader(tier)
    futures = [reader.submit(chain_of(*range(8))) for _ in range(10)]
    nothing = reader.submit(chain_of(99), [frozenset({"kv"})])
    for future in futures:
        runs = future.result(10)
        assert sum(len(run.hashes) for run in runs) == 8
        assert all(map(is_right, runs))
    assert nothing.result(10) == []
    reader.close()


def taken_from(stream: RunStream) -> list[StoredRun]:
    """Take every run of a stream."""
    runs = []
    until = time.monotonic() + 10
    while not stream.is_done:
        assert time.monotonic() < until
        run = stream.next_run()
        if run is not None:
            runs.append(run)
    assert stream.next_run() is None
    return runs


def test_a_stream_hands_runs_over_in_order(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chain comes run by run, few of them ahead, and counts as used once."""
    blocks = list(range(40))
    for start in range(0, 40, 2):
        tier.write(run_of(blocks, start, start + 2))
    read: list[str] = []
    read_part = tier.read_part

    def noted(part: ReadPart) -> StoredRun | None:
        read.append(part.name)
        return read_part(part)

    monkeypatch.setattr(tier, "read_part", noted)
    reader = DiskReader(tier)
    stream = reader.stream(chain_of(*blocks), [frozenset({"kv"})] * 40, max_ahead=3)
    while not read:
        assert not stream.is_done
    time.sleep(0.1)
    assert len(read) == 3
    runs = taken_from(stream)
    assert [name for run in runs for name in run.hashes] == chain_of(*blocks)
    assert all(map(is_right, runs))
    assert taken_from(reader.stream(chain_of(99))) == []
    reader.close()
    tier.maintain()
    with tier._catalog.changing() as index:
        assert {use.num_hits for use in index.uses().values()} == {1}


def test_a_stream_ends_before_what_cannot_be_read(tier: DiskTier) -> None:
    """What comes before a missing file is handed over, and nothing after it."""
    blocks = list(range(10))
    for start in range(10):
        tier.write(run_of(blocks, start, start + 1))
    end = chain_of(*blocks[:6])[-1].hex()
    (path,) = (p for p in files_in(tier.folder.path) if p.name.startswith(end))
    path.unlink()
    reader = DiskReader(tier)
    assert len(taken_from(reader.stream(chain_of(*blocks)))) == 5
    cancelled = reader.stream(chain_of(*blocks))
    cancelled.cancel()
    assert taken_from(cancelled) == []
    reader.close()
