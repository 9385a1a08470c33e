"""Move blocks between the prefix tree in RAM and the tier on SSD, beside the step loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from vllm_mlx.engine.core.stats import DiskPrefixStats
from vllm_mlx.engine.kv.block_codec import Block
from vllm_mlx.engine.kv.block_hash import Namespace
from vllm_mlx.engine.kv.block_transfer import from_run, to_run
from vllm_mlx.engine.kv.disk_format import MAX_RUN_BLOCKS, StoredRun
from vllm_mlx.engine.kv.disk_tier import DiskTier
from vllm_mlx.engine.kv.disk_writer import DiskReader, DiskWriter, RunStream
from vllm_mlx.engine.kv.prefix_tree import Node
from vllm_mlx.engine.kv.restore_cost import RestoreCost

logger = logging.getLogger(__name__)

#: A prefix of this many tokens is worth storing at its first use; a shorter one at its second.
HOT_TOKENS = 1024
#: Runs that wait to be written before an idle engine hands over more.
_RUNS_BEHIND = 4
#: How long a removal waits for what was handed over before it.
_FLUSH_TIMEOUT_S = 5.0


class Spill:
    """Own the SSD tier of one engine: what is stored of it, its writer and its reader.

    Host copies are made on the engine thread, files are written and read on threads of their own.
    """

    def __init__(
        self,
        namespace: Namespace,
        tier: DiskTier,
        writer: DiskWriter,
        reader: DiskReader,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespace = namespace
        self._tier = tier
        self._writer = writer
        self._reader = reader
        self._clock = clock
        #: What this process has stored or found stored, by block.
        self._stored: dict[bytes, frozenset[str]] = {}
        self._num_orphans = 0
        self._cost = RestoreCost()
        self._num_spilled = 0
        self._num_restored = 0
        self._num_declined = 0

    def kinds(self, hashes: Sequence[bytes]) -> list[frozenset[str]]:
        """Return what the tier has of each block of the longest stored prefix of a chain."""
        return self._tier.kinds(hashes)

    @property
    def is_behind(self) -> bool:
        """Say whether enough waits to be written; what can wait should not be added to it."""
        return self._writer.stats().num_queued >= _RUNS_BEHIND

    def is_stored(self, node: Node[Block]) -> bool:
        """Say whether the tier has all parts of a block, as far as this process knows."""
        return node.payload.kinds <= self._stored.get(node.hash, frozenset())

    def is_hot(self, node: Node[Block]) -> bool:
        """Say whether a block is worth storing: used twice, or part of a long prefix."""
        return node.num_hits > 0 or node.depth * self._namespace.block_size >= HOT_TOKENS

    def store(self, node: Node[Block], *, max_runs: int | None = None) -> bool:
        """Submit a block and what comes before it, as far as that is not stored yet.

        Returns whether more of the chain is left, which is so only beyond `max_runs`.
        """
        self._learn_removals()
        chain = [step for step in ancestry(node) if not self.is_stored(step)]
        runs = consecutive_runs(chain)
        for run in runs if max_runs is None else runs[:max_runs]:
            parent = run[0].parent
            stored = to_run(
                self._namespace,
                parent.hash if parent is not None else None,
                [step.hash for step in run],
                [step.payload for step in run],
            )
            if not self._writer.submit(stored):
                return False
            self._num_spilled += len(run)
            for step in run:
                self._stored[step.hash] = step.payload.kinds
        return max_runs is not None and len(runs) > max_runs

    def begin_restore(self, hashes: Sequence[bytes], wanted: Sequence[frozenset[str]]) -> RunStream:
        """Read a chain's blocks, of each the kinds that are wanted."""
        return self._reader.stream(hashes, wanted)

    def load(self, run: StoredRun) -> list[tuple[bytes, Block]]:
        """Copy a run that was read to the device."""
        found = from_run(run)
        self._num_restored += len(found)
        for block_hash, block in found:
            self._stored[block_hash] = self._stored.get(block_hash, frozenset()) | block.kinds
        return found

    def computed(self, start: int, num_tokens: int, seconds: float) -> None:
        """Learn how long computing prompt tokens takes, everything else that runs included."""
        self._cost.computed(start, num_tokens, seconds)

    def restored(self, num_bytes: int, seconds: float) -> None:
        """Learn how long blocks took from disk to the device, the same included."""
        self._cost.restored(num_bytes, seconds)

    def is_worthwhile(self, start: int, num_tokens: int, num_bytes: int) -> bool:
        """Say whether reading tokens from `start` on is predicted to be faster than computing."""
        is_faster = self._cost.is_worthwhile(start, num_tokens, num_bytes)
        self._num_declined += not is_faster
        return is_faster

    def forget_stored(self) -> None:
        """Forget what is stored: somebody else may have removed it."""
        self._stored.clear()

    def clear(self) -> Future[int]:
        """Remove what the tier has of this model, on a thread; the future counts the files.

        What was handed over before is written first. A fault of the disk leaves files, and counts.
        """
        done: Future[int] = Future()

        def remove() -> None:
            try:
                self._writer.flush(_FLUSH_TIMEOUT_S)
                num_runs, _ = self._tier.clear(self._namespace.digest)
                self.forget_stored()
                done.set_result(num_runs)
            except Exception as error:  # noqa: BLE001 - whoever waits for it is told
                done.set_exception(error)

        threading.Thread(target=remove, name="prefix-remover", daemon=True).start()
        return done

    def _learn_removals(self) -> None:
        """Forget what is stored if the tier missed what a run continues: it was removed since."""
        num_orphans = self._tier.faults.counts().get("orphan", 0)
        if num_orphans != self._num_orphans:
            self._num_orphans = num_orphans
            self.forget_stored()

    def stats(self) -> DiskPrefixStats:
        """Return the counters of this engine and the totals of the folder."""
        tier, writer = self._tier.stats(), self._writer.stats()
        return DiskPrefixStats(
            num_runs=tier.num_runs,
            num_bytes=tier.num_bytes,
            max_bytes=tier.max_bytes,
            num_spilled=self._num_spilled,
            num_restored=self._num_restored,
            num_declined=self._num_declined,
            written_bytes=tier.written_bytes,
            read_bytes=tier.read_bytes,
            read_s=tier.read_s,
            num_evicted=tier.num_evicted,
            num_queued=writer.num_queued,
            num_dropped=writer.num_dropped,
            faults=tier.faults,
        )

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything submitted is on disk; return whether it is."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what waits, for at most `timeout_s`, and let go of the folder."""
        self._writer.close(timeout_s)
        self._reader.close()
        self._tier.close()


def open_spill(namespace: Namespace, folder: Path, *, max_bytes: int | None) -> Spill:
    """Open the SSD tier in `folder`, and start its threads; raises CacheError if it is unusable."""
    tier = DiskTier.open(folder, max_bytes)
    writer = DiskWriter(tier)
    writer.start()
    return Spill(namespace, tier, writer, DiskReader(tier))


def ancestry(node: Node[Block]) -> list[Node[Block]]:
    """Return the chain from the first block to `node`."""
    chain: list[Node[Block]] = []
    step: Node[Block] | None = node
    while step is not None:
        chain.append(step)
        step = step.parent
    return chain[::-1]


def consecutive_runs(chain: Sequence[Node[Block]]) -> list[list[Node[Block]]]:
    """Cut blocks of one chain into runs without gaps, none longer than a file may hold."""
    runs: list[list[Node[Block]]] = []
    for node in chain:
        if runs and node.parent is runs[-1][-1] and len(runs[-1]) < MAX_RUN_BLOCKS:
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs
