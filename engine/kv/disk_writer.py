"""Write runs behind the step loop and read them beside it, so that it never waits for a disk."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import msgspec

from vllm_mlx.engine.kv.disk_format import StoredRun
from vllm_mlx.engine.kv.disk_tier import DiskTier, ReadPart

DEFAULT_QUEUE_BYTES = 1 << 30

#: How often uses are saved and the folder is looked at while nothing is written.
_MAINTENANCE_INTERVAL_S = 5.0
#: Threads that read, of a machine that has more processors than that.
_NUM_READERS = max(2, min(4, (os.cpu_count() or 2) // 2))
#: Runs of one chain that are read ahead of who takes them.
_RUNS_AHEAD = 4
#: How long `close` waits for the run that is being written.
_LAST_WRITE_S = 1.0

_LOG = logging.getLogger(__name__)


class WriterStats(msgspec.Struct, frozen=True, kw_only=True):
    """Count what waits to be written and what was dropped instead."""

    num_queued: int = 0
    queued_bytes: int = 0
    num_dropped: int = 0
    dropped_bytes: int = 0
    #: Runs that the tier did not store, such as those whose parent somebody has removed.
    num_refused: int = 0


class DiskWriter:
    """Own a thread that writes submitted runs in order, and the queue before it.

    A full queue drops what is submitted, and counts it, rather than let the step loop wait: a
    prefix that was not stored costs a later request time, and a stopped loop costs it to all. Runs
    that continue a dropped one are refused by the tier. `start` before use, `close` after.
    """

    def __init__(self, tier: DiskTier, max_queued_bytes: int = DEFAULT_QUEUE_BYTES) -> None:
        self._tier = tier
        self._max_queued_bytes = max_queued_bytes
        self._queue: deque[StoredRun] = deque()
        #: What waits and what is being written.
        self._num_bytes = 0
        self._num_pending = 0
        self._dropped = (0, 0)
        self._num_refused = 0
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="prefix-writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, run: StoredRun, *, timeout_s: float = 0.0) -> bool:
        """Queue a run; return False if it was dropped.

        Waits at most `timeout_s` for room. The bytes of its tensors must not change afterwards. A
        run that alone is larger than the queue is taken when nothing else waits.
        """
        num_bytes = run.num_bytes
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: self._is_closing or self._fits(num_bytes), timeout_s
            )
            if has_room and not self._is_closing:
                self._queue.append(run)
                self._num_bytes += num_bytes
                self._num_pending += 1
                self._changed.notify_all()
                return True
        self._drop([num_bytes])
        return False

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was submitted is written; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_pending, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Write what waits, for at most `timeout_s`, and end the thread; return whether all is.

        What is left is dropped and counted; a disk that hangs keeps the thread, and nobody else.
        The tier stays open.
        """
        is_written = self.flush(timeout_s)
        with self._changed:
            self._is_closing = True
            left = [run.num_bytes for run in self._queue]
            self._queue.clear()
            self._num_pending -= len(left)
            self._num_bytes -= sum(left)
            self._changed.notify_all()
        if left:
            self._drop(left)
        if self._thread.is_alive():
            self._thread.join(max(timeout_s, _LAST_WRITE_S))
        return is_written

    def stats(self) -> WriterStats:
        """Return the counters."""
        with self._changed:
            return WriterStats(
                num_queued=self._num_pending,
                queued_bytes=self._num_bytes,
                num_dropped=self._dropped[0],
                dropped_bytes=self._dropped[1],
                num_refused=self._num_refused,
            )

    def _fits(self, num_bytes: int) -> bool:
        return not self._num_pending or self._num_bytes + num_bytes <= self._max_queued_bytes

    def _drop(self, sizes: Sequence[int]) -> None:
        with self._changed:
            self._dropped = (self._dropped[0] + len(sizes), self._dropped[1] + sum(sizes))
        for size in sizes:
            self._tier.faults.count("queue_full", f"a run of {size} bytes was not stored")

    def _work(self) -> None:
        maintained_at = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._queue or self._is_closing, _MAINTENANCE_INTERVAL_S
                )
                run = self._queue.popleft() if self._queue else None
                if run is None and self._is_closing:
                    return
            try:
                if run is not None and not self._tier.write(run):
                    self._num_refused += 1
                if time.monotonic() - maintained_at >= _MAINTENANCE_INTERVAL_S:
                    self._tier.maintain()
                    maintained_at = time.monotonic()
            except Exception as error:  # noqa: BLE001
                # The tier lets no fault of the disk out, so this is a defect of ours; it costs the
                # run and must not cost all later ones.
                _LOG.exception("the prefix store failed to write")
                self._tier.faults.count("invalid", error)
            finally:
                if run is not None:
                    with self._changed:
                        self._num_pending -= 1
                        self._num_bytes -= run.num_bytes
                        self._changed.notify_all()


