"""What the scheduler asks of a prefix store, and the store that stores nothing; pure."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from vllm_mlx.engine.core.sequence import Sequence
from vllm_mlx.engine.core.stats import CacheCleared, PrefixStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Clearing:
    """Follow the removal of stored prefixes: from RAM it is done, from SSD it may go on."""

    num_blocks: int = 0
    #: The files removed, once they are.
    num_runs: Future[int] | None = None

    def result(self) -> CacheCleared | None:
        """Return what went, None while it goes on."""
        if self.num_runs is None:
            return CacheCleared(num_blocks=self.num_blocks)
        if not self.num_runs.done():
            return None
        error = self.num_runs.exception()
        if error is not None:
            logger.error("stored prefixes could not be removed", exc_info=error)
            return CacheCleared(
                num_blocks=self.num_blocks, fault=f"{type(error).__name__}: {error}"
            )
        return CacheCleared(num_blocks=self.num_blocks, num_runs=self.num_runs.result())


class Prefixes(Protocol):
    """Know which prompt prefixes need not be computed; used by the engine thread."""

    #: Chunks of prefill stop at multiples of this many tokens and at the last whole block, where
    #: state is captured; None if they may stop anywhere.
    checkpoint_grid: int | None
    block_size: int

    def must_wait(self, sequence: Sequence) -> bool:
        """Say whether another sequence is computing what this one would then find stored."""
        ...

    def restore(self, sequence: Sequence) -> int:
        """Fill the started row's private caches with its longest stored prefix.

        Returns how many tokens that is; never all that prefill would compute and the last token.
        """
        ...

    def after_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Take what must be captured right after a chunk, or what somebody waits for."""
        ...

    def after_step(self, sequence: Sequence) -> None:
        """Take what must be captured as a running row passes the end of a block."""
        ...

    def save(self, sequence: Sequence) -> None:
        """Store the complete blocks of a row that is about to join the batch or to leave."""
        ...

    def discard(self, sequence: Sequence) -> None:
        """Drop what was stored of a row whose computation turned out to be no numbers."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has left."""
        ...

    def stats(self) -> PrefixStats | None:
        """Return a snapshot, None if nothing is ever stored."""
        ...

    def clear(self, *, ram: bool = True, ssd: bool = False) -> Clearing:
        """Remove what is stored and not in use; from SSD beside the steps that follow."""
        ...

    def evict(self, num_bytes: int) -> int:
        """Evict about so many bytes that are not in use, from RAM; return how many went."""
        ...

    def wait(self) -> None:
        """Wait a moment; called when a step has nothing to do but what `must_wait` waits for."""
        ...

    def persist(self) -> bool:
        """Store durably a little of what is worth it; return whether there is more."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Store durably all that is worth it, and wait; return whether it is done in time."""
        ...

    def close(self) -> None:
        """Store durably what is worth it, and let go of what is open."""
        ...


class NoPrefixes:
    """Store nothing: every prompt is computed."""

    checkpoint_grid: int | None = None
    block_size = 1

    def must_wait(self, sequence: Sequence) -> bool:
        """Say no: nothing is worth waiting for."""
        del sequence
        return False

    def restore(self, sequence: Sequence) -> int:
        """Find nothing."""
        del sequence
        return 0

    def after_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Capture nothing."""

    def after_step(self, sequence: Sequence) -> None:
        """Capture nothing."""

    def save(self, sequence: Sequence) -> None:
        """Store nothing."""

    def discard(self, sequence: Sequence) -> None:
        """Have nothing stored."""

    def forget(self, sequence: Sequence) -> None:
        """Have nothing to drop."""

    def stats(self) -> PrefixStats | None:
        """Say that nothing is ever stored."""
        return None

    def clear(self, *, ram: bool = True, ssd: bool = False) -> Clearing:
        """Have nothing to drop."""
        del ram, ssd
        return Clearing()

    def evict(self, num_bytes: int) -> int:
        """Have nothing to evict."""
        del num_bytes
        return 0

    def wait(self) -> None:
        """Have nothing to wait for."""

    def persist(self) -> bool:
        """Have nothing to store."""
        return False

    def flush(self, timeout_s: float) -> bool:
        """Have nothing to store."""
        del timeout_s
        return True

    def close(self) -> None:
        """Have nothing open."""
