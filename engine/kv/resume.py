"""Say how far a stored prefix can be resumed, by which parts its blocks have; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResumeRule:
    """Hold what a model needs of a prefix: the parts of its blocks, and its longest window."""

    block_size: int
    #: Of `kv`, `window` and `state`, those that the model's blocks can have.
    kinds: frozenset[str]
    #: Tokens that layers with a window look back at most; None without such layers.
    window: int | None = None

    def resumable(self, kinds: Sequence[frozenset[str]]) -> int:
        """Return how many blocks of a chain, whose parts are given, every layer can resume."""
        for depth in range(len(kinds), 0, -1):
            if "kv" in self.kinds and any("kv" not in has for has in kinds[:depth]):
                continue
            if "state" in self.kinds and "state" not in kinds[depth - 1]:
                continue
            if any("window" not in has for has in kinds[self._first_window(depth) : depth]):
                continue
            return depth
        return 0

    def needed(self, index: int, depth: int) -> frozenset[str]:
        """Return the parts of block `index` that resuming after `depth` blocks takes."""
        needed = self.kinds - {"window", "state"}
        if index >= self._first_window(depth):
            needed |= self.kinds & {"window"}
        if index == depth - 1:
            needed |= self.kinds & {"state"}
        return needed

    def _first_window(self, depth: int) -> int:
        """Return the first block of which windowed layers need a part."""
        if self.window is None:
            return depth
        return max(0, depth - (self.window + self.block_size - 1) // self.block_size)