class RunStream:
    """Hand over one chain's runs, in order, as they are read; owned by the thread that takes them.

    It ends before a run that cannot be read. What was taken counts as used when it has ended.
    """

    def __init__(
        self,
        tier: DiskTier,
        pool: Executor,
        hashes: tuple[bytes, ...],
        wanted: Sequence[frozenset[str]] | None,
        max_ahead: int,
    ) -> None:
        self._tier = tier
        self._pool = pool
        self._hashes = hashes
        self._max_ahead = max_ahead
        self._plan: Future[list[ReadPart]] | None = pool.submit(tier.plan, hashes, wanted)
        self._rest: deque[ReadPart] = deque()
        self._reading: deque[Future[StoredRun | None]] = deque()
        self._taken: set[bytes] = set()

    @property
    def is_done(self) -> bool:
        """Say whether no further run will come."""
        self._advance()
        return self._plan is None and not self._reading and not self._rest

    def next_run(self) -> StoredRun | None:
        """Return the next run; None while it is being read, and after the last."""
        self._advance()
        if not self._reading or not self._reading[0].done():
            return None
        future = self._reading.popleft()
        run = None if future.cancelled() else future.result()
        if run is None:
            self.cancel()
            return None
        self._taken.update(run.hashes)
        self._advance()
        return run

    def cancel(self) -> None:
        """Read nothing more."""
        for future in self._reading:
            future.cancel()
        self._plan = None
        self._rest.clear()
        self._reading.clear()
        self._advance()

    def _advance(self) -> None:
        """Begin to read what may be read ahead."""
        if self._plan is not None and self._plan.done():
            if not self._plan.cancelled():
                self._rest.extend(self._plan.result())
            self._plan = None
        while self._rest and len(self._reading) < self._max_ahead:
            self._reading.append(self._pool.submit(self._tier.read_part, self._rest.popleft()))
        if self._plan is None and not self._reading and self._taken:
            self._tier.touch([name for name in self._hashes if name in self._taken])
            self._taken.clear()


class DiskReader:
    """Own threads that read runs, and hand them over as futures; `close` after use.

    Most of a thread's time goes into checksums, so that more of them read faster.
    """

    def __init__(self, tier: DiskTier, num_threads: int = _NUM_READERS) -> None:
        self._tier = tier
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="prefix-reader")

    def submit(
        self, hashes: Sequence[bytes], wanted: Sequence[frozenset[str]] | None = None
    ) -> Future[list[StoredRun]]:
        """Read a chain as `DiskTier.read` does; the future fails only by a defect.

        Nothing is read of one that is cancelled before its turn comes.
        """
        return self._pool.submit(self._tier.read, tuple(hashes), wanted)

    def stream(
        self,
        hashes: Sequence[bytes],
        wanted: Sequence[frozenset[str]] | None = None,
        *,
        max_ahead: int = _RUNS_AHEAD,
    ) -> RunStream:
        """Begin to read a chain as `DiskTier.read` does, handing its runs over one by one.

        At most `max_ahead` runs are in memory that were not taken yet, however long the chain is.
        """
        return RunStream(self._tier, self._pool, tuple(hashes), wanted, max_ahead)

    def close(self) -> None:
        """Cancel what has not begun and wait for what has; streams must not be used any more."""
        self._pool.shutdown(cancel_futures=True)
