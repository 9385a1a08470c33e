"""What the scheduler asks of a prefix store, and the store that stores nothing; pure."""

from __future__ import annotations

from typing import Protocol

from vllm_mlx.engine.core.sequence import Sequence
from vllm_mlx.engine.core.stats import PrefixStats


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

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has left."""
        ...

    def stats(self) -> PrefixStats | None:
        """Return a snapshot, None if nothing is ever stored."""
        ...

    def clear(self) -> int:
        """Drop every stored block that is not in use; return how many."""
        ...

    def wait(self) -> None:
        """Wait a moment; called when a step has nothing to do but what `must_wait` waits for."""
        ...

    def persist(self) -> bool:
        """Store durably a little of what is worth it; return whether there is more."""
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

    def forget(self, sequence: Sequence) -> None:
        """Have nothing to drop."""

    def stats(self) -> PrefixStats | None:
        """Say that nothing is ever stored."""
        return None

    def clear(self) -> int:
        """Have nothing to drop."""
        return 0

    def wait(self) -> None:
        """Have nothing to wait for."""

    def persist(self) -> bool:
        """Have nothing to store."""
        return False

    def close(self) -> None:
        """Have nothing open."""
